"""How a sweep is drawn: the matrix of replacements in steps of colour, and every substitute by site.

Covers ink only. A matrix has one more column, which is no update at all; steps of colour begin at the margin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FixedFormatter, FixedLocator

from twinscope.report.axes import INK, MUTED
from twinscope.report.changes import change_axis, change_limits, signed_power
from twinscope.report.drawing import FONT_SIZE, PALETTE, PANEL_WIDTH
from twinscope.report.swap.findings import entries
from twinscope.report.wording import short_site

MATRIX_SIZE = (PANEL_WIDTH, 428)
#: Height of the key above a matrix, and of all that is not axes.
_KEY, _AROUND = 40, 68
_STEPS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_HEAT = [PALETTE[f"heat-{step}"][0] for step in range(1, 8)]
_COOL = [PALETTE[f"cool-{step}"][0] for step in range(1, 4)]
_BAND, _RULE = PALETTE["band"][0], PALETTE["rule"][0]
_BEST, _ZERO = PALETTE["arm-1"][0], PALETTE["arm-2"][0]
_SMALL = FONT_SIZE - 1.5


@dataclass(frozen=True)
class Steps:
    """Colours of a map: ``colours[k]`` is that of values from ``edges[k − 1]`` up to ``edges[k]``."""

    edges: tuple[float, ...]
    colours: tuple[str, ...]

    def step(self, value: float) -> int:
        """The number of the colour of a value."""
        return bisect_right(self.edges, value)


def steps_for(values: Iterable[float], margin: float) -> Steps:
    """Steps that hold the values: tinted within the margin, warm above it, cool below it."""
    found = list(values)
    above = [margin * step for step in _STEPS]
    below = [-margin * step for step in (1.0, 10.0, 100.0)]
    warm = max(1, sum(edge <= max(found, default=0.0) for edge in above))
    cool = sum(edge > min(found, default=0.0) for edge in below)
    return Steps((*reversed(below[:cool]), *above[:warm]), (*reversed(_COOL[:cool]), _BAND, *_HEAT[:warm]))


def draw_matrix(kind: Mapping[str, Any], steps: Steps, axes: Axes) -> None:
    sites, zero = kind["sites"], {part["site"]: part["delta_nll"] for part in kind["zero"]}
    n = len(sites)
    wide = max(1.0, 0.045 * n)
    start = n + 0.5 * wide
    lines = n / (MATRIX_SIZE[1] - _AROUND - _KEY)  # rows in one pixel
    axes.grid(False)
    axes.set_xlim(0, start + wide)
    axes.set_ylim(n, -_KEY * lines)
    places = {site: place for place, site in enumerate(sites)}
    cells: dict[int, list[tuple[float, float, float]]] = {}
    for entry in entries(kind):
        cell = (places[entry.by], places[entry.replaced], 1.0)
        cells.setdefault(steps.step(entry.delta_nll), []).append(cell)
    for site, value in zero.items():
        cells.setdefault(steps.step(value), []).append((start, places[site], wide))
    for step, boxes in cells.items():
        axes.add_patch(
            PathPatch(_boxes(boxes, max(0.006, 0.0012 * n)), facecolor=steps.colours[step], linewidth=0)
        )
    axes.plot([0, n], [0, n], color=_RULE, linewidth=0.9)
    kept = [entry for entry in entries(kind) if entry.verdict == "equivalent"]
    axes.plot(
        [places[entry.by] + 0.5 for entry in kept],
        [places[entry.replaced] + 0.5 for entry in kept],
        color=INK,
        marker="o",
        markersize=min(5.0, max(2.0, 70 / n)),
        markeredgewidth=0,
        linestyle="",
    )
    _site_ticks(axes.xaxis, sites, ([start + wide / 2], ["none"]))
    _site_ticks(axes.yaxis, sites)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlabel("layer of the substitute")
    axes.set_ylabel("layer replaced")
    _key(steps, start + wide, lines, axes)


def draw_substitutes(kind: Mapping[str, Any], margin: float, axes: Axes) -> None:
    """Every substitute of every site as a dot, the best one and no update at all marked."""
    sites = kind["sites"]
    found: dict[str, list[float]] = {site: [] for site in sites}
    for entry in entries(kind):
        found[entry.replaced].append(entry.delta_nll)
    zero = {part["site"]: part["delta_nll"] for part in kind["zero"]}
    values = [value for part in found.values() for value in part]
    limits = change_limits([*values, *zero.values()], margin, (0.03, 0.12))
    change_axis(axes, "y", margin, limits, margin)
    axes.set_xlim(-0.7, len(sites) - 0.3)
    axes.set_ylabel("change, nats per token")
    axes.set_xlabel("layer replaced")
    _site_ticks(axes.xaxis, sites, shift=0.0)
    places = [place for place, site in enumerate(sites) for _ in found[site]]
    dot: dict[str, Any] = {"marker": "o", "markeredgewidth": 0, "linestyle": ""}
    style = {"color": MUTED, "alpha": 0.45, "markersize": 2.8} | dot
    axes.plot(places, values, **style)
    best = {"color": _BEST, "markersize": 4.6} | dot
    axes.plot(range(len(sites)), [min(found[site]) for site in sites], **best)
    none: dict[str, Any] = {"color": _ZERO, "marker": "_", "linestyle": "", "markeredgewidth": 2.0}
    none["markersize"] = min(11.0, max(5.0, 200 / len(sites)))
    axes.plot(
        [place for place, site in enumerate(sites) if site in zero],
        [zero[site] for site in sites if site in zero],
        **none,
    )
    for name, entry in (("each substitute", style), ("the best", best), ("left out", none)):
        axes.plot([], [], label=name, **entry)
    axes.legend(
        loc="upper right",
        frameon=False,
        ncols=3,
        fontsize=_SMALL,
        labelcolor=MUTED,
        handletextpad=0.5,
        handlelength=1.2,
        columnspacing=0.9,
        borderaxespad=0.0,
    )


def _boxes(cells: Sequence[tuple[float, float, float]], gap: float) -> Path:
    """One path of all cells ``(x, y, width)`` of a colour, with a hair of paper between them."""
    vertices: list[tuple[float, float]] = []
    for x, y, width in cells:
        left, right, top, bottom = x + gap, x + width - gap, y + gap, y + 1 - gap
        vertices += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(cells)
    return Path(vertices, codes)


def _site_ticks(
    axis: Any, sites: Sequence[str], more: tuple[list[float], list[str]] = ([], []), shift: float = 0.5
) -> None:
    """Layers as ticks: all, or of many every fifth or tenth and the first."""
    names = [f"{layer}{norm}" for layer, norm in map(short_site, sites)]
    every = 1 if len(names) <= 16 else 5 if len(names) <= 60 else 10
    shown = [place for place in range(len(names)) if place % every == 0]
    axis.set_major_locator(FixedLocator([*(place + shift for place in shown), *more[0]]))
    axis.set_major_formatter(FixedFormatter([*(names[place] for place in shown), *more[1]]))


def _key(steps: Steps, width: float, line: float, axes: Axes) -> None:
    """Boxes of the colours with the edges between them, right of what they mean."""
    left, top, height = 0.34 * width, -34 * line, 11 * line
    each = (width - left) / len(steps.colours)
    for place, colour in enumerate(steps.colours):
        box = (left + place * each + 0.04 * each, top)
        axes.add_patch(Rectangle(box, 0.92 * each, height, facecolor=colour, linewidth=0))
    # By the offset: a text whose place is right of 1 would count as the label of a line.
    style: dict[str, Any] = {"xytext": (0, 0), "textcoords": "offset points", "annotation_clip": False}
    style |= {"va": "center", "size": _SMALL - 0.5, "color": MUTED}
    # Edges at the margin times a power of ten; the margin itself once, below its own box where it has two.
    margin = min(abs(edge) for edge in steps.edges)
    both = -margin in steps.edges
    for place, edge in enumerate(steps.edges, 1):
        if abs(log10(abs(edge) / margin) % 1 - 0.5) < 0.4 or edge == -margin:
            continue
        here, text = (place - 0.5, f"±{margin:g}") if both and edge == margin else (place, signed_power(edge))
        axes.annotate(text, (left + here * each, top + height + 8 * line), ha="center", **style)
    axes.annotate("nats per token", (0, top + height / 2), ha="left", **style)
