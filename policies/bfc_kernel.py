"""The compiled form of `alloclab.policies.bfc.Bfc`: a whole request stream in one Numba loop.

Sizes and addresses are in units of 256 bytes, so that they fit int32 (pools below 512 GiB). A chunk
is a record of eight int32; its *handle* is the index of the first, and a field of it is
``chunks[h + SIZE]``. Record 0 stands for "no chunk": it counts as in use and ends every region.

Bins do not change where a request goes, so holes are found faster here: every power of two of sizes
has 256 *classes*, a bitmap of two levels tells which are not empty, and a class with more than one
hole is a digital search tree on the *key* (size, address), threaded through the records.

Helpers take raw pointers: with arrays Numba counts references in the event loop, at four times the
run time. docs/explanation/fast-replay.md tells what else was tried and measured.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic

from alloclab.policies.base import Columns, Driver, Outcome, Region, Stats
from alloclab.policies.bfc_versions import BACKPEDAL_FACTOR, MIN_ALLOCATION_SIZE, Tag

if TYPE_CHECKING:
    from alloclab.policies.bfc import Bfc

UNIT_BITS = 8
MAX_UNITS = 1 << 31
#: log2 of the classes per power of two, and of the classes of one end (some stay unused).
CLASS_BITS, END_BITS = 8, 13
#: More regions than a pool can have: each doubles the next one's size, 56 times until it overflows.
MAX_REGIONS = 64
#: Events between the prefetch of a record and its use.
AHEAD = 8

# Fields of a record. UP is the parent in the class's tree; 0 at its root and for the gap.
SIZE, ADDRESS, PREVIOUS, NEXT, LEFT, RIGHT, UP, TAG = range(8)
RECORD = 8
USED = -2  # UP of a chunk in use
LOWER, UPPER, GAP, NO_TAG = range(4)

# What the pool is (int64, bytes); from LIMIT on it does not change.
SPARE = 0  # a record to use again; more are linked through NEXT
FRESH = 1  # the first record never used
CENTRAL = 2  # handle of the central gap, or 0
TAKEN_BYTES = 3  # from the driver
NEXT_REGION = 4  # a size_t
NEXT_ADDRESS = 5
DRIVER_CALLS = 6
NUM_REGIONS = 7
LIMIT = 8
CAPACITY = 9
LARGEST = 10
DRIVER_GAP = 11
BACKS_OFF_DOWN = 12
BACKS_OFF_ALWAYS = 13
NEW_TAG = 14  # tag of a new region
MAX_WASTE = 15  # units
KEY_SHIFT = 16  # addresses are shifted left so that keys use all their bits
FLIP = 17  # per end: flips the addresses of a descending one
EXACT = 19  # per end: holes, gap: the least that is split off is 1 unit
POOL_FIELDS = 23

REFUSED, TOO_LARGE = 0, -1  # answers in place of a handle
HIGHEST = (1 << 63) - 1
NO_ALIGNMENTS, NO_COLLECTIVES = np.zeros(0, np.int64), np.zeros(0, np.uint8)

# Inside compiled code everything is int64, or a pointer to int32 (chunks, heads, live) or int64.
Int: Any = np.int64
Pointer = Any
leading_zeros: Any = numbers.leading_zeros
trailing_zeros: Any = numbers.trailing_zeros
pointer_to: Any = types.CPointer
get_or_insert_function: Any = cgutils.get_or_insert_function


def compiled(function: Any) -> Any:
    """Compile with Numba at the first call, or load what an earlier one left on disk."""
    return numba.njit(function, error_model="numpy", boundscheck=False, nogil=True, cache=True)


def inlined(function: Any) -> Any:
    """Compile a helper into its callers."""
    return numba.njit(
        function, error_model="numpy", boundscheck=False, nogil=True, cache=True, forceinline=True
    )


def _pointer(context: Any, array: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return pointer_to(array.dtype)(array), build


def _prefetch(context: Any, base: Any, index: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir

        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(args[0], args[1:]), byte)
        builder.call(function, [address, word(0), word(3), word(1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(base, index), build


#: pointer(array): its data, without bounds, wrap-around or reference count.
pointer: Any = intrinsic(_pointer)
#: prefetch(base, index): ask for the cache line of base[index].
prefetch: Any = intrinsic(_prefetch)


# --- holes: classes, bitmap, trees -----------------------------------------------------------


@inlined
def class_shift(size: Any) -> Any:
    """How many low bits of a size its class leaves open."""
    return max(Int(63 - CLASS_BITS) - Int(leading_zeros(size)), Int(0))


@inlined
def class_of(end: Any, size: Any, shift: Any) -> Any:
    return (end << END_BITS) + (shift << CLASS_BITS) + (size >> shift)


@inlined
def key_of(chunks: Pointer, pool: Pointer, h: Any) -> Any:
    """A hole's place in best-fit order: size, then address."""
    address = Int(chunks[h + ADDRESS]) ^ pool[FLIP + (chunks[h + TAG] & 1)]
    return Int(chunks[h + SIZE]) << 32 | address << pool[KEY_SHIFT]


@inlined
def is_single(chunks: Pointer, h: Any) -> Any:
    """Whether the root of a tree is all of it."""
    return chunks[h + LEFT] | chunks[h + RIGHT] == 0


@compiled
def next_class(bits: Pointer, c: Any) -> Any:
    """The first class from c on, of the same end, that is not empty; -1 if there is none.

    The upper level of the bitmap is its first four words, two per end.
    """
    word = c >> 6
    found = bits[4 + word] & (Int(-1) << (c & 63))
    if found == 0:
        word += 1
        top = word >> 6
        found = bits[top] & (Int(-1) << (word & 63))
        if found == 0:
            top += 1
            if top & 1 == 0 or bits[top] == 0:
                return Int(-1)
            found = bits[top]
        word = top << 6 | Int(trailing_zeros(found))
        found = bits[4 + word]
    return word << 6 | Int(trailing_zeros(found))


@inlined
def mark_full(heads: Pointer, bits: Pointer, c: Any, h: Any) -> None:
    """Make a hole the only one of an empty class."""
    heads[c] = h
    word = c >> 6
    bits[4 + word] |= Int(1) << (c & 63)
    bits[word >> 6] |= Int(1) << (word & 63)


@inlined
def mark_empty(heads: Pointer, bits: Pointer, c: Any) -> None:
    heads[c] = 0
    word = c >> 6
    left = bits[4 + word] & ~(Int(1) << (c & 63))
    bits[4 + word] = left
    if left == 0:
        bits[word >> 6] &= ~(Int(1) << (word & 63))


@compiled
def insert(chunks: Pointer, heads: Pointer, bits: Pointer, pool: Pointer, h: Any) -> None:
    """Add a free chunk: to its class, or as the gap."""
    chunks[h + UP] = 0
    if chunks[h + TAG] == GAP:
        pool[CENTRAL] = h
        return
    chunks[h + LEFT] = 0
    chunks[h + RIGHT] = 0
    size = Int(chunks[h + SIZE])
    shift = class_shift(size)
    c = class_of(Int(chunks[h + TAG]), size, shift)
    n = Int(heads[c])
    if n == 0:
        mark_full(heads, bits, c, h)
        return
    key = key_of(chunks, pool, h)
    bit = shift + 31  # the higher bits are the same in the whole class
    while True:
        child = n + LEFT + ((key >> bit) & 1)
        below = Int(chunks[child])
        if below == 0:
            break
        n = below
        bit -= 1
    chunks[child] = h
    chunks[h + UP] = n


@compiled
def remove(chunks: Pointer, heads: Pointer, bits: Pointer, pool: Pointer, h: Any) -> None:
    """Take a free chunk out of its class, or out of its place as the gap."""
    if chunks[h + TAG] == GAP:
        pool[CENTRAL] = 0
        return
    parent, left, right = Int(chunks[h + UP]), Int(chunks[h + LEFT]), Int(chunks[h + RIGHT])
    heir = Int(0)
    if left | right != 0:  # any leaf below may take its place
        heir = right if right != 0 else left
        while True:
            below = Int(chunks[heir + RIGHT])
            if below == 0:
                below = Int(chunks[heir + LEFT])
            if below == 0:
                break
            heir = below
        above = Int(chunks[heir + UP])
        chunks[above + (LEFT if chunks[above + LEFT] == heir else RIGHT)] = 0
        left, right = Int(chunks[h + LEFT]), Int(chunks[h + RIGHT])
        chunks[heir + LEFT] = left
        chunks[heir + RIGHT] = right
        chunks[heir + UP] = parent
        if left != 0:
            chunks[left + UP] = heir
        if right != 0:
            chunks[right + UP] = heir
    if parent != 0:
        chunks[parent + (LEFT if chunks[parent + LEFT] == h else RIGHT)] = heir
        return
    size = Int(chunks[h + SIZE])
    c = class_of(Int(chunks[h + TAG]), size, class_shift(size))
    if heir != 0:
        heads[c] = heir
    else:
        mark_empty(heads, bits, c)


@compiled
def smallest(chunks: Pointer, pool: Pointer, n: Any) -> Any:
    """The hole with the smallest key of a tree: it is on the leftmost path."""
    flip = pool[FLIP + (chunks[n + TAG] & 1)]
    h, best = n, Int(HIGHEST)
    while n != 0:
        key = Int(chunks[n + SIZE]) << 32 | (Int(chunks[n + ADDRESS]) ^ flip)
        if key < best:
            h, best = n, key
        left = Int(chunks[n + LEFT])
        n = left if left != 0 else Int(chunks[n + RIGHT])
    return h


@compiled
def first_from(chunks: Pointer, pool: Pointer, n: Any, key: Any, bit: Any) -> Any:
    """The hole with the smallest key of a tree that is not below ``key``; 0 if there is none."""
    flip, key_shift = pool[FLIP + (chunks[n + TAG] & 1)], pool[KEY_SHIFT]
    h, best = Int(0), Int(HIGHEST)
    rest = Int(0)  # the lowest subtree to the right of the path: all its keys are above
    while n != 0:
        address = Int(chunks[n + ADDRESS]) ^ flip
        each = Int(chunks[n + SIZE]) << 32 | address << key_shift
        if key <= each < best:
            h, best = n, each
        right = Int(chunks[n + RIGHT])
        if (key >> bit) & 1:
            n = right
        else:
            if right != 0:
                rest = right
            n = Int(chunks[n + LEFT])
        bit -= 1
    if rest != 0:
        rest = smallest(chunks, pool, rest)
        if h == 0 or key_of(chunks, pool, rest) < best:
            h = rest
    return h


@compiled
def find(chunks: Pointer, heads: Pointer, bits: Pointer, pool: Pointer, end: Any, key: Any) -> Any:
    """The first hole of an end in best-fit order that is not below ``key``; 0 if none is."""
    shift = class_shift(key >> 32)
    c = class_of(end, key >> 32, shift)
    h = first_from(chunks, pool, Int(heads[c]), key, shift + 31)
    if h == 0:
        c = next_class(bits, c + 1)
        if c >= 0:
            h = smallest(chunks, pool, Int(heads[c]))
    return h


@compiled
def take(chunks: Pointer, heads: Pointer, bits: Pointer, pool: Pointer, end: Any, size: Any) -> Any:
    """Find the best fit and remove it: `find` and `remove` with a short way for single holes."""
    shift = class_shift(size)
    c = class_of(end, size, shift)
    n, h = Int(heads[c]), Int(0)
    if n != 0:
        if not is_single(chunks, n):
            h = first_from(chunks, pool, n, size << 32, shift + 31)
        elif chunks[n + SIZE] >= size:
            mark_empty(heads, bits, c)
            return n
    if h == 0:
        c = next_class(bits, c + 1)
        if c < 0:
            return Int(0)
        n = Int(heads[c])
        if is_single(chunks, n):
            mark_empty(heads, bits, c)
            return n
        h = smallest(chunks, pool, n)
    remove(chunks, heads, bits, pool, h)
    return h


# --- chunks ----------------------------------------------------------------------------------


@inlined
def split(chunks: Pointer, pool: Pointer, h: Any, size: Any) -> Any:
    """Shorten a chunk; the rest becomes a new chunk with the same tag: its handle."""
    rest = pool[SPARE]
    if rest != 0:
        pool[SPARE] = chunks[rest + NEXT]
    else:
        rest = pool[FRESH]
        pool[FRESH] = rest + RECORD
    above = Int(chunks[h + NEXT])
    chunks[rest + SIZE] = chunks[h + SIZE] - size
    chunks[rest + ADDRESS] = chunks[h + ADDRESS] + size
    chunks[rest + PREVIOUS] = h
    chunks[rest + NEXT] = above
    chunks[rest + TAG] = chunks[h + TAG]
    chunks[h + SIZE] = size
    chunks[h + NEXT] = rest
    chunks[above + PREVIOUS] = rest
    return rest


@inlined
def coalesce(chunks: Pointer, pool: Pointer, h: Any, upper: Any) -> None:
    """Join a chunk and the one above it, whose record becomes spare."""
    above = Int(chunks[upper + NEXT])
    chunks[h + SIZE] += chunks[upper + SIZE]
    chunks[h + NEXT] = above
    chunks[above + PREVIOUS] = h
    if chunks[h + TAG] != chunks[upper + TAG]:
        chunks[h + TAG] = GAP
    chunks[upper + NEXT] = pool[SPARE]
    pool[SPARE] = upper


@inlined
def holds(chunks: Pointer, h: Any, end: Any, size: Any, mask: Any) -> Any:
    """Whether a free chunk holds a request at its alignment (mask: alignment - 1)."""
    low = Int(chunks[h + ADDRESS])
    top = low + chunks[h + SIZE] - size
    if end == UPPER:
        return top & ~mask >= low
    return (low + mask) & ~mask <= top


@inlined
def best_fit(
    chunks: Pointer,
    heads: Pointer,
    bits: Pointer,
    pool: Pointer,
    end: Any,
    size: Any,
    mask: Any,
) -> Any:
    """Remove and return the smallest hole that holds a request, else the gap if it does, else 0."""
    if mask == 0:
        h = take(chunks, heads, bits, pool, end, size)
    else:
        h = find(chunks, heads, bits, pool, end, size << 32)
        while h != 0 and not holds(chunks, h, end, size, mask):
            h = find(chunks, heads, bits, pool, end, key_of(chunks, pool, h) + 1)
        if h != 0:
            remove(chunks, heads, bits, pool, h)
    if h == 0:
        h = pool[CENTRAL]
        if h != 0:
            if not holds(chunks, h, end, size, mask):
                return Int(0)
            pool[CENTRAL] = 0
    return h


@inlined
def carve(
    chunks: Pointer,
    heads: Pointer,
    bits: Pointer,
    pool: Pointer,
    h: Any,
    end: Any,
    size: Any,
    mask: Any,
) -> Any:
    """Make a request's chunk out of a free one (already removed): its handle."""
    is_exact = pool[EXACT + 2 * end + (chunks[h + TAG] == GAP)]
    worth = Int(1) if is_exact else min(size, pool[MAX_WASTE])  # the split rule
    low = Int(chunks[h + ADDRESS])
    high = low + chunks[h + SIZE]
    start = (low + mask) & ~mask
    if end == UPPER and high - start - size >= worth:
        start = (high - size) & ~mask
    if start > low:
        below = h
        h = split(chunks, pool, h, start - low)
        if end == LOWER:
            chunks[below + TAG] = LOWER
        insert(chunks, heads, bits, pool, below)
    if end == UPPER:
        chunks[h + TAG] = UPPER
    if high - start - size >= worth:
        insert(chunks, heads, bits, pool, split(chunks, pool, h, size))
    chunks[h + TAG] = end
    chunks[h + UP] = USED
    return h


@inlined
def release(chunks: Pointer, heads: Pointer, bits: Pointer, pool: Pointer, h: Any) -> None:
    """Free a chunk and coalesce it with its free neighbours."""
    above, below = Int(chunks[h + NEXT]), Int(chunks[h + PREVIOUS])
    if pool[NEW_TAG] == GAP:  # spatial: at the edge of its end it falls back into the gap
        tag = chunks[h + TAG]
        if chunks[(above if tag == LOWER else below) + TAG] != tag:
            chunks[h + TAG] = GAP
    if chunks[above + UP] != USED:
        remove(chunks, heads, bits, pool, above)
        coalesce(chunks, pool, h, above)
    if chunks[below + UP] != USED:
        remove(chunks, heads, bits, pool, below)
        coalesce(chunks, pool, below, h)
        h = below
    insert(chunks, heads, bits, pool, h)


# --- regions ---------------------------------------------------------------------------------


@compiled
def backed_off(pool: Pointer, size: Any) -> Any:
    """As `alloclab.policies.bfc_versions.Rules.backed_off`."""
    less = Int(np.float32(size) * BACKPEDAL_FACTOR)
    if pool[BACKS_OFF_DOWN] == 0:
        less += MIN_ALLOCATION_SIZE - 1
    less &= -MIN_ALLOCATION_SIZE
    if less == size and pool[BACKS_OFF_ALWAYS] != 0:
        return size - MIN_ALLOCATION_SIZE
    return less


@compiled
def next_region(pool: Pointer, size: Any) -> Any:
    """Double the next region until it holds ``size`` bytes: whether that was needed."""
    following, doubled = np.uint64(pool[NEXT_REGION]), False
    while np.uint64(0) < following < np.uint64(size):
        following *= np.uint64(2)
        doubled = True
    pool[NEXT_REGION] = Int(following)
    return doubled


@compiled
def grow(chunks: Pointer, pool: Pointer, regions: Pointer, event: Any, size: Any) -> Any:
    """Take a region that holds ``size`` bytes: the handle of its chunk, REFUSED or TOO_LARGE.

    ``regions`` has a row for each: start, bytes, event.
    """
    available = (pool[LIMIT] - pool[TAKEN_BYTES]) & -MIN_ALLOCATION_SIZE
    index = pool[NUM_REGIONS]
    if size > available or (index > 0 and pool[NEW_TAG] == GAP):
        return Int(REFUSED)
    doubled = next_region(pool, size)
    if pool[NEXT_REGION] == 0:
        return Int(REFUSED)
    asked = Int(min(np.uint64(pool[NEXT_REGION]), np.uint64(available)))
    pool[DRIVER_CALLS] += 1
    while asked > pool[LARGEST] or asked > pool[CAPACITY] - pool[TAKEN_BYTES]:
        less = backed_off(pool, asked)
        if less < size or less == asked:
            return Int(REFUSED)
        asked = less
        pool[DRIVER_CALLS] += 1
    if not doubled:
        pool[NEXT_REGION] = Int(np.uint64(pool[NEXT_REGION]) * np.uint64(2))
    start = (pool[NEXT_ADDRESS] + MIN_ALLOCATION_SIZE - 1) & -MIN_ALLOCATION_SIZE
    if (start + asked) >> UNIT_BITS >= MAX_UNITS:
        return Int(TOO_LARGE)
    regions[3 * index] = start
    regions[3 * index + 1] = asked
    regions[3 * index + 2] = event
    pool[NUM_REGIONS] = index + 1
    pool[NEXT_ADDRESS] = start + asked + pool[DRIVER_GAP]
    pool[TAKEN_BYTES] += asked
    h = pool[FRESH]
    pool[FRESH] = h + RECORD
    chunks[h + SIZE] = asked >> UNIT_BITS
    chunks[h + ADDRESS] = start >> UNIT_BITS
    chunks[h + PREVIOUS] = 0
    chunks[h + NEXT] = 0
    chunks[h + TAG] = pool[NEW_TAG]
    return h


# --- the event loop --------------------------------------------------------------------------


@compiled
def replay_events(
    is_alloc: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    alignments: npt.NDArray[np.int64],  # empty if none is above 256
    collectives: npt.NDArray[np.uint8],  # empty if there is none
    ends: npt.NDArray[np.int64],  # of ordinary and of collective requests
    records: npt.NDArray[np.int32],
    class_heads: npt.NDArray[np.int32],
    bitmap: npt.NDArray[np.int64],
    fields: npt.NDArray[np.int64],
    region_rows: npt.NDArray[np.int64],
    handles: npt.NDArray[np.int32],  # by slot + 1, as marks have slot -1; 0 where there is none
    offsets: npt.NDArray[np.int64],  # by slot, bytes
    taken: npt.NDArray[np.int64],
) -> Any:
    """Serve all events: allocations, units in use, most in use, largest; None if it is too large.

    Slots are not checked here: one out of range would corrupt memory.
    """
    ops, slot, size = pointer(is_alloc), pointer(slots), pointer(sizes)
    chunks, heads, bits, pool = (
        pointer(records),
        pointer(class_heads),
        pointer(bitmap),
        pointer(fields),
    )
    live, addresses, bytes_taken = pointer(handles), pointer(offsets), pointer(taken)
    regions, alignment, collective = (
        pointer(region_rows),
        pointer(alignments),
        pointer(collectives),
    )
    any_aligned, any_collective = alignments.size > 0, collectives.size > 0
    ordinary, other = ends[0], ends[1]
    end, mask, limit = ordinary, Int(0), pool[LIMIT]
    allocs, in_use, peak, largest = Int(0), Int(0), Int(0), Int(0)
    last = is_alloc.size - 1
    for event in range(is_alloc.size):
        prefetch(chunks, Int(live[slot[min(event + AHEAD, last)] + 1]))
        s = slot[event]
        if ops[event] == 0:
            h = Int(live[s + 1])
            if h != 0:
                live[s + 1] = 0
                in_use -= chunks[h + SIZE]
                release(chunks, heads, bits, pool, h)
            continue
        h = Int(REFUSED)
        units = (size[event] + MIN_ALLOCATION_SIZE - 1) >> UNIT_BITS
        if units > 0 and units << UNIT_BITS <= limit:
            if any_aligned:
                mask = max(alignment[event] >> UNIT_BITS, 1) - 1
            if any_collective:
                end = other if collective[event] else ordinary
            h = best_fit(chunks, heads, bits, pool, end, units, mask)
            if h == 0:
                h = grow(chunks, pool, regions, event, units << UNIT_BITS)
                if h == TOO_LARGE:
                    return None
                if h != REFUSED and not holds(chunks, h, end, units, mask):
                    insert(chunks, heads, bits, pool, h)
                    h = Int(REFUSED)
        if h == REFUSED:
            addresses[s] = -1
            bytes_taken[s] = 0
            continue
        h = carve(chunks, heads, bits, pool, h, end, units, mask)
        live[s + 1] = h
        got = Int(chunks[h + SIZE])
        addresses[s] = Int(chunks[h + ADDRESS]) << UNIT_BITS
        bytes_taken[s] = got << UNIT_BITS
        allocs += 1
        in_use += got
        peak = max(peak, in_use)
        largest = max(largest, got)
    return allocs, in_use, peak, largest


# --- the way in ------------------------------------------------------------------------------


def replay(policy: "Bfc", columns: Columns) -> Outcome | None:
    """Replay a stream under a policy that has just been started; None if the kernel cannot hold it.

    The outcome is that of `Policy.run`; the policy's own chunks stay untouched.
    """
    limit, driver, slots = policy.limit, policy.driver, columns.num_slots
    aligned = bool(_distinct(columns.alignment).max(initial=0) > MIN_ALLOCATION_SIZE)
    any_collective = bool(columns.collective.any())
    # An allocation adds one chunk, or two where it must be aligned; a region adds one.
    records = np.empty(RECORD * ((2 if aligned else 1) * slots + MAX_REGIONS + 2), np.int32)
    if (
        limit is None
        or limit >> UNIT_BITS >= MAX_UNITS
        or len(records) >= MAX_UNITS
        or type(driver) is not Driver
    ):
        return None
    records[:RECORD] = 0
    records[UP], records[TAG] = USED, NO_TAG
    pool = _pool(policy, limit, driver)
    number: dict[Tag, int] = {"lower": LOWER, "upper": UPPER}
    regions = np.zeros((MAX_REGIONS, 3), np.int64)
    offsets, taken = np.empty((2, slots), np.int64)  # one block: large enough for huge pages
    _announce()
    counts = replay_events(
        columns.is_alloc,
        columns.slot,
        columns.size,
        np.ascontiguousarray(columns.alignment) if aligned else NO_ALIGNMENTS,
        np.ascontiguousarray(columns.collective) if any_collective else NO_COLLECTIVES,
        np.array([number[policy.ordinary], number[policy.collective]], np.int64),
        records,
        np.zeros(2 << END_BITS, np.int32),
        np.zeros(4 + (2 << END_BITS >> 6), np.int64),
        pool,
        regions,
        np.zeros(slots + 1, np.int32),
        offsets,
        taken,
    )
    if counts is None:
        return None
    allocs, in_use, peak, largest = counts
    pool_bytes = int(pool[TAKEN_BYTES])
    stats = Stats(
        num_allocs=allocs,
        bytes_in_use=in_use << UNIT_BITS,
        peak_bytes_in_use=peak << UNIT_BITS,
        largest_alloc_size=largest << UNIT_BITS,
        pool_bytes=pool_bytes,
        peak_pool_bytes=pool_bytes,
        driver_calls=int(pool[DRIVER_CALLS]),
    )
    rows = regions[: int(pool[NUM_REGIONS])].tolist()
    return Outcome(offsets, taken, tuple(Region(*row) for row in rows), stats)


def _pool(policy: "Bfc", limit: int, driver: Driver) -> npt.NDArray[np.int64]:
    """The pool's fields before the first event."""
    pool = np.zeros(POOL_FIELDS, np.int64)
    pool[FRESH] = RECORD
    pool[NEXT_REGION] = policy.next_region
    pool[LIMIT] = limit
    pool[CAPACITY] = HIGHEST if driver.capacity is None else driver.capacity
    pool[LARGEST] = HIGHEST if driver.largest is None else driver.largest
    pool[DRIVER_GAP] = driver.gap
    pool[BACKS_OFF_DOWN] = policy.rules.backs_off_down
    pool[BACKS_OFF_ALWAYS] = policy.rules.backs_off_always
    pool[NEW_TAG] = GAP if policy.spatial else LOWER
    pool[MAX_WASTE] = -(-policy.max_waste >> UNIT_BITS)
    address_bits = 31 if driver.gap else (limit >> UNIT_BITS).bit_length()
    pool[KEY_SHIFT] = 32 - address_bits
    for tag, rules in policy.ends.items():
        end = UPPER if tag == "upper" else LOWER
        pool[FLIP + end] = (1 << address_bits) - 1 if rules.descending else 0
        pool[EXACT + 2 * end] = rules.exact_holes
        pool[EXACT + 2 * end + 1] = rules.exact_gap
    return pool


def _distinct(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The column, or one row of it where all rows are the same memory."""
    return column[:1] if column.strides == (0,) else column


def _announce() -> None:
    """Say that the first call compiles, unless an earlier process left the result on disk."""
    if replay_events.signatures:
        return
    source = Path(__file__)
    cached = Path(replay_events.stats.cache_path).glob(f"{source.stem}.replay_events-*.nbi")
    if not any(each.stat().st_mtime >= source.stat().st_mtime for each in cached):
        print("alloclab: compiling the BFC replay, once for this machine ...", file=sys.stderr)
