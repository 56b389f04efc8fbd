"""Metrics of a replay, by hand and against slow, obvious definitions."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.base import Driver, Placement, Policy, Request
from alloclab.policies.fits import BestFit, FirstFit
from alloclab.policies.ideal import Ideal
from alloclab.simulator.replay import replay_requests
from alloclab.simulator.requests import RequestTrace


def drawn() -> RequestTrace:
    """Two blocks with a hole of 1 KiB between them, then a request for 2 KiB."""
    return RequestTrace.from_arrays([1, 1, 1, 0, 1], [0, 1, 2, 1, 3], [1000, 1024, 500, 0, 2048])


def test_a_fragmented_heap_by_hand() -> None:
    result = replay_requests(drawn(), FirstFit(), limit=4096)
    assert result.placements.tolist() == [0, 1024, 2048, -1]
    assert result.in_use.tolist() == [1024, 2048, 2560, 1536, 1536]
    assert result.requested.tolist() == [1000, 2024, 2524, 1500, 1500]
    assert result.pool.tolist() == [1024, 2048, 2560, 2560, 2560]
    assert result.free_blocks(3).tolist() == [1024]
    assert result.oom is not None
    assert result.oom._asdict() == {
        "event": 4,
        "request_bytes": 2048,
        "free_bytes": 2560,
        "largest_free_bytes": 1536,
        "cause": "fragmentation",
    }
    assert result.min_limit_bytes == 4608
    assert result.peak_event == 2
    assert result.internal_waste_at_peak == 36
    assert result.memory_stats() == {
        "num_allocs": 3,
        "bytes_in_use": 1536,
        "peak_bytes_in_use": 2560,
        "largest_alloc_size": 1024,
        "bytes_limit": 4096,
        "bytes_reserved": 0,
        "peak_bytes_reserved": 0,
        "largest_free_block_bytes": 1024,
        "pool_bytes": 2560,
        "peak_pool_bytes": 2560,
    }


def test_causes() -> None:
    capacity = replay_requests(drawn(), Ideal(), limit=3000).oom
    assert capacity is not None
    assert (capacity.cause, capacity.free_bytes) == ("capacity", 1500)
    too_large = replay_requests(drawn(), Ideal(), limit=2000).oom
    assert too_large is not None
    assert too_large.cause == "capacity"  # the third request, when little is free
    alone = RequestTrace.from_arrays([1], [0], [5000])
    larger = replay_requests(alone, Ideal(), limit=4096).oom
    assert larger is not None
    assert larger.cause == "larger_than_limit"
    driver = replay_requests(alone, Ideal(), driver=Driver(capacity=100)).oom
    assert driver is not None
    assert driver.cause == "capacity"


def test_an_empty_trace() -> None:
    result = replay_requests(RequestTrace.from_arrays([], [], []), FirstFit(), limit=100)
    assert result.oom is None
    assert result.min_limit_bytes == 0
    assert result.peak_event is None
    assert result.memory_stats()["bytes_in_use"] == 0


class Halves(Policy):
    """Two fixed regions that do not touch; best fit is not the point: first fit in each."""

    def setup(self) -> None:
        self.holes: list[Placement] = []
        for _ in range(2):
            start = self.reserve(1 << 14) if self.limit else None
            if start is not None:
                self.holes.append((start, 1 << 14))

    def place(self, request: Request) -> Placement | None:
        size = (request.size + 255) // 256 * 256
        for hole in sorted(self.holes):
            if hole[1] >= size:
                self.holes.remove(hole)
                if hole[1] > size:
                    self.holes.append((hole[0] + size, hole[1] - size))
                return hole[0], size
        return None

    def release(self, address: int, size: int) -> None:
        self.holes.append((address, size))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=40),
    st.sampled_from([FirstFit, BestFit, Ideal, Halves]),
)
@settings(deadline=None)
def test_timelines_and_free_blocks_equal_their_definitions(
    steps: list[tuple[bool, int]], policy: type[Policy]
) -> None:
    live: list[int] = []
    rows: list[tuple[int, int, int]] = []
    for number, (allocates, size) in enumerate(steps):
        if allocates or not live:
            live.append(number)
            rows.append((1, number, size))
        else:
            rows.append((0, live.pop(size % len(live)), 0))
    op, ids, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    trace = RequestTrace.from_arrays(np.array(op, bool), ids, sizes)
    limit = 1 << 15
    result = replay_requests(trace, policy(), limit=limit, search_limit=False)
    held: dict[int, tuple[int, int]] = {}
    for event, slot in enumerate(trace.slot.tolist()):
        if trace.op[event]:
            if result.placements[slot] >= 0:
                held[slot] = (int(result.placements[slot]), int(result.outcome.taken[slot]))
        else:
            held.pop(slot, None)
        assert result.in_use[event] == sum(size for _, size in held.values())
        assert result.live_at(event).tolist() == sorted(held)
        pool = np.zeros(1 << 16, bool)
        edges = set()
        for region in result.outcome.regions:
            if region.taken_at <= event and not 0 <= region.given_back <= event:
                pool[region.start % (1 << 16) : region.start % (1 << 16) + region.size] = True
                if not region.joined:
                    edges.add(region.start)
        assert result.pool[event] == sum(
            region.size
            for region in result.outcome.regions
            if region.taken_at <= event and not 0 <= region.given_back <= event
        )
        if policy is Ideal:  # its addresses do not stay within the picture
            assert result.largest_free(event) == 0
            continue
        for start, size in held.values():
            pool[start : start + size] = False
        blocks, run = [], 0
        for address in range(0, 1 << 16, 1):
            if run and (not pool[address] or address in edges):
                blocks.append(run)
                run = 0
            run += bool(pool[address])
        assert result.free_blocks(event).tolist() == blocks
