"""Checks of a program trace: every rule that its documentation states."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError, RowError
from alloclab.policies.units import MAX_BYTES
from alloclab.simulator.program import (
    EVENT_KINDS,
    EXECUTE,
    KINDS,
    RELEASE,
    TRANSFER_IN,
    TRANSFER_OUT,
    Allocation,
    Aval,
    BufferAssignment,
    Executable,
    ProgramTrace,
    Values,
)
from alloclab.simulator.requests import SPACES

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

#: The columns with one row per event.
EVENT_COLUMNS: dict[str, Any] = {
    "kind": np.uint8,
    "time_us": np.float64,
    "duration_us": np.float64,
    "device": np.int32,
    "executable": np.int32,
    "launch": np.int32,
    "label": np.int32,
}
#: The columns with one row per buffer.
BUFFER_COLUMNS: dict[str, Any] = {
    "buffer_aval": np.int32,
    "buffer_bytes": np.int64,
    "buffer_device": np.int32,
    "buffer_space": np.uint8,
    "buffer_alias_of": np.int64,
}
#: The columns of `Values` beside the names, in the order in which files hold them.
VALUE_COLUMNS: dict[str, Any] = {
    "allocation": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "start": np.int32,
    "end": np.int32,
}


def check_program(trace: ProgramTrace) -> None:
    """Check every column and every executable of a program trace.

    Beside types and ranges: buffers are numbered in the order in which events make them; an
    operand is a buffer that was made before and neither released nor donated since; an execution
    has the operands and results of its executable, on one device; a buffer takes over the memory
    of another only where that is donated to the execution that makes it.

    Raises:
        InputError: something is not valid. Where a row is at fault it is a `RowError` whose table
            is ``event``, ``buffer`` or ``executable``.
    """
    _check_columns(trace)
    _check_texts(trace)
    for index, executable in enumerate(trace.executables):
        try:
            _check_executable(executable)
        except InputError as error:
            raise RowError("program trace", index, str(error), table="executable") from error
    _check_events(trace)
    _check_buffers(trace)
    _check_operands(trace)
    _check_aliases(trace)


def maker_of(trace: ProgramTrace, buffer: int) -> int:
    """The event that makes a buffer."""
    return int(np.searchsorted(trace.result_start, buffer, side="right")) - 1


def _rows(starts: Int64s) -> Int64s:
    """The event of each item of all lists, given where each event's list starts."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _check_columns(trace: ProgramTrace) -> None:
    """Types and lengths of the columns."""
    events, buffers = len(trace.kind), len(trace.buffer_bytes)
    expected = {name: (dtype, events) for name, dtype in EVENT_COLUMNS.items()}
    expected |= {name: (dtype, buffers) for name, dtype in BUFFER_COLUMNS.items()}
    operands = len(trace.operands)
    for name in ("operand_start", "result_start"):
        expected[name] = (np.int64, events + 1)
    expected |= {
        "operands": (np.int64, operands),
        "donated": (np.bool_, operands),
        "results": (np.int64, len(trace.results)),
    }
    for name, (dtype, length) in expected.items():
        column = getattr(trace, name)
        if getattr(column, "dtype", None) != dtype or column.shape != (length,):
            found, shape = getattr(column, "dtype", type(column).__name__), np.shape(column)
            raise InputError(
                f"program trace: column {name} is {found} of shape {shape}, expected "
                f"{dtype.__name__} of shape ({length},)"
            )


def _check_texts(trace: ProgramTrace) -> None:
    texts = (trace.name, trace.target, *trace.labels, *trace.versions, *trace.versions.values())
    for text in texts:
        if not isinstance(text, str):
            raise InputError(
                f"program trace: name, target, labels and versions hold {text!r}, expected text"
            )
    for name, table in (("labels", trace.labels), ("avals", trace.avals)):
        if len(set(table)) < len(table):
            raise InputError(f"program trace: {name} hold one entry twice, expected each once")
    for index, aval in enumerate(trace.avals):
        if not _is_aval(aval):
            raise RowError("program trace", index, f"found {aval}, expected {_AVAL}", table="aval")


_AVAL = "a shape of integers from 0 and a dtype"


def _is_aval(aval: Aval) -> bool:
    return (
        isinstance(aval.dtype, str)
        and aval.dtype != ""
        and all(_is_whole(each, 1 << 59) for each in aval.shape)
    )


def _is_whole(value: Any, limit: int) -> bool:
    """Whether the value is an integer (no bool) in [0, limit)."""
    return type(value) is int and 0 <= value < limit


def _check_executable(executable: Executable) -> None:
    if not (isinstance(executable.name, str) and isinstance(executable.fingerprint, str)):
        raise InputError("name and fingerprint must be text")
    for aval in (*executable.inputs, *executable.outputs):
        if not _is_aval(aval):
            raise InputError(f"found {aval}, expected {_AVAL}")
    for name in ("flops", "bytes_accessed"):
        value = getattr(executable, name)
        if value is not None and not (
            isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
        ):
            raise InputError(f"{name} {value!r}, expected a finite number or None")
    for target, assignment in executable.targets.items():
        if not isinstance(target, str):
            raise InputError(f"target {target!r}, expected text")
        for place, allocation in enumerate(assignment.allocations):
            problem = _allocation_problem(allocation, place, executable)
            if problem:
                raise InputError(f"target {target!r}, allocation {place}: {problem}")
        if not _is_whole(assignment.steps, 2**31):
            raise InputError(f"target {target!r}: steps {assignment.steps!r}, expected 0 or more")
        if assignment.values is not None:
            _check_values(target, assignment, assignment.values)


def _allocation_problem(allocation: Allocation, place: int, executable: Executable) -> str:
    parameter, output, kind = allocation.parameter, allocation.output, allocation.kind
    inputs, outputs = len(executable.inputs), len(executable.outputs)
    rules = (
        (allocation.index == place, f"index {allocation.index!r}, expected its place"),
        (
            _is_whole(allocation.size, MAX_BYTES),
            f"size {allocation.size!r}, expected bytes from 0 and less than 1 EiB",
        ),
        (kind in KINDS, f"kind {kind!r}, expected one of {', '.join(KINDS)}"),
        (_is_whole(allocation.color, 2**31), f"color {allocation.color!r}, expected 0 or more"),
        (
            (kind == "parameter") == (parameter is not None),
            f"kind {kind} with parameter {parameter!r}, expected a number for parameters only",
        ),
        (
            parameter is None or _is_whole(parameter, inputs),
            f"parameter {parameter!r}, but there are {inputs} inputs",
        ),
        (
            output is None or _is_whole(output, outputs),
            f"output {output!r}, but there are {outputs} outputs",
        ),
    )
    return next((text for good, text in rules if not good), "")


def _check_values(target: str, assignment: BufferAssignment, values: Values) -> None:
    length = len(values.name)
    for name, dtype in VALUE_COLUMNS.items():
        column = getattr(values, name)
        if getattr(column, "dtype", None) != dtype or column.shape != (length,):
            raise InputError(
                f"target {target!r}: column {name} of the values is not {length} of "
                f"{dtype.__name__}"
            )
    if not all(isinstance(name, str) for name in values.name):
        raise InputError(f"target {target!r}: names of values must be text")

    def refuse(bad: Bools, text: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            raise InputError(f"target {target!r}, value {at} {values.name[at]!r}: {text}")

    sizes = np.array([each.size for each in assignment.allocations], np.int64)
    outside = (values.allocation < 0) | (values.allocation >= len(sizes))
    refuse(outside, f"allocation is none of the {len(sizes)}")
    room = sizes[values.allocation] if length else np.zeros(0, np.int64)
    beyond = (values.offset < 0) | (values.size < 0) | (values.offset > room)
    refuse(beyond | (values.size > room - values.offset), "lies outside of its allocation")
    when = (values.start < 0) | (values.start > values.end) | (values.end > assignment.steps)
    refuse(when, f"is live outside of the {assignment.steps} steps, or ends before it starts")


def _refuse(
    bad: Bools, text: Callable[[int], str], rows: Int64s | None = None, table: str = "event"
) -> None:
    """Raise RowError for the first that is bad; ``rows`` are their rows, by default themselves."""
    if bad.any():
        at = int(bad.argmax())
        raise RowError(
            "program trace", at if rows is None else int(rows[at]), text(at), table=table
        )


def _check_events(trace: ProgramTrace) -> None:
    """The columns with one row per event, each for itself."""
    kind, executions = trace.kind, trace.kind == EXECUTE

    def refuse(bad: Bools, column: str, valid: str) -> None:
        _refuse(bad, lambda at: f"{column} {getattr(trace, column)[at]}, expected {valid}")

    refuse(kind >= len(EVENT_KINDS), "kind", f"0 to {len(EVENT_KINDS) - 1}")
    refuse(~np.isfinite(trace.time_us), "time_us", "a finite number of microseconds")
    duration = trace.duration_us
    refuse(np.isinf(duration) | (duration < 0), "duration_us", "0 or more microseconds, or NaN")
    refuse(trace.device < 0, "device", "0 or more")
    refuse(~executions & (trace.executable != -1), "executable", "-1, as it is no execution")
    refuse(~executions & (trace.launch != -1), "launch", "-1, as it is no execution")
    count = len(trace.executables)
    unknown = executions & ((trace.executable < 0) | (trace.executable >= count))
    refuse(unknown, "executable", f"one of the {count} executables")
    refuse(executions & (trace.launch < 0), "launch", "0 or more for an execution")
    unknown = (trace.label < 0) | (trace.label >= len(trace.labels))
    refuse(unknown, "label", "an index into labels")
    for name, ends in {"operand": len(trace.operands), "result": len(trace.results)}.items():
        starts = getattr(trace, f"{name}_start")
        if starts[0] != 0 or starts[-1] != ends or (np.diff(starts) < 0).any():
            raise InputError(
                f"program trace: column {name}_start must rise from 0 to the {ends} {name}s"
            )
    _check_launches(trace, np.flatnonzero(executions))
    operands, results = np.diff(trace.operand_start), np.diff(trace.result_start)
    makes = (kind == TRANSFER_IN) | executions
    reads = np.isin(kind, (EXECUTE, TRANSFER_OUT, RELEASE))
    _refuse(~makes & (results > 0), lambda at: f"{EVENT_KINDS[kind[at]]} with results")
    _refuse(~reads & (operands > 0), lambda at: f"{EVENT_KINDS[kind[at]]} with operands")
    rows = np.flatnonzero(executions)
    used = trace.executable[rows]
    for what, given, expected in (
        ("operands", operands, [len(each.inputs) for each in trace.executables]),
        ("results", results, [len(each.outputs) for each in trace.executables]),
    ):
        if len(rows):
            wanted = np.array(expected, np.int64)[used]
            _refuse(
                given[rows] != wanted,
                lambda at, what=what, given=given, wanted=wanted: (  # type: ignore[misc]
                    f"{given[rows[at]]} {what}, but executable {used[at]} has {wanted[at]}"
                ),
                rows,
            )


def _check_launches(trace: ProgramTrace, rows: Int64s) -> None:
    """One launch is one executable, once on each of its devices."""
    order = rows[np.lexsort((trace.device[rows], trace.launch[rows]))]
    launch, device = trace.launch[order], trace.device[order]
    same = launch[1:] == launch[:-1]
    _refuse(
        same & (device[1:] == device[:-1]),
        lambda at: f"launch {launch[at]} is on device {device[at]} already",
        order[1:],
    )
    executable = trace.executable[order]
    _refuse(
        same & (executable[1:] != executable[:-1]),
        lambda at: f"launch {launch[at]} is of two executables",
        order[1:],
    )


def _check_buffers(trace: ProgramTrace) -> None:
    """The columns with one row per buffer, and that each is made once, in order."""
    makers = _rows(trace.result_start)
    _refuse(
        trace.results != np.arange(len(trace.results)),
        lambda at: f"makes buffer {trace.results[at]}, but the next number is {at}",
        makers,
    )
    if len(trace.results) != len(trace.buffer_bytes):
        raise InputError(
            f"program trace: {len(trace.buffer_bytes)} buffers, but events make "
            f"{len(trace.results)}"
        )

    def refuse(bad: Bools, column: str, valid: str) -> None:
        _refuse(
            bad,
            lambda at: f"{column} {getattr(trace, column)[at]}, expected {valid}",
            table="buffer",
        )

    count = len(trace.avals)
    aval, size = trace.buffer_aval, trace.buffer_bytes
    refuse((aval < 0) | (aval >= count), "buffer_aval", f"one of the {count} avals")
    refuse((size < 0) | (size >= MAX_BYTES), "buffer_bytes", "from 0 and less than 1 EiB")
    device = trace.device[makers]
    refuse(trace.buffer_device != device, "buffer_device", "that of the event that makes it")
    refuse(trace.buffer_space >= len(SPACES), "buffer_space", f"0 to {len(SPACES) - 1}")


def _check_operands(trace: ProgramTrace) -> None:
    """Operands are live: made before, not released and not donated."""
    rows = _rows(trace.operand_start)
    operands, count = trace.operands, len(trace.buffer_bytes)
    unknown = (operands < 0) | (operands >= count)
    _refuse(unknown, lambda at: f"operand {operands[at]} is none of the {count} buffers", rows)
    makers = _rows(trace.result_start)
    early = makers[operands] >= rows
    _refuse(early, lambda at: f"operand {operands[at]} is not made yet", rows)
    executes = trace.kind[rows] == EXECUTE
    _refuse(trace.donated & ~executes, lambda _: "donates, but is no execution", rows)
    elsewhere = executes & (trace.buffer_device[operands] != trace.device[rows])
    _refuse(elsewhere, lambda at: f"operand {operands[at]} is on another device", rows)
    # The first release or donation of a buffer must be the last that is heard of it.
    ends = np.flatnonzero(trace.donated | (trace.kind[rows] == RELEASE))
    end = np.full(count, len(operands), np.int64)
    np.minimum.at(end, operands[ends], ends)
    rows_and_never = np.append(rows, len(trace))
    late = (rows >= rows_and_never[end[operands]]) & (np.arange(len(rows)) != end[operands])
    if late.any():
        at = int(late.argmax())
        ended = int(end[operands[at]])
        text = f"operand {operands[at]} is {'donated' if trace.donated[ended] else 'released'}"
        row, before = int(rows[at]), int(rows[ended])
        if row == before:
            raise RowError("program trace", row, f"{text} in the same event", table="event")
        raise RowError("program trace", row, f"{text} at", before, table="event")


def _check_aliases(trace: ProgramTrace) -> None:
    """A buffer takes over the memory of one that is donated to the execution that makes it."""
    takers = np.flatnonzero(trace.buffer_alias_of != -1)
    sources = trace.buffer_alias_of[takers]
    makers = _rows(trace.result_start)[takers]
    rows = _rows(trace.operand_start)
    given_to = np.full(len(trace.buffer_bytes) + 1, -1, np.int64)
    given_to[trace.operands[trace.donated]] = rows[trace.donated]
    known = (sources >= 0) & (sources < len(trace.buffer_bytes))
    wrong = given_to[np.where(known, sources, -1)] != makers
    _refuse(
        wrong,
        lambda at: (
            f"takes over buffer {sources[at]}, which is not donated to the execution that makes it"
        ),
        takers,
        "buffer",
    )
    _, first = np.unique(sources, return_index=True)
    twice = np.ones(len(sources), bool)
    twice[first] = False
    _refuse(
        twice,
        lambda at: f"takes over buffer {sources[at]}, which another buffer takes over already",
        takers,
        "buffer",
    )
