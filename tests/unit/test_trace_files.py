"""Loading says what is wrong with a file; saving leaves a whole file or nothing."""

import dataclasses
import gzip
import io
import json
import os
import pickle
import stat
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from alloclab.policies.errors import InputError, RowError
from alloclab.simulator import trace_lines
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.program import (
    EXECUTE,
    MARK,
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
from alloclab.simulator.program_checks import check_program
from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.trace_files import load_trace, save_trace

HEADER = '{"alloclab":"request trace","version":1,"name":"","labels":[""],"events":2}'


def refused(file: Path) -> str:
    """What loading says, without the file's name, which must come first."""
    with pytest.raises(InputError) as error:
        load_trace(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ")
    assert "\n" not in text
    return text.removeprefix(f"{file}: ")


def requests(**more: Any) -> RequestTrace:
    return RequestTrace.from_arrays([1, 1, 0], [7, 8, 7], [4096, 100, 0], **more)


# --- JSON lines ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ('{"alloclab":"request trace","version":2,"events":0}', "version 2 of the trace format"),
        ('{"alloclab":"request trace","version":2,"events":0}', "only version 1 can be read"),
        ('{"alloclab":"request trace","version":2,"events":0}', "upgrade alloclab"),
        ('{"alloclab":"request trace","version":0,"events":0}', "version 0"),
        ('{"alloclab":"request trace","version":"1","events":0}', 'version "1", expected the'),
        ('{"alloclab":"request trace","version":true,"events":0}', "version true, expected the"),
        ('{"alloclab":"request trace","events":0}', '"version" is missing'),
        ('{"alloclab":"trace","version":1,"events":0}', 'alloclab "trace", expected "request'),
        ('{"version":1,"events":0}', '"alloclab" is missing'),
        ('{"alloclab":"request trace","version":1}', '"events" is missing'),
        ('{"alloclab":"request trace","version":1,"events":-1}', "events -1, expected"),
        ('{"alloclab":"request trace","version":1,"events":1e3}', "events 1000.0, expected"),
        ('{"alloclab":"request trace","version":1,"events":999999999999}', "to 100000000"),
        ('{"alloclab":"request trace","version":1,"events":0,"x":1}', 'unknown field "x"'),
        ('{"alloclab":"request trace","version":1,"events":0,"name":3}', "name 3, expected text"),
        ('{"alloclab":"request trace","version":1,"events":0,"labels":[1]}', "labels holds 1"),
        ('{"alloclab":"request trace","version":1,"events":0,"labels":["a","a"]}', "twice"),
        ('{"alloclab":"request trace","version":1,"version":1,"events":0}', "there twice"),
        ('{"alloclab":', "is not JSON"),
        ("{}", '"alloclab" is missing'),
        ('{"a":' + "[" * 100_000, "nested too deeply"),
        ('{"a":' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_headers_are_checked(tmp_path: Path, header: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(header + "\n")
    assert refused(file).startswith("line 1: ")
    assert says in refused(file)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ('{"op":"alloc","id":7,"size":5}', "each allocation needs an id of its own, but id 7 was "
         "already allocated at line 2"),
        ('{"op":"free","id":8}', "free of id 8, but it is not allocated there"),
        ('{"op":"alloc","id":8,"size":-1}', "size -1, expected 0 or more bytes"),
        ('{"op":"alloc","id":8,"size":1152921504606846976}', "less than 1 EiB"),
        ('{"op":"alloc","id":8,"size":99999999999999999999}', "expected an integer of 64 bits"),
        ('{"op":"alloc","id":-8,"size":1}', "id -8, expected 0 or more"),
        ('{"op":"alloc","id":8,"size":NaN}', "NaN is not a value, expected a finite number"),
        ('{"op":"alloc","id":8,"size":1,"time_us":Infinity}', "Infinity is not a value"),
        ('{"op":"alloc","id":8,"size":1,"time_us":1e999}', "time_us inf, expected a finite"),
        ('{"op":"alloc","id":8,"size":1,"time_us":-1}', "time_us -1.0, expected no step back"),
        ('{"op":"alloc","id":8,"size":true}', "size true, expected an integer"),
        ('{"op":"alloc","id":8,"size":"7"}', 'size "7", expected an integer'),
        ('{"op":"alloc","id":8,"size":7.0}', "size 7.0, expected an integer"),
        ('{"op":"alloc","id":8,"size":null}', "size null, expected an integer"),
        ('{"op":"alloc","id":8}', "size nothing, expected an integer"),
        ('{"op":"alloc","size":8}', "id nothing, expected an integer"),
        ('{"op":"free"}', "id nothing, expected an integer"),
        ('{"id":8,"size":8}', "op nothing, expected one of free, alloc, mark"),
        ("{}", "op nothing, expected one of free, alloc, mark"),
        ('{"op":"malloc","id":8,"size":8}', 'op "malloc", expected one of free, alloc, mark'),
        ('{"op":["alloc"],"id":8,"size":8}', 'op ["alloc"], expected one of'),
        ('{"op":1,"id":8,"size":8}', "op 1, expected one of"),
        ('{"op":"mark","id":8}', "id 8, expected 0 on marks"),
        ('{"op":"mark","size":8}', "size 8, expected 0 on frees and marks"),
        ('{"op":"free","id":7,"size":8}', "free with size 8, expected none, 0, or the 4096 bytes "
         "that were allocated at line 2"),
        ('{"op":"alloc","id":8,"size":8,"adress":1}', 'unknown field "adress", expected op, id'),
        ('{"op":"alloc","id":8,"size":8,"alignment":3}', "alignment 3, expected a power of two"),
        ('{"op":"alloc","id":8,"size":8,"space":"host"}', 'space "host", expected one of device'),
        ('{"op":"alloc","id":8,"size":8,"stream":4294967296}', "not a valid int32"),
        ('{"op":"alloc","id":8,"size":8,"label":3}', "label 3, expected text"),
        ('{"op":"alloc","id":8,"size":8} {}', "found more after a JSON value, at column 31"),
        ('{"op":"alloc","id":8,"id":9,"size":8}', 'the key "id" is there twice'),
        ('["alloc",8,8]', 'found ["alloc", 8, 8], expected a JSON object'),
        ('{"op":"alloc","id":8,"si', "is not JSON"),
        ("", "is not JSON"),
    ],
)  # fmt: skip
def test_events_are_checked(tmp_path: Path, second: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{HEADER}\n{{"op":"alloc","id":7,"size":4096}}\n{second}\n')
    assert refused(file).startswith("line 3: ")
    assert says in refused(file)


def test_the_first_bad_line_is_named_in_a_long_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [f'{{"op":"alloc","id":{n},"size":1}}' for n in range(10_000)]
    lines[9_000] = '{"op":"alloc","id":3,"size":1}'
    file.write_text("\n".join([HEADER.replace('"events":2', '"events":10000'), *lines]))
    assert refused(file).startswith("line 9002: each allocation needs an id of its own, but id 3")
    assert refused(file).endswith("allocated at line 5")
    lines[9_000] = '{"op":"alloc","id":9000,"size":1.5}'
    file.write_text("\n".join([HEADER.replace('"events":2', '"events":10000'), *lines]))
    assert refused(file) == "line 9002: size 1.5, expected an integer of 64 bits"


def test_live_bytes_stay_within_64_bits(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [f'{{"op":"alloc","id":{n},"size":{2**60 - 1}}}' for n in range(9)]
    file.write_text("\n".join([HEADER.replace('"events":2', '"events":9'), *lines]))
    assert refused(file).startswith("line 10: size ")
    assert refused(file).endswith("expected less than 8 EiB live at once")


def test_a_file_of_too_few_or_too_many_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"op":"alloc","id":7,"size":4096}'
    file.write_text(f"{HEADER}\n{line}\n")
    assert refused(file) == "line 2: the file is cut: it ends after 1 of 2 events"
    file.write_text(f'{HEADER}\n{line}\n{{"op":"fr')
    assert "line 3: is not JSON" in refused(file)
    assert "the file seems cut here" in refused(file)
    free = '{"op":"free","id":7}'
    file.write_text(f"{HEADER}\n{line}\n{free}\n{free}\n")
    assert refused(file).startswith("line 4: the file goes on")
    file.write_text(f"{HEADER}\r\n{line}\r\n{free}\n\n")  # other ends of lines, a blank line
    assert len(load_trace(file)) == 2


def test_labels_may_be_left_to_the_events(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"alloclab":"request trace","version":1,"events":2}\n'
        '{"op":"mark","label":"step 1"}\n{"op":"alloc","id":1,"size":2}\n'
    )
    trace = load_trace(file)
    assert isinstance(trace, RequestTrace)
    assert trace.labels == ("", "step 1")
    assert trace.label.tolist() == [1, 0]


# --- CSV ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("op,id\n", 'line 1: found "op,id", expected a trace'),
        ("alloc,7,4096\n", "line 1: found"),
        ("op,id,size,sise\n", 'line 1: unknown column "sise", expected op, id, size'),
        ("op,id,size,id\n", 'line 1: column "id" is there twice'),
        ("op,id,size\nalloc,7\n", "line 2: 2 fields, expected 3 as in the header"),
        ("op,id,size\nalloc,7,4096,1\n", "line 2: 4 fields"),
        ("op,id,size\nalloc,7,\n", "line 2: size nothing, expected an integer"),
        ("op,id,size\nalloc,,5\n", "line 2: id nothing"),
        ("op,id,size\n,7,5\n", "line 2: op nothing"),
        ("op,id,size\nALLOC,7,5\n", 'line 2: op "ALLOC", expected one of free, alloc, mark'),
        ("op,id,size\nalloc,7,-5\n", "line 2: size -5, expected 0 or more"),
        ("op,id,size\nalloc,7,5.0\n", 'line 2: size "5.0"'),
        ("op,id,size\nalloc,7,1_000\n", 'line 2: size "1_000"'),
        ("op,id,size\nalloc,7,\u0663\n", "line 2: size "),
        ("op,id,size\nalloc,7,nan\n", 'line 2: size "nan"'),
        ("op,id,size\nalloc,7,4KiB\n", 'line 2: size "4KiB"'),
        ("op,id,size\nalloc,7,99999999999999999999\n", "line 2: size 99999999999999999999"),
        ("op,id,size,time_us\nalloc,7,1,nan\n", "line 2: time_us nan, expected a finite"),
        ("op,id,size,time_us\nalloc,7,1,soon\n", 'line 2: time_us "soon", expected a number'),
        ("op,id,size\nalloc,7,1\nfree,7,2\n", "line 3: free with size 2"),
        ("op,id,size\nalloc,7,1\n\nfree,8,\n", "line 4: free of id 8"),
        ("op,id,size\nalloc,7,1\n\nalloc,7,1\n", "already allocated at line 2"),
        ("op,id,size\nalloc,7,1\nfree,7,\nfree,7,\n", "line 4: free of id 7, but it was already "
         "freed at line 3"),
        ("op,id,size\nfree,7,\nalloc,7,1\n", "line 2: free of id 7, but it is not allocated there"),
        (f"op,id,size\nalloc,{2**62},1\nfree,{2**62},\nfree,{2**62},\n", "freed at line 3"),
        (f"op,id,size\nfree,{2**62},\nalloc,{2**62},1\n", "line 2: free of id 4611686018427387904"),
        (f"op,id,size\nfree,{2**62},\n", "line 2: free of id 4611686018427387904"),
        ('op,id,size\nalloc,7,"1\n', "line 2: is not CSV"),
        ('op,id,size,label\nalloc,7,1,\nalloc,7,1,"a\nb"\n', "line 3: each allocation needs"),
        ('op,id,size,label\nalloc,7,1,"a\nb"\nfree,9,,\n', "line 4: free of id 9"),
    ],
)  # fmt: skip
def test_csv_is_checked(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    assert says in refused(file)


@pytest.mark.parametrize(
    "text",
    [
        "op,id,size\nalloc,7,4096\nalloc,8,100\nfree,7,\n",
        "op,id,size\nalloc,7,4096\nalloc,8,100\nfree,7,0",
        "\ufeffop,id,size\r\nalloc,7,4096\r\n\r\nalloc,8,100\r\nfree,7,4096\r\n",
        'size, op ,id\n4096, alloc, 7\n100,"alloc","8"\n,free,7\n',
    ],
)
def test_csv_that_others_write(tmp_path: Path, text: str) -> None:
    file = tmp_path / "anything"
    file.write_text(text, encoding="utf-8", newline="")
    trace = load_trace(file)
    assert isinstance(trace, RequestTrace)
    assert list(trace.events()) == list(requests().events())


# --- Parquet ------------------------------------------------------------------------------


def parquet(file: Path, columns: dict[str, Any], header: Any = None) -> Path:
    table = pa.table(columns)
    if header is not None:
        table = table.replace_schema_metadata({"alloclab": json.dumps(header)})
    pq.write_table(table, file)
    return file


GOOD: dict[str, Any] = {"op": ["alloc", "alloc", "free"], "id": [7, 8, 7], "size": [4096, 100, 0]}


@pytest.mark.parametrize(
    "columns",
    [
        GOOD,
        {"op": pa.array([1, 1, 0], pa.int32()), "id": pa.array([7, 8, 7], pa.uint16())},
        {"op": pa.array([1.0, 1.0, 0.0]), "id": [7.0, 8.0, 7.0], "size": [4096, 100, 4096]},
        {"op": pa.array(GOOD["op"], pa.large_string()), "size": [4096, 100, None]},
        {"size": pa.array([4096.0, 100.0, None])},
        {"__index_level_0__": [0, 1, 2]},
        {"label": ["", "", None], "space": ["device", None, "device"], "stream": [0, None, 0]},
        {"label": pa.array(["", "", ""]).dictionary_encode()},
    ],
)
def test_parquet_that_others_write(tmp_path: Path, columns: dict[str, Any]) -> None:
    trace = load_trace(parquet(tmp_path / "anything", GOOD | columns))
    assert isinstance(trace, RequestTrace)
    assert list(trace.events()) == list(requests().events())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"size": [4096, None, 0]}, "row 1: size null, expected an integer"),
        ({"op": ["alloc", "malloc", "free"]}, 'row 1: op "malloc", expected one of free'),
        ({"op": ["alloc", None, "free"]}, "row 1: op null, expected one of free"),
        ({"op": [1, 3, 0]}, "row 1: op 3, expected 0 (free), 1 (alloc) or 2 (mark)"),
        ({"op": [True, True, False]}, "column op is of type bool, expected one of"),
        ({"id": [7, 7, 7]}, "row 1: each allocation needs an id of its own, but id 7 was already "
         "allocated at row 0"),
        ({"id": [7, 8, 9]}, "row 2: free of id 9"),
        ({"id": ["7", "8", "7"]}, "column id is of type string, expected an integer"),
        ({"id": [7, 8.5, 7]}, "row 1: id 8.5 is not a valid int64"),
        ({"id": [7, float("nan"), 7]}, "row 1: id nan is not a valid int64"),
        ({"id": pa.array([7, 2**64 - 1, 7], pa.uint64())}, "row 1: id 18446744073709551615 is not"),
        ({"size": [4096, -100, 0]}, "row 1: size -100, expected 0 or more"),
        ({"size": [4096, 100, 100]}, "row 2: free with size 100, expected none, 0, or the 4096 "
         "bytes that were allocated at row 0"),
        ({"time_us": [0.0, float("inf"), 0.0]}, "row 1: time_us inf, expected a finite"),
        ({"space": ["device", "host", "device"]}, 'row 1: space "host", expected one of device'),
        ({"space": [0, 0, 0]}, "column space is of type int64"),
        ({"adress": [1, 2, 3]}, 'unknown column "adress", expected op, id, size'),
    ],
)  # fmt: skip
def test_parquet_is_checked(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    assert says in refused(parquet(tmp_path / "trace.parquet", GOOD | columns))


def test_parquet_without_the_columns_of_a_trace(tmp_path: Path) -> None:
    says = refused(parquet(tmp_path / "trace.parquet", {"a": [1], "b": [2]}))
    assert says == "columns a, b, expected at least op, id and size"


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"alloclab": "request trace", "version": 3}, "header: version 3 of the trace format"),
        ({"alloclab": "request trace", "version": 1, "x": 1}, 'header: unknown field "x"'),
        ([], "header: found [], expected a JSON object"),
        ({"alloclab": "program trace", "version": 1}, 'header: "target" is missing'),
        ({"alloclab": "program trace", "version": 1, "target": "cpu", "avals": [],
          "executables": []}, "column event is missing"),
    ],
)  # fmt: skip
def test_parquet_headers_are_checked(tmp_path: Path, header: Any, says: str) -> None:
    assert says in refused(parquet(tmp_path / "trace.parquet", GOOD, header))


# --- any file -----------------------------------------------------------------------------


def pickled() -> bytes:
    return pickle.dumps([1, 2, 3])


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", "b")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty, expected a trace"),
        (gzip.compress(b""), "holds nothing, expected a trace"),
        (zstandard.compress(b""), "holds nothing, expected a trace"),
        (pickled(), "is a Python pickle, which is never read"),
        (zipped(), "is a ZIP archive"),
        (b"\xff\xfeo\x00p\x00", "line 1: byte 1 is 0xff, which is not UTF-8 text"),
        (b"op,id,size\nalloc,\xc3\x28,3\n", "line 2: byte 7 is 0xc3, which is not UTF-8 text"),
        (b"\x00\x01\x02", 'found "\\u0000\\u0001\\u0002", expected a trace'),
        (b"PAR1\x00PAR1", "cut or damaged Parquet data"),
        (b"\x1f\x8b\x08\x00", "cut or damaged gzip data"),
        (b"\x1f\x8b\xff\xff", "damaged gzip data"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd data"),
        (gzip.compress(b"hello")[:-1], "cut or damaged gzip data"),
        (gzip.compress(b"hello") + b"more", "damaged gzip data"),
        (zstandard.compress(b"hello") + b"more", "damaged zstd data"),
        (b"just some text\n", 'line 1: found "just some text", expected a trace: JSON lines'),
        (b'{"displayTimeUnit":"ns"}\n', 'line 1: "alloclab" is missing'),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    assert says in refused(file)


def test_random_bytes(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    rng = np.random.default_rng(0)
    for length in range(1, 400):
        file.write_bytes(rng.bytes(length))
        refused(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent") == "cannot be read: No such file or directory"
    assert refused(tmp_path) == "cannot be read: Is a directory"
    file = tmp_path / "secret"
    file.write_text(HEADER)
    file.chmod(0)
    if os.geteuid() != 0:  # root reads everything
        assert refused(file) == "cannot be read: Permission denied"


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv.gz"])
@pytest.mark.parametrize("kind", ["request", "program"])
def test_every_cut_is_noticed(tmp_path: Path, form: str, kind: str) -> None:
    if (kind, form) == ("program", "csv.gz"):
        return
    file = tmp_path / f"trace.{form}"
    save_trace(requests() if kind == "request" else program(), file)
    whole = file.read_bytes()
    complete = len(whole) - 1 if form == "jsonl" else len(whole)  # but for the last line's end
    step = 1 + complete // 200
    for length in [*range(0, complete, step), *range(complete - 16, complete)]:
        file.write_bytes(whole[:length])
        refused(file)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("start", [b"", HEADER.encode() + b"\n"])
def test_a_decompression_bomb_costs_no_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: Callable[[bytes], bytes],
    start: bytes,
) -> None:
    monkeypatch.setattr(trace_lines, "LINE_LIMIT", 1 << 20)
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(compress(start + bytes(200 << 20)))
    assert file.stat().st_size < 1 << 20
    tracemalloc.start()
    says = refused(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"line {2 if start else 1}: longer than the limit of 1 MiB for a line" in says
    assert peak < 64 << 20


def test_compressed_pieces_end_to_end(tmp_path: Path) -> None:
    text = b"op,id,size\nalloc,7,4096\nalloc,8,100\nfree,7,\n"
    for compress in (gzip.compress, zstandard.compress):
        file = tmp_path / "trace"
        file.write_bytes(b"".join(compress(text[at : at + 9]) for at in range(0, len(text), 9)))
        trace = load_trace(file)
        assert isinstance(trace, RequestTrace)
        assert list(trace.events()) == list(requests().events())


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    for form in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv.zst"):
        save_trace(requests(), tmp_path / f"trace.{form}")
        (tmp_path / f"trace.{form}").replace(file)
        trace = load_trace(file)
        assert isinstance(trace, RequestTrace)
        assert list(trace.events()) == list(requests().events())


def test_text_is_read_without_pyarrow_and_jax(tmp_path: Path) -> None:
    for form in ("jsonl", "csv", "jsonl.gz"):
        save_trace(requests(), tmp_path / f"trace.{form}")
    code = (
        "import sys\n"
        "from alloclab.simulator.trace_files import load_trace\n"
        "for file in sys.argv[1:]: load_trace(file)\n"
        "print({'jax', 'pyarrow', 'zstandard'} & set(sys.modules))\n"
    )
    files = [str(each) for each in tmp_path.iterdir()]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_at_their_default_cost_no_memory(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"trace.{form}"
    save_trace(requests(), file)
    trace = load_trace(file)
    assert isinstance(trace, RequestTrace)
    for name in ("alignment", "stream", "space", "label", "time_us", "execution"):
        assert getattr(trace, name).strides == (0,)
    written = parquet(tmp_path / "b", GOOD | {"stream": [0, 0, 0], "time_us": [0.0, 0.0, 0.0]})
    again = load_trace(written)
    assert isinstance(again, RequestTrace)
    assert again.stream.strides == again.time_us.strides == (0,)


# --- saving -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace", "trace.json", "trace.parquet.gz", "trace.pkl", ".jsonl"])
def test_names_that_say_no_form(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"expected \.jsonl, \.jsonl\.gz"):
        save_trace(requests(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_program_trace_is_no_csv(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CSV holds request traces only"):
        save_trace(program(), tmp_path / "trace.csv")


def test_equal_traces_make_equal_files(tmp_path: Path) -> None:
    for form in ("jsonl.gz", "jsonl.zst", "parquet"):
        one, two = tmp_path / f"one.{form}", tmp_path / f"two.{form}"
        save_trace(program(), one)
        save_trace(program(), two)
        assert one.read_bytes() == two.read_bytes()


def test_text_that_utf8_cannot_hold(tmp_path: Path) -> None:
    trace = requests(labels=("", "\udc80\u00e9"), label=[1, 0, 1], name="caf\u00e9 \udcff")
    save_trace(trace, tmp_path / "trace.jsonl")
    back = load_trace(tmp_path / "trace.jsonl")
    assert isinstance(back, RequestTrace)
    assert (back.labels, back.name) == (trace.labels, trace.name)
    for form in ("csv", "parquet"):
        with pytest.raises(InputError, match="UTF-8"):
            save_trace(trace, tmp_path / f"other.{form}")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_line_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    trace = requests(labels=("", "x" * (17 << 20)), label=[1, 0, 1])
    with pytest.raises(InputError, match=r"longer than 16 MiB; save as \.parquet"):
        save_trace(trace, tmp_path / "trace.jsonl")
    assert not list(tmp_path.iterdir())
    save_trace(trace, tmp_path / "trace.parquet")
    back = load_trace(tmp_path / "trace.parquet")
    assert isinstance(back, RequestTrace)
    assert back.labels == trace.labels


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "figure.svg"
    file.write_text("old")
    with pytest.raises(error), atomic_write(file) as out:
        out.write("half")
        out.flush()
        raise error
    assert [each.name for each in tmp_path.iterdir()] == ["figure.svg"]
    assert file.read_text() == "old"


def test_a_write_keeps_permissions_and_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with atomic_write(link, binary=True) as out:
        out.write(b"new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    for place in (tmp_path / "absent" / "a.csv", tmp_path / ("x" * 300 + ".csv")):
        with pytest.raises(InputError) as error:
            save_trace(requests(), place)
        assert str(error.value).startswith(f"{place}: cannot be written: ")
    with pytest.raises(InputError, match="is a folder"), atomic_write(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a"):
        (tmp_path / "other").read_text()  # not about the file that is written


def test_a_full_disk_is_one_clear_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with (
        pytest.raises(InputError, match="/dev/full: cannot be written: No space left"),
        atomic_write("/dev/full") as out,
    ):
        out.write("x")
    assert Path("/dev/full").is_char_device()


# --- program traces -----------------------------------------------------------------------


def program() -> ProgramTrace:
    """Two buffers in, an execution that gives one of them up, the result out, all released."""
    values = Values(
        ("fusion.1", "dot.2"),
        np.array([2, 2], np.int32),
        np.array([0, 64], np.int64),
        np.array([64, 64], np.int64),
        np.array([0, 1], np.int32),
        np.array([1, 3], np.int32),
    )
    allocations = (
        Allocation(0, 128, "parameter", parameter=0, output=0),
        Allocation(1, 8, "parameter", parameter=1),
        Allocation(2, 128, "temp"),
    )
    step = Executable(
        "jit_step",
        "f00d",
        (Aval((4, 8), "float32"), Aval((2,), "int32")),
        (Aval((4, 8), "float32"),),
        {"cpu": BufferAssignment(allocations, values, 3)},
        flops=64.0,
    )
    return ProgramTrace(
        executables=(step,),
        avals=(Aval((4, 8), "float32"), Aval((2,), "int32")),
        labels=("", "step 1"),
        kind=np.array([TRANSFER_IN, EXECUTE, TRANSFER_OUT, RELEASE, MARK], np.uint8),
        time_us=np.array([0, 10, 20, 30, 40], np.float64),
        duration_us=np.array([1, 2.5, np.nan, np.nan, np.nan], np.float64),
        device=np.zeros(5, np.int32),
        executable=np.array([-1, 0, -1, -1, -1], np.int32),
        launch=np.array([-1, 0, -1, -1, -1], np.int32),
        label=np.array([0, 0, 0, 0, 1], np.int32),
        operand_start=np.array([0, 0, 2, 3, 5, 5], np.int64),
        operands=np.array([0, 1, 2, 1, 2], np.int64),
        donated=np.array([True, False, False, False, False]),
        result_start=np.array([0, 2, 3, 3, 3, 3], np.int64),
        results=np.array([0, 1, 2], np.int64),
        buffer_aval=np.array([0, 1, 0], np.int32),
        buffer_bytes=np.array([128, 8, 128], np.int64),
        buffer_device=np.zeros(3, np.int32),
        buffer_space=np.zeros(3, np.uint8),
        buffer_alias_of=np.array([-1, -1, 0], np.int64),
        name="tiny",
        versions={"jax": "0.10.2"},
    )


def put(name: str, at: int, value: Any) -> Callable[[ProgramTrace], ProgramTrace]:
    """A change of one value in a column."""

    def change(trace: ProgramTrace) -> ProgramTrace:
        column = getattr(trace, name).copy()
        column[at] = value
        return dataclasses.replace(trace, **{name: column})

    return change


def allocation(at: int, **change: Any) -> Callable[[ProgramTrace], ProgramTrace]:
    """A change of one allocation of the executable."""

    def changed(trace: ProgramTrace) -> ProgramTrace:
        step = trace.executables[0]
        assignment = step.targets["cpu"]
        parts = list(assignment.allocations)
        parts[at] = dataclasses.replace(parts[at], **change)
        targets = {"cpu": dataclasses.replace(assignment, allocations=tuple(parts))}
        return dataclasses.replace(trace, executables=(dataclasses.replace(step, targets=targets),))

    return changed


def value(name: str, at: int, to: int) -> Callable[[ProgramTrace], ProgramTrace]:
    """A change of one live range of the executable."""

    def changed(trace: ProgramTrace) -> ProgramTrace:
        step = trace.executables[0]
        assignment = step.targets["cpu"]
        assert assignment.values is not None
        column = getattr(assignment.values, name).copy()
        column[at] = to
        values = dataclasses.replace(assignment.values, **{name: column})
        targets = {"cpu": dataclasses.replace(assignment, values=values)}
        return dataclasses.replace(trace, executables=(dataclasses.replace(step, targets=targets),))

    return changed


def with_(**change: Any) -> Callable[[ProgramTrace], ProgramTrace]:
    return lambda trace: dataclasses.replace(trace, **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("kind", 0, 5), "event 0: kind 5, expected 0 to 4"),
        (put("time_us", 3, np.nan), "event 3: time_us nan, expected a finite"),
        (put("duration_us", 0, -1.0), "event 0: duration_us -1.0, expected 0 or more"),
        (put("duration_us", 0, np.inf), "event 0: duration_us inf"),
        (put("device", 2, -1), "event 2: device -1"),
        (put("device", 0, 1), "buffer 0: buffer_device 0, expected that of the event"),
        (put("executable", 1, 1), "event 1: executable 1, expected one of the 1 executables"),
        (put("executable", 1, -1), "event 1: executable -1"),
        (put("executable", 0, 0), "event 0: executable 0, expected -1"),
        (put("launch", 1, -1), "event 1: launch -1, expected 0 or more for an execution"),
        (put("launch", 0, 4), "event 0: launch 4, expected -1"),
        (put("label", 4, 2), "event 4: label 2, expected an index into labels"),
        (put("operand_start", 5, 4), "operand_start must rise from 0 to the 5 operands"),
        (put("operand_start", 0, 1), "operand_start must rise from 0"),
        (put("result_start", 1, 4), "result_start must rise from 0 to the 3 results"),
        (put("operand_start", 2, 3), "event 1: 3 operands, but executable 0 has 2"),
        (put("result_start", 1, 1), "event 1: 2 results, but executable 0 has 1"),
        (put("result_start", 2, 2), "event 2: transfer_out with results"),
        (put("kind", 3, MARK), "event 3: mark with operands"),
        (put("operands", 2, 3), "event 2: operand 3 is none of the 3 buffers"),
        (put("operands", 2, -1), "event 2: operand -1 is none of the 3 buffers"),
        (put("operands", 1, 2), "event 1: operand 2 is not made yet"),
        (put("operands", 2, 0), "event 2: operand 0 is donated at event 1"),
        (put("operands", 4, 0), "event 3: operand 0 is donated at event 1"),
        (put("operands", 4, 1), "event 3: operand 1 is released in the same event"),
        (put("operands", 1, 0), "event 1: operand 0 is donated in the same event"),
        (put("donated", 2, True), "event 2: donates, but is no execution"),
        (put("results", 1, 2), "event 0: makes buffer 2, but the next number is 1"),
        (put("buffer_aval", 1, 2), "buffer 1: buffer_aval 2, expected one of the 2 avals"),
        (put("buffer_bytes", 1, -8), "buffer 1: buffer_bytes -8"),
        (put("buffer_bytes", 1, 2**60), "less than 1 EiB"),
        (put("buffer_space", 2, 3), "buffer 2: buffer_space 3, expected 0 to 2"),
        (put("buffer_alias_of", 2, 1), "buffer 2: takes over buffer 1, which is not donated"),
        (put("buffer_alias_of", 2, 2), "buffer 2: takes over buffer 2, which is not donated"),
        (put("buffer_alias_of", 2, -2), "buffer 2: takes over buffer -2, which is not donated"),
        (put("buffer_alias_of", 1, 0), "buffer 1: takes over buffer 0, which is not donated"),
        (put("donated", 0, False), "buffer 2: takes over buffer 0, which is not donated"),
        (allocation(1, index=5), "executable 0: target 'cpu', allocation 1: index 5"),
        (allocation(1, size=-1), "allocation 1: size -1, expected bytes"),
        (allocation(1, size=True), "allocation 1: size True"),
        (allocation(1, kind="heap"), "allocation 1: kind 'heap', expected one of parameter"),
        (allocation(1, kind="temp"), "allocation 1: kind temp with parameter 1"),
        (allocation(1, parameter=None), "allocation 1: kind parameter with parameter None"),
        (allocation(1, parameter=2), "allocation 1: parameter 2, but there are 2 inputs"),
        (allocation(1, output=1), "allocation 1: output 1, but there are 1 outputs"),
        (allocation(1, color=-1), "allocation 1: color -1"),
        (allocation(2, size=100), "value 1 'dot.2': lies outside of its allocation"),
        (value("allocation", 0, 3), "value 0 'fusion.1': allocation is none of the 3"),
        (value("offset", 0, 65), "value 0 'fusion.1': lies outside of its allocation"),
        (value("size", 1, 2**63 - 1), "value 1 'dot.2': lies outside of its allocation"),
        (value("end", 1, 4), "value 1 'dot.2': is live outside of the 3 steps"),
        (value("start", 1, 4), "value 1 'dot.2': is live outside of the 3 steps"),
        (with_(labels=("", "")), "labels hold one entry twice"),
        (with_(labels=("", 3)), "hold 3, expected text"),
        (with_(avals=(Aval((-1,), "f"), Aval((), "f"))), "aval 0: found Aval(shape=(-1,)"),
        (with_(device=np.zeros(5, np.int64)), "column device is int64 of shape (5,), expected "
         "int32 of shape (5,)"),
        (with_(device=np.zeros(4, np.int32)), "column device is int32 of shape (4,)"),
        (with_(operand_start=np.zeros(5, np.int64)), "column operand_start is int64"),
    ],
)  # fmt: skip
def test_programs_are_checked(
    tmp_path: Path, change: Callable[[ProgramTrace], ProgramTrace], says: str
) -> None:
    check_program(program())
    changed = change(program())
    with pytest.raises(InputError) as error:
        check_program(changed)
    assert says in str(error.value)
    assert str(error.value).startswith("program trace: ")
    with pytest.raises(InputError):
        save_trace(changed, tmp_path / "trace.jsonl")
    assert not list(tmp_path.iterdir())


def test_launches_are_one_executable_on_several_devices() -> None:
    none = np.zeros(0, np.int64)
    empty = Executable("jit_f", "", (), ())
    two = dataclasses.replace(
        program(),
        executables=(empty, empty),
        kind=np.full(2, EXECUTE, np.uint8),
        time_us=np.zeros(2),
        duration_us=np.zeros(2),
        device=np.array([0, 1], np.int32),
        executable=np.zeros(2, np.int32),
        launch=np.zeros(2, np.int32),
        label=np.zeros(2, np.int32),
        operand_start=np.zeros(3, np.int64),
        result_start=np.zeros(3, np.int64),
        operands=none,
        donated=none.astype(bool),
        results=none,
        buffer_aval=none.astype(np.int32),
        buffer_bytes=none,
        buffer_device=none.astype(np.int32),
        buffer_space=none.astype(np.uint8),
        buffer_alias_of=none,
    )
    check_program(two)
    with pytest.raises(RowError, match="event 1: launch 0 is on device 0 already"):
        check_program(put("device", 1, 0)(two))
    with pytest.raises(RowError, match="event 1: launch 0 is of two executables"):
        check_program(put("executable", 1, 1)(two))


def test_a_donated_buffer_is_taken_over_once() -> None:
    trace = program()
    step = dataclasses.replace(trace.executables[0], outputs=trace.executables[0].outputs * 2)
    more: dict[str, Any] = {
        name: np.append(getattr(trace, name), getattr(trace, name)[-1:])
        for name in ("buffer_aval", "buffer_bytes", "buffer_device", "buffer_space")
    }
    two = dataclasses.replace(
        trace,
        executables=(step,),
        results=np.arange(4),
        result_start=np.array([0, 2, 4, 4, 4, 4]),
        buffer_alias_of=np.array([-1, -1, -1, 0]),
        **more,
    )
    check_program(two)
    with pytest.raises(RowError, match="buffer 3: takes over buffer 0, which another"):
        check_program(put("buffer_alias_of", 2, 0)(two))


def lines_of(tmp_path: Path) -> list[str]:
    save_trace(program(), tmp_path / "trace.jsonl")
    return (tmp_path / "trace.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "old", "new", "says"),
    [
        (1, '"target":"cpu",', "", '"target" is missing'),
        (1, '"avals":2', '"avals":3', "line 4: \"aval\" is missing"),
        (1, '"avals":2', '"avals":1', "line 3: \"executable\" is missing"),
        (1, '"events":5', '"events":6', "line 9: the file is cut: it ends after 5 of 6 events"),
        (1, '"events":5', '"events":4', "line 9: the file goes on"),
        (2, "float32[4,8]", "float32", 'found "float32", expected a type with shape as'),
        (3, "int32[2]", "float32[4,8]", 'aval "float32[4,8]" is there twice'),
        (4, '"executable":0', '"executable":1', "expected executable 0 here"),
        (4, '"kind":"temp"', '"kind":"heap"', 'kind "heap", expected one of parameter'),
        (4, '"size":128', '"size":-128', "allocation 0: size -128, expected an integer from 0"),
        (4, '["fusion.1",2,', '["fusion.1",2.5,', 'value 0: found ["fusion.1", 2.5, 0'),
        (4, '["fusion.1",2,', '["fusion.1",9,', "allocation is none of the 3"),
        (4, '"flops":64.0', '"flops":1e999', "flops Infinity, expected a finite number"),
        (4, '"flops":64.0', '"flops":NaN', "NaN is not a value"),
        (5, '"transfer_in"', '"copy_in"', 'event "copy_in", expected one of transfer_in'),
        (5, '"buffer":0', '"buffer":1', "expected buffer 0 here"),
        (5, '"aval":"float32[4,8]"', '"aval":"f8[1]"', 'aval "f8[1]" is none of those listed'),
        (5, '"bytes":128', '"bytes":true', "bytes true, expected an integer from 0"),
        (5, ',"bytes":128', "", '"bytes" is missing'),
        (6, '"operands":[0,1]', '"operands":[0,"1"]', 'operands holds "1", expected integers'),
        (6, '"operands":[0,1]', '"operands":[0,9]', "operand 9 is none of the 3 buffers"),
        (6, '"donated":[0]', '"donated":[2]', "donated [2], expected places in the list of"),
        (6, '"donated":[0]', '"donated":[0,0]', "donated [0, 0], expected places"),
        (6, '"alias_of":0', '"alias_of":1', "takes over buffer 1, which is not donated"),
        (6, '"launch":0', '"lunch":0', 'unknown field "lunch"'),
        (7, '"operands":[2]', '"operands":[0]', "operand 0 is donated at line 6"),
        (9, '"event":"mark"', '"event":"mark","device":-1', "device -1, expected an integer"),
    ],
)  # fmt: skip
def test_lines_of_programs_are_checked(
    tmp_path: Path, line: int, old: str, new: str, says: str
) -> None:
    lines = lines_of(tmp_path)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    found = refused(tmp_path / "trace.jsonl")
    assert says in found
    if line > 1:
        assert found.startswith(f"line {line}: ")


def test_rows_of_programs_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    save_trace(program(), file)
    header = pq.read_metadata(file).metadata[b"alloclab"]
    table = pq.read_table(file).replace_schema_metadata({"alloclab": header})

    def changed(name: str, values: Any) -> str:
        at = table.column_names.index(name)
        column = pa.array(values, table[name].type)
        pq.write_table(table.set_column(at, name, column), file)
        return refused(file)

    assert changed("operands", [[], [0, 1], [0], [1, 2], []]) == (
        "row 2: operand 0 is donated at row 1"
    )
    assert changed("donated", [[], [True], [False], [False, False], []]) == (
        "row 1: donated is not as long as operands, expected one each"
    )
    assert changed("result_alias_of", [[-1, -1], [1], [], [], []]).startswith(
        "row 1: takes over buffer 1"
    )
    assert changed("device", [0, None, 0, 0, 0]) == "row 1: device null, expected int32"
    assert changed("event", ["transfer_in", "run", "mark", "mark", "mark"]).startswith(
        'row 1: event "run", expected one of transfer_in'
    )
    pq.write_table(table.drop_columns("launch"), file)
    assert refused(file) == "column launch is missing"
