"""What the rows of a replacement say: verdict and level of both directions, summary of the pair, claims.

Covers the number of texts that a margin needs, intervals and verdicts over texts, and what holds a level
down; it touches no model. The statistics are those of ``lab/statistics.py``, levels are assigned in
``lab/evidence.py`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinscope.lab.evidence import MEANING, Facts, Level, Weights, assign_level, claim, reuse_claim
from twinscope.lab.statistics import (
    Interval,
    Verdict,
    equivalence_verdict,
    paired_interval,
    texts_needed,
)
from twinscope.reuse import nulls
from twinscope.reuse.branches import Comparison
from twinscope.reuse.measures import LOGIT_K
from twinscope.reuse.scan_evidence import Judged
from twinscope.reuse.swap_plan import ALPHA, POWER, SwapPlan, direction_of, null_names
from twinscope.reuse.swap_texts import OWN

Row = Mapping[str, Any]
#: A number of needed texts that stands for this many or more.
MOST_TEXTS = 10**8
#: What the site in its own place must give: measure -> (what it is called, its value).
_EXACT = {
    "delta_nll": ("a change of loss", 0.0),
    "logit_js": ("a divergence of the next token", 0.0),
    **{f"logit_topk_{k}": (f"an agreement on the {k} most probable tokens", 1.0) for k in LOGIT_K},
}


@dataclass(frozen=True)
class Ground:
    """What a replacement stands on: the model's parity and weights, and the scan's own rows of the pair.

    ``judged`` is None for a pair that the scan's sealed plan does not name.
    """

    parity_passed: bool
    weights: Weights
    planted: bool
    judged: Judged | None


def needed_texts(changes: Sequence[float], margin: float) -> dict[str, Any]:
    """The spread of the change over texts, and how many texts find a change of 0 within ``margin``.

    ``delta_nll`` and ``sd`` in nats per token; ``needed`` at the power and level that the run states.

    Raises:
        ValueError: fewer than two changes.
    """
    sample = np.asarray(changes, dtype=np.float64)
    if sample.size < 2:
        raise ValueError("the spread over texts takes at least two of them")
    sd = float(sample.std(ddof=1))
    try:
        needed = min(texts_needed(sd, margin, POWER, ALPHA), MOST_TEXTS)
    except ValueError:
        needed = MOST_TEXTS
    return {"delta_nll": float(sample.mean()), "sd": sd, "needed": needed}


def swap_findings(
    plan: SwapPlan,
    rows: Mapping[str, Sequence[Row]],
    decided: Mapping[str, Mapping[str, Any]],
    ground: Ground,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """``pair``, ``directions``, ``level`` and ``notes`` of the summary, and the claims.

    ``rows`` are the held-out rows of each direction, ``decided`` what calibration said of it.
    """
    pair = plan.pair
    found = [
        _direction(plan, comparison, rows[direction_of(comparison)], decided[direction_of(comparison)])
        for comparison in pair.comparisons
    ]
    facts = facts_of(plan, ground, {item["direction"]: item["verdict"] for item in found})
    for item in found:
        level = assign_level(facts, item["direction"])
        item["level"] = level
        item["reason"] = _with_level(plan, ground, item, level)
    whole = assign_level(facts)
    judged = ground.judged
    verdict = None if judged is None else judged.verdict
    summary_pair: dict[str, Any] = {
        "id": pair.id,
        "kind": pair.kind,
        "left": pair.left,
        "right": pair.right,
        "exploratory": pair.exploratory,
        "chosen": plan.content["pair"]["chosen"],
        "candidate": judged is not None and judged.level == "candidate",
        "strain": None if verdict is None else verdict.strain,
        "scan_reason": "the scan did not measure this pair" if judged is None else judged.reason,
        "passed": all(facts.intervention_passed.values()),
        "level": whole,
    }
    if summary_pair["strain"] is None:
        summary_pair["strain_reason"] = (
            "the scan did not measure this pair" if judged is None else "its instrument was at fault"
        )
    claims = [_claim(plan, facts, item) for item in found] + [_pair_claim(plan, facts, found, whole)]
    summary = {"pair": summary_pair, "directions": found, "level": whole, "notes": _notes(plan, found)}
    return summary, claims


def facts_of(plan: SwapPlan, ground: Ground, verdicts: Mapping[str, Verdict | None]) -> Facts:
    """The facts from which levels follow; a pair named by the user counts as one outside the seal."""
    return Facts(
        ran=True,
        parity_passed=ground.parity_passed,
        candidate_passed=ground.judged is not None and ground.judged.level == "candidate",
        weights=ground.weights,
        planted=ground.planted,
        seal_intact=not plan.pair.exploratory,
        intervention_passed={name: verdict == "equivalent" for name, verdict in verdicts.items()},
    )


def _direction(
    plan: SwapPlan, comparison: Comparison, rows: Sequence[Row], decided: Mapping[str, Any]
) -> dict[str, Any]:
    """One direction over all held-out texts, without its level."""
    name = direction_of(comparison)
    deltas = [row["delta_nll"] for row in rows]
    wide, narrow = paired_interval(deltas, 0.95), paired_interval(deltas, 0.90)
    fault = _fault(comparison, rows)
    needed = int(decided["needed"])
    verdict = None if fault is not None else equivalence_verdict(deltas, plan.margin, needed)
    stored = next(item for item in plan.content["directions"] if item["direction"] == name)
    worst = max(rows, key=lambda row: row["delta_nll"])
    tokens = sum(row["tokens"] for row in rows)
    before, after = (sum(row[key] * row["tokens"] for row in rows) for key in ("nll_before", "nll"))
    found: dict[str, Any] = {
        "direction": name,
        "replaced": comparison.reference,
        "by": comparison.substitute,
        "delta_nll": wide.estimate,
        "low": wide.low,
        "high": wide.high,
        "low_90": narrow.low,
        "high_90": narrow.high,
        "method": wide.method,
        "verdict": verdict,
        "reason": fault or _reason(plan, verdict, wide, narrow, needed, decided),
        "texts": len(rows),
        "needed": needed,
        "calibration_delta_nll": decided["delta_nll"],
        "calibration_sd": decided["sd"],
        **_divergence(rows),
        "logit_js_worst": max(row["logit_js"] for row in rows),
        "worst": {"text": worst["text"], "delta_nll": worst["delta_nll"]},
        "nll_before": before / tokens,
        "nll_after": after / tokens,
        **_perplexity("perplexity_before", before / tokens),
        **_perplexity("perplexity_after", after / tokens),
        **_bits_per_byte("bits_per_byte_before", before, rows),
        **_bits_per_byte("bits_per_byte_after", after, rows),
        "saved": stored["saved"],
        "nulls": [_null(null, rows) for null in null_names(comparison)],
    }
    if verdict is None:
        found["verdict_reason"] = fault
    return found


def _fault(comparison: Comparison, rows: Sequence[Row]) -> str | None:
    """What the site in its own place changed, in a sentence; None if nothing, as it must be."""
    for row in rows:
        itself = next(null for null in row["nulls"] if null["null"] == nulls.SELF)
        for measure, (called, exact) in _EXACT.items():
            if itself[measure] != exact:
                return (
                    f"{comparison.reference} in its own place gives {called} of {itself[measure]:.3g} on "
                    f"{row['text']} instead of exactly {exact:g}, so nothing measured here can be trusted"
                )
    return None


def _reason(
    plan: SwapPlan,
    verdict: Verdict | None,
    wide: Interval,
    narrow: Interval,
    needed: int,
    decided: Mapping[str, Any],
) -> str:
    change = (
        f"the loss changes by {wide.estimate:+.4f} nats per token on {wide.n} held-out texts (95 % interval "
        f"{wide.low:+.4f} to {wide.high:+.4f}, 90 % {narrow.low:+.4f} to {narrow.high:+.4f})"
    )
    margin = f"±{plan.margin:g}"
    if verdict == "different":
        return f"{change}: the 95 % interval lies wholly outside {margin}"
    if verdict == "underpowered":
        return (
            f"{change}: with the spread of {decided['sd']:.3g} nats over calibration texts it takes {needed} "
            f"texts to find a true change of 0 within {margin} with a probability of {POWER:g}"
        )
    if verdict == "equivalent":
        return f"{change}: the 90 % interval lies inside {margin}, and {needed} texts were needed"
    return f"{change}: neither is the 90 % interval inside {margin} nor the 95 % interval wholly outside"


def _with_level(plan: SwapPlan, ground: Ground, item: Mapping[str, Any], level: Level) -> str:
    """The verdict's reason, and what holds the level below ``intervention`` although the direction passed."""
    if item["verdict"] != "equivalent" or level == "intervention":
        return item["reason"]
    if not ground.parity_passed:
        held = "the streamed forward was not shown to equal the library's: run `twinscope model check`"
    elif ground.weights == "random":
        held = "the weights are random"
    elif plan.pair.exploratory:
        held = "the pair was named after the plan was sealed, so it is exploratory"
    else:
        held = "the scan's own rows make the pair no candidate"
    return f"{item['reason']}; the level stays at {level}, because {held}"


def _divergence(rows: Sequence[Row]) -> dict[str, float]:
    keys = ("logit_js", *(f"logit_topk_{k}" for k in LOGIT_K))
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys}


def _null(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    beside = [null for row in rows for null in row["nulls"] if null["null"] == name]
    interval = paired_interval([null["delta_nll"] for null in beside], 0.95)
    return {
        "null": name,
        "delta_nll": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        **_divergence(beside),
    }


def _perplexity(key: str, nats: float) -> dict[str, Any]:
    try:
        return {key: math.exp(nats)}
    except OverflowError:
        return {
            key: None,
            f"{key}_reason": f"the exponential of {nats:.0f} nats is beyond a float",
        }


def _bits_per_byte(key: str, nats: float, rows: Sequence[Row]) -> dict[str, Any]:
    """Nats over all predicted tokens to bits per byte of their text: Σ nats / (ln 2 · Σ bytes)."""
    unknown = next((row for row in rows if row["bytes"] is None), None)
    if unknown is not None:
        reason = f"{unknown['text']} has no count of bytes: {unknown['bytes_reason']}"
        return {key: None, f"{key}_reason": reason}
    return {key: nats / (math.log(2) * sum(row["bytes"] for row in rows))}


def _notes(plan: SwapPlan, found: Sequence[Mapping[str, Any]]) -> list[str]:
    notes: list[str] = []
    short = max((item["needed"] for item in found if item["verdict"] == "underpowered"), default=None)
    if short is not None:
        texts = plan.content["texts"]
        known = sum(item["split"] == "calibration" for item in texts["passages"])
        notes.append(
            f"{short} texts of each split would suffice, as far as the spread over {known} calibration texts "
            f"of {texts['tokens']} tokens tells: twinscope swap with --texts"
        )
    if plan.content["texts"]["from"] == OWN and not plan.pair.exploratory:
        notes.append("the held-out texts are those on which the scan confirmed the candidate")
    return notes


def _claim(plan: SwapPlan, facts: Facts, item: Mapping[str, Any]) -> dict[str, str]:
    verdict = item["verdict"] or "no verdict"
    statement = f"{item['direction']} ({plan.pair.kind}): {item['level']}, {verdict}; {item['reason']}"
    if plan.pair.exploratory:
        return _exploratory(plan, statement, item["level"])
    return reuse_claim(statement, facts, item["direction"])


def _pair_claim(
    plan: SwapPlan, facts: Facts, found: Sequence[Mapping[str, Any]], level: Level
) -> dict[str, str]:
    said = ", ".join(f"{item['direction']} {item['verdict'] or 'no verdict'}" for item in found)
    pair = plan.pair
    statement = f"{pair.left} and {pair.right} ({pair.kind}) in each other's place: {level}; {said}"
    return _exploratory(plan, statement, level) if pair.exploratory else reuse_claim(statement, facts)


def _exploratory(plan: SwapPlan, statement: str, level: Level) -> dict[str, str]:
    supports, leaves_open = MEANING[level]
    limits = [leaves_open, "a pair that the sealed plan of the scan did not choose"]
    model = plan.content["model"]
    if model["planted"]:
        limits.append("duplication that training made: copies were planted in these weights")
    if model["weights"] == "random":
        limits.append("anything beyond parity: the weights are random")
    return claim(statement, level, supports, "; ".join(limits))
