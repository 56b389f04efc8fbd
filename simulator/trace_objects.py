"""The JSON objects in trace files: the header, and the parts of a program trace.

They are the same in JSON lines and in the metadata of Parquet files.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alloclab.policies.errors import InputError
from alloclab.policies.units import MAX_BYTES
from alloclab.simulator.program import (
    KINDS,
    Allocation,
    Aval,
    BufferAssignment,
    Executable,
    ProgramTrace,
    Values,
)
from alloclab.simulator.program_checks import VALUE_COLUMNS
from alloclab.simulator.requests import RequestTrace

VERSION = 1
REQUEST_TRACE, PROGRAM_TRACE = "request trace", "program trace"

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1

#: Stands for a field that is not there; null is not a value of any field.
ABSENT: Any = ...


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in the text: no NaN or infinity, no key twice.

    Raises:
        InputError: it is anything else.
    """
    text = text.strip(" \t\r\n")
    try:
        value, end = _decode(text)
    except RecursionError as error:
        raise InputError("is nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}, column {error.colno}") from error
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"is not JSON: {error}") from error
    if end < len(text):
        raise InputError(f"found more after a JSON value, at column {end + 1}")
    if type(value) is not dict:
        raise InputError(f"found {shown(value)}, expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise InputError(f"the key {shown(twice)} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise InputError(f"{name} is not a value, expected a finite number")


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).raw_decode


def to_json(value: Any) -> str:
    """The value as compact JSON on one line, as readable as its text is."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def shown(value: Any) -> str:
    """A value for an error message, cut short."""
    if value is ABSENT:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def within(place: str) -> Iterator[None]:
    """Put the place in front of the message of an `InputError` that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


class Fields:
    """The fields of a JSON object, taken and checked one by one.

    Raises:
        InputError: a field is missing, not of the type or out of range; `close`: some are left.
    """

    def __init__(self, value: Any) -> None:
        if type(value) is not dict:
            raise InputError(f"found {shown(value)}, expected a JSON object")
        self._left = dict(value)

    def take(self, name: str, default: Any, types: tuple[type, ...], valid: str) -> Any:
        value = self._left.pop(name, default)
        if value is ABSENT:
            raise InputError(f"{shown(name)} is missing, expected {valid}")
        if type(value) not in types and value is not default:
            raise InputError(f"{name} {shown(value)}, expected {valid}")
        return value

    def text(self, name: str, default: str = ABSENT) -> str:
        text: str = self.take(name, default, (str,), "text")
        return text

    def whole(
        self, name: str, default: int | None = ABSENT, low: int = 0, high: int = MAX_INT32
    ) -> Any:
        valid = f"an integer from {low} to {high}"
        value = self.take(name, default, (int,), valid)
        if value is not default and not low <= value <= high:
            raise InputError(f"{name} {shown(value)}, expected {valid}")
        return value

    def number(self, name: str, default: float | None = ABSENT) -> Any:
        value = self.take(name, default, (int, float), "a finite number")
        if value is default:
            return value
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
        raise InputError(f"{name} {shown(value)}, expected a finite number")

    def items(self, name: str, default: Sequence[Any] = ABSENT) -> list[Any]:
        found: list[Any] = self.take(name, default, (list,), "a list")
        return found

    def texts(self, name: str, default: Sequence[str] = ABSENT) -> tuple[str, ...]:
        found = self.items(name, default)
        for each in found:
            if type(each) is not str:
                raise InputError(f"{name} holds {shown(each)}, expected text")
        if len(set(found)) < len(found):
            twice = next(each for each in found if found.count(each) > 1)
            raise InputError(f"{name} holds {shown(twice)} twice, expected each once")
        return tuple(found)

    def wholes(self, name: str) -> list[int]:
        found = self.items(name, ())
        for each in found:
            if type(each) is not int or not 0 <= each <= MAX_INT64:
                raise InputError(f"{name} holds {shown(each)}, expected integers from 0")
        return found

    def choice(self, name: str, texts: Sequence[str], default: str = ABSENT) -> int:
        """The place of the field's text among ``texts``."""
        valid = f"one of {', '.join(texts)}"
        text = self.take(name, default, (str,), valid)
        if text not in texts:
            raise InputError(f"{name} {shown(text)}, expected {valid}")
        return texts.index(text)

    def mapping(self, name: str, default: Mapping[str, Any] = ABSENT) -> dict[str, Any]:
        found: dict[str, Any] = self.take(name, default, (dict,), "an object")
        return found

    def close(self) -> None:
        """All fields must have been taken."""
        if self._left:
            raise InputError(f"unknown field {shown(next(iter(self._left)))}")


def header_of(trace: RequestTrace | ProgramTrace) -> dict[str, Any]:
    """What the header says about a trace in every form."""
    kind = REQUEST_TRACE if isinstance(trace, RequestTrace) else PROGRAM_TRACE
    header: dict[str, Any] = {"alloclab": kind, "version": VERSION, "name": trace.name}
    if isinstance(trace, ProgramTrace):
        header |= {"target": trace.target, "versions": dict(trace.versions)}
    return header | {"labels": list(trace.labels)}


def open_header(value: dict[str, Any]) -> tuple[str, Fields]:
    """The kind of trace, and the other fields of a header of a version that can be read."""
    fields = Fields(value)
    kinds = f'"{REQUEST_TRACE}" or "{PROGRAM_TRACE}"'
    kind = fields.take("alloclab", ABSENT, (str,), kinds)
    if kind not in {REQUEST_TRACE, PROGRAM_TRACE}:
        raise InputError(f"alloclab {shown(kind)}, expected {kinds}")
    version = fields.take("version", ABSENT, (int,), f"the number {VERSION}")
    if version != VERSION:
        raise InputError(
            f"version {version} of the trace format, but only version {VERSION} can be read "
            "here; upgrade alloclab to read a newer one"
        )
    return kind, fields


_AVAL = re.compile(r"(.+)\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\]", re.DOTALL | re.ASCII)


def aval_text(aval: Aval) -> str:
    """The type and shape as text, such as ``float32[8,16]``."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def parse_aval(text: Any) -> Aval:
    """The inverse of `aval_text`.

    >>> parse_aval("float32[8,16]")
    Aval(shape=(8, 16), dtype='float32')
    """
    match = _AVAL.fullmatch(text) if type(text) is str else None
    if match is None:
        raise InputError(f'found {shown(text)}, expected a type with shape as "float32[8,16]"')
    return Aval(tuple(map(int, match[2].split(","))) if match[2] else (), match[1])


def executable_to_json(executable: Executable) -> dict[str, Any]:
    """The fields of an executable; what is unknown is left out."""
    fields: dict[str, Any] = {
        "name": executable.name,
        "fingerprint": executable.fingerprint,
        "inputs": list(map(aval_text, executable.inputs)),
        "outputs": list(map(aval_text, executable.outputs)),
    }
    for name in ("flops", "bytes_accessed"):
        if (value := getattr(executable, name)) is not None:
            fields[name] = value
    return fields | {
        "targets": {name: _assignment_to_json(each) for name, each in executable.targets.items()}
    }


def parse_executable(fields: Fields) -> Executable:
    """The inverse of `executable_to_json`; closes the fields."""
    name, fingerprint = fields.text("name"), fields.text("fingerprint")
    executable = Executable(
        name=name,
        fingerprint=fingerprint,
        inputs=tuple(map(parse_aval, fields.items("inputs"))),
        outputs=tuple(map(parse_aval, fields.items("outputs"))),
        targets={
            target: _parse_assignment(target, each)
            for target, each in fields.mapping("targets", {}).items()
        },
        flops=fields.number("flops", None),
        bytes_accessed=fields.number("bytes_accessed", None),
    )
    fields.close()
    return executable


def _assignment_to_json(assignment: BufferAssignment) -> dict[str, Any]:
    fields: dict[str, Any] = {"allocations": list(map(_allocation_to_json, assignment.allocations))}
    if assignment.steps:
        fields["steps"] = assignment.steps
    values = assignment.values
    if values is not None:
        columns = (getattr(values, name).tolist() for name in VALUE_COLUMNS)
        fields["values"] = [list(row) for row in zip(values.name, *columns, strict=True)]
    return fields


def _allocation_to_json(allocation: Allocation) -> dict[str, Any]:
    fields: dict[str, Any] = {"size": allocation.size, "kind": allocation.kind}
    if allocation.color:
        fields["color"] = allocation.color
    for name in ("parameter", "output"):
        if (value := getattr(allocation, name)) is not None:
            fields[name] = value
    return fields


def _parse_assignment(target: str, value: Any) -> BufferAssignment:
    with within(f"target {shown(target)}"):
        fields = Fields(value)
        allocations = []
        for index, each in enumerate(fields.items("allocations")):
            with within(f"allocation {index}"):
                allocations.append(_parse_allocation(index, Fields(each)))
        steps = fields.whole("steps", 0)
        rows = fields.items("values", None)  # type: ignore[arg-type]
        fields.close()
        values = None if rows is None else _parse_values(rows)
        return BufferAssignment(tuple(allocations), values, steps)


def _parse_allocation(index: int, fields: Fields) -> Allocation:
    size = fields.whole("size", high=MAX_BYTES - 1)
    kind = KINDS[fields.choice("kind", KINDS)]
    allocation = Allocation(
        index=index,
        size=size,
        kind=kind,
        color=fields.whole("color", 0),
        parameter=fields.whole("parameter", None),
        output=fields.whole("output", None),
    )
    fields.close()
    return allocation


def _parse_values(rows: list[Any]) -> Values:
    for number, row in enumerate(rows):
        if type(row) is not list or list(map(type, row)) != [str, int, int, int, int, int]:
            raise InputError(
                f"value {number}: found {shown(row)}, "
                "expected [name, allocation, offset, size, start, end]"
            )
        for name, each in zip(VALUE_COLUMNS, row[1:], strict=True):
            limit = np.iinfo(VALUE_COLUMNS[name]).max
            if not 0 <= each <= limit:
                raise InputError(
                    f"value {number}: {name} {shown(each)}, expected an integer from 0 to {limit}"
                )
    names, *columns = zip(*rows, strict=True) if rows else [()] * 6
    return Values(
        names,
        **{
            name: np.array(column, dtype)
            for (name, dtype), column in zip(VALUE_COLUMNS.items(), columns, strict=True)
        },
    )
