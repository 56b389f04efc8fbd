"""The panel of the address space: each allocation a rectangle, its time across, its bytes up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

from alloclab.policies.units import GIB, KIB, MIB, format_size
from alloclab.simulator.plot_style import (
    COLOUR_OF,
    FREE,
    OTHER,
    PALETTE,
    QUIET,
    SMALL,
    Floats,
    Horizontal,
    Int64s,
    legend,
    plain,
    unit_of,
)
from alloclab.simulator.replay import ReplayResult

#: Above this many rectangles they have no edges and are drawn as pixels, also in SVG and PDF.
RASTER_FROM = 3000
#: Allocations without labels are told apart by size, in bytes.
SIZE_CLASSES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 4 * GIB)
#: Their colours, with the larger still last: the map viridis in seven steps.
SIZE_COLOURS = ("#440154", "#443983", "#31688E", "#21918C", "#35B779", "#90D743", "#FDE725")
#: Addresses that no allocation ever had are folded away if there are more than this many times
#: those used; a fold is as high as this share of those used, all folds together as that share.
FOLD_FROM, FOLD_HEIGHT, FOLDS_HEIGHT = 1.5, 0.06, 0.3
#: More folds than this are not labelled.
LABELLED_FOLDS = 4
#: About how many ticks the address axis has.
TICKS = 9


def draw_addresses(axes: Axes, result: ReplayResult, across: Horizontal) -> None:
    """Draw every allocation that has memory, coloured by label, on the regions of the pool.

    The rectangles are the collection with gid ``allocations``; its data are the positions of
    ``across`` and addresses in the axis's unit. Long ranges of addresses without any allocation
    are folded away; the ticks tell true addresses.
    """
    trace, outcome = result.trace, result.outcome
    placed = np.flatnonzero(outcome.taken > 0)
    low = outcome.offsets[placed]
    high = low + outcome.taken[placed]
    regions = np.array(outcome.regions, np.int64).reshape(-1, 5)
    bottoms, tops = regions[:, 0], regions[:, 0] + regions[:, 1]
    axis = AddressAxis.of(low, high, int(bottoms.min(initial=0)), int(tops.max(initial=1)))
    unit, scale = unit_of(axis.used)
    returned = np.where(regions[:, 3] < 0, len(trace), regions[:, 3])
    edges = across.edges
    pool = _rectangles(edges[regions[:, 2]], edges[returned], bottoms / scale, tops / scale)
    axes.add_collection(
        PolyCollection(
            pool,
            facecolors=FREE,
            linewidths=0,
            gid="pool",
            zorder=0.5,
            antialiased=False,
            rasterized=len(pool) > RASTER_FROM,
        )
    )
    classes = classify(result, placed)
    many = len(placed) > RASTER_FROM
    corners = _rectangles(
        edges[trace.alloc_events[placed]],
        edges[trace.free_events[placed]],
        low / scale,
        high / scale,
    )
    faces = np.array([to_rgb(each) for each in classes.colours]).reshape(-1, 3)[classes.of]
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=faces,
            edgecolors="none" if many else 0.65 * faces,
            linewidths=0 if many else 0.25,
            rasterized=many,
            gid="allocations",
            zorder=1,
        )
    )
    if not len(placed):
        axes.text(0.5, 0.5, "nothing allocated", transform=axes.transAxes, ha="center", color=QUIET)
    axes.set_ylabel(f"address [{unit}]")
    axis.dress(axes, scale)
    handles = [
        Patch(color=colour, label=plain(name))
        for name, colour in dict(zip(classes.names, classes.colours, strict=True)).items()
    ]
    legend(
        axes,
        handles=[
            *handles,
            Patch(facecolor=FREE, edgecolor=QUIET, lw=0.5, label="free in the pool"),
        ],
    )


def _rectangles(left: Floats, right: Floats, bottom: Floats, top: Floats) -> Any:
    """Corners of rectangles, shape (count, 4, 2).

    One array, for which PolyCollection has a fast way that its type hints do not tell of.
    """
    across = np.stack([left, left, right, right], axis=1)
    up = np.stack([bottom, top, top, bottom], axis=1)
    return np.stack([across, up], axis=2)


# --- colours ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classes:
    """What the colours mean: names and colours of the classes, and the class of each allocation."""

    names: list[str]
    colours: list[str]
    of: Int64s


def classify(result: ReplayResult, placed: Int64s) -> Classes:
    """The class and so the colour of each placed allocation: its label.

    Known labels keep their colours; others take what is left in the order of their bytes, and
    share one colour when there is none left. A trace with one label is coloured by size.
    """
    trace, taken = result.trace, result.outcome.taken[placed]
    number = trace.label[trace.alloc_events[placed]].astype(np.int64)
    present = np.unique(number)
    if len(present) < 2:
        of = np.searchsorted(SIZE_CLASSES, taken)
        sizes = [f"up to {format_size(each)}" for each in SIZE_CLASSES]
        known = np.unique(of)
        names = [[*sizes, "larger"][each] for each in known]
        return Classes(names, [SIZE_COLOURS[each] for each in known], np.searchsorted(known, of))
    weight = np.bincount(number, taken.astype(np.float64), len(trace.labels))
    ranked = sorted(present.tolist(), key=lambda each: -weight[each])
    texts = [trace.labels[each] for each in ranked]
    left = [each for each in PALETTE if each not in {COLOUR_OF.get(text) for text in texts}]
    names, colours = [], []
    for text in texts:
        colour = COLOUR_OF.get(text) or (left.pop(0) if left else OTHER)
        colours.append(colour)
        names.append("other labels" if colour == OTHER else text or "no label")
    rank = np.zeros(len(trace.labels), np.int64)
    rank[ranked] = np.arange(len(ranked))
    return Classes(names, colours, rank[number])


# --- the axis -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AddressAxis:
    """A range of addresses in bytes, some parts of it folded away.

    Attributes:
        low, high: the range.
        folds: [low, high) of each fold, in order; no allocation lies in it.
        used: bytes that are not folded away.
    """

    low: int
    high: int
    folds: tuple[tuple[int, int], ...]
    used: int

    @classmethod
    def of(cls, low: Int64s, high: Int64s, bottom: int, top: int) -> "AddressAxis":
        """The axis for allocations from ``low`` to ``high`` in a pool from bottom to top.

        >>> AddressAxis.of(np.array([900, 0]), np.array([1000, 100]), 0, 1000).folds
        ((100, 900),)
        """
        order = np.argsort(low, kind="stable")
        starts = np.append(low[order], top)
        ends = np.insert(np.maximum.accumulate(high[order]), 0, bottom)
        gaps = np.maximum(starts - ends, 0)
        used = top - bottom - int(gaps.sum())
        wide = np.flatnonzero(gaps > FOLD_FROM * used) if used else np.zeros(0, np.int64)
        folds = tuple(zip(ends[wide].tolist(), starts[wide].tolist(), strict=True))
        return cls(bottom, top, folds, top - bottom - int(gaps[wide].sum()))

    def dress(self, axes: Axes, scale: int) -> None:
        """Set the axis's range, folds and ticks, in units of ``scale`` bytes."""
        if self.folds:
            axes.set_yscale("function", functions=self._functions(scale))
        axes.set_ylim(self.low / scale, self.high / scale)
        axes.yaxis.set_major_locator(FixedLocator(self._ticks(scale)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))
        for low, high in self.folds:
            axes.axhspan(
                low / scale,
                high / scale,
                facecolor="white",
                edgecolor="#CCCCCC",
                hatch="////",
                lw=0,
                gid="fold",
            )
            if len(self.folds) <= LABELLED_FOLDS:
                middle = axes.transData.transform([(0, low / scale), (0, high / scale)])[:, 1]
                at = axes.transAxes.inverted().transform((0, middle.mean()))[1]
                axes.annotate(
                    f"{format_size(high - low)} never used",
                    (0.5, at),
                    xycoords="axes fraction",
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color=QUIET,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                )

    def _functions(self, scale: int) -> tuple[Callable[[Floats], Floats], ...]:
        """From addresses to heights and back: straight lines, nearly flat where folded."""
        height = self.used * min(FOLD_HEIGHT, FOLDS_HEIGHT / len(self.folds))
        address, up = [self.low], [0.0]
        for low, high in self.folds:
            address += [low, high]
            up += [up[-1] + low - address[-3], up[-1] + low - address[-3] + height]
        address.append(self.high)
        up.append(up[-1] + self.high - address[-2])
        known, heights = np.array(address) / scale, np.array(up) / scale
        return (
            lambda values: np.interp(values, known, heights),
            lambda values: np.interp(values, heights, known),
        )

    def _ticks(self, scale: int) -> list[float]:
        """Round addresses in what is not folded away, about TICKS in all."""
        found = []
        edges = [self.low, *(each for fold in self.folds for each in fold), self.high]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            wanted = max(round(TICKS * (high - low) / max(self.used, 1)), 1)
            ticks = MaxNLocator(wanted, steps=[1, 2, 2.5, 5, 10]).tick_values(
                low / scale, high / scale
            )
            found += [float(each) for each in ticks if low <= each * scale <= high]
        return found
