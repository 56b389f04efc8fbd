"""Text files that may be compressed: read by line in bounded memory, written atomically."""

import contextlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from alloclab.policies.errors import InputError
from alloclab.simulator.atomic import atomic_write

#: The longest line that is read, in bytes. Lines are decompressed one at a time, so that a small
#: file that unpacks to an endless line costs no more memory than this.
LINE_LIMIT = 16 << 20

#: The most events that a file may hold. The longest traces that are replayed have some millions.
EVENT_LIMIT = 100_000_000

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"

# A zstd block can unpack 4 bytes to 128 KiB, so this much unpacks to 32 MiB at most.
_CHUNK = 1024


class Lines:
    """The lines of a text file, with their ends.

    ``number`` is the line that was read last, counted from 1. Compression (gzip, zstd) is told
    from the content.

    Raises:
        InputError: on reading: not UTF-8, a line longer than `LINE_LIMIT`, damaged or cut data.
    """

    def __init__(self, path: Path, file: io.BufferedReader) -> None:
        self.path = path
        self.number = 0
        self._how = ""
        self._stream: BinaryIO = file
        head = file.peek(4)[:4]
        if head.startswith(GZIP):
            import gzip

            self._how = "gzip"
            self._stream = io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 16)
        elif head == ZSTD:
            self._how = "zstd"
            self._stream = io.BufferedReader(_ZstdReader(file), 1 << 16)

    def bad(self, text: str, line: int | None = None) -> InputError:
        """An error at a line, by default the one that was read last."""
        return InputError(f"{self.path}: line {line or self.number}: {text}")

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Put the line that was read last in front of an `InputError` that is raised inside."""
        try:
            yield
        except InputError as error:
            raise self.bad(str(error)) from error

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number += 1
        try:
            line = self._stream.readline(LINE_LIMIT + 1)
        except (OSError, EOFError, zlib.error) as error:
            if self._how:
                what = "cut or damaged" if isinstance(error, EOFError) else "damaged"
                raise self.bad(f"{what} {self._how} data ({error})") from error
            raise self.bad(f"cannot be read: {error}") from error
        if not line:
            self.number -= 1
            raise StopIteration
        if len(line) > LINE_LIMIT:
            raise self.bad(f"longer than the limit of {LINE_LIMIT >> 20} MiB for a line")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(
                f"byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8 text"
            ) from error


class _ZstdReader(io.RawIOBase):
    """Unpacks zstd frames; unlike zstandard's own reader it notices that the last one is cut."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame = self._new_frame()
        self._file = file
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while not self._ready:
            packed = self._file.read(_CHUNK)
            if not packed:
                if not self._frame.eof:
                    raise EOFError("it ends before the end of the compressed data")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            try:
                unpacked = [self._frame.decompress(packed)]
                while self._frame.unused_data:
                    rest, self._frame = self._frame.unused_data, self._new_frame()
                    unpacked.append(self._frame.decompress(rest))
            except self._error as error:
                raise OSError(str(error)) from error
            self._ready = memoryview(b"".join(unpacked))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


@contextlib.contextmanager
def write_text(path: Path, compression: str, errors: str = "strict") -> Iterator[TextIO]:
    """Write a text file atomically; ``compression`` is ``.gz``, ``.zst`` or nothing.

    ``errors`` says what becomes of text that UTF-8 cannot hold (lone surrogates), as for `open`.

    Raises:
        InputError: the file cannot be written, or UTF-8 cannot hold its text.
    """
    with atomic_write(path, binary=True) as raw, _packer(raw, compression) as stream:
        text = io.TextIOWrapper(stream, "utf-8", errors, newline="\n")
        try:
            yield text
        except UnicodeEncodeError as error:
            raise InputError(f"{path}: UTF-8 cannot hold {error.object[:60]!r}") from error
        finally:
            text.detach()


def _packer(raw: BinaryIO, compression: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if compression == ".gz":
        import gzip

        # Neither name nor time inside: equal traces make equal files.
        return gzip.GzipFile("", "wb", 6, raw, mtime=0)  # type: ignore[return-value]
    if compression == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).stream_writer(raw, closefd=False)
    return contextlib.nullcontext(raw)
