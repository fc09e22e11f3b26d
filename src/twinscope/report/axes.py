"""What panels of several verbs share: lines, thresholds, notes, and ticks of logarithmic axes.

Covers ink only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from twinscope.report.drawing import FONT_SIZE, LINES, PALETTE, EndLabel
from twinscope.report.wording import small

INK, MUTED = PALETTE["ink"][0], PALETTE["muted"][0]


@dataclass(frozen=True)
class Line:
    """How one series is told from the others: by colour, by dashes and by marker."""

    colour: str
    dashes: Any
    marker: str

    width: float = 1.6

    def options(self, points: int) -> dict[str, Any]:
        """Keyword arguments for a line of ``points`` points; at most about eight carry a marker."""
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "linewidth": self.width,
            "marker": self.marker,
            "markevery": max(1, points // 8),
            "markeredgewidth": 0,
        }


def threshold(axes: Axes, value: float, label: str) -> EndLabel:
    """Draw a dashed line across the axes; the result is its label for the right end."""
    axes.axhline(value, color=MUTED, linewidth=0.9, linestyle=LINES[4])
    return EndLabel(value, label, MUTED, MUTED)


def note(axes: Axes, text: str) -> None:
    """Write a remark in the upper right corner."""
    axes.text(
        0.995, 0.985, text, transform=axes.transAxes, ha="right", va="top", color=MUTED, size=FONT_SIZE - 1.5
    )


def log_ticks(axes: Axes, limits: tuple[float, float]) -> None:
    axes.yaxis.set_major_locator(FixedLocator(ticks_between(*limits)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))


def short_power(value: float, plain: float = 1e-4) -> str:
    """A tick: plain from ``plain`` on, else with a power of ten."""
    if value >= plain:
        return f"{value:g}"
    mantissa, times, power = small(value).partition("×")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return power if mantissa == "1" else f"{mantissa}{times}{power}"


def ticks_between(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 over few decades, powers of ten over many."""
    decades = log10(high / low)
    steps = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.5 else (1,)
    exponents = range(floor(log10(low)), floor(log10(high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
    return [tick for tick in ticks if low <= tick <= high]
