"""The heaps inside a compiler's dump: traces, sizes and the offsets that XLA chose."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_trace import SHARE_WITH, HeapTrace


@dataclass(frozen=True)
class DumpedAllocation:
    """One allocation of a buffer assignment.

    Attributes:
        size: bytes.
        color: memory space.
        role: ``temp`` if it is scratch (BufferAllocation::IsPreallocatedTempBuffer), else
            ``thread_local`` or ``other``.
        pieces: offset and size (bytes) of the parts of a temp block that no heap trace speaks of,
            by rising offset: the tables of tuples, above all those of loops.
    """

    size: int
    color: int
    role: Literal["temp", "thread_local", "other"]
    pieces: tuple[tuple[int, int], ...] = ()


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
    """Read ``*after_optimizations.hlo.pb``, written under ``xla_dump_to``, ``xla_dump_hlo_as_proto``.

    Args:
        path: the file, a serialized xla.HloProto.
        name: of the result; the file's own if left out.

    Raises:
        InputError: not such a file, or one with no buffer assignment in it.
    """
    path = Path(path)
    try:
        hlo = _hlo_proto()()
        hlo.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise InputError(f"{path}: cannot be read as an HloProto: {error}") from None
    assignment = hlo.buffer_assignment
    if not assignment.buffer_allocations:
        raise InputError(
            f"{path}: holds no buffer assignment; expected the module after optimizations"
        )
    sizes = {each.id: each.size for each in assignment.logical_buffers}
    placed = {
        part.logical_buffer_id: (number, part.offset)
        for number, allocation in enumerate(assignment.buffer_allocations)
        for part in allocation.assigned
    }
    # A trace also names its allocation, but by the number that it had before the temporary ones
    # were combined.
    heaps = tuple(
        _heap(trace, sizes, placed, assignment.buffer_allocations)
        for trace in assignment.heap_simulator_traces
        if trace.events
    )
    traced = {int(buffer) for heap in heaps for buffer in heap.buffer}
    allocations = tuple(_allocation(each, traced) for each in assignment.buffer_allocations)
    return HeapDump(name or path.name, allocations, heaps)


def _heap(
    trace: Any, sizes: dict[int, int], placed: dict[int, tuple[int, int]], allocations: Any
) -> DumpedHeap:
    buffers = list(dict.fromkeys(event.buffer_id for event in trace.events))
    events = HeapTrace(
        np.array([event.kind for event in trace.events], dtype=np.uint8),
        np.array([event.buffer_id for event in trace.events], dtype=np.int64),
        np.array(
            [event.share_with if event.kind == SHARE_WITH else -1 for event in trace.events],
            dtype=np.int64,
        ),
    )
    (number,) = {placed[each][0] for each in buffers}
    return DumpedHeap(
        allocations[number].color,
        number,
        trace.whole_module_simulation,
        events,
        np.array(buffers, dtype=np.int64),
        np.array([sizes[each] for each in buffers], dtype=np.int64),
        np.array([placed[each][1] for each in buffers], dtype=np.int64),
    )


def _allocation(allocation: Any, traced: set[int]) -> DumpedAllocation:
    role: Literal["temp", "thread_local", "other"] = "temp"
    if allocation.is_thread_local:
        role = "thread_local"
    elif (
        allocation.is_entry_computation_parameter
        or allocation.maybe_live_out
        or allocation.is_constant
    ):
        role = "other"
    pieces = {
        (part.offset, part.size)
        for part in allocation.assigned
        if role == "temp" and part.logical_buffer_id not in traced
    }
    return DumpedAllocation(allocation.size, allocation.color, role, tuple(sorted(pieces)))


#: The fields that are read here, with their numbers in xla/service/hlo.proto; a parser skips the
#: others.
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "HloProto": {"buffer_assignment": (3, "BufferAssignment")},
    "BufferAssignment": {
        "logical_buffers": (1, "*LogicalBuffer"),
        "buffer_allocations": (3, "*Allocation"),
        "heap_simulator_traces": (4, "*Trace"),
    },
    "LogicalBuffer": {"id": (1, "int"), "size": (2, "int")},
    "Allocation": {
        "size": (2, "int"),
        "is_thread_local": (3, "bool"),
        "is_entry_computation_parameter": (5, "bool"),
        "maybe_live_out": (7, "bool"),
        "color": (8, "int"),
        "assigned": (9, "*Assigned"),
        "is_constant": (12, "bool"),
    },
    "Assigned": {"logical_buffer_id": (1, "int"), "offset": (2, "int"), "size": (3, "int")},
    "Trace": {"events": (1, "*Event"), "whole_module_simulation": (2, "bool")},
    "Event": {"kind": (1, "int"), "buffer_id": (2, "int"), "share_with": (5, "int")},
}


@cache
def _hlo_proto() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="alloclab/heap_dump.proto", package="alloclab.heap_dump", syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        added = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            repeated = kind.startswith("*")
            each = added.field.add(
                name=name,
                number=number,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
            if kind in ("int", "bool"):
                each.type = field.TYPE_INT64 if kind == "int" else field.TYPE_BOOL
            else:
                each.type = field.TYPE_MESSAGE
                each.type_name = f".alloclab.heap_dump.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("alloclab.heap_dump.HloProto")
    )
