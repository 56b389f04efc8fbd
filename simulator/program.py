"""The program trace: what a program did on its devices, free of any allocator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["parameter", "constant", "thread_local", "output", "tuple", "temp"]
KINDS: tuple[Kind, ...] = ("parameter", "constant", "thread_local", "output", "tuple", "temp")


@dataclass(frozen=True)
class Allocation:
    """One allocation of an executable's buffer assignment (xla.BufferAllocationProto).

    Attributes:
        index: its place in the assignment, which is the order of allocation at run time.
        size: bytes.
        kind: ``parameter`` (given by the caller), ``constant`` and ``thread_local`` (never
            requested), ``output`` (an output leaf), ``tuple`` (the table of pointers of the
            result), ``temp`` (scratch).
        color: memory space; 0 is the device's ordinary memory.
        parameter: number of the entry parameter, None otherwise.
        output: index of the output leaf that it holds (a parameter too, where it is donated and
            aliased), None otherwise.
    """

    index: int
    size: int
    kind: Kind
    color: int = 0
    parameter: int | None = None
    output: int | None = None


@dataclass(frozen=True, eq=False)
class Values:
    """The values inside the allocations, one row each: XLA's live ranges.

    ``allocation`` is an index into the assignment; ``offset`` and ``size`` are bytes; the value is
    live from step ``start`` to step ``end`` of the schedule, both included.
    """

    name: tuple[str, ...]
    allocation: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BufferAssignment:
    """Where a compiler put the buffers of one executable for one target.

    ``values`` is None where the compiler did not say when each value is live; ``steps`` is the
    length of its schedule.
    """

    allocations: tuple[Allocation, ...]
    values: Values | None = None
    steps: int = 0

    def bytes_of(self, kind: Kind) -> int:
        """Sum of the sizes (bytes) of all allocations of a kind."""
        return sum(each.size for each in self.allocations if each.kind == kind)

    @property
    def alias_bytes(self) -> int:
        """Bytes of parameters whose memory becomes an output (donated and aliased)."""
        return sum(
            each.size
            for each in self.allocations
            if each.kind == "parameter" and each.output is not None
        )


@dataclass(frozen=True)
class Aval:
    """Shape and type of a buffer, per device (one shard)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Executable:
    """One compiled computation.

    Attributes:
        name: module name, such as ``jit_train_step``.
        fingerprint: names the computation (a hash of its module), the same in every run.
        inputs, outputs: shapes per device of parameters and output leaves, in order.
        targets: the buffer assignment per target: ``cpu``, ``cuda:h100``, ``tpu:v5e``, ...
        flops, bytes_accessed: the compiler's cost analysis, None where it gave none.
    """

    name: str
    fingerprint: str
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    targets: Mapping[str, BufferAssignment] = field(default_factory=dict)
    flops: float | None = None
    bytes_accessed: float | None = None


TRANSFER_IN, EXECUTE, TRANSFER_OUT, RELEASE, MARK = range(5)
EVENT_KINDS = ("transfer_in", "execute", "transfer_out", "release", "mark")


@dataclass(frozen=True, eq=False)
class ProgramTrace:
    """What a program did: executables, and events as columns with one row per event and device.

    A buffer is a piece of one device's memory under one name. Buffers are numbered from 0 in the
    order in which they appear; an output that takes over a donated input's memory is a new buffer
    with ``buffer_alias_of`` set. An execution on several devices is one row per device with the
    same ``launch``.

    Attributes, one row per event:
        kind: uint8, TRANSFER_IN (makes the results), EXECUTE (reads the operands, makes the
            results), TRANSFER_OUT (copies the operands to the host), RELEASE (the program let go
            of the operands), MARK (``label`` names a step or phase).
        time_us, duration_us: float64 microseconds from the start of capture; the duration is the
            host's, NaN where unknown.
        device: int32, the ordinal of the device.
        executable: int32, index into ``executables``, -1 if none.
        launch: int32, numbers the executions; -1 if none.
        label: int32, index into ``labels``.
        operands, results: int64 buffer numbers of all events, end to end; event i owns
            ``operands[operand_start[i]:operand_start[i + 1]]``, likewise results. The operands of
            an execution are the parameters of its executable in order, its results the outputs.
        donated: bool beside ``operands``: given up by the program in this execution.
    One row per buffer:
        buffer_aval: int32, index into ``avals``.
        buffer_bytes: int64, bytes on the device where it was captured.
        buffer_device: int32.
        buffer_space: uint8, index into `alloclab.simulator.requests.SPACES`.
        buffer_alias_of: int64, the buffer whose memory it takes over, or -1.
    ``target`` is where it was captured (``cpu``); ``versions`` those of jax and jaxlib.
    """

    executables: tuple[Executable, ...]
    avals: tuple[Aval, ...]
    labels: tuple[str, ...]
    kind: npt.NDArray[np.uint8]
    time_us: npt.NDArray[np.float64]
    duration_us: npt.NDArray[np.float64]
    device: npt.NDArray[np.int32]
    executable: npt.NDArray[np.int32]
    launch: npt.NDArray[np.int32]
    label: npt.NDArray[np.int32]
    operand_start: npt.NDArray[np.int64]
    operands: npt.NDArray[np.int64]
    donated: npt.NDArray[np.bool_]
    result_start: npt.NDArray[np.int64]
    results: npt.NDArray[np.int64]
    buffer_aval: npt.NDArray[np.int32]
    buffer_bytes: npt.NDArray[np.int64]
    buffer_device: npt.NDArray[np.int32]
    buffer_space: npt.NDArray[np.uint8]
    buffer_alias_of: npt.NDArray[np.int64]
    name: str = ""
    target: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kind)
