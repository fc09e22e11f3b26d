"""The tables of scans: pairs with level and reason, pooled measures, limits, nulls and every text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.reading import RunData
from twinscope.report.scan.findings import GROUPS, SELF, directions
from twinscope.report.tables import Cell, Table, given, integer, measured
from twinscope.report.trust import weights_cell
from twinscope.report.wording import number, small

#: measure: head of its column
_COLUMNS = {
    "branch_error": "error",
    "branch_error_trimmed": "trimmed",
    "norm_error": "norm output",
    "attention_js": "attention, bits",
    "attention_js_worst": "worst head",
    "attention_topk": "attention top 5",
    "logit_js": "next token, bits",
    "logit_topk_1": "top 1",
    "logit_topk_5": "top 5",
    "logit_topk_10": "top 10",
}


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (pairs(run), pooled(run), limits(run), nulls(run), texts(run))
    return [table for table in found if table is not None]


def pairs(run: RunData) -> Table | None:
    """Every pair: how far it came and why."""
    rows = [
        (
            Cell(pair["id"]),
            Cell(GROUPS.get(pair["kind"]) or str(pair["kind"])),
            Cell(pair["level"]),
            given(pair, "strain", number, digits=2),
            Cell(pair["reason"]),
            Cell("exploratory" if pair.get("exploratory") else "sealed"),
        )
        for pair in run.summary.get("pairs") or []
    ]
    if not rows:
        return None
    return Table(
        "pairs",
        "Every pair: its level, and the largest distance on calibration over its limit",
        ("pair", "kind", "level", "over limit", "why", "plan"),
        (False, False, False, True, False, False),
        tuple(rows),
        "A pair is a candidate if no distance exceeds its limit on any text, on the inputs of either site.",
    )


def pooled(run: RunData) -> Table | None:
    """Measures of each direction pooled over the tokens of a split, and the worst text."""
    rows = []
    for pair in run.summary.get("pairs") or []:
        for part in pair.get("directions") or []:
            for split in ("calibration", "heldout"):
                worst = part.get("worst") or {}
                rows.append(
                    (
                        Cell(part["reference"]),
                        Cell(part["substitute"]),
                        Cell("held-out" if split == "heldout" else split),
                        *_measures(part[split]),
                        measured(worst.get("branch_error"), small, part.get("worst_reason")),
                        Cell(str(worst.get("text", ""))),
                    )
                )
    if not rows:
        return None
    return Table(
        "pooled",
        "Each direction over all tokens of a split; last, the text with the largest error",
        ("inputs and reference", "substitute", "texts", *_COLUMNS.values(), "worst error", "on text"),
        (False,) * 3 + (True,) * (len(_COLUMNS) + 1) + (False,),
        tuple(rows),
        "Trimmed: without channels whose RMS on calibration exceeds ten times the median channel's.",
    )


def limits(run: RunData) -> Table | None:
    """What each distance may be, and which null set it."""
    rows = [
        (
            Cell(part["reference"]),
            Cell(part["substitute"]),
            Cell(item["measure"].replace("_", " ")),
            measured(item["most"], small),
            Cell(item["null"] or "–", None, item.get("null_reason")),
            measured(item["nearest"], small),
        )
        for pair in run.summary.get("pairs") or []
        for part in pair.get("directions") or []
        for item in part.get("limits") or []
    ]
    if not rows:
        return None
    return Table(
        "limits",
        "The most that each distance may be, as thresholds and the nearest null on calibration set it",
        ("inputs and reference", "substitute", "distance", "at most", "nearest null", "its distance"),
        (False, False, False, True, False, True),
        tuple(rows),
    )


def nulls(run: RunData) -> Table | None:
    """Every null of every direction: the range of its error and of its divergence over the texts."""
    rows = []
    for part in directions(run):
        for name in dict.fromkeys(null["null"] for row in part.rows for null in row["nulls"]):
            found = [null for row in part.rows for null in row["nulls"] if null["null"] == name]
            rows.append(
                (
                    Cell(part.reference),
                    Cell(part.substitute),
                    Cell("the module itself" if name == SELF else name.removeprefix("other.")),
                    *_range(found, "branch_error"),
                    *_range(found, "logit_js"),
                )
            )
    if not rows:
        return None
    return Table(
        "nulls",
        "Every null in the substitute's place, over all texts",
        (
            "inputs and reference",
            "substitute",
            "null",
            "error, least",
            "error, most",
            "bits, least",
            "bits, most",
        ),
        (False,) * 3 + (True,) * 4,
        tuple(rows),
        "The module itself has to give exactly 0, and no update an error of exactly 1.",
    )


def texts(run: RunData) -> Table | None:
    """Every direction on every text, beside the nearest null."""
    rows = []
    for part in directions(run):
        for row in part.rows:
            beside = [
                (null["branch_error"], null["null"])
                for null in row["nulls"]
                if null["null"] != SELF and null["branch_error"] is not None
            ]
            nearest = min(beside, default=(None, "–"))
            rows.append(
                (
                    Cell(part.reference),
                    Cell(part.substitute),
                    Cell("held-out" if row["split"] == "heldout" else row["split"]),
                    Cell(row["text"]),
                    *_measures(row),
                    Cell(nearest[1].removeprefix("other.")),
                    measured(nearest[0], small),
                )
            )
    if not rows:
        return None
    return Table(
        "texts",
        "Each direction on each text, and the null with the smallest error there",
        (
            "inputs and reference",
            "substitute",
            "texts",
            "text",
            *_COLUMNS.values(),
            "nearest null",
            "its error",
        ),
        (False,) * 4 + (True,) * len(_COLUMNS) + (False, True),
        tuple(rows),
    )


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per scan: pairs, candidates, and memory as planned and as it was."""
    rows = [
        (
            Cell(name),
            Cell(run.status),
            Cell(str(run.summary.get("model", "–"))),
            Cell(weights_cell(run.summary)),
            integer(len(run.summary.get("pairs") or [])),
            integer(sum(pair["level"] == "candidate" for pair in run.summary.get("pairs") or [])),
            given(run.summary, "peak_rss_mib", number, digits=0),
            given(run.summary, "planned_peak_mib", number, digits=0),
        )
        for name, run in runs.items()
    ]
    return Table(
        "scan-comparison",
        "The scans side by side; memory in MiB",
        ("run", "status", "model", "weights", "pairs", "candidates", "peak", "planned"),
        (False,) * 4 + (True,) * 4,
        tuple(rows),
    )


def _measures(part: Mapping[str, Any]) -> list[Cell]:
    """The measures without reasons: what a kind does not have is the same on every row."""
    return [
        measured(part.get(key), number, digits=2) if "topk" in key else measured(part.get(key), small)
        for key in _COLUMNS
    ]


def _range(found: list[Mapping[str, Any]], measure: str) -> tuple[Cell, Cell]:
    known = [null[measure] for null in found if null[measure] is not None]
    return measured(min(known, default=None), small), measured(max(known, default=None), small)
