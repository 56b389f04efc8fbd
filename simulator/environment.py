"""The environment variables that JAX reads for its allocators on a GPU, with their meaning per
version.

Two readers: Python (jaxlib/xla_client.py, generate_pjrt_gpu_plugin_options; the same in jaxlib
0.10.2, 0.11.0, 0.11.2 and 0.12.0.1 except where a version is named here) refuses bad values, XLA's
own (xla/tsl/util/env_var.cc) logs an error and goes on with the default.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, MIB

Allocator = Literal["bfc", "cuda_async", "platform", "vmm"]

#: The jax whose rules apply where none is named.
NEWEST_JAX = "0.12.0.1"

#: GpuAllocatorConfig (xla/pjrt/gpu/allocator_config.h).
DEFAULT_MEMORY_FRACTION = 0.75

#: GetGpuHostAllocator (xla/pjrt/gpu/gpu_helpers.cc): in GiB, growing and preallocated.
_HOST_LIMIT_GB, _HOST_PREALLOCATED_GB = 64, 16

#: What each name of an allocator means, and the first jax that takes it.
_ALLOCATORS: dict[str, tuple[Allocator, tuple[int, ...]]] = {
    "default": ("bfc", ()),
    "bfc": ("bfc", ()),
    "cuda_async": ("cuda_async", ()),
    "platform": ("platform", ()),
    "vmm": ("vmm", (0, 10)),
    "address": ("platform", (0, 11)),
}

#: From here on one pool serves ordinary and collective memory, from its two ends.
_SPATIAL = (0, 11)

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_COLLECTIVE = "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"
_ASYNC_PREALLOCATE = "TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC"

#: Variables without effect, for which a better one exists. The CUDA plugin (0.10.2 to 0.12.0.1)
#: holds the first and third in messages only, the second not at all.
_IGNORED = {
    "TF_GPU_ALLOCATOR": "is in JAX's documentation but nothing reads it; use "
    "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
    "TF_FORCE_GPU_ALLOW_GROWTH": f"is TensorFlow's; use {_PREALLOCATE}=false",
    "TF_ENABLE_GPU_GARBAGE_COLLECTION": "is TensorFlow's; JAX's BFC allocator never gives memory "
    "back",
}
_NOT_MODELLED = (
    "TF_DETERMINISTIC_ALLOCATOR",
    "TF_PER_DEVICE_MEMORY_LIMIT_MB",
    "XLA_PJRT_GPU_ALLOW_DELETE_BEFORE_FULFILL",
)


@dataclass(frozen=True)
class AllocatorEnvironment:
    """What the environment makes of JAX's allocators on a GPU; sizes in bytes.

    Attributes:
        jax: the version, as numbers.
        allocator: of device memory.
        preallocate: whether the pool is taken as a whole at the first allocation.
        memory_fraction: share of the device's memory, as XLA gets it: a 32-bit float.
        collective_memory_bytes: to preallocate for collective memory, 0 for a pool that grows.
        spatial_partitioning: XLA's flag of that name.
        host_memory_limit_bytes, host_preallocate: the pool of pinned host memory.
        async_dispatch: whether executions are launched from a thread of their own.
        unified_memory: whether the BFC pool may spill to host memory.
        notes: traps in words: variables without effect, or with another than documented.
    """

    jax: tuple[int, ...]
    allocator: Allocator = "bfc"
    preallocate: bool = True
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    collective_memory_bytes: int = 0
    spatial_partitioning: bool = True
    host_memory_limit_bytes: int = _HOST_LIMIT_GB * GIB
    host_preallocate: bool = False
    async_dispatch: bool = False
    unified_memory: bool = False
    notes: tuple[str, ...] = ()

    @property
    def flavour(self) -> Literal["classic", "spatial"]:
        """Which BFC: ``spatial`` since jaxlib 0.11, if preallocated and not flagged off
        (xla/pjrt/gpu/se_gpu_pjrt_client.cc)."""
        spatial = self.jax >= _SPATIAL and self.spatial_partitioning
        return "spatial" if spatial and self.preallocate and self.allocator == "bfc" else "classic"


def parse_version(text: str) -> tuple[int, ...]:
    """The version as numbers; ``.dev`` and the like at its end are left out.

    >>> parse_version("0.12.0.1"), parse_version("0.11.0.dev20260601")
    ((0, 12, 0, 1), (0, 11, 0))
    """
    match = re.fullmatch(r"(\d+(?:\.\d+){1,3})(?:[.+]?[a-z].*)?", text, re.ASCII)
    if match is None:
        raise InputError(f"jax version {text!r}: expected one such as 0.10.2")
    return tuple(map(int, match[1].split(".")))


def read_environment(
    variables: Mapping[str, str], jax_version: str = NEWEST_JAX
) -> AllocatorEnvironment:
    """What these variables mean to a jax version.

    Raises:
        InputError: a value that JAX refuses too, or a share of the memory that no device can give.

    >>> read_environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).flavour
    'classic'
    >>> read_environment({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}).notes
    ("TF_FORCE_GPU_ALLOW_GROWTH is TensorFlow's; use XLA_PYTHON_CLIENT_PREALLOCATE=false",)
    """
    version = parse_version(jax_version)
    notes: list[str] = []
    allocator = _allocator(variables, version)
    # Python's test, which takes FALSE, no and off for true.
    preallocate = variables.get(_PREALLOCATE) not in ("false", "False", "0")
    unified = _xla_bool("TF_FORCE_UNIFIED_MEMORY", variables, notes)
    fraction = _fraction(variables, oversubscribe=unified and allocator == "bfc")
    host_preallocate = _xla_bool("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", variables, notes)
    host_default = _HOST_PREALLOCATED_GB if host_preallocate else _HOST_LIMIT_GB
    host_gb = _xla_int("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", variables, host_default, notes)
    _python_flag("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", variables)
    environment = AllocatorEnvironment(
        jax=version,
        allocator=allocator,
        preallocate=preallocate,
        memory_fraction=fraction,
        collective_memory_bytes=_python_int(_COLLECTIVE, variables) * MIB,
        spatial_partitioning=_flag(variables, "xla_gpu_enable_allocator_spatial_partitioning"),
        host_memory_limit_bytes=host_gb * GIB,
        host_preallocate=host_preallocate,
        # Not through XLA's reader: only 1 counts (GetStreamExecutorGpuClient).
        async_dispatch=variables.get("PJRT_GPU_ENABLE_ASYNC_DISPATCH") == "1"
        or _python_flag("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", variables),
        unified_memory=unified and allocator == "bfc",
    )
    return replace(environment, notes=(*notes, *_traps(variables, environment)))


def _allocator(variables: Mapping[str, str], version: tuple[int, ...]) -> Allocator:
    name = variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    known = [each for each, (_, since) in _ALLOCATORS.items() if version >= since]
    if name not in known:
        text = ".".join(map(str, version))
        raise InputError(
            f"XLA_PYTHON_CLIENT_ALLOCATOR={name}: expected one of {', '.join(known)} (jax {text})"
        )
    return _ALLOCATORS[name][0]


def _fraction(variables: Mapping[str, str], *, oversubscribe: bool) -> float:
    if variables.get(_FRACTION) and variables.get(_OLD_FRACTION):
        raise InputError(
            f"{_FRACTION} and {_OLD_FRACTION} are both set: expected the first alone, as JAX does"
        )
    name = _FRACTION if variables.get(_FRACTION) else _OLD_FRACTION
    text = variables.get(name)
    if not text:
        return DEFAULT_MEMORY_FRACTION
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= (1e6 if oversubscribe else 1):
        raise InputError(f"{name}={text}: expected a share between 0 and 1, such as 0.9")
    # It crosses the PJRT C API as a float (PJRT_NamedValue_kFloat).
    return float(struct.unpack("f", struct.pack("f", fraction))[0])


def _traps(variables: Mapping[str, str], environment: AllocatorEnvironment) -> list[str]:
    allocator, preallocate = environment.allocator, environment.preallocate
    value = variables.get(_PREALLOCATE, "")
    fraction_set = bool(variables.get(_FRACTION) or variables.get(_OLD_FRACTION))
    unlimited = allocator == "cuda_async"
    briefly = unlimited and not preallocate
    traps = [
        (bool(variables.get(_OLD_FRACTION)), f"{_OLD_FRACTION} is deprecated; use {_FRACTION}"),
        (
            preallocate and value.lower() in ("false", "no", "off", "n", "f"),
            f"{_PREALLOCATE}={value} leaves preallocation on; only false, False and 0 do not",
        ),
        (
            allocator in ("platform", "vmm") and bool(value),
            f"{_PREALLOCATE} has no effect with the {allocator} allocator",
        ),
        (
            allocator == "platform" and fraction_set,
            "the memory fraction has no effect with the platform allocator",
        ),
        (
            unlimited and preallocate,
            "cuda_async keeps the memory fraction in reserve but is not limited to it",
        ),
        (
            briefly,
            "cuda_async without preallocation gives memory back at every synchronisation, and its "
            "memory_stats() report a bytes_limit of 0",
        ),
        (
            _ASYNC_PREALLOCATE in variables and not briefly,
            f"{_ASYNC_PREALLOCATE} has an effect only with the cuda_async allocator and "
            f"{_PREALLOCATE}=false",
        ),
        (
            _ASYNC_PREALLOCATE in variables and briefly,
            f"{_ASYNC_PREALLOCATE} reserves memory only until the next synchronisation, and none "
            "at all with -1",
        ),
        (
            "TF_FORCE_UNIFIED_MEMORY" in variables and allocator != "bfc",
            f"TF_FORCE_UNIFIED_MEMORY has no effect with the {allocator} allocator",
        ),
        (
            environment.collective_memory_bytes > 0 and environment.flavour == "spatial",
            f"{_COLLECTIVE} has no effect since jaxlib 0.11 when preallocating: collective memory "
            "is the other end of the same pool",
        ),
    ]
    return [
        *(f"{name} {why}" for name, why in _IGNORED.items() if name in variables),
        *(f"{name} is not modelled" for name in _NOT_MODELLED if name in variables),
        *(text for sprung, text in traps if sprung),
    ]


def _python_int(name: str, variables: Mapping[str, str]) -> int:
    """As Python's int; empty is unset."""
    text = variables.get(name)
    if not text:
        return 0
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise InputError(f"{name}={text}: expected a whole number")
    return value


def _python_flag(name: str, variables: Mapping[str, str]) -> bool:
    """As bool(int(...)), which refuses ``true``."""
    text = variables.get(name, "0")
    try:
        return bool(int(text))
    except ValueError:
        raise InputError(f"{name}={text}: expected 0 or 1") from None


def _xla_bool(name: str, variables: Mapping[str, str], notes: list[str]) -> bool:
    """tsl::ReadBoolFromEnvVar, false by default."""
    text = variables.get(name, "").lower()
    if text not in ("", "0", "1", "false", "true"):
        notes.append(f"{name}={text} is not understood and counts as unset; expected true or false")
    return text in ("1", "true")


def _xla_int(name: str, variables: Mapping[str, str], default: int, notes: list[str]) -> int:
    """tsl::ReadInt64FromEnvVar."""
    text = variables.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII):
        notes.append(f"{name}={text} is not understood and counts as unset; expected whole GiB")
        return default
    return int(text)


def _flag(variables: Mapping[str, str], name: str) -> bool:
    """A boolean flag in XLA_FLAGS that is true by default; the last one counts."""
    found = re.findall(rf"(?<!\S)--{name}(?:=(\S*))?(?!\S)", variables.get("XLA_FLAGS", ""))
    return not found or found[-1].lower() not in ("false", "0")
