"""Traces as JSON lines: the form that people read. See docs/reference/trace-format.md."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np

from alloclab.policies.errors import InputError, RowError
from alloclab.policies.units import MAX_BYTES
from alloclab.simulator.program import EVENT_KINDS, Aval, ProgramTrace
from alloclab.simulator.program_checks import BUFFER_COLUMNS, EVENT_COLUMNS, check_program, maker_of
from alloclab.simulator.requests import ALLOC, FREE, SPACES, RequestTrace
from alloclab.simulator.trace_lines import EVENT_LIMIT, LINE_LIMIT, Lines, write_text
from alloclab.simulator.trace_objects import (
    ABSENT,
    MAX_INT64,
    REQUEST_TRACE,
    Fields,
    aval_text,
    executable_to_json,
    header_of,
    open_header,
    parse_aval,
    parse_executable,
    parse_object,
    shown,
    to_json,
)
from alloclab.simulator.trace_rows import FIELDS, RequestRows, is_default

_BATCH = 4096
_DTYPES = EVENT_COLUMNS | BUFFER_COLUMNS | {"donated": np.bool_}


def read_jsonl(first: str, lines: Lines) -> RequestTrace | ProgramTrace:
    """Read a file of JSON lines, given its first line and the others.

    Raises:
        InputError: a line is not valid; the message names it.
    """
    with lines.here():
        kind, header = open_header(parse_object(first))
    return (_read_requests if kind == REQUEST_TRACE else _read_program)(header, lines)


def _objects(lines: Lines, count: int, what: str) -> Iterator[dict[str, Any]]:
    """The next lines as objects."""
    for number in range(count):
        line = next(lines, None)
        if line is None:
            raise lines.bad(f"the file is cut: it ends after {number} of {count} {what}")
        try:
            yield parse_object(line)
        except InputError as error:
            cut = "" if line.endswith("\n") else "; the file seems cut here"
            raise lines.bad(f"{error}{cut}") from error


def _end(lines: Lines) -> None:
    for line in lines:
        if not line.isspace():
            raise lines.bad("the file goes on, but the header's number of events was reached")


def _read_requests(header: Fields, lines: Lines) -> RequestTrace:
    with lines.here():
        events = header.whole("events", high=EVENT_LIMIT)
        name = header.text("name", "")
        labels = header.texts("labels", [""])
        header.close()
    rows = RequestRows(labels)
    objects = _objects(lines, events, "events")
    try:
        while batch := list(islice(objects, _BATCH)):
            rows.add(_columns(batch, rows.rows))
        _end(lines)
        return rows.trace(name)
    except RowError as error:
        place = error.placed(str(lines.path), lambda _, row: f"line {row + 2}")
        raise InputError(place) from error


def _columns(batch: list[dict[str, Any]], first: int) -> dict[str, list[Any]]:
    """A batch of events as columns, those that no event has left out."""
    names = set[str]().union(*batch)
    if unknown := names - FIELDS.keys():
        at, name = next(
            (at, name) for at, each in enumerate(batch) for name in each.keys() & unknown
        )
        text = f"unknown field {shown(name)}, expected {', '.join(FIELDS)}"
        raise RowError("request trace", first + at, text)
    columns = {name: [each.get(name, ABSENT) for each in batch] for name in names}
    return {"op": [ABSENT] * len(batch)} | columns


def _read_program(header: Fields, lines: Lines) -> ProgramTrace:
    with lines.here():
        counts = {
            name: header.whole(name, high=EVENT_LIMIT)
            for name in ("avals", "executables", "events")
        }
        texts = {"name": header.text("name", ""), "target": header.text("target")}
        versions = header.mapping("versions", {})
        labels = header.texts("labels", [""])
        header.close()
    avals: dict[str, Aval] = {}
    for each in _objects(lines, counts["avals"], "avals"):
        with lines.here():
            fields = Fields(each)
            text = fields.text("aval")
            if text in avals:
                raise InputError(f"aval {shown(text)} is there twice, expected each once")
            avals[text] = parse_aval(text)
            fields.close()
    executables = []
    for number, each in enumerate(_objects(lines, counts["executables"], "executables")):
        with lines.here():
            fields = Fields(each)
            if fields.whole("executable") != number:
                raise InputError(f"expected executable {number} here")
            executables.append(parse_executable(fields))
    rows = _ProgramRows(list(avals), labels)
    for each in _objects(lines, counts["events"], "events"):
        with lines.here():
            rows.add(Fields(each))
    _end(lines)
    trace = rows.trace(
        executables=tuple(executables), avals=tuple(avals.values()), versions=versions, **texts
    )
    first = {"aval": 2, "executable": 2 + len(avals), "event": 2 + len(avals) + len(executables)}

    def place(table: str, row: int) -> str:
        if table == "buffer":
            table, row = "event", maker_of(trace, row)
        return f"line {first[table] + row}"

    try:
        check_program(trace)
    except RowError as error:
        raise InputError(error.placed(str(lines.path), place)) from error
    except InputError as error:
        raise InputError(f"{lines.path}: {error}") from error
    return trace


class _ProgramRows:
    """Collects the events of a program trace."""

    def __init__(self, avals: list[str], labels: Iterable[str]) -> None:
        self._avals = {text: index for index, text in enumerate(avals)}
        self._labels = {text: index for index, text in enumerate(labels)}
        self._columns: dict[str, list[Any]] = {
            name: [] for name in (*EVENT_COLUMNS, *BUFFER_COLUMNS, "operands", "donated", "results")
        }
        self._columns |= {"operand_start": [0], "result_start": [0]}

    def add(self, fields: Fields) -> None:
        """Add an event.

        Raises:
            InputError: a field is not valid.
        """
        columns = self._columns
        device = fields.whole("device", 0)
        operands = fields.wholes("operands")
        donated = fields.wholes("donated")
        if len(set(donated)) < len(donated) or (donated and max(donated) >= len(operands)):
            raise InputError(
                f"donated {shown(donated)}, expected places in the list of operands, each once"
            )
        for result in fields.items("results", ()):
            self._add_buffer(Fields(result), device)
        row = {
            "kind": fields.choice("event", EVENT_KINDS),
            "time_us": fields.number("time_us", 0.0),
            "duration_us": fields.number("duration_us", math.nan),
            "device": device,
            "executable": fields.whole("executable", -1),
            "launch": fields.whole("launch", -1),
            "label": self._labels.setdefault(fields.text("label", ""), len(self._labels)),
            "operand_start": len(columns["operands"]) + len(operands),
            "result_start": len(columns["results"]),
        }
        fields.close()
        for name, value in row.items():
            columns[name].append(value)
        columns["operands"] += operands
        flags = [False] * len(operands)
        for at in donated:
            flags[at] = True
        columns["donated"] += flags

    def _add_buffer(self, fields: Fields, device: int) -> None:
        columns = self._columns
        if fields.whole("buffer", high=MAX_INT64) != len(columns["results"]):
            raise InputError(f"expected buffer {len(columns['results'])} here")
        aval = fields.text("aval")
        if aval not in self._avals:
            raise InputError(f"aval {shown(aval)} is none of those listed above")
        row = {
            "results": len(columns["results"]),
            "buffer_aval": self._avals[aval],
            "buffer_bytes": fields.whole("bytes", high=MAX_BYTES - 1),
            "buffer_device": device,
            "buffer_space": fields.choice("space", SPACES, SPACES[0]),
            "buffer_alias_of": fields.whole("alias_of", -1, high=MAX_INT64),
        }
        fields.close()
        for name, value in row.items():
            columns[name].append(value)

    def trace(self, **parts: Any) -> ProgramTrace:
        """The trace of all events so far, not yet checked."""
        columns: dict[str, Any] = {
            name: np.array(values, _DTYPES.get(name, np.int64))
            for name, values in self._columns.items()
        }
        return ProgramTrace(labels=tuple(self._labels), **parts, **columns)


def write_jsonl(trace: RequestTrace | ProgramTrace, path: Path, compression: str) -> None:
    """Write the trace; fields that are at their default are left out.

    Raises:
        InputError: the file cannot be written, or a line would be longer than `LINE_LIMIT`.
    """
    header = header_of(trace)
    if isinstance(trace, ProgramTrace):
        header |= {"avals": len(trace.avals), "executables": len(trace.executables)}
        lines = _program_lines(trace)
    else:
        lines = _request_lines(trace)
    header["events"] = len(trace)
    errors = "backslashreplace"  # of a lone surrogate makes JSON's own escape for it
    with write_text(path, compression, errors) as file:
        for line in chain([to_json(header)], lines):
            if len(line) > LINE_LIMIT // 6 and len(line.encode(errors=errors)) >= LINE_LIMIT:
                raise InputError(
                    f"{path}: a line would be longer than {LINE_LIMIT >> 20} MiB; save as .parquet"
                )
            file.write(line)
            file.write("\n")


def _request_lines(trace: RequestTrace) -> Iterator[str]:
    extras = [_fragments(trace, name) for name in list(FIELDS)[3:] if not is_default(trace, name)]
    extra = map("".join, zip(*extras, strict=True)) if extras else repeat("")
    for op, number, size, more in zip(
        trace.op.tolist(), trace.id.tolist(), trace.size.tolist(), extra, strict=False
    ):
        if op == ALLOC:
            yield f'{{"op":"alloc","id":{number},"size":{size}{more}}}'
        elif op == FREE:
            yield f'{{"op":"free","id":{number}{more}}}'
        else:
            yield f'{{"op":"mark"{more}}}'


def _fragments(trace: RequestTrace, name: str) -> Iterator[str]:
    """Per event: what a field adds to its line, nothing where it is at its default."""
    values = getattr(trace, name).tolist()
    texts: Sequence[str] | None = {"space": SPACES, "label": trace.labels}.get(name)
    if texts is not None:
        parts = [
            "" if text == FIELDS[name].default else f',"{name}":{to_json(text)}' for text in texts
        ]
        return map(parts.__getitem__, values)
    default = FIELDS[name].default
    return ("" if value == default else f',"{name}":{value}' for value in values)


def _program_lines(trace: ProgramTrace) -> Iterator[str]:
    avals = list(map(aval_text, trace.avals))
    for text in avals:
        yield to_json({"aval": text})
    for number, executable in enumerate(trace.executables):
        yield to_json({"executable": number} | executable_to_json(executable))
    events = {name: getattr(trace, name).tolist() for name in EVENT_COLUMNS}
    buffers = {name: getattr(trace, name).tolist() for name in BUFFER_COLUMNS}
    operands, donated = trace.operands.tolist(), trace.donated.tolist()
    starts = zip(
        pairwise(trace.operand_start.tolist()), pairwise(trace.result_start.tolist()), strict=True
    )
    for row, ((start, end), (first, last)) in enumerate(starts):
        results = [
            {
                "buffer": buffer,
                "aval": avals[buffers["buffer_aval"][buffer]],
                "bytes": buffers["buffer_bytes"][buffer],
                "space": SPACES[buffers["buffer_space"][buffer]],
                "alias_of": buffers["buffer_alias_of"][buffer],
            }
            for buffer in range(first, last)
        ]
        duration = events["duration_us"][row]
        event = {
            "event": EVENT_KINDS[events["kind"][row]],
            "label": trace.labels[events["label"][row]],
            "time_us": events["time_us"][row],
            "duration_us": None if math.isnan(duration) else duration,
            "device": events["device"][row],
            "executable": events["executable"][row],
            "launch": events["launch"][row],
            "operands": operands[start:end],
            "donated": [at for at, each in enumerate(donated[start:end]) if each],
            "results": [_without_defaults(each) for each in results],
        }
        yield to_json(_without_defaults(event))


#: What the fields of a program's events and results are where they are left out.
_DEFAULTS: dict[str, Any] = {
    "label": "",
    "time_us": 0.0,
    "duration_us": None,
    "device": 0,
    "executable": -1,
    "launch": -1,
    "operands": [],
    "donated": [],
    "results": [],
    "space": SPACES[0],
    "alias_of": -1,
}


def _without_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }
