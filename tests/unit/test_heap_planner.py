"""The rules of XLA's static planner, one by one."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_combine import heap_rule, lay_end_to_end, plan_heap, temps_last
from alloclab.simulator.heap_planner import BEST_OF_TWO, HeapBuffers, HeapPlan, Strategy, plan
from alloclab.simulator.heap_trace import ALLOC, FREE, SHARE_WITH, HeapTrace, from_heap_trace

STRATEGIES: tuple[Strategy, ...] = ("spatial", "temporal", "fast_merge")

#: size, lower, upper
Row = tuple[int, int, int]


def buffers(*rows: Row, **columns: npt.ArrayLike) -> HeapBuffers:
    return HeapBuffers.from_columns(*np.array(rows).T, **columns)


def offsets(strategy: Strategy, made: HeapBuffers, alignment: int = 1) -> list[int]:
    result: list[int] = plan(made, alignment=alignment, strategies=(strategy,)).offset.tolist()
    return result


def trace(*events: tuple[int, int] | tuple[int, int, int]) -> HeapTrace:
    columns = np.array([(*each, -1)[:3] for each in events]).T
    return HeapTrace(columns[0].astype(np.uint8), columns[1], columns[2])


def test_spatial_takes_the_largest_first_then_the_longest_then_the_lowest_id() -> None:
    assert offsets("spatial", buffers((1, 0, 9), (2, 0, 5))) == [2, 0]
    assert offsets("spatial", buffers((2, 0, 5), (2, 0, 9))) == [2, 0]
    assert offsets("spatial", buffers((2, 0, 5), (2, 0, 5), id=[8, 7])) == [2, 0]


def test_spatial_goes_by_the_range_of_the_first_member_of_a_group() -> None:
    # The group is live for 8 steps in all, its first member for 2; the other buffer for 4.
    made = buffers((2, 0, 2), (2, 0, 4), (2, 2, 8), group=[0, 1, 0])
    assert offsets("spatial", made) == [2, 0, 2]


def test_temporal_takes_the_longest_first_then_the_largest_then_the_lowest_id() -> None:
    assert offsets("temporal", buffers((9, 0, 2), (1, 0, 5))) == [1, 0]
    assert offsets("temporal", buffers((1, 0, 5), (9, 0, 5))) == [9, 0]
    assert offsets("temporal", buffers((2, 0, 5), (2, 0, 5), id=[8, 7])) == [2, 0]


def test_temporal_goes_from_the_groups_first_step_to_its_last() -> None:
    made = buffers((2, 0, 2), (2, 0, 4), (2, 5, 8), group=[0, 1, 0])
    assert offsets("temporal", made) == [0, 2, 0]


def test_fast_merge_goes_by_time_then_the_largest_then_the_lowest_id() -> None:
    assert offsets("fast_merge", buffers((9, 1, 5), (1, 0, 5))) == [1, 0]
    assert offsets("fast_merge", buffers((1, 0, 5), (9, 0, 5))) == [9, 0]
    assert offsets("fast_merge", buffers((2, 0, 5), (2, 0, 5), id=[8, 7])) == [2, 0]


#: Two gaps between two walls: what makes the gaps is gone by step 12, the walls stay to step 14.
#: All last 12 steps, so that the best-fit strategies stack them by size, then by id.
def stack(strategy: Strategy, sizes: tuple[int, int, int, int], last: Row) -> HeapBuffers:
    starts = (0, 1, 2, 3) if strategy == "fast_merge" else (0, 2, 0, 2)
    stops = (12, 14, 12, 14)
    return buffers(*zip(sizes, starts, stops, strict=True), last)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("sizes", "wanted", "chosen"),
    [((12, 11, 10, 9), 8, 23), ((12, 11, 9, 9), 9, 23), ((10, 10, 10, 10), 8, 0)],
    ids=["the smallest", "an exact fit", "the lowest of equals"],
)
def test_the_gap_that_is_chosen(
    strategy: Strategy, sizes: tuple[int, int, int, int], wanted: int, chosen: int
) -> None:
    assert offsets(strategy, stack(strategy, sizes, (wanted, 12, 13)))[-1] == chosen


# Where the largest comes first it finds no gap that is too small below a wall.
@pytest.mark.parametrize("strategy", ["temporal", "fast_merge"])
@pytest.mark.parametrize(("wanted", "chosen"), [(11, 0), (13, 42)])
def test_gaps_that_are_too_small(strategy: Strategy, wanted: int, chosen: int) -> None:
    assert offsets(strategy, stack(strategy, (12, 11, 10, 9), (wanted, 12, 13)))[-1] == chosen


def test_best_fit_looks_at_the_whole_live_range() -> None:
    # At 0 there is room in the last buffer's first steps only.
    made = buffers((8, 4, 9), (6, 0, 3), (4, 2, 6))
    assert offsets("spatial", made) == [0, 0, 8]


def test_best_fit_stays_clear_of_all_that_is_below() -> None:
    # The highest neighbour begins above the others but ends below the first.
    made = buffers((9, 0, 2), (4, 3, 5), (3, 3, 5), (2, 0, 5))
    assert offsets("spatial", made) == [0, 0, 4, 9]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_half_open(strategy: Strategy) -> None:
    assert offsets(strategy, buffers((4, 0, 3), (4, 3, 6))) == [0, 0]
    assert sorted(offsets(strategy, buffers((4, 0, 4), (4, 3, 6)))) == [0, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offsets_are_aligned_and_the_height_is_not(strategy: Strategy) -> None:
    result = plan(buffers((100, 0, 9), (90, 0, 9)), alignment=64, strategies=(strategy,))
    assert result.offset.tolist() == [0, 128]
    assert result.height == 218


def test_a_group_has_one_offset_and_the_size_of_its_largest() -> None:
    made = buffers((4, 0, 2), (16, 4, 6), (5, 0, 2), group=[0, 0, 2])
    result = plan(made, alignment=1, strategies=("spatial",))
    assert result.offset.tolist() == [0, 0, 16]
    assert result.height == 21


def test_best_fit_uses_the_holes_of_a_group_and_fast_merge_does_not() -> None:
    made = buffers((8, 0, 2), (8, 5, 7), (8, 2, 5), group=[0, 0, 2])
    assert offsets("spatial", made) == [0, 0, 0]
    assert offsets("fast_merge", made) == [0, 0, 8]


def test_fast_merge_leaves_padding_to_the_chunk_above() -> None:
    # The first is gone; the second holds the 8 bytes below it as well, so 12 bytes do not fit
    # below the second, though it begins at 16.
    made = buffers((8, 0, 2), (16, 1, 9), (12, 2, 9))
    assert offsets("fast_merge", made, alignment=16) == [0, 16, 32]
    assert offsets("fast_merge", buffers((8, 0, 2), (16, 1, 9), (8, 2, 9)), 16) == [0, 16, 0]


def test_fast_merge_frees_the_padding_with_its_chunk() -> None:
    made = buffers((4, 0, 2), (16, 1, 3), (40, 3, 9))
    assert offsets("fast_merge", made, alignment=16) == [0, 16, 0]


def test_fast_merge_joins_free_chunks_that_touch() -> None:
    made = buffers((4, 0, 5), (4, 1, 5), (4, 2, 9), (8, 5, 9))
    assert offsets("fast_merge", made) == [0, 4, 8, 0]


def test_the_lower_heap_wins_and_the_first_on_a_tie() -> None:
    tie = buffers((2, 0, 2), (1, 1, 9))
    for each in STRATEGIES:
        assert plan(tie, alignment=1, strategies=(each,)).height == 3
    assert plan(tie, alignment=1).strategy == "spatial"
    assert plan(tie, alignment=1, strategies=("temporal", "spatial")).strategy == "temporal"
    flat = buffers((4, 4, 5), (1, 4, 7), (3, 5, 10))
    assert plan(flat, alignment=1).height == 5
    assert plan(flat, alignment=1).strategy == "spatial"
    assert plan(flat, alignment=1, strategies=("temporal",)).height == 8
    long = buffers((4, 5, 6), (2, 1, 5), (3, 0, 4), (1, 4, 9))
    assert plan(long, alignment=1).height == 5
    assert plan(long, alignment=1).strategy == "temporal"
    assert plan(long, alignment=1, strategies=("spatial",)).height == 6


def test_a_buffer_of_no_bytes_is_at_0_and_takes_no_part() -> None:
    result = plan(buffers((0, 3, 3), (8, 0, 9), (0, 1, 5)), alignment=4)
    assert result.offset.tolist() == [0, 0, 0]
    assert result.height == 8
    assert plan(HeapBuffers.from_columns([], [], []), alignment=4).height == 0


@pytest.mark.parametrize(
    ("rows", "columns", "text"),
    [
        ([(1, 0, 1), (-1, 0, 1)], {}, "row 1: size is -1"),
        ([(1 << 61, 0, 1)], {}, "row 0: size is 2305843009213693952"),
        ([(1 << 60, 0, 1), (1 << 60, 0, 1)], {}, "together"),
        ([(1, 4, 4)], {}, "row 0: upper is 4, expected more than lower"),
        ([(0, 4, 3)], {}, "row 0: upper is 3"),
        ([(1, 0, 1), (1, 0, 1)], {"group": [0, 2]}, "row 1: group is 2"),
        ([(1, 0, 1), (1, 0, 1)], {"group": [1, 0]}, "row 0: group is 1"),
        ([(1, 0, 1), (1, 0, 1)], {"id": [5, 5]}, "row 1: id is 5"),
        ([(1, 0, 1), (1, 0, 1)], {"id": [5]}, "column id has shape"),
    ],
)
def test_bad_buffers(rows: list[Row], columns: dict[str, list[int]], text: str) -> None:
    with pytest.raises(InputError, match=text):
        buffers(*rows, **columns)


def test_bad_options() -> None:
    with pytest.raises(InputError, match="alignment is 0"):
        plan(buffers((1, 0, 1)), alignment=0)
    with pytest.raises(InputError, match="expected one or more of spatial, temporal, fast_merge"):
        plan(buffers((1, 0, 1)), alignment=1, strategies=("best",))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected one or more"):
        plan(buffers((1, 0, 1)), alignment=1, strategies=())


def test_a_trace_counts_its_events_as_steps_but_for_those_of_no_bytes() -> None:
    events = trace((ALLOC, 5), (ALLOC, 6), (ALLOC, 7), (FREE, 6), (FREE, 5), (FREE, 7))
    made = from_heap_trace(events, {5: 8, 6: 0, 7: 4})
    assert made.id.tolist() == [5, 6, 7]
    assert made.lower.tolist() == [0, 1, 1]
    assert made.upper.tolist() == [2, 2, 3]
    assert made.size.tolist() == [8, 0, 4]


def test_what_shares_is_in_the_group_of_the_first_with_the_largest_size() -> None:
    events = trace(
        (ALLOC, 5), (SHARE_WITH, 6, 5), (FREE, 5), (SHARE_WITH, 7, 6), (FREE, 6), (FREE, 7)
    )
    made = from_heap_trace(events, {5: 8, 6: 8, 7: 16})
    assert made.group.tolist() == [0, 0, 0]
    assert made.size.tolist() == [16, 16, 16]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([(ALLOC, 9)], "event 0: buffer 9 has no size"),
        ([(ALLOC, 5), (ALLOC, 5)], "event 1: buffer 5 is allocated a second time"),
        ([(FREE, 5)], "event 0: buffer 5 is freed before it is allocated"),
        ([(FREE, 5), (ALLOC, 5)], "event 0: buffer 5 is freed before it is allocated"),
        ([(ALLOC, 5), (FREE, 5), (FREE, 5)], "event 2: buffer 5 is freed a second time"),
        ([(ALLOC, 5)], "buffer 5 is never freed"),
        ([(SHARE_WITH, 5, 6)], "event 0: buffer 5 shares with 6, never allocated"),
        ([(3, 5)], "event 0: kind is 3"),
    ],
)
def test_bad_traces(events: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(InputError, match=text):
        from_heap_trace(trace(*events), {5: 8, 6: 8})


def test_rules_of_the_compilers() -> None:
    assert heap_rule("cpu").alignment == 64
    assert heap_rule("cuda:h100", color=1).alignment == 256
    assert heap_rule("tpu:v5e").alignment == 16384
    assert heap_rule("tpu:v3", color=2).alignment == 4
    assert heap_rule("tpu:v3", color=6).alignment == 512
    for each in (heap_rule("cpu"), heap_rule("cuda"), heap_rule("tpu", color=6)):
        assert each.strategies == BEST_OF_TWO and not each.fallback
    with pytest.raises(InputError, match="none for target tpu:v5e, color 1"):
        heap_rule("tpu:v5e", color=1)
    with pytest.raises(InputError, match="expected cpu, cuda or tpu"):
        heap_rule("rocm")


def test_hbm_falls_back_where_memory_is_short() -> None:
    limit = 10 << 30
    made = buffers((1 << 20, 0, 2), (2 << 20, 1, 3))
    height = 3 << 20
    most = limit - (5 << 29) - height
    rule = heap_rule("tpu:v5e")
    assert plan_heap(made, rule, others=most, limit=limit).strategy == "fast_merge"
    assert plan_heap(made, rule, others=most + 1, limit=limit).strategy == "spatial"
    assert plan_heap(made, rule, others=most + 1).strategy == "fast_merge"
    assert plan_heap(made, heap_rule("cpu"), others=most + 1, limit=limit).strategy == "spatial"


def test_pieces_lie_end_to_end() -> None:
    assert lay_end_to_end([], 64) == ([], 0)
    assert lay_end_to_end([1, 64, 65, 3], 64) == ([0, 64, 128, 256], 259)


@pytest.mark.parametrize(
    ("kinds", "order"),
    [
        ("", []),
        ("..tt", [0, 1, 2, 3]),
        ("tt..", [3, 2, 1, 0]),
        ("t.t.", [3, 1, 2, 0]),
        ("ttt.", [3, 1, 2, 0]),
        ("t....", [4, 1, 2, 3, 0]),
    ],
)
def test_temporary_allocations_move_last_and_lose_their_order(kinds: str, order: list[int]) -> None:
    assert temps_last([each == "t" for each in kinds]) == order


@st.composite
def problems(draw: st.DrawFn) -> tuple[HeapBuffers, int]:
    """Buffers, some in groups whose members are live at different times, and an alignment."""
    count = draw(st.integers(0, 14))
    rows = []
    for _ in range(count):
        lower = draw(st.integers(0, 12))
        rows.append((draw(st.integers(0, 9)), lower, lower + draw(st.integers(1, 6))))
    group = list(range(count))
    for row in range(1, count):
        leader = draw(st.integers(0, row))
        if group[leader] == leader:
            group[row] = leader
    columns = np.array(rows).reshape(-1, 3).T
    ids = draw(st.permutations(range(count)))
    made = HeapBuffers.from_columns(*columns, id=np.array(ids, int), group=np.array(group, int))
    return made, draw(st.sampled_from([1, 2, 4, 3]))


def members(made: HeapBuffers) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, leader in enumerate(made.group.tolist()):
        if made.size[row]:
            found.setdefault(leader, []).append(row)
    return found


def slowly(made: HeapBuffers, alignment: int, strategy: Strategy) -> list[int]:
    """The same rules, said differently: by steps and lists of what is taken, without NumPy."""
    rows = members(made)
    size = {each: max(int(made.size[row]) for row in rows[each]) for each in rows}
    begin = {each: min(int(made.lower[row]) for row in rows[each]) for each in rows}
    end = {each: max(int(made.upper[row]) for row in rows[each]) for each in rows}

    def key(each: int) -> tuple[int, ...]:
        number = int(made.id[each])
        if strategy == "spatial":
            return -size[each], int(made.lower[each] - made.upper[each]), number
        if strategy == "temporal":
            return begin[each] - end[each], -size[each], number
        return begin[each], -size[each], number

    merge = strategy == "fast_merge"
    steps = {
        each: set(range(begin[each], end[each]))
        if merge
        else {t for row in rows[each] for t in range(int(made.lower[row]), int(made.upper[row]))}
        for each in rows
    }
    taken: dict[int, tuple[int, int]] = {}
    offset = dict.fromkeys(range(len(made)), 0)
    for each in sorted(rows, key=key):
        now = {begin[each]} if merge else steps[each]
        free, reached = [], 0
        for low, high in sorted(taken[other] for other in taken if steps[other] & now):
            free.append((reached, low))
            reached = max(reached, high)
        free.append((reached, 1 << 40))
        usable = [(high - -(-low // alignment) * alignment, low) for low, high in free]
        _, low = min(chunk for chunk in usable if chunk[0] >= size[each])
        at = -(-low // alignment) * alignment
        taken[each] = (low if merge else at, at + size[each])
        for row in rows[each]:
            offset[row] = at
    return list(offset.values())


@settings(max_examples=300)
@given(problems(), st.sampled_from(STRATEGIES))
def test_the_quick_way_is_the_slow_way(
    problem: tuple[HeapBuffers, int], strategy: Strategy
) -> None:
    made, alignment = problem
    assert offsets(strategy, made, alignment) == slowly(made, alignment, strategy)


def top(made: HeapBuffers, result: HeapPlan, row: int) -> int:
    return int(result.offset[row] + made.size[row])


@given(problems(), st.sampled_from([*((each,) for each in STRATEGIES), BEST_OF_TWO]))
def test_every_plan_is_valid(
    problem: tuple[HeapBuffers, int], strategies: tuple[Strategy, ...]
) -> None:
    made, alignment = problem
    result = plan(made, alignment=alignment, strategies=strategies)
    again = plan(made, alignment=alignment, strategies=strategies)
    assert result.offset.tolist() == again.offset.tolist()
    assert (result.height, result.strategy) == (again.height, again.strategy)
    assert not (result.offset % alignment).any()
    assert result.height >= max((top(made, result, row) for row in range(len(made))), default=0)
    load = [0] * 20
    for rows in members(made).values():
        steps = {t for row in rows for t in range(int(made.lower[row]), int(made.upper[row]))}
        for step in steps:
            load[step] += min(int(made.size[row]) for row in rows)
    assert result.height >= max(load)
    for a in range(len(made)):
        for b in range(a):
            together = made.lower[a] < made.upper[b] and made.lower[b] < made.upper[a]
            if made.group[a] == made.group[b]:
                assert not made.size[a] or not made.size[b] or result.offset[a] == result.offset[b]
            elif together and made.size[a] and made.size[b]:
                below, above = (a, b) if result.offset[a] < result.offset[b] else (b, a)
                assert top(made, result, below) <= result.offset[above]
