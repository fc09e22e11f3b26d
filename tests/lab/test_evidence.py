"""The ladder of evidence: every combination of facts against the rule as prose states it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from twinscope.lab.evidence import LEVELS, MEANING, Facts, assign_level, claim, reuse_claim

GOOD: dict[str, Any] = {
    "ran": True,
    "parity_passed": True,
    "candidate_passed": True,
    "weights": "released",
    "planted": False,
    "seal_intact": True,
    "intervention_passed": {"7->3": True, "3->7": True},
}


def facts_with(**changes: Any) -> Facts:
    return Facts(**{**GOOD, **changes})


def by_prose(facts: Facts, replaced: bool) -> str:
    """The rule said once more, top down, as an independent check."""
    allowed = [level for level in LEVELS if not (level in LEVELS[3:] and facts.weights == "random")]
    if not facts.seal_intact:
        allowed = [level for level in allowed if LEVELS.index(level) < 3]
    needs = {
        "none": [],
        "capacity": [facts.ran],
        "parity": [facts.ran, facts.parity_passed],
        "candidate": [facts.ran, facts.parity_passed, facts.candidate_passed],
        "intervention": [facts.ran, facts.parity_passed, facts.candidate_passed, replaced],
    }
    return next(level for level in reversed(allowed) if all(needs[level]))


def test_every_combination_of_facts_gets_the_level_of_the_prose() -> None:
    flags = (True, False)
    directions: list[dict[str, bool]] = [
        {},
        {"a": True},
        {"a": False},
        *({"a": x, "b": y} for x in flags for y in flags),
    ]
    seen = set()
    for ran, parity, candidate, planted, seal, weights, passed in itertools.product(
        flags, flags, flags, flags, flags, ("random", "trained", "released"), directions
    ):
        facts = Facts(ran, parity, candidate, weights, planted, seal, passed)
        pair = assign_level(facts)
        assert pair == by_prose(facts, len(passed) == 2 and all(passed.values()))
        for direction, replaced in passed.items():
            level = assign_level(facts, direction)
            assert level == by_prose(facts, replaced)
            assert LEVELS.index(pair) <= LEVELS.index(level)
        seen.add(pair)
    assert seen == set(LEVELS)


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "intervention"),
        ({"planted": True}, "intervention"),
        ({"intervention_passed": {}}, "candidate"),
        ({"intervention_passed": {"7->3": True}}, "candidate"),
        ({"intervention_passed": {"7->3": True, "3->7": False}}, "candidate"),
        ({"candidate_passed": False}, "parity"),
        ({"weights": "random"}, "parity"),
        ({"seal_intact": False}, "parity"),
        ({"parity_passed": False}, "capacity"),
        ({"ran": False}, "none"),
    ],
)
def test_a_failure_stops_at_the_level_reached(change: dict[str, Any], level: str) -> None:
    assert assign_level(facts_with(**change)) == level


def test_one_direction_does_not_hide_the_other() -> None:
    facts = facts_with(intervention_passed={"7->3": True, "3->7": False})
    assert assign_level(facts, "7->3") == "intervention"
    assert assign_level(facts, "3->7") == "candidate"
    assert assign_level(facts) == "candidate"
    passed = reuse_claim("7 stands in for 3", facts, "7->3")
    assert passed["level"] == "intervention"
    assert "3->7, which failed" in passed["does_not_support"]
    with pytest.raises(ValueError, match=r"'5->7' was not judged \(judged: 7->3, 3->7\)"):
        assign_level(facts, "5->7")


def test_claims_carry_the_texts_of_their_level_and_the_limits_of_the_facts() -> None:
    for level in LEVELS:
        assert all(MEANING[level])
    assert reuse_claim("s", Facts(**GOOD)) == claim("s", "intervention", *MEANING["intervention"])
    for facts, words in [
        (facts_with(planted=True), "copies were planted"),
        (facts_with(weights="random"), "the weights are random"),
        (facts_with(seal_intact=False), "the seal of the plan is broken"),
    ]:
        made = reuse_claim("s", facts)
        assert words in made["does_not_support"]
        assert made["does_not_support"].startswith(MEANING[assign_level(facts)][1])


def test_claims_that_leave_something_unsaid_are_refused() -> None:
    assert claim("s", "measured", "a", "b") == {
        "statement": "s",
        "level": "measured",
        "supports": "a",
        "does_not_support": "b",
    }
    with pytest.raises(ValueError, match="'proven' is no level of evidence"):
        claim("s", "proven", "a", "b")  # type: ignore[arg-type]
    for texts in (("", "a", "b"), ("s", " ", "b"), ("s", "a", "")):
        with pytest.raises(ValueError, match="needs a text"):
            claim(texts[0], "measured", texts[1], texts[2])
