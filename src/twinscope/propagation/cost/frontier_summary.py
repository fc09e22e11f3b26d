"""From the rows of a frontier to its summary and claims: which settings are worth their cost.

A pure function of the rows; no model is touched. Only points that count as equilibrium propagation (METHOD
1.2) can be on a frontier; cost is that of the ledger, which has no noise, with the measured one beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinscope.lab.evidence import claim
from twinscope.propagation.cost.frontier_config import FrontierSettings

Row = dict[str, Any]

#: The fidelity for which the cheapest setting is named.
ENOUGH = 0.99
_SHOWN = (
    "start", "label", "target", "analytic_ratio", "counted_ratio", "measured_ratio", "measured_low",
    "measured_high", "median_cosine", "worst_cosine", "displacement", "residual",
)  # fmt: skip


def frontier_summary(settings: FrontierSettings, rows: Sequence[Row]) -> Row:
    """The summary of a complete frontier (see ``FrontierSummary`` in lab/schemas/frontier.py)."""
    points = [row for row in rows if row["kind"] == "frontier"]
    groups = [
        [row for row in points if (row["start"], row["target"]) == (start, target) and row["valid"]]
        for start in settings.starts
        for target in settings.displacements
    ]
    return {
        "points": len(points),
        "valid": sum(row["valid"] for row in points),
        "enough": ENOUGH,
        "frontier": [_shown(row) for group in groups for row in undominated(group)],
        "cheapest": [_shown(row) for group in groups for row in cheapest(group)],
        "control": [_shown(row) for row in points if row["rounds"] == 0],
        "references": [reference.model_dump() for reference in settings.references],
        "beyond_reference": {
            reference.name: [
                _shown(row)
                for group in groups
                for row in undominated(group)
                if row["analytic_ratio"] <= reference.cost_ratio
                and row["median_cosine"] >= reference.median_cosine
            ]
            for reference in settings.references
        },
    }


def undominated(points: Sequence[Row]) -> list[Row]:
    """The points that no other equals or betters in both cost and median cosine, cheapest first.

    Of points alike in both the first stands.
    """
    kept: list[Row] = []
    for row in sorted(points, key=lambda row: (row["analytic_ratio"], -row["median_cosine"])):
        if not kept or row["median_cosine"] > kept[-1]["median_cosine"]:
            kept.append(row)
    return kept


def cheapest(points: Sequence[Row]) -> list[Row]:
    """The cheapest point with a median cosine of :data:`ENOUGH`, the best of those as cheap; or none."""
    return [row for row in undominated(points) if row["median_cosine"] >= ENOUGH][:1]


def frontier_claims(summary: Row) -> list[dict[str, str]]:
    """What the frontier shows for every start and displacement, and what it leaves open."""
    return [
        claim(
            f"from the {row['start']} start at displacement {row['target']:g}, the cheapest setting that "
            f"counts as equilibrium propagation and has a median block cosine of {ENOUGH:g} or more is "
            f"{row['label']}: {row['analytic_ratio']:.2f} times the FLOPs{_measured(row)} of BP; "
            f"cosine {row['median_cosine']:.4f}, worst block {row['worst_cosine']:.4f}, "
            f"residual {row['residual']:.3f}",
            "measured",
            "cost and fidelity at these weights, on this shape, text and device",
            "that training so reaches the same loss; other shapes, devices or weights",
        )
        for row in summary["cheapest"]
    ]


def _measured(row: Row) -> str:
    if row["measured_ratio"] is None:
        return ""
    span = f"[{row['measured_low']:.2f}, {row['measured_high']:.2f}]"
    return f" and {row['measured_ratio']:.2f} {span} times the time"


def _shown(row: Row) -> Row:
    return {name: row[name] for field in _SHOWN for name in (field, f"{field}_reason") if name in row}
