"""Program traces written by hand, one call per event."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

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
    Kind,
    ProgramTrace,
)
from alloclab.simulator.program_checks import check_program
from alloclab.simulator.requests import SPACES


def assignment(
    *allocations: tuple[Kind, int] | tuple[Kind, int, dict[str, int]],
) -> BufferAssignment:
    """A buffer assignment from kinds, bytes and further fields, in index order."""
    return BufferAssignment(
        tuple(
            Allocation(index, size, kind, **(rest[0] if rest else {}))
            for index, (kind, size, *rest) in enumerate(allocations)
        )
    )


def executable(
    name: str,
    inputs: int,
    outputs: int,
    flops: float | None = None,
    bytes_accessed: float | None = None,
    **targets: BufferAssignment,
) -> Executable:
    """An executable; ``cuda_h100`` stands for the target ``cuda:h100``."""
    some = Aval((1,), "float32")
    named = {key.replace("_", ":"): value for key, value in targets.items()}
    return Executable(name, name, (some,) * inputs, (some,) * outputs, named, flops, bytes_accessed)


class Program:
    """Collects events; times are microseconds, and ``takes`` is the duration of an event."""

    def __init__(self) -> None:
        self.executables: list[Executable] = []
        self.events: list[tuple[int, float, float, int, int, int, str]] = []
        self.operands: list[list[int]] = []
        self.donated: list[list[bool]] = []
        self.results: list[list[int]] = []
        self.buffers: list[tuple[int, int, str, int]] = []
        self.now = 0.0
        self.launches = 0

    def _event(
        self,
        kind: int,
        takes: float,
        device: int,
        *,
        operands: Sequence[int] = (),
        donated: Sequence[int] = (),
        results: Sequence[int] = (),
        executable: int = -1,
        launch: int = -1,
        label: str = "",
    ) -> None:
        self.events.append((kind, self.now, takes, device, executable, launch, label))
        self.operands.append(list(operands))
        self.donated.append([each in donated for each in operands])
        self.results.append(list(results))
        self.now += takes

    def _new(self, size: int, device: int, space: str, alias_of: int = -1) -> int:
        self.buffers.append((size, device, space, alias_of))
        return len(self.buffers) - 1

    def wait(self, us: float) -> None:
        """The host does something else."""
        self.now += us

    def put(
        self, *sizes: int, device: int = 0, space: str = "device", takes: float = 0.0
    ) -> list[int]:
        """Copy buffers to a device."""
        made = [self._new(size, device, space) for size in sizes]
        self._event(TRANSFER_IN, takes, device, results=made)
        return made

    def run(
        self,
        what: Executable,
        operands: Sequence[int],
        sizes: Sequence[int],
        *,
        donate: Sequence[int] = (),
        alias: dict[int, int] | None = None,
        device: int = 0,
        takes: float = 0.0,
        same_launch: bool = False,
    ) -> list[int]:
        """Execute; ``sizes`` are the results' bytes, ``alias`` maps results to donated buffers."""
        if what not in self.executables:
            self.executables.append(what)
        aliases = alias or {}
        made = [
            self._new(size, device, "device", aliases.get(at, -1)) for at, size in enumerate(sizes)
        ]
        self.launches += not same_launch
        self._event(
            EXECUTE,
            takes,
            device,
            operands=operands,
            donated=donate,
            results=made,
            executable=self.executables.index(what),
            launch=self.launches - 1,
        )
        return made

    def get(self, *operands: int, device: int = 0, takes: float = 0.0) -> None:
        """Copy buffers to the host."""
        self._event(TRANSFER_OUT, takes, device, operands=operands)

    def drop(self, *operands: int, device: int = 0) -> None:
        """Let go of buffers."""
        self._event(RELEASE, 0.0, device, operands=operands)

    def mark(self, label: str) -> None:
        """A step or phase."""
        self._event(MARK, 0.0, 0, label=label)

    def trace(self) -> ProgramTrace:
        """The checked program trace."""
        kind, time, takes, device, which, launch, label = zip(*self.events, strict=True)
        labels = tuple(dict.fromkeys(("", *label)))
        size, on, space, alias = zip(*self.buffers, strict=True) if self.buffers else ((),) * 4
        starts = [np.cumsum([0, *map(len, each)]) for each in (self.operands, self.results)]
        made = ProgramTrace(
            tuple(self.executables),
            (Aval((1,), "float32"),),
            labels,
            np.array(kind, np.uint8),
            np.array(time, np.float64),
            np.array(takes, np.float64),
            np.array(device, np.int32),
            np.array(which, np.int32),
            np.array(launch, np.int32),
            np.array([labels.index(each) for each in label], np.int32),
            starts[0].astype(np.int64),
            np.array(list(chain(*self.operands)), np.int64),
            np.array(list(chain(*self.donated)), np.bool_),
            starts[1].astype(np.int64),
            np.array(list(chain(*self.results)), np.int64),
            np.zeros(len(self.buffers), np.int32),
            np.array(size, np.int64),
            np.array(on, np.int32),
            np.array([SPACES.index(each) for each in space], np.uint8),
            np.array(alias, np.int64),
        )
        check_program(made)
        return made
