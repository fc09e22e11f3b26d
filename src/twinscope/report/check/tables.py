"""The tables of parity checks: every text, every layer, versions; several checks side by side."""

from __future__ import annotations

from collections.abc import Mapping

from twinscope.report.check.findings import facts, rows_of
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, integer, measured
from twinscope.report.wording import number, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (texts(run), layers(run), compared(run))
    return [table for table in found if table is not None]


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per check: the model, whether parity holds, and the largest differences."""
    rows = []
    for name, run in runs.items():
        summary = run.summary
        rows.append(
            (
                Cell(name),
                Cell(run.status),
                Cell((facts(run) or ["–"])[0]),
                Cell(str(summary.get("weights", "–"))),
                Cell("–" if "passed" not in summary else "yes" if summary["passed"] else "no"),
                measured(summary.get("hidden_difference"), small),
                measured(summary.get("nll_difference"), small),
                measured(summary.get("peak_rss_mib"), number, digits=0),
            )
        )
    return Table(
        "check-comparison",
        "The checks side by side: largest difference of final states, and of a token's loss in nats",
        ("run", "status", "model", "weights", "parity", "states", "loss", "peak MiB"),
        (False,) * 5 + (True,) * 3,
        tuple(rows),
    )


def texts(run: RunData) -> Table | None:
    """Every text: differences, and the mean loss of both sides."""
    rows = [
        (
            integer(index),
            Cell(row["source"]),
            measured(row["hidden_difference"], small),
            measured(row["nll_difference"], small),
            measured(row["nll_streamed"], number, digits=6),
            measured(row["nll_library"], number, digits=6),
        )
        for index, row in enumerate(rows_of(run, "text"), 1)
    ]
    if not rows:
        return None
    return Table(
        "check-texts",
        "Texts: relative difference of final states, largest difference of a token's loss, and mean losses, "
        "in nats",
        ("text", "tokens", "states", "loss", "streamed", "library"),
        (True, False, True, True, True, True),
        tuple(rows),
    )


def layers(run: RunData) -> Table | None:
    """Relative difference of what enters every layer."""
    rows = [(integer(row["layer"]), measured(row["difference"], small)) for row in rows_of(run, "layer")]
    if not rows:
        return None
    return Table(
        "check-layers",
        "Relative difference of what enters each layer",
        ("layer", "difference"),
        (True, True),
        tuple(rows),
    )


def compared(run: RunData) -> Table | None:
    """What was compared: weights by their hash, method, and versions."""
    summary = run.summary
    if "weights_sha256" not in summary:
        return None
    rows = [
        (Cell("model"), Cell(summary["model"])),
        (Cell("SHA-256 of the weights"), Cell(summary["weights_sha256"])),
        (Cell("first part that differs"), Cell(summary["first_part"] or summary["first_part_reason"])),
        *((Cell(name), Cell(version)) for name, version in summary["versions"].items()),
    ]
    return Table("check-compared", "What was compared", ("what", "value"), (False, False), tuple(rows))
