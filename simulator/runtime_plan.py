"""What an execution asks for, from the buffer assignment; how long it takes, from the rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from alloclab.policies.units import MIB
from alloclab.simulator.devices import Device
from alloclab.simulator.environment import AllocatorEnvironment
from alloclab.simulator.program import (
    EXECUTE,
    TRANSFER_IN,
    BufferAssignment,
    Executable,
    ProgramTrace,
)
from alloclab.simulator.requests import ALLOC, DEFAULT_ALIGNMENT, FREE
from alloclab.simulator.runtime_state import NOTHING, Block, Row

Kind = Literal["gpu", "tpu", "cpu"]

#: The platform in the names of targets, by kind of device.
PLATFORMS: dict[Kind, str] = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}

#: Memory spaces by colour of a buffer assignment (xla/service/gpu/gpu_memory_space_assignment.h
#: and Layout::kHostMemorySpace). TPU colours beside these are on-chip memories.
SPACE_OF_COLOR: dict[Kind, dict[int, str]] = {
    "gpu": {0: "device", 1: "collective", 2: "device", 5: "pinned_host"},
    "tpu": {0: "device", 5: "pinned_host"},
    "cpu": {0: "device", 5: "device"},
}

#: Collective memory is aligned to the granularity of multicast objects, 2 MiB by default.
COLLECTIVE_ALIGNMENT = 2 * MIB

#: Executions in flight per device (max_inflight_computations, xla/pjrt/local_device_state.h).
MAX_INFLIGHT = 32

#: Host time of one call of a jitted function, measured with jax 0.10 on a CPU: 8.6 us.
DISPATCH_US = 8.6


@dataclass(frozen=True)
class Machine:
    """The device and runtime that a program is run on.

    Attributes:
        kind: which runtime: ``gpu``, ``tpu`` or ``cpu``.
        target: whose buffer assignment is wanted, such as ``cuda:h100``; None for the captured.
        peak: flop/s by type (``f32``, ``bf16``, ...); bandwidth, host_bandwidth: bytes/s of its
            memory and of its link to the host. Where one is unknown, captured durations are used.
        generation: of a TPU, for the padding of its buffers.
        max_inflight: how many executions the host may run ahead.
        async_dispatch: launches are made by a thread (PJRT_GPU_ENABLE_ASYNC_DISPATCH=1).
        separate_collective: collective memory has an allocator of its own (jaxlib before 0.11, or
            without preallocation).
        blocking_reads: the program waits for copies to the host, as ``float(x)`` and
            ``np.asarray(x)`` do; otherwise it goes on, as after ``x.copy_to_host_async()``.
        dispatch_us: host time of one call.
    """

    kind: Kind = "gpu"
    target: str | None = None
    peak: tuple[tuple[str, float], ...] = ()
    bandwidth: float | None = None
    host_bandwidth: float | None = None
    generation: int | None = None
    max_inflight: int = MAX_INFLIGHT
    async_dispatch: bool = False
    separate_collective: bool = False
    blocking_reads: bool = True
    dispatch_us: float = DISPATCH_US

    @classmethod
    def of(cls, device: Device, environment: AllocatorEnvironment | None = None) -> Self:
        """The machine with this device, under the environment variables that JAX reads.

        >>> from alloclab.simulator.devices import load_device
        >>> Machine.of(load_device("h100")).target
        'cuda:h100'
        """
        platform = PLATFORMS[device.kind]
        return cls(
            device.kind,
            platform if device.kind == "cpu" else f"{platform}:{device.name}",
            tuple(sorted(device.peak.items())),
            device.bandwidth,
            device.host_bandwidth,
            device.generation,
            async_dispatch=environment is not None and environment.async_dispatch,
            separate_collective=environment is not None and environment.flavour == "classic",
        )


class Part(NamedTuple):
    """What an execution asks of one allocator; ``outputs`` pairs rows with results.

    ``scratch`` frees, by the same ids, what is only needed while it is enqueued.
    """

    memory: str
    requests: Block
    outputs: tuple[tuple[int, int], ...]
    scratch: Block | None


@dataclass(frozen=True, eq=False)
class Plan:
    """What one execution of an executable asks for, and what becomes of its parameters.

    Attributes:
        parts: requests per allocator, in the order of the buffer assignment.
        taken_over: results that take over the memory of a parameter, if that is donated: parameter
            by result.
        results: per result, what it needs if it gets memory of its own; None for none.
        reserved: bytes of temp and tuple tables in device memory.
        exact: whether the assignment is that of the wanted target.
    """

    parts: tuple[Part, ...]
    taken_over: dict[int, int]
    results: tuple[Row | None, ...]
    reserved: int
    exact: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def choose_assignment(
    executable: Executable, machine: Machine, captured: str
) -> tuple[BufferAssignment | None, bool]:
    """The wanted target's buffer assignment, else the nearest, and whether it is the wanted one.

    The nearest is one of the same platform, else that of the target where the program was captured.
    """
    targets = executable.targets
    wanted = machine.target or captured
    if wanted in targets:
        return targets[wanted], True
    family = [name for name in targets if name.split(":")[0] == PLATFORMS[machine.kind]]
    for name in (*sorted(family), captured, *targets):
        if name in targets:
            return targets[name], False
    return None, False


def make_plan(
    executable: Executable,
    machine: Machine,
    captured: str,
    results: Sequence[Row],
    captured_aliases: Mapping[int, int],
) -> Plan:
    """The plan of an executable (GpuExecutableBufferAllocator::GenerateBufferAllocations,
    xla/service/gpu/gpu_executable_buffer_allocator.cc; MemoryForAllocation,
    xla/pjrt/cpu/cpu_client.cc).

    Allocations are requested in index order. Parameters come from the caller, constants lie in the
    loaded module, outside of every pool; thread-local buffers and those of size 0 get nothing.

    Args:
        results: size, label and space of each result as captured; used for results that the
            assignment does not name, and for all where there is no assignment.
        captured_aliases: results that took over a parameter when captured; used only where there
            is no assignment.
    """
    assignment, exact = choose_assignment(executable, machine, captured)
    taken_over, requested = dict[int, int](), list[tuple[Row, int]]()
    rows: list[Row | None] = [row if row.size else None for row in results]
    if assignment is None:
        taken_over = dict(captured_aliases)
    named = set[int]()
    for each in assignment.allocations if assignment is not None else ():
        space = SPACE_OF_COLOR[machine.kind].get(each.color)
        result = -1 if each.output is None else each.output
        if result >= 0:
            named.add(result)
        if space is None or not each.size or each.kind in ("constant", "thread_local"):
            if result >= 0:
                rows[result] = None
            continue
        size = each.size
        if result >= 0 and not exact:
            size = max(size, results[result].size)  # padded where the target pads
        label = "output" if result >= 0 else each.kind
        row = Row(size, label, space, _alignment(space))
        if result >= 0:
            rows[result] = row
        if each.kind != "parameter":
            requested.append((row, result))
        elif result >= 0 and each.parameter is not None:
            taken_over[result] = each.parameter
    unnamed = [index for index in range(len(results)) if index not in named]
    for result in sorted(unnamed, key=lambda index: -results[index].size):
        wanted = rows[result]
        if wanted is not None and result not in taken_over:
            requested.append((wanted, result))
    if assignment is None and len(results) > 1:
        requested.append((Row(8 * len(results), "tuple"), -1))
    return _divide(requested, taken_over, rows, machine, exact)


def _alignment(space: str) -> int:
    return COLLECTIVE_ALIGNMENT if space == "collective" else DEFAULT_ALIGNMENT


def memory_of(space: str, machine: Machine) -> str:
    """Which allocator of a device serves a memory space; see `PoolKey`."""
    return "device" if space == "collective" and not machine.separate_collective else space


def _divide(
    requested: Sequence[tuple[Row, int]],
    taken_over: dict[int, int],
    rows: Sequence[Row | None],
    machine: Machine,
    exact: bool,
) -> Plan:
    """The plan, with the requests divided by allocator."""
    reserved = 0
    divided: dict[str, list[tuple[Row, int]]] = {}
    for row, result in requested:
        if machine.kind == "tpu" and result < 0 and row.space == "device":
            reserved += row.size  # is part of the loaded program
        else:
            divided.setdefault(memory_of(row.space, machine), []).append((row, result))
    parts = []
    for memory, pairs in divided.items():
        outputs = tuple((at, result) for at, (_, result) in enumerate(pairs) if result >= 0)
        scratch = [at for at, (_, result) in enumerate(pairs) if result < 0]
        frees = Block(FREE, [NOTHING] * len(scratch), scratch) if scratch else None
        parts.append(Part(memory, Block(ALLOC, [row for row, _ in pairs]), outputs, frees))
    return Plan(tuple(parts), taken_over, tuple(rows), reserved, exact)


class Timing(NamedTuple):
    """Times per event of a program in nanoseconds: what the host does before it, and how long the
    device or the copy engine needs for it."""

    gap: list[int]
    duration: list[int]


def time_events(program: ProgramTrace, machine: Machine, sizes: Sequence[int]) -> Timing:
    """How long everything takes.

    The host's gaps are those of the captured run. Executions take the longer of flops / peak rate
    and bytes / bandwidth, copies their bytes / host bandwidth; what cannot be estimated takes as
    long as it did when captured.
    """
    known = np.nan_to_num(program.duration_us)
    before = np.concatenate([[0.0], (program.time_us + known)[:-1]])
    gap = np.maximum(program.time_us - before, 0.0)
    estimate = np.full(len(program), np.nan)
    executions = program.kind == EXECUTE
    if executions.any():
        costs = np.array([_execution_us(each, machine) for each in program.executables])
        estimate[executions] = costs[program.executable[executions]]
    if machine.host_bandwidth is not None:
        size = np.array(sizes, np.int64)
        copied = np.where(
            program.kind == TRANSFER_IN,
            _sums(size, program.results, program.result_start),
            _sums(size, program.operands, program.operand_start),
        )
        copies = ~executions
        estimate[copies] = copied[copies] / machine.host_bandwidth * 1e6
    duration = np.where(np.isnan(estimate), known, estimate)
    return Timing(*(np.rint(each * 1000).astype(np.int64).tolist() for each in (gap, duration)))


def _sums(sizes: npt.NDArray[np.int64], buffers: Any, start: Any) -> npt.NDArray[np.int64]:
    """Per event the sum of the sizes of its buffers."""
    total = np.concatenate([[0], np.cumsum(sizes[buffers])])
    return np.asarray(total[start[1:]] - total[start[:-1]])


#: Peak rates by the types of an executable's inputs; the first that matches counts.
_RATE_OF = (("float64", "f64"), ("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32"))


def _execution_us(executable: Executable, machine: Machine) -> float:
    """Estimated time on the device in microseconds, NaN where the rates or costs are unknown."""
    rates = dict(machine.peak)
    types = {each.dtype for each in executable.inputs}
    names = [rate for dtype, rate in _RATE_OF if dtype in types and rate in rates]
    rate = rates[names[0]] if names else min(rates.values(), default=0.0)
    times = []
    if rate and executable.flops is not None:
        times.append(executable.flops / rate)
    if machine.bandwidth and executable.bytes_accessed is not None:
        times.append(executable.bytes_accessed / machine.bandwidth)
    return max(times) * 1e6 if times else np.nan
