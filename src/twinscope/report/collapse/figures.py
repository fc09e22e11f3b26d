"""The figure of a collapse: gain_low over displacement ratio with the threshold law, and what is left of it.

Covers rows, words, data and ink of the two panels. Gains and ratios have no unit; intervals are at 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, exp, floor, log10

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, MUTED, log_ticks, short_power
from twinscope.report.collapse.findings import fitted, law, outcome, placed, remarks
from twinscope.report.drawing import FONT_SIZE, LINES, MARKERS, PALETTE, Panel, Plot, short_label
from twinscope.report.reading import Row, RunData
from twinscope.report.wording import known, number, span

#: Model -> (colour, marker).
Styles = Mapping[str, tuple[str, str]]
_COLOURS = [light for name, (light, _) in PALETTE.items() if name.startswith("arm-")]
_MOST_NAMES = 6
_GAINS = ("gain_low", "gain_low_low", "gain_low_high")
_COLUMNS = (
    "run",
    "model",
    "width",
    "layers",
    "block",
    "beta",
    "role",
    "displacement_ratio",
    *_GAINS,
    "predicted",
    "residual",
)


def figures(run: RunData) -> list[Plot]:
    """The one figure, if there are points."""
    rows = [*placed(run, "control"), *placed(run)]
    if not placed(run):
        return []
    styles = _styles([*placed(run), *placed(run, "control")])
    words = []
    for role, name in (("point", "points"), ("control", "controls")):
        residuals = known(row["residual"] for row in placed(run, role))
        if residuals:
            times = span([exp(value) for value in residuals], partial(number, digits=2))
            words.append(f"The {len(residuals)} {name} lie at {times} times the law.")
    panels = [
        Panel("gain_low", " ".join([outcome(run), *remarks(run)]), partial(draw_scatter, run, rows, styles))
    ]
    if words:
        panels.append(
            Panel("gain_low over the law", " ".join(words), partial(draw_residuals, run, rows, styles))
        )
    return [
        Plot(
            name="collapse",
            title="The threshold law",
            reading=(
                "One filled point per block, with its 95 % interval; colour and marker tell the models "
                "apart. Hollow: the same at another β, which falls on the line by a theorem and is in no "
                "fit. Dashed: the law, slope −1. Solid: the fitted line, tinted over the interval of its "
                "slope. Right: the same, divided by the law. Logarithmic scales."
            ),
            panels=tuple(panels),
            columns=_COLUMNS,
            rows=tuple(tuple(row[key] for key in _COLUMNS) for row in run.rows),
        )
    ]


def draw_scatter(run: RunData, rows: Sequence[Row], styles: Styles, axes: Axes) -> None:
    values = known(row[key] for row in rows for key in _GAINS)
    # Room for the names, which stand where a falling line leaves it.
    _axes(axes, rows, "gain_low", (min(values) / 1.6, max(values) * 2.2))
    _lines(axes, run, lambda ratio: 1.0)
    for row in rows:
        _point(axes, row, styles, 1.0)
    _names(axes, rows, styles)
    slope, low, high = (run.summary.get(key) for key in ("slope", "slope_low", "slope_high"))
    lines = ["dashed: the law, slope −1"]
    if slope is not None:
        lines.insert(0, f"solid: slope {number(slope)}")
    if low is not None and high is not None:
        lines[0] += f" ({number(low)} to {number(high)})"
    for index, text in enumerate(reversed(lines)):
        axes.annotate(
            text,
            (0.02, 0.03),
            xycoords="axes fraction",
            xytext=(0, 14 * index),
            textcoords="offset points",
            color=MUTED,
            size=FONT_SIZE - 1.5,
        )


def draw_residuals(run: RunData, rows: Sequence[Row], styles: Styles, axes: Axes) -> None:
    values = [row[key] / row["predicted"] for row in rows for key in _GAINS if row[key] is not None]
    _axes(axes, rows, "times the law", (min([0.45, *values]) / 1.15, max([2.2, *values]) * 1.15))
    _lines(axes, run, lambda ratio: law(run, ratio) or 1.0)
    for row in rows:
        _point(axes, row, styles, row["predicted"])


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    names = list(dict.fromkeys(row["model"] for row in rows))
    return {
        name: (_COLOURS[index % len(_COLOURS)], MARKERS[index % len(MARKERS)])
        for index, name in enumerate(names)
    }


def _axes(axes: Axes, rows: Sequence[Row], unit: str, limits: tuple[float, float]) -> None:
    """Logarithmic axes that hold the displacement ratios and ``limits``."""
    ratios = [row["displacement_ratio"] for row in rows]
    low, high = min(ratios) / 1.4, max(ratios) * 1.4
    axes.set_xlabel("displacement ratio")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = log10(high / low)
    steps = (1, 2, 5) if decades < 1.2 else (1, 3) if decades < 2.5 else (1,)
    exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.set_ylabel(unit)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    log_ticks(axes, limits)


def _lines(axes: Axes, run: RunData, unit: Callable[[float], float]) -> None:
    """The law and the fitted line with the interval of its slope, all over ``unit`` of the ratio."""
    first, last = axes.get_xlim()
    ratios = [first * (last / first) ** (index / 40) for index in range(41)]
    slope, low, high = (run.summary.get(key) for key in ("slope", "slope_low", "slope_high"))
    line = [(ratio, height / unit(ratio)) for ratio in ratios if (height := fitted(run, ratio)) is not None]
    if line and slope is not None:
        if low is not None and high is not None:
            # The line turns about the centre of the points that were fitted.
            logs = [log10(row["displacement_ratio"]) for row in placed(run)]
            centre = 10 ** (sum(logs) / len(logs))
            ends = [
                [height * (ratio / centre) ** (end - slope) for ratio, height in line] for end in (low, high)
            ]
            axes.fill_between(ratios, ends[0], ends[1], color=PALETTE["band"][0], linewidth=0)
        axes.plot(*zip(*line, strict=True), color=INK, linewidth=1.3)
    predicted = [(ratio, height / unit(ratio)) for ratio in ratios if (height := law(run, ratio)) is not None]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), color=MUTED, linewidth=1.2, linestyle=LINES[3])


def _point(axes: Axes, row: Row, styles: Styles, unit: float) -> None:
    colour, marker = styles[row["model"]]
    hollow = row["role"] == "control"
    if row["gain_low_low"] is not None and row["gain_low_high"] is not None:
        ends = [row["gain_low_low"] / unit, row["gain_low_high"] / unit]
        axes.plot([row["displacement_ratio"]] * 2, ends, color=colour, linewidth=0.9, alpha=0.7)
    axes.plot(
        [row["displacement_ratio"]],
        [row["gain_low"] / unit],
        color=colour,
        marker=marker,
        markersize=5.0,
        markerfacecolor=PALETTE["paper"][0] if hollow else colour,
        markeredgewidth=1.1 if hollow else 0.0,
        linestyle="",
    )


def _names(axes: Axes, rows: Sequence[Row], styles: Styles) -> None:
    """Names of the models at the upper right, above a falling line; of many only the first."""
    hollow = {row["model"] for row in rows if row["role"] == "control"} - {
        row["model"] for row in rows if row["role"] == "point"
    }
    for name, (colour, marker) in list(styles.items())[:_MOST_NAMES]:
        axes.plot(
            [],
            [],
            color=colour,
            marker=marker,
            markersize=5.0,
            markerfacecolor=PALETTE["paper"][0] if name in hollow else colour,
            linestyle="",
            label=short_label(name, 30),
        )
    more = len(styles) - _MOST_NAMES
    if more > 0:
        axes.plot([], [], linestyle="", label=f"and {number(more, 0)} more")
    axes.legend(
        loc="upper right",
        frameon=False,
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.1,
        labelspacing=0.25,
        borderaxespad=0.0,
    )
