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
    _fields_ = [(name, ctypes.c_int32) for name in ("descending", "exact_holes", "exact_gap")]  # noqa: RUF012


class _Config(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
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
#: Chunks start at multiples of this, and the driver of plain memory gives such (kMinAllocationSize)
_GRANULARITY = 256


class RealBfc:
    """A real BFC allocator over a pool of at most ``limit`` bytes; close it, or use it in ``with``.

    Retry is off: a request that does not fit is refused at once, not after 10 seconds. Requests at
    which the real code would not return are not made (`OracleHang`); there are three:

    * until 0.11, the driver refuses 2,304 bytes or less: 0.9 of it rounds up to the same again;
    * the size of the next region was doubled past 2^64, to 0, which no doubling makes larger;
    * 0.11, spatial: the driver gave the pool only in part, and it has to grow while it has a gap
      (this one aborts the process).

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
        driver: Driver = Driver(),  # noqa: B008  (frozen)
        granularity: int = _GRANULARITY,
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
        if granularity % _GRANULARITY or granularity <= 0:
            raise InputError(f"oracle {library}: granularity {granularity}, expected n x 256 bytes")
        self.library = library
        self.ordinary_end: End = _SPATIAL[library].ordinary if spatial else "lower"
        rules = _SPATIAL.get(library) if spatial else None
        config = _Config(
            limit=limit,
            address_space=2 * limit + (1 << 36),
            capacity=_MAX_BYTES if driver.capacity is None else driver.capacity,
            largest=_MAX_BYTES if driver.largest is None else driver.largest,
            gap=driver.gap,
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
        columns = self._columns([1], [0], [size], [alignment], [(end or self.ordinary_end) == "upper"])
        offset = int(self._harness.bfc_alloc(self._open_handle, size, alignment, int(columns.ends[0])))
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
