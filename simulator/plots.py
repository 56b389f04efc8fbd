"""Figures of a replay: memory, the address space and fragmentation over time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, KIB, MIB, TIB, format_size
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.replay import ReplayResult
from alloclab.simulator.requests import MARK

Kind = Literal["overview", "memory", "addresses", "fragmentation"]
XAxis = Literal["event", "time"]
Floats = npt.NDArray[np.float64]

FORMATS = (".png", ".svg", ".pdf")

#: The palette of Okabe and Ito, which people with any colour vision can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
OTHER, POOL, LIMIT = "#999999", "#BBBBBB", "#D55E00"

#: Above this many rectangles the layer is drawn as pixels, also in SVG and PDF.
RASTER_FROM = 3000
#: Lines are thinned to about this many points: more than a page has pixels.
LINE_POINTS = 4000
#: Fragmentation needs the whole map of the memory; it is taken at this many events.
SAMPLES = 400
#: More step marks than this are not labelled.
LABELLED_MARKS = 12
#: Allocations without labels are told apart by size, in bytes.
SIZE_CLASSES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 4 * GIB)


def draw(results: Sequence[ReplayResult], kind: Kind = "overview", x: XAxis = "event") -> Figure:
    """Draw replays over the events or over time.

    ``memory`` and ``fragmentation`` have a panel for each result; ``addresses`` and ``overview``
    (all three, one above the other) show exactly one.

    Raises:
        InputError: more than one result where one is needed, or no times in the trace.
    """
    if kind in ("overview", "addresses") and len(results) != 1:
        raise InputError(f"plot: {kind} shows one policy, found {len(results)}")
    if x == "time" and np.ptp(results[0].trace.time_us) == 0:
        raise InputError("plot: the trace has no times; draw it over events")
    panels: list[tuple[ReplayResult, Callable[[Axes, ReplayResult, Floats], None]]]
    if kind == "overview":
        panels = [(results[0], each) for each in (_memory, _addresses, _fragmentation)]
    else:
        drawing = {"memory": _memory, "addresses": _addresses, "fragmentation": _fragmentation}
        panels = [(each, drawing[kind]) for each in results]
    heights = [2 if drawing is _addresses else 1 for _, drawing in panels]
    figure = Figure(figsize=(9, 1.2 + 2.4 * sum(heights)), layout="constrained")
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for axes, (result, drawing) in zip(grid, panels, strict=True):
        position = _positions(result, x)
        axes.margins(x=0)
        drawing(axes, result, position)
        _marks(axes, result, position, labelled=axes is grid[0])
        _failure(axes, result, position, labelled=axes is grid[0] or kind != "overview")
        if kind != "overview":
            axes.set_title(_title(result), fontsize="medium", pad=14)
    grid[-1].set_xlabel("time [ms]" if x == "time" else "event")
    if x == "event":
        grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind == "overview":
        figure.suptitle(_title(results[0]), fontsize="medium")
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as .png, .svg or .pdf; the same figure gives the same bytes.

    Raises:
        InputError: another ending.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"{path}: cannot draw {suffix or 'no ending'}; use {', '.join(FORMATS)}")
    dated = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with atomic_write(path, binary=True) as file:
        figure.savefig(file, format=suffix[1:], dpi=150, metadata=dated)


# --- panels -------------------------------------------------------------------------------


def _memory(axes: Axes, result: ReplayResult, position: Floats) -> None:
    """In use, pool, live bytes and the limit."""
    live = result.trace.live_bytes
    top = max(result.stats.peak_bytes_in_use, int(live.max(initial=0)), 1)
    unit, scale = _unit(top)
    lines = [
        ("pool", result.pool, POOL, "-", 2.0),
        ("in use", result.in_use, PALETTE[0], "-", 1.2),
        ("live, as requested", live, "black", ":", 1.0),
    ]
    for name, values, colour, style, width in lines:
        high = int(values.max(initial=0))
        if high > 4 * top:  # a preallocated pool would flatten all else
            axes.plot([], [], color=colour, lw=width, label=f"{name}: {format_size(high)}")
            continue
        at, value = _thin(position, values)
        axes.plot(at, value / scale, style, color=colour, lw=width, label=name,
                  drawstyle="steps-post")  # fmt: skip
    if result.limit is not None:
        name = f"limit: {format_size(result.limit)}"
        if result.limit <= 4 * top:
            axes.axhline(result.limit / scale, color=LIMIT, lw=1, ls="--", label=name)
        else:
            axes.plot([], [], color=LIMIT, lw=1, ls="--", label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory [{unit}]")
    _legend(axes)


def _addresses(axes: Axes, result: ReplayResult, position: Floats) -> None:
    """Each allocation a rectangle: its time across, its addresses up."""
    trace, outcome = result.trace, result.outcome
    placed = np.flatnonzero(outcome.taken > 0)
    low = outcome.offsets[placed]
    high = low + outcome.taken[placed]
    bottom, top = (int(low.min()), int(high.max())) if len(placed) else (0, 1)
    base = bottom if bottom > 4 * (top - bottom) else 0
    unit, scale = _unit(top - base)
    last = position[-1] if len(position) else 0.0
    step = position[1] - position[0] if len(position) > 1 else 1.0
    end = np.append(position, last + step)
    left = position[trace.alloc_events[placed]]
    right = end[trace.free_events[placed]]
    bottoms, tops = (low - base) / scale, (high - base) / scale
    corners = np.stack(
        [
            np.stack([left, bottoms], 1),
            np.stack([left, tops], 1),
            np.stack([right, tops], 1),
            np.stack([right, bottoms], 1),
        ],
        axis=1,
    )
    names, colours = _colours(result, placed)
    many = len(placed) > RASTER_FROM
    layer = PolyCollection(
        list(corners), facecolors=colours, edgecolors="white" if not many else "none",
        linewidths=0.3 if not many else 0, rasterized=many,
    )  # fmt: skip
    axes.add_collection(layer)
    axes.set_xlim(position[0] if len(position) else 0, end[-1])
    axes.set_ylim(0, (top - base) / scale * 1.02)
    above = f", from {format_size(base)} up" if base else ""
    axes.set_ylabel(f"address [{unit}{above}]")
    if len(names) > 1:
        handles = [Patch(color=colour, label=name) for name, colour in names.items()]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5),
                    frameon=False, fontsize="small")  # fmt: skip


def _fragmentation(axes: Axes, result: ReplayResult, position: Floats) -> None:
    """External fragmentation of the pool, and bytes in use that nobody asked for.

    The second is left out where less than 1 % of the peak is in use: a share of next to nothing.
    """
    events = np.unique(np.linspace(0, max(len(position) - 1, 0), SAMPLES).astype(int))
    if not len(position):
        events = events[:0]
    outside = [100 * result.fragmentation_at(int(event)) for event in events]
    in_use, asked = result.in_use[events], result.requested[events]
    enough = in_use > result.stats.peak_bytes_in_use / 100
    inside = np.full(len(events), np.nan)
    inside[enough] = 100 * (in_use - asked)[enough] / in_use[enough]
    axes.plot(position[events], outside, color=PALETTE[0], lw=1.2, drawstyle="steps-post",
              label="external:\n1 - largest free\nblock / all free")  # fmt: skip
    axes.plot(position[events], inside, color=PALETTE[1], lw=1.2, drawstyle="steps-post",
              label="internal:\nin use but\nnot requested")  # fmt: skip
    axes.set_ylim(0, max([10.0, *outside, *inside[enough].tolist()]) * 1.05)
    axes.set_ylabel("fragmentation [%]")
    _legend(axes)


# --- parts --------------------------------------------------------------------------------


def _positions(result: ReplayResult, x: XAxis) -> Floats:
    """Where each event stands on the horizontal axis: its number, or milliseconds."""
    if x == "time":
        return np.asarray(result.trace.time_us / 1000, np.float64)
    return np.arange(len(result.trace), dtype=np.float64)


def _thin(at: Floats, values: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """A line of few points with the same outline: the extremes of every stretch are kept."""
    stretch = -(-len(at) // (LINE_POINTS // 2))
    if stretch <= 1:
        return at, values.astype(np.float64)
    whole = len(at) // stretch * stretch
    table = values[:whole].reshape(-1, stretch)
    first = np.arange(0, whole, stretch)
    keep = np.unique(
        np.concatenate([first + table.argmin(1), first + table.argmax(1), [len(at) - 1]])
    )
    return at[keep], values[keep].astype(np.float64)


def _unit(size: int) -> tuple[str, int]:
    """The unit in which an axis up to this size reads well."""
    for name, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return name, scale
    return "B", 1


def _colours(
    result: ReplayResult, placed: npt.NDArray[np.int64]
) -> tuple[dict[str, str], list[str]]:
    """What the colours mean, and the colour of each allocation.

    One colour for each of the labels that take the most memory; sizes where there are no labels.
    """
    trace, taken = result.trace, result.outcome.taken[placed]
    classes = trace.label[trace.alloc_events[placed]]
    names = list(trace.labels)
    if len(np.unique(classes)) < 2:
        classes = np.searchsorted(SIZE_CLASSES, taken)
        names = [f"up to {format_size(each)}" for each in SIZE_CLASSES] + ["larger"]
    weight = np.bincount(classes, taken, len(names))
    ranked = [int(each) for each in np.argsort(-weight, kind="stable") if weight[each]]
    colour_of = {each: PALETTE[n] if n < len(PALETTE) else OTHER for n, each in enumerate(ranked)}
    shown = {names[each] or "no label": colour_of[each] for each in ranked[: len(PALETTE)]}
    if len(ranked) > len(PALETTE):
        shown["other"] = OTHER
    return shown, [colour_of[each] for each in classes.tolist()]


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small")


def _marks(axes: Axes, result: ReplayResult, position: Floats, *, labelled: bool) -> None:
    """Thin lines at the program's marks, with their text where there are few."""
    events = np.flatnonzero(result.trace.op == MARK)
    if len(events) > 200:
        return
    for event in events:
        axes.axvline(position[event], color="#444444", lw=0.5, alpha=0.5)
        if labelled and len(events) <= LABELLED_MARKS:
            text = result.trace.labels[result.trace.label[event]]
            axes.annotate(text, (position[event], 1), xycoords=("data", "axes fraction"),
                          xytext=(0, 2), textcoords="offset points", ha="center", va="bottom",
                          fontsize="x-small", color="#444444")  # fmt: skip


def _failure(axes: Axes, result: ReplayResult, position: Floats, *, labelled: bool) -> None:
    """The first refused request."""
    oom = result.oom
    if oom is None:
        return
    axes.axvline(position[oom.event], color="red", lw=1.2)
    if labelled:
        axes.annotate(
            f"refused: {format_size(oom.request_bytes)}", (position[oom.event], 0),
            xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            rotation=90, ha="left", va="bottom", fontsize="x-small", color="red",
        )  # fmt: skip


def _title(result: ReplayResult) -> str:
    where = f" on {result.device}" if result.device else ""
    name = result.trace.name.split(" (")[0]
    return (
        f"{result.policy}{where}{': ' if name else ''}{name}\n"
        f"peak in use {format_size(result.stats.peak_bytes_in_use)}, "
        f"at most {format_size(result.trace.lower_bound_bytes)} live at once"
    )
