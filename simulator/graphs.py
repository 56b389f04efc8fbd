"""Graphs of memory: who is alive with whom, what holds the peak, and what kept a buffer alive.

`live_ranges` reads the lifetimes out of a request trace, or of the values inside a buffer
assignment. `interference_graph` joins those that are alive together, `reuse_graph` those of which
one can take the other's place; `use_graph` shows what a program makes of what. `peak_holders` and
`why_alive` answer what people ask of a memory profile: what is all this, and why is it still there?
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import InputError
from alloclab.simulator.program import (
    EVENT_KINDS,
    EXECUTE,
    MARK,
    RELEASE,
    BufferAssignment,
    ProgramTrace,
)
from alloclab.simulator.requests import RequestTrace

Int64s = npt.NDArray[np.int64]

#: Graphs are for looking at: more edges than this are refused.
MAX_EDGES = 5_000_000


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """When each allocation or value is alive, one row each.

    Attributes:
        name: what it is, such as ``temp`` or the name of an instruction.
        size: bytes.
        start, end: int64; alive from position ``start`` up to, not including, ``end``. A position
            is an event of a request trace or a step of an executable's schedule.
    """

    name: tuple[str, ...]
    size: Int64s
    start: Int64s
    end: Int64s

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def positions(self) -> int:
        """How many positions there are."""
        return int(self.end.max(initial=0))

    @cached_property
    def live_bytes(self) -> Int64s:
        """Bytes alive at each position."""
        change = np.zeros(self.positions + 1, np.int64)
        np.add.at(change, self.start, self.size)
        np.add.at(change, self.end, -self.size)
        return np.cumsum(change)[:-1]

    @property
    def peak(self) -> int:
        """The first position at which most bytes are alive.

        Raises:
            InputError: there is none, as nothing is ever alive.
        """
        if not self.positions:
            raise InputError("live ranges: nothing is ever alive")
        return int(self.live_bytes.argmax())

    def alive_at(self, position: int) -> Int64s:
        """The rows that are alive at a position, largest first."""
        rows = np.flatnonzero((self.start <= position) & (self.end > position))
        return rows[np.argsort(-self.size[rows], kind="stable")]


def live_ranges(source: RequestTrace | BufferAssignment) -> LiveRanges:
    """The live ranges of the allocations of a request trace, or of an assignment's values.

    What a trace never frees is alive to its end. Values of an assignment are alive from their
    first to their last step, both included.

    Raises:
        InputError: the assignment has no values, as its compiler did not say when they are live.

    >>> trace = RequestTrace.from_arrays([1, 1, 0], [0, 1, 0], [100, 200, 0])
    >>> ranges = live_ranges(trace)
    >>> ranges.start.tolist(), ranges.end.tolist(), ranges.live_bytes.tolist()
    ([0, 1], [2, 3], [100, 300, 200])
    """
    if isinstance(source, RequestTrace):
        rows = source.alloc_events
        return LiveRanges(
            tuple(source.labels[each] for each in source.label[rows].tolist()),
            source.size[rows],
            rows,
            source.free_events,
        )
    values = source.values
    if values is None:
        raise InputError(
            "buffer assignment: its compiler did not say when each value is live; dump it with "
            "its heap simulator traces (alloclab capture does)"
        )
    return LiveRanges(
        values.name,
        values.size,
        values.start.astype(np.int64),
        values.end.astype(np.int64) + 1,
    )


def interference_graph(ranges: LiveRanges, rows: Iterable[int] | None = None) -> nx.Graph:
    """Which of the rows (by default all) are alive together: an edge says for how long.

    Nodes are row numbers with ``name``, ``size``, ``start`` and ``end``; an edge's ``overlap``
    counts positions. Two that are joined cannot share memory, so that the heaviest clique, by
    size, is a lower bound for any allocator; for intervals it is the peak of live bytes.

    Raises:
        InputError: more than `MAX_EDGES` pairs are alive together.

    >>> trace = RequestTrace.from_arrays([1, 1, 0, 1], [0, 1, 0, 2], [100, 200, 0, 50])
    >>> list(interference_graph(live_ranges(trace)).edges(data="overlap"))
    [(0, 1, 1), (1, 2, 1)]
    """
    graph = _nodes(nx.Graph(), ranges, rows)
    lasting = [row for row in graph if ranges.end[row] > ranges.start[row]]
    alive: list[int] = []
    edges = 0
    for row in sorted(lasting, key=lambda row: (ranges.start[row], row)):
        alive = [each for each in alive if ranges.end[each] > ranges.start[row]]
        edges += len(alive)
        if edges > MAX_EDGES:
            raise InputError(
                f"interference graph: more than {MAX_EDGES:,} pairs are alive together; give the "
                "rows that matter, such as those alive at the peak"
            )
        for each in alive:
            until = min(ranges.end[each], ranges.end[row])
            graph.add_edge(each, row, overlap=int(until - ranges.start[row]))
        alive.append(row)
    return graph


def reuse_graph(ranges: LiveRanges, rows: Iterable[int] | None = None) -> nx.DiGraph:
    """Whose memory each row could take over: an edge leads from the one that ended to the other.

    Of all that ended before it and are large enough, the last; a path is one piece of memory that
    is handed on, as whole blocks would be.

    >>> trace = RequestTrace.from_arrays([1, 0, 1], [0, 0, 1], [100, 0, 80])
    >>> list(reuse_graph(live_ranges(trace)).edges)
    [(0, 1)]
    """
    graph = _nodes(nx.DiGraph(), ranges, rows)
    ended = sorted(graph, key=lambda row: (ranges.end[row], row))
    ends = ranges.end[ended]
    for row in graph:
        before = int(np.searchsorted(ends, ranges.start[row], side="right"))
        for each in reversed(ended[:before]):
            if each != row and ranges.size[each] >= ranges.size[row]:
                graph.add_edge(each, row)
                break
    return graph


def _nodes(graph: nx.Graph, ranges: LiveRanges, rows: Iterable[int] | None) -> nx.Graph:
    chosen = range(len(ranges)) if rows is None else [int(each) for each in rows]
    for row in chosen:
        graph.add_node(
            row,
            name=ranges.name[row],
            size=int(ranges.size[row]),
            start=int(ranges.start[row]),
            end=int(ranges.end[row]),
        )
    return graph


@dataclass(frozen=True)
class Holder:
    """Something alive at a position: bytes, since when, until when, and its share of all bytes."""

    row: int
    name: str
    size: int
    start: int
    end: int
    share: float


def peak_holders(ranges: LiveRanges, position: int | None = None) -> tuple[Holder, ...]:
    """What holds the memory at a position, by default at the peak; largest first.

    >>> trace = RequestTrace.from_arrays([1, 1], [0, 1], [100, 300], labels=("temp",))
    >>> [(each.row, each.size, each.share) for each in peak_holders(live_ranges(trace))]
    [(1, 300, 0.75), (0, 100, 0.25)]
    """
    at = ranges.peak if position is None else position
    rows = ranges.alive_at(at)
    total = max(1, int(ranges.size[rows].sum()))
    return tuple(
        Holder(
            row,
            ranges.name[row],
            int(ranges.size[row]),
            int(ranges.start[row]),
            int(ranges.end[row]),
            int(ranges.size[row]) / total,
        )
        for row in rows.tolist()
    )


def use_graph(program: ProgramTrace) -> nx.DiGraph:
    """What makes and what uses each buffer of a program.

    Nodes are ``("event", number)`` and ``("buffer", number)``. Edges lead from an event to the
    buffers that it makes and from a buffer to the events that use it, with ``donated`` true where
    it is given up; from a buffer to the one that takes over its memory there is an edge with
    ``alias`` true. Releases and marks are not part of it: they use nothing.
    """
    graph = nx.DiGraph()
    for buffer, size in enumerate(program.buffer_bytes.tolist()):
        graph.add_node(("buffer", buffer), size=size)
    for event, kind in enumerate(program.kind.tolist()):
        if kind in (RELEASE, MARK):
            continue
        graph.add_node(("event", event), what=_what(program, event))
        first, last = program.operand_start[event], program.operand_start[event + 1]
        for buffer, donated in zip(
            program.operands[first:last].tolist(), program.donated[first:last].tolist(), strict=True
        ):
            graph.add_edge(("buffer", buffer), ("event", event), donated=donated)
        for buffer in program.results[
            program.result_start[event] : program.result_start[event + 1]
        ].tolist():
            graph.add_edge(("event", event), ("buffer", buffer))
            alias = int(program.buffer_alias_of[buffer])
            if alias >= 0:
                graph.add_edge(("buffer", alias), ("buffer", buffer), alias=True)
    return graph


def _what(program: ProgramTrace, event: int) -> str:
    kind = EVENT_KINDS[program.kind[event]]
    if program.kind[event] != EXECUTE:
        return kind
    return f"{kind} {program.executables[program.executable[event]].name}"


@dataclass(frozen=True)
class Lifetime:
    """The life of one buffer of a program, in event numbers.

    ``last_use`` is the last event that used it (or made it, if none did), ``end`` the event that
    donated or released it, None if the program never let go.
    """

    buffer: int
    size: int
    made: int
    last_use: int
    end: int | None
    donated: bool


def lifetimes(program: ProgramTrace) -> tuple[Lifetime, ...]:
    """The life of every buffer of a program."""
    count = len(program.buffer_bytes)
    made = np.repeat(np.arange(len(program)), np.diff(program.result_start))
    event_of = np.repeat(np.arange(len(program)), np.diff(program.operand_start))
    released = program.kind[event_of] == RELEASE
    last_use = made.copy()
    np.maximum.at(last_use, program.operands[~released], event_of[~released])
    end = np.full(count, -1, np.int64)
    gone = released | program.donated
    end[program.operands[gone]] = event_of[gone]
    donated = np.zeros(count, np.bool_)
    donated[program.operands[program.donated]] = True
    return tuple(
        Lifetime(buffer, size, first, last, None if stop < 0 else stop, given)
        for buffer, (size, first, last, stop, given) in enumerate(
            zip(
                program.buffer_bytes.tolist(),
                made.tolist(),
                last_use.tolist(),
                end.tolist(),
                donated.tolist(),
                strict=True,
            )
        )
    )


def why_alive(program: ProgramTrace, buffer: int, event: int) -> str:
    """Why a buffer could not be freed before an event, in a sentence.

    It is needed if something uses it then or later; else the program holds it without need, until
    it lets go, which is where a ``del``, a donation or a smaller scope would help.

    Raises:
        InputError: there is no such buffer, or it is not alive then.
    """
    if not 0 <= buffer < len(program.buffer_bytes):
        raise InputError(
            f"buffer {buffer}: there is none; the program has {len(program.buffer_bytes)}"
        )
    life = lifetimes(program)[buffer]
    if event < life.made or (life.end is not None and event > life.end):
        until = "the end" if life.end is None else f"event {life.end}"
        raise InputError(
            f"buffer {buffer}: not alive at event {event}, only from event {life.made} to {until}"
        )
    edges = use_graph(program).out_edges(("buffer", buffer))
    uses = [number for _, (kind, number) in edges if kind == "event" and number >= event]
    if uses:
        return f"needed by event {min(uses)} ({_what(program, min(uses))})"
    last = f"last used by event {life.last_use} ({_what(program, life.last_use)})"
    if life.end is None:
        return f"{last}, and never released"
    return f"{last}, and held until event {life.end}"
