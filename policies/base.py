"""The base class of all policies: it owns the accounting and checks every answer.

A policy says only where a request goes (`Policy.place`) and what it does with memory that comes
back (`Policy.release`). The base class keeps the pool, the live allocations and the statistics,
and refuses an answer that is misaligned, outside the pool or on top of a live allocation, so that
no policy can corrupt them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError, PolicyError
from alloclab.policies.options import Option, checked
from alloclab.policies.units import MAX_BYTES, align_up

Int64s = npt.NDArray[np.int64]

#: Where the address space ends; beyond it int64 columns could overflow.
END_OF_ADDRESSES = 4 * MAX_BYTES


class Request(NamedTuple):
    """One allocation request as the allocator sees it. Sizes in bytes, time in microseconds.

    ``space`` is the memory space (``device``, ``collective``, ``pinned_host``); ``label`` says
    what the memory is for (``output``, ``temp``, ``argument``, ...); ``execution`` numbers the
    execution that asks, -1 outside of one.
    """

    size: int
    id: int = 0
    alignment: int = 1
    stream: int = 0
    space: str = "device"
    label: str = ""
    time_us: float = 0.0
    execution: int = -1


class Free(NamedTuple):
    """The allocation of this id is no longer needed."""

    id: int


class Mark(NamedTuple):
    """The program passed a mark, such as the end of a training step."""

    label: str


Event = Request | Free | Mark

#: Where a request went: address, and the bytes that it takes there (at least those requested).
Placement = tuple[int, int]


class Region(NamedTuple):
    """Memory taken from the driver in one call: address and bytes, and at which events.

    ``given_back`` is the event at which the driver got it back, or -1; ``joined`` says that it
    extends the region below it, so that an allocation may lie across both.
    """

    start: int
    size: int
    taken_at: int = 0
    given_back: int = -1
    joined: bool = False


@dataclass(frozen=True)
class Driver:
    """The memory below the allocator. Sizes in bytes; None means no such limit.

    Attributes:
        capacity: what the device can give in total.
        largest: the largest single allocation that it grants.
        gap: address space left unused after each region, so that regions do not touch.
    """

    capacity: int | None = None
    largest: int | None = None
    gap: int = 0

    def grants(self, size: int, in_use: int) -> bool:
        """Whether it gives ``size`` more bytes when ``in_use`` are already taken."""
        return (self.largest is None or size <= self.largest) and (
            self.capacity is None or in_use + size <= self.capacity
        )


@dataclass
class Stats:
    """What `jax.Device.memory_stats` counts, under its names, and the cost of getting there.

    Sizes in bytes. ``bytes_in_use`` counts what allocations take, not what was requested.
    """

    num_allocs: int = 0
    bytes_in_use: int = 0
    peak_bytes_in_use: int = 0
    largest_alloc_size: int = 0
    pool_bytes: int = 0
    peak_pool_bytes: int = 0
    driver_calls: int = 0
    synchronisations: int = 0
    bytes_moved: int = 0


class Columns(NamedTuple):
    """A request stream as columns, one row per event; for compiled replay.

    ``is_alloc`` (uint8) tells allocations from frees; ``slot`` (int64) is the ordinal of the
    allocation that the event makes or frees, counted from 0; ``size`` and ``alignment`` are bytes
    (int64, 0 on frees); ``collective`` (uint8) is 1 for requests of collective memory.
    """

    is_alloc: npt.NDArray[np.uint8]
    slot: Int64s
    size: Int64s
    alignment: Int64s
    collective: npt.NDArray[np.uint8]
    num_slots: int


@dataclass(frozen=True)
class Outcome:
    """What a policy did with a request stream, one row per allocation.

    Attributes:
        offsets: address of each allocation in bytes, -1 where there is none (refused, or size 0).
        taken: bytes that each allocation takes, 0 where it has no address.
        regions: all memory ever taken from the driver, in order.
        stats: the counts at the end.
    """

    offsets: Int64s
    taken: Int64s
    regions: tuple[Region, ...]
    stats: Stats


#: What a policy must not redefine, as the accounting depends on it.
_OWNED = {
    "allocate",
    "free",
    "run",
    "serves",
    "start",
    "reserve",
    "extend",
    "give_back",
    "_take",
    "_holds",
}


class Policy:
    """Base class of the allocator policies.

    A subclass has a ``name``, which registers it, options declared with
    `alloclab.policies.options.option`, and two methods, `place` and `release`. `setup` is called
    before the first request. These may use ``self.limit`` (bytes it may take from the driver, or
    None), `reserve`, `extend` and `give_back`.

    >>> class Bump(Policy):
    ...     "Never uses memory twice."
    ...     def place(self, request):
    ...         address = self.reserve(request.size)
    ...         return None if address is None else (address, request.size)
    ...     def release(self, address, size): pass
    >>> bump = Bump().start(limit=1000)
    >>> bump.allocate(Request(600, id=1)), bump.allocate(Request(600, id=2))
    ((0, 600), None)
    >>> bump.stats.bytes_in_use
    600
    """

    name: ClassVar[str] = ""
    options: ClassVar[dict[str, Option]] = {}
    #: Whether the policy works without a limit on the memory that it takes from the driver.
    works_unlimited: ClassVar[bool] = True
    #: Whether its placements are the same for every limit under which nothing is refused.
    ignores_limit: ClassVar[bool] = False
    registry: ClassVar[dict[str, type["Policy"]]] = {}

    def __init_subclass__(cls) -> None:
        cls._keeps_off(vars(cls))
        own = {key: value for key, value in vars(cls).items() if isinstance(value, Option)}
        cls.options = cls.options | {key: replace(value, name=key) for key, value in own.items()}
        name = vars(cls).get("name", "")
        if name:
            known = cls.registry.setdefault(name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise PolicyError(f"policy {name!r} is already registered by {known.__module__}")
            cls.registry[name] = cls

    @classmethod
    def _keeps_off(cls, names: Iterable[str]) -> None:
        """Refuse a subclass that redefines what the base class owns."""
        for name in _OWNED.intersection(names):
            raise PolicyError(f"{cls.__name__}: {name!r} belongs to Policy; choose another name")

    def __init__(self, **options: Any) -> None:
        given = checked(self.name or type(self).__name__, self.options, options)
        for key, value in given.items():
            setattr(self, key, value)
        self.start()

    @classmethod
    def summary(cls) -> str:
        """The first paragraph of the class's documentation, on one line."""
        return " ".join((cls.__doc__ or "").split("\n\n")[0].split())

    def __str__(self) -> str:
        """The policy as it is written on the command line, without options left at default."""
        changed = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, each in self.options.items()
            if (value := getattr(self, key)) != each.default
        ]
        name = self.name or type(self).__name__
        return f"{name}({','.join(changed)})" if changed else name

    def start(self, limit: int | None = None, driver: Driver = Driver()) -> Self:
        """Begin afresh with an empty pool; returns itself.

        Raises:
            InputError: the policy cannot work with this limit (bytes).
        """
        self.limit = limit
        self.driver = driver
        self.stats = Stats()
        self.regions: list[Region] = []
        self.event = 0
        self._next_address = 0
        self._spans: list[list[int]] = []  # [start, end) of what may be used, sorted
        self._span = [0, 0]  # the one that held the last placement
        self._region_at: dict[int, int] = {}  # address -> index in regions
        self._live: dict[int, Placement] = {}
        self._starts: list[int] = []  # addresses of live allocations and of some freed, sorted
        self._ends: dict[int, int] = {}  # of live allocations, by address
        self.setup()
        self._keeps_off(vars(self))
        return self

    # --- what a subclass writes -----------------------------------------------------------

    def setup(self) -> None:
        """Make the policy's own state; called by `start`."""

    def place(self, request: Request) -> Placement | None:
        """The address and size of the memory that the request gets, or None to refuse it."""
        raise NotImplementedError

    def release(self, address: int, size: int) -> None:
        """Take back a placement."""
        raise NotImplementedError

    def mark(self, label: str) -> None:
        """The program passed a mark (a step or a phase)."""

    def replay_columns(self, columns: Columns) -> Outcome | None:
        """A compiled replay of the whole stream with the same outcome, or None if there is none."""
        return None

    def memory_stats(self, stats: Stats, limit: int | None, largest_free: int) -> dict[str, int]:
        """What `jax.Device.memory_stats` says for these counts, under its keys (bytes)."""
        return {
            "num_allocs": stats.num_allocs,
            "bytes_in_use": stats.bytes_in_use,
            "peak_bytes_in_use": stats.peak_bytes_in_use,
            "largest_alloc_size": stats.largest_alloc_size,
            **({} if limit is None else {"bytes_limit": limit}),
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "largest_free_block_bytes": largest_free,
            "pool_bytes": stats.pool_bytes,
            "peak_pool_bytes": stats.peak_pool_bytes,
        }

    # --- what a subclass may call ---------------------------------------------------------

    def reserve(self, size: int, alignment: int = 256) -> int | None:
        """Take a region of ``size`` bytes from the driver: its address, or None if refused."""
        return self._take(size, align_up(self._next_address, alignment), joined=False)

    def extend(self, size: int) -> int | None:
        """Make the last region ``size`` bytes longer: the new part's address, or None."""
        if not self._spans:
            return self.reserve(size)
        return self._take(size, self._spans[-1][1], joined=True)

    def give_back(self, start: int) -> None:
        """Return the region that `reserve` gave at ``start`` to the driver, with all extensions."""
        if start not in self._region_at:
            raise PolicyError(f"{self}: gives back a region at {start} that it does not hold")
        span = bisect_left(self._spans, [start])
        end = self._spans[span][1]
        first = bisect_left(self._starts, start)
        last = bisect_left(self._starts, end)
        if not self._ends.keys().isdisjoint(self._starts[first:last]):
            raise PolicyError(f"{self}: gives back the region at {start} with live allocations")
        del self._spans[span]
        self._span = [0, 0]
        index = self._region_at.pop(start)
        while start < end:
            region = self.regions[index]
            if region.start == start and region.given_back < 0:
                self.regions[index] = region._replace(given_back=self.event)
                self.stats.pool_bytes -= region.size
                start += region.size
            index += 1
        self.stats.driver_calls += 1

    def _take(self, size: int, start: int, *, joined: bool) -> int | None:
        stats = self.stats
        stats.driver_calls += 1
        if size <= 0:
            raise PolicyError(f"{self}: asks the driver for {size} bytes")
        if self.limit is not None and stats.pool_bytes + size > self.limit:
            return None
        if not self.driver.grants(size, stats.pool_bytes):
            return None
        if start + size > END_OF_ADDRESSES:
            raise InputError(f"{self}: the trace needs more addresses than 64 bits can count")
        if joined:
            self._spans[-1][1] += size
        else:
            self._spans.append([start, start + size])
            self._region_at[start] = len(self.regions)
        self.regions.append(Region(start, size, self.event, joined=joined))
        self._next_address = start + size + self.driver.gap
        stats.pool_bytes += size
        stats.peak_pool_bytes = max(stats.peak_pool_bytes, stats.pool_bytes)
        return start

    # --- what a caller uses ---------------------------------------------------------------

    def allocate(self, request: Request) -> Placement | None:
        """Serve a request: address and bytes taken, or None if refused or of size 0.

        Raises:
            PolicyError: the policy's answer breaks the contract.
        """
        size = request.size
        if size == 0:  # no allocator is ever asked (XLA, TfAllocatorAdapter::Allocate)
            return None
        placement = self.place(request)
        if placement is None:
            return None
        address, taken = placement
        end = address + taken
        starts, ends, span = self._starts, self._ends, self._span
        low = high = bisect_right(starts, address)
        below = None
        while low and (below := ends.get(starts[low - 1])) is None:  # freed: of no concern
            low -= 1
        while high < len(starts) and starts[high] < end and starts[high] not in ends:
            high += 1
        if (
            taken < size
            or address & (request.alignment - 1)
            or (below is not None and below > address)
            or (high < len(starts) and starts[high] < end)
            or not ((span[0] <= address and end <= span[1]) or self._holds(address, end))
            or request.id in self._live
        ):
            raise PolicyError(self._broken_rule(request, address, taken))
        starts[low:high] = (address,)
        ends[address] = end
        self._live[request.id] = placement
        stats = self.stats
        stats.num_allocs += 1
        in_use = stats.bytes_in_use = stats.bytes_in_use + taken
        if in_use > stats.peak_bytes_in_use:  # noqa: PLR1730  (max() takes three times as long)
            stats.peak_bytes_in_use = in_use
        if taken > stats.largest_alloc_size:  # noqa: PLR1730
            stats.largest_alloc_size = taken
        return placement

    def free(self, id: int) -> None:
        """Free the allocation of this id; nothing happens if it was refused or of size 0."""
        placement = self._live.pop(id, None)
        if placement is None:
            return
        address, taken = placement
        del self._ends[address]
        self.stats.bytes_in_use -= taken
        self.release(address, taken)

    def run(self, events: Iterable[Event]) -> Outcome:
        """Serve a whole request stream from a fresh start, every answer checked."""
        offsets, sizes = array("q"), array("q")
        allocate, free = self.allocate, self.free
        for self.event, event in enumerate(events):
            kind = type(event)
            if kind is Request:
                address, taken = allocate(event) or (-1, 0)  # type: ignore[arg-type]
                offsets.append(address)
                sizes.append(taken)
            elif kind is Free:
                free(event[0])  # type: ignore[arg-type]
            else:
                self.mark(event[0])  # type: ignore[arg-type]
        return Outcome(
            np.frombuffer(offsets, np.int64) if offsets else np.zeros(0, np.int64),
            np.frombuffer(sizes, np.int64) if sizes else np.zeros(0, np.int64),
            tuple(self.regions),
            replace(self.stats),
        )

    def serves(self, events: Iterable[Event]) -> bool:
        """Whether it serves every request of a stream; stops at the first that it refuses."""
        for self.event, event in enumerate(events):
            if isinstance(event, Request):
                if self.allocate(event) is None and event.size:
                    return False
            elif isinstance(event, Free):
                self.free(event.id)
            else:
                self.mark(event.label)
        return True

    def _holds(self, start: int, end: int) -> bool:
        """Whether [start, end) lies in one region of the pool."""
        at = bisect_left(self._spans, [start + 1]) - 1
        if at < 0:
            return False
        self._span = self._spans[at]  # where the next one will probably lie
        return self._span[0] <= start and end <= self._span[1]

    def _broken_rule(self, request: Request, address: int, taken: int) -> str:
        """Which rule of the contract an answer breaks, in plain words."""
        where = f"{self}: event {self.event}, {request.size} bytes for id {request.id}"
        if taken < request.size:
            return f"{where}: gets only {taken} bytes"
        if address & (request.alignment - 1):
            return f"{where}: address {address} is not a multiple of {request.alignment}"
        if request.id in self._live:
            return f"{where}: this id is still live"
        if not self._holds(address, address + taken):
            return f"{where}: [{address}, {address + taken}) is not inside one region of the pool"
        return f"{where}: [{address}, {address + taken}) overlaps a live allocation"
