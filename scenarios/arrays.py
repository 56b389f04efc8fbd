"""What a JAX array is made of: where it lies, how large its shards are, at which addresses."""

from contextlib import suppress
from typing import Any

from alloclab.scenarios.recorder import Placed
from alloclab.simulator.program import Aval
from alloclab.simulator.requests import SPACES

#: Memory kinds of JAX that are the host's. The CPU backend has an unpinned one, accelerators not.
_SPACE_OF_KIND = dict.fromkeys(("pinned_host", "unpinned_host"), SPACES.index("pinned_host"))


def plain(array: Any) -> Any:
    """The array under an array of PRNG keys, or under a mutable reference."""
    array = getattr(array, "_base_array", array)
    references = getattr(array, "_refs", None)
    return array if references is None else plain(references._buf)


def placed(array: Any) -> Placed:
    """Shape and bytes of a shard, devices and memory space."""
    sharding = array.sharding
    shape = tuple(sharding.shard_shape(array.shape))
    items = 1
    for each in shape:
        items *= each
    devices = tuple(device.id for device in sharding._device_assignment)
    space = _SPACE_OF_KIND.get(sharding.memory_kind or "", 0)
    return Placed(
        Aval(shape, str(array.dtype)), (items * _bits(array.dtype) + 7) // 8, devices, space
    )


def _bits(dtype: Any) -> int:
    """Bits of one element; the small types are packed (xla::ShapeUtil::ByteSizeOfElements)."""
    if dtype.name in ("int4", "uint4", "float4_e2m1fn"):
        return 4
    if dtype.name in ("int2", "uint2"):
        return 2
    return int(dtype.itemsize) * 8


def pointers(array: Any) -> dict[int, int]:
    """The address of every shard by device; without those that were deleted or have none."""
    found = {}
    with suppress(Exception):  # JAX has no type of its own for either
        for shard in array.addressable_shards:
            with suppress(Exception):
                found[shard.device.id] = shard.data.unsafe_buffer_pointer()
    return found
