"""The request traces of the benchmarks: seeded, made without a loop over events."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alloclab.policies.units import GIB, MIB
from alloclab.simulator.requests import RequestTrace

Int64s = npt.NDArray[np.int64]
Rng = np.random.Generator

MB = 1000 * 1000


@dataclass(frozen=True)
class Load:
    """A kind of trace: what it is, and the pool (bytes) that it is replayed in."""

    summary: str
    limit: int
    low: int = 256
    high: int = 0
    live: int = 0


#: Churn: log-uniform sizes from low to high bytes, memoryless lifetimes, `live` allocations live.
CHURN = {
    "A": Load("80 GiB, 256 B-512 MB, 2,000 live", 80 * GIB, 256, 512 * MB, 2_000),
    "B": Load("10 GiB, 256 B-64 MB, 2,000 live", 10 * GIB, 256, 64 * MB, 2_000),
    "C": Load("40 GiB, 1-2 MB, 20,000 live", 40 * GIB, MB, 2 * MB, 20_000),
    "D": Load("24 GiB, 256 B-8 MB, 20,000 live", 24 * GIB, 256, 8 * MB, 20_000),
}
#: Many holes: chunks freed between small live ones, then churn of a few of them.
HOLES = {
    "F500": Load("500 holes of 1-2 MiB", 4 * GIB, MIB, 2 * MIB, 500),
    "F5000": Load("5,000 holes of 1-2 MiB", 10 * GIB, MIB, 2 * MIB, 5_000),
    "F15000": Load("15,000 holes of 1-2 MiB", 26 * GIB, MIB, 2 * MIB, 15_000),
    "S15000": Load("15,000 holes of 1 MiB", 17 * GIB, MIB, MIB, 15_000),
}
STEPS = {"R": Load("a training step, repeated", 16 * GIB)}
LOADS = CHURN | STEPS | HOLES


def make(name: str, events: int, seed: int = 1) -> RequestTrace:
    """The trace of that name with this many events.

    >>> [len(make(name, 40_000)) for name in ("B", "R", "F500")]
    [40000, 40000, 40000]
    """
    rng = np.random.default_rng(seed)
    load = LOADS[name]
    if name in STEPS:
        rows = _steps(rng, events)
    elif name in HOLES:
        rows = _holes(rng, events, load)
    else:
        rows = _churn(rng, events, load.live, _sizes(rng, load, events))
    is_alloc, ids, sizes = (column[:events] for column in rows)
    return RequestTrace.from_arrays(is_alloc, ids, sizes, name=name)


def _sizes(rng: Rng, load: Load, count: int) -> Int64s:
    return np.exp(rng.uniform(np.log(load.low), np.log(load.high), count)).astype(np.int64)


def _churn(rng: Rng, events: int, live: int, sizes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Allocations one by one, each with an exponential lifetime of ``live`` others on average."""
    count = events // 2 + live
    born = np.maximum(np.arange(count) - live, 0).astype(np.float64)  # the first at once
    died = born + rng.exponential(live, count)
    order = np.argsort(np.concatenate([born, died]), kind="stable")
    ids = order % count
    is_alloc = (order < count).astype(np.int64)
    return is_alloc, ids, np.where(is_alloc > 0, sizes[ids % len(sizes)], 0)


def _holes(rng: Rng, events: int, load: Load) -> tuple[Int64s, Int64s, Int64s]:
    """``live`` chunks, each with 256 live bytes above it; all are freed; then 50 live of churn."""
    count = load.live
    chunks = np.arange(count) * 2
    sizes = _sizes(rng, load, 2 * count)
    sizes[1::2] = 256
    setup = np.ones(3 * count, np.int64)
    setup[2 * count :] = 0
    ids = np.concatenate([np.arange(2 * count), rng.permutation(chunks)])
    more = _churn(rng, events, 50, _sizes(rng, load, events))
    return (
        np.concatenate([setup, more[0]]),
        np.concatenate([ids, more[1] + 2 * count]),
        np.concatenate([sizes, np.zeros(count, np.int64), more[2]]),
    )


def _steps(rng: Rng, events: int, layers: int = 100) -> tuple[Int64s, Int64s, Int64s]:
    """Forward: an activation that stays and a temp, per layer; backward: a gradient and a temp."""
    activations = rng.integers(1, 64, layers) * MIB + rng.integers(0, 4096, layers)
    temps = rng.integers(1, 1 << 25, (2, layers))
    gradients = rng.integers(1 << 10, 1 << 24, layers)
    rows: list[tuple[int, int, int]] = []
    for layer in range(layers):
        activation, temp = 4 * layer, 4 * layer + 1
        rows.append((1, activation, int(activations[layer])))
        rows += [(1, temp, int(temps[0, layer])), (0, temp, 0)]
    for layer in reversed(range(layers)):
        gradient, temp = 4 * layer + 2, 4 * layer + 3
        rows.append((1, gradient, int(gradients[layer])))
        rows += [(1, temp, int(temps[1, layer])), (0, temp, 0), (0, 4 * layer, 0)]
    rows += [(0, 4 * layer + 2, 0) for layer in range(layers)]
    step = np.array(rows, np.int64)
    repeats = -(-events // len(step))
    is_alloc, ids, sizes = np.tile(step, (repeats, 1)).T
    return is_alloc, ids + np.repeat(np.arange(repeats), len(step)) * 4 * layers, sizes
