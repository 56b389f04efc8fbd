"""The heaps inside a compiler's dump: traces, sizes and the offsets that XLA chose."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_trace import SHARE_WITH, HeapTrace
from alloclab.simulator.hlo_proto import read_hlo

Role = Literal["temp", "thread_local", "output", "other"]


class Piece(NamedTuple):
    """A part of a temp block: its offset and size in bytes, and its place in the module."""

    offset: int
    size: int
    position: int


@dataclass(frozen=True)
class DumpedAllocation:
    """One allocation of a buffer assignment.

    Attributes:
        size: bytes.
        color: memory space.
        role: ``temp`` if it is scratch (BufferAllocation::IsPreallocatedTempBuffer), else
            ``thread_local``, ``output`` (it may live out), or ``other``.
        position: the place in the module of the first instruction that defines a value of the
            allocation's size, counted over all computations, callers first; in a computation each
            instruction comes after its operands (BufferAssigner::AssignBuffersForComputations).
        pieces: the parts of a temp block that no heap trace speaks of, by rising offset: the
            tables of tuples, above all those of loops.
    """

    size: int
    color: int
    role: Role
    position: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, eq=False)
class DumpedHeap:
    """One heap: what was asked, and where XLA put it.

    Attributes:
        color: memory space.
        allocation: its place in the dump's allocations.
        whole_module: false where the heap was not simulated over the whole schedule; on a TPU that
            is VMEM, placed by memory space assignment.
        trace: the events.
        buffer, size, offset: int64, one row for each buffer of the trace in the order of the first
            events: its id, its bytes, and its offset within the allocation.
    """

    color: int
    allocation: int
    whole_module: bool
    trace: HeapTrace
    buffer: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeapDump:
    """The allocations and the heaps of one compiled module."""

    name: str
    allocations: tuple[DumpedAllocation, ...]
    heaps: tuple[DumpedHeap, ...]


def read_heap_dump(path: str | Path, name: str = "") -> HeapDump:
    """Read ``*after_optimizations.hlo.pb``, which XLA writes where its options say so.

    The options are ``xla_dump_to`` (a folder) and ``xla_dump_hlo_as_proto`` (true).

    Args:
        path: the file, a serialized xla.HloProto.
        name: of the result; the file's own if left out.

    Raises:
        InputError: not such a file, or one with no buffer assignment in it.
    """
    hlo = read_hlo(path)
    assignment = hlo.buffer_assignment
    buffers = {each.id: each for each in assignment.logical_buffers}
    placed = {
        part.logical_buffer_id: (number, part.offset)
        for number, allocation in enumerate(assignment.buffer_allocations)
        for part in allocation.assigned
    }
    for trace in assignment.heap_simulator_traces:
        for event in trace.events:
            if event.buffer_id not in buffers or event.buffer_id not in placed:
                raise InputError(
                    f"{path}: value {event.buffer_id} of a heap trace is not in the assignment"
                )
    heaps = tuple(
        _heap(trace, buffers, placed, assignment.buffer_allocations)
        for trace in assignment.heap_simulator_traces
        if trace.events
    )
    position = _positions(hlo.hlo_module)
    try:
        defined = {
            number: position[buffer.defined_at.instruction_id] for number, buffer in buffers.items()
        }
    except KeyError as error:
        raise InputError(
            f"{path}: a value is defined by instruction {error}, which the module does not have"
        ) from None
    traced = {buffer for heap in heaps for buffer in heap.buffer.tolist()}
    allocations = tuple(
        _allocation(each, defined, traced) for each in assignment.buffer_allocations
    )
    return HeapDump(name or Path(path).name, allocations, heaps)


def _positions(module: Any) -> dict[int, int]:
    """The place of each instruction. Dumps list callees first, and operands before their users."""
    callers_first = reversed(module.computations)
    instructions = (each for computation in callers_first for each in computation.instructions)
    return {each.id: place for place, each in enumerate(instructions)}


def _heap(
    trace: Any,
    buffers: Mapping[int, Any],
    placed: Mapping[int, tuple[int, int]],
    allocations: Any,
) -> DumpedHeap:
    used = list(dict.fromkeys(event.buffer_id for event in trace.events))
    events = HeapTrace(
        np.array([event.kind for event in trace.events], dtype=np.uint8),
        np.array([event.buffer_id for event in trace.events], dtype=np.int64),
        np.array(
            [event.share_with if event.kind == SHARE_WITH else -1 for event in trace.events],
            dtype=np.int64,
        ),
    )
    # A trace also names its allocation, but by the number that it had before the temporary ones
    # were combined.
    number = placed[used[0]][0]
    return DumpedHeap(
        int(allocations[number].color),
        number,
        trace.whole_module_simulation,
        events,
        np.array(used, dtype=np.int64),
        np.array([buffers[each].size for each in used], dtype=np.int64),
        np.array([placed[each][1] for each in used], dtype=np.int64),
    )


def _allocation(allocation: Any, defined: Mapping[int, int], traced: set[int]) -> DumpedAllocation:
    role: Role = "temp"
    if allocation.is_thread_local:
        role = "thread_local"
    elif allocation.maybe_live_out:
        role = "output"
    elif allocation.is_entry_computation_parameter or allocation.is_constant:
        role = "other"
    pieces: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for part in allocation.assigned:
        if role == "temp" and part.logical_buffer_id not in traced:
            pieces[part.offset, part.size].append(defined[part.logical_buffer_id])
    whole = [
        defined[part.logical_buffer_id]
        for part in allocation.assigned
        if part.size == allocation.size
    ]
    return DumpedAllocation(
        allocation.size,
        int(allocation.color),
        role,
        min(whole, default=0),
        tuple(Piece(*place, min(positions)) for place, positions in sorted(pieces.items())),
    )
