"""The record of a run: buffers, executables and events, while JAX runs.

Kept light, as it runs inside every dispatch: one tuple per event, one weak reference per array.
Everything else happens in `Recorder.trace`, at the end.
"""

import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alloclab.simulator.assignment import assignment_of, read_assignment
from alloclab.simulator.hlo_proto import join
from alloclab.simulator.program import (
    EXECUTE,
    MARK,
    RELEASE,
    Aval,
    BufferAssignment,
    Executable,
    ProgramTrace,
)
from alloclab.simulator.requests import SPACES

#: Memory kinds of JAX that are not ordinary device memory.
SPACE_OF_KIND = {"pinned_host": SPACES.index("pinned_host")}


class Placed(NamedTuple):
    """What all buffers of one array share: shape of a shard, its bytes, devices, memory space."""

    aval: Aval
    nbytes: int
    devices: tuple[int, ...]
    space: int


class _Tracked(weakref.ref[Any]):
    """A weak reference to an array that knows the array's buffers, one per device."""

    __slots__ = ("buffers", "key")
    buffers: tuple[int, ...]
    key: int


class _Event(NamedTuple):
    kind: int
    time: float
    duration: float
    executable: int
    label: str
    operands: tuple[tuple[int, ...], ...]
    donated: tuple[bool, ...]
    results: tuple[tuple[int, ...], ...]


class Recorder:
    """Collects what happens between `start` and `trace`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.started = time.perf_counter()
        self.events: list[_Event] = []
        self.placed: list[Placed] = []  # per array that made buffers, see first_buffer
        self.shard: list[tuple[int, int]] = []  # per buffer: index in placed, device
        self.alias_of: list[int] = []  # per buffer
        self.owners: list[int] = []  # per buffer: arrays over it; 0 when gone
        self.arrays: dict[int, _Tracked] = {}
        self.executables: list[Executable] = []
        self.assignments: dict[int, tuple[Any, BufferAssignment]] = {}
        self.dumps = Path(tempfile.mkdtemp(prefix="alloclab-"))

    def close(self) -> None:
        """Forget the dump directories."""
        shutil.rmtree(self.dumps, ignore_errors=True)

    # --- arrays and their buffers ---------------------------------------------------------

    def buffers_of(self, array: Any) -> tuple[int, ...] | None:
        """The buffers of an array that is already known."""
        tracked = self.arrays.get(id(array))
        return tracked.buffers if tracked is not None and tracked() is array else None

    def track(self, array: Any, placed: Placed, alias_of: Sequence[int] = ()) -> tuple[int, ...]:
        """Number the buffers of a new array; ``alias_of`` are those whose memory they take over."""
        first, index = len(self.shard), len(self.placed)
        self.placed.append(placed)
        for number, device in enumerate(placed.devices):
            self.shard.append((index, device))
            self.alias_of.append(alias_of[number] if alias_of else -1)
            self.owners.append(0)
        for old in alias_of:
            self.owners[old] = 0
        return self._own(array, tuple(range(first, len(self.shard))))

    def share(self, array: Any, buffers: tuple[int, ...]) -> tuple[int, ...]:
        """Another array over buffers that are known."""
        return self._own(array, buffers)

    def _own(self, array: Any, buffers: tuple[int, ...]) -> tuple[int, ...]:
        tracked = _Tracked(array, self._died)
        tracked.buffers, tracked.key = buffers, id(array)
        self.arrays[tracked.key] = tracked
        for each in buffers:
            self.owners[each] += 1
        return buffers

    def _died(self, tracked: _Tracked) -> None:
        with self.lock:
            if self.arrays.get(tracked.key) is tracked:
                del self.arrays[tracked.key]
                self.disown(tracked.buffers)

    def forget(self, array: Any) -> None:
        """The array was deleted, or its memory given away."""
        tracked = self.arrays.get(id(array))
        if tracked is not None and tracked() is array:
            del self.arrays[tracked.key]
            self.disown(tracked.buffers)

    def disown(self, buffers: tuple[int, ...]) -> None:
        """One array less over these buffers; the last one releases them."""
        gone = []
        for each in buffers:
            if self.owners[each]:
                self.owners[each] -= 1
                if not self.owners[each]:
                    gone.append(each)
        if gone:
            self.add(RELEASE, operands=(tuple(gone),))

    # --- events ---------------------------------------------------------------------------

    def add(
        self,
        kind: int,
        *,
        began: float | None = None,
        executable: int = -1,
        label: str = "",
        operands: tuple[tuple[int, ...], ...] = (),
        donated: tuple[bool, ...] = (),
        results: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """Append an event; ``began`` (from `now`) gives its time and duration."""
        now = time.perf_counter()
        start = now if began is None else began
        duration = float("nan") if began is None else now - start
        self.events.append(
            _Event(kind, start, duration, executable, label, operands, donated, results)
        )

    # --- executables ----------------------------------------------------------------------

    def dump_directory(self) -> Path:
        """A fresh directory for one compilation."""
        return Path(tempfile.mkdtemp(dir=self.dumps))

    def compiled(self, executable: Any, directory: Path) -> None:
        """Read the buffer assignment that a compilation left, and delete the rest."""
        files = sorted(directory.glob("*after_optimizations.hlo.pb"))
        if files:
            self.assignments[id(executable)] = (executable, read_assignment(files[-1]))
        shutil.rmtree(directory, ignore_errors=True)

    def assignment_of(self, executable: Any) -> BufferAssignment | None:
        """The assignment of an executable; from itself if it was not compiled under our eyes."""
        if id(executable) in self.assignments:
            return self.assignments[id(executable)][1]
        stats = executable.get_compiled_memory_stats()
        if not stats.serialized_buffer_assignment_proto:
            return None
        module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
        return assignment_of(join(module, stats.serialized_buffer_assignment_proto))

    # --- the end --------------------------------------------------------------------------

    def trace(self, name: str, versions: dict[str, str]) -> ProgramTrace:
        """The program trace up to now."""
        with self.lock:
            return _build(self, name, versions)


def _build(recorder: Recorder, name: str, versions: dict[str, str]) -> ProgramTrace:
    avals: dict[Aval, int] = {}
    aval_of = [avals.setdefault(placed.aval, len(avals)) for placed in recorder.placed]
    labels: dict[str, int] = {"": 0}
    rows: list[tuple[Any, ...]] = []
    operands: list[Sequence[int]] = []
    donated: list[Sequence[bool]] = []
    results: list[Sequence[int]] = []
    launch = 0
    last = 0.0
    for event in recorder.events:  # in order; threads may differ by microseconds in time
        at = max((event.time - recorder.started) * 1e6, last)
        last = at
        label = labels.setdefault(event.label, len(labels))
        for device, reads, gives, makes in _per_device(recorder, event):
            rows.append((
                event.kind,
                at,
                event.duration * 1e6,
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
    index = np.array([placed for placed, _ in recorder.shard], np.int64)
    return ProgramTrace(
        executables=tuple(recorder.executables),
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
        operands=_flat(operands, np.int64),
        donated=_flat(donated, np.bool_),
        result_start=_starts(results),
        results=_flat(results, np.int64),
        buffer_aval=np.array(aval_of, np.int32)[index],
        buffer_bytes=np.array([each.nbytes for each in recorder.placed], np.int64)[index],
        buffer_device=np.array([device for _, device in recorder.shard], np.int32),
        buffer_space=np.array([each.space for each in recorder.placed], np.uint8)[index],
        buffer_alias_of=np.array(recorder.alias_of, np.int64),
        name=name,
        target="cpu",
        versions=versions,
    )


def _per_device(
    recorder: Recorder, event: _Event
) -> Iterable[tuple[int, list[int], list[bool], list[int]]]:
    """The event as one row per device: device, operands, donated, results."""
    if event.kind == MARK:
        return [(0, [], [], [])]
    rows: dict[int, tuple[list[int], list[bool], list[int]]] = {}
    flags = event.donated or (False,) * len(event.operands)
    for buffers, flag in zip(event.operands, flags, strict=True):
        for buffer in buffers:
            row = rows.setdefault(recorder.shard[buffer][1], ([], [], []))
            row[0].append(buffer)
            row[1].append(flag)
    for buffers in event.results:
        for buffer in buffers:
            rows.setdefault(recorder.shard[buffer][1], ([], [], []))[2].append(buffer)
    return [(device, *row) for device, row in sorted(rows.items())]


def _starts(lists: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([0, *accumulate(map(len, lists))], np.int64)


def _flat(lists: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.array([value for each in lists for value in each], dtype)
