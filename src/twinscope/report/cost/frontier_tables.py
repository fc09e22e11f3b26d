"""The table of a frontier: every point with its cost, its fidelity, and why it counts or does not."""

from __future__ import annotations

from twinscope.report.cost.frontier_findings import points
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, given, integer, measured, sentence
from twinscope.report.wording import cosine, number, small

_COSTS = ("analytic_ratio", "counted_ratio", "measured_ratio", "measured_low", "measured_high")


def frontier_points(run: RunData) -> Table | None:
    """Every point in the order of the record; the last columns place it."""
    found = points(run)
    if not found:
        return None
    summary = run.summary.get("frontier") or {}
    best, cheapest = (
        {(part["start"], part["target"], part["label"]) for part in summary.get(key) or []}
        for key in ("frontier", "cheapest")
    )
    rows = []
    for row in found:
        place = (row["start"], row["target"], row["label"])
        standing = "cheapest" if place in cheapest else "on it" if place in best else ""
        rows.append(
            (
                Cell(row["start"]),
                given(row, "target", small) if row["rounds"] else Cell("–"),
                Cell(row["label"]),
                integer(row["rounds"]),
                *(measured(row[key], number, digits=3) for key in _COSTS),
                *(given(row, key, cosine) for key in ("median_cosine", "worst_cosine", "outer_cosine")),
                *(
                    given(row, key, small) if row["rounds"] else Cell("–")
                    for key in ("displacement", "residual", "beta")
                ),
                Cell("yes" if row["valid"] else "no"),
                Cell(standing),
                Cell(sentence("; ".join(row["invalid"]))),
            )
        )
    enough = summary.get("enough")
    notes = []
    if enough is not None:
        notes = [
            f"Cheapest: the least FLOPs with a median cosine of {number(enough, 2)} or more, of the points "
            "that count. On it: no other point that counts betters both FLOPs and median cosine."
        ]
    # One reason holds for every point, and would fill the table.
    reasons = [str(row[f"{key}_reason"]) for row in found for key in _COSTS if f"{key}_reason" in row]
    notes += [sentence(reason) for reason in dict.fromkeys(reasons)]
    return Table(
        "points",
        "The frontier: cost as a ratio to BP (ledger, count, clock with 95 % interval), cosine to BP (median "
        "and worst block, outside the blocks), and whether the point counts as EP",
        (
            "start", "ρ", "setting", "K", "ledger", "counted", "time", "low", "high", "median", "worst",
            "outside", "displacement", "residual", "β", "counts", "frontier", "why not",
        ),
        (False, True, False, *(True,) * 12, False, False, False),
        tuple(rows),
        " ".join(notes),
    )  # fmt: skip
