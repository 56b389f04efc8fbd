"""The panels over time: memory, free memory and fragmentation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from alloclab.policies.units import format_size
from alloclab.simulator.plot_style import (
    BLUE,
    FREE,
    LIMIT,
    LIVE,
    PALETTE,
    POOL,
    QUIET,
    Floats,
    Horizontal,
    Int64s,
    legend,
    plain,
    unit_of,
)
from alloclab.simulator.replay import ReplayResult
from alloclab.simulator.timeline import FreeMemory, free_memory, outline, sample_events

#: Lines are thinned to about this many points: more than a page has pixels.
LINE_POINTS = 4000
#: Free blocks need the whole map of the memory; it is taken after this many events.
SAMPLES = 400
#: A pool or a limit this many times the memory in use would flatten all else.
TOO_TALL = 3
DASHED = (0, (5, 2))
#: How each kind of fragmentation is drawn.
STYLES: dict[str, Any] = {"external": "-", "internal": (0, (1, 1.2))}


def memory_top(result: ReplayResult) -> int:
    """The bytes that a memory panel has to show: in use, or live as requested."""
    return max(result.stats.peak_bytes_in_use, result.trace.lower_bound_bytes, 1)


def draw_memory(axes: Axes, result: ReplayResult, across: Horizontal, top: int) -> None:
    """In use, pool, limit, and as a surface the ideal: the bytes live, as requested.

    The panel is made for ``top`` bytes. A pool or a limit far above is only named in the legend.
    """
    unit, scale = unit_of(top)
    pool, limit = int(result.pool.max(initial=0)), result.limit
    highest = top
    at, live = _steps(across, result.trace.live_bytes)
    axes.fill_between(at, live / scale, step="post", color=LIVE, lw=0, label="ideal: live bytes")
    if pool <= TOO_TALL * top:
        at, held = _steps(across, result.pool)
        axes.plot(at, held / scale, color=POOL, lw=1.2, drawstyle="steps-post", label="pool")
        highest = max(highest, pool)
    else:
        axes.plot([], [], color=POOL, lw=1.2, label=f"pool, off the scale:\n{format_size(pool)}")
    at, used = _steps(across, result.in_use)
    axes.plot(at, used / scale, color=BLUE, lw=1.2, drawstyle="steps-post", label="in use")
    if limit is not None and limit <= TOO_TALL * top:
        axes.axhline(limit / scale, color=LIMIT, lw=1.2, ls=DASHED, label="limit")
        highest = max(highest, limit)
    elif limit is not None:
        name = f"limit, off the scale:\n{format_size(limit)}"
        axes.plot([], [], color=LIMIT, lw=1.2, ls=DASHED, label=name)
    axes.set_ylim(0, 1.06 * highest / scale)
    axes.set_ylabel(f"memory [{unit}]")
    legend(axes)


def _steps(across: Horizontal, values: Int64s) -> tuple[Floats, Floats]:
    """A timeline as a line of few points that goes on to the right edge."""
    rows = outline(values, LINE_POINTS)
    return _to_edge(across, rows, values[rows])


def _to_edge(across: Horizontal, events: Int64s, values: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Values after some events as a line of steps; the last goes on to the right edge."""
    at = np.append(across.edges[events], across.edges[-1:])
    return at, np.append(values, values[-1:] if len(values) else [0]).astype(np.float64)


def free_samples(result: ReplayResult) -> FreeMemory:
    """The free memory of a replay at as many events as a panel shows."""
    return free_memory(result, sample_events(result, SAMPLES))


def draw_free(axes: Axes, result: ReplayResult, free: FreeMemory, across: Horizontal) -> None:
    """Free bytes of the pool, and those of its largest free block."""
    top = int(free.total.max(initial=0))
    unit, scale = unit_of(top)
    at, total = _to_edge(across, free.events, free.total / scale)
    axes.fill_between(at, total, step="post", color=FREE, lw=0, label="all free")
    at, largest = _to_edge(across, free.events, free.largest / scale)
    axes.plot(at, largest, color=BLUE, lw=1.2, drawstyle="steps-post", label="largest block")
    axes.set_ylim(0, 1.06 * max(top, 1) / scale)
    axes.set_ylabel(f"free [{unit}]")
    legend(axes)


def draw_fragmentation(
    axes: Axes,
    results: Sequence[ReplayResult],
    samples: Sequence[FreeMemory],
    across: Sequence[Horizontal],
) -> None:
    """External fragmentation of the pool, and internal: in use but not requested, in percent.

    A colour for each result; the first are drawn wider, so that equal lines do not hide each
    other. Internal is left out where less than 1 % of the peak is in use: a share of next to
    nothing.
    """
    highest = 10.0
    widths = np.linspace(2.8 if len(results) > 1 else 1.2, 1.2, len(results))
    for colour, width, result, free, along in zip(
        _colours(results), widths.tolist(), results, samples, across, strict=True
    ):
        in_use, asked = result.in_use[free.events], result.requested[free.events]
        inside = np.full(len(in_use), np.nan)
        enough = in_use > result.stats.peak_bytes_in_use / 100
        inside[enough] = 100 * (in_use - asked)[enough] / in_use[enough]
        outside = 100 * free.external_fragmentation
        for name, values in (("external", outside), ("internal", inside)):
            at, share = _to_edge(along, free.events, values)
            axes.plot(at, share, color=colour, lw=width, ls=STYLES[name],
                      drawstyle="steps-post", gid=name)  # fmt: skip
            highest = max(highest, float(np.nan_to_num(share).max()))
    axes.set_ylim(0, 1.06 * highest)
    axes.set_ylabel("fragmentation [%]")
    shared = BLUE if len(results) == 1 else QUIET
    handles = [Line2D([], [], color=shared, ls=ls, label=name) for name, ls in STYLES.items()]
    if len(results) > 1:
        handles += [
            Line2D([], [], color=colour, label=name_of(result))
            for colour, result in zip(_colours(results), results, strict=True)
        ]
    legend(axes, handles=handles)


def _colours(results: Sequence[ReplayResult]) -> list[str]:
    return [PALETTE[number % len(PALETTE)] for number in range(len(results))]


def name_of(result: ReplayResult) -> str:
    """Policy and device, for a legend or a title."""
    where = f" on {result.device}" if result.device else ""
    return plain(f"{result.policy}{where}")
