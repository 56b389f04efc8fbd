"""A replay reduced to what a figure can show: fewer points, and its free memory at some events."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alloclab.simulator.replay import ReplayResult

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FreeMemory:
    """The pool's free memory after some events of a replay, one row per event.

    Attributes:
        events: the events, rising.
        total: all free bytes of the pool.
        largest: bytes of its largest free block.
    """

    events: Int64s
    total: Int64s
    largest: Int64s

    @property
    def external_fragmentation(self) -> Floats:
        """1 - largest free block / all free, 0 where nothing is free.

        As `ReplayResult.fragmentation_at`.
        """
        share = np.ones(len(self.events))
        np.divide(self.largest, self.total, out=share, where=self.total > 0)
        return 1 - share


def sample_events(result: ReplayResult, count: int) -> Int64s:
    """At most ``count`` events, evenly spread, with the first, the last, the peak and the OOM.

    >>> from alloclab.policies.ideal import Ideal
    >>> from alloclab.simulator.replay import replay_requests
    >>> from alloclab.simulator.requests import RequestTrace
    >>> trace = RequestTrace.from_arrays([1] * 1000, range(1000), [8] * 1000)
    >>> sample_events(replay_requests(trace, Ideal(), limit=4000), 5).tolist()
    [0, 499, 500, 999]
    """
    length = len(result.trace)
    if length <= count:
        return np.arange(length)
    named = [] if result.peak_event is None else [result.peak_event]
    if result.oom is not None:
        named.append(result.oom.event)
    spread = np.linspace(0, length - 1, count - len(named)).astype(np.int64)
    return np.unique(np.concatenate([spread, np.array(named, np.int64)]))


def free_memory(result: ReplayResult, events: npt.ArrayLike) -> FreeMemory:
    """The free memory after each of the events, which rise.

    The same as `ReplayResult.free_blocks` of each event, but allocations are put in address order
    once for all of them: 400 events of a trace of 100,000 take a tenth of a second.
    """
    rows = np.asarray(events, np.int64)
    trace, outcome = result.trace, result.outcome
    order = np.argsort(outcome.offsets, kind="stable")
    order = order[outcome.taken[order] > 0]
    low = outcome.offsets[order]
    high = low + outcome.taken[order]
    made, freed = trace.alloc_events[order], trace.free_events[order]
    regions = np.array(outcome.regions, np.int64).reshape(-1, 5)
    start, size, taken_at, given_back, joined = regions.T
    returned = np.where(given_back < 0, len(trace), given_back)
    largest = np.zeros(len(rows), np.int64)
    for at, event in enumerate(rows.tolist()):
        held = (taken_at <= event) & (returned > event)
        piece_low, piece_high = _pieces(start[held], size[held], joined[held])
        live = (made <= event) & (freed > event)
        # As in free_blocks: where free memory begins and where it ends pair up in address order.
        begins = np.concatenate([piece_low, high[live]])
        ends = np.concatenate([low[live], piece_high])
        begins.sort(kind="stable")  # two sorted runs: one merge
        ends.sort(kind="stable")
        largest[at] = (ends - begins).max(initial=0)
    return FreeMemory(rows, (result.pool - result.in_use)[rows], largest)


def _pieces(start: Int64s, size: Int64s, joined: Int64s) -> tuple[Int64s, Int64s]:
    """Low and high end of the pool's pieces, sorted; a joined region belongs to the one before."""
    if not len(start):
        return start, start
    first = np.flatnonzero((joined == 0) | (np.arange(len(start)) == 0))
    low, bytes_ = start[first], np.add.reduceat(size, first)
    order = np.argsort(low, kind="stable")
    return low[order], (low + bytes_)[order]


def outline(values: npt.NDArray[np.int64], points: int) -> Int64s:
    """Rows of a timeline that keep its outline: about ``points`` of them, rising.

    The lowest and the highest row of every stretch are kept, the first and the last.

    >>> outline(np.array([0, 9, 1, 1, 5, 0, 1, 1]), 4).tolist()
    [0, 1, 4, 5, 7]
    """
    stretch = -(-len(values) // max(points // 2, 1))
    if stretch <= 2:
        return np.arange(len(values))
    table = np.pad(values, (0, -len(values) % stretch), mode="edge").reshape(-1, stretch)
    first = np.arange(len(table)) * stretch
    last = len(values) - 1
    rows = np.concatenate([[0], first + table.argmin(1), first + table.argmax(1), [last]])
    return np.unique(np.minimum(rows, last))
