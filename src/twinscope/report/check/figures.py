"""The figure of a parity check: differences of every text, and of every layer, against their tolerances.

Covers rows, words, data and ink. Differences of states are relative, of losses in nats; exact equality stands
on a line of its own below the logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twinscope.report.axes import short_power, threshold, ticks_between
from twinscope.report.check.findings import rows_of
from twinscope.report.drawing import PALETTE, Panel, Plot, end_labels
from twinscope.report.reading import RunData
from twinscope.report.wording import number, small, span

_MARK = PALETTE["arm-1"][0]


def figures(run: RunData) -> list[Plot]:
    """The one figure, if anything was compared."""
    summary = run.summary
    texts, layers = rows_of(run, "text"), rows_of(run, "layer")
    if not texts or "hidden_tolerance" not in summary:
        return []
    states, losses = summary["hidden_tolerance"], summary["nll_tolerance"]
    series = [
        ("final states", "text", [row["hidden_difference"] for row in texts], states, "relative difference"),
        ("loss of a token", "text", [row["nll_difference"] for row in texts], losses, "nats, largest"),
    ]
    if layers:
        series.append(
            (
                "what enters a layer",
                "layer, 0 fed by the embedding",
                [row["difference"] for row in layers],
                states,
                "relative difference",
            )
        )
    return [
        Plot(
            name="parity",
            title="Streamed forward against the library's",
            reading=(
                "Each dot is one text, or one layer over all texts. The dashed line is the tolerance; dots "
                "at 0 are equal to the last bit."
            ),
            panels=tuple(
                Panel(
                    title[0].upper() + title[1:],
                    f"{title}: {span(values, small)} over {number(len(values), 0)} "
                    f"{place.partition(',')[0]}s; tolerance {small(tolerance)}.",
                    partial(draw_differences, values, tolerance, place, unit, 0 if "layer" in place else 1),
                )
                for title, place, values, tolerance, unit in series
            ),
            columns=("of", "index", "difference", "tolerance"),
            rows=tuple(
                (title, index, value, tolerance)
                for title, _, values, tolerance, _ in series
                for index, value in enumerate(values)
            ),
        )
    ]


def draw_differences(
    values: Sequence[float], tolerance: float, place: str, unit: str, first: int, axes: Axes
) -> None:
    """Dots over text or layer; ``first`` is the number of the first."""
    positive = [value for value in values if value > 0]
    low = min([*positive, tolerance / 100]) / 1.8
    high = max([*positive, tolerance]) * 2.5
    exact = any(value == 0 for value in values)
    # Zero has no place on the axis; it gets one of its own below it.
    edge = low / (high / low) ** 0.12
    axes.set_yscale("log")
    axes.set_ylim(edge / (high / low) ** 0.07 if exact else low, high)
    ticks = ticks_between(low, high)
    while len(ticks) > 7:
        ticks = ticks[::2]
    axes.yaxis.set_major_locator(FixedLocator([edge, *ticks] if exact else ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FixedFormatter([*(["0"] if exact else []), *(short_power(tick) for tick in ticks)])
    )
    axes.set_ylabel(unit)
    axes.set_xlabel(place)
    axes.set_xlim(first - 0.6, first + len(values) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 0)))
    if exact:
        axes.axhline(low / (high / low) ** 0.04, color=PALETTE["rule"][0], linewidth=0.8)
    axes.plot(
        range(first, first + len(values)),
        [value or edge for value in values],
        color=_MARK,
        marker="o",
        markersize=4.6,
        linestyle="",
    )
    end_labels(axes, [threshold(axes, tolerance, short_power(tolerance))])
