"""Verdicts, levels and claims of a replacement, from hand-made rows against the statistics themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from twinscope.lab import statistics
from twinscope.lab.schemas import swap as schema
from twinscope.reuse.branches import Comparison
from twinscope.reuse.decision import Verdict
from twinscope.reuse.plan import Pair
from twinscope.reuse.scan_evidence import Judged
from twinscope.reuse.swap_findings import Ground, facts_of, needed_texts, swap_findings
from twinscope.reuse.swap_plan import SwapPlan, direction_of
from twinscope.reuse.swap_texts import NEW, OWN

LEFT, RIGHT = "layers.1.mlp", "layers.2.mlp"
THERE, BACK = f"{LEFT} <- {RIGHT}", f"{RIGHT} <- {LEFT}"
MARGIN = 0.05


def plan(
    exploratory: bool = False, weights: str = "released", planted: bool = False, origin: str = OWN
) -> Any:
    content = {
        "pair": {
            "id": f"{LEFT}={RIGHT}", "kind": "mlp", "left": LEFT, "right": RIGHT, "chosen": "a test",
            "exploratory": exploratory,
            "comparisons": [
                {"kind": "mlp", "reference": here, "substitute": there, "others": ["layers.0.mlp"]}
                for here, there in ((LEFT, RIGHT), (RIGHT, LEFT))
            ],
        },
        "directions": [
            {"direction": name, "saved": {"parameters": 7, "bytes": 14}} for name in (THERE, BACK)
        ],
        "margin": MARGIN,
        "texts": {"from": origin, "tokens": 9, "passages": [{"split": "calibration"}] * 3},
        "model": {"weights": weights, "planted": planted},
    }  # fmt: skip
    return SwapPlan(content, "seal", "2026-01-01T00:00:00Z")


def rows(deltas: Sequence[float], nll: float = 3.0, nbytes: int | None = 20, itself: Any = None) -> list[Any]:
    """Held-out rows of one direction, 8 predicted tokens each."""

    def effect(delta: float, js: float = 0.001) -> dict[str, float]:
        return {
            "nll": nll + delta, "delta_nll": delta, "logit_js": js,
            "logit_topk_1": 0.9, "logit_topk_5": 0.8, "logit_topk_10": 0.7,
        }  # fmt: skip

    exact = {
        "delta_nll": 0.0,
        "logit_js": 0.0,
        "logit_topk_1": 1.0,
        "logit_topk_5": 1.0,
        "logit_topk_10": 1.0,
    }
    found = []
    for number, delta in enumerate(deltas):
        nulls = [
            {"null": "zero", **effect(2.0 + number)},
            {"null": "mean", **effect(1.0)},
            {"null": "self", **effect(0.0), **exact, **(itself or {})},
            {"null": "other.layers.0.mlp", **effect(0.5)},
        ]
        row = {
            "text": f"heldout-{number}", "tokens": 8, "bytes": nbytes, "nll_before": nll,
            **effect(delta, 0.001 * (number + 1)), "nulls": nulls,
        }  # fmt: skip
        found.append(row if nbytes is not None else row | {"bytes_reason": "a test has no tokenizer"})
    return found


def judged(level: Any = "candidate", strain: float | None = 0.2) -> Judged:
    comparisons = Comparison("mlp", LEFT, RIGHT), Comparison("mlp", RIGHT, LEFT)
    pair = Pair(f"{LEFT}={RIGHT}", "mlp", LEFT, RIGHT, comparisons)
    return Judged(pair, Verdict(level == "candidate", "as measured", None, strain), level, "as measured")


def decided(sd: float = 0.001, needed: int = 2) -> dict[str, Any]:
    return {name: {"delta_nll": 0.0, "sd": sd, "needed": needed} for name in (THERE, BACK)}


SMALL = [0.001, -0.002, 0.0005, 0.001]
LARGE = [0.4, 0.5, 0.45, 0.42]


def find(
    there: list[Any],
    back: list[Any],
    ground: Ground | None = None,
    the_plan: Any = None,
    decisions: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    ground = ground or Ground(True, "released", False, judged())
    return swap_findings(the_plan or plan(), {THERE: there, BACK: back}, decisions or decided(), ground)


def test_the_texts_that_a_margin_needs_come_from_the_spread_over_calibration():
    values = [0.01, -0.03, 0.02, 0.05]
    sd = float(np.std(values, ddof=1))
    found = needed_texts(values, 0.05)
    assert (found["delta_nll"], found["sd"]) == (pytest.approx(0.0125), pytest.approx(sd))
    assert found["needed"] == statistics.texts_needed(sd, 0.05, 0.8, 0.05)
    # The answer is the smallest: one text less has a power below 0.8.
    assert statistics.tost_power(found["needed"], sd, 0.05) >= 0.8
    assert statistics.tost_power(found["needed"] - 1, sd, 0.05) < 0.8
    assert needed_texts([0.0, 0.0], 0.05)["needed"] == 2
    assert needed_texts([0.0, 1e5], 1e-6)["needed"] == 10**8
    with pytest.raises(ValueError, match="at least two"):
        needed_texts([0.0], 0.05)


def test_the_summary_of_a_direction_is_the_students_interval_of_its_texts():
    summary, _ = find(rows(SMALL), rows(LARGE))
    here = summary["directions"][0]
    mean, error = np.mean(SMALL), np.std(SMALL, ddof=1) / 2
    for low, high, level in (("low", "high", 0.95), ("low_90", "high_90", 0.90)):
        half = stats.t.ppf((1 + level) / 2, 3) * error
        assert (here[low], here[high]) == (pytest.approx(mean - half), pytest.approx(mean + half))
    assert here["delta_nll"] == pytest.approx(mean)
    assert (here["texts"], here["method"], here["direction"]) == (4, "student-t", THERE)
    assert here["perplexity_before"] == pytest.approx(math.exp(3))
    assert here["perplexity_after"] == pytest.approx(math.exp(3 + mean))
    # 8 predicted tokens of 20 bytes each text.
    assert here["bits_per_byte_before"] == pytest.approx(3 * 8 / (math.log(2) * 20))
    assert here["bits_per_byte_after"] == pytest.approx((3 + mean) * 8 / (math.log(2) * 20))
    assert (here["logit_js"], here["logit_js_worst"]) == (pytest.approx(0.0025), 0.004)
    assert here["worst"] == {"text": "heldout-0", "delta_nll": 0.001}
    assert here["saved"] == {"parameters": 7, "bytes": 14}
    nulls = {null["null"]: null for null in here["nulls"]}
    assert list(nulls) == ["zero", "mean", "self", "other.layers.0.mlp"]
    assert nulls["zero"]["delta_nll"] == pytest.approx(3.5)
    assert nulls["zero"]["high"] == pytest.approx(
        3.5 + stats.t.ppf(0.975, 3) * np.std([2, 3, 4, 5], ddof=1) / 2
    )
    assert nulls["self"]["delta_nll"] == nulls["self"]["low"] == nulls["self"]["high"] == 0


def test_bytes_that_are_not_known_leave_a_reason():
    here = find(rows(SMALL, nbytes=None), rows(SMALL))[0]["directions"][0]
    assert here["bits_per_byte_before"] is None
    assert here["bits_per_byte_before_reason"] == "heldout-0 has no count of bytes: a test has no tokenizer"
    lost = find(rows(SMALL, nll=800.0), rows(SMALL))[0]["directions"][0]
    assert lost["perplexity_after"] is None
    assert "the exponential of 800 nats" in lost["perplexity_after_reason"]


@pytest.mark.parametrize(
    ("deltas", "needed", "verdict", "words"),
    [
        (SMALL, 4, "equivalent", "the 90 % interval lies inside ±0.05, and 4 texts were needed"),
        (SMALL, 5, "underpowered", "it takes 5 texts to find a true change of 0 within ±0.05 with a prob"),
        (LARGE, 900, "different", "the 95 % interval lies wholly outside ±0.05"),
        ([0.1, -0.1, 0.05, 0.02], 4, "inconclusive", "neither is the 90 % interval inside ±0.05 nor"),
    ],
)
def test_verdicts_come_in_the_order_of_the_method(deltas, needed, verdict, words):
    decisions = {**decided(), THERE: decided(0.02, needed)[THERE]}
    summary, claims = find(rows(deltas), rows(SMALL), decisions=decisions)
    here = summary["directions"][0]
    assert here["verdict"] == verdict == statistics.equivalence_verdict(deltas, MARGIN, needed)
    assert words in here["reason"]
    assert words in claims[0]["statement"]
    suffices = [note for note in summary["notes"] if "would suffice" in note]
    assert len(suffices) == (verdict == "underpowered")
    if suffices:
        assert suffices[0].startswith(
            "5 texts of each split would suffice, as far as the spread over 3 calib"
        )


def test_both_directions_passed_is_an_intervention():
    summary, claims = find(rows(SMALL), rows(SMALL))
    assert [item["level"] for item in summary["directions"]] == ["intervention", "intervention"]
    assert (summary["level"], summary["pair"]["level"]) == ("intervention", "intervention")
    assert (summary["pair"]["passed"], summary["pair"]["candidate"]) == (True, True)
    assert [claim["level"] for claim in claims] == ["intervention"] * 3
    assert "general capability" in claims[2]["does_not_support"]
    assert summary["notes"] == ["the held-out texts are those on which the scan confirmed the candidate"]
    assert find(rows(SMALL), rows(SMALL), the_plan=plan(origin=NEW))[0]["notes"] == []


@pytest.mark.parametrize("good", [0, 1])
def test_one_direction_never_hides_the_failure_of_the_other(good):
    both = [rows(LARGE), rows(LARGE)]
    both[good] = rows(SMALL)
    summary, claims = find(both[0], both[1])
    levels = [item["level"] for item in summary["directions"]]
    assert levels[good] == "intervention"
    assert levels[1 - good] == "candidate"
    assert (summary["level"], summary["pair"]["passed"]) == ("candidate", False)
    failed = (THERE, BACK)[1 - good]
    assert f"replacement in the direction {failed}, which failed" in claims[2]["does_not_support"]
    assert f"{failed} different" in claims[2]["statement"]


@pytest.mark.parametrize(
    ("ground", "the_plan", "level", "words"),
    [
        (Ground(True, "released", False, None), None, "parity", "the scan's own rows make the pair no cand"),
        (Ground(True, "released", False, judged("parity")), None, "parity", "make the pair no candidate"),
        (Ground(True, "random", False, judged()), plan(weights="random"), "parity", "the weights are random"),
        (Ground(False, "released", False, judged()), None, "capacity", "run `twinscope model check`"),
        (Ground(True, "released", False, judged()), plan(exploratory=True), "parity", "it is exploratory"),
    ],
    ids=["outside-the-scan", "no-candidate", "random", "no-parity", "exploratory"],
)
def test_nothing_that_is_missing_below_is_made_up_for_by_a_passed_replacement(ground, the_plan, level, words):
    summary, claims = find(rows(SMALL), rows(SMALL), ground, the_plan)
    assert [item["verdict"] for item in summary["directions"]] == ["equivalent", "equivalent"]
    assert {item["level"] for item in summary["directions"]} == {summary["level"]} == {level}
    assert {claim["level"] for claim in claims} == {level}
    for item in summary["directions"]:
        assert f"the level stays at {level}, because" in item["reason"]
        assert words in item["reason"]


def test_what_limits_a_claim_stands_in_it():
    exploratory = find(rows(SMALL), rows(SMALL), the_plan=plan(exploratory=True, planted=True))[1]
    for claim in exploratory:
        assert "a pair that the sealed plan of the scan did not choose" in claim["does_not_support"]
        assert "copies were planted" in claim["does_not_support"]
    planted = find(rows(SMALL), rows(SMALL), Ground(True, "trained", True, judged()))[1]
    assert all("copies were planted" in claim["does_not_support"] for claim in planted)
    random = Ground(True, "random", False, judged())
    for the_plan in (plan(weights="random"), plan(exploratory=True, weights="random")):
        claims = find(rows(SMALL), rows(SMALL), random, the_plan)[1]
        assert all("the weights are random" in claim["does_not_support"] for claim in claims)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"delta_nll": 1e-9}, "gives a change of loss of 1e-09 on heldout-0 instead of exactly 0"),
        ({"logit_js": 1e-12}, "gives a divergence of the next token of 1e-12 on heldout-0"),
        (
            {"logit_topk_5": 0.99},
            "an agreement on the 5 most probable tokens of 0.99 on heldout-0 instead of",
        ),
    ],
)
def test_an_instrument_at_fault_gives_no_verdict(wrong, words):
    summary, claims = find(rows(SMALL, itself=wrong), rows(SMALL))
    here, back = summary["directions"]
    assert here["verdict"] is None
    assert words in here["verdict_reason"] == here["reason"]
    assert (here["level"], back["level"], summary["level"]) == ("candidate", "intervention", "candidate")
    assert "no verdict" in claims[2]["statement"]


def test_the_facts_are_those_from_which_levels_are_assigned():
    facts = facts_of(plan(), Ground(True, "released", False, judged()), {THERE: "equivalent", BACK: None})
    assert facts.intervention_passed == {THERE: True, BACK: False}
    assert (facts.candidate_passed, facts.seal_intact) == (True, True)
    assert not facts_of(plan(exploratory=True), Ground(True, "released", False, None), {}).seal_intact


def test_names_agree_with_those_of_the_statistics():
    assert set(get_args(schema.Verdict)) == set(get_args(statistics.Verdict))
    assert direction_of(Comparison("mlp", LEFT, RIGHT)) == THERE
