"""XLA's static planner: offsets inside a temp block, from live ranges, as XLA places them.

XLA simulates a heap over the scheduled module, then places whole live ranges (offline, not in the
order of the requests). The rules here are those of openxla/xla, xla/service/heap_simulator/
(heap_simulator.cc, free_chunks_manager.cc) and xla/service/buffer_assignment.cc
(AssignBuffersWithSequentialOrdering), as compiled into jaxlib and the CUDA plugin 0.10.2 and
0.12.0.1 and libtpu 0.0.42.1 and 0.0.50.1, and checked against their dumps.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError, RowError
from alloclab.policies.units import MAX_BYTES

Integers = npt.NDArray[np.int64]
Strategy = Literal["spatial", "temporal", "fast_merge"]

#: What XLA runs unless told otherwise; the smaller heap wins, the first on a tie
#: (ChooseBestHeapAlgorithm::Finish).
BEST_OF_TWO: tuple[Strategy, ...] = ("spatial", "temporal")


@dataclass(frozen=True, eq=False)
class HeapBuffers:
    """Buffers to place, one row each.

    Attributes:
        id: breaks ties, the lower first (XLA: the id of the HloValue); no two alike.
        size: bytes, at least 0.
        lower, upper: the buffer is live in the steps from ``lower`` up to but not including
            ``upper``; not empty unless the size is 0.
        group: the row of the buffer whose memory this one uses, its own row if it has its own
            (XLA: colocations). Such a group has one offset and its largest member's size; between
            the live ranges of its members the memory is free for others.

    Raises:
        InputError: a column, or (as `RowError`, which names it, counted from 0) a row is not valid.

    >>> apart = HeapBuffers.from_columns(size=[100, 50], lower=[0, 2], upper=[2, 4])
    >>> plan(apart, alignment=64).offset.tolist()
    [0, 0]
    """

    id: Integers
    size: Integers
    lower: Integers
    upper: Integers
    group: Integers

    @classmethod
    def from_columns(
        cls,
        size: npt.ArrayLike,
        lower: npt.ArrayLike,
        upper: npt.ArrayLike,
        *,
        id: npt.ArrayLike | None = None,
        group: npt.ArrayLike | None = None,
    ) -> "HeapBuffers":
        """Build and check; ids and groups default to the number of the row."""
        rows = np.arange(np.size(size), dtype=np.int64)
        return cls(
            *(
                np.asarray(rows if column is None else column, dtype=np.int64)
                for column in (id, size, lower, upper, group)
            )
        )

    def __len__(self) -> int:
        return len(self.size)

    def __post_init__(self) -> None:
        for name in ("id", "lower", "upper", "group"):
            column = getattr(self, name)
            if column.shape != self.size.shape or column.ndim != 1:
                raise InputError(
                    f"heap buffers: column {name} has shape {column.shape}, expected one row for "
                    f"each of the {self.size.size} sizes"
                )
        rows = np.arange(len(self.size))
        _check_rows((self.size < 0) | (self.size > MAX_BYTES), self.size, "size", "0 to 2^60 bytes")
        if self.size.sum(dtype=np.float64) > MAX_BYTES:
            raise InputError("heap buffers: all sizes together are more than 2^60 bytes")
        _check_rows(
            (self.upper < self.lower) | ((self.upper == self.lower) & (self.size > 0)),
            self.upper,
            "upper",
            "more than lower",
        )
        outside = (self.group < 0) | (self.group >= len(rows))
        leader = np.where(outside, 0, self.group)
        outside |= self.group[leader] != leader
        _check_rows(outside, self.group, "group", "the row of a buffer that is its own group")
        again = np.ones(len(rows), dtype=bool)
        again[np.unique(self.id, return_index=True)[1]] = False
        _check_rows(again, self.id, "id", "an id of its own")


def _check_rows(wrong: npt.NDArray[np.bool_], column: Integers, name: str, valid: str) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RowError("heap buffers", row, f"{name} is {column[row]}, expected {valid}")


@dataclass(frozen=True, eq=False)
class HeapPlan:
    """Where the buffers go.

    Attributes:
        offset: int64 bytes from the start of the heap, one per buffer.
        height: bytes; the end of the highest buffer, not rounded up.
        strategy: the one that gave it.
    """

    offset: Integers
    height: int
    strategy: Strategy


def plan(
    buffers: HeapBuffers, *, alignment: int, strategies: tuple[Strategy, ...] = BEST_OF_TWO
) -> HeapPlan:
    """Place buffers as XLA does: run each strategy and keep the lowest heap, the first on a tie.

    * ``spatial``: largest first, then the longest live range, then the id
      (GlobalDecreasingSizeBestFitHeap::GetSpatialBufferIntervalCompare). The length is that of the
      group's first member alone.
    * ``temporal``: longest first, from the start of the group's first live range to the end of its
      last, then the largest, then the id (GetTemporalBufferIntervalCompare).
      Both put each group into the smallest gap that is free in all its live ranges, the lowest on
      a tie; above everything else there is always room (MakeFreeChunks, SlicedAllocationFinder).
    * ``fast_merge``: in the order of time, each group from its first step to its last without
      holes, into the smallest free chunk that fits, the lowest on a tie
      (ConstrainedGlobalDecreasingSizeBestFitHeap::FinishFastMerge, FreeChunksManager). A chunk that
      is not aligned loses its padding: nothing else gets it until the chunk is free again, and a
      chunk freed below it ends where the padding began.

    Args:
        buffers: live ranges; a buffer of 0 bytes is at offset 0.
        alignment: bytes; every offset is a multiple of it.
        strategies: in order; at least one.

    Raises:
        InputError: the alignment is not positive, or there is no such strategy.

    >>> buffers = HeapBuffers.from_columns(size=[8, 24, 16], lower=[0, 1, 2], upper=[2, 3, 4])
    >>> result = plan(buffers, alignment=8)
    >>> result.offset.tolist(), result.height, result.strategy
    ([24, 0, 24], 40, 'spatial')
    """
    if alignment < 1:
        raise InputError(f"heap plan: alignment is {alignment}, expected 1 byte or more")
    if not strategies or any(each not in _STRATEGIES for each in strategies):
        raise InputError(
            f"heap plan: strategies are {strategies}, expected one or more of "
            + ", ".join(_STRATEGIES)
        )
    groups = _Groups.of(buffers)
    best: tuple[int, Integers, Strategy] | None = None
    for strategy in strategies:
        offsets = _STRATEGIES[strategy](groups, alignment)
        height = int((offsets + groups.size).max(initial=0))
        if best is None or height < best[0]:
            best = height, offsets, strategy
    assert best is not None
    height, offsets, strategy = best
    offset = np.zeros(len(buffers), dtype=np.int64)
    placed = groups.number >= 0
    offset[placed] = offsets[groups.number[placed]]
    return HeapPlan(offset, height, strategy)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of buffers that share memory, one row each; only buffers of more than 0 bytes.

    ``start[first[g]:first[g + 1]]`` and ``stop`` are the live ranges of group g, in order, those
    that touch or overlap made one; as ranks of the steps, which keeps them in 32 bits.
    """

    id: Integers
    size: Integers
    lower: Integers
    upper: Integers
    leader_duration: Integers
    first: Integers
    start: npt.NDArray[np.int32]
    stop: npt.NDArray[np.int32]
    number: Integers  # of the group of each buffer, -1 if it has none

    @classmethod
    def of(cls, buffers: HeapBuffers) -> "_Groups":
        rows = np.flatnonzero(buffers.size > 0)
        leaders, group = np.unique(buffers.group[rows], return_inverse=True)
        number = np.full(len(buffers), -1, dtype=np.int64)
        number[rows] = group
        size = np.zeros(len(leaders), dtype=np.int64)
        np.maximum.at(size, group, buffers.size[rows])

        order = np.lexsort((buffers.lower[rows], group))
        rows, group = rows[order], group[order]
        lower, upper = buffers.lower[rows], buffers.upper[rows]
        starts_group = np.diff(group, prepend=-1) > 0
        reached = _running_maximum(upper, starts_group)
        starts_range = starts_group.copy()
        starts_range[1:] |= lower[1:] > reached[:-1]
        at = np.flatnonzero(starts_range)
        lower, upper = lower[at], reached[np.append(at[1:], len(rows))[: len(at)] - 1]
        first = np.append(np.flatnonzero(starts_group[at]), len(at))

        _, ranks = np.unique(np.concatenate([lower, upper]), return_inverse=True)
        start, stop = ranks[: len(at)].astype(np.int32), ranks[len(at) :].astype(np.int32)
        return cls(
            buffers.id[leaders],
            size,
            lower[first[:-1]],
            upper[first[1:] - 1],
            buffers.upper[leaders] - buffers.lower[leaders],
            first,
            start,
            stop,
            number,
        )

    def __len__(self) -> int:
        return len(self.size)


def _running_maximum(values: Integers, restarts: npt.NDArray[np.bool_]) -> Integers:
    """The largest value so far in each section; a section begins where ``restarts`` is true."""
    if not len(values):
        return values
    # One pass over all sections: lift each section above all those before it.
    low = int(values.min())
    span = int(values.max()) - low + 1
    lift = (np.cumsum(restarts) - 1) * span
    return np.asarray(np.maximum.accumulate(values - low + lift) - lift + low)


def _spatial(groups: _Groups, alignment: int) -> Integers:
    order = np.lexsort((groups.id, -groups.leader_duration, -groups.size))
    return _best_fit(groups, order, alignment)


def _temporal(groups: _Groups, alignment: int) -> Integers:
    order = np.lexsort((groups.id, -groups.size, groups.lower - groups.upper))
    return _best_fit(groups, order, alignment)


def _best_fit(groups: _Groups, order: Integers, alignment: int) -> Integers:
    """Put each group into the smallest gap that is free in all its live ranges."""
    offsets = np.zeros(len(groups), dtype=np.int64)
    placed = _Placed(len(groups.start))
    for group in order.tolist():
        ranges = slice(groups.first[group], groups.first[group + 1])
        start, stop = groups.start[ranges], groups.stop[ranges]
        size = int(groups.size[group])
        offset = placed.smallest_gap(start, stop, size)
        placed.add(start, stop, offset, -(-(offset + size) // alignment) * alignment)
        offsets[group] = offset
    return offsets


class _Placed:
    """The live ranges placed so far, by rising offset: columns that are scanned whole.

    A scan of 32-bit columns is quicker here than an interval tree in Python: 20,000 buffers take
    about two seconds.
    """

    def __init__(self, rows: int) -> None:
        self.rows = 0
        self.start = np.empty(rows, dtype=np.int32)
        self.stop = np.empty(rows, dtype=np.int32)
        self.offset = np.empty(rows, dtype=np.int64)
        self.end = np.empty(rows, dtype=np.int64)  # rounded up: where the next one may begin

    def smallest_gap(
        self, start: npt.NDArray[np.int32], stop: npt.NDArray[np.int32], size: int
    ) -> int:
        """The offset of the smallest gap of ``size`` bytes that is free in all the ranges."""
        starts, stops = self.start[: self.rows], self.stop[: self.rows]
        live = (starts < stop[0]) & (stops > start[0])
        for k in range(1, len(start)):
            live |= (starts < stop[k]) & (stops > start[k])
        used = np.flatnonzero(live)
        if not len(used):
            return 0
        reached = np.maximum.accumulate(self.end[used])
        gaps = self.offset[used]
        gaps[1:] -= reached[:-1]
        fits = np.flatnonzero(gaps >= size)
        if not len(fits):
            return int(reached[-1])
        at = fits[gaps[fits].argmin()]
        return int(reached[at - 1]) if at else 0

    def add(
        self, start: npt.NDArray[np.int32], stop: npt.NDArray[np.int32], offset: int, end: int
    ) -> None:
        at = int(np.searchsorted(self.offset[: self.rows], offset))
        after = at + len(start)
        self.rows += len(start)
        for column, values in (
            (self.start, start),
            (self.stop, stop),
            (self.offset, offset),
            (self.end, end),
        ):
            column[after : self.rows] = column[at : self.rows - len(start)]
            column[at:after] = values


def _fast_merge(groups: _Groups, alignment: int) -> Integers:
    offsets = np.zeros(len(groups), dtype=np.int64)
    free = _FreeChunks(alignment)
    in_use: list[tuple[int, int, int]] = []
    for group in np.lexsort((groups.id, -groups.size, groups.lower)).tolist():
        while in_use and in_use[0][0] <= groups.lower[group]:
            _, begin, end = heapq.heappop(in_use)
            free.add(begin, end)
        size = int(groups.size[group])
        begin, offset = free.take(size)
        heapq.heappush(in_use, (int(groups.upper[group]), begin, offset + size))
        offsets[group] = offset
    return offsets


class _FreeChunks:
    """The free chunks of a heap without end, those that touch made one (FreeChunksManager)."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.end_of = {0: MAX_BYTES**2}
        self.begin_of = {MAX_BYTES**2: 0}
        self.by_size = [(MAX_BYTES**2, 0)]

    def _entry(self, begin: int, end: int) -> tuple[int, int]:
        """What of a chunk can be used, which is less than nothing in a chunk of padding alone."""
        return end - -(-begin // self.alignment) * self.alignment, begin

    def _remove(self, begin: int) -> int:
        end = self.end_of.pop(begin)
        del self.begin_of[end]
        del self.by_size[bisect_left(self.by_size, self._entry(begin, end))]
        return end

    def add(self, begin: int, end: int) -> None:
        if end in self.end_of:
            end = self._remove(end)
        if begin in self.begin_of:
            below = self.begin_of[begin]
            self._remove(below)
            begin = below
        self.end_of[begin] = end
        self.begin_of[end] = begin
        insort(self.by_size, self._entry(begin, end))

    def take(self, size: int) -> tuple[int, int]:
        """Cut ``size`` bytes from the smallest chunk: where the chunk begins, and the offset."""
        _, begin = self.by_size[bisect_left(self.by_size, (size, -1))]
        end = self._remove(begin)
        offset = -(-begin // self.alignment) * self.alignment
        if offset + size < end:
            self.add(offset + size, end)
        return begin, offset


_STRATEGIES: dict[Strategy, Callable[[_Groups, int], Integers]] = {
    "spatial": _spatial,
    "temporal": _temporal,
    "fast_merge": _fast_merge,
}
