"""How each kind of panel of a training run is drawn on its axes.

Covers ink only: which rows make a panel, and what it says in words, is in train_figures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import floor, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twinscope.report.axes import INK, MUTED, Line, log_ticks, note, short_power, threshold, ticks_between
from twinscope.report.drawing import (
    FONT_SIZE,
    LINES,
    MARKERS,
    PALETTE,
    EndLabel,
    block_colours,
    end_labels,
    short_label,
)
from twinscope.report.reading import Row
from twinscope.report.train.findings import LARGEST_RESIDUAL, LEAST_DISPLACEMENT, arm_label
from twinscope.report.wording import cosine, count, known, number, signed

#: Half-width of the band of the difference figure, nats per token: within it, the twins count as close.
CLOSE = 0.015
#: 1 − cosine below this is rounding, and has no place on a logarithmic axis.
SMALLEST_GAP = 1e-9


def draw_losses(
    lines: Mapping[str, Sequence[tuple[int, float]]],
    baselines: Mapping[str, float],
    limits: tuple[float, float],
    styles: Mapping[str, Line],
    axes: Axes,
) -> None:
    _prepare(axes, "nats per token", [step for points in lines.values() for step, _ in points])
    axes.set_ylim(*limits)
    labels = [
        threshold(axes, value, f"{short_label(name)} {number(value, 2)}") for name, value in baselines.items()
    ]
    # The thinnest last: a reference that lies on its twin shows as dashes on a wider line.
    for arm, points in sorted(lines.items(), key=lambda item: -styles[item[0]].width):
        axes.plot(*zip(*points, strict=True), **styles[arm].options(len(points)))
        label = f"{short_label(arm_label(arm), 12)} {number(points[-1][1])}"
        labels.append(EndLabel(points[-1][1], label, styles[arm].colour, styles[arm].colour))
    end_labels(axes, labels)


def draw_windows(windows: Sequence[Row], style: Line, axes: Axes) -> None:
    values = [0.0, CLOSE, -CLOSE]
    for part in windows:
        values += known(part[key] for key in ("mean", "low", "high"))
        values += known(seed[key] for seed in part["per_seed"] for key in ("mean", "low", "high"))
    _prepare(axes, "nats per token", [step for part in windows for step in (part["start"], part["end"])])
    _zero_and_band(axes, values)
    seeds = sorted({seed["seed"] for part in windows for seed in part["per_seed"]})
    for part in windows:
        start, end = part["start"], part["end"]
        width = end - start or 1
        start, width = start + 0.03 * width, 0.94 * width
        if part["low"] is not None and part["high"] is not None:
            height = part["high"] - part["low"]
            axes.broken_barh(
                [(start, width)], (part["low"], height), facecolor=style.colour, alpha=0.2, linewidth=0
            )
        if part["mean"] is not None:
            axes.plot([start, start + width], [part["mean"]] * 2, color=style.colour, linewidth=1.8)
        for seed in part["per_seed"]:
            place = start + width * (seeds.index(seed["seed"]) + 1) / (len(seeds) + 1)
            if seed["low"] is not None and seed["high"] is not None:
                axes.plot([place] * 2, [seed["low"], seed["high"]], color=INK, linewidth=0.8)
            if seed["mean"] is not None:
                axes.plot([place], [seed["mean"]], **_seed_marker(seeds.index(seed["seed"])))
    _seed_legend(axes, seeds)


def draw_paired(by_seed: Mapping[int, Sequence[tuple[int, float]]], style: Line, axes: Axes) -> None:
    points = [point for part in by_seed.values() for point in part]
    _prepare(axes, "nats per token", [step for step, _ in points])
    _zero_and_band(axes, [0.0, CLOSE, -CLOSE, *(value for _, value in points)])
    for index, part in enumerate(by_seed.values()):
        axes.plot(*zip(*part, strict=True), color=style.colour, linewidth=1.0)
        axes.plot(*zip(*part, strict=True), **_seed_marker(index))
    _seed_legend(axes, list(by_seed))


def draw_cosines(rows: Sequence[Row], depth: int, limits: tuple[float, float], axes: Axes) -> None:
    steps = [row["step"] for row in rows]
    _prepare(axes, "cosine", steps)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    _cosine_ticks(axes, limits)
    control = [(row["step"], row["control_cosine"]) for row in rows if row["control_cosine"] is not None]
    if control:
        worst = min(value for _, value in control)
        if max(1 - worst, SMALLEST_GAP) < limits[1]:
            note(axes, f"↑ K = 0 control, worst: {cosine(worst)}")
        else:
            points = [(step, max(1 - value, SMALLEST_GAP)) for step, value in control]
            axes.plot(*zip(*points, strict=True), color=MUTED, linestyle=LINES[2], linewidth=1.2)
            note(axes, f"dotted: K = 0 control, worst {cosine(worst)}")
    end_labels(
        axes, _draw_blocks(axes, rows, "block_cosine", depth, lambda value: max(1 - value, SMALLEST_GAP))
    )


def draw_displacements(rows: Sequence[Row], depth: int, limits: tuple[float, float], axes: Axes) -> None:
    _prepare(axes, "displacement ratio", [row["step"] for row in rows])
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    log_ticks(axes, limits)
    limit = threshold(axes, LEAST_DISPLACEMENT, f"limit {short_power(LEAST_DISPLACEMENT)}")
    labels = _draw_blocks(axes, rows, "displacement_ratio", depth, lambda value: value if value > 0 else None)
    end_labels(axes, [*labels, limit])


def draw_residuals(
    groups: Sequence[tuple[str, int, Sequence[Row]]], styles: Mapping[str, Line], axes: Axes
) -> None:
    values = [row["residual"] for _, _, part in groups for row in part if row["residual"] > 0]
    limits = (min([*values, LARGEST_RESIDUAL]) / 1.6, max([*values, LARGEST_RESIDUAL]) * 1.6)
    _prepare(axes, "relative residual", [row["step"] for _, _, part in groups for row in part])
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    log_ticks(axes, limits)
    seeds = sorted({seed for _, seed, _ in groups})
    labels = [threshold(axes, LARGEST_RESIDUAL, f"limit {LARGEST_RESIDUAL}")]
    for arm, seed, part in groups:
        points = [(row["step"], row["residual"]) for row in part if row["residual"] > 0]
        if not points:
            continue
        style = replace(styles[arm], marker=MARKERS[seeds.index(seed) % len(MARKERS)], width=1.6)
        axes.plot(*zip(*points, strict=True), **style.options(len(points)))
        label = f"{short_label(arm_label(arm), 10)}, seed {seed}"
        labels.append(EndLabel(points[-1][1], label, style.colour, style.colour))
    end_labels(axes, labels)


def _draw_blocks(
    axes: Axes, rows: Sequence[Row], key: str, depth: int, place: Callable[[float], float | None]
) -> list[EndLabel]:
    """One line per block; the result labels their right ends, of many blocks only some."""
    labels = []
    labelled = range(1, depth + 1) if depth <= 8 else {1, (depth + 1) // 2, depth}
    for index, (_, light, _) in enumerate(block_colours(depth)):
        points = [
            (row["step"], height)
            for row in rows
            if index < len(row[key]) and row[key][index] is not None
            if (height := place(row[key][index])) is not None
        ]
        if not points:
            continue
        marker = MARKERS[index % len(MARKERS)] if depth <= len(MARKERS) else ""
        axes.plot(
            *zip(*points, strict=True),
            color=light,
            linewidth=1.4 if depth <= 12 else 1.0,
            marker=marker,
            markersize=3.6,
            markevery=max(1, len(points) // 8),
            markeredgewidth=0,
        )
        if index + 1 in labelled:
            labels.append(EndLabel(points[-1][1], f"block {index + 1}", light, INK))
    return labels


def _prepare(axes: Axes, unit: str, steps: Sequence[int]) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    first, last = min(0, *steps), max(steps)
    margin = 0.02 * (last - first or 1)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value))))


def _zero_and_band(axes: Axes, values: Sequence[float]) -> None:
    margin = 0.12 * (max(values) - min(values))
    axes.set_ylim(min(values) - margin, max(values) + 1.6 * margin)
    axes.grid(False)
    axes.axhspan(-CLOSE, CLOSE, color=PALETTE["band"][0], linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value, 3)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.annotate(
        f"within ±{CLOSE}",
        (0.01, -CLOSE),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        color=MUTED,
        size=FONT_SIZE - 1.5,
    )


def _seed_marker(index: int) -> dict[str, Any]:
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "color": INK,
        "markerfacecolor": PALETTE["paper"][0] if index % 2 else INK,
        "markeredgewidth": 1.0,
        "markersize": 4.5,
        "linestyle": "",
    }


def _seed_legend(axes: Axes, seeds: Sequence[int]) -> None:
    shown = seeds[:6]
    for index, seed in enumerate(shown):
        axes.plot([], [], label=f"seed {seed}", **_seed_marker(index))
    axes.legend(
        loc="upper right",
        frameon=False,
        ncols=min(3, len(shown)),
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.1,
        columnspacing=0.9,
        borderaxespad=0.0,
    )


def _cosine_ticks(axes: Axes, limits: tuple[float, float]) -> None:
    ticks = ticks_between(limits[1], limits[0])
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda gap, _: _cosine_at(gap)))


def _cosine_at(gap: float) -> str:
    digits = max(1, -floor(log10(gap) + 1e-9))
    return number(1 - gap, digits) if digits <= 6 else f"1−{short_power(gap)}"
