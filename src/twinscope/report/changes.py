"""Axes of changes of a loss: linear around zero, logarithmic beyond, with the margin as a band.

Covers scales, ticks and limits; values are in the unit of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import copysign, log10
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, short_power
from twinscope.report.drawing import PALETTE

Along = Literal["x", "y"]


def change_limits(
    values: Iterable[float], linear: float, pad: tuple[float, float] = (0.05, 0.05)
) -> tuple[float, float]:
    """Limits that hold the values and ±``linear``, with a share of the axis free on either side."""
    places = [_place(value, linear) for value in (-linear, linear, *values)]
    low, high = min(places), max(places)
    room = (high - low) / (1 - sum(pad))
    return _value(low - pad[0] * room, linear), _value(high + pad[1] * room, linear)


def change_axis(
    axes: Axes,
    along: Along,
    linear: float,
    limits: tuple[float, float],
    margin: float | None = None,
    reach: float = 1.0,
) -> None:
    """Linear within ±``linear`` and logarithmic beyond; ±``margin`` is tinted, 0 is a line.

    Tint and lines cross the axes up to the share ``reach``. Without a margin the axis is of values that
    are never negative, and its ticks have no sign.
    """
    axis = axes.xaxis if along == "x" else axes.yaxis
    scale, limit = (axes.set_xscale, axes.set_xlim) if along == "x" else (axes.set_yscale, axes.set_ylim)
    span, line = (axes.axvspan, axes.axvline) if along == "x" else (axes.axhspan, axes.axhline)
    # One decade for the linear part of either side, as everywhere here.
    scale("symlog", linthresh=linear, linscale=1.0)
    limit(*limits)
    axis.set_major_locator(FixedLocator(change_ticks(linear, limits, 7 if along == "x" else 9)))
    axis.set_minor_locator(NullLocator())
    written = signed_power if margin is not None else short_power
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value) if value else "0"))
    if margin is not None:
        span(-margin, margin, 0.0, reach, color=PALETTE["band"][0], linewidth=0, zorder=0.4)
        for edge in (-margin, margin):
            line(edge, 0.0, reach, color=PALETTE["rule"][0], linewidth=0.9, zorder=0.5)
    line(0.0, 0.0, reach, color=INK, linewidth=0.9, zorder=0.6)


def change_ticks(linear: float, limits: tuple[float, float], most: int = 7) -> list[float]:
    """0, ±``linear`` and steps beyond it, as fine as ``most`` of them allow."""
    for steps, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3), ((1,), 4)):
        sizes = [linear * step * 10.0 ** (every * power) for power in range(9) for step in steps]
        ticks = [0.0] if limits[0] <= 0 <= limits[1] else []
        ticks += [value for size in sizes for value in (size, -size) if limits[0] <= value <= limits[1]]
        if len(ticks) <= most:
            break
    return sorted(ticks)


def signed_power(value: float) -> str:
    """A tick with its sign: +0.01, −0.3, 0, +10⁻⁵."""
    if value == 0:
        return "0"
    # A sign makes +0.0001 too wide for the room left of an axis.
    return ("+" if value > 0 else "−") + short_power(abs(float(f"{value:.6g}")), 1e-3)


def linear_part(values: Iterable[float], decades: int = 3) -> float:
    """The power of ten below the smallest value, but at most ``decades`` below the largest."""
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return 1e-3
    largest, smallest = max(sizes), min(sizes)
    return 10.0 ** _floor(max(log10(smallest), log10(largest) - decades))


def _floor(value: float) -> int:
    # 10 to this power may exceed the value by a rounding.
    return int(value // 1) if abs(value - round(value)) > 1e-9 else round(value)


def _place(value: float, linear: float) -> float:
    """Where a value stands, in decades from 0."""
    size = abs(value) / linear
    return copysign(size if size <= 1 else 1 + log10(size), value)


def _value(place: float, linear: float) -> float:
    size = abs(place)
    return copysign(linear * (size if size <= 1 else 10 ** (size - 1)), place)
