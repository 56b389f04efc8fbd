"""An executable's buffer assignment, from XLA's dump."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from alloclab.simulator.hlo_proto import read_hlo
from alloclab.simulator.program import Allocation, BufferAssignment, Kind, Values

#: xla.HeapSimulatorTrace.Event.Kind
_ALLOC, _FREE, _SHARE_WITH = 0, 1, 2


def read_assignment(path: str | Path) -> BufferAssignment:
    """The buffer assignment in an ``*after_optimizations.hlo.pb``.

    Raises:
        InputError: the file is not such a dump.
    """
    return assignment_of(read_hlo(path))


def assignment_of(hlo: Any) -> BufferAssignment:
    """The buffer assignment of a parsed xla.HloProto.

    Live ranges come from the heap simulator's traces: a step is a stretch of the schedule at one
    instruction that allocates or frees. Values without a trace (parameters, outputs, constants)
    are live throughout. They are those of XLA's ``*-live-range.txt``, but for a value that is
    written over its operand: here it follows the operand, there both are live at the instruction.
    """
    dumped = hlo.buffer_assignment
    outputs = _output_leaves(hlo)
    tables = {leaf for leaf, output in outputs.items() if output is None}
    donated = {
        entry.parameter_number: (list(entry.output_shape_index) or [0])[0]
        for entry in hlo.hlo_module.input_output_alias.entries
    }
    allocations = []
    for each in dumped.buffer_allocations:
        held = [part.logical_buffer_id for part in each.assigned]
        kind = _kind(each, holds_table=not tables.isdisjoint(held))
        parameter = each.parameter_number if kind == "parameter" else None
        output = None
        if parameter is not None:
            output = donated.get(parameter)
        elif kind == "output":
            output = next((outputs[leaf] for leaf in held if leaf in outputs), None)
        allocations.append(
            Allocation(each.index, each.size, kind, int(each.color), parameter, output)
        )
    names = {
        each.id: each.name
        for computation in hlo.hlo_module.computations
        for each in computation.instructions
    }
    values, steps = _values(dumped, names)
    return BufferAssignment(tuple(allocations), values, steps)


def _kind(allocation: Any, *, holds_table: bool) -> Kind:
    """What an allocation is for (the predicates of xla::BufferAllocation)."""
    if allocation.is_thread_local:
        return "thread_local"
    if allocation.is_entry_computation_parameter:
        return "parameter"
    if allocation.is_constant:
        return "constant"
    if allocation.maybe_live_out:
        # A temp block may hold a loop's tuple and carry the tuple flag; only what is live out
        # can be the table of the result.
        return "tuple" if holds_table or allocation.is_tuple else "output"
    return "temp"


def _output_leaves(hlo: Any) -> dict[int, int | None]:
    """Logical buffers of the result: the number of the output leaf, None for its tuple table."""
    module = hlo.hlo_module
    computations = {each.id: each for each in module.computations}
    entry = computations.get(module.entry_computation_id)
    if entry is None:
        return {}
    instructions = {
        each.id: each for computation in module.computations for each in computation.instructions
    }
    defined = {
        (each.defined_at.instruction_id, tuple(each.defined_at.shape_index)): each.id
        for each in hlo.buffer_assignment.logical_buffers
    }
    found = [_buffer_at(entry.root_id, (), instructions, computations, defined)]
    for output in count():
        buffer = _buffer_at(entry.root_id, (output,), instructions, computations, defined)
        if buffer is None and output >= len(instructions[entry.root_id].operand_ids):
            break
        found.append(buffer)
    whole, *parts = found
    if not any(each is not None for each in parts):  # one array, no tuple
        return {} if whole is None else {whole: 0}
    leaves: dict[int, int | None] = {} if whole is None else {whole: None}
    for output, buffer in enumerate(parts):
        if buffer is not None:
            leaves.setdefault(buffer, output)
    return leaves


def _buffer_at(
    at: int,
    index: tuple[int, ...],
    instructions: dict[int, Any],
    computations: dict[int, Any],
    defined: dict[tuple[int, tuple[int, ...]], int],
) -> int | None:
    """The logical buffer at an instruction's shape index, through what only passes it on."""
    while (at, index) not in defined:
        instruction = instructions[at]
        operands = instruction.operand_ids
        match instruction.opcode:
            case "tuple" if index and index[0] < len(operands):
                at, index = operands[index[0]], index[1:]
            case "get-tuple-element":
                at, index = operands[0], (instruction.tuple_index, *index)
            case "bitcast" | "while" | "optimization-barrier" | "add-dependency" | "copy-done":
                at = operands[0]
            case "call":
                at = computations[instruction.called_computation_ids[0]].root_id
            case _:
                return None
    return defined[at, index]


def _values(dumped: Any, names: dict[int, str]) -> tuple[Values, int]:
    defined_at = {each.id: each.defined_at.instruction_id for each in dumped.logical_buffers}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    step = -1
    for trace in dumped.heap_simulator_traces:
        at = None
        for event in trace.events:
            here = (event.computation_name, event.instruction_name)
            if here != at:
                step, at = step + 1, here
            if event.kind == _FREE:
                end[event.buffer_id] = step
            else:
                start.setdefault(event.buffer_id, step)
    steps = max(step + 1, 1)
    rows = [
        (
            names.get(defined_at[part.logical_buffer_id], str(part.logical_buffer_id)),
            number,
            part.offset,
            part.size,
            start.get(part.logical_buffer_id, 0),
            end.get(part.logical_buffer_id, steps - 1),
        )
        for number, each in enumerate(dumped.buffer_allocations)
        if not each.is_thread_local
        for part in each.assigned
    ]
    columns = list(zip(*rows, strict=True)) or [()] * 6
    return (
        Values(
            tuple(columns[0]),
            np.array(columns[1], np.int32),
            np.array(columns[2], np.int64),
            np.array(columns[3], np.int64),
            np.array(columns[4], np.int32),
            np.array(columns[5], np.int32),
        ),
        steps,
    )
