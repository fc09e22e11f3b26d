"""The figure of a probe: times of a matrix product by shape and threads, rates of reading and converting.

Covers rows, words, data and ink. Times are in milliseconds, rates in MiB per second of what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from twinscope.report.axes import INK, MUTED
from twinscope.report.drawing import FONT_SIZE, PALETTE, Panel, Plot
from twinscope.report.probe.findings import part, products, shape, threads
from twinscope.report.reading import Row, RunData
from twinscope.report.wording import count, number, small

_BAR, _FIRST = PALETTE["arm-1"][0], PALETTE["arm-2"][0]
_MIB = 1024 * 1024


def figures(run: RunData) -> list[Plot]:
    """The one figure, if a product was timed."""
    rows = products(run)
    if not rows:
        return []
    panels = [Panel("fp32 product", _words(rows), partial(draw_products, rows))]
    rates = _rates(run)
    if rates:
        words = " ".join(f"{name}: {number(rate, 0)} MiB/s." for name, rate in rates)
        panels.append(Panel("reading and converting", words, partial(draw_rates, rates)))
    return [
        Plot(
            name="probe",
            title="What this machine does in a second",
            reading=(
                "Left: X (32 rows or as configured) times W of the shape given; the bar is the best of the "
                "calls after the first, dots are all of them, the diamond is the first call. Right: a file "
                "from the disk and again from memory, and bf16 turned into fp32 by one thread, in MiB of "
                "bf16. Shorter is better on the left, longer on the right."
            ),
            panels=tuple(panels),
            columns=("shape", "threads", "first_s", "next_s", "gflop_per_s"),
            rows=tuple(
                (
                    "x".join(map(str, row["shape"])),
                    row["threads"],
                    row["first_s"],
                    " ".join(f"{value:.6g}" for value in row["next_s"]),
                    row["gflop_per_s"],
                )
                for row in rows
            ),
        )
    ]


def draw_products(rows: Sequence[Row], axes: Axes) -> None:
    times = [1e3 * value for row in rows for value in (row["first_s"], *row["next_s"])]
    _bars_below(
        axes, 1.08 * max(times), "milliseconds", [f"{shape(row)}\n{threads(row)}" for row in rows], 1.0
    )
    for line, row in enumerate(rows):
        best = 1e3 * min(row["next_s"], default=row["first_s"])
        axes.barh([line], [best], height=0.5, color=_BAR, alpha=0.45, linewidth=0)
        axes.plot(
            [1e3 * value for value in row["next_s"]],
            [line] * len(row["next_s"]),
            color=_BAR,
            marker="o",
            markersize=4.0,
            linestyle="",
        )
        axes.plot([1e3 * row["first_s"]], [line], color=_FIRST, marker="D", markersize=4.5, linestyle="")
    axes.plot([], [], color=_FIRST, marker="D", markersize=4.5, linestyle="", label="first call")
    axes.plot([], [], color=_BAR, marker="o", markersize=4.0, linestyle="", label="next calls")
    axes.legend(
        loc="upper right",
        frameon=False,
        ncols=2,
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.2,
        columnspacing=1.0,
        borderaxespad=0.0,
    )


def draw_rates(rates: Sequence[tuple[str, float]], axes: Axes) -> None:
    values = [rate for _, rate in rates]
    _bars_below(axes, 1.3 * max(values), "MiB/s", [name for name, _ in rates], 0.0)
    for line, rate in enumerate(values):
        axes.barh([line], [rate], height=0.5, color=_BAR, alpha=0.45, linewidth=0)
        # By the offset, not the place: a text that starts right of 1 would count as a label of a line.
        axes.annotate(
            f" {count(round(rate))}",
            (rate, line),
            xytext=(0.5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            size=FONT_SIZE - 0.5,
        )


def _rates(run: RunData) -> list[tuple[str, float]]:
    reading, conversion = part(run, "reading"), part(run, "conversion")
    found = []
    if reading is not None:
        found = [("disk", reading["disk_mib_per_s"]), ("memory", reading["cache_mib_per_s"])]
    if conversion is not None:
        found.append(("bf16\nto fp32", conversion["million_values_per_s"] * 1e6 * 2 / _MIB))
    return [(name, rate) for name, rate in found if rate]


def _bars_below(axes: Axes, most: float, name: str, lines: Sequence[str], room: float) -> None:
    """An axis from 0 to ``most`` below named lines, the first on top, with ``room`` lines free above them."""
    axes.set_xlim(0, most)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(name)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.set_ylim(len(lines) - 0.4, -0.5 - room)
    axes.yaxis.set_major_locator(FixedLocator(range(len(lines))))
    axes.yaxis.set_major_formatter(FixedFormatter(list(lines)))
    axes.tick_params(axis="y", length=0, labelsize=FONT_SIZE - 3)


def _words(rows: Sequence[Row]) -> str:
    return " ".join(
        f"W {shape(row)}, {threads(row)}: first call {small(1e3 * row['first_s'])} ms, then "
        f"{small(1e3 * min(row['next_s'], default=row['first_s']))} ms at best, "
        f"{number(row['gflop_per_s'], 0)} GFLOP/s."
        for row in rows
    )
