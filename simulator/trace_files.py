"""Traces on disk: JSON lines, Parquet and CSV, told apart by what is in the file.

The forms are documented in docs/reference/trace-format.md.
"""

import stat
from pathlib import Path

from alloclab.policies.errors import InputError
from alloclab.simulator.program import ProgramTrace
from alloclab.simulator.program_checks import check_program
from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.trace_lines import Lines

_PARQUET = b"PAR1"

#: The beginnings of files that are no traces, and what they are.
_OTHERS = {
    b"PK\x03\x04": "a ZIP archive",
    b"\x80\x02": "a Python pickle, which is never read",
    b"\x80\x03": "a Python pickle, which is never read",
    b"\x80\x04": "a Python pickle, which is never read",
    b"\x80\x05": "a Python pickle, which is never read",
    b"\x93NUMPY": "a NumPy array",
    b"\x7fELF": "a program",
    b"BZh": "compressed with bzip2; gzip and zstd can be read",
    b"\xfd7zXZ": "compressed with xz; gzip and zstd can be read",
}

_EXPECTED = "expected a trace: JSON lines, Parquet, or CSV with the header op,id,size"


def load_trace(path: str | Path) -> RequestTrace | ProgramTrace:
    """Load a trace and check all of it.

    The form is told from the content: JSON lines or CSV, plain or compressed (gzip, zstd), or
    Parquet.

    Raises:
        InputError: the file cannot be read, is no trace or not a valid one. The message starts
            with the path and says at which line (from 1) or row (from 0), what was found and what
            would be valid.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.peek(16)
            if not head.startswith(_PARQUET):
                return _load_text(path, Lines(path, file), head)
            if not stat.S_ISREG(path.stat().st_mode):
                raise InputError(f"{path}: Parquet can be read from an ordinary file only")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    from alloclab.simulator.trace_parquet import read_parquet

    return read_parquet(path)


def _load_text(path: Path, lines: Lines, head: bytes) -> RequestTrace | ProgramTrace:
    if not head:
        raise InputError(f"{path}: is empty, {_EXPECTED}")
    for start, what in _OTHERS.items():
        if head.startswith(start):
            raise InputError(f"{path}: is {what}; {_EXPECTED}")
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: holds nothing, {_EXPECTED}")
    if first.lstrip().startswith("{"):
        from alloclab.simulator.trace_jsonl import read_jsonl

        return read_jsonl(first, lines)
    from alloclab.simulator.trace_csv import read_csv

    return read_csv(first, lines)


def form_of(path: Path) -> tuple[str, str]:
    """The form (``.jsonl``, ``.parquet``, ``.csv``) and compression that a file's name asks for.

    Raises:
        InputError: the name says neither.

    >>> form_of(Path("run.jsonl.zst"))
    ('.jsonl', '.zst')
    """
    name = path.name.lower()
    compression = next((each for each in (".gz", ".zst") if name.endswith(each)), "")
    form = Path(name.removesuffix(compression)).suffix
    if form not in {".jsonl", ".csv", ".parquet"} or (form == ".parquet" and compression):
        raise InputError(
            f"{path}: the end of the name says no form; expected .jsonl, .jsonl.gz, .jsonl.zst, "
            ".parquet or .csv"
        )
    return form, compression


def save_trace(trace: RequestTrace | ProgramTrace, path: str | Path) -> None:
    """Save a trace; the end of the name says how.

    ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst`` are for people, ``.parquet`` is small and fast;
    ``.csv`` (also ``.csv.gz`` and ``.csv.zst``) is for request traces and loses their name. The
    file appears whole or not at all. What is saved can be loaded: a program trace is checked first.

    Raises:
        InputError: the name, the file or the trace is not valid.

    >>> import tempfile
    >>> trace = RequestTrace.from_arrays([True, False], [7, 7], [4096, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_trace(trace, f"{folder}/two.jsonl")
    ...     print(Path(folder, "two.jsonl").read_text(), end="")
    {"alloclab":"request trace","version":1,"name":"","labels":[""],"events":2}
    {"op":"alloc","id":7,"size":4096}
    {"op":"free","id":7}
    """
    path = Path(path)
    form, compression = form_of(path)
    if isinstance(trace, ProgramTrace):
        if form == ".csv":
            raise InputError(f"{path}: CSV holds request traces only; use .jsonl or .parquet")
        check_program(trace)
    if form == ".parquet":
        from alloclab.simulator.trace_parquet import write_parquet

        write_parquet(trace, path)
    elif form == ".jsonl":
        from alloclab.simulator.trace_jsonl import write_jsonl

        write_jsonl(trace, path, compression)
    elif isinstance(trace, RequestTrace):
        from alloclab.simulator.trace_csv import write_csv

        write_csv(trace, path, compression)
