"""The compiled replay is the readable policy, on any stream."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.base import Driver, Outcome
from alloclab.policies.bfc import COMPILED_FROM, Bfc
from alloclab.policies.units import GIB, KIB, MIB
from alloclab.simulator.requests import RequestTrace

kernel: Any = pytest.importorskip("alloclab.policies.bfc_kernel")

POLICIES = [
    Bfc(flavour="classic"),
    Bfc(flavour="classic", fragmentation_fraction=0.1),
    Bfc(growth=True),
    Bfc(growth=True, jax="0.10.2"),
    Bfc(jax="0.11.2"),
    Bfc(),
]
DRIVERS = [Driver(), Driver(gap=4096), Driver(capacity=200 * KIB, gap=256), Driver(largest=9000)]


def check(policy: Bfc, trace: RequestTrace, limit: int, driver: Driver) -> Outcome:
    expected = policy.start(limit, driver).run(trace.events())
    compiled: Outcome | None = kernel.replay(policy.start(limit, driver), trace.columns())
    assert compiled is not None
    assert compiled.offsets.tolist() == expected.offsets.tolist()
    assert compiled.taken.tolist() == expected.taken.tolist()
    assert compiled.stats == expected.stats
    assert compiled.regions == expected.regions
    return compiled


def random_trace(events: int, low: int, high: int, allocs: float, seed: int) -> RequestTrace:
    rng = np.random.default_rng(seed)
    live: list[int] = []
    rows: list[tuple[int, int, int, int, int]] = []
    sizes = np.exp(rng.uniform(np.log(low), np.log(high + 1), events)).astype(int).tolist()
    for event, (draw, pick) in enumerate(rng.random((events, 2)).tolist()):
        if live and draw >= allocs:
            rows.append((0, live.pop(int(pick * len(live))), 0, 64, 0))
        elif draw < 0.01:
            rows.append((2, 0, 0, 64, 0))
        else:
            live.append(event)
            aligned = 1 << int(pick * 100) if pick < 0.16 else 64
            rows.append((1, event, sizes[event], aligned, int(draw < 0.1)))
    op, ids, size, alignment, space = zip(*rows, strict=True)
    return RequestTrace.from_columns(op, ids, size, alignment=alignment, space=space)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_random_streams(policy: Bfc, driver: Driver) -> None:
    for seed in range(8):
        trace = random_trace(2000, 1, 20 * KIB, 0.65, seed)
        outcome = check(policy, trace, 300 * KIB + seed * 100, driver)
        assert (outcome.offsets < 0).any()
        assert (outcome.offsets >= 0).any()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_trees_of_many_equal_and_nearly_equal_holes(policy: Bfc) -> None:
    count, rng = 600, np.random.default_rng(3)
    for spread in (1, 2, 300):  # one size; two; one class of sizes
        sizes = (4096 + rng.integers(0, spread, 2 * count)) * 256
        sizes[1::2] = 256
        order = rng.permutation(count) * 2
        more = (4096 + rng.integers(0, spread, count)) * 256
        op = [1] * (2 * count) + [0] * count + [1] * count
        ids = np.concatenate([np.arange(2 * count), order, np.arange(count) + 2 * count])
        trace = RequestTrace.from_columns(
            op, ids, np.concatenate([sizes, np.zeros(count, int), more])
        )
        check(policy, trace, 2 * GIB, Driver())


steps = st.lists(
    st.tuples(
        st.integers(-3, 12),
        st.sampled_from([0, 1, 255, 256, 257, 511, 512, 513, 4096, 8 * KIB, 64 * KIB, MIB]),
        st.sampled_from([64, 256, 512, 4096, 64 * KIB]),
        st.booleans(),
    ),
    max_size=60,
)


@given(
    steps=steps,
    policy=st.sampled_from(POLICIES),
    driver=st.sampled_from(DRIVERS),
    limit=st.sampled_from([256, 4095, 64 * KIB, MIB + 300, 3 * MIB]),
)
@settings(deadline=None, max_examples=300)
def test_any_stream(
    steps: list[tuple[int, int, int, bool]], policy: Bfc, driver: Driver, limit: int
) -> None:
    rows: list[tuple[int, int, int, int, int]] = []
    live: list[int] = []
    for number, (kind, size, alignment, collective) in enumerate(steps):
        if kind >= 0:
            live.append(number)
            rows.append((1, number, size * max(kind, 1), alignment, int(collective)))
        elif live:
            rows.append((0, live.pop({-1: 0, -2: -1, -3: len(live) // 2}[kind]), 0, 64, 0))
    op, ids, sizes, alignments, spaces = zip(*rows, strict=True) if rows else ((),) * 5
    trace = RequestTrace.from_columns(
        np.array(op, np.uint8), ids, sizes, alignment=alignments, space=spaces
    )
    check(policy, trace, limit, driver)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_empty_zero_and_huge_requests(policy: Bfc) -> None:
    check(policy, RequestTrace.from_columns([], [], []), MIB, Driver())
    sizes = [0, (1 << 60) - 1, 512 * GIB, MIB + 1, 1]
    check(policy, RequestTrace.from_columns([1] * 5, range(5), sizes), MIB, Driver())


def test_what_its_integers_cannot_hold_is_left_to_the_readable_policy() -> None:
    columns = RequestTrace.from_columns([1, 1], [0, 1], [2 * MIB, 4 * MIB]).columns()
    just = Bfc(growth=True).start(512 * GIB - 256)
    assert kernel.replay(just, columns) is not None
    assert kernel.replay(Bfc(growth=True).start(512 * GIB), columns) is None
    far = Bfc(growth=True).start(GIB, Driver(gap=512 * GIB))
    assert kernel.replay(far, columns) is None

    class Moody(Driver):
        def grants(self, size: int, in_use: int) -> bool:
            return False

    assert kernel.replay(Bfc().start(GIB, Moody()), columns) is None


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_as_many_regions_as_a_pool_can_have(policy: Bfc) -> None:
    trace = RequestTrace.from_columns([1] * 100, range(100), [2560] * 100)
    outcome = check(policy, trace, GIB, Driver(largest=2560))
    assert len(outcome.regions) <= 56 < kernel.MAX_REGIONS


def test_a_wrong_kernel_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel._pool

    def forgets_the_split_rule(*args: Any) -> Any:
        pool = right(*args)
        pool[kernel.MAX_WASTE] = 1
        return pool

    monkeypatch.setattr(kernel, "_pool", forgets_the_split_rule)
    with pytest.raises(AssertionError):
        check(POLICIES[0], random_trace(2000, 1, 20 * KIB, 0.65, 0), 300 * KIB, Driver())


def test_short_streams_do_not_wait_for_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = RequestTrace.from_columns([1], [0], [1]).columns()
    monkeypatch.setattr(Bfc, "events_replayed", 0)
    policy = Bfc()
    assert policy.start(MIB).replay_columns(columns) is None
    monkeypatch.setattr(Bfc, "events_replayed", COMPILED_FROM)
    assert policy.start(MIB).replay_columns(columns) is not None
    monkeypatch.setitem(sys.modules, "alloclab.policies.bfc_kernel", None)
    monkeypatch.delattr("alloclab.policies.bfc_kernel", raising=False)
    assert policy.start(MIB).replay_columns(columns) is None


def test_the_first_call_says_that_it_compiles_and_later_ones_do_not(tmp_path: Any) -> None:
    code = (
        "from alloclab.policies.bfc import Bfc; from alloclab.policies import bfc_kernel;"
        "from alloclab.simulator.requests import RequestTrace;"
        "columns = RequestTrace.from_columns([1], [0], [1]).columns();"
        "print(bfc_kernel.replay(Bfc().start(1024), columns).offsets)"
    )
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"NUMBA_CACHE_DIR": str(tmp_path)},
        )
        assert done.stdout == "[768]\n"
        said.append(done.stderr)
    assert said == ["alloclab: compiling the BFC replay, once for this machine ...\n", ""]
