"""The tables of leak spectra: windows and parts per block, every row, and several spectra side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinscope.report.leak.findings import blocks, gain, label, per_block, reasons
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, integer, measured
from twinscope.report.wording import compact, cosine, known, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (windows(run), parts(run), spectra(run))
    return [table for table in found if table is not None]


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per spectrum: what was studied, how far the states moved, the leak at gain 1, the control."""
    rows = []
    for name, run in runs.items():
        summary = run.summary
        at_one = [row["projection"] for row in run.rows if row["gain"] == row["beta_sign"] == 1]
        rows.append(
            (
                Cell(name),
                Cell(run.status),
                Cell(str(summary.get("study", "–"))),
                integer(blocks(run) or None),
                *_ends(summary.get("displacement_ratio") or [], small),
                *_ends(at_one, compact),
                *_ends((summary.get("control") or {}).get("projection") or [], compact),
                *_ends(summary.get("gain_low") or [], small),
            )
        )
    quantities = ("displacement ratio", "projection at gain 1", "control", "gain_low")
    return Table(
        "leak-comparison",
        "The leak spectra side by side: least and greatest over blocks",
        (
            "run",
            "status",
            "study",
            "blocks",
            *(f"{end} {name}" for name in quantities for end in ("least", "greatest")),
        ),
        (False,) * 3 + (True,) * 9,
        tuple(rows),
    )


def windows(run: RunData) -> Table | None:
    """Displacement, operating window and recommended gain of every block."""
    if "gain_low" not in run.summary:
        return None
    summary, recommended = run.summary, run.summary.get("recommended") or {}
    rows = [
        (
            integer(block),
            integer(per_block(run, "parameters")[block - 1]),
            measured(per_block(run, "displacement_ratio")[block - 1], small),
            *_cells(run, summary, "gain_low", block, small),
            *_cells(run, summary, "gain_high", block, small),
            measured(per_block(run, "gain", recommended)[block - 1], small),
        )
        for block in range(1, blocks(run) + 1)
    ]
    memory = summary.get("memory") or {}
    note = ""
    if memory:
        spilled = ", of which those of the reference went to disk" if memory.get("spilled") else ""
        note = (
            f"Group means took {memory.get('group_means_mib', 0):.0f} MiB{spilled}; "
            f"{memory.get('arms_with_vectors')} arms kept the vectors that leak_squared, rel_leak and "
            f"half_split need ({memory.get('vectors_mib', 0):.0f} MiB; the budget is "
            f"{memory.get('budget_mib', 0):.0f} MiB)."
        )
    return Table(
        "windows",
        f"Operating window: gains with a projection within ±{summary.get('band', 0):g}, with 95 % intervals",
        (
            "block",
            "parameters",
            "displacement ratio",
            "gain_low",
            "from",
            "to",
            "gain_high",
            "from",
            "to",
            "recommended",
        ),
        (True,) * 10,
        tuple(rows),
        note,
    )


def parts(run: RunData) -> Table | None:
    """Odd and even part of the leak at gain 1, beside the control, per block."""
    if "odd" not in run.summary:
        return None
    control = run.summary.get("control") or {}
    sources = ((run.summary, "odd"), (run.summary, "even"), (control, "projection"))
    rows = [
        (
            integer(block),
            *(cell for part, key in sources for cell in _cells(run, part, key, block, compact)),
        )
        for block in range(1, blocks(run) + 1)
    ]
    return Table(
        "parts",
        "Projections at gain 1 with 95 % intervals: odd and even in β, and the control",
        ("block", "odd", "low", "high", "even", "low", "high", "control", "low", "high"),
        (True,) * 10,
        tuple(rows),
        f"Control: {control['description'].rstrip('.')}." if "description" in control else "",
    )


def spectra(run: RunData) -> Table | None:
    """Every row of the record; a missing number bears a number in brackets, whose reason is in the note."""
    if not run.rows:
        return None
    forms: dict[str, Callable[[float | None], str]] = dict.fromkeys(_FIELDS, compact)
    forms |= {"cosine": cosine, "rel_leak": small, "half_split": small}
    causes: list[str] = []
    rows = []
    for row in sorted(run.rows, key=lambda row: (row["block"], -row["beta_sign"], row["gain"])):
        cells = [integer(row["block"]), measured(row["gain"], gain)]
        cells.append(Cell("+" if row["beta_sign"] > 0 else "−", row["beta_sign"]))
        for key in _FIELDS:
            reason = row.get(f"{key}_reason")
            if row[key] is not None or reason is None:
                cells.append(measured(row[key], forms[key]))
                continue
            if reason not in causes:
                causes.append(reason)
            cells.append(Cell(f"– [{causes.index(reason) + 1}]"))
        rows.append(tuple(cells))
    studied = f", EP in {run.summary['study']}" if label(run) else ""
    return Table(
        "spectra",
        f"Every arm of every block{studied}: statistics of the leak, with 95 % intervals",
        ("block", "gain", "β", *_FIELDS.values()),
        (True,) * (3 + len(_FIELDS)),
        tuple(rows),
        " ".join(f"[{index}] {reason.rstrip('.')}." for index, reason in enumerate(causes, 1)),
    )


#: Field of a row -> head of its column.
_FIELDS = {
    "projection": "projection",
    "projection_low": "low",
    "projection_high": "high",
    "mean_projection": "mean_projection",
    "mean_projection_low": "low",
    "mean_projection_high": "high",
    "proj_on_bp": "proj_on_bp",
    "leak_squared": "leak_squared",
    "leak_squared_low": "low",
    "leak_squared_high": "high",
    "rel_leak": "rel_leak",
    "half_split": "half_split",
    "cosine": "cosine",
}


def _cells(
    run: RunData, part: Mapping[str, Any], key: str, block: int, form: Callable[[float | None], str]
) -> list[Cell]:
    """A number and its interval; a reason that holds for all three stands once."""
    keys = (key, f"{key}_low", f"{key}_high")
    why = [reasons(part, each).get(block) for each in keys]
    values = [per_block(run, each, part)[block - 1] for each in keys]
    return [
        measured(value, form, None if place and reason == why[0] else reason)
        for place, (value, reason) in enumerate(zip(values, why, strict=True))
    ]


def _ends(values: list[float | None], form: Callable[[float | None], str]) -> tuple[Cell, Cell]:
    found = known(values)
    return (measured(min(found), form), measured(max(found), form)) if found else (Cell("–"), Cell("–"))
