"""The tables of collapses: every block, model and control; several collapses side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp

from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, given, integer, measured
from twinscope.report.wording import compact, number, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (models(run), controls(run), points(run))
    return [table for table in found if table is not None]


def models(run: RunData) -> Table | None:
    """Slope and constant of each model alone."""
    rows = [
        (
            Cell(part["model"]),
            integer(part["n_points"]),
            integer(part["n_null"]),
            *_slope(part),
            given(part, "constant", number, digits=2),
        )
        for part in run.summary.get("per_model") or []
    ]
    if not rows:
        return None
    return Table(
        "models",
        "Each model alone: slope over its blocks, and gain_low times ratio in unit roundoffs",
        ("model", "points", "without gain_low", "slope", "low", "high", "constant"),
        (False,) + (True,) * 6,
        tuple(rows),
    )


def controls(run: RunData) -> Table | None:
    """Runs at another β against the law, and against the same blocks at the common β."""
    found = run.summary.get("controls") or {}
    rows = [
        (
            Cell(part["run"]),
            Cell(part["model"]),
            measured(part["beta"], small),
            integer(part["n_points"]),
            integer(part["n_null"]),
            *(given(part, key, compact) for key in ("shift", "paired_shift", "paired_largest")),
        )
        for part in found.get("runs") or []
    ]
    if not rows:
        return None
    return Table(
        "controls",
        "Controls: distance in log gain_low from the law, and from the same blocks at the common β",
        ("run", "model", "β", "points", "without gain_low", "shift", "paired shift", "largest"),
        (False, False) + (True,) * 6,
        tuple(rows),
        f"Controls: {found.get('description', '').rstrip('.')}.",
    )


def points(run: RunData) -> Table | None:
    """Every block of every run, with its distance from the law."""
    rows = []
    for row in run.rows:
        lacks = row["gain_low"] is None
        rows.append(
            (
                Cell(row["model"]),
                Cell(row["role"]),
                measured(row["beta"], small),
                integer(row["width"]),
                integer(row["layers"]),
                integer(row["block"]),
                given(row, "displacement_ratio", small),
                given(row, "gain_low", small),
                # What a number lacks, its interval and residual lack too: once is enough.
                *(
                    measured(row[key], small, None if lacks else row.get(f"{key}_reason"))
                    for key in ("gain_low_low", "gain_low_high")
                ),
                measured(
                    None if row["residual"] is None else exp(row["residual"]),
                    number,
                    None if lacks else row.get("residual_reason"),
                    digits=2,
                ),
            )
        )
    if not rows:
        return None
    heads = (
        "model",
        "role",
        "β",
        "width",
        "layers",
        "block",
        "displacement ratio",
        "gain_low",
        "low",
        "high",
    )
    return Table(
        "points",
        "Every block, with the 95 % interval of gain_low; last, gain_low over what the law says",
        (*heads, "times the law"),
        (False, False) + (True,) * 9,
        tuple(rows),
    )


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per collapse: slope with its interval, constant, points."""
    rows = [
        (
            Cell(name),
            Cell(run.status),
            *_slope(run.summary),
            given(run.summary, "constant", number, digits=2),
            integer(run.summary.get("n_points")),
            integer(run.summary.get("n_models")),
        )
        for name, run in runs.items()
    ]
    return Table(
        "collapse-comparison",
        "The collapses side by side; the law predicts the slope −1; the constant is in unit roundoffs",
        ("run", "status", "slope", "low", "high", "constant", "points", "models"),
        (False,) * 2 + (True,) * 6,
        tuple(rows),
    )


def _slope(part: Mapping[str, object]) -> list[Cell]:
    """A slope and its interval; a reason that holds for all three stands once."""
    keys = ("slope", "slope_low", "slope_high")
    cells = [given(part, key, compact) for key in keys]
    return [
        replace(cell, reason=None) if place and cell.reason == cells[place - 1].reason else cell
        for place, cell in enumerate(cells)
    ]
