"""What figures show is what the replay says: data, units, colours, texts."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from alloclab.policies.base import Policy
from alloclab.policies.bfc import Bfc
from alloclab.policies.errors import InputError
from alloclab.policies.fits import BestFit, FirstFit
from alloclab.policies.ideal import Ideal
from alloclab.simulator.plot_addresses import (
    RASTER_FROM,
    SIZE_COLOURS,
    AddressAxis,
    classify,
)
from alloclab.simulator.plot_style import COLOUR_OF, OTHER, PALETTE, REFUSED
from alloclab.simulator.plots import (
    draw,
    plot_addresses,
    plot_fragmentation,
    plot_memory,
    plot_overview,
)
from alloclab.simulator.replay import ReplayResult, replay_requests
from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.timeline import free_memory, outline, sample_events

MIB, GIB = 1 << 20, 1 << 30
TEMP, OUTPUT = 1, 2


def trace_of(sizes: Sequence[int], name: str = "") -> RequestTrace:
    """Positive: allocate that many bytes; -n: free the nth allocation, counted from 1; 0: mark."""
    op = [1 if size > 0 else 0 if size else 2 for size in sizes]
    numbers = np.cumsum(np.array(sizes) > 0)
    ids = [int(number) if size > 0 else -size for number, size in zip(numbers, sizes, strict=True)]
    return RequestTrace.from_columns(
        op,
        ids,
        np.maximum(sizes, 0),
        label=[3 if each == 2 else OUTPUT if at % 2 else TEMP for at, each in enumerate(op)],
        labels=("", "temp", "output", "step"),
        time_us=np.arange(len(op)) * 500.0,
        name=name,
    )


def replayed(
    trace: RequestTrace, policy: Policy | None = None, limit: int | None = None, **more: Any
) -> ReplayResult:
    policy = policy or FirstFit()
    return replay_requests(trace, policy, limit=limit, search_limit=False, **more)


#: Under 8 MiB event 6 asks for 3 MiB and is refused: 4 MiB are free, but in two pieces.
COMB = trace_of(
    [0, MIB, 2 * MIB, MIB, 2 * MIB, -2, 3 * MIB, -1, 512, -4], name="comb (estimate: none)"
)


def random_trace(count: int, seed: int = 0) -> RequestTrace:
    generator = np.random.default_rng(seed)
    live: list[int] = []
    steps: list[int] = []
    made = 0
    while len(steps) < count:
        if live and generator.random() < 0.47:
            steps.append(-live.pop(int(generator.integers(len(live)))))
        else:
            made += 1
            live.append(made)
            steps.append(int(2 ** generator.uniform(6, 20)))
    return trace_of(steps)


def layer(axes: Axes, gid: str) -> PolyCollection:
    (found,) = [each for each in axes.collections if each.get_gid() == gid]
    assert isinstance(found, PolyCollection)
    return found


def boxes(collection: PolyCollection) -> np.ndarray:
    """Left, bottom, right and top of each rectangle."""
    extents = [each.get_extents().extents for each in collection.get_paths()]
    return np.array(extents, np.float64).reshape(-1, 4)


def texts(figure: Figure) -> list[str]:
    found = [axes.get_title(loc="left") for axes in figure.axes]
    return found + [each.get_text() for axes in figure.axes for each in axes.texts]


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [] if legend is None else [each.get_text() for each in legend.get_texts()]


def line(axes: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    (found,) = [each for each in axes.lines if label in (each.get_label(), each.get_gid())]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


# --- rectangles ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FirstFit(), BestFit(), Bfc(), Ideal()], ids=str)
@pytest.mark.parametrize("x", ["event", "time"])
def test_each_allocation_is_a_rectangle(policy: Policy, x: Any) -> None:
    trace = random_trace(300)
    result = replayed(trace, policy, limit=20 * MIB)
    axes = plot_addresses(result, x).axes[0]
    placed = np.flatnonzero(result.placements >= 0)
    assert len(placed)
    unit = re.fullmatch(r"address \[(.*)\]", axes.get_ylabel())
    assert unit is not None
    scale = {"MiB": MIB, "KiB": 1024}[unit[1]]
    step = 1 if x == "event" else 0.5 * 299 / 300  # the last stays for the mean step
    at = np.append(np.arange(300) * (1 if x == "event" else 0.5), 0)
    at[300] = at[299] + step
    low = result.placements[placed]
    expected = np.stack(
        [
            at[trace.alloc_events[placed]],
            low / scale,
            at[trace.free_events[placed]],
            (low + result.outcome.taken[placed]) / scale,
        ],
        axis=1,
    )
    np.testing.assert_allclose(boxes(layer(axes, "allocations")), expected)
    assert axes.get_xlabel() == ("event" if x == "event" else "time [ms]")
    assert axes.get_xlim() == (0, at[300])


def test_refused_requests_have_no_rectangle_but_a_mark() -> None:
    result = replayed(COMB, limit=8 * MIB)
    assert result.oom is not None
    axes = plot_addresses(result).axes[0]
    assert len(layer(axes, "allocations").get_paths()) == COMB.num_allocs - 1
    at, _ = line(axes, "oom")
    assert at.tolist() == [6, 6]
    (refused,) = [each for each in axes.texts if each.get_text() == "refused: 3.00 MiB"]
    assert refused.get_color() == REFUSED
    assert "step" in [each.get_text() for each in axes.texts]


@pytest.mark.parametrize("policy", [Bfc(growth=True), Ideal()], ids=str)
def test_the_pool_lies_below_them(policy: Policy) -> None:
    result = replayed(COMB, policy, limit=64 * MIB)
    axes = plot_addresses(result).axes[0]
    drawn = boxes(layer(axes, "pool"))
    expected = [
        (
            each.taken_at,
            each.start / MIB,
            each.given_back if each.given_back >= 0 else len(COMB),
            (each.start + each.size) / MIB,
        )
        for each in result.outcome.regions
    ]
    np.testing.assert_allclose(drawn, expected)


def test_many_rectangles_are_drawn_as_pixels() -> None:
    few, many = (plot_addresses(replayed(random_trace(count))) for count in (100, 8000))
    assert not layer(few.axes[0], "allocations").get_rasterized()
    crowd = layer(many.axes[0], "allocations")
    assert len(crowd.get_paths()) > RASTER_FROM
    assert crowd.get_rasterized()


# --- colours ------------------------------------------------------------------------------


def test_labels_have_colours_of_their_own() -> None:
    result = replayed(COMB)
    axes = plot_addresses(result).axes[0]
    drawn = np.asarray(layer(axes, "allocations").get_facecolor()).tolist()
    faces = [to_hex(each).upper() for each in drawn]
    labels = [COMB.labels[each] for each in COMB.label[COMB.alloc_events]]
    assert faces == [COLOUR_OF[each] for each in labels]
    assert legend_of(axes) == ["temp", "output", "free in the pool"]


def test_unknown_labels_share_what_is_left() -> None:
    names = ("temp", *(f"kind {each}" for each in range(9)))
    sizes = [1000 * (10 - each) for each in range(10)]
    trace = RequestTrace.from_columns(
        [1] * 10, range(10), sizes, label=range(10), labels=names, name="kinds"
    )
    classes = classify(replayed(trace), np.arange(10))
    colours = dict(zip(classes.names, classes.colours, strict=True))
    assert colours["temp"] == COLOUR_OF["temp"]
    assert [colours[f"kind {each}"] for each in range(6)] == [
        each for each in PALETTE if each != COLOUR_OF["temp"]
    ]
    assert colours["other labels"] == OTHER
    assert classes.of.tolist() == list(range(10))


def test_without_labels_sizes_are_coloured() -> None:
    trace = RequestTrace.from_arrays([1] * 3, range(3), [100, MIB, 8 * GIB])
    classes = classify(replayed(trace), np.arange(3))
    assert classes.names == ["up to 4.00 KiB", "up to 1.00 MiB", "larger"]
    assert [classes.colours[each] for each in classes.of] == [
        SIZE_COLOURS[0],
        SIZE_COLOURS[2],
        SIZE_COLOURS[6],
    ]


# --- the address axis ---------------------------------------------------------------------


def test_what_is_never_used_is_folded_away() -> None:
    result = replayed(trace_of([MIB, MIB, -1, MIB]), Bfc(), limit=1 << 30)
    axes = plot_addresses(result).axes[0]
    assert "1022.00 MiB never used" in [each.get_text() for each in axes.texts]
    heights = axes.transData.transform(
        [(0, each) for each in (0, 1022, 1023, 1024)]
    )[:, 1]  # fmt: skip
    fold, first, second = np.diff(heights)
    assert first == pytest.approx(second)
    assert 0.02 * first < fold < 0.3 * first
    assert all(0 <= each <= 1024 for each in axes.get_yticks())
    assert 1024 in axes.get_yticks()


def test_a_used_address_space_is_not_folded() -> None:
    low, high = np.array([0, 600]), np.array([400, 1000])
    assert AddressAxis.of(low, high, 0, 1000) == AddressAxis(0, 1000, (), 1000)
    folded = AddressAxis.of(low, high, 0, 9000)
    assert folded == AddressAxis(0, 9000, ((1000, 9000),), 1000)


# --- lines --------------------------------------------------------------------------------


def test_memory_lines_are_the_timelines() -> None:
    result = replayed(COMB, Bfc(growth=True), limit=8 * MIB, device="toy")
    (axes,) = plot_memory([result]).axes
    assert axes.get_ylabel() == "memory [MiB]"
    assert axes.get_xlabel() == "event"
    for name, values in {"in use": result.in_use, "pool": result.pool}.items():
        at, drawn = line(axes, name)
        assert at.tolist() == list(range(len(COMB) + 1))
        np.testing.assert_allclose(drawn[:-1] * MIB, values)
        assert drawn[-1] == drawn[-2]
    (ideal,) = [each for each in axes.collections if each.get_label() == "ideal: live bytes"]
    peak = np.asarray(ideal.get_paths()[0].vertices)[:, 1].max()
    assert peak * MIB == pytest.approx(COMB.lower_bound_bytes)
    assert set(line(axes, "limit")[1]) == {8}
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 8


def test_a_limit_far_above_is_named_only() -> None:
    result = replayed(COMB, Bfc(), limit=80 * GIB)
    (axes,) = plot_memory([result]).axes
    assert "limit, off the scale:\n80.00 GiB" in legend_of(axes)
    assert "pool, off the scale:\n80.00 GiB" in legend_of(axes)
    assert axes.get_ylim()[1] < 20


def test_policies_share_one_memory_scale() -> None:
    results = [replayed(COMB, each, 40 * MIB) for each in (Ideal(), Bfc(growth=True), BestFit())]
    figure = plot_memory(results)
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "event"]
    for name in ("ideal", "bfc(growth=true)", "best_fit"):
        assert any(each.startswith(f"{name}: peak in use ") for each in texts(figure))


def test_fragmentation_lines_are_those_of_the_result() -> None:
    result = replayed(COMB, limit=8 * MIB)
    figure = plot_fragmentation([result])
    share, free = figure.axes
    assert share.get_ylabel() == "fragmentation [%]"
    assert free.get_ylabel() == "free [MiB]"
    events = range(len(COMB))
    expected = [100 * result.fragmentation_at(each) for each in events]
    assert max(expected) > 10
    np.testing.assert_allclose(line(share, "external")[1][:-1], expected)
    in_use = np.where(result.in_use > 0, result.in_use, np.nan)  # no share of nothing
    inside = 100 * (result.in_use - result.requested) / in_use
    np.testing.assert_allclose(line(share, "internal")[1][:-1], inside)
    expected = [result.largest_free(each) / MIB for each in events]
    np.testing.assert_allclose(line(free, "largest block")[1][:-1], expected)


def test_fragmentation_of_several_is_overlaid() -> None:
    results = [replayed(COMB, each, 64 * MIB) for each in (FirstFit(), Bfc(growth=True))]
    figure = plot_fragmentation(results)
    assert len(figure.axes) == 3
    assert legend_of(figure.axes[0]) == ["external", "internal", "first_fit", "bfc(growth=true)"]
    external = [each for each in figure.axes[0].lines if each.get_gid() == "external"]
    assert [each.get_color() for each in external] == list(PALETTE[:2])


def test_overview_stacks_all_over_one_axis() -> None:
    figure = plot_overview(replayed(COMB, limit=8 * MIB, device="toy"))
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "memory [MiB]", "address [MiB]", "free [MiB]", "fragmentation [%]"
    ]  # fmt: skip
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 10)}
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "", "event"]
    assert texts(figure)[0] == "first_fit on toy, limit 8.00 MiB: comb"
    assert (
        "peak in use 6.00 MiB, pool 6.00 MiB, lower bound 7.00 MiB, "
        "out of memory at event 6 (fragmentation)"
    ) in texts(figure)


def test_marks_are_labelled_as_far_as_they_fit() -> None:
    def shown(steps: list[int]) -> tuple[int, int]:
        (axes,) = plot_memory([replayed(trace_of(steps))]).axes
        (lines,) = [each for each in axes.collections if each.get_gid() == "marks"]
        named = [each for each in axes.texts if each.get_text() == "step"]
        return len(lines.get_paths()), len(named)

    assert shown([9, 0, 9, 0, 9]) == (2, 2)
    drawn, named = shown([9, *[0] * 50, 9])
    assert drawn == 50
    assert 5 < named < 25


def test_texts_from_a_trace_are_not_mathematics() -> None:
    trace = RequestTrace.from_columns(
        [1, 1, 2], [0, 1, 0], [8, 8, 0], label=[0, 1, 2], labels=("$\\frac$", "_a\n$b$", "$\\frac"),
        name="$\\name$",
    )  # fmt: skip
    figure = plot_overview(replayed(trace))
    figure.draw_without_rendering()
    assert texts(figure)[0] == "first_fit: $\\name$"
    assert "$\\frac" in texts(figure)


# --- errors -------------------------------------------------------------------------------


def test_what_cannot_be_drawn() -> None:
    timeless = replayed(RequestTrace.from_arrays([1, 0], [0, 0], [8, 0]))
    with pytest.raises(InputError, match="plot: the trace has no times; draw it over events"):
        plot_overview(timeless, "time")
    with pytest.raises(InputError, match="x axis can be event or time, found 'step'"):
        plot_memory([timeless], "step")  # type: ignore[arg-type]
    for plot in (plot_memory, plot_fragmentation):
        with pytest.raises(InputError, match="no results"):
            plot([])
    with pytest.raises(InputError, match="plot: addresses shows one policy, found 2"):
        draw([timeless, timeless], "addresses")
    with pytest.raises(InputError, match="no figure 'pie'; there are overview, memory, addr"):
        draw([timeless], "pie")  # type: ignore[arg-type]


# --- reductions ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FirstFit(), Bfc(growth=True), Bfc(), Ideal()], ids=str)
def test_free_memory_is_that_of_the_result(policy: Policy) -> None:
    result = replayed(random_trace(400, seed=1), policy, limit=4 * MIB)
    assert result.oom is not None
    events = np.arange(400)
    free = free_memory(result, events)
    assert free.largest.tolist() == [result.largest_free(each) for each in range(400)]
    assert free.total.tolist() == [int(result.free_blocks(each).sum()) for each in range(400)]
    np.testing.assert_allclose(
        free.external_fragmentation, [result.fragmentation_at(each) for each in range(400)]
    )


def test_samples_hold_the_peak_and_the_failure() -> None:
    result = replayed(random_trace(2000), limit=4 * MIB)
    assert result.oom is not None
    assert result.peak_event is not None
    events = sample_events(result, 50)
    assert len(events) <= 50
    assert np.all(np.diff(events) > 0)
    assert {0, 1999, result.peak_event, result.oom.event} <= set(events.tolist())


@pytest.mark.parametrize("length", [0, 1, 7, 100, 1001, 12345])
def test_an_outline_keeps_all_extremes(length: int) -> None:
    values = np.random.default_rng(length).integers(0, 1 << 40, length).cumsum() % (1 << 38)
    rows = outline(values, 100)
    assert len(rows) <= 102
    assert np.all(np.diff(rows) > 0)
    if length:
        assert (rows[0], rows[-1]) == (0, length - 1)
        assert values[rows].max() == values.max()
        assert values[rows].min() == values.min()
    if length > 100:
        tail = int(rows[-4])
        assert values[tail:].max() == values[rows[-4:]].max()
