"""Request traces as comma-separated values: the form that anything can write.

The header names the columns: ``op``, ``id`` and ``size``, and any of the others that a request
trace has. See docs/reference/trace-format.md.
"""

import csv
import re
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from alloclab.policies.errors import InputError, RowError
from alloclab.simulator.requests import ALLOC, MARK, OPS, SPACES, RequestTrace
from alloclab.simulator.trace_lines import EVENT_LIMIT, Lines, write_text
from alloclab.simulator.trace_objects import ABSENT, shown
from alloclab.simulator.trace_rows import FIELDS, RequestRows, is_default

_BATCH = 4096
_PLAIN = re.compile(r"[\w./:-]*").fullmatch
_INTEGER = re.compile(r"-?[0-9]{1,40}", re.ASCII).fullmatch


def read_csv(first: str, lines: Lines) -> RequestTrace:
    """Read a CSV file, given its first line and the others.

    Raises:
        InputError: a line is not valid; the message names it.
    """
    names = _header(first, lines)
    rows = RequestRows()
    where = array("q")  # the line of each row
    try:
        for batch in _batches(names, lines, where):
            rows.add(batch)
        return rows.trace()
    except RowError as error:
        place = error.placed(str(lines.path), lambda _, row: f"line {where[row]}")
        raise InputError(place) from error


def _header(first: str, lines: Lines) -> list[str]:
    names = [each.strip().strip('"') for each in first.split(",")]
    if not {"op", "id", "size"} <= set(names):
        raise lines.bad(
            f"found {shown(first.strip())}, expected a trace: JSON lines, Parquet, or CSV with the "
            "header op,id,size"
        )
    for name in names:
        if name not in FIELDS:
            raise lines.bad(f"unknown column {shown(name)}, expected {', '.join(FIELDS)}")
        if names.count(name) > 1:
            raise lines.bad(f"column {shown(name)} is there twice, expected once")
    return names


def _batches(names: list[str], lines: Lines, where: "array[int]") -> Iterator[dict[str, Any]]:
    reader = csv.reader(lines, strict=True)
    convert = [_CONVERT.get(name, _text) for name in names]
    while rows := list(islice(_rows(reader, len(names), lines, where), _BATCH)):
        columns = zip(*rows, strict=True)
        yield {
            name: list(map(each, column))
            for name, each, column in zip(names, convert, columns, strict=True)
        }
        if len(where) > EVENT_LIMIT:
            raise lines.bad(f"more than {EVENT_LIMIT} events")


def _rows(reader: Any, width: int, lines: Lines, where: "array[int]") -> Iterator[list[str]]:
    start = lines.number + 1
    try:
        for row in reader:
            if row:  # a blank line says nothing
                if len(row) != width:
                    raise lines.bad(f"{len(row)} fields, expected {width} as in the header", start)
                where.append(start)
                yield row
            start = lines.number + 1
    except csv.Error as error:
        raise lines.bad(f"is not CSV: {error}", start) from error


def _text(text: str) -> Any:
    return text.strip() or ABSENT


def _integer(text: str) -> Any:
    """The integer, or the text where it is none: what is wrong is said where types are checked."""
    text = text.strip()
    return int(text) if _INTEGER(text) else text or ABSENT


def _number(text: str) -> Any:
    text = text.strip()
    try:
        return float(text) if text.isascii() and "_" not in text else text
    except ValueError:
        return text or ABSENT


_CONVERT = {
    name: _integer if int in field.types and float not in field.types else _text
    for name, field in FIELDS.items()
} | {"time_us": _number, "label": lambda text: text or ABSENT}


def write_csv(trace: RequestTrace, path: Path, compression: str) -> None:
    """Write the trace; columns that hold nothing but the default are left out.

    Raises:
        InputError: the file cannot be written, or a label cannot be held by UTF-8.
    """
    ops = trace.op.tolist()
    columns: dict[str, Any] = {
        "op": map(OPS.__getitem__, ops),
        "id": (
            "" if op == MARK else number for op, number in zip(ops, trace.id.tolist(), strict=True)
        ),
        "size": (
            size if op == ALLOC else "" for op, size in zip(ops, trace.size.tolist(), strict=True)
        ),
    }
    texts = {"space": SPACES, "label": list(map(_quoted, trace.labels))}
    for name in list(FIELDS)[3:]:
        if not is_default(trace, name):
            values = getattr(trace, name).tolist()
            columns[name] = map(texts[name].__getitem__, values) if name in texts else values
    with write_text(path, compression) as file:
        file.write(f"{','.join(columns)}\n")
        for row in zip(*columns.values(), strict=True):
            file.write(f"{','.join(map(str, row))}\n")


def _quoted(label: str) -> str:
    """The label as a field; csv.writer would leave a lone carriage return bare."""
    return label if _PLAIN(label) else '"' + label.replace('"', '""') + '"'
