"""Levels of evidence, and the one rule that assigns them.

Covers the ladder ``none < capacity < parity < candidate < intervention`` of functional reuse, what each
level supports and does not, and the claims that a record carries. What counts as a passed parity,
candidate or intervention is measured and judged elsewhere; here a failure stops at the level reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Level = Literal["none", "capacity", "parity", "candidate", "intervention"]
#: A claim of a training or cost experiment is ``measured``: it stands outside the ladder of reuse.
ClaimLevel = Literal["none", "capacity", "parity", "candidate", "intervention", "measured"]
Weights = Literal["random", "trained", "released"]

LEVELS: tuple[Level, ...] = get_args(Level)
CLAIM_LEVELS: tuple[ClaimLevel, ...] = get_args(ClaimLevel)

#: What a level supports, and what it leaves open.
MEANING: Mapping[Level, tuple[str, str]] = {
    "none": ("nothing: the machine did not run it", "any statement about the model or the machine"),
    "capacity": ("that this machine can run it, with these sizes and timings", "anything about the model"),
    "parity": (
        "that the streamed forward equals the reference implementation",
        "any reuse of one module by another",
    ),
    "candidate": (
        "that outputs are close on calibration and held-out text, on both layers' inputs, beyond every null",
        "that replacing one module by the other keeps quality",
    ),
    "intervention": (
        "that this one replacement keeps held-out quality within the margin fixed in advance",
        "general capability, speed, or replacement at other sites",
    ),
}


@dataclass(frozen=True)
class Facts:
    """What happened to one pair of modules; a step that was not tried did not pass.

    ``intervention_passed`` holds one entry per direction that was judged, for example
    ``{"7->3": True, "3->7": False}``. ``planted`` says that copies were put into the weights on purpose.
    """

    ran: bool
    parity_passed: bool
    candidate_passed: bool
    weights: Weights
    planted: bool
    seal_intact: bool
    intervention_passed: Mapping[str, bool] = field(default_factory=dict)


def assign_level(facts: Facts, direction: str | None = None) -> Level:
    """The highest level that the facts reach without a gap, for one direction or for the whole pair.

    The pair reaches ``intervention`` only if both directions were judged and every one passed, so a pass
    in one direction never hides the failure of the other. Random weights and a broken seal end at
    ``parity``. The rule is the ladder of the method, part 2.

    Raises:
        ValueError: ``direction`` was given but never judged.
    """
    if direction is None:
        replaced = len(facts.intervention_passed) >= 2 and all(facts.intervention_passed.values())
    elif direction in facts.intervention_passed:
        replaced = facts.intervention_passed[direction]
    else:
        judged = ", ".join(facts.intervention_passed) or "none"
        raise ValueError(f"direction '{direction}' was not judged (judged: {judged})")
    may_pass_parity = facts.weights != "random" and facts.seal_intact
    rungs = (facts.ran, facts.parity_passed, may_pass_parity and facts.candidate_passed, replaced)
    level: Level = "none"
    for passed, reached in zip(rungs, LEVELS[1:], strict=True):
        if not passed:
            return level
        level = reached
    return level


def claim(statement: str, level: ClaimLevel, supports: str, does_not_support: str) -> dict[str, str]:
    """A claim as a record carries it.

    Raises:
        ValueError: an unknown level, or a text that is empty: a claim says what it leaves open.
    """
    if level not in CLAIM_LEVELS:
        raise ValueError(f"'{level}' is no level of evidence (known: {', '.join(CLAIM_LEVELS)})")
    texts = {"statement": statement, "supports": supports, "does_not_support": does_not_support}
    for name, text in texts.items():
        if not text.strip():
            raise ValueError(f"a claim needs a text for '{name}'")
    return {
        "statement": statement,
        "level": level,
        "supports": supports,
        "does_not_support": does_not_support,
    }


def reuse_claim(statement: str, facts: Facts, direction: str | None = None) -> dict[str, str]:
    """The claim that the facts allow: level by :func:`assign_level`, texts by :data:`MEANING`.

    What the facts take away is added to what the claim does not support: planted copies, random
    weights, a broken seal, and every direction that failed.

    Raises:
        ValueError: as for :func:`assign_level` and :func:`claim`.
    """
    level = assign_level(facts, direction)
    supports, leaves_open = MEANING[level]
    limits = [leaves_open]
    if facts.planted:
        limits.append("duplication that training made: copies were planted in these weights")
    if facts.weights == "random":
        limits.append("anything beyond parity: the weights are random")
    if not facts.seal_intact:
        limits.append("anything beyond parity: the seal of the plan is broken")
    failed = [name for name, passed in facts.intervention_passed.items() if not passed]
    if failed:
        limits.append(f"replacement in the direction {', '.join(failed)}, which failed")
    return claim(statement, level, supports, "; ".join(limits))
