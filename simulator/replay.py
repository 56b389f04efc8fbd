"""Replay: feed a request trace to a policy and measure what happens to memory."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from alloclab.policies.base import Driver, Outcome, Policy, Stats
from alloclab.policies.errors import InputError
from alloclab.policies.units import align_up
from alloclab.simulator.requests import FREE, RequestTrace

Int64s = npt.NDArray[np.int64]
Cause = Literal["capacity", "fragmentation", "larger_than_limit"]

#: `min_limit_bytes` is searched to this many bytes, BFC's smallest chunk (kMinAllocationSize).
LIMIT_STEP = 256
#: Below this many events times candidates, the search tries all candidates.
TRY_ALL = 200_000
#: Up to this many events are kept as objects between the replays of a search.
KEEP_EVENTS = 200_000


class OutOfMemory(NamedTuple):
    """The first request that was refused, and the memory at that moment (bytes).

    ``free_bytes`` is all that is not in use below the limit, ``largest_free_bytes`` the largest
    piece of it in one block. With cause ``fragmentation``, compaction would have helped.
    """

    event: int
    request_bytes: int
    free_bytes: int
    largest_free_bytes: int
    cause: Cause


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What a policy did with a trace; sizes in bytes.

    ``placements`` holds the address of each allocation, -1 where it was refused (or of size 0).
    The timelines have one row per event of the trace and show the state after it.
    """

    trace: RequestTrace
    rules: Policy
    device: str | None
    limit: int | None
    outcome: Outcome
    min_limit_bytes: int | None = None

    @property
    def policy(self) -> str:
        """The policy as it is written on the command line."""
        return str(self.rules)

    @property
    def placements(self) -> Int64s:
        """Address of each allocation in bytes, -1 where refused."""
        return self.outcome.offsets

    @property
    def stats(self) -> Stats:
        """The counts at the end."""
        return self.outcome.stats

    @cached_property
    def in_use(self) -> Int64s:
        """Bytes in use after each event, the rounding up of requests included."""
        return self._timeline(self.outcome.taken)

    @cached_property
    def requested(self) -> Int64s:
        """Bytes that the program asked for and holds after each event."""
        sizes = self.trace.size[self.trace.alloc_events]
        return self._timeline(np.where(self.outcome.taken > 0, sizes, 0))

    @cached_property
    def pool(self) -> Int64s:
        """Bytes that the allocator holds from the driver after each event."""
        change = np.zeros(len(self.trace) + 1, np.int64)
        for region in self.outcome.regions:
            change[region.taken_at] += region.size
            if region.given_back >= 0:
                change[region.given_back] -= region.size
        return np.cumsum(change[: len(self.trace)])

    def _timeline(self, sizes: Int64s) -> Int64s:
        trace = self.trace
        change = np.zeros(len(trace), np.int64)
        change[trace.alloc_events] = sizes
        frees = np.flatnonzero(trace.op == FREE)
        change[frees] = -sizes[trace.slot[frees]]
        return np.cumsum(change)

    @cached_property
    def peak_event(self) -> int | None:
        """The first event at which most bytes are in use; None for an empty trace."""
        return int(self.in_use.argmax()) if len(self.trace) else None

    def free_blocks(self, event: int) -> Int64s:
        """Sizes (bytes) of the free blocks of the pool after an event, in address order."""
        starts, sizes = self._pool_at(event)
        alive = self.live_at(event)
        used = self.outcome.offsets[alive]
        # A free block starts where its piece does or an allocation ends, and ends where an
        # allocation starts or its piece ends: in address order the two lists pair up.
        first = np.sort(np.concatenate([starts, used + self.outcome.taken[alive]]))
        last = np.sort(np.concatenate([used, starts + sizes]))
        blocks: Int64s = last - first
        return blocks[blocks > 0]

    def live_at(self, event: int) -> Int64s:
        """Ordinals of the allocations that have memory after an event."""
        trace = self.trace
        alive = (trace.alloc_events <= event) & (trace.free_events > event)
        return np.flatnonzero(alive & (self.outcome.taken > 0))

    def _pool_at(self, event: int) -> tuple[Int64s, Int64s]:
        """Start and size of the pool's pieces after an event; joined regions are one piece."""
        pieces: list[list[int]] = []
        for region in self.outcome.regions:
            if region.taken_at > event or 0 <= region.given_back <= event:
                continue
            if region.joined and pieces:
                pieces[-1][1] += region.size
            else:
                pieces.append([region.start, region.size])
        table = np.array(sorted(pieces), np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def largest_free(self, event: int) -> int:
        """The largest free block (bytes) after an event, within the pool."""
        return int(self.free_blocks(event).max(initial=0))

    def fragmentation_at(self, event: int) -> float:
        """External fragmentation of the pool after an event: 1 - largest free block / all free.

        0 where nothing is free. As BFCAllocator::GetFragmentation (xla/tsl/framework/
        bfc_allocator.cc), which divides by zero there.
        """
        free = int(self.pool[event] - self.in_use[event])
        return 1 - self.largest_free(event) / free if free else 0.0

    @property
    def external_fragmentation_at_peak(self) -> float:
        """External fragmentation at `peak_event`, between 0 and 1."""
        return self.fragmentation_at(self.peak_event) if self.peak_event is not None else 0.0

    @property
    def internal_waste_at_peak(self) -> int:
        """Bytes in use but not requested at `peak_event`."""
        at = self.peak_event
        return int(self.in_use[at] - self.requested[at]) if at is not None else 0

    @cached_property
    def oom(self) -> OutOfMemory | None:
        """The first refusal, or None if every request was served."""
        events = self.trace.alloc_events
        sizes = self.trace.size[events]
        refused = _refused(self.trace, self.outcome)
        if not refused.size:
            return None
        event, size = int(events[refused[0]]), int(sizes[refused[0]])
        in_use, pool = int(self.in_use[event]), int(self.pool[event])
        largest = self.largest_free(event)
        if self.limit is None:  # only the driver can have refused
            return OutOfMemory(event, size, pool - in_use, largest, "capacity")
        free = self.limit - in_use
        cause: Cause = "capacity"
        if size > self.limit:
            cause = "larger_than_limit"
        elif size <= free:
            cause = "fragmentation"
        return OutOfMemory(event, size, free, max(largest, self.limit - pool), cause)

    def memory_stats(self) -> dict[str, int]:
        """What `jax.Device.memory_stats` would say at the end, under its keys, in bytes."""
        largest = self.largest_free(len(self.trace) - 1) if len(self.trace) else 0
        return self.rules.memory_stats(self.stats, self.limit, largest)

    def to_json(self) -> dict[str, Any]:
        """The result under the keys of the command line's contract."""
        return {
            "policy": self.policy,
            "device": self.device,
            "peak_bytes_in_use": self.stats.peak_bytes_in_use,
            "peak_pool_bytes": self.stats.peak_pool_bytes,
            "bytes_limit": self.limit,
            "num_allocs": self.stats.num_allocs,
            "external_fragmentation_at_peak": self.external_fragmentation_at_peak,
            "internal_waste_at_peak": self.internal_waste_at_peak,
            "oom": self.oom and self.oom._asdict(),
            "lower_bound_bytes": self.trace.lower_bound_bytes,
            "min_limit_bytes": self.min_limit_bytes,
        }


def replay_requests(
    trace: RequestTrace,
    policy: Policy,
    *,
    limit: int | None = None,
    device: str | None = None,
    driver: Driver = Driver(),  # noqa: B008
    search_limit: bool = True,
) -> ReplayResult:
    """Replay a trace under a policy that may take ``limit`` bytes from the driver.

    A refused request is skipped and the replay goes on, as the real allocators do. With
    ``search_limit`` the result also says the smallest limit under which nothing is refused.

    Raises:
        InputError: the policy needs a limit and there is none.
        PolicyError: the policy broke the contract.

    >>> from alloclab.policies.ideal import Ideal
    >>> trace = RequestTrace.from_arrays([1, 1, 0, 1], [0, 1, 0, 2], [300, 300, 0, 200])
    >>> result = replay_requests(trace, Ideal(), limit=500)
    >>> result.placements.tolist(), result.oom.cause, result.min_limit_bytes
    ([0, -1, 320], 'capacity', 600)
    """
    if limit is None and not policy.works_unlimited:
        raise InputError(f"policy {policy}: needs a limit; give --limit SIZE or a --device")
    outcome = _run(policy, trace, limit, driver)
    result = ReplayResult(trace, policy, device, limit, outcome)
    if not search_limit:
        return result
    return replace(result, min_limit_bytes=_min_limit(trace, policy, result))


def _run(policy: Policy, trace: RequestTrace, limit: int | None, driver: Driver) -> Outcome:
    """One replay from a fresh start, compiled where the policy has a compiled form for it."""
    policy.start(limit, driver)
    return policy.replay_columns(trace.columns()) or policy.run(trace.events())


def _min_limit(trace: RequestTrace, policy: Policy, known: ReplayResult) -> int | None:
    """The smallest limit (bytes) under which the policy serves every request of the trace.

    One LIMIT_STEP less is refused. A policy whose placements depend on the limit is not quite
    monotone, so a still smaller limit may happen to fit; where there are few candidates all of
    them are tried. None if 64 times the lower bound is not enough.
    """
    if policy.ignores_limit:
        return _run(policy, trace, None, Driver()).stats.peak_pool_bytes
    events = list(trace.events()) if len(trace) <= KEEP_EVENTS else None

    def serves(limit: int) -> bool:
        policy.start(limit)
        outcome = policy.replay_columns(trace.columns())
        if outcome is not None:
            return not _refused(trace, outcome).size
        return policy.serves(trace.events() if events is None else events)

    refused = bound = align_up(trace.lower_bound_bytes, LIMIT_STEP)
    if bound == 0 or serves(bound):
        return bound
    fits, outcome = known.limit, known.outcome
    if known.oom is not None or fits is None:
        tries = (bound << power for power in range(1, 7))
        fits = next((each for each in tries if serves(each)), None)
        if fits is None:
            return None
        outcome = _run(policy, trace, fits, Driver())
    fits = align_up(fits, LIMIT_STEP)
    # What it spans under a roomy limit is most often what it needs: look from there down.
    placed = outcome.taken > 0
    ends = (outcome.offsets + outcome.taken)[placed]
    span = align_up(int(ends.max() - outcome.offsets[placed].min()), LIMIT_STEP)
    if bound < span < fits and serves(span):
        fits = span
    if (fits - bound) // LIMIT_STEP * len(trace) <= TRY_ALL:
        return next(each for each in range(bound, fits + 1, LIMIT_STEP) if serves(each))
    step = LIMIT_STEP
    while fits - step > refused and serves(fits - step):
        fits -= step
        step *= 2
    refused = max(refused, fits - step)
    while fits - refused > LIMIT_STEP:
        middle = (refused + fits) // (2 * LIMIT_STEP) * LIMIT_STEP
        if serves(middle):
            fits = middle
        else:
            refused = middle
    return fits


def _refused(trace: RequestTrace, outcome: Outcome) -> Int64s:
    """Ordinals of the allocations that were refused."""
    return np.flatnonzero((outcome.offsets < 0) & (trace.size[trace.alloc_events] > 0))
