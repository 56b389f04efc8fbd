"""BFC, "best fit with coalescing": the allocator that JAX uses on GPUs.

The pool is a few *regions* taken from the driver. *Chunks* tile each region; they are linked to
their neighbours, and each is in use or free. Free chunks lie in *bins* by size. A request takes
the smallest free chunk that holds it and splits off the rest; a chunk that is freed coalesces with
its free neighbours.

The *spatial* flavour (jax 0.11 and later, when preallocating) parts one region into a lower end,
an upper end and one central *gap* between them. Each end first reuses its own holes, then carves
from the gap; a chunk that is freed at the edge of the gap falls back into it.

After `tsl::BFCAllocator` (xla/tsl/framework/bfc_allocator.cc); function names below are its own.
What is left out is switched off in JAX: garbage collection of free regions, merging of touching
regions, timestamped frees, and the retry that waits 10 s for another thread to free memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import ClassVar

from alloclab.policies.base import Columns, Outcome, Placement, Policy, Request, Stats
from alloclab.policies.bfc_versions import (
    CLASSIC_ENDS,
    MIN_ALLOCATION_SIZE,
    Tag,
    is_spatial,
    rules_of,
)
from alloclab.policies.errors import InputError
from alloclab.policies.options import option
from alloclab.policies.units import MIB, align_down, align_up

#: Bin i holds free chunks of at least 256 << i bytes, the last one all from 256 MiB (kNumBins).
NUM_BINS = 21
#: The bin by the number of a size's bits; chunks have at least 9.
BIN_OF_LENGTH = [min(max(bits - 9, 0), NUM_BINS - 1) for bits in range(64)]
#: A chunk is split if at least this many bytes are left over (kDefaultMaxInternalFragmentation).
MAX_INTERNAL_FRAGMENTATION = 128 * MIB
#: The first region of a pool that grows (BFCAllocator::BFCAllocator).
FIRST_REGION = 2 * MIB
#: Importing Numba takes as long as a plain replay of about this many events (0.4 s).
COMPILED_FROM = 200_000
#: Region sizes double without end, in a size_t.
SIZE_T_MAX = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a region. ``requested`` is 0 while it is free; neighbours are in address order."""

    address: int
    size: int
    tag: Tag
    previous: "Chunk | None" = None
    next: "Chunk | None" = None
    requested: int = 0


#: A bin: (size, address) of its chunks, sorted; addresses are negated where the highest is first.
Holes = list[tuple[int, int]]


def bin_index(size: int) -> int:
    """The bin of a chunk size in bytes (BinNumForSize): 256 to 511 are in bin 0."""
    return BIN_OF_LENGTH[size.bit_length()]


class Bfc(Policy):
    """JAX's default GPU allocator: best fit with coalescing, by the rules of any jax version."""

    name = "bfc"
    works_unlimited = False
    events_replayed: ClassVar[int] = 0
    flavour: str = option("auto", "rules; auto as jax", choices=("auto", "classic", "spatial"))
    growth: bool = option(False, "grow by regions of 2, 4, 8 ... MiB; else one region at once")
    jax: str = option("0.12.0.1", "the jax version whose rules apply")
    fragmentation_fraction: float = option(
        0.0, "the share of the limit that may be left over unsplit; 0 means 128 MiB"
    )

    def setup(self) -> None:
        self.rules = rules_of(self.jax)
        self.spatial = is_spatial(self.flavour, self.jax, growth=self.growth)
        limit = self.limit or 0
        fraction = self.fragmentation_fraction
        self.max_waste = int(fraction * limit) if fraction > 0 else MAX_INTERNAL_FRAGMENTATION
        if self.limit and not self.max_waste:
            raise InputError(f"{self}: a share of {fraction} of {limit} bytes rounds to 0")
        first = min(limit, FIRST_REGION) if self.growth else limit
        self.next_region = align_up(first, MIN_ALLOCATION_SIZE)
        self.chunks: dict[int, Chunk] = {}
        self.gap: Chunk | None = None
        self.ends = self.rules.ends if self.spatial else CLASSIC_ENDS
        self.bins = {end: [Holes() for _ in range(NUM_BINS)] for end in self.ends}
        self.ordinary: Tag = self.rules.ordinary if self.spatial else "lower"
        self.collective: Tag = "lower" if self.ordinary == "upper" or not self.spatial else "upper"

    # --- allocate (AllocateRawInternal) ---------------------------------------------------

    def place(self, request: Request) -> Placement | None:
        size = align_up(request.size, MIN_ALLOCATION_SIZE)
        alignment = max(request.alignment, MIN_ALLOCATION_SIZE)
        end = self.collective if request.space == "collective" else self.ordinary
        chunk = self.find(size, alignment, end)
        if chunk is None and self.grow(size):
            chunk = self.find(size, alignment, end)
        if chunk is None:
            return None
        chunk = self.carve(chunk, size, alignment, end)
        chunk.requested = request.size
        return chunk.address, chunk.size

    def find(self, size: int, alignment: int, end: Tag) -> Chunk | None:
        """The best fit (FindChunkPtr): the smallest hole of the end that holds it, else the gap."""
        for holes in self.bins[end][bin_index(size) :]:
            if holes:
                for at in range(bisect_left(holes, (size,)), len(holes)):
                    chunk = self.chunks[abs(holes[at][1])]
                    if alignment == MIN_ALLOCATION_SIZE or self.holds(chunk, size, alignment, end):
                        return chunk
        return self.gap if self.gap and self.holds(self.gap, size, alignment, end) else None

    def holds(self, chunk: Chunk, size: int, alignment: int, end: Tag) -> bool:
        """Whether a free chunk holds a request at its alignment."""
        top = chunk.address + chunk.size - size
        if end == "upper":
            return align_down(top, alignment) >= chunk.address
        return align_up(chunk.address, alignment) <= top

    def carve(self, chunk: Chunk, size: int, alignment: int, end: Tag) -> Chunk:
        """Take a request's chunk out of a free one; what is left over stays free."""
        rules = self.ends[end]
        # The split rule (MaybeSplitChunk): how much must be left over to be split off.
        exact = rules.exact_gap if chunk.tag == "gap" else rules.exact_holes
        least = 1 if exact else min(size, self.max_waste)
        self.remove(chunk)
        start, top = align_up(chunk.address, alignment), chunk.address + chunk.size
        if end == "upper" and top - start - size >= least:
            start = align_down(top - size, alignment)
        if start > chunk.address:  # what lies below: the gap stays the gap for the upper end
            below, chunk = chunk, self.split(chunk, start - chunk.address)
            if end == "lower":
                below.tag = "lower"
            self.insert(below)
        if end == "upper":
            chunk.tag = "upper"
        if top - start - size >= least:
            self.insert(self.split(chunk, size))
        chunk.tag = end
        return chunk

    def split(self, chunk: Chunk, size: int) -> Chunk:
        """Shorten a chunk to ``size`` bytes; the rest is a new chunk with the same tag."""
        rest = Chunk(chunk.address + size, chunk.size - size, chunk.tag, chunk, chunk.next)
        chunk.size = size
        if chunk.next:
            chunk.next.previous = rest
        chunk.next = self.chunks[rest.address] = rest
        return rest

    # --- free (DeallocateRawInternal) -----------------------------------------------------

    def release(self, address: int, size: int) -> None:
        chunk = self.chunks[address]
        chunk.requested = 0
        if self.spatial:  # at the edge of its end, it falls back into the gap
            inner = chunk.next if chunk.tag == "lower" else chunk.previous
            if inner is None or inner.tag != chunk.tag:
                chunk.tag = "gap"
        if chunk.next and not chunk.next.requested:
            self.remove(chunk.next)
            self.coalesce(chunk, chunk.next)
        if chunk.previous and not chunk.previous.requested:
            self.remove(chunk.previous)
            chunk = self.coalesce(chunk.previous, chunk)
        self.insert(chunk)

    def coalesce(self, chunk: Chunk, upper: Chunk) -> Chunk:
        """Join a chunk and the one above it (Merge); those of different ends become the gap."""
        if chunk.tag != upper.tag:
            chunk.tag = "gap"
        chunk.size += upper.size
        chunk.next = upper.next
        if upper.next:
            upper.next.previous = chunk
        del self.chunks[upper.address]
        return chunk

    # --- free chunks ----------------------------------------------------------------------

    def insert(self, chunk: Chunk) -> None:
        """Put a free chunk into its bin (InsertFreeChunkIntoBin); the gap is in none."""
        if chunk.tag == "gap":
            self.gap = chunk
        else:
            insort(self.bins[chunk.tag][bin_index(chunk.size)], self.key(chunk))

    def remove(self, chunk: Chunk) -> None:
        """Take a free chunk out of its bin (RemoveFreeChunkFromBin)."""
        if chunk.tag == "gap":
            self.gap = None
        else:
            holes = self.bins[chunk.tag][bin_index(chunk.size)]
            del holes[bisect_left(holes, self.key(chunk))]

    def key(self, chunk: Chunk) -> tuple[int, int]:
        """The place of a hole in its bin."""
        return chunk.size, -chunk.address if self.ends[chunk.tag].descending else chunk.address

    # --- regions (Extend) -----------------------------------------------------------------

    def grow(self, size: int) -> bool:
        """Take a region that holds ``size`` bytes; if the driver refuses, ask it for less."""
        if self.limit is None:
            raise InputError(f"{self}: needs a limit")
        available = align_down(self.limit - self.stats.pool_bytes, MIN_ALLOCATION_SIZE)
        # A spatial pool that the driver gave in part stays so: there cannot be a second gap.
        if size > available or (self.spatial and self.regions):
            return False
        doubled = size > self.next_region
        while 0 < self.next_region < size:
            self.next_region = self.next_region * 2 & SIZE_T_MAX
        if not self.next_region:
            return False  # doubled until it overflowed to 0: the real code loops forever
        asked = min(self.next_region, available)
        while (address := self.reserve(asked)) is None:
            less = self.rules.backed_off(asked)
            if less < size or less == asked:  # the same again: the real code loops forever
                return False
            asked = less
        if not doubled:
            self.next_region = self.next_region * 2 & SIZE_T_MAX
        chunk = self.chunks[address] = Chunk(address, asked, "gap" if self.spatial else "lower")
        self.insert(chunk)
        return True

    def replay_columns(self, columns: Columns) -> Outcome | None:
        Bfc.events_replayed += len(columns.slot)
        if Bfc.events_replayed < COMPILED_FROM:
            return None
        try:
            from alloclab.policies import bfc_kernel
        except ImportError:  # Numba is not installed
            return None
        return bfc_kernel.replay(self, columns)

    def memory_stats(self, stats: Stats, limit: int | None, largest_free: int) -> dict[str, int]:
        known = largest_free if self.rules.reports_largest_free else 0
        return super().memory_stats(stats, limit, known)
