"""Every verdict on a claim, conditions, and published measurements as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinscope.lab.errors import ConfigError
from twinscope.propagation.cost.claims import Claim, Measurement, Number, judge, judged, load_published

PUBLISHED = Path(__file__).parents[3] / "experiments" / "published"


def claim(low, high, quantity="train_step_ratio", **conditions) -> Claim:
    return Claim.model_validate(
        {"name": "c", "quantity": quantity, "low": low, "high": high, "source": "s", "conditions": conditions}
    )


def measurement(name="ours", sides=("ep", "bp"), published=False, caveat=None, **facts) -> Measurement:
    numbers = {
        "train_step_ratio": Number(1.7, 1.65, 1.75),
        "wall_clock_ratio": Number(1.68, 1.6, 1.8),
        "flops_ratio": Number(1.64, 1.6, 1.64),
    }
    facts = {"device": "cpu", "precision": "fp32", "rounds": 1, "batch": 4, **facts}
    return Measurement(
        name, frozenset({sides[0], "arm"}), frozenset({sides[1]}), facts, numbers, published,
        caveat=caveat, missing={"peak_memory_ratio": "it was left out"},
    )  # fmt: skip


def verdict(item: Claim, *measurements: Measurement) -> str:
    return judge(item, measurements)[0].verdict


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.74, 2.0, "consistent"),
        (1.75, 2.0, "consistent"),
        (1.0, 1.65, "consistent"),
        (1.69, 1.71, "consistent"),
        (1.0, 3.0, "consistent"),
        (1.76, 2.0, "overstated"),
        (1.0, 1.64, "understated"),
    ],
)
def test_intervals_decide_under_the_claims_own_conditions(low, high, expected):
    found = judge(claim(low, high, device="cpu", rounds=1), [measurement()])
    assert [j.verdict for j in found] == [expected]
    assert found[0].number == Number(1.7, 1.65, 1.75)
    assert "1.7× [1.65, 1.75]" in found[0].reason


def test_other_conditions_are_not_comparable_and_the_reason_names_them():
    (found,) = judge(claim(1.0, 9.0, device="cuda", precision="amp", batch=4), [measurement()])
    assert found.verdict == "not comparable"
    assert "device cpu where the claim says cuda and precision fp32 where the claim says amp" in found.reason
    assert "batch" not in found.reason
    assert verdict(claim(1.0, 9.0, device="CPU"), measurement()) == "consistent"
    (unknown,) = judge(claim(1.0, 9.0, layers=12), [measurement()])
    assert "no layers given where the claim says 12" in unknown.reason


def test_flops_do_not_depend_on_device_and_precision():
    flops = claim(3.1, 3.3, "flops_ratio", device="cuda", precision="amp", rounds=1)
    assert verdict(flops, measurement()) == "overstated"
    assert verdict(claim(3.1, 3.3, "flops_ratio", rounds=3), measurement()) == "not comparable"


def test_ep_against_ep_is_about_another_quantity_unless_it_was_measured():
    item = claim(1.0, 1.4, numerator="ep", denominator="ep")
    (found,) = judge(item, [measurement()])
    assert found.verdict == "another quantity"
    assert "EP against EP" in found.reason
    assert "EP against BP" in found.reason
    assert verdict(item, measurement(), measurement(sides=("ep", "ep"))) == "understated"
    assert verdict(claim(1.0, 2.0, numerator="arm"), measurement()) == "consistent"
    assert verdict(item) == "another quantity"


def test_what_was_not_measured_is_not_comparable():
    (found,) = judge(claim(1.0, 1.2, "peak_memory_ratio"), [measurement()])
    assert found.verdict == "not comparable"
    assert "peak memory is not measured here: it was left out" in found.reason


def test_every_matching_measurement_gives_a_verdict_ours_first_and_a_caveat_is_said():
    theirs = measurement("theirs", published=True)
    ours = measurement("ours", caveat="the machine was not quiet while it was measured")
    found = judge(claim(2.0, 2.1), [theirs, ours])
    assert [(j.measurement, j.verdict) for j in found] == [("ours", "overstated"), ("theirs", "overstated")]
    assert found[0].reason.endswith("but the machine was not quiet while it was measured")
    assert "not quiet" not in judge(claim(2.0, 2.1, "flops_ratio"), [ours])[0].reason
    assert [j.measurement for j in judge(claim(2.0, 2.1, measurement="theirs"), [theirs, ours])] == ["theirs"]
    entry = judged(claim(2.0, 2.1), [theirs, ours])
    assert (entry["verdict"], entry["measured"], len(entry["others"])) == ("overstated", 1.7, 1)
    nothing = judged(claim(1, 2, device="cuda"), [ours])
    assert nothing["measured"] is None
    assert nothing["measured_reason"]


def test_the_published_runs_load_and_their_claims_are_judged_against_them():
    a6000 = load_published(PUBLISHED / "a6000-12-blocks.toml").measurement()
    assert a6000.numbers["wall_clock_ratio"].value == pytest.approx(3.451 / 1.279, rel=1e-3)
    assert a6000.facts["rounds"] == 3
    assert a6000.facts["phases"] == 1
    reference = {"device": "cuda", "precision": "amp", "rounds": 3, "layers": 12}
    assert verdict(claim(2.65, 2.75, "wall_clock_ratio", **reference), a6000) == "consistent"
    assert verdict(claim(1.95, 2.05, **reference), a6000) == "understated"
    assert verdict(claim(3.15, 3.25, "flops_ratio", **reference), a6000) == "overstated"
    for name, value in (("khs-one-sided", 6.67), ("khs-symmetric", 12.0)):
        khs = load_published(PUBLISHED / f"{name}.toml").measurement()
        assert khs.numbers["wall_clock_ratio"].value == value
        assert (khs.facts["phases"], khs.facts["rounds"]) == (2, 10)
        assert verdict(claim(6, 7, "wall_clock_ratio", model="gpt"), khs) == "not comparable"


GOOD = """
name = "p"
source = "s"
iterations_per_second = { numerator = 1.0, denominator = 2.5 }
conditions = { numerator = "ep", denominator = "bp" }
[[values]]
quantity = "wall_clock_ratio"
value = 2.5
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("value = 2.5", "value = 2.6", "the rates give 2.5"),
        ("value = 2.5", "value = 2.5\nlow = 2.51", "does not lie between"),
        (', denominator = "bp"', "", "name the numerator and the denominator"),
        ('"wall_clock_ratio"', '"speed"', "refused"),
        ('source = "s"', 'sauce = "s"', "did you mean 'source'"),
        ('numerator = "ep"', 'numerator = "ep", layer = 3', "did you mean 'layers'"),
    ],
)
def test_a_published_file_that_says_something_else_is_refused(tmp_path, old, new, words):
    path = tmp_path / "p.toml"
    path.write_text(GOOD)
    assert load_published(path).measurement().numbers["wall_clock_ratio"] == Number(2.5, 2.5, 2.5)
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        load_published(path)
    with pytest.raises(ConfigError, match="no config file"):
        load_published(tmp_path / "absent.toml")


def test_a_claim_with_its_ends_exchanged_is_refused():
    with pytest.raises(ValueError, match="exchange them"):
        claim(2.0, 1.0)
