"""Hypothesis strategies for traces, small and valid, with the extremes that columns can hold."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from alloclab.policies.units import MAX_BYTES
from alloclab.simulator import program, requests
from alloclab.simulator.program import (
    KINDS,
    Allocation,
    Aval,
    BufferAssignment,
    Executable,
    ProgramTrace,
    Values,
)
from alloclab.simulator.requests import SPACES, RequestTrace

INT32 = st.integers(-(2**31), 2**31 - 1)
NATURAL32 = st.integers(0, 2**31 - 1)
#: Without -0.0, which is equal to the default of times and so left out of files.
FINITE = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value + 0.0)
LABELS = st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True).map(tuple)
BYTES = st.one_of(st.integers(0, 1 << 20), st.integers(0, MAX_BYTES - 1))


@st.composite
def request_traces(draw: st.DrawFn) -> RequestTrace:
    """Request traces; every column but the first three may be left at its default."""
    steps = draw(st.lists(st.integers(0, 2), max_size=12))
    count = len(steps)
    ids = draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count, unique=True))
    rows: list[tuple[int, int, int]] = []
    live: list[int] = []
    for step, fresh in zip(steps, ids, strict=True):
        if step == requests.FREE and live:
            rows.append((step, live.pop(draw(st.integers(0, len(live) - 1))), 0))
        elif step == requests.MARK:
            rows.append((step, 0, 0))
        else:
            sizes = BYTES if len(rows) < 7 else st.integers(0, 1 << 20)  # in sum less than 8 EiB
            rows.append((requests.ALLOC, fresh, draw(sizes)))
            live.append(fresh)
    labels = draw(LABELS)
    values: dict[str, st.SearchStrategy[Any]] = {
        "alignment": st.integers(0, 62).map(lambda power: 1 << power),
        "stream": INT32,
        "space": st.integers(0, len(SPACES) - 1),
        "label": st.integers(0, len(labels) - 1),
        "time_us": FINITE,
        "execution": INT32,
    }
    columns = {
        name: draw(st.lists(values[name], min_size=count, max_size=count))
        for name in draw(st.sets(st.sampled_from(sorted(values))))
    }
    if "time_us" in columns:
        columns["time_us"].sort()
    op, number, size = np.array(rows, np.int64).reshape(-1, 3).T
    return RequestTrace.from_columns(
        op, number, size, labels=labels, name=draw(st.text(max_size=8)), **columns
    )


def avals() -> st.SearchStrategy[Aval]:
    """Shapes of up to three dimensions, and names of types that may hold anything."""
    shapes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "bfloat16", "key<fry>[2]"]) | st.text(min_size=1)
    return st.builds(Aval, shapes, dtypes)


@st.composite
def executables(draw: st.DrawFn) -> Executable:
    """Executables with any buffer assignment for up to two targets."""
    inputs, outputs = (tuple(draw(st.lists(avals(), max_size=3))) for _ in range(2))
    targets = draw(st.lists(st.sampled_from(["cpu", "cuda:h100", "tpu:v5e"]), unique=True))
    numbers = st.none() | FINITE
    return Executable(
        name=draw(st.text(max_size=8)),
        fingerprint=draw(st.text(max_size=8)),
        inputs=inputs,
        outputs=outputs,
        targets={each: draw(assignments(len(inputs), len(outputs))) for each in targets[:2]},
        flops=draw(numbers),
        bytes_accessed=draw(numbers),
    )


@st.composite
def assignments(draw: st.DrawFn, inputs: int, outputs: int) -> BufferAssignment:
    """Buffer assignments, with live ranges or without."""
    allocations: list[Allocation] = []
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=4)):
        if kind == "parameter" and not inputs:
            continue
        allocations.append(
            Allocation(
                index=len(allocations),
                size=draw(BYTES),
                kind=kind,
                color=draw(NATURAL32),
                parameter=draw(st.integers(0, inputs - 1)) if kind == "parameter" else None,
                output=draw(st.none() | st.integers(0, outputs - 1)) if outputs else None,
            )
        )
    steps = draw(NATURAL32)
    if not draw(st.booleans()):
        return BufferAssignment(tuple(allocations), None, steps)
    names, rows = [], []
    for _ in range(draw(st.integers(0, 4)) if allocations else 0):
        where = draw(st.sampled_from(allocations))
        offset = draw(st.integers(0, where.size))
        start = draw(st.integers(0, steps))
        names.append(draw(st.text(max_size=8)))
        rows.append(
            (
                where.index,
                offset,
                draw(st.integers(0, where.size - offset)),
                start,
                draw(st.integers(start, steps)),
            )
        )
    allocation, offsets, sizes, starts, ends = np.array(rows, np.int64).reshape(-1, 5).T
    values = Values(
        tuple(names),
        allocation.astype(np.int32),
        offsets.copy(),
        sizes.copy(),
        starts.astype(np.int32),
        ends.astype(np.int32),
    )
    return BufferAssignment(tuple(allocations), values, steps)


@st.composite
def program_traces(draw: st.DrawFn) -> ProgramTrace:
    """Program traces: each event is drawn from those that are valid where it stands."""
    known = tuple(draw(st.lists(executables(), max_size=2)))
    shapes = tuple(draw(st.lists(avals(), min_size=1, max_size=3, unique=True)))
    labels = draw(LABELS)
    events: list[list[Any]] = []
    operands: list[int] = []
    donated: list[bool] = []
    buffers: list[tuple[int, int, int, int, int]] = []
    starts, result_starts = [0], [0]
    live: dict[int, int] = {}  # buffer -> device

    def make(device: int, alias_of: int) -> None:
        live[len(buffers)] = device
        shape, space = (draw(st.integers(0, len(each) - 1)) for each in (shapes, SPACES))
        buffers.append((shape, draw(BYTES), device, space, alias_of))

    for kind in draw(st.lists(st.integers(0, 4), max_size=8)):
        device, executable, launch = draw(st.sampled_from([0, 1, 2**31 - 1])), -1, -1
        if kind == program.TRANSFER_IN:
            for _ in range(draw(st.integers(0, 3))):
                make(device, -1)
        elif kind == program.EXECUTE:
            here = [buffer for buffer, each in live.items() if each == device]
            fitting = [n for n, each in enumerate(known) if here or not each.inputs]
            if not fitting:
                continue
            executable, launch = draw(st.sampled_from(fitting)), len(events)
            given = [draw(st.sampled_from(here)) for _ in known[executable].inputs]
            gone = [given.count(each) == 1 and draw(st.booleans()) for each in given]
            operands += given
            donated += gone
            free = [buffer for buffer, each in zip(given, gone, strict=True) if each]
            for buffer in free:
                del live[buffer]
            for _ in known[executable].outputs:
                takes_over = draw(st.booleans()) and len(free) > 0
                make(device, free.pop() if takes_over else -1)
        elif kind in {program.RELEASE, program.TRANSFER_OUT} and live:
            named = draw(st.lists(st.sampled_from(sorted(live)), max_size=3, unique=True))
            operands += named
            donated += [False] * len(named)
            if kind == program.RELEASE:
                for buffer in named:
                    del live[buffer]
        label = draw(st.integers(0, len(labels) - 1))
        duration = draw(st.just(math.nan) | st.floats(0, allow_infinity=False))
        events.append([kind, draw(FINITE), duration, device, executable, launch, label])
        starts.append(len(operands))
        result_starts.append(len(buffers))

    columns: dict[str, Any] = {}
    for table, dtypes in ((events, _EVENTS), (buffers, _BUFFERS)):
        for at, (name, dtype) in enumerate(dtypes.items()):
            columns[name] = np.array([row[at] for row in table], dtype)
    texts = st.text(max_size=8)
    return ProgramTrace(
        executables=known,
        avals=shapes,
        labels=labels,
        operand_start=np.array(starts, np.int64),
        operands=np.array(operands, np.int64),
        donated=np.array(donated, np.bool_),
        result_start=np.array(result_starts, np.int64),
        results=np.arange(len(buffers), dtype=np.int64),
        name=draw(texts),
        target=draw(texts),
        versions=draw(st.dictionaries(texts, texts, max_size=2)),
        **columns,
    )


_EVENTS: dict[str, Any] = {
    "kind": np.uint8,
    "time_us": np.float64,
    "duration_us": np.float64,
    "device": np.int32,
    "executable": np.int32,
    "launch": np.int32,
    "label": np.int32,
}
_BUFFERS: dict[str, Any] = {
    "buffer_aval": np.int32,
    "buffer_bytes": np.int64,
    "buffer_device": np.int32,
    "buffer_space": np.uint8,
    "buffer_alias_of": np.int64,
}
