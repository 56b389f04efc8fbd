"""The real BFC allocators, driven without a GPU.

`RealBfc` runs `tsl::BFCAllocator` as it was released, above a driver that hands out addresses and
no memory. Two kinds of library hold it: the tensorflow-cpu wheel exports the class, and JAX's CUDA
plugins contain it (see `alloclab.validation.oracle_fetch`). A small C++ harness for each kind is
compiled on first use.

Real pools cost memory: 8 bytes per 256 bytes of pool, filled when a region is taken.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from alloclab.policies.base import Driver
from alloclab.policies.errors import InputError
from alloclab.validation.oracle_fetch import OracleUnavailable, cache_dir, library

End = Literal["lower", "upper"]
Int64s = npt.NDArray[np.int64]

#: What `RealReplay.offsets` has where there is no address. Requests of 0 bytes count as refused.
REFUSED, FREED, STOPPED = -1, -2, -3


class OracleHang(RuntimeError):  # noqa: N818  (the real code's, not ours)
    """The real code would loop for ever, or end the process, at this request."""


class RealChunk(NamedTuple):
    """A chunk of the real pool, sizes and offset in bytes.

    ``requested`` is 0 while it is free, ``bin`` is -1 where it is in none.
    """

    region: int
    offset: int
    size: int
    requested: int
    in_use: bool
    bin: int
    tag: Literal["gap", "lower", "upper"]


class DriverCall(NamedTuple):
    """A call of the driver: bytes given, asked for in vain, or returned; offset -1 if refused."""

    kind: Literal["alloc", "refused", "free"]
    offset: int
    bytes: int


@dataclass(frozen=True)
class RealReplay:
    """What the real allocator did with a stream, one row per event.

    Attributes:
        offsets: address of each allocation in bytes; `REFUSED`, `FREED` or `STOPPED` elsewhere.
        seconds: time spent inside the C++ code.
        bytes_in_use, largest_free, pool_bytes: after each event, in bytes; empty if not traced.
    """

    offsets: Int64s
    seconds: float
    bytes_in_use: Int64s
    largest_free: Int64s
    pool_bytes: Int64s


class _EndRules(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("descending", "exact_holes", "exact_gap")]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("limit", "address_space", "capacity", "largest")),
        *((name, ctypes.c_uint64) for name in ("gap", "granularity")),
        ("fragmentation_fraction", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("growth", "spatial")),
        *((name, _EndRules) for name in ("lower", "upper")),
    ]


@dataclass(frozen=True)
class _Spatial:
    """The spatial flavour of a version: the end of ordinary buffers, and what the function
    xla::CreateBFCAllocator of that version passes as the rules of each end, if anything."""

    ordinary: End
    lower: _EndRules
    upper: _EndRules


_SPATIAL = {
    "plugin-0.11.2": _Spatial("lower", _EndRules(), _EndRules()),  # its rules cannot be chosen
    "plugin-0.12.0.1": _Spatial("upper", _EndRules(0, 1, 1), _EndRules(1, 0, 0)),
}

_STATS = (
    "num_allocs",
    "bytes_in_use",
    "peak_bytes_in_use",
    "largest_alloc_size",
    "bytes_limit",
    "bytes_reserved",
    "peak_bytes_reserved",
    "bytes_reservable_limit",
    "largest_free_block_bytes",
    "pool_bytes",
    "peak_pool_bytes",
)
_TAGS: tuple[Literal["gap", "lower", "upper"], ...] = ("gap", "lower", "upper")
_KINDS: tuple[Literal["alloc", "refused", "free"], ...] = ("alloc", "refused", "free")
_MAX_BYTES = (1 << 63) - 1
#: Chunks are multiples of this (kMinAllocationSize), and so is what a driver gives.
_MIN_ALLOCATION_SIZE = 256


class RealBfc:
    """A real BFC allocator over a pool of at most ``limit`` bytes; close it, or use it in ``with``.

    Retry is off: a request that does not fit is refused at once, not after 10 seconds. Requests
    that would not return are not served (`OracleHang`), and the pool is not to be used after one:

    * The driver refuses 2,304 bytes, and jax is 0.10 or earlier, or it is TensorFlow: the 0.9 of
      it that is tried next rounds up to 2,304 again. Later ones try 256 bytes less.
    * The size of the next region was doubled past 2^64, to 0; doubling that until it suffices
      never ends.
    * jax 0.11, spatial: the driver gave less than the limit and would now give another region,
      while there is a gap. A second gap fails a check, which ends the process.

    Args:
        library: a name of `alloclab.validation.oracle_fetch.WHEELS`.
        limit: bytes; unlike in JAX not rounded up to 2 MiB.
        growth: take regions of 2, 4, 8 ... MiB as needed; else one of the whole limit.
        spatial: the flavour with two ends and a gap, with the rules that JAX chooses for each end.
        driver: what the driver refuses, and the gap that it leaves between regions.
        granularity: the driver gives multiples of this many bytes.
        fragmentation_fraction: chunks are split if more than this share of the limit is left over;
            0 means 128 MiB.

    Raises:
        OracleUnavailable: the library is not here or cannot be used.
        InputError: no such pool can be made.
    """

    def __init__(
        self,
        library: str,
        limit: int,
        *,
        growth: bool = False,
        spatial: bool = False,
        driver: Driver | None = None,
        granularity: int = _MIN_ALLOCATION_SIZE,
        fragmentation_fraction: float = 0.0,
    ) -> None:
        self._handle: int | None = None
        self._harness, opened = _open(library)
        if spatial and library not in _SPATIAL:
            raise InputError(f"oracle {library}: has no spatial flavour, expected spatial=False")
        if spatial and growth:
            raise InputError(f"oracle {library}: a spatial pool cannot grow")
        if not 0 < limit <= _MAX_BYTES // 4:
            raise InputError(f"oracle {library}: limit {limit}, expected bytes from 1 to 2^61")
        if granularity % _MIN_ALLOCATION_SIZE or granularity <= 0:
            raise InputError(f"oracle {library}: granularity {granularity}, expected n x 256 bytes")
        self.library, self.spatial = library, spatial
        self.ordinary_end: End = _SPATIAL[library].ordinary if spatial else "lower"
        rules = _SPATIAL.get(library) if spatial else None
        below = driver or Driver()
        config = _Config(
            limit=limit,
            address_space=2 * limit + (1 << 36),
            capacity=_MAX_BYTES if below.capacity is None else below.capacity,
            largest=_MAX_BYTES if below.largest is None else below.largest,
            gap=below.gap,
            granularity=granularity,
            fragmentation_fraction=fragmentation_fraction,
            growth=growth,
            spatial=spatial,
            lower=rules.lower if rules else _EndRules(),
            upper=rules.upper if rules else _EndRules(),
        )
        self._live: set[int] = set()
        self._handle = self._harness.bfc_new(opened, ctypes.byref(config))
        if self._handle is None:
            raise OracleUnavailable(f"oracle {library}: no room for {limit} bytes of addresses")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the allocator; nothing else may be asked of it then."""
        if self._handle is not None:
            self._harness.bfc_delete(self._handle)
            self._handle = None

    def alloc(self, size: int, alignment: int = 64, end: End | None = None) -> int | None:
        """The offset of a new allocation in bytes; None if it is refused or of 0 bytes.

        ``end`` is that of ordinary buffers unless given; collective buffers take the other one.

        Raises:
            OracleHang: the real code would not return.
        """
        _check_alignments(self.library, np.array([alignment], np.int64))
        if not 0 <= size <= _MAX_BYTES // 2:
            raise InputError(f"oracle {self.library}: size {size}, expected bytes from 0 to 2^62")
        upper = (end or self.ordinary_end) == "upper"
        self._check_ends(upper)
        offset = int(self._harness.bfc_alloc(self._open_handle, size, alignment, upper))
        if offset == STOPPED:
            raise OracleHang(f"oracle {self.library}: would not return from alloc({size})")
        if offset < 0:
            return None
        self._live.add(offset)
        return offset

    def free(self, offset: int) -> None:
        """Free the allocation at an offset.

        Raises:
            InputError: there is none.
        """
        if offset not in self._live:
            raise InputError(f"oracle {self.library}: nothing is allocated at {offset}")
        self._live.remove(offset)
        self._harness.bfc_free(self._open_handle, offset)

    def replay(
        self,
        is_alloc: npt.ArrayLike,
        ids: npt.ArrayLike,
        sizes: npt.ArrayLike,
        *,
        alignments: npt.ArrayLike | None = None,
        ends: npt.ArrayLike | None = None,
        trace: bool = False,
    ) -> RealReplay:
        """Run a request stream, one row per event; ids may be any integers.

        Frees of ids that are not live do nothing, as the real free of a refused request. From an
        event at which the real code would not return, all rows are `STOPPED`.

        Args:
            is_alloc, ids, sizes: as the columns of a request trace; sizes in bytes.
            alignments: bytes, 64 unless given.
            ends: 0 for the lower and 1 for the upper end; that of ordinary buffers unless given.
            trace: also record the state after each event.

        Raises:
            InputError: columns of different lengths, or a size or alignment that cannot be.
        """
        allocs = np.ascontiguousarray(is_alloc, np.uint8)
        count = len(allocs)
        names, slots = np.unique(np.asarray(ids, np.int64), return_inverse=True)
        ordinary = self.ordinary_end == "upper"
        columns = (
            np.ascontiguousarray(slots, np.int64),
            np.ascontiguousarray(sizes, np.int64),
            np.full(count, 64, np.int64)
            if alignments is None
            else np.ascontiguousarray(alignments, np.int64),
            np.full(count, ordinary, np.uint8)
            if ends is None
            else np.ascontiguousarray(ends, np.uint8),
        )
        if any(len(each) != count for each in columns):
            raise InputError(f"oracle {self.library}: columns differ in length, expected {count}")
        if count and columns[1].min() < 0:
            raise InputError(f"oracle {self.library}: a size is negative, expected bytes")
        _check_alignments(self.library, columns[2][allocs == 1])
        self._check_ends(bool(columns[3].any()))
        offsets = np.empty(count, np.int64)
        states = np.zeros((count if trace else 0, 3), np.int64)
        seconds = self._harness.bfc_replay(
            self._open_handle,
            count,
            *(each.ctypes.data for each in (allocs, *columns)),
            len(names),
            offsets.ctypes.data,
            states.ctypes.data if trace else None,
        )
        last = np.zeros(len(names), np.int64)
        last[columns[0]] = np.arange(count)  # of equal indices the last assignment stays
        self._live.update(offsets[last][offsets[last] >= 0].tolist())
        return RealReplay(offsets, float(seconds), *states.T.copy())

    def stats(self) -> dict[str, int | None]:
        """The statistics under the keys of `jax.Device.memory_stats`; None where it has none.

        Until jax 0.10 ``largest_free_block_bytes`` is always 0; see `largest_free`.
        """
        values = (ctypes.c_int64 * len(_STATS))()
        self._harness.bfc_stats(self._open_handle, values)
        return {
            name: None if value == -1 else value for name, value in zip(_STATS, values, strict=True)
        }

    def largest_free(self) -> int:
        """Bytes of the largest free chunk."""
        return int(self._harness.bfc_largest_free(self._open_handle))

    def next_region_bytes(self) -> int:
        """Bytes that it will ask for next, before the limit cuts them (mod 2^64)."""
        return int(self._harness.bfc_next_region_bytes(self._open_handle))

    def chunks(self) -> list[RealChunk]:
        """All chunks of all regions, by address."""
        rows = self._rows(self._harness.bfc_chunks, len(RealChunk._fields))
        return [
            RealChunk(region, offset, size, requested, bool(in_use), bin_, _TAGS[tag])
            for region, offset, size, requested, in_use, bin_, tag in rows
        ]

    def driver_calls(self) -> list[DriverCall]:
        """All calls of the driver so far."""
        rows = self._rows(self._harness.bfc_driver_calls, len(DriverCall._fields))
        return [DriverCall(_KINDS[kind], offset, size) for kind, offset, size in rows]

    def _check_ends(self, any_upper: bool) -> None:
        """A classic pool would refuse all requests at the upper end (seen in 0.11 and 0.12)."""
        if any_upper and not self.spatial:
            raise InputError(f"oracle {self.library}: a classic pool has the lower end only")

    def _rows(self, function: Any, width: int) -> list[list[int]]:
        count = function(self._open_handle, 0, None)
        rows = np.zeros((count, width), np.int64)
        function(self._open_handle, count, rows.ctypes.data)
        return [[int(number) for number in row] for row in rows]

    @property
    def _open_handle(self) -> int:
        if self._handle is None:
            raise ValueError(f"oracle {self.library}: is closed")
        return self._handle


def _check_alignments(name: str, alignments: Int64s) -> None:
    """The real code aborts the process at an alignment that is no power of two."""
    wrong = alignments[(alignments <= 0) | (alignments & (alignments - 1) != 0)]
    if len(wrong):
        raise InputError(f"oracle {name}: alignment {wrong[0]}, expected a power of two")


@functools.cache
def _open(name: str) -> tuple[ctypes.CDLL, int]:
    """The harness of a library, and the opened library."""
    path = library(name)
    built = _built(name, path)
    why = ctypes.create_string_buffer(500)
    with _quiet():
        try:
            harness = ctypes.CDLL(str(built))
        except OSError as error:
            raise OracleUnavailable(f"oracle {name}: cannot be loaded: {error}") from error
        _declare(harness)
        opened = harness.bfc_open(str(path).encode(), why, len(why))
    if not opened:
        raise OracleUnavailable(f"oracle {name}: {path}: {why.value.decode()}")
    return harness, int(opened)


def _declare(harness: ctypes.CDLL) -> None:
    pointer, int64, uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "bfc_open": (pointer, [ctypes.c_char_p, ctypes.c_char_p, int64]),
        "bfc_new": (pointer, [pointer, pointer]),
        "bfc_delete": (None, [pointer]),
        "bfc_alloc": (int64, [pointer, uint64, uint64, ctypes.c_int32]),
        "bfc_free": (None, [pointer, int64]),
        "bfc_replay": (ctypes.c_double, [pointer, int64, *[pointer] * 5, int64, pointer, pointer]),
        "bfc_stats": (None, [pointer, pointer]),
        "bfc_largest_free": (int64, [pointer]),
        "bfc_next_region_bytes": (uint64, [pointer]),
        "bfc_chunks": (int64, [pointer, int64, pointer]),
        "bfc_driver_calls": (int64, [pointer, int64, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(harness, name)
        function.restype, function.argtypes = result, arguments


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stderr: the libraries log that there is no GPU when they are loaded.

    How much they log later they read now, from the environment; refusals are no news here.
    """
    key = "TF_CPP_MIN_LOG_LEVEL"
    before = os.environ.get(key)
    os.environ[key] = "3"
    stderr = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _built(name: str, path: Path) -> Path:
    """The harness of a library, compiled now if it was not before."""
    source = "tf_bfc.cc" if name.startswith("tf-") else "plugin_bfc.cc"
    folder = resources.files("alloclab.validation")
    sources = {
        each: (folder / each).read_bytes() for each in (source, "bfc_harness.h", "fake_driver.h")
    }
    flags = ["-std=c++17", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    link = ["-ldl"]
    if source == "tf_bfc.cc":
        # As TensorFlow itself was compiled; the headers are not ours to warn about.
        flags += ["-DEIGEN_MAX_ALIGN_BYTES=64", "-w", f"-I{path.parent / 'include'}"]
        link += [f"-L{path.parent}", f"-l:{path.name}", f"-Wl,-rpath,{path.parent}"]
    key = hashlib.sha256(repr((sources, flags, link)).encode()).hexdigest()[:16]
    target = cache_dir() / "harness" / f"{Path(source).stem}-{key}.so"
    if not target.exists():
        _compile(name, sources, source, flags, link, target)
    return target


def _compile(
    name: str,
    sources: dict[str, bytes],
    source: str,
    flags: list[str],
    link: list[str],
    target: Path,
) -> None:
    wanted = os.environ.get("CXX")
    compiler = shutil.which(wanted) if wanted else shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise OracleUnavailable(f"oracle {name}: needs a C++ compiler; install g++ or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for file, text in sources.items():
            Path(scratch, file).write_bytes(text)
        result = Path(scratch, target.name)
        command = [compiler, *flags, source, "-o", str(result), *link]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            raise OracleUnavailable(f"oracle {name}: {compiler} cannot compile {source}: {why}")
        result.replace(target)
