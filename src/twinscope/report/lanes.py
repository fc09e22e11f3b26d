"""Panels of named lines: a name with its numbers on a line, and lanes of marks or bars below it.

Covers the layout, the axis of ratios, intervals and the key; ink only. The vertical axis is in pixels from
the top, so that a panel of any height has lines of one height.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, MUTED
from twinscope.report.drawing import FONT_SIZE, PALETTE

#: Height of the line of a name, of a lane, of a line of the key, and of what is around the axes.
NAME, LANE, KEY, AROUND = 19, 17, 14, 68
SMALL_TEXT = FONT_SIZE - 1.5
#: From the axes to the left edge of the panel, less a margin.
_LEFT = 54
#: Behind a text that would stand on lines of the grid.
_CLEAR = {"facecolor": PALETTE["paper"][0], "edgecolor": "none", "pad": 1.0}


#: Entries of a key in one line.
KEY_COLUMNS = 4


def panel_height(lanes: Sequence[Sequence[int]], entries: int) -> int:
    """Height of a panel with a key of ``entries`` and the longest of several lists of groups, by lanes."""
    longest = max(sum(NAME + LANE * count for count in groups) for groups in lanes)
    return AROUND + round(_below_key(entries)) + longest


def prepare(axes: Axes, height: int, entries: int) -> float:
    """A vertical axis in pixels of a panel of ``height``, without ticks; the place below the key."""
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.set_ylim(height - AROUND, 0)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set_visible(False)
    return _below_key(entries)


def _below_key(entries: int) -> float:
    return 4.0 + KEY * ceil(entries / KEY_COLUMNS)


def write_name(axes: Axes, place: float, name: str, numbers: str) -> None:
    """Write the name at the left edge of the panel and the numbers at the right end of the axes."""
    _write(
        axes,
        place + NAME / 2,
        name,
        0,
        ha="left",
        size=FONT_SIZE - 0.5,
        weight="bold",
        color=INK,
        bbox=_CLEAR,
    )
    _write(axes, place + NAME / 2, numbers, 1, ha="right", size=FONT_SIZE - 0.5, color=INK, bbox=_CLEAR)


def write_lane(axes: Axes, place: float, name: str) -> None:
    """Write the name of a lane left of the axes; ``place`` is the lane's middle."""
    _write(axes, place, name, 0, ha="left", size=SMALL_TEXT, color=MUTED)


def _write(axes: Axes, place: float, text: str, end: int, **style: Any) -> None:
    # By the offset: a text whose place is right of 1 would count as the label of a line.
    axes.annotate(
        text,
        (end, place),
        xytext=(0 if end else -_LEFT, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        annotation_clip=False,
        **style,
    )


def write_beside(axes: Axes, place: tuple[float, float], text: str) -> None:
    """Write a number right of a place in data units."""
    axes.annotate(
        # A space that SVG keeps: the offset itself must stay below 1, as in _write.
        f"\u00a0{text}",
        place,
        xytext=(0.9, -0.5),
        textcoords="offset points",
        va="center",
        color=INK,
        size=SMALL_TEXT,
        bbox=_CLEAR,
        annotation_clip=False,
    )


def ratio_axis(axes: Axes, limits: tuple[float, float], what: str) -> None:
    """A logarithmic horizontal axis of ratios."""
    axes.set_xlabel(what)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(FixedLocator(ratio_ticks(*limits)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def ratio_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Ticks of a logarithmic axis of ratios: as fine as ``most`` of them and their room allow."""
    scales = (
        [0.1 * step for step in range(1, 101)],
        [0.2 * step for step in range(1, 101)],
        [0.5 * step for step in range(1, 101)],
        [0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48],
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
    )
    for scale in scales:
        ticks = [round(float(value), 10) for value in scale if low <= value <= high]
        near = (high / low) ** 0.09
        if len(ticks) <= most and all(b / a >= near for a, b in pairwise(ticks)):
            return ticks
    return [10.0**power for power in range(-9, 10) if low <= 10.0**power <= high]


def interval(
    axes: Axes, low: float, high: float, place: float, limits: tuple[float, float], colour: str
) -> None:
    """A bar from end to end; an end outside the axes becomes an arrow at their edge."""
    axes.plot((max(low, limits[0]), min(high, limits[1])), [place] * 2, color=colour, linewidth=1.4)
    for end, inside, edge, arrow in (
        (low, low >= limits[0], limits[0], "<"),
        (high, high <= limits[1], limits[1], ">"),
    ):
        if inside:
            axes.plot([end] * 2, [place - 3, place + 3], color=colour, linewidth=1.4)
        else:
            axes.plot([edge], [place], color=colour, marker=arrow, markersize=4.5, clip_on=False)


def hollow(marker: str, colour: str, size: float) -> dict[str, Any]:
    """Keyword arguments of a hollow mark."""
    return {
        "color": colour,
        "marker": marker,
        "markersize": size,
        "markerfacecolor": PALETTE["paper"][0],
        "markeredgewidth": 1.1,
        "linestyle": "",
    }


def key(axes: Axes, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """The key in the upper right corner: name of each entry, and keyword arguments of its line."""
    for name, style in entries.items():
        axes.plot([], [], label=name, **style)
    axes.legend(
        loc="upper right",
        facecolor=PALETTE["paper"][0],
        edgecolor="none",
        framealpha=1.0,
        fancybox=False,
        ncols=KEY_COLUMNS,
        fontsize=SMALL_TEXT,
        labelcolor=MUTED,
        handletextpad=0.4,
        handlelength=1.2,
        columnspacing=1.1,
        borderaxespad=0.0,
        borderpad=0.0,
        labelspacing=0.4,
    )
