"""The tables of plans: pairs with their nulls, texts, the model; several plans side by side."""

from __future__ import annotations

from collections.abc import Mapping

from twinscope.report.plan.findings import rows_of
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, integer, measured
from twinscope.report.wording import listed, number, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (pairs(run), texts(run), model(run))
    return [table for table in found if table is not None]


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per plan: seal, model, pairs and texts."""
    rows = []
    for name, run in runs.items():
        summary = run.summary
        rows.append(
            (
                Cell(name),
                Cell(run.status),
                Cell(summary.get("sealed", "–")[:12]),
                Cell(summary.get("sealed_at", "–")),
                Cell((summary.get("model") or {}).get("family", "–")),
                integer(len(summary["pairs"]) if "pairs" in summary else None),
                integer(summary.get("texts")),
                integer(summary.get("tokens")),
                measured(summary.get("planned_peak_mib"), number, digits=0),
            )
        )
    return Table(
        "plan-comparison",
        "The plans side by side",
        ("run", "status", "seal", "sealed at", "model", "pairs", "texts", "tokens", "planned MiB"),
        (False,) * 5 + (True,) * 4,
        tuple(rows),
    )


def pairs(run: RunData) -> Table | None:
    """Every pair with the modules that serve as nulls beside it."""
    rows = [
        (
            Cell(row["of"]),
            Cell(row["left"]),
            Cell(row["right"]),
            Cell(listed(row["others_left"]) or "none"),
            Cell(listed(row["others_right"]) or "none"),
        )
        for row in rows_of(run, "pair")
    ]
    if not rows:
        return None
    return Table(
        "plan-pairs",
        "Pairs, and the null modules beside each when the left, and the right, site gives the inputs",
        ("kind", "left", "right", "nulls, left", "nulls, right"),
        (False,) * 5,
        tuple(rows),
    )


def texts(run: RunData) -> Table | None:
    """Every text with where it comes from and what it shares with others."""
    rows = [
        (
            Cell("held-out" if row["split"] == "heldout" else row["split"]),
            Cell(row["origin"]),
            integer(row["tokens"]),
            measured(row["overlap"], small),
            Cell(row["sha256"][:12]),
            Cell(row["text"]),
        )
        for row in rows_of(run, "text")
    ]
    if not rows:
        return None
    return Table(
        "plan-texts",
        "Texts, and the most that each shares with another text of the plan",
        ("split", "from", "tokens", "shared", "SHA-256", "text"),
        (False, False, True, True, False, False),
        tuple(rows),
    )


def model(run: RunData) -> Table | None:
    """The model that is sealed, and the seal."""
    summary = run.summary
    found = summary.get("model")
    if not found:
        return None
    rows = [
        (Cell("seal"), Cell(summary["sealed"])),
        (Cell("sealed at"), Cell(summary["sealed_at"])),
        (Cell("file"), Cell(summary["file"])),
        *(
            (
                Cell(key.replace("_", " ")),
                Cell(_plain(value)),
            )
            for key, value in found.items()
        ),
    ]
    return Table("plan-model", "What is sealed", ("what", "value"), (False, False), tuple(rows))


def _plain(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
