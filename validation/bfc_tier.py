"""Does the simulated BFC do what the real one does? Random pools and traces through both.

    python -m alloclab.validation.bfc_tier --configurations 10000

prints a table: for every real allocator and flavour, how many values were compared and how many
differ. One configuration takes about 10 ms.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from alloclab.policies.base import Driver, Outcome
from alloclab.policies.bfc import Bfc
from alloclab.policies.bfc_versions import MIN_ALLOCATION_SIZE
from alloclab.policies.bfc_views import chunk_map, largest_free_block
from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, KIB, MIB, align_down, align_up
from alloclab.simulator.requests import ALLOC, FREE, SPACES, RequestTrace
from alloclab.validation.oracle import REFUSED, STOPPED, RealBfc
from alloclab.validation.oracle_fetch import OracleUnavailable

Flavour = Literal["classic", "growth", "spatial"]


class Library(NamedTuple):
    """A real allocator: the jax version whose rules it has, its flavours, where it is from."""

    jax: str
    flavours: tuple[Flavour, ...]
    source: str
    aligns: bool = True


#: TensorFlow 2.21 is from before alignment was honoured; no ordinary buffer asks for more than 256.
LIBRARIES = {
    "tf-2.21.0": Library("0.9.2", ("classic", "growth"), "tensorflow-cpu 2.21.0", aligns=False),
    "plugin-0.10.2": Library("0.10.2", ("classic", "growth"), "jax-cuda12-pjrt 0.10.2"),
    "plugin-0.11.2": Library("0.11.2", ("classic", "growth", "spatial"), "jax-cuda12-pjrt 0.11.2"),
    "plugin-0.12.0.1": Library(
        "0.12.0.1", ("classic", "growth", "spatial"), "jax-cuda12-pjrt 0.12.0.1"
    ),
}


@dataclass(frozen=True)
class Configuration:
    """A pool: bytes it may take, flavour, and the memory below it."""

    limit: int
    flavour: Flavour
    fragmentation_fraction: float = 0.0
    driver: Driver = field(default_factory=Driver)

    def policy(self, jax: str) -> Bfc:
        """The simulated allocator by the rules of a jax version."""
        return Bfc(
            flavour="spatial" if self.flavour == "spatial" else "classic",
            growth=self.flavour == "growth",
            jax=jax,
            fragmentation_fraction=self.fragmentation_fraction,
        )

    def real(self, library: str) -> RealBfc:
        """The real allocator."""
        return RealBfc(
            library,
            self.limit,
            growth=self.flavour == "growth",
            spatial=self.flavour == "spatial",
            driver=self.driver,
            fragmentation_fraction=self.fragmentation_fraction,
        )


class Disagreement(NamedTuple):
    """A value that the policy and the real allocator do not share."""

    quantity: str
    where: str
    predicted: Any
    actual: Any


@dataclass(frozen=True)
class Watched(Driver):
    """A driver that notes what it was asked: bytes, and whether it gave them."""

    calls: list[tuple[int, bool]] = field(default_factory=list)

    def grants(self, size: int, in_use: int) -> bool:
        granted = super().grants(size, in_use)
        self.calls.append((size, granted))
        return granted


@dataclass(frozen=True)
class Comparison:
    """What was compared on one configuration, and what differs."""

    requests: int
    refused: int
    peak_bytes: int
    driver_calls: int
    disagreements: tuple[Disagreement, ...]


# --- one comparison --------------------------------------------------------------------------


def compare(library: str, config: Configuration, trace: RequestTrace) -> list[Disagreement]:
    """Replay a trace under the simulated and the real allocator: all that differs.

    Raises:
        OracleUnavailable: the library is not here.
        InputError: the trace asks for what this library ignores.
    """
    return list(compare_fully(library, config, trace).disagreements)


def compare_fully(library: str, config: Configuration, trace: RequestTrace) -> Comparison:
    """As `compare`, with counts.

    Where the real code would not come back from a request (see `RealBfc`), the simulated one must
    refuse it, and the comparison ends before that request.
    """
    known = LIBRARIES[library]
    if not known.aligns and (trace.alignment > 256).any():
        raise InputError(f"oracle {library}: ignores alignments above 256; the trace has them")
    driver = Watched(**vars(config.driver))
    policy = config.policy(known.jax).start(config.limit, driver)
    outcome = policy.run(trace.events())
    fatal = _extends_backed_off(config, trace, outcome)
    if known.jax.startswith("0.11") and fatal is not None:
        return compare_fully(library, config, _head(trace, fatal))
    with config.real(library) as pool:
        replayed = pool.replay(
            trace.op == ALLOC,
            trace.id,
            trace.size,
            alignments=trace.alignment,
            ends=_ends(policy, trace),
        )
        stopped = np.flatnonzero(replayed.offsets == STOPPED)
        if stopped.size:
            event = int(stopped[0])
            if outcome.offsets[trace.slot[event]] < 0:
                return compare_fully(library, config, _head(trace, event))
            pairs = [("offset", f"event {event}", "served", "does not return")]
        else:
            pairs = list(_differences(policy, outcome, trace, pool, replayed.offsets, driver))
    pairs += _compiled_differs(config, known.jax, trace, outcome)
    return Comparison(
        trace.num_allocs,
        int((outcome.offsets < 0).sum()),
        outcome.stats.peak_bytes_in_use,
        outcome.stats.driver_calls,
        tuple(Disagreement(*each) for each in pairs),
    )


def _differences(
    policy: Bfc,
    outcome: Outcome,
    trace: RequestTrace,
    pool: RealBfc,
    offsets: np.ndarray[Any, Any],
    driver: Watched,
) -> Iterator[tuple[str, str, Any, Any]]:
    actual = offsets[trace.alloc_events]
    for slot in np.flatnonzero(outcome.offsets != np.where(actual == REFUSED, -1, actual)):
        event = f"event {trace.alloc_events[slot]}"
        yield "offset", event, int(outcome.offsets[slot]), int(actual[slot])
    limit = policy.limit
    free = largest_free_block(policy)
    stats = pool.stats()
    for key, predicted in policy.memory_stats(outcome.stats, limit, free).items():
        if predicted != stats[key]:
            yield "memory_stats", key, predicted, stats[key]
    real_chunks = [tuple(each[1:]) for each in pool.chunks()]
    for mine, real in zip_longest(map(tuple, chunk_map(policy)), real_chunks):
        if mine != real:
            yield "chunk map", "final state", mine, real
    calls = [(each.bytes, each.kind == "alloc") for each in pool.driver_calls()]
    if driver.calls != calls:
        yield "driver calls", "all", driver.calls, calls
    starts = [each.offset for each in pool.driver_calls() if each.kind == "alloc"]
    if [each.start for each in outcome.regions] != starts:
        yield "driver calls", "addresses", [each.start for each in outcome.regions], starts
    if policy.next_region != pool.next_region_bytes():
        yield "next region bytes", "final state", policy.next_region, pool.next_region_bytes()
    if free != pool.largest_free():
        yield "largest free block", "final state", free, pool.largest_free()


def _compiled_differs(
    config: Configuration, jax: str, trace: RequestTrace, outcome: Outcome
) -> list[tuple[str, str, Any, Any]]:
    """Where the compiled replay is not the readable policy; nothing without Numba."""
    try:
        from alloclab.policies import bfc_kernel
    except ImportError:
        return []
    policy = config.policy(jax).start(config.limit, config.driver)
    compiled = bfc_kernel.replay(policy, trace.columns())
    if compiled is None:
        return []
    found: list[tuple[str, str, Any, Any]] = []
    for name in ("offsets", "taken"):
        one, two = getattr(compiled, name), getattr(outcome, name)
        found += [
            ("compiled replay", f"{name}[{slot}]", int(one[slot]), int(two[slot]))
            for slot in np.flatnonzero(one != two)
        ]
    for name in ("stats", "regions"):
        if getattr(compiled, name) != getattr(outcome, name):
            found.append(("compiled replay", name, getattr(compiled, name), getattr(outcome, name)))
    return found


def _ends(policy: Bfc, trace: RequestTrace) -> np.ndarray[Any, Any]:
    """Per event, 1 for the upper end."""
    collective = trace.space == SPACES.index("collective")
    return np.where(collective, policy.collective == "upper", policy.ordinary == "upper")


def _extends_backed_off(config: Configuration, trace: RequestTrace, outcome: Outcome) -> int | None:
    """The first event at which jax 0.11 would extend a spatial pool that the driver gave in part.

    It ends its process then or later; we refuse, as 0.12 does.
    """
    if config.flavour != "spatial" or not outcome.regions:
        return None
    events = trace.alloc_events
    left = align_down(config.limit - outcome.regions[0].size, MIN_ALLOCATION_SIZE)
    asks = (outcome.offsets < 0) & (trace.size[events] > 0) & (trace.size[events] <= left)
    found = events[asks & (events > outcome.regions[0].taken_at)]
    return int(found[0]) if found.size else None


def _head(trace: RequestTrace, events: int) -> RequestTrace:
    """The first events of a trace."""
    columns = ("op", "id", "size", "alignment", "space")
    return RequestTrace.from_columns(**{name: getattr(trace, name)[:events] for name in columns})


# --- random configurations -------------------------------------------------------------------

LIMITS = (3000, 64 * KIB, MIB, 3 * MIB, 16 * MIB, 100 * MIB, GIB)


def random_case(library: str, flavour: Flavour, seed: str) -> tuple[Configuration, RequestTrace]:
    """A random pool and trace; the same for the same seed.

    Pools are near full, drivers refuse, and sizes lie around every boundary: 256, powers of two,
    1, 1/2, 2 and 3 times a size before, shares of the pool, 64 and 128 MiB.
    """
    dice = random.Random(f"{library} {flavour} {seed}")
    limit = dice.choice(LIMITS) + dice.randrange(1000)
    capacity = dice.choice((None, None, limit // 2, limit - 1))
    largest = dice.choice((None, None, None, limit // 3, limit * 9 // 10, 8 * KIB))
    fraction = dice.choice((0.0, 0.0, 0.0, 0.05, 0.3))
    driver = Driver(capacity, largest, gap=dice.choice((0, 0, 256, 5000, 2 * MIB)))
    config = Configuration(limit, flavour, fraction, driver)
    may_align = LIBRARIES[library].aligns and dice.random() < 0.4
    collectives = dice.choice((0.0, 0.1, 0.5)) if flavour == "spatial" else 0.0
    allocs = dice.choice((0.5, 0.55, 0.7))
    rows: list[tuple[int, int, int, int, int]] = []
    live: list[int] = []
    sizes = [256]
    for event in range(dice.randrange(5, 400)):
        if live and dice.random() >= allocs:
            rows.append((FREE, live.pop(dice.randrange(len(live))), 0, 64, 0))
            continue
        live.append(event)
        sizes.append(_size(dice, limit, sizes[-20:]))
        alignment = 1 << dice.randrange(6, 22) if may_align and dice.random() < 0.3 else 64
        space = SPACES.index("collective") if dice.random() < collectives else 0
        rows.append((ALLOC, event, sizes[-1], alignment, space))
    op, ids, size, alignments, spaces = zip(*rows, strict=True)
    trace = RequestTrace.from_columns(op, ids, size, alignment=alignments, space=spaces)
    return config, trace


def _size(dice: random.Random, limit: int, before: Sequence[int]) -> int:
    kind = dice.randrange(10)
    if kind == 0:
        size = int(limit * dice.choice((1.0, 0.5, 0.25, 0.9, 0.34)))
    elif kind == 1:
        size = 1 << dice.randrange(limit.bit_length())
    elif kind == 2:
        size = 256 * dice.randrange(4)
    elif kind == 3:
        size = dice.randrange(1, 6) * 64 * MIB
    elif kind in (4, 5):
        size = int(dice.choice(before) * dice.choice((1, 1, 0.5, 2, 3)))
    else:
        size = int(math.exp(dice.uniform(0, math.log(limit))))
    if size > limit // 3 and dice.random() < 0.6:
        size = dice.randrange(1, max(2, limit // 40))
    return max(0, size + dice.choice((0, 0, -1, 1, -256, 256)))


# --- the tier --------------------------------------------------------------------------------


def run_tier(
    configurations: int = 300,
    libraries: Sequence[str] = tuple(LIBRARIES),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    traces: Sequence[RequestTrace] = (),
) -> list[dict[str, Any]]:
    """Random pools, and the given traces, through every real allocator in all its flavours.

    ``configurations`` is their number per allocator and flavour. Of each there is one row per
    quantity: the totals predicted and seen, and as ``error`` how many single values differ; every
    disagreement is a row of its own. ``progress`` is told how many are done, of how many.

    Raises:
        OracleUnavailable: a library is not here.
    """
    jobs = [(name, flavour) for name in libraries for flavour in LIBRARIES[name].flavours]
    total = len(jobs) * (configurations + len(traces))
    rows: list[dict[str, Any]] = []
    done = 0
    for name, flavour in jobs:
        results = []
        for scenario, config, trace in _cases(name, flavour, configurations, seed, traces):
            results.append((scenario, compare_fully(name, config, trace)))
            done += 1
            if progress:
                progress(done, total)
        rows += _rows(name, flavour, results)
    return rows


def _cases(
    name: str, flavour: Flavour, count: int, seed: int, traces: Sequence[RequestTrace]
) -> Iterator[tuple[str, Configuration, RequestTrace]]:
    for number in range(count):
        yield f"random {seed}.{number}", *random_case(name, flavour, f"{seed}.{number}")
    for trace in traces:  # in a pool that is just too small, so that holes matter
        limit = align_up(trace.lower_bound_bytes, MIB)
        yield trace.name, Configuration(limit, flavour), trace


def _rows(
    name: str, flavour: Flavour, results: Sequence[tuple[str, Comparison]]
) -> list[dict[str, Any]]:
    """The totals of one allocator and flavour, then what differs."""
    wrong = [(scenario, each) for scenario, one in results for each in one.disagreements]
    counts = {
        "configurations": len(results),
        "requests": sum(one.requests for _, one in results),
        "refused requests": sum(one.refused for _, one in results),
        "driver calls": sum(one.driver_calls for _, one in results),
    }
    differ = {
        "configurations": sum(bool(one.disagreements) for _, one in results),
        "requests": sum(each.quantity == "offset" for _, each in wrong),
        "refused requests": sum(
            each.quantity == "offset" and -1 in (each.predicted, each.actual) for _, each in wrong
        ),
        "driver calls": sum(each.quantity == "driver calls" for _, each in wrong),
    }
    shared = {"tier": "bfc", "source": LIBRARIES[name].source, "version": LIBRARIES[name].jax}
    totals = [
        {
            **shared,
            "scenario": f"{flavour}, {len(results)} pools",
            "quantity": f"{quantity} that agree",
            "predicted": count,
            "actual": count - differ[quantity],
            "error": differ[quantity],
        }
        for quantity, count in counts.items()
    ]
    return totals + [
        {
            **shared,
            "scenario": f"{flavour}, {scenario}",
            "quantity": f"{each.quantity}: {each.where}",
            "predicted": each.predicted,
            "actual": each.actual,
            "error": 1,
        }
        for scenario, each in wrong
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: a table on stdout; 1 if something differs, 2 if a library is not here."""
    parser = argparse.ArgumentParser(prog="python -m alloclab.validation.bfc_tier")
    parser.add_argument("--configurations", type=int, default=300, help="in all, over all jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="default: all")
    given = parser.parse_args(arguments)
    libraries = given.library or list(LIBRARIES)
    jobs = sum(len(LIBRARIES[name].flavours) for name in libraries)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}", end="", file=sys.stderr)

    try:
        rows = run_tier(-(-given.configurations // jobs), libraries, given.seed, progress)
    except OracleUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        print(
            f"{row['source']:26} {row['scenario']:22} {row['quantity']:28} "
            f"{row['predicted']!s:>12} {row['actual']!s:>12} {row['error']:>6}"
        )
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
