"""Graphs of memory, against their definitions and by hand."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.simulator import graphs
from alloclab.simulator.graphs import (
    LiveRanges,
    interference_graph,
    lifetimes,
    live_ranges,
    peak_holders,
    reuse_graph,
    use_graph,
    why_alive,
)
from alloclab.simulator.program import BufferAssignment, ProgramTrace, Values
from alloclab.simulator.requests import RequestTrace
from tests.unit.program_builder import Program, assignment, executable


def ranges_of(*rows: tuple[int, int, int]) -> LiveRanges:
    """Live ranges from bytes, start and end."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    names = tuple(f"v{each}" for each in range(len(rows)))
    return LiveRanges(names, table[:, 0], table[:, 1], table[:, 2])


@st.composite
def some_ranges(draw: st.DrawFn) -> LiveRanges:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(0, 12), st.integers(0, 6)),
            min_size=1,
            max_size=14,
        )
    )
    return ranges_of(*((size, start, start + length) for size, start, length in rows))


def test_live_ranges_of_a_trace() -> None:
    trace = RequestTrace.from_columns(
        [1, 1, 0, 2, 1],
        [7, 8, 7, 0, 9],
        [100, 200, 0, 0, 50],
        label=[1, 2, 0, 3, 1],
        labels=("", "output", "temp", "step"),
    )
    ranges = live_ranges(trace)
    assert ranges.name == ("output", "temp", "output")
    assert ranges.start.tolist() == [0, 1, 4]
    assert ranges.end.tolist() == [2, 5, 5]
    assert ranges.live_bytes.tolist() == trace.live_bytes.tolist()
    assert ranges.peak == 1
    assert ranges.alive_at(1).tolist() == [1, 0]


def test_live_ranges_of_an_assignment_include_the_last_step() -> None:
    values = Values(
        ("a", "b"),
        np.array([0, 0], np.int32),
        np.array([0, 0], np.int64),
        np.array([64, 32], np.int64),
        np.array([0, 3], np.int32),
        np.array([2, 4], np.int32),
    )
    ranges = live_ranges(BufferAssignment((), values, 5))
    assert ranges.live_bytes.tolist() == [64, 64, 64, 32, 32]
    assert not interference_graph(ranges).edges
    assert list(reuse_graph(ranges).edges) == [(0, 1)]
    with pytest.raises(InputError, match="did not say when"):
        live_ranges(BufferAssignment(()))


@given(some_ranges())
def test_interference_is_pairwise_overlap(ranges: LiveRanges) -> None:
    graph = interference_graph(ranges)
    alive = [set(range(*each)) for each in zip(ranges.start, ranges.end, strict=True)]
    for one in range(len(ranges)):
        assert graph.nodes[one]["size"] == ranges.size[one]
        for other in range(one):
            common = len(alive[one] & alive[other])
            assert graph.has_edge(one, other) == bool(common)
            if common:
                assert graph.edges[one, other]["overlap"] == common


@given(some_ranges())
def test_the_heaviest_clique_is_the_peak(ranges: LiveRanges) -> None:
    graph = interference_graph(ranges)
    graph.remove_nodes_from([row for row in graph if ranges.end[row] == ranges.start[row]])
    _, heaviest = nx.max_weight_clique(graph, "size")
    assert heaviest == ranges.live_bytes.max(initial=0)


@given(some_ranges())
def test_holders_of_the_peak(ranges: LiveRanges) -> None:
    if not ranges.positions:
        with pytest.raises(InputError, match="nothing is ever alive"):
            peak_holders(ranges)
        return
    holders = peak_holders(ranges)
    assert sum(each.size for each in holders) == ranges.live_bytes.max()
    assert [each.size for each in holders] == sorted((e.size for e in holders), reverse=True)
    for each in holders:
        assert each.start <= ranges.peak < each.end
    if sum(each.size for each in holders):
        assert sum(each.share for each in holders) == pytest.approx(1)


@given(some_ranges())
def test_reuse_hands_on_the_last_block_that_is_large_enough(ranges: LiveRanges) -> None:
    graph = reuse_graph(ranges)
    for row in range(len(ranges)):
        fits = [
            each
            for each in range(len(ranges))
            if each != row
            and ranges.end[each] <= ranges.start[row]
            and ranges.size[each] >= ranges.size[row]
        ]
        before = list(graph.predecessors(row))
        assert len(before) == bool(fits)
        if fits:
            assert before[0] in fits
            assert ranges.end[before[0]] == max(ranges.end[each] for each in fits)


def test_only_the_rows_that_are_asked_for() -> None:
    ranges = ranges_of((10, 0, 4), (20, 1, 3), (30, 2, 5))
    assert sorted(interference_graph(ranges, [0, 2]).edges) == [(0, 2)]
    assert list(reuse_graph(ranges, [1]).nodes) == [1]


def test_graphs_too_large_to_look_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_EDGES", 2)
    ranges = ranges_of(*[(1, 0, 9)] * 3)
    with pytest.raises(InputError, match="more than 2 pairs are alive together"):
        interference_graph(ranges)
    assert len(interference_graph(ranges, [0, 1]).edges) == 1


def trained() -> ProgramTrace:
    """x and w go in; w is donated; y is used and released later than needed; z is kept."""
    step = executable(
        "step", 2, 2, cpu=assignment(("parameter", 40, {"parameter": 0, "output": 0}))
    )
    program = Program()
    w, x = program.put(40, 8)  # event 0
    v, y = program.run(step, [w, x], [40, 4], donate=[w], alias={0: w})  # event 1
    program.get(y)  # event 2
    program.mark("step")  # event 3
    program.drop(y)  # event 4
    program.run(step, [v, x], [40, 4])  # event 5
    program.drop(x)  # event 6
    return program.trace()


def test_lifetimes() -> None:
    w, x, v, y, _, z = lifetimes(trained())
    assert (w.made, w.last_use, w.end, w.donated) == (0, 1, 1, True)
    assert (x.made, x.last_use, x.end, x.donated) == (0, 5, 6, False)
    assert (v.made, v.last_use, v.end) == (1, 5, None)
    assert (y.made, y.last_use, y.end, y.size) == (1, 2, 4, 4)
    assert (z.made, z.last_use, z.end) == (5, 5, None)


def test_uses() -> None:
    graph = use_graph(trained())
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.edges[("buffer", 0), ("event", 1)]["donated"]
    assert not graph.edges[("buffer", 1), ("event", 1)]["donated"]
    assert graph.edges[("buffer", 0), ("buffer", 2)]["alias"]
    assert graph.nodes["event", 1]["what"] == "execute step"
    assert set(graph.successors(("buffer", 3))) == {("event", 2)}
    assert ("event", 4) not in graph
    assert ("buffer", 0) in nx.ancestors(graph, ("buffer", 5))


@pytest.mark.parametrize(
    ("buffer", "event", "why"),
    [
        (0, 0, "needed by event 1 (execute step)"),
        (1, 2, "needed by event 5 (execute step)"),
        (1, 6, "last used by event 5 (execute step), and held until event 6"),
        (3, 1, "needed by event 2 (transfer_out)"),
        (3, 3, "last used by event 2 (transfer_out), and held until event 4"),
        (2, 6, "last used by event 5 (execute step), and never released"),
        (5, 6, "last used by event 5 (execute step), and never released"),
    ],
)
def test_why_a_buffer_is_alive(buffer: int, event: int, why: str) -> None:
    assert why_alive(trained(), buffer, event) == why


def test_buffers_that_are_not_alive() -> None:
    with pytest.raises(InputError, match=r"buffer 3: not alive at event 6, only from event 1 to"):
        why_alive(trained(), 3, 6)
    with pytest.raises(InputError, match="not alive at event 2, only from event 5 to the end"):
        why_alive(trained(), 5, 2)
    with pytest.raises(InputError, match="buffer 9: there is none; the program has 6"):
        why_alive(trained(), 9, 0)
