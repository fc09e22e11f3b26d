"""What a scan's rows say: verdict, level and reason of every pair, the summary of the record and its claims.

Covers turning rows into a summary; it touches no model. The rules are in decision.py and ``lab/evidence.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinscope.lab.evidence import MEANING, Facts, Level, claim, reuse_claim
from twinscope.reuse.branches import aggregate
from twinscope.reuse.decision import Limit, Verdict, judge, limits, pair_level
from twinscope.reuse.plan import Pair, Plan

Row = dict[str, Any]


def pair_findings(
    plan: Plan, pair: Pair, rows: Sequence[Row], parity_passed: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The summary of one pair and its claim, from its rows on all texts.

    A pair that was added after the plan was sealed stays below a candidate whatever it shows.
    """
    calibration = [row for row in rows if row["split"] == "calibration"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    verdict = judge(calibration, heldout, plan.thresholds)
    model = plan.content["model"]
    level, reason = pair_level(
        verdict,
        confirmed=bool(heldout),
        parity_passed=parity_passed,
        weights=model["weights"],
        planted=model["planted"],
        seal_intact=not pair.exploratory,
    )
    if pair.exploratory and verdict.candidate and parity_passed:
        reason = (
            "the pair was added after the plan was sealed, so it is exploratory and stays below a candidate "
            f"although {verdict.reason}"
        )
    summary: dict[str, Any] = {
        "id": pair.id,
        "kind": pair.kind,
        "left": pair.left,
        "right": pair.right,
        "exploratory": pair.exploratory,
        "level": level,
        "reason": reason,
        "candidate": verdict.candidate,
        **_known("failed_on", verdict.failed_on, "it failed nowhere"),
        **_known("strain", verdict.strain, "the instrument was at fault, so no distance counts"),
        "directions": _directions(plan, pair, calibration, heldout),
    }
    return summary, _claim(plan, pair, verdict, level, reason, bool(heldout), parity_passed)


def _directions(
    plan: Plan, pair: Pair, calibration: Sequence[Row], heldout: Sequence[Row]
) -> list[dict[str, Any]]:
    found = limits(calibration, plan.thresholds)
    directions = []
    for comparison in pair.comparisons:
        here = [
            [row for row in rows if row["reference"] == comparison.reference]
            for rows in (calibration, heldout)
        ]
        directions.append(
            {
                "reference": comparison.reference,
                "substitute": comparison.substitute,
                "calibration": aggregate(here[0]),
                "heldout": aggregate(here[1]),
                **_worst([*here[0], *here[1]]),
                "limits": [_limit(name, limit) for name, limit in found[comparison.reference].items()],
            }
        )
    return directions


def _worst(rows: Sequence[Row]) -> dict[str, Any]:
    known = [row for row in rows if row["branch_error"] is not None]
    if not known:
        return _known("worst", None, "the reference is exactly zero on every text")
    row = max(known, key=lambda row: row["branch_error"])
    return {"worst": {"text": row["text"], "branch_error": row["branch_error"]}}


def _limit(measure: str, limit: Limit) -> dict[str, Any]:
    reason = "no null has this measure"
    return {
        "measure": measure,
        "most": limit.most,
        **_known("null", limit.null, reason),
        **_known("nearest", limit.nearest, reason),
    }


def _claim(
    plan: Plan,
    pair: Pair,
    verdict: Verdict,
    level: Level,
    reason: str,
    confirmed: bool,
    parity_passed: bool,
) -> dict[str, str]:
    statement = f"{pair.left} and {pair.right} ({pair.kind}): {level}; {reason}"
    model = plan.content["model"]
    if pair.exploratory:
        supports, leaves_open = MEANING[level]
        return claim(statement, level, supports, f"{leaves_open}; a pair that the sealed plan did not name")
    facts = Facts(
        ran=True,
        parity_passed=parity_passed,
        candidate_passed=verdict.candidate and confirmed,
        weights=model["weights"],
        planted=model["planted"],
        seal_intact=True,
    )
    return reuse_claim(statement, facts)


def _known(key: str, value: Any, reason: str) -> dict[str, Any]:
    return {key: value} if value is not None else {key: None, f"{key}_reason": reason}
