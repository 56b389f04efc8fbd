"""What can be seen of a BFC pool: the chunk map, the largest free block, fragmentation."""

from typing import NamedTuple

from alloclab.policies.bfc import Bfc, bin_index
from alloclab.policies.bfc_versions import Tag


class ChunkView(NamedTuple):
    """A row of the chunk map; sizes in bytes.

    ``requested`` is 0 for free chunks; ``bin`` is -1 for chunks in use and the central gap.
    """

    address: int
    size: int
    requested: int
    in_use: bool
    bin: int
    tag: Tag


def chunk_map(pool: Bfc) -> list[ChunkView]:
    """All chunks in address order, as the real allocator's dump lists them.

    >>> from alloclab.policies.base import Request
    >>> pool = Bfc(growth=True).start(limit=1 << 30)
    >>> pool.allocate(Request(1000))
    (0, 1024)
    >>> for row in chunk_map(pool): print(*row)
    0 1024 1000 True -1 lower
    1024 2096128 0 False 12 lower
    """
    return [
        ChunkView(
            chunk.address,
            chunk.size,
            chunk.requested,
            bool(chunk.requested),
            -1 if chunk.requested or chunk.tag == "gap" else bin_index(chunk.size),
            chunk.tag,
        )
        for _, chunk in sorted(pool.chunks.items())
    ]


def largest_free_block(pool: Bfc) -> int:
    """Bytes of the largest hole or the gap (BFCAllocator::LargestFreeChunk); 0 if none is free."""
    holes = [each[-1][0] for bins in pool.bins.values() for each in bins if each]
    return max([*holes, pool.gap.size if pool.gap else 0], default=0)


def fragmentation(pool: Bfc) -> float:
    """1 - largest free block / all free bytes of the pool (BFCAllocator::GetFragmentation).

    0.0 where nothing is free; the real code divides by zero there.
    """
    free = pool.stats.pool_bytes - pool.stats.bytes_in_use
    return (free - largest_free_block(pool)) / free if free else 0.0
