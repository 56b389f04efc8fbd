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
from alloclab.policies.bfc_versions import MIN_ALLOCATION_SIZE, EndRules, Tag, is_spatial, rules_of
from alloclab.policies.errors import InputError
from alloclab.policies.options import option
from alloclab.policies.units import MIB, align_down, align_up

#: Bin i holds free chunks of at least 256 << i bytes, the last one all from 256 MiB (kNumBins).
NUM_BINS = 21
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


#: A bin: (size, address) of its chunks, sorted; the address is negated at an end where of equal
#: sizes the highest comes first.
Holes = list[tuple[int, int]]

#: The one end of the classic flavour.
CLASSIC: dict[Tag, EndRules] = {"lower": EndRules()}


def bin_index(size: int) -> int:
    """The bin of a chunk size in bytes (BinNumForSize).

    >>> bin_index(256), bin_index(511), bin_index(512), bin_index(1 << 40)
    (0, 0, 1, 20)
    """
    return min(NUM_BINS - 1, (size // MIN_ALLOCATION_SIZE).bit_length() - 1)


class Bfc(Policy):
    """JAX's default GPU allocator: best fit with coalescing, by the rules of any jax version."""

    name = "bfc"
    works_unlimited = False
    flavour: str = option(
        "auto", "which rules; auto as jax chooses", choices=("auto", "classic", "spatial")
    )
    growth: bool = option(False, "grow by regions of 2, 4, 8 ... MiB; else one region at once")
    jax: str = option("0.12.0.1", "the jax version whose rules apply")
    events_replayed: ClassVar[int] = 0
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
        self.ends = self.rules.ends if self.spatial else CLASSIC
        self.bins = {end: [Holes() for _ in range(NUM_BINS)] for end in self.ends}
        self.ordinary: Tag = self.rules.ordinary if self.spatial else "lower"
        self.collective: Tag = "lower" if self.ordinary == "upper" or not self.spatial else "upper"

    # --- allocate (AllocateRawInternal) ---------------------------------------------------

    def place(self, request: Request) -> Placement | None:
        size = align_up(request.size, MIN_ALLOCATION_SIZE)
        alignment = max(request.alignment, MIN_ALLOCATION_SIZE)
        end = self.collective if request.space == "collective" else self.ordinary
        chunk = self.find(size, alignment, end)
        if chunk is None:
            if not self.grow(size):
                return None
            chunk = self.find(size, alignment, end)
            if chunk is None:  # the new region starts at an address that aligns badly
                return None
        chunk = self.carve(chunk, size, alignment, end)
        chunk.requested = request.size
        return chunk.address, chunk.size

    def find(self, size: int, alignment: int, end: Tag) -> Chunk | None:
        """The best fit (FindChunkPtr): the smallest hole of the end that holds it, else the gap."""
        for holes in self.bins[end][bin_index(size) :]:
            if not holes:
                continue
            for at in range(bisect_left(holes, (size,)), len(holes)):
                chunk = self.chunks[abs(holes[at][1])]
                if self.start_in(chunk, size, alignment, end) is not None:
                    return chunk
        gap = self.gap
        return gap if gap and self.start_in(gap, size, alignment, end) is not None else None

    def start_in(self, chunk: Chunk, size: int, alignment: int, end: Tag) -> int | None:
        """Where in a free chunk a request would start, or None if it does not fit there."""
        top = chunk.address + chunk.size - size
        if end == "upper":
            start = align_down(top, alignment)
            return start if start >= chunk.address else None
        start = align_up(chunk.address, alignment)
        return start if start <= top else None

    def carve(self, chunk: Chunk, size: int, alignment: int, end: Tag) -> Chunk:
        """Take a request's chunk out of a free one; what is left over stays free."""
        rules = self.ends[end]
        exact = rules.exact_gap if chunk.tag == "gap" else rules.exact_holes

        def splits(available: int) -> bool:
            """The split rule (MaybeSplitChunk): is the rest worth a chunk of its own?"""
            rest = available - size
            return rest > 0 if exact else rest >= size or rest >= self.max_waste

        self.remove(chunk)
        start = align_up(chunk.address, alignment)
        if end == "upper" and splits(chunk.address + chunk.size - start):
            start = align_down(chunk.address + chunk.size - size, alignment)
        if start > chunk.address:  # what lies below: the gap stays the gap for the upper end
            below, chunk = chunk, self.split(chunk, start - chunk.address)
            if end == "lower":
                below.tag = "lower"
            self.insert(below)
        if end == "upper":
            chunk.tag = "upper"
        if splits(chunk.size):
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
            insort(*self.bin_and_key(chunk))

    def remove(self, chunk: Chunk) -> None:
        """Take a free chunk out of its bin (RemoveFreeChunkFromBin)."""
        if chunk.tag == "gap":
            self.gap = None
        else:
            holes, key = self.bin_and_key(chunk)
            del holes[bisect_left(holes, key)]

    def bin_and_key(self, chunk: Chunk) -> tuple[Holes, tuple[int, int]]:
        address = -chunk.address if self.ends[chunk.tag].descending else chunk.address
        return self.bins[chunk.tag][bin_index(chunk.size)], (chunk.size, address)

    # --- regions (Extend) -----------------------------------------------------------------

    def grow(self, size: int) -> bool:
        """Take a region that holds ``size`` bytes; if the driver refuses, ask it for less."""
        if self.limit is None:
            raise InputError(f"{self}: needs a limit")
        available = align_down(self.limit - self.stats.pool_bytes, MIN_ALLOCATION_SIZE)
        if size > available:
            return False
        if self.spatial and self.regions:  # the driver gave it in part; a second gap cannot be
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
        chunk = Chunk(address, asked, "gap" if self.spatial else "lower")
        self.chunks[address] = chunk
        self.insert(chunk)
        return True

    # --- whole streams --------------------------------------------------------------------

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
