"""How the panels of a leak spectrum are drawn: projections over gain, windows, and values per block.

Covers ink only: which rows make a panel, and what it says in words, is in leak_figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, MUTED, log_ticks, short_power, threshold
from twinscope.report.drawing import FONT_SIZE, LINES, PALETTE, end_labels
from twinscope.report.reading import Row
from twinscope.report.wording import known, number, power_of_two

_EP, _RECOMMENDED = PALETTE["arm-1"][0], PALETTE["arm-2"][0]
_PAPER, _REFERENCE = PALETTE["paper"][0], PALETTE["reference"][0]
#: Half of the linear part of a symmetric logarithmic axis, in decades.
_LINEAR = 0.5

#: An estimate with its interval; any of the three may be None.
Estimate = tuple[float | None, float | None, float | None]
#: A place on the x axis and an estimate.
Placed = tuple[float, float | None, float | None, float | None]


@dataclass(frozen=True)
class Scale:
    """What the panels of one figure share: the range of the gains, of the projections, and the band."""

    gains: tuple[float, float]
    projections: tuple[float, float]
    band: float


def projection_limits(values: Sequence[float], band: float) -> tuple[float, float]:
    """Limits of a symmetric logarithmic axis that hold the values and the band, with room for a legend."""
    return min(-3 * band, 1.35 * min(values, default=0)), max(8 * band, 1.35 * max(values, default=0))


def draw_projections(
    rows: Sequence[Row],
    control: Estimate,
    edges: Sequence[float],
    scale: Scale,
    names: Sequence[str],
    axes: Axes,
) -> None:
    _gain_axis(axes, scale.gains, ticks=4)
    axes.set_ylabel("projection")
    _projection_axis(axes, scale.projections, scale.band)
    first, last = scale.gains
    decades = log2(last / first) or 1.0
    beside = first / 2 ** (0.19 * decades)
    axes.set_xlim(first / 2 ** (0.27 * decades), last * 2 ** (0.05 * decades))
    ticks = [beside, *axes.xaxis.get_majorticklocs()]
    labels = ["control", *(_gain_label(gain, last) for gain in ticks[1:])]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.axvline(first / 2 ** (0.095 * decades), color=PALETTE["rule"][0], linewidth=0.8)
    for edge in edges:
        axes.axvline(edge, color=MUTED, linewidth=1.0, linestyle=LINES[2])
    shift = 2 ** (0.028 * decades)
    mean = [(row["gain"] * shift, *_estimate(row, "mean_projection")) for row in rows]
    _intervals(axes, mean, MUTED, 0.8)
    _points(axes, mean, MUTED, "s", hollow=True, size=3.2)
    measured = [(row["gain"], *_estimate(row, "projection")) for row in rows]
    _intervals(axes, measured, _EP, 1.3)
    _points(axes, measured, _EP, "o", line=1.5, size=4.0)
    _intervals(axes, [(beside, *control)], _REFERENCE, 1.3)
    _points(axes, [(beside, *control)], _REFERENCE, "D", hollow=True, size=4.5)
    if "paired" in names:
        axes.plot([], [], color=_EP, marker="o", markersize=4.0, linewidth=1.5, label="paired")
    if "mean" in names:
        style = {"color": MUTED, "marker": "s", "markersize": 3.2, "markerfacecolor": _PAPER}
        axes.plot([], [], linestyle="", label="mean", **style)
    if names:
        _legend(axes)


def draw_windows(
    windows: Sequence[tuple[float, float] | None],
    edges: Sequence[tuple[Estimate, Estimate]],
    recommended: Sequence[float | None],
    scale: Scale,
    axes: Axes,
) -> None:
    ends = known(value for pair in edges for edge in pair for value in edge)
    # An interval over many octaves would leave no room for the windows.
    low = max(min([scale.gains[0], *ends, *known(recommended)]), scale.gains[0] / 64)
    high = min(max([scale.gains[1], *ends, *known(recommended)]), scale.gains[1] * 64)
    _gain_axis(axes, (low, high), ticks=7)
    octaves = log2(high / low) or 1.0
    axes.set_xlim(low / 2 ** (0.05 * octaves), high * 2 ** (0.05 * octaves))
    axes.grid(False)
    axes.set_ylabel("block")
    axes.set_ylim(len(windows) + 0.75, -0.35)
    axes.yaxis.set_major_locator(FixedLocator(_counted(len(windows))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 0)))
    for block, (found, pair, gain) in enumerate(zip(windows, edges, recommended, strict=True), 1):
        axes.plot(scale.gains, [block] * 2, color=PALETTE["rule"][0], linewidth=1.0)
        if found is None:
            middle = (scale.gains[0] * scale.gains[1]) ** 0.5
            axes.text(
                middle,
                block,
                f"no gain inside ±{scale.band:g}",
                ha="center",
                va="center",
                color=MUTED,
                size=FONT_SIZE - 1.5,
                bbox={"facecolor": _PAPER, "edgecolor": "none", "pad": 1.5},
            )
            continue
        axes.plot(found, [block] * 2, color=_EP, linewidth=6.0, alpha=0.45, solid_capstyle="butt")
        for (value, lower, upper), end, arrow in zip(pair, found, "<>", strict=True):
            if value is None:
                axes.plot([end], [block], color=_EP, marker=arrow, markersize=6.5, linestyle="")
                continue
            axes.plot([value] * 2, [block - 0.27, block + 0.27], color=_EP, linewidth=1.8)
            if lower is not None and upper is not None:
                axes.plot([lower, upper], [block] * 2, color=INK, linewidth=1.1)
        if gain is not None:
            axes.plot([gain], [block], color=_RECOMMENDED, marker="D", markersize=4.5, linestyle="")
    if known(recommended):
        axes.plot(
            [], [], color=_RECOMMENDED, marker="D", markersize=4.5, linestyle="", label="recommended gain"
        )
    axes.plot([], [], color=_EP, linewidth=6.0, alpha=0.45, label="inside the band")
    _legend(axes)


def draw_parts(
    odd: Sequence[Estimate], even: Sequence[Estimate], control: Sequence[Estimate], band: float, axes: Axes
) -> None:
    values = known(value for part in (*odd, *even, *control) for value in part)
    axes.set_ylabel("projection at gain 1")
    _projection_axis(axes, projection_limits(values, band), band)
    _block_axis(axes, len(odd))
    for series, place, colour, marker, name in (
        (control, -0.22, _REFERENCE, "D", "control"),
        (odd, 0.0, _RECOMMENDED, "s", "odd"),
        (even, 0.22, _EP, "o", "even"),
    ):
        points = [(block + place, *part) for block, part in enumerate(series, 1)]
        hollow = name == "control"
        _intervals(axes, points, colour, 1.3)
        _points(axes, points, colour, marker, hollow=hollow, size=4.5)
        axes.plot(
            [],
            [],
            color=colour,
            marker=marker,
            markersize=4.5,
            markerfacecolor=_PAPER if hollow else colour,
            linestyle="",
            label=name,
        )
    _legend(axes)


def draw_ratios(ratios: Sequence[float | None], unit_roundoff: float | None, axes: Axes) -> None:
    points = [(block, value) for block, value in enumerate(ratios, 1) if value]
    values = [value for _, value in points] + ([unit_roundoff] if unit_roundoff else [])
    limits = (min(values) / 1.8, max(values) * 1.8)
    axes.set_ylabel("displacement ratio")
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    log_ticks(axes, limits)
    _block_axis(axes, len(ratios))
    axes.plot(*zip(*points, strict=True), color=_EP, linewidth=1.0, marker="o", markersize=4.5)
    if unit_roundoff:
        end_labels(axes, [threshold(axes, unit_roundoff, f"u = {short_power(unit_roundoff)}")])


def _projection_axis(axes: Axes, limits: tuple[float, float], band: float) -> None:
    axes.set_yscale("symlog", linthresh=band, linscale=_LINEAR)
    axes.set_ylim(*limits)
    powers = [10.0**exponent for exponent in range(-9, 10) if 10.0**exponent >= 2.4 * band]
    ticks = [
        value for size in (0.0, band, *powers) for value in {size, -size} if limits[0] <= value <= limits[1]
    ]
    axes.yaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")
    )
    axes.axhspan(-band, band, color=PALETTE["band"][0], linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.9)


def _gain_axis(axes: Axes, gains: tuple[float, float], ticks: int) -> None:
    """A logarithmic axis with at most ``ticks`` powers of two, else with the two gains."""
    axes.set_xlabel("gain")
    axes.set_xscale("log", base=2)
    first, last = ceil(log2(gains[0]) - 1e-9), int(log2(gains[1]) + 1e-9)
    step = max(1, ceil((last - first + 1) / ticks))
    places = [2.0**exponent for exponent in range(first, last + 1, step)] or list(dict.fromkeys(gains))
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _gain_label(value, gains[1])))


def _gain_label(gain: float, largest: float) -> str:
    exponent = log2(gain)
    if largest < 10_000 or gain == 1 or exponent != round(exponent):
        return f"{gain:g}"
    return power_of_two(round(exponent))


def _block_axis(axes: Axes, count: int) -> None:
    axes.set_xlabel("block")
    axes.set_xlim(0.4, count + 0.6)
    axes.xaxis.set_major_locator(FixedLocator(_counted(count)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 0)))


def _counted(count: int) -> list[int]:
    """The blocks that bear their number: all, or of a deep model the first and every fifth or tenth."""
    step = 1 if count <= 16 else 5 if count <= 60 else 10
    return [block for block in range(1, count + 1) if block == 1 or block % step == 0]


def _estimate(row: Row, key: str) -> Estimate:
    return row[key], row[f"{key}_low"], row[f"{key}_high"]


def _intervals(axes: Axes, points: Sequence[Placed], colour: str, width: float) -> None:
    for place, _, low, high in points:
        if low is not None and high is not None:
            axes.plot([place] * 2, [low, high], color=colour, linewidth=width)


def _points(
    axes: Axes,
    points: Sequence[Placed],
    colour: str,
    marker: str,
    *,
    hollow: bool = False,
    line: float = 0.0,
    size: float,
) -> None:
    shown = [(place, value) for place, value, *_ in points if value is not None]
    if shown:
        axes.plot(
            *zip(*shown, strict=True),
            color=colour,
            linewidth=line,
            linestyle="-" if line else "",
            marker=marker,
            markersize=size,
            markerfacecolor=_PAPER if hollow else colour,
            markeredgewidth=1.0 if hollow else 0.0,
        )


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="upper right",
        frameon=False,
        ncols=3,
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.4,
        handlelength=1.2,
        columnspacing=1.0,
        borderaxespad=0.0,
    )
