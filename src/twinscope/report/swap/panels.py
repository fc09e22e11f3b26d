"""How the panels of one replaced pair are drawn: lanes of texts, means and intervals over a change.

Covers ink only: which rows make a panel, and what it says in words, is in figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from twinscope.report.axes import INK, MUTED
from twinscope.report.changes import change_axis, change_limits
from twinscope.report.drawing import PALETTE
from twinscope.report.lanes import AROUND, LANE, NAME, key, panel_height, prepare, write_lane, write_name

_PAPER = PALETTE["paper"][0]
_HELDOUT, _NULL = PALETTE["arm-1"][0], MUTED
KEY_ENTRIES = 4


@dataclass(frozen=True)
class Lane:
    """A value for every text, their mean, and the intervals around it; ``null`` is drawn in grey.

    ``hollow`` marks calibration texts, which have no interval.
    """

    name: str
    texts: tuple[float, ...]
    mean: float | None = None
    wide: tuple[float, float] | None = None
    narrow: tuple[float, float] | None = None
    null: bool = False
    hollow: bool = False

    @property
    def places(self) -> list[float]:
        """Every value that the axis must hold."""
        single = () if self.mean is None else (self.mean,)
        return [*self.texts, *single, *(self.wide or ()), *(self.narrow or ())]


@dataclass(frozen=True)
class Group:
    """A name, the numbers at the right end of its line, and lanes below."""

    name: str
    numbers: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Scale:
    """The axis that the panels of one figure share; ``margin`` is tinted where there is one."""

    unit: str
    linear: float
    limits: tuple[float, float]
    margin: float | None = None


def scale_of(panels: Sequence[Sequence[Group]], unit: str, linear: float, margin: float | None) -> Scale:
    """The scale that holds every value of several panels."""
    values = [value for panel in panels for group in panel for lane in group.lanes for value in lane.places]
    limits = change_limits(values, linear)
    if margin is None:
        # Divergences are never negative: what is left of 0 is room for the dots that stand there.
        limits = (-0.25 * linear, limits[1])
    return Scale(unit, linear, limits, margin)


def height_of(panels: Sequence[Sequence[Group]]) -> int:
    """Height of panels that have room for the longest of them."""
    return panel_height([[len(group.lanes) for group in panel] for panel in panels], KEY_ENTRIES)


def draw_lanes(groups: Sequence[Group], scale: Scale, height: int, axes: Axes) -> None:
    place = prepare(axes, height, KEY_ENTRIES)
    # Below the key and the first name, whose paper would cut into the tint.
    reach = 1.0 - (place + NAME) / (height - AROUND)
    change_axis(axes, "x", scale.linear, scale.limits, scale.margin, reach)
    axes.set_xlabel(scale.unit)
    for group in groups:
        write_name(axes, place, group.name, group.numbers)
        place += NAME
        for lane in group.lanes:
            write_lane(axes, place + LANE / 2, lane.name)
            _draw_lane(lane, place + LANE / 2, axes)
            place += LANE
    _key(groups, axes)


def _draw_lane(lane: Lane, place: float, axes: Axes) -> None:
    colour = _NULL if lane.null else _HELDOUT
    # Texts are spread over the lane in a fixed order, so that those of one value do not hide each other.
    spread = [
        place + 0.62 * LANE * ((0.618034 * index) % 1 - 0.5) if len(lane.texts) > 1 else place
        for index in range(len(lane.texts))
    ]
    few = len(lane.texts) <= 32
    axes.plot(
        lane.texts,
        spread,
        color=colour,
        marker="o",
        markersize=3.0 if few else 2.2,
        markerfacecolor=_PAPER if lane.hollow else colour,
        markeredgewidth=0.8 if lane.hollow else 0.0,
        alpha=0.9 if lane.hollow else 0.5,
        linestyle="",
    )
    if lane.wide is not None:
        axes.plot(lane.wide, [place] * 2, color=INK, linewidth=1.1)
    if lane.narrow is not None:
        axes.plot(lane.narrow, [place] * 2, color=INK, linewidth=3.0, solid_capstyle="butt")
    if lane.mean is not None:
        axes.plot([lane.mean], [place], **_mean(colour))


def _mean(colour: str) -> dict[str, Any]:
    return {
        "color": colour,
        "marker": "D",
        "markersize": 5.2,
        "markeredgecolor": _PAPER,
        "markeredgewidth": 0.8,
        "linestyle": "",
    }


def _key(groups: Sequence[Group], axes: Axes) -> None:
    lanes = [lane for group in groups for lane in group.lanes]
    dot = {"color": _HELDOUT, "marker": "o", "markersize": 3.0, "markeredgewidth": 0.0, "linestyle": ""}
    entries: dict[str, dict[str, Any]] = {"one text": dot | {"alpha": 0.6}, "mean": _mean(_HELDOUT)}
    if any(lane.narrow for lane in lanes):
        entries["90 %"] = {"color": INK, "linewidth": 3.0}
    if any(lane.wide for lane in lanes):
        entries["95 %"] = {"color": INK, "linewidth": 1.1}
    key(axes, entries)
