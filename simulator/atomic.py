"""Files are written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from alloclab.policies.errors import InputError


@overload
def atomic_write(path: str | Path) -> contextlib.AbstractContextManager[TextIO]: ...
@overload
def atomic_write(
    path: str | Path, *, binary: Literal[True]
) -> contextlib.AbstractContextManager[BinaryIO]: ...
def atomic_write(path: str | Path, *, binary: bool = False) -> Any:
    """Open a file for writing that takes its place at ``path`` when the block ends.

    Until then what was at ``path`` stays; if the block raises (Ctrl-C included) it stays for good
    and nothing is left beside it. Text is UTF-8 with ``\\n`` at the end of lines. A device or a
    pipe, such as ``/dev/stdout``, is written directly.

    Raises:
        InputError: the file cannot be written; the message says why.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "sizes.txt")) as file:
    ...         _ = file.write("4096")
    ...     Path(folder, "sizes.txt").read_text()
    '4096'
    """
    return _written(Path(path), binary)


@contextlib.contextmanager
def _written(path: Path, binary: bool) -> Iterator[IO[Any]]:
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".alloclab-{os.urandom(6).hex()}.tmp")
    try:
        if target.is_dir():
            raise InputError(f"{path}: is a folder, expected the name of a file to write")
        if target.exists() and not target.is_file():
            with _open(target, "w", binary) as file:
                yield file
            return
        try:
            with _open(temporary, "x", binary) as file:
                yield file
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        # An error that names another file is the block's own affair.
        if error.filename not in {None, str(temporary), str(target)}:
            raise
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _open(path: Path, mode: str, binary: bool) -> IO[Any]:
    if binary:
        return path.open(mode + "b")
    return path.open(mode, encoding="utf-8", newline="\n")
