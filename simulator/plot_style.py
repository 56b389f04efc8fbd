"""What the panels of a figure share: colours, units, axes over events or time, marks, texts."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, KIB, MIB, TIB, format_size
from alloclab.simulator.replay import ReplayResult
from alloclab.simulator.requests import MARK

XAxis = Literal["event", "time"]
Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

#: The palette of Okabe and Ito, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW)
OTHER, POOL, LIVE, QUIET = "#999999", "#777777", "#BFD9EA", "#555555"
#: Free memory of the pool, as a surface.
FREE = "#E4E4E4"
LIMIT, REFUSED = VERMILION, "#B2182B"

#: Memory kinds keep their colours from figure to figure. The names are the runtime's.
COLOUR_OF = {
    "argument": BLUE,
    "output": ORANGE,
    "temp": GREEN,
    "constant": PINK,
    "copy": SKY,
    "tuple": VERMILION,
    "program": YELLOW,
}

#: More marks than this are not drawn: they would hide the data.
MOST_MARKS = 60
#: Width of a figure, and of a panel beside its legend and labels, in inches.
WIDTH, PANEL_WIDTH = 9.0, 6.7
#: Sizes of text, and what a character of the smaller takes, in points.
SUBTITLE, SMALL, CHARACTER = 8.5, 7.5, 4.4


@dataclass(frozen=True)
class Horizontal:
    """Where the events of a trace stand on the horizontal axis.

    Attributes:
        edges: the position of each event (its number, or milliseconds), and after the last one
            the end of what is still live then.
        label: the axis label, with its unit.
    """

    edges: Floats
    label: str

    @classmethod
    def of(cls, result: ReplayResult, x: XAxis) -> "Horizontal":
        """The axis for a result.

        Raises:
            InputError: the trace has no times, or there is no such axis.
        """
        length = len(result.trace)
        if x == "event":
            return cls(np.arange(length + 1, dtype=np.float64), "event")
        if x != "time":
            raise InputError(f"plot: the x axis can be event or time, found {x!r}")
        times = result.trace.time_us / 1000
        span = float(times[-1] - times[0]) if length else 0.0
        if not 0 < span < np.inf:
            raise InputError("plot: the trace has no times; draw it over events")
        return cls(np.append(times, times[-1] + span / length), "time [ms]")

    @property
    def events(self) -> Floats:
        """The position of each event."""
        return self.edges[:-1]

    def dress(self, axes: Axes) -> None:
        """Set the axis's range, label and ticks."""
        first, last = float(self.edges[0]), float(self.edges[-1])
        axes.set_xlim(first, last if last > first else first + 1)
        axes.set_xlabel(self.label)
        if self.label == "event":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))


def unit_of(size: int) -> tuple[str, int]:
    """The unit in which an axis up to this many bytes reads well, and its bytes.

    >>> unit_of(3 << 30), unit_of(1023)
    (('GiB', 1073741824), ('B', 1))
    """
    units = (("PiB", TIB * 1024), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next(((name, scale) for name, scale in units if size >= scale), ("B", 1))


def plain(text: str, most: int = 32) -> str:
    """The text as a figure can show it: on one line, of at most ``most`` characters.

    >>> plain("a\\tb"), plain("transformer", most=6)
    ('a b', 'trans…')
    """
    text = "".join(each if each.isprintable() else " " for each in text).strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def legend(axes: Axes, **options: Any) -> None:
    """A legend beside the panel, where it hides nothing; none where there is nothing to tell."""
    if "handles" not in options and not axes.get_legend_handles_labels()[0]:
        return
    made = axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small", **options
    )
    for text in made.get_texts():
        text.set_parse_math(False)


def draw_marks(axes: Axes, result: ReplayResult, across: Horizontal, *, labelled: bool) -> None:
    """Thin lines at the program's marks and at the first refused request.

    ``labelled`` writes their texts above the panel, as far as these do not touch each other.
    """
    texts: list[tuple[float, str, str]] = []
    if result.oom is not None:
        at = float(across.events[result.oom.event])
        axes.axvline(at, color=REFUSED, lw=1.2, ls=(0, (4, 1)), gid="oom")
        texts.append((at, f"refused: {format_size(result.oom.request_bytes)}", REFUSED))
    marks = np.flatnonzero(result.trace.op == MARK)
    if len(marks) <= MOST_MARKS:
        axes.vlines(
            across.events[marks], 0, 1, transform=axes.get_xaxis_transform(),
            colors=QUIET, linewidths=0.5, alpha=0.45, gid="marks",
        )  # fmt: skip
        numbers = result.trace.label[marks].tolist()
        labels = (plain(result.trace.labels[each]) for each in numbers)
        texts += [
            (at, text, QUIET)
            for at, text in zip(across.events[marks].tolist(), labels, strict=True)
            if text
        ]
    if labelled:
        _write_above(axes, across, texts)


def _write_above(axes: Axes, across: Horizontal, texts: list[tuple[float, str, str]]) -> None:
    """Write texts above the panel at their positions; the earlier in the list comes first."""
    low, high = axes.get_xlim()
    width = PANEL_WIDTH * 72
    taken: list[tuple[float, float]] = []
    for at, text, colour in texts:
        wide = len(text) * CHARACTER / width
        left = min(max((at - low) / (high - low) - wide / 2, 0.0), max(1 - wide, 0.0))
        right = left + wide
        if any(left < end and start < right for start, end in taken):
            continue
        taken.append((left - CHARACTER / width, right + CHARACTER / width))
        axes.annotate(
            text, ((left + right) / 2, 1), xycoords="axes fraction", xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=SMALL, color=colour,
            parse_math=False,
        )  # fmt: skip
