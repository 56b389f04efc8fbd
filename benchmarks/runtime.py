"""How fast programs are simulated: executions a second on one core, and whether it stays linear.

Each program is a training loop: the state is donated, a batch goes in, a loss comes out and is
dropped, as is the batch before. Whole runs are timed, from the program trace to the request trace
of the device; the median of all rounds is printed. ``busy`` is the loop with a device that is
slower than the host, so that the host waits for each execution once it is 32 ahead.

    python benchmarks/runtime.py
"""

import gc
import statistics
import time

import numpy as np

from alloclab.simulator.program import (
    EXECUTE,
    RELEASE,
    TRANSFER_IN,
    Allocation,
    Aval,
    BufferAssignment,
    Executable,
    ProgramTrace,
)
from alloclab.simulator.runtime import Machine, Simulation

ROUNDS = 5
SIZES = (10_000, 100_000, 1_000_000)

AVALS = (Aval((1000, 1000), "float32"), Aval((8, 128), "float32"), Aval((), "float32"))
BYTES = (4_000_000, 4096, 4)
STEP = Executable(
    "jit_step",
    "step",
    AVALS[:2],
    (AVALS[0], AVALS[2]),
    {
        "cpu": BufferAssignment(
            (
                Allocation(0, BYTES[0], "parameter", parameter=0, output=0),
                Allocation(1, BYTES[1], "parameter", parameter=1),
                Allocation(2, 16, "tuple"),
                Allocation(3, BYTES[2], "output", output=1),
                Allocation(4, 1_000_000, "temp"),
            )
        )
    },
)


def training_loop(steps: int, *, every: int, device_us: float) -> ProgramTrace:
    """A training loop; a batch is copied in before each ``every``-th step."""
    events: list[tuple[int, list[int], list[int], int]] = []  # kind, operands, results, launch
    avals: list[int] = []
    alias_of: list[int] = []

    def new(aval: int, alias: int = -1) -> int:
        avals.append(aval)
        alias_of.append(alias)
        return len(avals) - 1

    state, batch = new(0), new(1)
    events.append((TRANSFER_IN, [], [state, batch], -1))
    for step in range(steps):
        if step and step % every == 0:
            events.append((RELEASE, [batch], [], -1))
            batch = new(1)
            events.append((TRANSFER_IN, [], [batch], -1))
        donated, state, loss = state, new(0, state), new(2)
        events.append((EXECUTE, [donated, batch], [state, loss], step))
        events.append((RELEASE, [loss], [], -1))
    kind = np.array([each[0] for each in events], np.uint8)
    executes = kind == EXECUTE
    operands = [buffer for each in events for buffer in each[1]]
    starts = [
        np.cumsum([0, *map(len, each)])
        for each in ([each[1] for each in events], [each[2] for each in events])
    ]
    donates = np.zeros(len(operands), np.bool_)
    donates[starts[0][:-1][executes]] = True
    duration = np.where(executes, device_us, 0.0)
    return ProgramTrace(
        (STEP,),
        AVALS,
        ("",),
        kind,
        np.cumsum(duration + 1.0) - duration,
        duration,
        np.zeros(len(kind), np.int32),
        np.where(executes, 0, -1).astype(np.int32),
        np.array([each[3] for each in events], np.int32),
        np.zeros(len(kind), np.int32),
        starts[0],
        np.array(operands, np.int64),
        donates,
        starts[1],
        np.array([buffer for each in events for buffer in each[2]], np.int64),
        np.array(avals, np.int32),
        np.array(BYTES, np.int64)[avals],
        np.zeros(len(avals), np.int32),
        np.zeros(len(avals), np.uint8),
        np.array(alias_of, np.int64),
    )


def rate(program: ProgramTrace, machine: Machine) -> tuple[float, int]:
    """Executions a second of processor time, and the events of the request trace."""
    gc.collect()
    start = time.process_time()
    trace = Simulation(program, machine).run().trace()
    took = time.process_time() - start
    return np.count_nonzero(program.kind == EXECUTE) / took, len(trace)


def main() -> None:
    print(f"{'program':<26}{'executions':>12}{'requests':>12}{'executions/s':>15}")
    loops = {
        "gpu": (Machine("gpu"), 1000, 1.0),
        "gpu busy": (Machine("gpu"), 1000, 30.0),
        "gpu, a batch every step": (Machine("gpu"), 1, 30.0),
        "tpu": (Machine("tpu"), 1000, 30.0),
        "cpu": (Machine("cpu"), 1000, 30.0),
    }
    for name, (machine, every, device_us) in loops.items():
        for size in SIZES if name == "gpu" else SIZES[1:2]:
            program = training_loop(size, every=every, device_us=device_us)
            rounds = [rate(program, machine) for _ in range(ROUNDS)]
            speed = statistics.median(each[0] for each in rounds)
            print(f"{name:<26}{size:>12,}{rounds[0][1]:>12,}{speed:>15,.0f}", flush=True)


if __name__ == "__main__":
    main()
