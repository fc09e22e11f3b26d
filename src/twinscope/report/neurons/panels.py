"""How the panels of a search for neurons are drawn: counts over correlation, maxima, shares, R², changes.

Covers ink only: which rows make a panel, and what it says in words, is in figures.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, MUTED, Line, ticks_between
from twinscope.report.changes import change_axis, change_limits, linear_part
from twinscope.report.drawing import FONT_SIZE, LINES, MARKERS, PALETTE
from twinscope.report.wording import count, number

_PAPER, _RULE = PALETTE["paper"][0], PALETTE["rule"][0]
_OBSERVED, _THRESHOLD = PALETTE["arm-1"][0], PALETTE["alert"][0]
_LAYERS = [PALETTE[f"arm-{place}"][0] for place in (1, 2, 3, 4, 5, 6)]
_STANDS = {
    "best": Line(PALETTE["arm-1"][0], LINES[0], "o"),
    "random": Line(PALETTE["arm-2"][0], LINES[3], "s"),
    "zeroed": Line(PALETTE["arm-3"][0], LINES[2], "^"),
}
#: Steps of a share, and the colours between them.
_SHARES = (0.02, 0.25, 0.5)
_TINTS = (_PAPER, *(PALETTE[f"cool-{step}"][0] for step in (1, 2, 3)))
_MOST_POINTS = 160


@dataclass(frozen=True)
class Levels:
    """What a correlation has to exceed: the null's threshold, and the floor of R² as a correlation."""

    threshold: float
    floor: float


@dataclass(frozen=True)
class Change:
    """The change of the loss with ``pairs`` neurons replaced, and its intervals."""

    pairs: int
    mean: float
    low: float | None
    high: float | None


def draw_counts(layers: Mapping[str, Sequence[float]], levels: Levels, axes: Axes) -> None:
    """For each layer, how many neurons have a best match of at least the correlation; logarithmic count."""
    most = max(len(values) for values in layers.values())
    axes.set_xlabel("correlation of the best match, absolute")
    axes.set_xlim(0, 1.0)
    axes.set_ylabel("neurons with at least that")
    axes.set_yscale("log")
    axes.set_ylim(0.7, 1.5 * most)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks_between(0.7, 1.5 * most) if tick >= 1]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value))))
    axes.axvline(levels.floor, color=MUTED, linewidth=1.1, linestyle=LINES[2], label="floor of R²")
    axes.axvline(levels.threshold, color=_THRESHOLD, linewidth=1.3, linestyle=LINES[3], label="null, 5 %")
    for place, (name, values) in enumerate(layers.items()):
        ordered = sorted(values, reverse=True)
        ranks = _thinned(len(ordered))
        # A step down after each value: the curve says how many lie at or beyond a correlation.
        axes.step(
            [1.0, *(ordered[rank] for rank in ranks)],
            [0.5, *(rank + 1 for rank in ranks)],
            where="post",
            color=_LAYERS[place % len(_LAYERS)],
            linewidth=1.6,
            label=name,
        )
    _legend(axes, "lower left", 1)


def draw_maxima(
    observed: Mapping[str, tuple[float, float]],
    null: Mapping[str, Sequence[float]],
    levels: Levels,
    axes: Axes,
) -> None:
    """A line for each layer: the largest and the median of its best matches, and every draw of the null."""
    names = list(dict.fromkeys([*observed, *null]))
    axes.set_xlabel("correlation, absolute")
    axes.set_xlim(0, 1.0)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.set_ylim(len(names) - 0.4, -1.15)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.yaxis.set_major_formatter(FixedFormatter(names))
    axes.tick_params(axis="y", length=0)
    # Below the legend.
    axes.axvline(levels.floor, 0.0, 0.87, color=MUTED, linewidth=1.1, linestyle=LINES[2])
    axes.axvline(levels.threshold, 0.0, 0.87, color=_THRESHOLD, linewidth=1.3, linestyle=LINES[3])
    drawn: dict[str, Any] = {
        "color": MUTED,
        "marker": "|",
        "markersize": 9.0,
        "markeredgewidth": 0.9,
        "linestyle": "",
        "alpha": 0.8,
    }
    largest: dict[str, Any] = {"color": _OBSERVED, "marker": "o", "markersize": 6.0, "linestyle": ""}
    middle: dict[str, Any] = largest | {"markerfacecolor": _PAPER, "markersize": 5.0, "markeredgewidth": 1.2}
    for line, name in enumerate(names):
        if name in null:
            axes.plot(null[name], [line] * len(null[name]), **drawn)
        if name in observed:
            axes.plot([observed[name][0]], [line], **largest)
            axes.plot([observed[name][1]], [line], **middle)
    for name, style in (("largest", largest), ("median", middle), ("a null draw", drawn)):
        axes.plot([], [], label=name, **style)
    _legend(axes, "upper right", 3)


def draw_shares(names: Sequence[str], counts: Sequence[Sequence[int]], axes: Axes) -> None:
    """For each layer (row), the share of its neurons whose best match lies in each layer (column)."""
    n = len(names)
    axes.grid(False)
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    for i, row in enumerate(counts):
        total = sum(row) or 1
        for j, found in enumerate(row):
            tint = _TINTS[bisect_right(_SHARES, found / total)]
            axes.add_patch(Rectangle((j + 0.02, i + 0.02), 0.96, 0.96, facecolor=tint, linewidth=0))
            axes.annotate(
                f"{number(100 * found / total, 0)} %",
                (j + 0.5, i + 0.5),
                # By the offset: a text whose place is right of 1 would count as the label of a line.
                xytext=(0, 0),
                textcoords="offset points",
                ha="center",
                va="center",
                color=INK,
                size=FONT_SIZE,
            )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([place + 0.5 for place in range(n)]))
        axis.set_major_formatter(FixedFormatter([name.removeprefix("layer ") for name in names]))
    for spine in axes.spines.values():
        spine.set_color(_RULE)
        spine.set_visible(True)
    axes.tick_params(length=0)
    axes.set_xlabel("layer of the best match")
    axes.set_ylabel("layer searched for")


def draw_confirmation(
    points: Mapping[str, Sequence[tuple[float, float]]], floor: float, least: float, axes: Axes
) -> None:
    """R² on held-out over R² on calibration, for each direction of each match, by what became of it."""
    axes.set_xlabel("R² on calibration")
    axes.set_ylabel("R² on held-out")
    # On the text that the multiple was fitted on it explains something, however little.
    axes.set_xlim(0, 1.02)
    axes.set_ylim(least, 1.02)
    axes.plot([0, 1.02], [0, 1.02], color=_RULE, linewidth=0.9)
    axes.axhline(floor, color=MUTED, linewidth=1.1, linestyle=LINES[2])
    axes.axvline(floor, color=MUTED, linewidth=1.1, linestyle=LINES[2])
    styles = {
        "confirmed": (_OBSERVED, "o", True),
        "not confirmed": (PALETTE["arm-2"][0], MARKERS[1], False),
        "within the null": (MUTED, MARKERS[2], False),
    }
    for name, (colour, marker, filled) in styles.items():
        found = points.get(name, ())
        if not found:
            continue
        axes.plot(
            *zip(*((x, max(y, least)) for x, y in found), strict=True),
            color=colour,
            marker=marker,
            markersize=3.4 if name == "within the null" else 4.5,
            markerfacecolor=colour if filled else _PAPER,
            markeredgewidth=0.0 if filled else 0.8 if name == "within the null" else 1.1,
            alpha=0.75,
            linestyle="",
            label=name,
            clip_on=False,
        )
    _legend(axes, "upper left", 1)


def draw_changes(
    series: Mapping[str, Sequence[Change]],
    names: Mapping[str, str],
    margin: float,
    limits: tuple[float, float],
    linear: float,
    axes: Axes,
) -> None:
    """The change of the loss over the number of neurons replaced, for matches and both controls."""
    pairs = sorted({change.pairs for changes in series.values() for change in changes})
    axes.set_xlabel("neurons replaced")
    axes.set_ylabel("change, nats per token")
    # By place: one, ten and a hundred stand as far apart as two numbers of any other size.
    place = {value: index for index, value in enumerate(pairs)}
    axes.set_xlim(-0.4, len(pairs) - 0.6)
    axes.xaxis.set_major_locator(FixedLocator(range(len(pairs))))
    axes.xaxis.set_major_formatter(FixedFormatter([count(value) for value in pairs]))
    change_axis(axes, "y", linear, limits, margin)
    for index, (stand, changes) in enumerate(series.items()):
        line = _STANDS[stand]
        shift = 0.07 * (index - (len(series) - 1) / 2)
        places = [place[change.pairs] + shift for change in changes]
        for x, change in zip(places, changes, strict=True):
            if change.low is not None and change.high is not None:
                axes.plot([x] * 2, [change.low, change.high], color=line.colour, linewidth=1.3)
        axes.plot(places, [change.mean for change in changes], label=names[stand], **line.options(1))
    _legend(axes, "upper left", 3)


def change_scale(changes: Sequence[Change], margin: float) -> tuple[tuple[float, float], float]:
    """Limits and linear part of the axis that all panels of changes share."""
    ends = [end for change in changes for end in (change.low, change.high) if end is not None]
    means = [change.mean for change in changes]
    linear = min(linear_part(means), margin)
    return change_limits([*means, *ends, margin], linear, (0.04, 0.14)), linear


def _thinned(length: int) -> list[int]:
    """Ranks from 0 that a logarithmic axis can tell apart, the last included."""
    ranks: list[int] = []
    step = length ** (1 / _MOST_POINTS)
    at = 1.0
    while at < length:
        if not ranks or int(at) - 1 > ranks[-1]:
            ranks.append(int(at) - 1)
        at = max(at * step, at + 1e-9)
    return [*ranks, length - 1] if not ranks or ranks[-1] != length - 1 else ranks


def _legend(axes: Axes, place: Literal["lower left", "upper left", "upper right"], columns: int) -> None:
    axes.legend(
        loc=place,
        frameon=False,
        ncols=columns,
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.5,
        handlelength=1.6,
        labelspacing=0.25,
        columnspacing=0.9,
        borderaxespad=0.2,
    )
