"""The heap simulator's trace: what XLA's compiler asks of the heap that becomes a temp block."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError, RowError
from alloclab.simulator.heap_planner import HeapBuffers

#: HeapSimulatorTrace.Event.Kind (openxla/xla, xla/service/hlo.proto).
ALLOC, FREE, SHARE_WITH = range(3)


@dataclass(frozen=True, eq=False)
class HeapTrace:
    """Events of one heap simulation (HeapSimulatorTrace in xla/service/hlo.proto), one row each.

    Attributes:
        kind: uint8, ALLOC, FREE, or SHARE_WITH (the buffer uses the memory of another).
        buffer: int64, the id of the value, which is that of its LogicalBufferProto.
        share_with: int64, the other buffer's id where the kind is SHARE_WITH; else anything.
    """

    kind: npt.NDArray[np.uint8]
    buffer: npt.NDArray[np.int64]
    share_with: npt.NDArray[np.int64]


def from_heap_trace(trace: HeapTrace, sizes: Mapping[int, int]) -> HeapBuffers:
    """The live ranges that the trace describes, in the order of their first events.

    A step is one event, as in GlobalDecreasingSizeBestFitHeap (Alloc, ShareWith and Free each move
    its clock; those of 0 bytes do not). Every member of a group counts with the size of the largest
    (HeapSimulator::RunComputation, which takes the size of the whole HloBuffer).

    Args:
        trace: the events; every buffer must be freed.
        sizes: bytes of each buffer, by id.

    Raises:
        RowError: an event that cannot be, such as the second allocation of a buffer.

    >>> trace = HeapTrace(
    ...     np.array([ALLOC, SHARE_WITH, FREE, FREE], np.uint8),
    ...     np.array([7, 9, 7, 9]),
    ...     np.array([-1, 7, -1, -1]),
    ... )
    >>> buffers = from_heap_trace(trace, {7: 64, 9: 64})
    >>> buffers.id.tolist(), buffers.lower.tolist(), buffers.upper.tolist(), buffers.group.tolist()
    ([7, 9], [0, 1], [2, 3], [0, 0])
    """
    if not len(trace.kind) == len(trace.buffer) == len(trace.share_with):
        raise InputError("heap trace: the columns kind, buffer, share_with differ in length")
    row_of: dict[int, int] = {}
    group: list[int] = []
    events = list(
        zip(trace.kind.tolist(), trace.buffer.tolist(), trace.share_with.tolist(), strict=True)
    )
    for place, (kind, buffer, share_with) in enumerate(events):
        if buffer not in sizes:
            raise _error(place, f"buffer {buffer} has no size")
        if kind == FREE:
            continue
        if kind not in (ALLOC, SHARE_WITH):
            raise _error(place, f"kind is {kind}, expected 0 (alloc), 1 (free) or 2 (share with)")
        if buffer in row_of:
            raise _error(place, f"buffer {buffer} is allocated a second time")
        if kind == SHARE_WITH and share_with not in row_of:
            raise _error(place, f"buffer {buffer} shares with {share_with}, never allocated")
        row_of[buffer] = len(group)
        group.append(group[row_of[share_with]] if kind == SHARE_WITH else len(group))

    size = np.array([sizes[each] for each in row_of], dtype=np.int64)
    groups = np.array(group, dtype=np.int64)
    largest = np.zeros(len(size), dtype=np.int64)
    np.maximum.at(largest, groups, size)
    size = largest[groups]
    lower, upper = _steps(events, row_of, size)
    return HeapBuffers(np.array(list(row_of), dtype=np.int64), size, lower, upper, groups)


def _steps(
    events: list[tuple[int, int, int]], row_of: dict[int, int], size: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    lower = np.full(len(size), -1, dtype=np.int64)
    upper = np.full(len(size), -1, dtype=np.int64)
    clock = 0
    for place, (kind, buffer, _) in enumerate(events):
        row = row_of.get(buffer, -1)
        if kind != FREE:
            lower[row] = clock
        elif row < 0 or lower[row] < 0:
            raise _error(place, f"buffer {buffer} is freed before it is allocated")
        elif upper[row] >= 0:
            raise _error(place, f"buffer {buffer} is freed a second time")
        else:
            upper[row] = clock
        clock += int(size[row] > 0)
    for buffer, row in row_of.items():
        if upper[row] < 0:
            raise InputError(f"heap trace: buffer {buffer} is never freed")
    return lower, upper


def _error(place: int, text: str) -> RowError:
    return RowError("heap trace", place, text, table="event")
