"""Reading a buffer assignment out of XLA's dump."""

from pathlib import Path
from typing import Any

import pytest

from alloclab.policies.errors import InputError
from alloclab.simulator.assignment import assignment_of, read_assignment
from alloclab.simulator.hlo_proto import join, parse, read_hlo

# Instructions of the entry computation: id, opcode, operands, tuple index.
Instruction = tuple[int, str, list[int], int]


def module(
    instructions: list[Instruction], root: int, aliases: dict[int, int] | None = None
) -> Any:
    hlo = join(b"", b"")
    computation = hlo.hlo_module.computations.add(id=1, root_id=root)
    hlo.hlo_module.entry_computation_id = 1
    for id_, opcode, operands, index in instructions:
        computation.instructions.add(
            id=id_, name=f"{opcode}.{id_}", opcode=opcode, operand_ids=operands, tuple_index=index
        )
    for output, parameter in (aliases or {}).items():
        hlo.hlo_module.input_output_alias.entries.add(
            output_shape_index=[output], parameter_number=parameter
        )
    return hlo


def allocate(hlo: Any, size: int, instruction: int, index: list[int], **flags: Any) -> None:
    """An allocation that holds one logical buffer, defined at the instruction."""
    assignment = hlo.buffer_assignment
    number = len(assignment.buffer_allocations)
    buffer = assignment.logical_buffers.add(id=100 + number, size=size)
    buffer.defined_at.instruction_id = instruction
    buffer.defined_at.shape_index.extend(index)
    allocation = assignment.buffer_allocations.add(index=number, size=size, **flags)
    allocation.assigned.add(logical_buffer_id=100 + number, size=size)


def train_step() -> Any:
    """Parameter 0 is donated to output 1; output 0 has memory of its own; a temp block."""
    hlo = module(
        [
            (1, "parameter", [], 0),
            (2, "fusion", [1], 0),
            (3, "fusion", [1], 0),
            (4, "tuple", [2, 3], 0),
        ],
        root=4,
        aliases={1: 0},
    )
    allocate(hlo, 400, 1, [], is_entry_computation_parameter=True, maybe_live_out=True)
    allocate(hlo, 100, 2, [], maybe_live_out=True)
    allocate(hlo, 16, 4, [], maybe_live_out=True, is_tuple=True)
    allocate(hlo, 8, 2, [7], is_constant=True)
    allocate(hlo, 8, 2, [8], is_thread_local=True)
    allocate(hlo, 999, 2, [9], is_tuple=True)  # a loop's state may share the temp block
    return hlo


def test_kinds_outputs_and_donation() -> None:
    found = assignment_of(train_step())
    assert [(each.kind, each.parameter, each.output) for each in found.allocations] == [
        ("parameter", 0, 1),
        ("output", None, 0),
        ("tuple", None, None),
        ("constant", None, None),
        ("thread_local", None, None),
        ("temp", None, None),
    ]
    assert found.bytes_of("temp") == 999
    assert found.alias_bytes == 400


@pytest.mark.parametrize(
    "between",
    [
        [(5, "bitcast", [2], 0)],
        [(6, "tuple", [1, 2], 0), (5, "get-tuple-element", [6], 1)],
        [(6, "tuple", [1, 2], 0), (7, "while", [6], 0), (5, "get-tuple-element", [7], 1)],
    ],
)
@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_an_output_is_found_through_what_passes_it_on(
    between: list[Instruction], in_a_tuple: bool
) -> None:
    instructions = [(1, "parameter", [], 0), (2, "copy", [1], 0), *between]
    if in_a_tuple:
        instructions.append((8, "tuple", [1, 5], 0))
    hlo = module(instructions, root=8 if in_a_tuple else 5)
    allocate(hlo, 64, 2, [], maybe_live_out=True)
    (output,) = assignment_of(hlo).allocations
    assert (output.kind, output.output) == ("output", 1 if in_a_tuple else 0)


def test_live_ranges_are_steps_of_the_heap_trace() -> None:
    hlo = train_step()
    trace = hlo.buffer_assignment.heap_simulator_traces.add()
    for kind, buffer, instruction in [(0, 101, "a"), (0, 105, "a"), (1, 101, "b"), (1, 105, "c")]:
        trace.events.add(kind=kind, buffer_id=buffer, instruction_name=instruction)
    found = assignment_of(hlo)
    assert found.steps == 3
    assert found.values is not None
    ranges = dict(zip(found.values.allocation.tolist(),
                      zip(found.values.start.tolist(), found.values.end.tolist(), strict=True),
                      strict=True))  # fmt: skip
    assert ranges[1] == (0, 1)
    assert ranges[5] == (0, 2)
    assert ranges[0] == (0, 2)  # no trace: live throughout
    assert 4 not in ranges  # thread-local


def test_what_is_no_dump_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "module.hlo.pb"
    with pytest.raises(InputError, match=r"module\.hlo\.pb: No such file"):
        read_assignment(file)
    file.write_bytes(b"\xff\xff\xff")
    with pytest.raises(InputError, match=r"cannot be read as an xla\.HloProto"):
        read_hlo(file)
    file.write_bytes(b"")
    with pytest.raises(InputError, match="holds no buffer assignment"):
        read_hlo(file)
    file.write_bytes(train_step().SerializeToString())
    assert len(read_assignment(file).allocations) == 6
    assert parse("HloProto", file.read_bytes(), "here").hlo_module.entry_computation_id == 1
