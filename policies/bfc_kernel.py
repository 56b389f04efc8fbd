"""The compiled form of `alloclab.policies.bfc.Bfc`: whole request streams in one Numba loop.

Sizes and addresses are counted in units of 256 bytes, so that they fit int32 (pools below 512 GiB).
A chunk is a *record* of eight int32 in one array; a *handle* is the index of a record's first
field, and a field is ``R[h + FIELD]``. Record 0 stands for "no chunk": it counts as in use, so it
ends every region on both sides.

Holes are found without scanning bins: every power of two of sizes has 256 *classes*, a bitmap of
two levels tells which are not empty, and a class with more than one hole is a digital search tree
on (size, address), threaded through the records. Best fit is the smallest key from (size, 0) on.

Helpers take raw pointers instead of arrays, because Numba counts references of arrays in the event
loop, at four times the run time. docs/explanation/fast-replay.md tells what else was tried.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros
from numba.extending import intrinsic

from alloclab.policies.base import Columns, Driver, Outcome, Region, Stats
from alloclab.policies.bfc_versions import BACKPEDAL_FACTOR, MIN_ALLOCATION_SIZE, Tag

if TYPE_CHECKING:
    from alloclab.policies.bfc import Bfc

Function = TypeVar("Function", bound=Callable[..., Any])
#: A pointer to int32 or int64 inside compiled code.
Pointer = Any
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

UNIT_BITS = 8  # 256 bytes
MAX_UNITS = 1 << 31
#: Classes per power of two, as a power of two; and of all classes of one end.
CLASS_BITS, END_BITS = 8, 13
#: Regions that a replay can hold; a stream that takes more is left to the readable policy.
MAX_REGIONS = 1 << 12
#: Events between the prefetch of a record and its use.
AHEAD = 8

# Fields of a record. UP is the parent in the class's tree, 0 at its root and for the gap.
SIZE, ADDRESS, PREVIOUS, NEXT, LEFT, RIGHT, UP, TAG = range(8)
RECORD = 8
USED = -2  # value of UP in a chunk in use
LOWER, UPPER, GAP, NO_TAG = range(4)

# The pool: int64 that the loop and its helpers share.
(
    SPARE,  # record to use again, linked through NEXT
    FRESH,  # first record never used
    CENTRAL,  # handle of the central gap, or 0
    POOL,  # bytes taken from the driver
    NEXT_REGION,  # bytes of the next region (size_t)
    NEXT_ADDRESS,  # bytes
    CALLS,  # calls to the driver
    REGIONS,  # regions taken
    LIMIT,  # bytes, from here on constant
    CAPACITY,
    LARGEST,
    DRIVER_GAP,
    SPATIAL,
    BACKS_OFF_DOWN,
    EXTENDS_BACKED_OFF,
    KEY_SHIFT,  # addresses are shifted left to use all 32 bits of a key
    LOWER_FLIP,  # flips the addresses of a descending end
    UPPER_FLIP,
) = range(18)
POOL_FIELDS = 18

REFUSED, TOO_LARGE = 0, -1  # what `extend` answers instead of a handle
UNLIMITED = (1 << 63) - 1
LAST_KEY = (1 << 63) - 1
NONE_ALIGNED, NONE_COLLECTIVE = np.zeros(0, np.int64), np.zeros(0, np.uint8)


def compiled(function: Function) -> Function:
    """Compile with Numba at the first call, or load the result of an earlier one from disk."""
    made: Function = numba.njit(boundscheck=False, error_model="numpy", nogil=True, cache=True)(
        function
    )
    return made


@intrinsic
def pointer(context: Any, array: Any) -> Any:
    """The data pointer of an array: no bounds, no wrap-around, no reference counting."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), build


@intrinsic
def prefetch(context: Any, base: Any, index: Any) -> Any:
    """Ask for the cache line of ``base[index]``."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir

        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, word, word, word]),
            "llvm.prefetch.p0",
        )
        address = builder.bitcast(builder.gep(args[0], args[1:]), byte)
        builder.call(function, [address, word(0), word(3), word(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(base, index), build


# --- holes: classes, bitmap, trees -----------------------------------------------------------


@compiled
def class_shift(size: int) -> int:
    """How many low bits of a size do not tell its class."""
    return max(np.int64(63 - CLASS_BITS) - np.int64(leading_zeros(size)), np.int64(0))


@compiled
def key_of(R: Pointer, P: Pointer, h: int) -> int:
    """The place of a hole in best-fit order: size, then address."""
    flip = P[LOWER_FLIP + (R[h + TAG] & 1)]
    return np.int64(R[h + SIZE]) << 32 | (np.int64(R[h + ADDRESS]) ^ flip) << P[KEY_SHIFT]


@compiled
def next_class(B: Pointer, c: int) -> int:
    """The first class from c on that is not empty and of the same end, or -1.

    B holds the upper level of the bitmap (four words, two per end), then the lower one.
    """
    w = c >> 6
    bits = B[4 + w] & (np.int64(-1) << (c & 63))
    if bits == 0:
        w += 1
        t = w >> 6
        bits = B[t] & (np.int64(-1) << (w & 63))
        if bits == 0:
            t += 1
            if t & 1 == 0:
                return -1
            bits = B[t]
            if bits == 0:
                return -1
        w = t << 6 | np.int64(trailing_zeros(bits))
        bits = B[4 + w]
    return w << 6 | np.int64(trailing_zeros(bits))


@compiled
def insert(R: Pointer, H: Pointer, B: Pointer, P: Pointer, h: int) -> None:
    """Add a hole to its class, or make it the gap."""
    if R[h + TAG] == GAP:
        P[CENTRAL] = h
        R[h + UP] = 0
        return
    size = np.int64(R[h + SIZE])
    shift = class_shift(size)
    c = (np.int64(R[h + TAG]) << END_BITS) + (shift << CLASS_BITS) + (size >> shift)
    R[h + LEFT] = 0
    R[h + RIGHT] = 0
    n = np.int64(H[c])
    if n == 0:
        w = c >> 6
        B[4 + w] |= np.int64(1) << (c & 63)
        B[w >> 6] |= np.int64(1) << (w & 63)
        H[c] = h
        R[h + UP] = 0
        return
    key = key_of(R, P, h)
    bit = shift + 31  # the higher bits are the same in the whole class
    while True:
        child = n + LEFT + ((key >> bit) & 1)
        m = np.int64(R[child])
        if m == 0:
            break
        n = m
        bit -= 1
    R[child] = h
    R[h + UP] = n


@compiled
def remove(R: Pointer, H: Pointer, B: Pointer, P: Pointer, h: int) -> None:
    """Take a hole out of its class, or the gap out of its place."""
    if R[h + TAG] == GAP:
        P[CENTRAL] = 0
        return
    parent = np.int64(R[h + UP])
    left = np.int64(R[h + LEFT])
    right = np.int64(R[h + RIGHT])
    m = np.int64(0)
    if left | right != 0:  # any leaf below may take its place
        m = right if right != 0 else left
        while True:
            below = np.int64(R[m + RIGHT])
            if below == 0:
                below = np.int64(R[m + LEFT])
            if below == 0:
                break
            m = below
        above = np.int64(R[m + UP])
        R[above + (LEFT if R[above + LEFT] == m else RIGHT)] = 0
        left = np.int64(R[h + LEFT])
        right = np.int64(R[h + RIGHT])
        R[m + LEFT] = left
        R[m + RIGHT] = right
        R[m + UP] = parent
        if left != 0:
            R[left + UP] = m
        if right != 0:
            R[right + UP] = m
    if parent != 0:
        R[parent + (LEFT if R[parent + LEFT] == h else RIGHT)] = m
        return
    size = np.int64(R[h + SIZE])
    shift = class_shift(size)
    c = (np.int64(R[h + TAG]) << END_BITS) + (shift << CLASS_BITS) + (size >> shift)
    H[c] = m
    if m == 0:
        w = c >> 6
        bits = B[4 + w] & ~(np.int64(1) << (c & 63))
        B[4 + w] = bits
        if bits == 0:
            B[w >> 6] &= ~(np.int64(1) << (w & 63))


@compiled
def find(R: Pointer, H: Pointer, B: Pointer, P: Pointer, end: int, key: int) -> int:
    """The first hole of an end from a key on, in best-fit order; 0 if there is none."""
    size = key >> 32
    shift = class_shift(size)
    c = (end << END_BITS) + (shift << CLASS_BITS) + (size >> shift)
    n = np.int64(H[c])
    h = np.int64(0)
    best = np.int64(LAST_KEY)
    if n != 0:
        if R[n + LEFT] | R[n + RIGHT] == 0:
            if key_of(R, P, n) >= key:
                return n
            n = np.int64(0)
        else:
            bit = shift + 31
            rest = np.int64(0)
            while n != 0:  # down the path of the key; rest = lowest right subtree passed by
                each = key_of(R, P, n)
                if key <= each < best:
                    best = each
                    h = n
                right = np.int64(R[n + RIGHT])
                if (key >> bit) & 1:
                    n = right
                else:
                    if right != 0:
                        rest = right
                    n = np.int64(R[n + LEFT])
                bit -= 1
            n = rest
    if h | n == 0:
        c = next_class(B, c + 1)
        if c < 0:
            return 0
        n = np.int64(H[c])
        if R[n + LEFT] | R[n + RIGHT] == 0:
            return n
    while n != 0:  # the smallest key below n is on its leftmost path
        each = key_of(R, P, n)
        if each < best:
            best = each
            h = n
        left = np.int64(R[n + LEFT])
        n = left if left != 0 else np.int64(R[n + RIGHT])
    return h


# --- chunks ----------------------------------------------------------------------------------


@compiled
def split(R: Pointer, P: Pointer, h: int, size: int) -> int:
    """Shorten a chunk; the rest is a new chunk with the same tag, whose handle is returned."""
    g = P[SPARE]
    if g != 0:
        P[SPARE] = R[g + NEXT]
    else:
        g = P[FRESH]
        P[FRESH] = g + RECORD
    after = np.int64(R[h + NEXT])
    R[g + SIZE] = R[h + SIZE] - size
    R[g + ADDRESS] = R[h + ADDRESS] + size
    R[g + PREVIOUS] = h
    R[g + NEXT] = after
    R[g + TAG] = R[h + TAG]
    R[h + SIZE] = size
    R[h + NEXT] = g
    R[after + PREVIOUS] = g
    return g


@compiled
def coalesce(R: Pointer, P: Pointer, h: int, upper: int) -> None:
    """Join a chunk and the one above it; the upper record becomes spare."""
    after = np.int64(R[upper + NEXT])
    R[h + SIZE] += R[upper + SIZE]
    R[h + NEXT] = after
    R[after + PREVIOUS] = h
    if R[h + TAG] != R[upper + TAG]:
        R[h + TAG] = GAP
    R[upper + NEXT] = P[SPARE]
    P[SPARE] = upper


@compiled
def first_start(R: Pointer, h: int, size: int, mask: int, end: int) -> int:
    """Where a request would start in a free chunk (mask: alignment - 1), or -1."""
    address = np.int64(R[h + ADDRESS])
    top = address + R[h + SIZE] - size
    if end == UPPER:
        start = top & ~mask
        return start if start >= address else np.int64(-1)
    start = (address + mask) & ~mask
    return start if start <= top else np.int64(-1)


@compiled
def best_fit(R: Pointer, H: Pointer, B: Pointer, P: Pointer, end: int, size: int, mask: int) -> int:
    """The smallest hole of the end that holds a request, else the gap if it does, else 0."""
    h = find(R, H, B, P, end, size << 32)
    if mask != 0:
        while h != 0 and first_start(R, h, size, mask, end) < 0:
            h = find(R, H, B, P, end, key_of(R, P, h) + 1)
    if h == 0:
        h = P[CENTRAL]
        if h != 0 and first_start(R, h, size, mask, end) < 0:
            h = np.int64(0)
    return h


@compiled
def backed_off(P: Pointer, size: int) -> int:
    """What is asked after the driver refused; see `alloclab.policies.bfc_versions.Rules`."""
    less = np.int64(np.float32(size) * BACKPEDAL_FACTOR)
    if P[BACKS_OFF_DOWN] == 0:
        return (less + MIN_ALLOCATION_SIZE - 1) & -MIN_ALLOCATION_SIZE
    less &= -MIN_ALLOCATION_SIZE
    return less if less < size else size - MIN_ALLOCATION_SIZE


@compiled
def extend(R: Pointer, P: Pointer, G: Pointer, event: int, size: int) -> int:
    """Take a region that holds ``size`` bytes: the handle of its chunk, or why there is none.

    G lists the regions: start, bytes, event.
    """
    available = (P[LIMIT] - P[POOL]) & -MIN_ALLOCATION_SIZE
    if size > available:
        return REFUSED
    if P[SPATIAL] and P[REGIONS] and (P[CENTRAL] or not P[EXTENDS_BACKED_OFF]):
        return REFUSED
    following = np.uint64(P[NEXT_REGION])
    doubled = False
    while np.uint64(0) < following < np.uint64(size):
        following *= np.uint64(2)
        doubled = True
    P[NEXT_REGION] = np.int64(following)
    if following == 0:
        return REFUSED
    asked = np.int64(min(following, np.uint64(available)))
    while True:
        P[CALLS] += 1
        if asked <= P[LARGEST] and P[POOL] + asked <= P[CAPACITY]:
            break
        less = backed_off(P, asked)
        if less < size or less == asked:
            return REFUSED
        asked = less
    if not doubled:
        P[NEXT_REGION] = np.int64(following * np.uint64(2))
    start = (P[NEXT_ADDRESS] + MIN_ALLOCATION_SIZE - 1) & -MIN_ALLOCATION_SIZE
    index = P[REGIONS]
    if index == MAX_REGIONS or (start + asked) >> UNIT_BITS >= MAX_UNITS:
        return TOO_LARGE
    G[3 * index] = start
    G[3 * index + 1] = asked
    G[3 * index + 2] = event
    P[REGIONS] = index + 1
    P[NEXT_ADDRESS] = start + asked + P[DRIVER_GAP]
    P[POOL] += asked
    h = P[FRESH]
    P[FRESH] = h + RECORD
    R[h + SIZE] = asked >> UNIT_BITS
    R[h + ADDRESS] = start >> UNIT_BITS
    R[h + PREVIOUS] = 0
    R[h + NEXT] = 0
    R[h + TAG] = GAP if P[SPATIAL] else LOWER
    return h


@compiled
def replay_events(
    is_alloc: npt.NDArray[np.uint8],
    slot: Int64s,
    size: Int64s,
    alignment: Int64s,  # empty if none is above 256
    collective: npt.NDArray[np.uint8],  # empty if there is none
    ends: Int64s,  # ordinary end, collective end, and per end: exact holes, exact gap
    max_waste: int,  # units
    pool: Int64s,
    records: Int32s,
    heads: Int32s,
    bitmap: Int64s,
    live: Int32s,  # handle by slot + 1; 0 where there is none, as for marks
    regions: Int64s,
    offsets: Int64s,  # by slot, bytes
    taken: Int64s,
    counts: Int64s,
) -> bool:
    """The event loop; false if the stream is too large for the kernel's integers."""
    K, D, S = pointer(is_alloc), pointer(slot), pointer(size)
    R, H, B, P, G = (
        pointer(records),
        pointer(heads),
        pointer(bitmap),
        pointer(pool),
        pointer(regions),
    )
    L, O, T = pointer(live), pointer(offsets), pointer(taken)
    E = pointer(ends)
    any_aligned, any_collective = alignment.size > 0, collective.size > 0
    A, C = pointer(alignment), pointer(collective)
    spatial = P[SPATIAL] != 0
    end = np.int64(E[0])
    mask = np.int64(0)
    limit = P[LIMIT]
    in_use = peak = largest = allocs = np.int64(0)
    last = is_alloc.size - 1
    for event in range(is_alloc.size):
        prefetch(R, np.int64(L[D[min(event + AHEAD, last)] + 1]))
        d = D[event]
        if K[event] != 0:
            r = (S[event] + 255) >> UNIT_BITS
            O[d] = -1
            T[d] = 0
            if r == 0 or r << UNIT_BITS > limit:
                continue
            if any_aligned:
                mask = max(A[event] >> UNIT_BITS, 1) - 1
            if any_collective:
                end = np.int64(E[np.int64(C[event])])
            h = best_fit(R, H, B, P, end, r, mask)
            if h != 0:
                remove(R, H, B, P, h)
            else:
                h = extend(R, P, G, event, r << UNIT_BITS)
                if h == TOO_LARGE:
                    return False
                if h == REFUSED:
                    continue
                if first_start(R, h, r, mask, end) < 0:
                    insert(R, H, B, P, h)
                    continue
            # The split rule: the least that is worth a chunk of its own.
            exact = E[2 + 2 * end + (R[h + TAG] == GAP)]
            worth = np.int64(1) if exact else min(r, max_waste)
            low = np.int64(R[h + ADDRESS])
            high = low + R[h + SIZE]
            start = (low + mask) & ~mask
            if end == UPPER and high - start - r >= worth:
                start = (high - r) & ~mask
            if start > low:
                below = h
                h = split(R, P, h, start - low)
                if end == LOWER:
                    R[below + TAG] = LOWER
                insert(R, H, B, P, below)
            if end == UPPER:
                R[h + TAG] = UPPER
            if high - start - r >= worth:
                insert(R, H, B, P, split(R, P, h, r))
            R[h + TAG] = end
            R[h + UP] = USED
            L[d + 1] = h
            s = np.int64(R[h + SIZE])
            in_use += s
            allocs += 1
            peak = max(peak, in_use)
            largest = max(largest, s)
            O[d] = start << UNIT_BITS
            T[d] = s << UNIT_BITS
        else:
            h = np.int64(L[d + 1])
            if h == 0:
                continue
            L[d + 1] = 0
            in_use -= R[h + SIZE]
            n, p = np.int64(R[h + NEXT]), np.int64(R[h + PREVIOUS])
            if spatial:
                tag = R[h + TAG]
                if R[(n if tag == LOWER else p) + TAG] != tag:
                    R[h + TAG] = GAP
            if R[n + UP] != USED:
                remove(R, H, B, P, n)
                coalesce(R, P, h, n)
            if R[p + UP] != USED:
                remove(R, H, B, P, p)
                coalesce(R, P, p, h)
                h = p
            insert(R, H, B, P, h)
    counts[0], counts[1] = allocs, in_use
    counts[2], counts[3] = peak, largest
    return True


# --- the way in ------------------------------------------------------------------------------


def replay(policy: "Bfc", columns: Columns) -> Outcome | None:
    """Replay a stream under a policy that has just been started; None if it is too large for it.

    The same as `Policy.run`, but the policy's own chunks stay untouched.
    """
    limit, driver = policy.limit, policy.driver
    if limit is None or limit >> UNIT_BITS >= MAX_UNITS or type(driver) is not Driver:
        return None
    aligned = bool((columns.alignment > 1 << UNIT_BITS).any())
    any_collective = bool(columns.collective.any())
    num_records = (2 if aligned else 1) * columns.num_slots + MAX_REGIONS + 2
    if num_records * RECORD >= 1 << 31:
        return None
    _announce()
    records = np.empty(num_records * RECORD, np.int32)  # pages that are not touched cost nothing
    records[:RECORD] = 0
    records[UP], records[TAG] = USED, NO_TAG
    address_bits = (limit >> UNIT_BITS).bit_length() if driver.gap == 0 else 31
    flip = (1 << address_bits) - 1
    pool = np.zeros(POOL_FIELDS, np.int64)
    pool[FRESH] = RECORD
    pool[NEXT_REGION] = policy.next_region
    pool[LIMIT] = limit
    pool[CAPACITY] = UNLIMITED if driver.capacity is None else driver.capacity
    pool[LARGEST] = UNLIMITED if driver.largest is None else driver.largest
    pool[DRIVER_GAP] = driver.gap
    pool[SPATIAL] = policy.spatial
    pool[BACKS_OFF_DOWN] = policy.rules.backs_off_down
    pool[EXTENDS_BACKED_OFF] = policy.rules.extends_backed_off
    pool[KEY_SHIFT] = 32 - address_bits
    number: dict[Tag, int] = {"lower": LOWER, "upper": UPPER, "gap": GAP}
    ends = np.array([number[policy.ordinary], number[policy.collective], 0, 0, 0, 0], np.int64)
    for tag, rules in policy.ends.items():
        end = number[tag]
        pool[LOWER_FLIP + end] = flip if rules.descending else 0
        ends[2 + 2 * end : 4 + 2 * end] = rules.exact_holes, rules.exact_gap
    regions = np.zeros((MAX_REGIONS, 3), np.int64)
    offsets = np.empty(columns.num_slots, np.int64)
    taken = np.empty(columns.num_slots, np.int64)
    counts = np.zeros(4, np.int64)
    done = replay_events(
        columns.is_alloc,
        columns.slot,
        columns.size,
        columns.alignment if aligned else NONE_ALIGNED,
        columns.collective if any_collective else NONE_COLLECTIVE,
        ends,
        -(-policy.max_waste >> UNIT_BITS),
        pool,
        records,
        np.zeros(2 << END_BITS, np.int32),
        np.zeros(4 + (2 << END_BITS >> 6), np.int64),
        np.zeros(columns.num_slots + 1, np.int32),
        regions,
        offsets,
        taken,
        counts,
    )
    if not done:
        return None
    allocs, in_use, peak, largest = counts.tolist()
    pool_bytes = int(pool[POOL])
    stats = Stats(
        num_allocs=allocs,
        bytes_in_use=in_use << UNIT_BITS,
        peak_bytes_in_use=peak << UNIT_BITS,
        largest_alloc_size=largest << UNIT_BITS,
        pool_bytes=pool_bytes,
        peak_pool_bytes=pool_bytes,
        driver_calls=int(pool[CALLS]),
    )
    rows = regions[: int(pool[REGIONS])].tolist()
    return Outcome(offsets, taken, tuple(Region(*row) for row in rows), stats)


def _announce() -> None:
    """Say that the first call compiles, unless an earlier process left the result on disk."""
    if replay_events.signatures:
        return
    folder = Path(replay_events.stats.cache_path)
    source = Path(__file__).stat().st_mtime
    cached = folder.glob(f"{Path(__file__).stem}.{replay_events.__name__}-*.nbi")
    if not any(each.stat().st_mtime >= source for each in cached):
        print("alloclab: compiling the BFC replay, once for this machine ...", file=sys.stderr)
