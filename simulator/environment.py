"""The environment variables that JAX reads for its allocators, with their meaning per version."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, MIB

Allocator = Literal["bfc", "cuda_async", "platform", "vmm"]

#: GpuAllocatorConfig (xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h).
DEFAULT_MEMORY_FRACTION = 0.75

_ALLOCATORS: dict[str, Allocator] = {
    "default": "bfc",
    "bfc": "bfc",
    "cuda_async": "cuda_async",
    "platform": "platform",
    "address": "platform",  # an alias since "address" lost its own meaning
    "vmm": "vmm",
}

#: Variables that JAX's documentation names and no code of JAX or XLA reads.
_IGNORED = {
    "TF_GPU_ALLOCATOR": "is documented by JAX but read nowhere in it; "
    "use XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
}


@dataclass(frozen=True)
class AllocatorEnvironment:
    """What the environment makes of JAX's allocators on a GPU; sizes in bytes.

    ``notes`` are the traps in words: variables without effect, or with another than documented.
    """

    jax: tuple[int, ...]
    allocator: Allocator = "bfc"
    preallocate: bool = True
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    collective_memory_bytes: int = 0
    host_memory_limit_bytes: int = 64 * GIB
    host_preallocate: bool = False
    async_dispatch: bool = False
    unified_memory: bool = False
    notes: tuple[str, ...] = ()

    @property
    def flavour(self) -> Literal["classic", "spatial"]:
        """Which BFC: spatial with preallocation since jaxlib 0.11."""
        return "spatial" if self.jax >= (0, 11) and self.preallocate else "classic"


def parse_version(text: str) -> tuple[int, ...]:
    """The version as numbers.

    >>> parse_version("0.12.0.1")
    (0, 12, 0, 1)
    """
    if not re.fullmatch(r"\d+(\.\d+){1,3}", text):
        raise InputError(f"jax version {text!r}: expected one such as 0.10.2")
    return tuple(map(int, text.split(".")))


def read_environment(variables: Mapping[str, str], jax: str) -> AllocatorEnvironment:
    """What these variables mean to a jax version (jaxlib/xla_client.py,
    generate_pjrt_gpu_plugin_options; xla/pjrt/c/pjrt_c_api_gpu_internal.cc).

    Raises:
        InputError: a value that JAX refuses too.

    >>> read_environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "0.12.0.1").flavour
    'classic'
    """
    version = parse_version(jax)
    notes = [f"{name} {why}" for name, why in _IGNORED.items() if name in variables]
    name = variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if name not in _ALLOCATORS:
        known = ", ".join(_ALLOCATORS)
        raise InputError(f"XLA_PYTHON_CLIENT_ALLOCATOR={name}: expected one of {known}")
    allocator = _ALLOCATORS[name]
    preallocate = variables.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in ("false", "False", "0")
    if allocator == "platform" and "XLA_PYTHON_CLIENT_PREALLOCATE" in variables:
        notes.append("XLA_PYTHON_CLIENT_PREALLOCATE has no effect with the platform allocator")
    if allocator == "cuda_async" and not preallocate:
        notes.append("cuda_async without preallocation gives memory back at each synchronisation")
    collective = _whole("XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB", variables, 0) * MIB
    if collective and version >= (0, 11) and preallocate:
        notes.append(
            "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB has no effect since jaxlib 0.11 when "
            "preallocating: collective memory is the other end of the same pool"
        )
    host_preallocate = _true("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", variables)
    host_limit = _whole("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", variables, 0) * GIB
    return AllocatorEnvironment(
        jax=version,
        allocator=allocator,
        preallocate=preallocate,
        memory_fraction=_fraction(variables),
        collective_memory_bytes=collective,
        host_memory_limit_bytes=host_limit or (16 if host_preallocate else 64) * GIB,
        host_preallocate=host_preallocate,
        async_dispatch=_true("PJRT_GPU_ENABLE_ASYNC_DISPATCH", variables)
        or _true("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", variables),
        unified_memory=_true("TF_FORCE_UNIFIED_MEMORY", variables),
        notes=tuple(notes),
    )


def _fraction(variables: Mapping[str, str]) -> float:
    new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if variables.get(new) and variables.get(old):
        raise InputError(f"{new} and {old} are both set; JAX refuses that, keep the first")
    name = new if variables.get(new) else old
    text = variables.get(name)
    if not text:
        return DEFAULT_MEMORY_FRACTION
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1
    unified = _true("TF_FORCE_UNIFIED_MEMORY", variables)
    if not 0 < fraction <= (1e6 if unified else 1):
        raise InputError(f"{name}={text}: expected a share between 0 and 1, such as 0.9")
    return max(1.0, fraction) if unified else fraction


def _whole(name: str, variables: Mapping[str, str], default: int) -> int:
    text = variables.get(name, str(default))
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name}={text}: expected a whole number")
    return int(text)


def _true(name: str, variables: Mapping[str, str]) -> bool:
    return variables.get(name, "").lower() in ("1", "true")
