"""The tables of a search for neurons: matches, layers, weight identities, replacements, and the null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.neurons.findings import STANDS, duplicates, fate, matches, rows_of
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, given, integer, measured
from twinscope.report.trust import weights_cell
from twinscope.report.wording import compact, number, signed, small

#: A table of matches has the best; all are in the figure's CSV.
_MOST_MATCHES = 100


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (found_matches(run), layers(run), sets(run), replacements(run), analytic(run), null(run))
    return [table for table in found if table is not None]


def found_matches(run: RunData) -> Table | None:
    """Both directions of every match, the best first: correlation, scale, R², and what became of it."""
    ordered = sorted(matches(run), key=_order)
    rows = [
        (
            *_ends(part["direction"]),
            measured(part["correlation"], signed),
            measured(part["scale"], small),
            *(given(part, key, number) for key in ("r2_calibration", "r2_heldout")),
            given(part, "branch_error", small),
            given(match, "rank", str),
            Cell("identical weights" if match["identical_weights"] else fate(match)),
            Cell(match["level"]),
            Cell(match["reason"]),
        )
        for match in ordered[:_MOST_MATCHES]
        for part in match["directions"]
    ]
    if not rows:
        return None
    more = f" The {_MOST_MATCHES} best of {len(ordered)}." if len(ordered) > _MOST_MATCHES else ""
    return Table(
        "neuron-matches",
        "Each match in both directions: a neuron as a multiple of another, on the layer input of the first",
        (
            "neuron",
            "by",
            "correlation",
            "scale",
            "R² calibration",
            "R² held-out",
            "branch error",
            "rank",
            "outcome",
            "level",
            "why",
        ),
        (False, False, *[True] * 6, False, False, False),
        tuple(rows),
        "Correlation: uncentred, with its sign, on calibration. R² with the scale of calibration. Branch "
        f"error: what replacing this one neuron changes of its MLP's output on held-out text.{more}",
    )


def layers(run: RunData) -> Table | None:
    """Each layer in the search: its neurons, how many exceed the null, how many are confirmed."""
    rows = [
        (
            integer(part["layer"]),
            *(integer(part[key]) for key in ("neurons", "dead", "beyond_null", "confirmed")),
            *(measured(part[key], number) for key in ("largest_correlation", "median_correlation")),
        )
        for part in run.summary.get("layers") or []
    ]
    if not rows:
        return None
    return Table(
        "neuron-layers",
        "Each layer: how many of its neurons have a match beyond the null, and confirmed",
        ("layer", "neurons", "dead", "beyond the null", "confirmed", "largest correlation", "median"),
        (True,) * 7,
        tuple(rows),
    )


def sets(run: RunData) -> Table | None:
    """The best pairs taken together: how many are confirmed, the level, what they would save."""
    rows = [
        (
            integer(part["pairs"]),
            integer(part["confirmed"]),
            Cell(part["level"]),
            Cell("yes" if part["zeroed_alike"] else "no"),
            integer(part["parameters"]),
            measured(part["bytes"] / 2**10, number, digits=1),
            Cell(part["reason"]),
        )
        for part in run.summary.get("sets") or []
    ]
    if not rows:
        return None
    return Table(
        "neuron-sets",
        "The best pairs together",
        ("pairs", "confirmed", "level", "zeroing keeps the loss", "parameters", "KiB", "why"),
        (True, True, False, False, True, True, False),
        tuple(rows),
        "Parameters and bytes that replacing would save: stated, never a condition.",
    )


def replacements(run: RunData) -> Table | None:
    """Every change of the held-out loss: pairs, way, what stands in place, intervals, verdict."""
    rows = [
        (
            integer(part["pairs"]),
            Cell(part["way"]),
            Cell(STANDS.get(part["stand"]) or str(part["stand"])),
            measured(part["delta_nll"], compact),
            *(given(part, key, compact) for key in ("low", "high", "low_90", "high_90")),
            Cell(part["verdict"]),
            integer(part["texts"]),
            given(part, "needed", str),
            given(part, "delta_nll_calibration", compact),
            measured(part["branch_error"], small),
        )
        for part in run.summary.get("replaced") or []
    ]
    if not rows:
        return None
    return Table(
        "neuron-replaced",
        f"Change of the held-out loss, nats per token, against a margin of ±{run.summary['margin']:g}",
        (
            "pairs",
            "way",
            "in place",
            "change",
            "95 % low",
            "high",
            "90 % low",
            "high",
            "verdict",
            "texts",
            "needed",
            "on calibration",
            "branch error",
        ),
        (True, False, False, *[True] * 5, False, *[True] * 4),
        tuple(rows),
        "Forward replaces the neuron that the search began at, backward the one that it found.",
    )


def analytic(run: RunData) -> Table | None:
    """Neurons that are related by their weights alone."""
    rows = [
        (
            Cell(part["kind"].replace("_", " ")),
            Cell(", ".join(str(layer) for layer in part["layers"])),
            integer(part["neurons"]),
            Cell(part["detail"]),
            Cell(", ".join(part["examples"])),
        )
        for part in run.summary.get("analytic") or []
    ]
    if not rows:
        return None
    return Table(
        "neuron-analytic",
        "Filed apart: identities of the weights, whatever the text",
        ("identity", "layers", "neurons", "what it is", "for example"),
        (False, False, True, False, False),
        tuple(rows),
        "None of these is learned duplication.",
    )


def null(run: RunData) -> Table | None:
    """Every draw of the null: the largest correlation in each layer, and over all."""
    rows = sorted(rows_of(run, "null"), key=lambda row: row["draw"])
    if not rows:
        return None
    names = [f"layer {layer}" for layer in rows[0]["layers"]]
    return Table(
        "neuron-null",
        "The same search with redrawn weights: its largest correlation, draw by draw",
        ("draw", *names, "all"),
        (True,) * (len(names) + 2),
        tuple(
            (
                integer(row["draw"]),
                *(measured(value, number) for value in row["maxima"]),
                measured(row["maximum"], number),
            )
            for row in rows
        ),
    )


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per search: neurons, threshold, duplicates, level, memory."""
    rows = []
    for name, run in runs.items():
        summary = run.summary
        parts = summary.get("layers") or []
        rows.append(
            (
                Cell(name),
                Cell(run.status),
                Cell(str(summary.get("model", "–"))),
                Cell(weights_cell(summary)),
                integer(sum(part["neurons"] for part in parts)),
                given(summary.get("null") or {}, "threshold", number),
                measured(max((part["largest_correlation"] for part in parts), default=None), number),
                integer(sum(part["beyond_null"] for part in parts)),
                integer(len(duplicates(run))),
                Cell(str(summary.get("level", "–"))),
                given(summary, "peak_rss_mib", number, digits=0),
            )
        )
    return Table(
        "neuron-comparison",
        "The searches side by side; memory in MiB",
        (
            "run",
            "status",
            "model",
            "weights",
            "neurons",
            "null",
            "largest",
            "beyond the null",
            "duplicates",
            "level",
            "peak",
        ),
        (False,) * 4 + (True,) * 5 + (False, True),
        tuple(rows),
    )


def _order(match: Mapping[str, Any]) -> tuple[bool, float, float]:
    """Confirmed before others, then by rank, then by correlation."""
    rank = match["rank"] if match["rank"] is not None else float("inf")
    return not match["confirmed"], rank, -max(abs(part["correlation"]) for part in match["directions"])


def _ends(direction: str) -> tuple[Cell, Cell]:
    replaced, _, by = direction.partition(" <- ")
    return Cell(replaced), Cell(by)
