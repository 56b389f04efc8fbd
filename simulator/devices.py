"""Devices by short name or from a file: their memory, and the limit that JAX sets itself there."""

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from alloclab.policies.errors import InputError
from alloclab.policies.units import MIB, align_up, parse_size
from alloclab.simulator.environment import AllocatorEnvironment


@dataclass(frozen=True)
class Device:
    """One device as JAX sees it; see devices.toml for units. Unknown figures are None."""

    name: str
    kind: Literal["gpu", "tpu", "cpu"]
    summary: str = ""
    aliases: tuple[str, ...] = ()
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    bandwidth: float | None = None
    host_bandwidth: float | None = None
    compute_capability: str | None = None
    cores: int | None = None
    generation: int | None = None
    megacore: bool = False
    vmem: int | None = None
    smem: int | None = None
    cmem: int | None = None
    scoped_vmem_limit: int | None = None
    peak: dict[str, float] = field(default_factory=dict)
    source: str = ""


@cache
def known_devices() -> tuple[Device, ...]:
    """All built-in devices."""
    file = Path(__file__).with_name("devices.toml")
    return tuple(_devices(file))


def load_device(name: str) -> Device:
    """A device by short name or alias, or from a TOML file that describes exactly one.

    Raises:
        InputError: there is no such device, or the file is not valid.

    >>> load_device("h100").kind, load_device("a100").name
    ('gpu', 'a100-40')
    """
    for device in known_devices():
        if name.lower() in (device.name, *device.aliases):
            return device
    path = Path(name)
    if path.suffix != ".toml":
        known = ", ".join(device.name for device in known_devices())
        raise InputError(f"device {name!r} is unknown; known: {known}, or a .toml file")
    found = _devices(path)
    if len(found) != 1:
        raise InputError(f"{path}: describes {len(found)} devices, expected one table [name]")
    return found[0]


def bytes_limit(device: Device, environment: AllocatorEnvironment) -> int | None:
    """The bytes that the device's allocator may use, None for no limit.

    On a GPU: total memory times the fraction, cut to whole bytes, and rounded up to 2 MiB by jaxlib
    0.11 and later (xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator). On a TPU what the compiler
    leaves of HBM.

    >>> from alloclab.simulator.environment import read_environment
    >>> bytes_limit(load_device("t4"), read_environment({}, "0.10.2"))
    11882790912
    """
    if device.limit_bytes is not None or device.memory_bytes is None:
        return device.limit_bytes
    limit = int(device.memory_bytes * environment.memory_fraction)
    return align_up(limit, 2 * MIB) if environment.jax >= (0, 11) else limit


def _devices(file: Path) -> list[Device]:
    try:
        tables = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: not a readable TOML file: {error}") from None
    return [_device(file, name, table) for name, table in tables.items()]


_NUMBERS = {"bandwidth": float, "host_bandwidth": float}
_SIZES = {"memory_bytes", "limit_bytes", "vmem", "smem", "cmem", "scoped_vmem_limit"}
_COUNTS = {"cores", "generation"}
_TEXTS = {"summary", "compute_capability", "source"}


def _device(file: Path, name: str, table: Any) -> Device:
    if not isinstance(table, dict):
        raise InputError(f"{file}: {name} = {table!r}: expected a table [{name}]")
    known = {each.name for each in fields(Device)} - {"name"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise InputError(f"{file}: [{name}] {key}: unknown; known: {', '.join(sorted(known))}")
        values[key] = _value(f"{file}: [{name}] {key} = {value!r}", key, value)
    if values.get("kind") not in ("gpu", "tpu", "cpu"):
        raise InputError(f"{file}: [{name}] kind: expected gpu, tpu or cpu")
    if values["kind"] != "cpu" and not values.get("memory_bytes"):
        raise InputError(f"{file}: [{name}] memory_bytes: expected bytes or text such as 16GiB")
    return Device(name=name, **values)


def _value(place: str, key: str, value: Any) -> Any:
    """The value of a key, checked; sizes may be text such as 16GiB."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if key in _SIZES:
        if isinstance(value, str):
            return parse_size(value)
        if number and isinstance(value, int):
            return value
        raise InputError(f"{place}: expected bytes, or text such as 16GiB")
    if key in _NUMBERS and number:
        return float(value)
    if key in _COUNTS and number and isinstance(value, int):
        return value
    if key in _TEXTS and isinstance(value, str):
        return value
    if key == "megacore" and isinstance(value, bool):
        return value
    if key == "aliases" and isinstance(value, list):
        return tuple(map(str, value))
    if key == "peak" and isinstance(value, dict):
        return {kind: float(_value(place, "bandwidth", rate)) for kind, rate in value.items()}
    if key == "kind":
        return value
    raise InputError(f"{place}: not a valid value")
