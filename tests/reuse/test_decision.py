"""Verdicts on rows made by hand: each limit alone, frozen on calibration, and the sentence that says why."""

from __future__ import annotations

import copy

import pytest

from twinscope.lab.config import parse_config
from twinscope.lab.errors import ConfigError
from twinscope.reuse.branches import MEASURES
from twinscope.reuse.decision import Thresholds, judge, limits, pair_level

SITES = {"mlp": "layers.{}.mlp", "attention": "layers.{}.self_attn"}


def measures(kind, distance, agreement):
    """Every measure of a kind at one distance and one agreement; what the kind lacks is null."""
    found = {}
    for key in MEASURES:
        lacks = key == "norm_error" or (kind == "mlp" and key.startswith("attention"))
        found[key] = None if lacks else agreement if "topk" in key else distance
        if lacks:
            found[f"{key}_reason"] = "it has none"
    return found


def row(kind, reference, substitute, text, distance=0.004, agreement=0.99, null=0.5):
    site = SITES[kind].format
    names = ["zero", "mean", "permuted", f"other.{site(9)}"]
    beside = [{"null": name} | measures(kind, null, 0.3) for name in names]
    beside[0]["branch_error"] = 1.0
    beside.append({"null": "self"} | measures(kind, 0.0, 1.0))
    return {
        "kind": kind,
        "reference": site(reference),
        "substitute": site(substitute),
        "text": text,
        "tokens": 32,
        "reference_norm": 3.0,
        "nulls": beside,
        **measures(kind, distance, agreement),
    }


def both(kind, texts, **values):
    return [row(kind, *pair, text, **values) for text in texts for pair in ((1, 4), (4, 1))]


@pytest.fixture(params=["mlp", "attention"])
def kind(request):
    return request.param


@pytest.fixture
def calibration(kind):
    return both(kind, ("c1", "c2"))


@pytest.fixture
def heldout(kind):
    return both(kind, ("h1", "h2"))


def test_close_on_all_texts_and_inputs_is_a_candidate(calibration, heldout):
    found = judge(calibration, heldout, Thresholds())
    assert found.candidate
    assert found.failed_on is None
    assert found.reason == (
        "on all 4 texts and both inputs the branch error is at most 0.004 (nearest null: the mean update, "
        "0.5) and the next token diverges by at most 0.004 bits"
    )
    assert found.strain == pytest.approx(0.4)  # attention_js or logit_js: 0.004 of 0.01


@pytest.mark.parametrize("split", ["calibration", "heldout"])
@pytest.mark.parametrize("measure", ["branch_error", "branch_error_trimmed", "logit_js"])
def test_one_distance_on_one_text_is_enough_to_fail(calibration, heldout, split, measure):
    rows = calibration if split == "calibration" else heldout
    rows[3][measure] = 0.2
    found = judge(calibration, heldout, Thresholds())
    assert not found.candidate
    assert found.failed_on == split
    assert f" is 0.2 on {'held-out' if split == 'heldout' else split} text {rows[3]['text']}" in found.reason
    assert f"with the inputs of {rows[3]['reference']}" in found.reason
    assert "where at most 0.15 counts" in found.reason or "at most 0.01 counts" in found.reason


@pytest.mark.parametrize(("measure", "value"), [("attention_js", 0.02), ("attention_js_worst", 0.06)])
def test_attention_has_limits_of_its_own(measure, value):
    rows, held = both("attention", ("c1",)), both("attention", ("h1",))
    held[0][measure] = value
    assert judge(rows, held, Thresholds()).failed_on == "heldout"
    held[0][measure] = value / 2.01
    assert judge(rows, held, Thresholds()).candidate


def test_an_agreement_below_the_least_fails(calibration, heldout):
    heldout[0]["logit_topk_5"] = 0.79
    found = judge(calibration, heldout, Thresholds())
    assert found.reason == (
        f"the agreement on the 5 most probable tokens is 0.79 on held-out text h1 with the inputs of "
        f"{heldout[0]['reference']}, where 0.8 is the least"
    )


def test_closeness_that_a_null_shares_is_none(kind):
    close = {"distance": 0.004, "null": 0.007}
    found = judge(both(kind, ("c1",), **close), both(kind, ("h1",)), Thresholds())
    assert found.failed_on == "calibration"
    assert "more than 0.5 times that of the nearest null on calibration" in found.reason
    assert judge(
        both(kind, ("c1",), distance=0.004, null=0.0081), both(kind, ("h1",)), Thresholds()
    ).candidate


def test_held_out_nulls_count_on_their_own_text(calibration, kind):
    found = judge(calibration, both(kind, ("h1",), null=0.007), Thresholds())
    assert found.failed_on == "heldout"
    assert "more than 0.5 times that of the nearest null there" in found.reason


def test_limits_come_from_calibration_and_never_loosen(calibration, kind):
    for null in calibration[2]["nulls"]:
        if null["null"] == "mean":
            null["branch_error"] = 0.1
    found = limits(calibration, Thresholds())
    one, other = SITES[kind].format(1), SITES[kind].format(4)
    assert found[one]["branch_error"].most == pytest.approx(0.05)
    assert found[one]["branch_error"].null == "mean"
    assert found[other]["branch_error"].most == 0.15
    # Held-out text at 0.06, far from its own nulls, does not undo it.
    heldout = both(kind, ("h1",))
    heldout[0]["branch_error"] = 0.06
    assert judge(calibration, heldout, Thresholds()).failed_on == "heldout"
    heldout[0]["branch_error"], heldout[1]["branch_error"] = 0.04, 0.14
    assert judge(calibration, heldout, Thresholds()).candidate


def test_the_worst_of_several_failures_is_named(calibration, heldout):
    calibration[0]["branch_error"], calibration[2]["branch_error"] = 0.3, 0.9
    heldout[0]["branch_error"] = 5.0
    found = judge(calibration, heldout, Thresholds())
    assert "the branch error is 0.9 on calibration text c2" in found.reason
    assert found.strain == pytest.approx(6.0)


def test_a_null_at_distance_0_leaves_nothing_to_beat(calibration, heldout):
    for null in calibration[0]["nulls"]:
        null["logit_js"] = 0.0
    assert judge(calibration, heldout, Thresholds()).failed_on == "calibration"


def test_the_module_itself_must_be_exact(calibration, heldout):
    heldout[1]["nulls"][-1]["branch_error"] = 1e-9
    found = judge(calibration, heldout, Thresholds())
    assert found.failed_on == "instrument"
    assert "against itself gives a branch error of 1e-09 on h1 instead of exactly 0" in found.reason
    heldout[1]["nulls"][-1] |= {"branch_error": 0.0, "logit_topk_10": 0.999}
    assert "instead of exactly 1" in judge(calibration, heldout, Thresholds()).reason


def test_without_another_module_closeness_is_not_special(calibration, heldout):
    for each in (*calibration, *heldout):
        each["nulls"] = [null for null in each["nulls"] if not null["null"].startswith("other")]
    found = judge(calibration, heldout, Thresholds())
    assert not found.candidate
    assert "no other module of its kind" in found.reason


def test_one_direction_is_not_enough(calibration, heldout):
    found = judge(calibration[::2], heldout[::2], Thresholds())
    assert found.reason == "calibration text was measured on the inputs of one site only"
    assert judge(calibration, heldout[::2], Thresholds()).reason.startswith("held-out text was measured")
    with pytest.raises(ValueError, match="needs calibration rows"):
        judge([], heldout, Thresholds())


def test_a_distance_that_does_not_exist_is_no_small_one(calibration, heldout):
    heldout[0] |= {"branch_error": None, "branch_error_reason": "the reference is exactly zero"}
    found = judge(calibration, heldout, Thresholds())
    assert not found.candidate
    assert found.reason.endswith("the reference is exactly zero")


class TestLevel:
    def level(self, verdict, **changes):
        facts = {
            "confirmed": True,
            "parity_passed": True,
            "weights": "trained",
            "planted": False,
            "seal_intact": True,
        }
        return pair_level(verdict, **(facts | changes))

    def test_a_candidate(self, calibration, heldout):
        verdict = judge(calibration, heldout, Thresholds())
        assert self.level(verdict) == ("candidate", verdict.reason)
        assert self.level(verdict, planted=True)[0] == "candidate"

    @pytest.mark.parametrize(
        ("changes", "level", "words"),
        [
            ({"weights": "random"}, "parity", "the weights are random, so the pair stays below"),
            ({"seal_intact": False}, "parity", "the seal of the plan is broken"),
            ({"parity_passed": False}, "capacity", "was not shown to equal the library's"),
            ({"confirmed": False}, "parity", "held-out text was not opened; on calibration, on all"),
        ],
    )
    def test_what_holds_it_back(self, calibration, heldout, changes, level, words):
        found = self.level(judge(calibration, heldout, Thresholds()), **changes)
        assert found[0] == level
        assert words in found[1]

    def test_a_failure_keeps_its_own_reason(self, calibration, heldout):
        failed = copy.deepcopy(heldout)
        failed[0]["logit_js"] = 0.9
        verdict = judge(calibration, failed, Thresholds())
        assert self.level(verdict, weights="random") == ("parity", verdict.reason)


def test_thresholds_refuse_what_cannot_be_one():
    with pytest.raises(ConfigError, match="unknown key 'branch_eror'"):
        parse_config({"branch_eror": 0.1}, Thresholds, "plan")
    with pytest.raises(ConfigError, match="null_share"):
        parse_config({"null_share": 1.0}, Thresholds, "plan")
