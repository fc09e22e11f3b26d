"""How the panels of a cost run are drawn: ratios on lanes, stacked bars, windows over time.

Covers ink only: which rows make a panel, and what it says in words, is in cost_figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twinscope.report.axes import INK, MUTED, Line, note, ticks_between
from twinscope.report.drawing import PALETTE, EndLabel, end_labels
from twinscope.report.lanes import (
    AROUND,
    LANE,
    NAME,
    hollow,
    interval,
    key,
    prepare,
    ratio_axis,
    write_beside,
    write_lane,
    write_name,
)
from twinscope.report.wording import number

_PAPER, _RULE = PALETTE["paper"][0], PALETTE["rule"][0]
_TIME, _FLOPS = PALETTE["arm-1"][0], PALETTE["arm-2"][0]
_PUBLISHED, _CLAIM = PALETTE["arm-3"][0], PALETTE["arm-5"][0]
_TINT = 0.75
#: Share of the axis that bars and intervals may take before the number behind them.
_REACH = 0.86
_SHORTHAND: dict[str, Any] = {"color": MUTED, "marker": "x", "markersize": 5.5, "linestyle": ""}
_OTHER: dict[str, Any] = {"color": _PUBLISHED, "marker": "D", "markersize": 5.0, "linestyle": ""}


@dataclass(frozen=True)
class Lane:
    """One line of marks below a name; every ratio may be missing.

    ``value`` with its interval is a dot, ``ledger`` a bar, ``counted`` a hollow diamond, ``shorthand`` a
    cross, ``published`` a filled diamond, and ``claim`` a box from its low to its high end, grey where
    nothing judges it.
    """

    name: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    ledger: float | None = None
    counted: float | None = None
    shorthand: float | None = None
    published: float | None = None
    claim: tuple[float, float] | None = None
    judged: bool = True

    @property
    def places(self) -> list[float]:
        """Every ratio that the axis must hold; an interval may be cut where it reaches far."""
        single = (self.value, self.ledger, self.counted, self.shorthand, self.published)
        return [value for value in (*single, *(self.claim or ())) if value is not None]


@dataclass(frozen=True)
class Lanes:
    """A name, the numbers at the right end of its line, and lanes below."""

    name: str
    numbers: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Bar:
    """A bar of segments in the unit of the axis, its number, and a dot with interval or a line over it."""

    name: str
    segments: Mapping[str, float]
    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    line: float | None = None

    @property
    def places(self) -> list[float]:
        """Every value that the axis must hold."""
        found = (sum(self.segments.values()), self.value, self.line)
        return [value for value in found if value is not None]


@dataclass(frozen=True)
class Bars:
    """A name, the numbers at the right end of its line, and bars below."""

    name: str
    numbers: str
    bars: tuple[Bar, ...]


def ratio_limits(groups: Sequence[Lanes]) -> tuple[float, float]:
    """Limits that hold every mark, and intervals as far as they leave room for the marks."""
    lanes = [lane for group in groups for lane in group.lanes]
    places = [1.0, *(value for lane in lanes for value in lane.places)]
    ends = [end for lane in lanes for end in (lane.low, lane.high) if end is not None]
    low = max(min([*places, *ends]), min(places) / 1.6)
    high = min(max([*places, *ends]), max(places) * 1.6)
    room = (high / low) ** 0.04
    return low / room, high * room


def bar_limit(groups: Sequence[Bars]) -> float:
    """End of an axis that holds every bar with its number, and intervals unless they reach far."""
    bars = [bar for group in groups for bar in group.bars]
    most = max(place for bar in bars for place in bar.places)
    ends = [bar.high for bar in bars if bar.high is not None]
    return max(most, min(max(ends, default=0.0), 1.5 * most)) / _REACH


def ratio_key(groups: Sequence[Lanes]) -> dict[str, dict[str, Any]]:
    """The key of the marks that the lanes have: name, and how its line is drawn."""
    lanes = [lane for group in groups for lane in group.lanes]
    box = {"alpha": 0.5, "linewidth": 8, "solid_capstyle": "butt"}
    known: dict[str, tuple[bool, dict[str, Any]]] = {
        "measured": (_any(lanes, "value"), {"color": _TIME, "marker": "o", "markersize": 5.5}),
        "ledger": (_any(lanes, "ledger"), _tick(_FLOPS, 2.0)),
        "counted": (_any(lanes, "counted"), hollow("D", _FLOPS, 5.5)),
        "shorthand": (_any(lanes, "shorthand"), _SHORTHAND),
        "published": (_any(lanes, "published"), _OTHER),
        "claim": (any(lane.claim and lane.judged for lane in lanes), {"color": _CLAIM, **box}),
        "claim, not judged": (
            any(lane.claim and not lane.judged for lane in lanes),
            {"color": _RULE, **box},
        ),
    }
    return {name: style for name, (there, style) in known.items() if there}


def bar_key(groups: Sequence[Bars], colours: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The key of the segments, those of one colour together, and of what stands over the bars."""
    bars = [bar for group in groups for bar in group.bars]
    shown: dict[str, list[str]] = {}
    for name, colour in colours.items():
        if any(bar.segments.get(name) for bar in bars):
            shown.setdefault(colour, []).append(name)
    found: dict[str, dict[str, Any]] = {
        ", ".join(names): {"color": colour, "alpha": _TINT, "linewidth": 7.0, "solid_capstyle": "butt"}
        for colour, names in shown.items()
    }
    if _any(bars, "value"):
        found["windows"] = {"color": INK, "marker": "o", "markersize": 4.0}
    if _any(bars, "line"):
        found["peak of a step"] = _tick(INK, 1.6)
    return found


def draw_ratios(groups: Sequence[Lanes], limits: tuple[float, float], height: int, axes: Axes) -> None:
    """Lanes of ratios on a logarithmic axis."""
    entries = ratio_key(groups)
    ratio_axis(axes, limits, "ratio, logarithmic")
    place = prepare(axes, height, len(entries))
    axes.plot([1.0] * 2, [place, height - AROUND], color=MUTED, linewidth=0.9)
    for group in groups:
        write_name(axes, place, group.name, group.numbers)
        place += NAME
        for lane in group.lanes:
            _draw_lane(axes, lane, place + LANE / 2, limits)
            place += LANE
    key(axes, entries)


def draw_bars(
    groups: Sequence[Bars],
    colours: Mapping[str, str],
    limit: float,
    unit: str,
    height: int,
    axes: Axes,
) -> None:
    """Stacked bars from 0 to ``limit``."""
    entries = bar_key(groups, colours)
    axes.set_xlabel(unit)
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    place = prepare(axes, height, len(entries))
    for group in groups:
        write_name(axes, place, group.name, group.numbers)
        place += NAME
        for bar in group.bars:
            _draw_bar(axes, bar, place + LANE / 2, colours, limit)
            place += LANE
    key(axes, entries)


def draw_windows(
    lines: Mapping[str, Sequence[tuple[int, float, bool]]],
    names: Mapping[str, str],
    styles: Mapping[str, Line],
    band: float | None,
    limits: tuple[float, float],
    axes: Axes,
) -> None:
    """Milliseconds per step of every window: (place in time, ms, whether it was disturbed), by arm."""
    axes.set_xlabel("window, in order of time")
    axes.set_ylabel("ms per step, logarithmic")
    last = max(place for points in lines.values() for place, *_ in points)
    axes.set_xlim(-0.5 - 0.01 * last, last + 0.5 + 0.01 * last)
    axes.xaxis.set_major_locator(FixedLocator(_counted(last)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value + 1, 0)))
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    ticks = ticks_between(*limits)
    if len(ticks) < 3:
        ticks = [float(value) for value in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(*limits)]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if limits[0] <= tick <= limits[1]]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    labels = []
    for arm, points in lines.items():
        style = styles[arm]
        fastest = min(value for _, value, _ in points)
        if band is not None:
            axes.axhspan(fastest, fastest * (1 + band), color=style.colour, alpha=0.13, linewidth=0)
        places, values = [place for place, *_ in points], [value for _, value, _ in points]
        axes.plot(places, values, color=style.colour, linestyle=style.dashes, linewidth=1.0)
        for place, value, disturbed in points:
            axes.plot(
                [place],
                [value],
                color=style.colour,
                marker=style.marker,
                markersize=4.8,
                markerfacecolor=_PAPER if disturbed else style.colour,
                markeredgewidth=1.1,
                linestyle="",
            )
        labels.append(EndLabel(points[-1][1], names[arm], style.colour, style.colour))
    if any(disturbed for points in lines.values() for *_, disturbed in points):
        note(axes, "hollow: disturbed")
    end_labels(axes, labels)


def _counted(last: int) -> list[int]:
    step = max(1, -(-(last + 1) // 7))
    return list(range(0, last + 1, step))


def _draw_lane(axes: Axes, lane: Lane, place: float, limits: tuple[float, float]) -> None:
    write_lane(axes, place, lane.name)
    axes.plot(limits, [place] * 2, color=PALETTE["grid"][0], linewidth=0.8, zorder=0.5)
    half = 0.36 * LANE
    if lane.claim is not None:
        low, high = lane.claim
        # A claim of one number has a width of a few pixels.
        least, middle = (limits[1] / limits[0]) ** 0.006, (low * high) ** 0.5
        axes.fill_betweenx(
            [place - half, place + half],
            min(low, middle / least),
            max(high, middle * least),
            facecolor=_CLAIM if lane.judged else _RULE,
            alpha=0.5,
            linewidth=0,
        )
    if lane.ledger is not None:
        axes.plot([lane.ledger] * 2, [place - half, place + half], color=_FLOPS, linewidth=2.0)
    if lane.counted is not None:
        axes.plot([lane.counted], [place], **hollow("D", _FLOPS, 5.5))
    if lane.shorthand is not None:
        axes.plot([lane.shorthand], [place], **_SHORTHAND)
    if lane.low is not None and lane.high is not None:
        interval(axes, lane.low, lane.high, place, limits, _TIME if lane.value else _PUBLISHED)
    if lane.value is not None:
        axes.plot([lane.value], [place], color=_TIME, marker="o", markersize=5.5, linestyle="")
    if lane.published is not None:
        axes.plot([lane.published], [place], **_OTHER)


def _draw_bar(axes: Axes, bar: Bar, place: float, colours: Mapping[str, str], limit: float) -> None:
    write_lane(axes, place, bar.name)
    start = 0.0
    for name in colours:
        width = bar.segments.get(name, 0.0)
        if width > 0:
            axes.barh(
                [place],
                [width],
                left=[start],
                height=0.74 * LANE,
                color=colours[name],
                alpha=_TINT,
                edgecolor=_PAPER,
                linewidth=0.7,
            )
        start += width
    if bar.line is not None:
        axes.plot([start, bar.line], [place] * 2, color=INK, linewidth=0.8)
        axes.plot([bar.line] * 2, [place - 0.46 * LANE, place + 0.46 * LANE], color=INK, linewidth=1.6)
    if bar.low is not None and bar.high is not None:
        interval(axes, bar.low, bar.high, place, (0.0, limit), INK)
    if bar.value is not None:
        axes.plot([bar.value], [place], color=INK, marker="o", markersize=4.0, linestyle="")
    # An interval that reaches to the end of the axis leaves the number its room.
    reach = max([*bar.places, min(bar.high or 0.0, _REACH * limit)])
    write_beside(axes, (reach, place), bar.text)


def _any(marks: Sequence[Lane | Bar], name: str) -> bool:
    return any(getattr(mark, name, None) is not None for mark in marks)


def _tick(colour: str, width: float) -> dict[str, Any]:
    return {"color": colour, "marker": "|", "markersize": 9, "markeredgewidth": width, "linestyle": ""}
