"""The figures of a leak spectrum: projection over gain, operating windows, and the parts at gain 1.

Covers which rows make a panel, how a figure is read, its content in words and its data; leak_panels.py
puts it on axes. A projection is relative to the backpropagation gradient and has no unit; blocks count
from 1; intervals are at 95 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from twinscope.report.drawing import PANEL_HEIGHT, PANEL_WIDTH, SMALL_PANEL, Panel, Plot
from twinscope.report.leak.findings import blocks, gain, gains, label, per_block, reasons, spectrum, window
from twinscope.report.leak.panels import (
    Estimate,
    Scale,
    draw_parts,
    draw_projections,
    draw_ratios,
    draw_windows,
    projection_limits,
)
from twinscope.report.reading import Row, RunData
from twinscope.report.wording import blocks_named, interval, known, small, span

#: More panels than this are a wall: of a deeper model the figure shows blocks evenly spread over it.
MOST_PANELS = 12


def figures(run: RunData) -> list[Plot]:
    """The figures that the run has data for, in the order of the report."""
    made = (projections(run), windows(run), at_gain_one(run))
    return [plot for plot in made if plot is not None]


def projections(run: RunData) -> Plot | None:
    """Projection of the leak over gain, a panel per block, with the control beside it."""
    band = run.summary.get("band")
    measured = [
        block
        for block in range(1, blocks(run) + 1)
        if known(row["projection"] for row in spectrum(run, block))
    ]
    if not measured or band is None:
        return None
    shown = spread_over(measured, MOST_PANELS)
    controls = _controls(run)
    rows = {block: spectrum(run, block) for block in shown}
    values = known(
        value
        for block in shown
        for value in (
            *(row[key] for row in rows[block] for key in ("projection", "projection_low", "projection_high")),
            *(row["mean_projection"] for row in rows[block]),
            *controls[block - 1],
        )
    )
    scale = Scale(gains(run), projection_limits(values, band), band)
    ratios = per_block(run, "displacement_ratio")
    names = ["paired"]
    if known(row["mean_projection"] for block in shown for row in rows[block]):
        names.append("mean")
    panels = []
    for block in shown:
        edges = known(per_block(run, key)[block - 1] for key in ("gain_low", "gain_high"))
        draw = partial(draw_projections, rows[block], controls[block - 1], edges, scale, names)
        names = []
        panels.append(Panel(f"Block {block} · ρ = {small(ratios[block - 1])}", _in_words(run, block), draw))
    reading = (
        "Bias of the EP gradient along the BP gradient of the same batches, where 0 is none and −1 a "
        "response that is lost. Filled: the paired projection with its 95 % interval. Light squares: the "
        "response along the mean gradient, another estimand. Diamond: the control on the same batches. "
        f"Shaded: within ±{band:g}; dotted: the edges of the operating window. ρ is the displacement ratio "
        f"at gain 1. Symmetric logarithmic scale, linear inside ±{band:g}; the axes are shared."
    )
    if len(shown) < len(measured):
        reading += f" Shown: {len(shown)} of {len(measured)} blocks; the tables have all."
    without = [block for block in shown if not known(row["mean_projection"] for row in rows[block])]
    if without:
        reading += f" No mean projection exists in {blocks_named(without)}: the tables say why."
    return Plot(
        name="projection-over-gain",
        title=_titled(run, "Projection of the leak over gain, per block"),
        reading=reading,
        panels=tuple(panels),
        columns=("block", "gain", "beta_sign", *_PROJECTIONS),
        rows=(
            *(
                (row["block"], row["gain"], row["beta_sign"], *(row[key] for key in _PROJECTIONS))
                for row in sorted(run.rows, key=lambda row: (row["block"], -row["beta_sign"], row["gain"]))
            ),
            *(
                (block, "control", 1, *part, None, None, None)
                for block, part in enumerate(controls, 1)
                if any(value is not None for value in part)
            ),
        ),
        size=SMALL_PANEL,
    )


def windows(run: RunData) -> Plot | None:
    """The gains at which each block is usable, with the recommended gain."""
    band = run.summary.get("band")
    if band is None or "gain_low" not in run.summary or "gain_high" not in run.summary or not run.rows:
        return None
    numbers = range(1, blocks(run) + 1)
    found = [window(run, block) for block in numbers]
    lower, upper = (_estimates(run, key) for key in ("gain_low", "gain_high"))
    advised = per_block(run, "gain", run.summary.get("recommended") or {})
    scale = Scale(gains(run), (0.0, 0.0), band)
    words = []
    for block, part in zip(numbers, found, strict=True):
        if part is None:
            why = reasons(run.summary, "gain_low").get(block, "")
            words.append(f"Block {block} has no window: {why.rstrip('.')}.")
            continue
        ends = " to ".join(
            _edge_in_words(run, key, estimate, block)
            for key, estimate in (("gain_low", lower[block - 1]), ("gain_high", upper[block - 1]))
        )
        advice = f"; recommended gain {gain(advised[block - 1])}" if advised[block - 1] is not None else ""
        words.append(f"Block {block}: {ends}{advice}.")
    reading = (
        f"Gains at which the projection of a block lies within ±{band:g}: below them the number format "
        "absorbs the displacement, above them curvature bends it. Dark lines: 95 % intervals of the edges. "
        "An arrow is no edge: the block is inside the band at that end of the measured gains (grey line)."
    )
    if known(advised):
        reading += " Diamonds: the gain recommended for training, at the β measured with."
    return Plot(
        name="operating-window",
        title=_titled(run, "Operating window, per block"),
        reading=reading,
        panels=(
            Panel(
                "Operating window",
                " ".join(words),
                partial(draw_windows, found, list(zip(lower, upper, strict=True)), advised, scale),
            ),
        ),
        columns=("block", *_edge_columns("gain_low"), *_edge_columns("gain_high"), "recommended_gain"),
        rows=tuple((block, *lower[block - 1], *upper[block - 1], advised[block - 1]) for block in numbers),
        size=(PANEL_WIDTH, max(PANEL_HEIGHT, 100 + 19 * len(numbers))),
    )


def at_gain_one(run: RunData) -> Plot | None:
    """Odd and even part of the leak at gain 1 beside the control, and the displacement ratio, per block."""
    band = run.summary.get("band")
    odd, even, controls = _estimates(run, "odd"), _estimates(run, "even"), _controls(run)
    ratios = per_block(run, "displacement_ratio")
    panels = []
    if band is not None and known(value for value, *_ in (*odd, *even)):
        words = "; ".join(
            f"block {block}: odd {interval(*odd[block - 1])}, even {interval(*even[block - 1])}, control "
            f"{interval(*controls[block - 1])}"
            for block in range(1, blocks(run) + 1)
        )
        draw = partial(draw_parts, odd, even, controls, band)
        panels.append(Panel("Odd and even part", f"Projections at gain 1, {words}.", draw))
    if [value for value in ratios if value]:
        unit = run.summary.get("unit_roundoff")
        words = f"Displacement ratio at gain 1 over blocks 1 to {len(ratios)}: {span(known(ratios), small)}"
        words += f"; the unit roundoff of the instrument is {small(unit)}." if unit else "."
        panels.append(Panel("Displacement ratio", words, partial(draw_ratios, ratios, unit)))
    if not panels:
        return None
    return Plot(
        name="gain-one",
        title=_titled(run, "At gain 1, per block"),
        reading=(
            "Left: the part of the leak that turns round with β (odd: the error of a finite difference) and "
            "the part that does not (even: absorption, and curvature of second order), with 95 % intervals, "
            "beside the control. Right: RMS of the displacement over RMS of the state; u is the unit "
            "roundoff of the instrument's format, half an ulp of 1."
        ),
        panels=tuple(panels),
        columns=(
            "block",
            *_edge_columns("odd"),
            *_edge_columns("even"),
            *_edge_columns("control"),
            "displacement_ratio",
        ),
        rows=tuple(
            (block, *odd[block - 1], *even[block - 1], *controls[block - 1], ratios[block - 1])
            for block in range(1, blocks(run) + 1)
        ),
    )


def spread_over(items: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the items, the first and the last among them, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


_PROJECTIONS = (
    "projection",
    "projection_low",
    "projection_high",
    "mean_projection",
    "mean_projection_low",
    "mean_projection_high",
)


def _edge_columns(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _estimates(run: RunData, key: str, part: dict[str, Any] | None = None) -> list[Estimate]:
    columns = (per_block(run, name, part) for name in _edge_columns(key))
    return list(zip(*columns, strict=True))


def _controls(run: RunData) -> list[Estimate]:
    return _estimates(run, "projection", run.summary.get("control") or {})


def _titled(run: RunData, title: str) -> str:
    return f"{title} (EP in {run.summary['study']})" if label(run) else title


def _edge_in_words(run: RunData, key: str, estimate: Estimate, block: int) -> str:
    value, low, high = estimate
    if value is None:
        return f"no edge ({reasons(run.summary, key).get(block, 'no reason given')})"
    if low is None or high is None:
        why = reasons(run.summary, f"{key}_low").get(block, "no reason given")
        return f"{small(value)} (no interval: {why})"
    return f"{small(value)} (95 % interval {small(low)} to {small(high)})"


def _in_words(run: RunData, block: int) -> str:
    rows: list[Row] = [row for row in spectrum(run, block) if row["projection"] is not None]
    shown = spread_over(range(len(rows)), 5)
    parts = [
        f"{interval(*(rows[i][key] for key in _PROJECTIONS[:3]))} at gain {gain(rows[i]['gain'])}"
        for i in shown
    ]
    means = [row for row in rows if row["mean_projection"] is not None]
    text = f"Block {block}: projection {'; '.join(parts)}."
    if means:
        row = means[0]
        estimate = interval(*(row[key] for key in _PROJECTIONS[3:]))
        text += f" Mean projection {estimate} at gain {gain(row['gain'])}."
    return f"{text} The control reads {interval(*_controls(run)[block - 1])}."
