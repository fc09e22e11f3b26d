"""The figures of a search for neurons: correlations against the null, confirmation, and what replacing costs.

Covers rows, words and data; panels.py puts them on axes. Changes of the loss are in nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from statistics import median
from typing import Any

from twinscope.report.drawing import Panel, Plot
from twinscope.report.neurons.findings import STANDS, WAYS, fate, matches, rows_of
from twinscope.report.neurons.panels import (
    Change,
    Levels,
    change_scale,
    draw_changes,
    draw_confirmation,
    draw_counts,
    draw_maxima,
    draw_shares,
)
from twinscope.report.reading import RunData
from twinscope.report.wording import count, interval, listed, number, span

_CHANGES = (
    *("way", "stand", "pairs", "texts", "delta_nll", "low", "high", "low_90", "high_90"),
    *("verdict", "branch_error"),
)
_DIRECTIONS = ("direction", "correlation", "scale", "r2_calibration", "r2_heldout", "branch_error")


def figures(run: RunData) -> list[Plot]:
    """The figures that the run has data for, in the order of the report."""
    if "null" not in run.summary:
        return []
    found = (_search(run), _matches(run), _cost(run))
    return [plot for plot in found if plot is not None]


def _search(run: RunData) -> Plot | None:
    rows = sorted(rows_of(run, "search"), key=lambda row: row["layer"])
    if not rows:
        return None
    summary = run.summary
    levels = Levels(summary["null"]["threshold"], sqrt(summary["null"]["r2_floor"]))
    # What adds next to nothing to its layer has no match that counts.
    silent = {row["layer"]: set(row["silent"]) for row in rows}
    values = {
        f"layer {row['layer']}": [
            abs(value)
            for neuron, value in enumerate(row["correlation"])
            if neuron not in silent[row["layer"]]
        ]
        or [0.0]
        for row in rows
    }
    observed = {name: (max(part), median(part)) for name, part in values.items()}
    null = _null(run)
    return Plot(
        name="neurons-search",
        title="The best match of every neuron against the null",
        reading=(
            "First: for each layer, how many neurons have a best match of at least a correlation. Dashed: "
            "what the same search reaches with redrawn weights in "
            f"{number(100 * summary['null']['family_wise'], 0)} % of draws, over all layers at once; "
            "dotted: the correlation at which a match explains the least that counts. Second: the largest "
            "of each layer beside every draw of the null."
        ),
        panels=(
            Panel(
                "How close the best match is",
                _count_words(values, levels),
                partial(draw_counts, values, levels),
            ),
            Panel(
                "The largest, and the largest of the null",
                _maxima_words(observed, null),
                partial(draw_maxima, observed, null, levels),
            ),
        ),
        columns=("layer", "neuron", "silent", "best_layer", "best_neuron", "correlation", "scale"),
        rows=tuple(
            (row["layer"], neuron, int(neuron in silent[row["layer"]]), *found)
            for row in rows
            for neuron, found in enumerate(
                zip(row["best_layer"], row["best_neuron"], row["correlation"], row["scale"], strict=True)
            )
        ),
    )


def _matches(run: RunData) -> Plot | None:
    rows = sorted(rows_of(run, "search"), key=lambda row: row["layer"])
    panels, reading = [], []
    if rows:
        names = [f"layer {row['layer']}" for row in rows]
        shares = [[row["best_layer"].count(other["layer"]) for other in rows] for row in rows]
        panels.append(
            Panel(
                "Where the best match lies", _share_words(names, shares), partial(draw_shares, names, shares)
            )
        )
        reading.append(
            "Where: the share of the neurons of the row's layer whose best match lies in the column's layer."
        )
    found: dict[str, list[tuple[float, float]]] = {}
    data = []
    for match in matches(run):
        name = fate(match)
        for part in match["directions"]:
            data.append((name, *(part[key] for key in _DIRECTIONS)))
            if part["r2_calibration"] is not None and part["r2_heldout"] is not None:
                found.setdefault(name, []).append((part["r2_calibration"], part["r2_heldout"]))
    if found:
        every = [value for points in found.values() for point in points for value in point]
        floor = run.summary["null"]["r2_floor"]
        # What predicts worse than nothing has no use for its size: it stands at the edge.
        least = max(-0.25, min(0.0, min(every) - 0.03))
        panels.append(
            Panel(
                "Whether it holds on other text",
                _held_words(found),
                partial(draw_confirmation, found, floor, least),
            )
        )
        reading.append(
            "Whether it holds: each mark is one neuron as a multiple of another, with the multiple of "
            "calibration, and how much of its energy that explains on either text. On the line nothing is "
            "lost; marks at the lower edge lie below it. Dotted: the least that counts. A match is confirmed "
            "if both of its directions lie above."
        )
    if not panels:
        return None
    return Plot(
        name="neurons-matches",
        title="Where matches lie, and whether they hold",
        reading=" ".join(reading),
        panels=tuple(panels),
        columns=("outcome", *_DIRECTIONS),
        rows=tuple(data),
    )


def _cost(run: RunData) -> Plot | None:
    parts = run.summary.get("replaced") or []
    if not parts:
        return None
    margin = run.summary["margin"]
    ways = [way for way in WAYS if any(part["way"] == way for part in parts)]
    limits, linear = change_scale([_change(part) for part in parts], margin)
    panels = []
    for way in ways:
        series = {
            stand: sorted(
                (_change(part) for part in parts if part["way"] == way and part["stand"] == stand),
                key=lambda change: change.pairs,
            )
            for stand in STANDS
        }
        series = {stand: changes for stand, changes in series.items() if changes}
        panels.append(
            Panel(
                WAYS[way],
                _cost_words(parts, way),
                partial(draw_changes, series, STANDS, margin, limits, linear),
            )
        )
    return Plot(
        name="neurons-replaced",
        title="What replacing neurons by their matches costs",
        reading=(
            "Change of the held-out loss with the best pairs replaced at once, with 95 % intervals over "
            "texts: each neuron by its match times a scale fitted on calibration, by a random neuron with "
            "a scale of its own, or by nothing. Tinted: the margin. The axis is linear around 0 and "
            "logarithmic beyond."
        ),
        panels=tuple(panels),
        columns=_CHANGES,
        rows=tuple(tuple(part[key] for key in _CHANGES) for part in parts),
    )


def _null(run: RunData) -> dict[str, list[float]]:
    """Maxima of every draw, by layer, then over all layers."""
    rows = sorted(rows_of(run, "null"), key=lambda row: row["draw"])
    found: dict[str, list[float]] = {}
    for row in rows:
        for layer, value in zip(row["layers"], row["maxima"], strict=True):
            found.setdefault(f"layer {layer}", []).append(value)
    return found | ({"all": [row["maximum"] for row in rows]} if rows else {})


def _change(part: Mapping[str, Any]) -> Change:
    return Change(part["pairs"], part["delta_nll"], part["low"], part["high"])


def _count_words(values: Mapping[str, Sequence[float]], levels: Levels) -> str:
    parts = [
        f"{name}: {count(sum(value > levels.threshold for value in part))} of {count(len(part))} beyond "
        f"the null's {number(levels.threshold)}, {count(sum(value >= levels.floor for value in part))} "
        f"beyond the floor's {number(levels.floor)}"
        for name, part in values.items()
    ]
    return f"{'; '.join(parts)}."


def _maxima_words(observed: Mapping[str, tuple[float, float]], null: Mapping[str, Sequence[float]]) -> str:
    parts = [
        f"{name}: largest {number(most)}, median {number(middle)}"
        + (f", null {span(null[name], number)}" if name in null else "")
        for name, (most, middle) in observed.items()
    ]
    return f"{'; '.join(parts)}."


def _share_words(names: Sequence[str], shares: Sequence[Sequence[int]]) -> str:
    parts = []
    for name, row in zip(names, shares, strict=True):
        found = [
            f"{other.removeprefix('layer ')} for {count(many)}"
            for other, many in zip(names, row, strict=True)
            if many
        ]
        parts.append(f"{name}: {listed(found) or 'none'}")
    return f"Layer of the best match. {'; '.join(parts)}."


def _held_words(found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    return " ".join(
        f"{name[0].upper()}{name[1:]}: {count(len(points))} directions, held-out R² "
        f"{span([point[1] for point in points], number)}."
        for name, points in found.items()
    )


def _cost_words(parts: Sequence[Mapping[str, Any]], way: str) -> str:
    sentences = []
    for part in sorted(parts, key=lambda part: part["pairs"]):
        if part["way"] == way:
            change = interval(part["delta_nll"], part["low"], part["high"])
            sentences.append(f"{count(part['pairs'])} {STANDS[part['stand']]}: {change}, {part['verdict']}.")
    return " ".join(sentences)
