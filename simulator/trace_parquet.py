"""Traces as Parquet: the form that is small and fast. See docs/reference/trace-format.md.

All that touches pyarrow is here; it is imported only when a Parquet file is read or written.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from alloclab.policies.errors import InputError, RowError
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.program import EVENT_KINDS, ProgramTrace
from alloclab.simulator.program_checks import check_program, maker_of
from alloclab.simulator.requests import OPS, SPACES, RequestTrace
from alloclab.simulator.trace_lines import EVENT_LIMIT
from alloclab.simulator.trace_objects import (
    PROGRAM_TRACE,
    Fields,
    aval_text,
    executable_to_json,
    header_of,
    open_header,
    parse_aval,
    parse_executable,
    parse_object,
    shown,
    within,
)
from alloclab.simulator.trace_rows import CODES, FIELDS, is_default, request_trace

Column = npt.NDArray[Any]

_KEY = b"alloclab"

#: What pandas calls an index that it writes beside the columns.
_PANDAS_INDEX = "__index_level_0__"

#: The most bytes that a file may say that it unpacks to: this, and so much for each event.
_UNPACKED, _UNPACKED_PER_EVENT = 1 << 30, 200

_PROGRAM_COLUMNS: dict[str, Any] = {
    "event": pa.dictionary(pa.int8(), pa.string()),
    "label": pa.dictionary(pa.int32(), pa.string()),
    "time_us": pa.float64(),
    "duration_us": pa.float64(),
    "device": pa.int32(),
    "executable": pa.int32(),
    "launch": pa.int32(),
    "operands": pa.list_(pa.int64()),
    "donated": pa.list_(pa.bool_()),
    "results": pa.list_(pa.int64()),
    "result_aval": pa.list_(pa.int32()),
    "result_bytes": pa.list_(pa.int64()),
    "result_space": pa.list_(pa.uint8()),
    "result_alias_of": pa.list_(pa.int64()),
}


def read_parquet(path: Path) -> RequestTrace | ProgramTrace:
    """Read a Parquet file.

    Raises:
        InputError: it is not a trace, or not a valid one; the message says where.
    """
    try:
        return _read(path)
    finally:  # every column has been copied
        pa.default_memory_pool().release_unused()


def _read(path: Path) -> RequestTrace | ProgramTrace:
    with _arrow_errors(path):
        file = pq.ParquetFile(
            path, page_checksum_verification=True, thrift_string_size_limit=2**31 - 1
        )
        meta = file.metadata
        rows, groups = meta.num_rows, range(meta.num_row_groups)
        unpacked = sum(meta.row_group(each).total_byte_size for each in groups)
        if rows > EVENT_LIMIT:
            raise InputError(f"{path}: {rows} rows, expected at most {EVENT_LIMIT}")
        if unpacked > _UNPACKED + _UNPACKED_PER_EVENT * rows:
            raise InputError(f"{path}: unpacks to {unpacked} bytes, too much for {rows} events")
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise InputError(f"{path}: two columns of one name: {', '.join(names)}")
        packed_header = (meta.metadata or {}).get(_KEY)
        table = file.read()
    if packed_header is None:
        return _read_foreign(path, table)
    with within(f"{path}: header"):
        try:
            text = packed_header.decode()
        except UnicodeDecodeError as error:
            raise InputError("is not UTF-8 text") from error
        kind, header = open_header(parse_object(text))
        if kind == PROGRAM_TRACE:
            parts = _open_program(header)
        else:
            name, labels = header.text("name", ""), header.texts("labels", [""])
            header.close()
    if kind == PROGRAM_TRACE:
        return _read_program(path, table, parts)
    return _read_requests(path, table, labels, name)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: cut or damaged Parquet data: {why}") from error


# --- request traces -----------------------------------------------------------------------


def _read_foreign(path: Path, table: Any) -> RequestTrace:
    """Read a file that something else wrote: the same columns, and no header."""
    if _PANDAS_INDEX in table.column_names:
        table = table.drop_columns(_PANDAS_INDEX)
    if not {"op", "id", "size"} <= set(table.column_names):
        found = ", ".join(table.column_names) or "none"
        raise InputError(f"{path}: columns {found}, expected at least op, id and size")
    return _read_requests(path, table, ("",), "")


def _read_requests(path: Path, table: Any, labels: Sequence[str], name: str) -> RequestTrace:
    for each in table.column_names:
        if each not in FIELDS:
            raise InputError(f"{path}: unknown column {shown(each)}, expected {', '.join(FIELDS)}")
    known = {text: index for index, text in enumerate(labels)}
    columns: dict[str, Column] = {}
    try:
        for each in FIELDS:  # op comes first: it tells where the others are needed
            if each in table.column_names:
                columns[each] = _request_column(path, each, table[each], columns.get("op"), known)
            elif each in {"op", "id", "size"}:
                raise InputError(f"{path}: column {each} is missing")
        if "label" not in columns and len(table) and known.get("") != 0:
            columns["label"] = np.full(len(table), known.setdefault("", len(known)), np.int32)
        return request_trace(columns, tuple(known), name)
    except RowError as error:
        raise InputError(error.placed(str(path), "{} {}".format)) from error


def _request_column(
    path: Path, name: str, column: Any, op: Column | None, known: dict[str, int]
) -> Column:
    """One column as numbers; texts as their codes, those of labels added to ``known``."""
    field, kind = FIELDS[name], column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_text if name in {"space", "label"} else is_number or (is_text and name == "op")):
        raise InputError(f"{path}: column {name} is of type {column.type}, expected {field.valid}")

    def refuse(bad: Column, found: Callable[[int], Any]) -> None:
        if bad.any():
            row = int(bad.argmax())
            text = f"{name} {shown(found(row))}, expected {field.valid}"
            raise RowError("request trace", row, text)

    if column.null_count:
        needed = np.ones(len(column), bool)
        if op is not None:
            needed = np.isin(op, [CODES["op"][each] for each in field.needed_by])
        absent = column.is_null().combine_chunks().to_numpy(zero_copy_only=False)
        refuse(absent & needed, lambda _: None)
    if not is_text:
        return _numbers(column.fill_null(field.default) if column.null_count else column)
    codes = known if name == "label" else CODES[name]
    found, texts = _dictionary(column, field.default)
    if name == "label":
        for text in texts:
            codes.setdefault(text, len(codes))
    coded = np.array([codes.get(text, -1) for text in texts], np.int64)[found]
    refuse(coded < 0, lambda row: texts[found[row]])
    return coded.astype(field.dtype)


def _dictionary(column: Any, default: str) -> tuple[Column, list[str]]:
    """A column of text as places in a list of texts; where there is none it is the default."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries().combine_chunks()
    texts, places = column.dictionary.to_pylist(), column.indices
    if column.null_count:
        places = places.cast(pa.int64()).fill_null(len(texts))
        texts.append(default)
    return places.to_numpy(zero_copy_only=False), texts


def _numbers(column: Any) -> Column:
    """A column without nulls as an array that owns its memory."""
    return np.array(column.combine_chunks().to_numpy(zero_copy_only=False))


def _text_column(codes: Column, texts: Sequence[str], kind: Any) -> Any:
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, kind.index_type), pa.array(texts, pa.string())
    )


def _request_table(trace: RequestTrace) -> Any:
    columns: dict[str, Any] = {}
    texts = {"op": OPS, "space": SPACES, "label": trace.labels}
    for name in FIELDS:
        if name not in {"op", "id", "size"} and is_default(trace, name):
            continue
        values = np.ascontiguousarray(getattr(trace, name))
        columns[name] = (
            _text_column(values, texts[name], pa.dictionary(pa.int32(), pa.string()))
            if name in texts
            else pa.array(values)
        )
    return pa.table(columns)


# --- program traces -----------------------------------------------------------------------


def _open_program(header: Fields) -> dict[str, Any]:
    parts = {
        "name": header.text("name", ""),
        "target": header.text("target"),
        "versions": header.mapping("versions", {}),
        "labels": header.texts("labels", [""]),
        "avals": tuple(map(parse_aval, header.texts("avals"))),
    }
    executables = []
    for number, each in enumerate(header.items("executables")):
        with within(f"executable {number}"):
            executables.append(parse_executable(Fields(each)))
    header.close()
    return parts | {"executables": tuple(executables)}


def _read_program(path: Path, table: Any, parts: dict[str, Any]) -> ProgramTrace:
    columns = {name: _program_column(path, table, name) for name in _PROGRAM_COLUMNS}
    if unknown := set(table.column_names) - _PROGRAM_COLUMNS.keys():
        raise InputError(f"{path}: unknown column {shown(min(unknown))}")
    lists: dict[str, tuple[Column, Column]] = {}
    for name, first in _LISTS.items():
        lists[name] = _split(columns[name])
        if wrong := np.flatnonzero(lists[name][0] != lists[first][0]).tolist():
            raise InputError(
                f"{path}: row {wrong[0] - 1}: {name} is not as long as {first}, expected one each"
            )
    kinds, texts = _dictionary(columns["event"], "")
    codes = np.array([EVENT_KINDS.index(each) if each in EVENT_KINDS else -1 for each in texts])
    kind = codes.astype(np.int64)[kinds]
    if (kind < 0).any():
        row = int((kind < 0).argmax())
        raise InputError(
            f"{path}: row {row}: event {shown(texts[kinds[row]])}, expected one of "
            f"{', '.join(EVENT_KINDS)}"
        )
    labels = {text: index for index, text in enumerate(parts.pop("labels"))}
    used, texts = _dictionary(columns["label"], "")
    label = np.array([labels.setdefault(text, len(labels)) for text in texts], np.int32)[used]
    device = _numbers(columns["device"])
    starts, results = lists["results"]
    arrays: dict[str, Any] = {each: _numbers(columns[each]) for each in _NUMBERS}
    for each in ("aval", "bytes", "space", "alias_of"):
        arrays[f"buffer_{each}"] = lists[f"result_{each}"][1]
    trace = ProgramTrace(
        labels=tuple(labels),
        kind=kind.astype(np.uint8),
        label=label,
        device=device,
        operand_start=lists["operands"][0],
        operands=lists["operands"][1],
        donated=lists["donated"][1],
        result_start=starts,
        results=results,
        buffer_device=np.repeat(device, np.diff(starts)),
        **arrays,
        **parts,
    )

    def place(kind: str, row: int) -> str:
        if kind == "buffer":
            return f"row {maker_of(trace, row)}"
        return f"row {row}" if kind == "event" else f"{kind} {row}"

    try:
        check_program(trace)
    except RowError as error:
        raise InputError(error.placed(str(path), place)) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return trace


_NUMBERS = ("time_us", "duration_us", "executable", "launch")

#: The columns of lists, and the one that each is as long as.
_LISTS = {
    "operands": "operands",
    "donated": "operands",
    "results": "results",
    "result_aval": "results",
    "result_bytes": "results",
    "result_space": "results",
    "result_alias_of": "results",
}


def _program_column(path: Path, table: Any, name: str) -> Any:
    """A column, of the right type and without nulls."""
    expected = _PROGRAM_COLUMNS[name]
    if name not in table.column_names:
        raise InputError(f"{path}: column {name} is missing")
    column = table[name]
    if column.type != expected:
        raise InputError(f"{path}: column {name} is {column.type}, expected {expected}")
    absent = column.is_null().combine_chunks().to_numpy(zero_copy_only=False)
    if absent.any():
        raise InputError(f"{path}: row {absent.argmax()}: {name} null, expected {expected}")
    if pa.types.is_list(expected) and column.combine_chunks().flatten().null_count:
        raise InputError(f"{path}: column {name} holds lists with null, expected {expected}")
    return column


def _split(column: Any) -> tuple[Column, Column]:
    """A column of lists as where each starts, and all their values end to end."""
    lists = column.combine_chunks()
    if not len(lists):
        starts = np.zeros(1, np.int64)
    else:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        starts = offsets - offsets[0]
    return starts, np.array(lists.flatten().to_numpy(zero_copy_only=False))


def _program_table(trace: ProgramTrace) -> Any:
    columns = {
        "event": _text_column(trace.kind, EVENT_KINDS, _PROGRAM_COLUMNS["event"]),
        "label": _text_column(trace.label, trace.labels, _PROGRAM_COLUMNS["label"]),
        "device": pa.array(trace.device),
        **{each: pa.array(getattr(trace, each)) for each in _NUMBERS},
    }
    for name in _LISTS:
        column = name.replace("result_", "buffer_")
        starts = trace.operand_start if name in {"operands", "donated"} else trace.result_start
        columns[name] = pa.ListArray.from_arrays(
            pa.array(starts, pa.int32()), pa.array(getattr(trace, column))
        )
    return pa.table({name: columns[name] for name in _PROGRAM_COLUMNS})


# --- both ---------------------------------------------------------------------------------


def write_parquet(trace: RequestTrace | ProgramTrace, path: Path) -> None:
    """Write the trace, compressed with zstd inside.

    Raises:
        InputError: the file cannot be written, or a label cannot be held by UTF-8.
    """
    header = header_of(trace)
    try:
        if isinstance(trace, ProgramTrace):
            header["avals"] = list(map(aval_text, trace.avals))
            header["executables"] = list(map(executable_to_json, trace.executables))
            table = _program_table(trace)
        else:
            table = _request_table(trace)
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: a label is not text that UTF-8 can hold: {error}") from error
    texts = [each.name for each in table.schema if pa.types.is_dictionary(each.type)]
    with (
        atomic_write(path, binary=True) as file,
        pq.ParquetWriter(
            file, table.schema, compression="zstd", use_dictionary=texts, write_page_checksum=True
        ) as writer,
    ):
        writer.write_table(table)
        # Not as metadata of the schema, of which the file would hold a second copy.
        writer.add_key_value_metadata({_KEY: json.dumps(header, allow_nan=False)})
