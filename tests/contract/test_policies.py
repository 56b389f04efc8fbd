"""What every policy must keep, whatever it decides."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.base import Outcome, Policy
from alloclab.policies.registry import known_policies
from alloclab.simulator.replay import replay_requests
from alloclab.simulator.requests import RequestTrace

LIMIT = 1 << 20
POLICIES = [pytest.param(each, id=name) for name, each in sorted(known_policies().items())]

# Each step allocates that many bytes, or frees the oldest (-1), newest (-2) or middle (-3).
steps = st.lists(st.integers(-3, 3) | st.integers(0, LIMIT // 3), max_size=60)


def trace_of(steps: Sequence[int]) -> RequestTrace:
    rows: list[tuple[int, int, int]] = []
    live: list[int] = []
    for number, step in enumerate(steps):
        if step >= 0:
            live.append(number)
            rows.append((1, number, step))
        elif live:
            rows.append((0, live.pop({-1: 0, -2: -1, -3: len(live) // 2}[step]), 0))
    op, ids, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    return RequestTrace.from_arrays(np.array(op, bool), ids, sizes)


def outcome_of(policy: type[Policy], trace: RequestTrace, limit: int = LIMIT) -> Outcome:
    return replay_requests(trace, policy(), limit=limit, search_limit=False).outcome


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps)
@settings(deadline=None, max_examples=60)
def test_accounting_follows_from_the_placements(policy: type[Policy], steps: list[int]) -> None:
    trace = trace_of(steps)
    result = replay_requests(trace, policy(), limit=LIMIT, search_limit=False)
    live: dict[int, tuple[int, int]] = {}
    peak = total = count = 0
    for op, slot, size in zip(trace.op, trace.slot.tolist(), trace.size.tolist(), strict=True):
        if op:
            at, taken = int(result.placements[slot]), int(result.outcome.taken[slot])
            assert (at < 0) == (taken == 0)
            if at < 0:
                continue
            assert taken >= size > 0
            assert at % 64 == 0
            assert all(at + taken <= a or b <= at for a, b in live.values())
            live[slot] = (at, at + taken)
            total, count = total + taken, count + 1
            peak = max(peak, total)
        elif slot in live:
            a, b = live.pop(slot)
            total -= b - a
    stats = result.stats
    assert (stats.num_allocs, stats.bytes_in_use, stats.peak_bytes_in_use) == (count, total, peak)
    assert stats.largest_alloc_size == result.outcome.taken.max(initial=0)
    assert stats.peak_pool_bytes <= LIMIT
    assert (result.in_use <= result.pool).all()
    assert (result.requested <= result.in_use).all()


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps)
@settings(deadline=None, max_examples=20)
def test_the_same_twice(policy: type[Policy], steps: list[int]) -> None:
    trace = trace_of(steps)
    one, two = outcome_of(policy, trace), outcome_of(policy, trace)
    assert one.offsets.tolist() == two.offsets.tolist()
    assert one.stats == two.stats


@pytest.mark.parametrize("policy", POLICIES)
def test_refuses_what_cannot_fit_and_goes_on(policy: type[Policy]) -> None:
    trace = RequestTrace.from_arrays([1, 1, 1], [0, 1, 2], [LIMIT + 1, 0, 4096])
    assert (outcome_of(policy, trace).offsets >= 0).tolist() == [False, False, True]


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps)
@settings(deadline=None, max_examples=30)
def test_the_smallest_limit_fits_and_less_does_not(policy: type[Policy], steps: list[int]) -> None:
    trace = trace_of(steps)
    smallest = replay_requests(trace, policy(), limit=LIMIT).min_limit_bytes
    assert smallest is not None
    assert smallest >= trace.lower_bound_bytes
    if smallest:
        assert replay_requests(trace, policy(), limit=smallest, search_limit=False).oom is None
        less = replay_requests(trace, policy(), limit=smallest - 256, search_limit=False)
        assert smallest <= 256 or less.oom is not None
