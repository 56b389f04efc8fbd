"""Devices by short name or from a file: their memory, and the limit that JAX sets itself there."""

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from alloclab.policies.errors import InputError
from alloclab.policies.units import MAX_BYTES, MIB, align_up, parse_size
from alloclab.simulator.environment import AllocatorEnvironment

Kind = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True)
class Device:
    """One device as JAX sees it. What is not known is None; ``devices.toml`` says more of each.

    Attributes:
        name, aliases: the short names; ``summary`` is the name for people.
        memory_bytes: of the device, as its driver reports it; None for no limit.
        reserved_bytes: of these, kept from programs by a TPU's compiler.
        context_bytes: taken outside of JAX's pool, by the CUDA context and libraries.
        granularity_bytes: the driver's granule.
        bandwidth, host_bandwidth: bytes/s of the device's memory and of its link to the host.
        peak: operations/s by type (``f32``, ``tf32``, ``bf16``, ``f16``, ``f8``, ``s8``, ...).
        compute_capability, cores: of a GPU.
        generation: of a TPU: 2 for v2 ... 7 for v7x.
        tensorcores_per_chip, devices_per_chip: of a TPU; ``megacore`` if its TensorCores are one
            JAX device.
        lanes, sublanes: of a TPU's vector registers.
        vmem_bytes, smem_bytes, cmem_bytes: on-chip memories of one TensorCore.
        scoped_vmem_limit_bytes: what a program may use of VMEM unless told otherwise.
        source: where each group of figures is from.
    """

    name: str
    kind: Kind
    summary: str = ""
    aliases: tuple[str, ...] = ()
    memory_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    granularity_bytes: int | None = None
    bandwidth: float | None = None
    host_bandwidth: float | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    compute_capability: str | None = None
    cores: int | None = None
    generation: int | None = None
    tensorcores_per_chip: int | None = None
    devices_per_chip: int | None = None
    megacore: bool = False
    lanes: int | None = None
    sublanes: int | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    cmem_bytes: int | None = None
    scoped_vmem_limit_bytes: int | None = None
    source: Mapping[str, str] = field(default_factory=dict)


@cache
def known_devices() -> tuple[Device, ...]:
    """All built-in devices."""
    return tuple(_devices(Path(__file__).with_name("devices.toml")))


def load_device(name_or_path: str | Path) -> Device:
    """A device by short name or alias, or from a TOML file that describes exactly one.

    In a file, sizes may be bytes or text: ``memory_bytes = "16GiB"``.

    Raises:
        InputError: there is no such device, or the file is not valid.

    >>> load_device("h100").kind, load_device("a100").name
    ('gpu', 'a100-40')
    >>> load_device("h1000")
    Traceback (most recent call last):
    alloclab.policies.errors.InputError: device 'h1000' is unknown; known: v100, ..., cpu, or ...
    """
    name = str(name_or_path)
    for device in known_devices():
        if name.lower() in (device.name, *device.aliases):
            return device
    path = Path(name)
    if path.suffix != ".toml":
        known = ", ".join(device.name for device in known_devices())
        raise InputError(
            f"device {name!r} is unknown; known: {known}, or a file of your own that ends in .toml"
        )
    found = _devices(path)
    if len(found) != 1:
        raise InputError(f"{path}: describes {len(found)} devices, expected one table [name]")
    return found[0]


def bytes_limit(device: Device, environment: AllocatorEnvironment) -> int | None:
    """The bytes that the device's allocator may use, None for no limit.

    On a GPU: total memory times the fraction, cut to whole bytes; jaxlib 0.11 and later round a
    BFC pool up to 2 MiB (xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator). With unified memory the
    fraction counts as at least 1. ``platform`` and ``cuda_async`` have no limit but the device's
    (allocators set with ``XLA_PYTHON_CLIENT_ALLOCATOR``). On a TPU: the memory less the reserve.

    >>> from alloclab.simulator.environment import read_environment
    >>> bytes_limit(load_device("t4"), read_environment({}, "0.10.2"))
    11882790912
    """
    total = device.memory_bytes
    if total is None or device.kind == "cpu":
        return total
    if device.kind == "tpu":
        return total - (device.reserved_bytes or 0)
    if environment.allocator in ("platform", "cuda_async"):
        return total
    fraction = environment.memory_fraction
    limit = int(total * (max(1.0, fraction) if environment.unified_memory else fraction))
    if environment.allocator == "bfc" and environment.jax >= (0, 11):
        return align_up(limit, 2 * MIB)
    return limit


def _devices(file: Path) -> list[Device]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: not a TOML file: {error}") from None
    return [_device(file, name, table) for name, table in tables.items()]


def _device(file: Path, name: str, table: Any) -> Device:
    if not isinstance(table, dict):
        raise InputError(f"{file}: {name} = {table!r}: expected a table [{name}] of figures")
    types_of = typing.get_type_hints(Device)
    known = [each.name for each in fields(Device) if each.name != "name"]
    values: dict[str, Any] = {}
    for key, value in table.items():
        place = f"{file}: [{name}] {key}"
        if key not in known:
            raise InputError(f"{place}: unknown; known: {', '.join(known)}")
        values[key] = _value(place, value, types_of[key], size=key.endswith("_bytes"))
    kind = values.get("kind")
    if kind is None:
        raise InputError(f"{file}: [{name}] kind: missing; expected gpu, tpu or cpu")
    if kind != "cpu" and "memory_bytes" not in values:
        raise InputError(
            f"{file}: [{name}] memory_bytes: missing; expected bytes or text such as 16GiB"
        )
    if values.get("reserved_bytes", 0) >= values.get("memory_bytes", MAX_BYTES):
        raise InputError(
            f"{file}: [{name}] reserved_bytes = {values['reserved_bytes']}: expected less than "
            f"memory_bytes, {values['memory_bytes']}"
        )
    return Device(name=name, **values)


def _value(place: str, value: Any, kind: Any, *, size: bool = False) -> Any:
    """A figure as the type of its field, or an error that says what that is."""
    if kind == Kind:
        if value not in typing.get_args(Kind):
            raise InputError(f"{place} = {value!r}: expected gpu, tpu or cpu")
        return value
    if typing.get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{place} = {value!r}: expected a table, such as {{ f32 = 1e12 }}")
        (_, item) = typing.get_args(kind)
        return {key: _value(f"{place}.{key}", each, item) for key, each in value.items()}
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InputError(f"{place} = {value!r}: expected a list of names")
        return tuple(value)
    if typing.get_origin(kind) is types.UnionType:  # `int | None`; TOML has no None
        kind = typing.get_args(kind)[0]
    if size and isinstance(value, str):
        try:
            value = parse_size(value)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            expected = "true or false" if kind is bool else "text in quotes"
            raise InputError(f"{place} = {value!r}: expected {expected}")
        return value
    number = isinstance(value, int | float if kind is float else int)
    if not number or isinstance(value, bool) or not 0 < value < MAX_BYTES:
        expected = "bytes, or text such as 16GiB" if size else "a number above 0"
        raise InputError(f"{place} = {value!r}: expected {expected}")
    return kind(value)
