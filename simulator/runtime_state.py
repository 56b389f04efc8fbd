"""The explicit state of a simulated run: allocators, buffers, and the streams of each device.

All of it is plain data, without generators or closures, so that a run can be copied at any moment.
Times are whole nanoseconds: exact, hence the same in every run.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from alloclab.policies.base import Event, Free, Mark, Placement, Policy, Request
from alloclab.simulator.requests import (
    ALLOC,
    DEFAULT_ALIGNMENT,
    FREE,
    MARK,
    SPACES,
    RequestTrace,
)

if TYPE_CHECKING:
    from alloclab.simulator.runtime_plan import Plan

#: Label of the memory that a TPU reserves for its loaded programs.
PROGRAM = "program"


class PoolKey(NamedTuple):
    """Names an allocator: the device, and the memory that it manages.

    ``memory`` is ``device``, ``collective`` (where it has an allocator of its own),
    ``pinned_host``, or ``staging`` (one for all devices, under device 0).
    """

    device: int
    memory: str


class Row(NamedTuple):
    """What is asked in one request: bytes, what for, and where."""

    size: int
    label: str
    space: str = "device"
    alignment: int = DEFAULT_ALIGNMENT


class Block:
    """Events that an allocator gets in one go; immutable and shared.

    A `Pool` notes that a block was issued, and with which id, not its rows: that keeps long runs
    cheap. ``offsets`` are added to the id, one per row.
    """

    def __init__(self, op: int, rows: Iterable[Row], offsets: Iterable[int] | None = None) -> None:
        self.op = op
        self.rows = tuple(rows)
        self.offsets = tuple(range(len(self.rows)) if offsets is None else offsets)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


NOTHING = Row(0, "")
FREE_ONE = Block(FREE, [NOTHING])


class Storage:
    """A piece of memory: where it is, and who still needs it.

    ``references`` counts the program's name for it and every copy or queued launch that uses it;
    at zero it is freed. ``ready`` and ``busy`` are when its contents exist and when the device's
    last use of it ends. ``pool`` is None while it has no memory: its launch is still queued.
    """

    __slots__ = ("busy", "id", "pool", "ready", "references", "row")
    id: int
    row: Row

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.references = 1
        self.ready = 0
        self.busy = 0

    def put(self, pool: "Pool", number: int, row: Row) -> None:
        """Give it memory."""
        self.pool, self.id, self.row = pool, number, row


class Launch(NamedTuple):
    """An execution on one device: its row of the program, and the storages that it works on.

    ``drops`` are given up when it has been enqueued.
    """

    row: int
    plan: "Plan"
    operands: "list[Storage | None]"
    results: "list[Storage | None]"
    drops: "list[Storage]"


class Allocated(NamedTuple):
    """An allocation by a live policy: what was asked and for whom, its address and its bytes."""

    row: Row
    owner: Storage | None
    address: int
    taken: int


class Pool:
    """One allocator: all that it is asked, and the live policy behind it, if there is one.

    ``frees`` counts how often memory came back. With a policy, ``live`` holds each allocation by
    id, and ``in_use`` and ``reserved`` count the bytes that buffers and loaded programs take, with
    their peaks.
    """

    def __init__(self, key: PoolKey, policy: Policy | None = None) -> None:
        self.key = key
        self.policy = policy
        self.next_id = 0
        self.frees = 0
        self.in_use = self.peak_in_use = self.reserved = self.peak_reserved = 0
        self.live: dict[int, Allocated] = {}
        self.blocks: list[Block] = []
        self._number: dict[Block, int] = {}
        self._single: dict[tuple[int, Row], Block] = {}
        # Four numbers per issued block: its own, the id it starts at, when, in which execution.
        self._log: list[int] = []
        # What makes the policy again: how it was at the start, and all that it was told.
        self._pristine = copy.deepcopy(policy)
        self._told: list[Event] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pool":
        twin = memo[id(self)] = Pool(self.key)
        for key, value in vars(self).items():
            if key == "live":
                twin.live = copy.deepcopy(value, memo)
            elif key not in ("policy", "_told"):
                setattr(twin, key, copy.copy(value))
        # A policy may hold long chains of chunks, which a deep copy cannot follow: ask it again.
        twin.policy = copy.deepcopy(self._pristine)
        twin._told = []
        for event in self._told:
            twin._tell(event)
        return twin

    @property
    def issued(self) -> int:
        """How many blocks were issued."""
        return len(self._log) // 4

    def note(self, block: Block, base: int, now: int, execution: int) -> None:
        """Write down that a block is issued at a time (ns) by an execution."""
        number = self._number.get(block)
        if number is None:
            number = self._number[block] = len(self.blocks)
            self.blocks.append(block)
        self._log += (number, base, now, execution)

    def take_ids(self, count: int) -> int:
        """The first of so many fresh ids."""
        base = self.next_id
        self.next_id = base + count
        return base

    def single(self, row: Row, op: int = ALLOC) -> Block:
        """The block of this one row."""
        block = self._single.get((op, row))
        if block is None:
            block = self._single[op, row] = Block(op, [row])
        return block

    def ask(self, row: Row, number: int, owner: Storage | None, now: int, execution: int) -> bool:
        """Ask the live policy for one row; whether it got memory."""
        placement = self._tell(_request(row, number, now, execution))
        if placement is None:
            return False
        self.note(self.single(row), number, now, execution)
        self.live[number] = Allocated(row, owner, *placement)
        self._count(row, placement[1])
        if owner is not None:
            owner.put(self, number, row)
        return True

    def free(self, block: Block, base: int, now: int, execution: int = -1) -> None:
        """Free what a block of frees names."""
        self.frees += 1
        self.note(block, base, now, execution)
        if self.policy is not None:
            for offset in block.offsets:
                allocated = self.live.pop(base + offset)
                self._tell(Free(base + offset))
                self._count(allocated.row, -allocated.taken)

    def mark(self, label: str, now: int) -> None:
        """Pass on that the program reached a mark."""
        self.note(self.single(Row(0, label), MARK), 0, now, -1)
        if self.policy is not None:
            self._tell(Mark(label))

    def _count(self, row: Row, taken: int) -> None:
        if row.label == PROGRAM:
            self.reserved += taken
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        else:
            self.in_use += taken
            self.peak_in_use = max(self.peak_in_use, self.in_use)

    def _tell(self, event: Event) -> Placement | None:
        """Pass an event to the policy; the placement if it asks for memory and gets it."""
        policy = self.policy
        assert policy is not None
        policy.event = len(self._told)
        self._told.append(event)
        if isinstance(event, Request):
            return policy.allocate(event)
        if isinstance(event, Free):
            policy.free(event.id)
        else:
            policy.mark(event.label)
        return None

    def events(self, since: int) -> Iterator[Event]:
        """All that it was asked but for the first so many blocks."""
        log = self._log
        for at in range(4 * since, len(log), 4):
            number, base, now, execution = log[at : at + 4]
            block = self.blocks[number]
            for offset, row in zip(block.offsets, block.rows, strict=True):
                if block.op == ALLOC:
                    yield _request(row, base + offset, now, execution)
                else:
                    yield Free(base + offset) if block.op == FREE else Mark(row.label)

    def trace(self, name: str = "") -> RequestTrace:
        """All that it was asked, as columns."""
        number, base, time, execution = np.array(self._log, np.int64).reshape(-1, 4).T
        rows = [(block.op, *row) for block in self.blocks for row in block.rows]
        labels = list(dict.fromkeys(("", *(row[2] for row in rows))))
        number_of = {label: index for index, label in enumerate(labels)}
        op = np.array([row[0] for row in rows], np.uint8)
        size = np.array([row[1] for row in rows], np.int64)
        label = np.array([number_of[row[2]] for row in rows], np.int32)
        space = np.array([SPACES.index(row[3]) for row in rows], np.uint8)
        alignment = np.array([row[4] for row in rows], np.int64)
        offset = np.array([each for block in self.blocks for each in block.offsets], np.int64)
        # Row r of the result is row `at[r]` of this table.
        lengths = np.array([len(block.rows) for block in self.blocks], np.int64)
        first = np.cumsum(lengths) - lengths
        counts = lengths[number]
        before = np.cumsum(counts) - counts
        at = np.repeat(first[number] - before, counts) + np.arange(counts.sum())
        return RequestTrace.from_columns(
            op[at],
            np.repeat(base, counts) + offset[at],
            size[at],
            label=label[at],
            space=space[at],
            alignment=alignment[at],
            time_us=np.repeat(time, counts) / 1000,
            execution=np.repeat(execution, counts).astype(np.int32),
            labels=labels,
            name=name,
        )


def _request(row: Row, number: int, now: int, execution: int) -> Request:
    return Request(row.size, number, row.alignment, 0, row.space, row.label, now / 1000, execution)


#: What an execution only needs while it is enqueued: allocators, what to free, and from which id.
Scratch = Sequence[tuple[Pool, Block, int]]


class Lane:
    """One device: its allocators, and when each stream is done with all that is enqueued (ns).

    One ``compute`` stream; ``to_device`` and ``to_host`` are the copy streams. ``inflight`` holds
    the completion times of executions that count against the run-ahead limit; ``queue`` the
    launches that a dispatch thread still has to make; ``loaded`` the programs with memory reserved,
    least recently used first, with their bytes, ``running`` the one that is being launched, and
    ``reservation`` the memory of all of them.
    """

    def __init__(self, pools: dict[str, Pool], to_host_streams: int) -> None:
        self.pools = pools
        self.compute = 0
        self.to_device = 0
        self.to_host = [0] * to_host_streams
        self.next_to_host = 0
        self.inflight: deque[int] = deque()
        self.queue: deque[Launch] = deque()
        self.loaded: dict[int, int] = {}
        self.running = -1
        self.reservation: Storage | None = None

    def slot(self, now: int, limit: int) -> int:
        """When the run-ahead limit lets one more execution in: the compute semaphore, which is
        released as executions complete (max_inflight_computations, xla/pjrt/local_device_state.h).
        """
        inflight = self.inflight
        while inflight and inflight[0] <= now:
            inflight.popleft()
        return now if len(inflight) < limit else inflight[len(inflight) - limit]


@dataclass(frozen=True)
class OutOfMemory:
    """Why a run with live policies ended early; sizes in bytes.

    ``row`` is the event of the program trace that asked, ``in_use`` and ``reserved`` what buffers
    and loaded programs take at that moment.
    """

    pool: PoolKey
    time_us: float
    row: int
    request: Row
    in_use: int
    reserved: int


@dataclass
class State:
    """All that changes in a run.

    ``row`` is the next event of the program; ``pending`` what is scheduled, by number: when (ns),
    which action, with what; ``launched`` until when the host is held by the launch at hand;
    ``launching`` how many launches of it still wait for their device, and ``waiting`` whether the
    host waits for a launch to be made.
    """

    pools: dict[PoolKey, Pool]
    lanes: dict[int, Lane]
    now: int = 0
    row: int = 0
    number: int = 0
    launched: int = 0
    launching: int = 0
    waiting: bool = False
    pending: dict[int, tuple[int, str, tuple[Any, ...]]] = field(default_factory=dict)
    buffers: dict[int, Storage | None] = field(default_factory=dict)
    failure: OutOfMemory | None = None
