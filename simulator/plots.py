"""Figures of replays: memory, the address space and fragmentation over events or time.

Figures are plain `matplotlib.figure.Figure` objects: no window, no global state.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alloclab.policies.errors import InputError
from alloclab.policies.units import format_size
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.plot_addresses import draw_addresses
from alloclab.simulator.plot_panels import (
    draw_fragmentation,
    draw_free,
    draw_memory,
    free_samples,
    memory_top,
    name_of,
)
from alloclab.simulator.plot_style import (
    QUIET,
    SUBTITLE,
    WIDTH,
    Horizontal,
    XAxis,
    draw_marks,
    plain,
)
from alloclab.simulator.replay import ReplayResult

Kind = Literal["overview", "memory", "addresses", "fragmentation"]

FORMATS = (".png", ".svg", ".pdf")


def draw(results: Sequence[ReplayResult], kind: Kind = "overview", x: XAxis = "event") -> Figure:
    """Draw the figure of that name.

    Raises:
        InputError: several results where the figure shows one, no such figure or axis.
    """
    if kind == "memory":
        return plot_memory(results, x)
    if kind == "fragmentation":
        return plot_fragmentation(results, x)
    if kind not in get_args(Kind):
        raise InputError(f"plot: no figure {kind!r}; there are {', '.join(get_args(Kind))}")
    if len(results) != 1:
        raise InputError(f"plot: {kind} shows one policy, found {len(results)}")
    return (plot_addresses if kind == "addresses" else plot_overview)(results[0], x)


def plot_memory(results: Sequence[ReplayResult], x: XAxis = "event") -> Figure:
    """Memory over time, a panel for each result, all on one scale.

    Each panel shows the bytes in use and those of the pool, the limit, and as a surface the
    ideal: the bytes live as requested. The first refused request is marked.

    Raises:
        InputError: no results; ``x`` is "time" and a trace has no times.

    >>> from alloclab.policies.fits import BestFit, FirstFit
    >>> from alloclab.simulator.replay import replay_requests
    >>> from alloclab.simulator.requests import RequestTrace
    >>> trace = RequestTrace.from_arrays([1, 1, 0], [0, 1, 0], [3 << 20, 1 << 20, 0])
    >>> figure = plot_memory([replay_requests(trace, each()) for each in (FirstFit, BestFit)])
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['memory [MiB]', 'memory [MiB]']
    """
    across = _horizontals(results, x)
    figure, panels = _page(results, "Memory", [2.2 if len(results) <= 4 else 1.7] * len(results))
    top = max(map(memory_top, results))
    for axes, result, along in zip(panels, results, across, strict=True):
        draw_memory(axes, result, along, top)
        _finish(axes, result, along, labelled=True, last=axes is panels[-1])
        _subtitle(axes, result, named=True)
    tallest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, tallest)
    return figure


def plot_addresses(result: ReplayResult, x: XAxis = "event") -> Figure:
    """The address space over time: each allocation a rectangle, coloured by label.

    Raises:
        InputError: ``x`` is "time" and the trace has no times.
    """
    (across,) = _horizontals([result], x)
    figure, (axes,) = _page([result], "Address space", [4.6])
    draw_addresses(axes, result, across)
    _finish(axes, result, across, labelled=True, last=True)
    _subtitle(axes, result)
    return figure


def plot_fragmentation(results: Sequence[ReplayResult], x: XAxis = "event") -> Figure:
    """Fragmentation of all results over time, and below it the free memory of each one's pool.

    Fragmentation is external (1 - largest free block / all free) and internal (in use but not
    requested / in use). Long traces are sampled.

    Raises:
        InputError: no results; ``x`` is "time" and a trace has no times.
    """
    across = _horizontals(results, x)
    samples = [free_samples(each) for each in results]
    heights = [2.4] + [1.4] * len(results)
    figure, panels = _page(results, "Fragmentation", heights, subtitled=len(results) == 1)
    draw_fragmentation(panels[0], results, samples, across)
    longest = max(range(len(results)), key=lambda each: float(across[each].edges[-1]))
    _finish(panels[0], results[longest], across[longest], labelled=True, last=False,
            marks=len(results) == 1)  # fmt: skip
    for axes, result, free, along in zip(panels[1:], results, samples, across, strict=True):
        draw_free(axes, result, free, along)
        _finish(axes, result, along, labelled=len(results) > 1, last=axes is panels[-1])
        if len(results) > 1:
            _subtitle(axes, result, named=True)
    if len(results) == 1:
        _subtitle(panels[0], results[0])
    figure.align_ylabels(panels)
    return figure


def plot_overview(result: ReplayResult, x: XAxis = "event") -> Figure:
    """Memory, the address space, free memory and fragmentation, one above the other.

    Raises:
        InputError: ``x`` is "time" and the trace has no times.
    """
    (across,) = _horizontals([result], x)
    samples = [free_samples(result)]
    figure, panels = _page([result], "", [2.0, 3.8, 1.4, 1.4])
    draw_memory(panels[0], result, across, memory_top(result))
    draw_addresses(panels[1], result, across)
    draw_free(panels[2], result, samples[0], across)
    draw_fragmentation(panels[3], [result], samples, [across])
    for axes in panels:
        _finish(axes, result, across, labelled=axes is panels[0], last=axes is panels[-1])
    _subtitle(panels[0], result)
    figure.align_ylabels(panels)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as .png, .svg or .pdf, whole or not at all.

    The same figure gives the same bytes: nothing in them depends on the time.

    Raises:
        InputError: another ending, or the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"{path}: cannot draw {suffix or 'no ending'}; use {', '.join(FORMATS)}")
    undated = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with (
        atomic_write(path, binary=True) as file,
        matplotlib.rc_context({"svg.hashsalt": "alloclab"}),
        warnings.catch_warnings(),
    ):
        # A character that the font lacks, in a name from a trace, is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format=suffix[1:], dpi=150, metadata=undated)


# --- parts --------------------------------------------------------------------------------


def _horizontals(results: Sequence[ReplayResult], x: XAxis) -> list[Horizontal]:
    if not results:
        raise InputError("plot: there are no results to draw")
    return [Horizontal.of(each, x) for each in results]


def _page(
    results: Sequence[ReplayResult], what: str, heights: Sequence[float], *, subtitled: bool = True
) -> tuple[Figure, list[Axes]]:
    """An empty figure with a title and panels of these heights (inches), one above the other."""
    figure = Figure(figsize=(WIDTH, 1.0 + 1.12 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=list(heights))[:, 0]
    first = results[0]
    trace = plain(first.trace.name.split(" (")[0], 48)  # what follows tells how it was estimated
    parts = [what, trace]
    if len(results) == 1:
        limit = "" if first.limit is None else f", limit {format_size(first.limit)}"
        parts.insert(1, f"{name_of(first)}{limit}")
    title = ": ".join(each for each in parts if each)
    grid[0].set_title(title, loc="left", fontsize=11, pad=28 if subtitled else 8, parse_math=False)
    return figure, list(grid)


def _numbers(result: ReplayResult) -> str:
    """Peaks and lower bound, in one line."""
    stats = result.stats
    return (
        f"peak in use {format_size(stats.peak_bytes_in_use)}, "
        f"pool {format_size(stats.peak_pool_bytes)}, "
        f"lower bound {format_size(result.trace.lower_bound_bytes)}"
    )


def _subtitle(axes: Axes, result: ReplayResult, *, named: bool = False) -> None:
    """The numbers of a result above its panel, between the title and the texts of the marks."""
    text = _numbers(result)
    if named:
        text = f"{name_of(result)}: {text}"
    if result.oom is not None:
        at = "" if named else f" at event {result.oom.event:,}"
        text = f"{text}, out of memory{at} ({result.oom.cause.replace('_', ' ')})"
    axes.annotate(text, (0, 1), xycoords="axes fraction", xytext=(0, 13), fontsize=SUBTITLE,
                  textcoords="offset points", color=QUIET, parse_math=False)  # fmt: skip


def _finish(
    axes: Axes,
    result: ReplayResult,
    across: Horizontal,
    *,
    labelled: bool,
    last: bool,
    marks: bool = True,
) -> None:
    """The horizontal axis, marks and frame of a panel."""
    across.dress(axes)
    axes.spines[["top", "right"]].set_visible(False)
    if not last:
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)
    if marks:
        draw_marks(axes, result, across, labelled=labelled)
