"""The request trace: what one allocator is asked, in order, as columns with one row per event."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from alloclab.policies.base import Columns, Event, Free, Mark, Request
from alloclab.policies.errors import InputError, RowError
from alloclab.policies.units import MAX_BYTES

FREE, ALLOC, MARK = 0, 1, 2
OPS = ("free", "alloc", "mark")
SPACES = ("device", "collective", "pinned_host")

#: XLA asks for 64 bytes of alignment (kAllocatorAlignment, xla/stream_executor/
#: device_address_allocator.h); every allocator here gives at least its own.
DEFAULT_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """What one allocator is asked, in order.

    Attributes, one row per event:
        op: uint8, FREE, ALLOC or MARK.
        id: int64 at least 0, names an allocation; each is allocated once. 0 on marks.
        size: int64 bytes, 0 on frees and marks.
        alignment: int64 bytes, a power of two.
        stream: int32, the compute stream that asks.
        space: uint8, an index into SPACES.
        label: int32, an index into ``labels``: output, temp, argument, ..., or the mark's text.
        time_us: float64 microseconds from the start, never falling.
        execution: int32, numbers the execution that asks; -1 outside of one.
    ``labels`` are the texts; ``name`` says where the trace is from.

    Raises:
        InputError: a column, or (as `RowError`, which names it, counted from 0) a row is not valid.
    """

    op: npt.NDArray[np.uint8]
    id: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    alignment: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int32]
    space: npt.NDArray[np.uint8]
    label: npt.NDArray[np.int32]
    time_us: npt.NDArray[np.float64]
    execution: npt.NDArray[np.int32]
    labels: tuple[str, ...] = ("",)
    name: str = ""

    @classmethod
    def from_columns(
        cls,
        op: npt.ArrayLike,
        id: npt.ArrayLike,
        size: npt.ArrayLike,
        *,
        labels: Sequence[str] = ("",),
        name: str = "",
        **columns: npt.ArrayLike,
    ) -> Self:
        """Build and check a trace; columns that are left out take one default value each.

        >>> trace = RequestTrace.from_columns([1, 1, 0], [0, 1, 0], [100, 200, 0])
        >>> len(trace), trace.num_allocs
        (3, 2)
        """
        ops = _column("op", op, np.uint8)
        rows = len(ops)
        built = {
            each: _column(each, columns[each], dtype)
            if each in columns
            else np.broadcast_to(dtype(default), rows)
            for each, (dtype, default) in _OPTIONAL.items()
        }
        if unknown := columns.keys() - _OPTIONAL.keys():
            raise InputError(f"request trace: unknown column {min(unknown)!r}")
        trace = cls(
            op=ops,
            id=_column("id", id, np.int64),
            size=_column("size", size, np.int64),
            labels=tuple(labels),
            name=name,
            **built,
        )
        _check(trace)
        return trace

    @classmethod
    def from_arrays(
        cls,
        is_alloc: npt.ArrayLike,
        ids: npt.ArrayLike,
        sizes: npt.ArrayLike,
        **more: Any,
    ) -> Self:
        """A trace of allocations (true) and frees (false); sizes in bytes, ignored on frees.

        >>> trace = RequestTrace.from_arrays([True, False], [7, 7], [4096, 0])
        >>> list(trace.events())
        [Request(size=4096, id=7, alignment=64, ...), Free(id=7)]
        """
        flags = np.asarray(is_alloc)
        if flags.dtype != bool:
            if not np.isin(flags, (0, 1)).all():
                raise InputError("request trace: is_alloc must hold only true (1) and false (0)")
            flags = flags.astype(bool)
        column = _column("size", sizes, np.int64)
        if flags.shape != column.shape:
            raise InputError(f"request trace: {flags.size} rows of op, {column.size} of size")
        return cls.from_columns(flags.astype(np.uint8), ids, np.where(flags, column, 0), **more)

    def __len__(self) -> int:
        return len(self.op)

    @property
    def num_allocs(self) -> int:
        """How many allocations it asks for."""
        return int(np.count_nonzero(self.op == ALLOC))

    @cached_property
    def slot(self) -> npt.NDArray[np.int64]:
        """Per event: the ordinal of the allocation that it makes or frees, -1 on marks."""
        return _slots(self)

    @cached_property
    def alloc_events(self) -> npt.NDArray[np.int64]:
        """The event of each allocation, by ordinal."""
        return np.flatnonzero(self.op == ALLOC)

    @cached_property
    def free_events(self) -> npt.NDArray[np.int64]:
        """The event that frees each allocation, by ordinal; ``len(self)`` if it stays."""
        ends = np.full(self.num_allocs, len(self), np.int64)
        frees = np.flatnonzero(self.op == FREE)
        ends[self.slot[frees]] = frees
        return ends

    @cached_property
    def live_bytes(self) -> npt.NDArray[np.int64]:
        """Per event: the sum of requested bytes that are live after it."""
        sizes = self.size[self.alloc_events]
        change = np.where(self.op == ALLOC, self.size, 0)
        frees = self.op == FREE
        change[frees] = -sizes[self.slot[frees]]
        return np.cumsum(change)

    @property
    def lower_bound_bytes(self) -> int:
        """The largest sum of live bytes: no allocator that cannot move data needs less."""
        return int(self.live_bytes.max(initial=0))

    def columns(self) -> Columns:
        """The same stream for a compiled replay. Marks count as frees of nothing (slot -1)."""
        return Columns(
            (self.op == ALLOC).astype(np.uint8),
            self.slot,
            self.size,
            self.alignment,
            (self.space == SPACES.index("collective")).astype(np.uint8),
            self.num_allocs,
        )

    def events(self) -> Iterator[Event]:
        """The stream as objects, one per event."""
        labels, make = self.labels, partial(tuple.__new__, Request)  # _make, without its check
        rows = zip(
            self.size.tolist(),
            self.id.tolist(),
            _values(self.alignment),
            _values(self.stream),
            map(SPACES.__getitem__, _values(self.space)),
            map(labels.__getitem__, _values(self.label)),
            _values(self.time_us),
            _values(self.execution),
            strict=False,  # constant columns repeat without end
        )
        for op, row in zip(self.op.tobytes(), rows, strict=False):
            if op == ALLOC:
                yield make(row)
            elif op == FREE:
                yield Free(row[1])
            else:
                yield Mark(row[5])


_OPTIONAL: dict[str, tuple[Any, Any]] = {
    "alignment": (np.int64, DEFAULT_ALIGNMENT),
    "stream": (np.int32, 0),
    "space": (np.uint8, 0),
    "label": (np.int32, 0),
    "time_us": (np.float64, 0.0),
    "execution": (np.int32, -1),
}


def _values(column: npt.NDArray[Any]) -> Iterator[Any]:
    """The column as Python values; a constant (broadcast) column costs no memory."""
    if column.strides == (0,) and len(column):
        return repeat(column[0].item())
    return iter(column.tolist())


def _column(name: str, values: npt.ArrayLike, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The values as one column of the type, refused where that would change a value."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise InputError(f"request trace: column {name} has shape {given.shape}, expected one row")
    if given.dtype == dtype:
        return given
    if given.dtype.kind not in "biuf" and given.size:
        raise InputError(f"request trace: column {name} holds {given.dtype}, expected numbers")
    with np.errstate(invalid="ignore"):
        cast = given.astype(dtype)
    wrong = np.flatnonzero(cast != given)
    if wrong.size:
        row = int(wrong[0])
        raise _bad(row, f"{name} {given[row]} is not a valid {np.dtype(dtype).name}")
    return cast


def _check(trace: RequestTrace) -> None:
    """Raise InputError for the first row that breaks a rule."""
    rows = len(trace)
    for name in ("id", "size", *_OPTIONAL):
        if len(getattr(trace, name)) != rows:
            raise InputError(
                f"request trace: {rows} rows of op, {len(getattr(trace, name))} of {name}"
            )
    if not all(isinstance(each, str) for each in trace.labels):
        raise InputError("request trace: labels must be text")
    if len(set(trace.labels)) < len(trace.labels):
        twice = next(each for each in trace.labels if trace.labels.count(each) > 1)
        raise InputError(f"request trace: label {twice!r} is there twice, expected each once")
    if not rows:
        return

    def column(name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = getattr(trace, name)
        return values[:1] if values.strides == (0,) else values  # a constant: one row tells all

    def refuse(bad: npt.NDArray[np.bool_], name: str, valid: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            raise _bad(row, f"{name} {getattr(trace, name)[row]}, expected {valid}")

    is_alloc = trace.op == ALLOC
    refuse(column("op") > MARK, "op", "0 (free), 1 (alloc) or 2 (mark)")
    refuse(column("id") < 0, "id", "0 or more")
    refuse((trace.op == MARK) & (trace.id != 0), "id", "0 on marks")
    refuse(column("size") < 0, "size", "0 or more bytes")
    refuse(column("size") >= MAX_BYTES, "size", "less than 1 EiB")
    refuse(~is_alloc & (trace.size != 0), "size", "0 on frees and marks")
    alignment, space, label, time_us = map(column, ("alignment", "space", "label", "time_us"))
    power = (alignment > 0) & (alignment & (alignment - 1) == 0)
    refuse(~power, "alignment", "a power of two")
    refuse(space >= len(SPACES), "space", f"0 to {len(SPACES) - 1}")
    refuse((label < 0) | (label >= len(trace.labels)), "label", "an index into labels")
    refuse(~np.isfinite(time_us), "time_us", "a finite number of microseconds")
    refuse(np.diff(time_us, prepend=time_us[0]) < 0, "time_us", "no step back")
    trace.slot  # noqa: B018  checks that ids pair up
    # Sums of live bytes are int64 everywhere. Wrapping is harmless unless it happened.
    if float(trace.size.max()) * trace.num_allocs >= 2.0**63:
        refuse(trace.live_bytes < 0, "size", "less than 8 EiB live at once")


def _bad(row: int, text: str, before: int | None = None) -> RowError:
    return RowError("request trace", row, text, before)


def _slots(trace: RequestTrace) -> npt.NDArray[np.int64]:
    """Pair frees with allocations by id.

    Raises:
        InputError: an id is allocated twice, or freed when it is not live.
    """
    allocs = np.flatnonzero(trace.op == ALLOC)
    frees = np.flatnonzero(trace.op == FREE)
    ids, freed = trace.id[allocs], trace.id[frees]
    top = max(int(ids.max(initial=-1)), int(freed.max(initial=-1)))
    if top >= 4 * len(trace) + 1024:  # sparse ids: count them densely
        known, dense = np.unique(np.concatenate([ids, freed]), return_inverse=True)
        ids, freed, top = dense[: len(ids)], dense[len(ids) :], len(known) - 1
    ordinals, none = np.arange(max(len(ids), len(freed))), np.full(top + 1, -1, np.int64)
    by_id = none.copy()
    by_id[ids] = ordinals[: len(ids)]
    found = by_id[freed]
    freed_by = none
    freed_by[freed] = ordinals[: len(freed)]
    if (
        (by_id[ids] != ordinals[: len(ids)]).any()  # the last of duplicates is in the table
        or (freed_by[freed] != ordinals[: len(freed)]).any()
        or (found < 0).any()
        or (allocs[found] > frees).any()
    ):
        raise _first_fault(trace)
    slots = np.full(len(trace), -1, np.int64)
    slots[allocs] = ordinals[: len(ids)]
    slots[frees] = found
    return slots


def _first_fault(trace: RequestTrace) -> RowError:
    """The first row whose id does not pair up."""
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for row, (op, name) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if op == ALLOC:
            if name in made:
                text = (
                    f"each allocation needs an id of its own, but id {name} was already "
                    "allocated at"
                )
                return _bad(row, text, made[name])
            made[name] = row
        elif op == FREE:
            if name not in made:
                return _bad(row, f"free of id {name}, but it is not allocated there")
            if name in freed:
                return _bad(row, f"free of id {name}, but it was already freed at", freed[name])
            freed[name] = row
    raise AssertionError("all ids pair up")
