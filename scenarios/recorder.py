"""The record of a run: buffers, executables and events, while JAX runs.

Kept light, as it runs inside every dispatch: one tuple per event, one weak reference per array.
Everything else happens in `Recorder.trace`, at the end.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from alloclab.simulator.program import EXECUTE, MARK, RELEASE, Aval, Executable, ProgramTrace


class Placed(NamedTuple):
    """What all buffers of one array share: shape of a shard, its bytes, devices, memory space."""

    aval: Aval
    nbytes: int
    devices: tuple[int, ...]
    space: int


class Span(NamedTuple):
    """Start and end on the clock of `time.perf_counter`, in seconds."""

    began: float
    ended: float


class Tracked(weakref.ref[Any]):
    """A weak reference to an array that knows the array's buffers, one per device.

    ``read`` tells whether the array has a copy on the host.
    """

    __slots__ = ("buffers", "key", "read")
    buffers: tuple[int, ...]
    key: int
    read: bool


class _Event(NamedTuple):
    kind: int
    span: Span
    executable: int
    label: str
    operands: tuple[tuple[int, ...], ...]
    donated: tuple[bool, ...]
    results: tuple[tuple[int, ...], ...]
    devices: tuple[int, ...]


class Recorder:
    """Collects events until `trace`. Its methods are called with ``lock`` held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.started = time.perf_counter()
        self.executables: list[Executable] = []
        self.arrays: dict[int, Tracked] = {}  # by id of the array
        self._events: list[_Event] = []
        self._placed: list[Placed] = []  # per array that made buffers
        self._shard: list[tuple[int, int]] = []  # per buffer: index in _placed, device
        self._alias_of: list[int] = []  # per buffer
        self._owners: list[int] = []  # per buffer: arrays over it; 0 when gone
        self._dead: deque[tuple[Tracked, float]] = deque()

    # --- arrays and their buffers ---------------------------------------------------------

    def tracked(self, array: Any) -> Tracked | None:
        """The entry of an array that is known and has its memory still."""
        found = self.arrays.get(id(array))
        return found if found is not None and found() is array else None

    def buffers_of(self, array: Any) -> tuple[int, ...] | None:
        """The buffers of an array that is known, in the order of its devices."""
        found = self.tracked(array)
        return None if found is None else found.buffers

    def device_of(self, buffer: int) -> int:
        """The device of a buffer."""
        return self._shard[buffer][1]

    def bytes_of(self, buffer: int) -> int:
        """The size of a buffer in bytes."""
        return self._placed[self._shard[buffer][0]].nbytes

    def track(
        self,
        array: Any,
        placed: Placed,
        shared: Mapping[int, int] | None = None,
        alias_of: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Make an array known: its buffers, one per device.

        Args:
            shared: buffers that it shares with other arrays, by device; the rest are new.
            alias_of: buffers whose memory its new ones take over, one per device.
        """
        index = len(self._placed)
        self._placed.append(placed)
        buffers = []
        for number, device in enumerate(placed.devices):
            if shared is not None and device in shared:
                buffers.append(shared[device])
                continue
            buffers.append(len(self._shard))
            self._shard.append((index, device))
            self._alias_of.append(alias_of[number] if alias_of else -1)
            self._owners.append(0)
        for old in alias_of:
            self._owners[old] = 0
        tracked = Tracked(array, self._died)
        tracked.buffers, tracked.key, tracked.read = tuple(buffers), id(array), False
        self.arrays[tracked.key] = tracked
        for each in buffers:
            self._owners[each] += 1
        return tracked.buffers

    def _died(self, tracked: Tracked) -> None:
        # Runs anywhere, in the middle of anything, so it takes no lock and waits for no one.
        self._dead.append((tracked, time.perf_counter()))

    def settle(self) -> None:
        """Note the arrays that died since the last event."""
        while self._dead:
            tracked, at = self._dead.popleft()
            if self.arrays.get(tracked.key) is tracked:
                del self.arrays[tracked.key]
            self._disown(tracked, at)

    def forget(self, array: Any) -> None:
        """The array was deleted: its memory is gone, whatever other arrays lie over it."""
        tracked = self.tracked(array)
        if tracked is not None:
            del self.arrays[tracked.key]
            for each in tracked.buffers:
                self._owners[each] = min(self._owners[each], 1)
            self._disown(tracked, time.perf_counter())

    def _disown(self, tracked: Tracked, at: float) -> None:
        """One array less over its buffers; the last one releases them."""
        gone = []
        for each in tracked.buffers:
            if self._owners[each]:
                self._owners[each] -= 1
                if not self._owners[each]:
                    gone.append(each)
        tracked.buffers = ()
        if gone:
            self._append(RELEASE, Span(at, float("nan")), operands=(tuple(gone),))

    # --- events ---------------------------------------------------------------------------

    def add(
        self,
        kind: int,
        span: Span | None = None,
        *,
        executable: int = -1,
        label: str = "",
        operands: tuple[tuple[int, ...], ...] = (),
        donated: tuple[bool, ...] = (),
        results: tuple[tuple[int, ...], ...] = (),
        devices: tuple[int, ...] = (),
    ) -> None:
        """Append an event; operands and results are the buffers of one array after the other.

        Args:
            devices: those that take part even with no operand or result.
        """
        self.settle()
        at = span or Span(time.perf_counter(), float("nan"))
        self._append(kind, at, executable, label, operands, donated, results, devices)

    def _append(
        self,
        kind: int,
        span: Span,
        executable: int = -1,
        label: str = "",
        operands: tuple[tuple[int, ...], ...] = (),
        donated: tuple[bool, ...] = (),
        results: tuple[tuple[int, ...], ...] = (),
        devices: tuple[int, ...] = (),
    ) -> None:
        self._events.append(
            _Event(kind, span, executable, label, operands, donated, results, devices)
        )

    # --- the end --------------------------------------------------------------------------

    def trace(self, name: str, versions: dict[str, str]) -> ProgramTrace:
        """The program trace up to now."""
        self.settle()
        avals: dict[Aval, int] = {}
        aval_of = [avals.setdefault(placed.aval, len(avals)) for placed in self._placed]
        labels: dict[str, int] = {"": 0}
        rows: list[tuple[Any, ...]] = []
        operands: list[Sequence[int]] = []
        donated: list[Sequence[bool]] = []
        results: list[Sequence[int]] = []
        launch = 0
        last = 0.0
        for event in self._events:  # in order; their clocks may differ by microseconds
            at = last = max((event.span.began - self.started) * 1e6, last)
            label = labels.setdefault(event.label, len(labels))
            for device, reads, gives, makes in self._per_device(event):
                rows.append((
                    event.kind,
                    at,
                    (event.span.ended - event.span.began) * 1e6,
                    device,
                    event.executable,
                    launch if event.kind == EXECUTE else -1,
                    label,
                ))  # fmt: skip
                operands.append(reads)
                donated.append(gives)
                results.append(makes)
            launch += event.kind == EXECUTE
        columns = list(zip(*rows, strict=True)) or [()] * 7
        made = _flat(results, np.int64)  # as the recorder numbers them; the trace counts by row
        number = np.empty_like(made)
        number[made] = np.arange(len(made))
        shard = np.array(self._shard, np.int64).reshape(-1, 2)[made]
        alias_of = np.array(self._alias_of, np.int64)[made]
        taken = alias_of >= 0
        alias_of[taken] = number[alias_of[taken]]
        return ProgramTrace(
            executables=tuple(self.executables),
            avals=tuple(avals),
            labels=tuple(labels),
            kind=np.array(columns[0], np.uint8),
            time_us=np.array(columns[1], np.float64),
            duration_us=np.array(columns[2], np.float64),
            device=np.array(columns[3], np.int32),
            executable=np.array(columns[4], np.int32),
            launch=np.array(columns[5], np.int32),
            label=np.array(columns[6], np.int32),
            operand_start=_starts(operands),
            operands=number[_flat(operands, np.int64)],
            donated=_flat(donated, np.bool_),
            result_start=_starts(results),
            results=number[made],
            buffer_aval=np.array(aval_of, np.int32)[shard[:, 0]],
            buffer_bytes=np.array([each.nbytes for each in self._placed], np.int64)[shard[:, 0]],
            buffer_device=shard[:, 1].astype(np.int32),
            buffer_space=np.array([each.space for each in self._placed], np.uint8)[shard[:, 0]],
            buffer_alias_of=alias_of,
            name=name,
            target="cpu",
            versions=versions,
        )

    def _per_device(self, event: _Event) -> Iterable[tuple[int, list[int], list[bool], list[int]]]:
        """The event as one row per device: device, operands, donated, results."""
        if event.kind == MARK:
            return [(0, [], [], [])]
        rows: dict[int, tuple[list[int], list[bool], list[int]]] = {
            device: ([], [], []) for device in event.devices
        }
        flags = event.donated or (False,) * len(event.operands)
        for buffers, flag in zip(event.operands, flags, strict=True):
            for buffer in buffers:
                row = rows.setdefault(self.device_of(buffer), ([], [], []))
                row[0].append(buffer)
                row[1].append(flag)
        for buffers in event.results:
            for buffer in buffers:
                rows.setdefault(self.device_of(buffer), ([], [], []))[2].append(buffer)
        return [(device, *row) for device, row in sorted(rows.items())]


def _starts(lists: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([0, *accumulate(map(len, lists))], np.int64)


def _flat(lists: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.array([value for each in lists for value in each], dtype)
