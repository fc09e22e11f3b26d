"""Claims about what a training step costs, judged against measurements made under their own conditions.

Covers what a claim and a published measurement are, and the verdict. Measuring is in bench.py; a published
measurement is a TOML file that loads as a record beside ours.

A claim is first matched with measurements: the same quantity, the same two sides, and every condition that
the claim names. Then intervals are compared; a measurement without one is a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from twinscope.lab.config import Section, read_config

Quantity = Literal[
    "wall_clock_ratio", "train_step_ratio", "flops_ratio", "peak_memory_ratio", "activation_peak_ratio"
]
Verdict = Literal["consistent", "understated", "overstated", "another quantity", "not comparable"]
Value = str | int | float | bool

#: The quantity in words.
WORDS: Mapping[str, str] = {
    "wall_clock_ratio": "wall clock per step, evaluation included",
    "train_step_ratio": "wall clock per training step",
    "flops_ratio": "FLOPs per training step",
    "peak_memory_ratio": "peak memory",
    "activation_peak_ratio": "peak memory of activations",
}
#: What only wall clock and memory depend on; FLOPs follow from the shapes.
_OF_THE_MACHINE = ("device", "device_name", "precision", "compile")
#: Largest relative difference between a published ratio and the quotient of the rates beside it.
_ROUNDING = 0.01


class Conditions(Section):
    """Under which conditions a claim or a measurement holds; a key left out is not asked for, or not known.

    ``numerator`` and ``denominator`` name a rule (``ep``, ``bp``) or an arm. ``rounds`` are K of the
    numerator's ``phases`` nudged phases. ``device`` is ``cpu`` or ``cuda``.
    """

    numerator: str | None = None
    denominator: str | None = None
    measurement: str | None = None
    device: str | None = None
    device_name: str | None = None
    precision: Literal["fp32", "fp64", "amp"] | None = None
    compile: bool | None = None
    rounds: int | None = None
    phases: int | None = None
    fused: bool | None = None
    nudge: str | None = None
    read: str | None = None
    model: str | None = None
    data: str | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    batch: int | None = None

    def asked(self) -> dict[str, Value]:
        """The conditions that are named."""
        return self.model_dump(exclude_none=True)


class Claim(Section):
    """``[[claims]]``: somebody's statement that a quantity lies between ``low`` and ``high``."""

    name: str = Field(min_length=1)
    quantity: Quantity
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    source: str = Field(min_length=1)
    conditions: Conditions = Field(default_factory=Conditions)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: exchange them")
        return self

    @property
    def sides(self) -> tuple[str, str]:
        """What is compared with what; EP with BP unless the claim says otherwise."""
        return self.conditions.numerator or "ep", self.conditions.denominator or "bp"


class PublishedValue(Section):
    """One published number; ``low`` and ``high`` bound what its last printed digit leaves open."""

    quantity: Quantity
    value: float = Field(gt=0)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _holds_its_value(self) -> Self:
        low, high = self.bounds
        if not low <= self.value <= high:
            raise ValueError(f"{self.quantity}: {self.value:g} does not lie between {low:g} and {high:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        low = self.value if self.low is None else self.low
        return low, self.value if self.high is None else self.high


class Rates(Section):
    """Steps per second of the two sides, evaluation included."""

    numerator: float = Field(gt=0)
    denominator: float = Field(gt=0)


class Published(Section):
    """A measurement that somebody else published, as a file of experiments/published."""

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    note: str | None = None
    conditions: Conditions
    values: list[PublishedValue] = Field(min_length=1)
    iterations_per_second: Rates | None = None

    @model_validator(mode="after")
    def _says_what_it_compares(self) -> Self:
        if self.conditions.numerator is None or self.conditions.denominator is None:
            raise ValueError("conditions: name the numerator and the denominator")
        names = [value.quantity for value in self.values]
        if len(set(names)) != len(names):
            raise ValueError(f"values: every quantity may stand once, got {', '.join(names)}")
        rates = self.iterations_per_second
        for value in self.values:
            if rates is not None and value.quantity == "wall_clock_ratio":
                quotient = rates.denominator / rates.numerator
                if abs(value.value / quotient - 1) > _ROUNDING:
                    raise ValueError(f"wall_clock_ratio = {value.value:g}, but the rates give {quotient:.4g}")
        return self

    def measurement(self) -> Measurement:
        """As a measurement beside ours."""
        facts = self.conditions.asked()
        numerator, denominator = str(facts.pop("numerator")), str(facts.pop("denominator"))
        numbers = {value.quantity: Number(value.value, *value.bounds) for value in self.values}
        return Measurement(
            self.name, frozenset({numerator}), frozenset({denominator}), facts, numbers, True, self.source
        )


@dataclass(frozen=True)
class Number:
    """A measured ratio with the bounds between which it lies."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """Ratios of one side to another, with what is known of how they were measured.

    A side goes by several names: its rule and the arm's own. ``caveat`` says what limits the timings.
    """

    name: str
    numerator: frozenset[str]
    denominator: frozenset[str]
    facts: dict[str, Value]
    numbers: dict[str, Number]
    published: bool = False
    source: str | None = None
    caveat: str | None = None
    #: Why a quantity has no number here.
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reason; ``number`` is what was measured, where something was that compares."""

    verdict: Verdict
    reason: str
    measurement: str | None = None
    number: Number | None = None


def load_published(path: Path) -> Published:
    """Read a published measurement.

    Raises:
        ConfigError: the file is missing, no TOML, or says something else than such a file may.
    """
    return read_config(path, Published)


def judge(claim: Claim, measurements: Sequence[Measurement]) -> list[Judgement]:
    """The verdicts on a claim, one for each measurement made under its conditions, ours first.

    If there is none, a single verdict says why: ``another quantity`` where what the claim compares is
    compared nowhere here, else ``not comparable`` with what differs in the nearest measurement.
    """
    alike = [m for m in measurements if _same_sides(claim, m)]
    if not alike:
        return [_another_pair(claim, measurements)]
    having = [m for m in alike if claim.quantity in m.numbers]
    if not having:
        return [_unmeasured(claim, alike)]
    differences = {id(m): _differences(claim, m) for m in having}
    matching = [m for m in having if not differences[id(m)]]
    if matching:
        return [_compared(claim, m) for m in sorted(matching, key=lambda m: m.published)]
    nearest = min(having, key=lambda m: (m.published, len(differences[id(m)])))
    return [
        Judgement(
            "not comparable",
            f"the claim holds for other conditions than any measurement: {nearest.name} has "
            f"{' and '.join(differences[id(nearest)])}",
        )
    ]


def _compared(claim: Claim, measurement: Measurement) -> Judgement:
    number = measurement.numbers[claim.quantity]
    said = _span(claim.low, claim.high)
    found = f"{number.value:.3g}×"
    if number.low != number.high:
        found += f" [{number.low:.4g}, {number.high:.4g}]"
    what = f"{WORDS[claim.quantity]} in {measurement.name}: {found}"
    if number.high < claim.low:
        verdict, text = "overstated", f"the claim of {said} is above the measured {what}"
    elif number.low > claim.high:
        verdict, text = "understated", f"the claim of {said} is below the measured {what}"
    else:
        verdict, text = "consistent", f"the claim of {said} and the measured {what} overlap"
    if measurement.caveat is not None and claim.quantity in ("wall_clock_ratio", "train_step_ratio"):
        text += f"; but {measurement.caveat}"
    return Judgement(verdict, text, measurement.name, number)


def _another_pair(claim: Claim, measurements: Sequence[Measurement]) -> Judgement:
    said = " against ".join(side.upper() for side in claim.sides)
    known = "nothing is measured here"
    if measurements:
        first = measurements[0]
        known = f"what is measured here is {_side(first.numerator)} against {_side(first.denominator)}"
    return Judgement(
        "another quantity",
        f"the claim of {_span(claim.low, claim.high)} is about {said}, {WORDS[claim.quantity]}; {known}",
    )


def _unmeasured(claim: Claim, alike: Sequence[Measurement]) -> Judgement:
    reasons = [m.missing[claim.quantity] for m in alike if claim.quantity in m.missing]
    why = f": {reasons[0]}" if reasons else ""
    return Judgement("not comparable", f"{WORDS[claim.quantity]} is not measured here{why}")


def _same_sides(claim: Claim, measurement: Measurement) -> bool:
    numerator, denominator = claim.sides
    return numerator in measurement.numerator and denominator in measurement.denominator


def _differences(claim: Claim, measurement: Measurement) -> list[str]:
    found = []
    for key, asked in claim.conditions.asked().items():
        if key in ("numerator", "denominator"):
            continue
        if key in _OF_THE_MACHINE and claim.quantity == "flops_ratio":
            continue
        fact = measurement.name if key == "measurement" else measurement.facts.get(key)
        if fact is None:
            found.append(f"no {key} given where the claim says {asked}")
        elif not _equal(asked, fact):
            found.append(f"{key} {fact} where the claim says {asked}")
    return found


def _equal(asked: Value, fact: Value) -> bool:
    if isinstance(asked, str) and isinstance(fact, str):
        return asked.casefold() == fact.casefold()
    return asked == fact


def _side(names: frozenset[str]) -> str:
    rules = sorted(names & {"ep", "bp"})
    return (rules or sorted(names))[0].upper()


def _span(low: float, high: float) -> str:
    return f"{low:g}×" if low == high else f"{low:g}–{high:g}×"


def judged(claim: Claim, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """One claim as the summary carries it: its first verdict, and every other one under ``others``."""
    first, *others = judge(claim, measurements)
    return {
        "name": claim.name,
        "quantity": claim.quantity,
        "low": claim.low,
        "high": claim.high,
        "source": claim.source,
        "conditions": claim.conditions.asked(),
        **_entry(first),
        "others": [_entry(other) for other in others],
    }


def _entry(judgement: Judgement) -> dict[str, Any]:
    entry: dict[str, Any] = {"verdict": judgement.verdict, "reason": judgement.reason}
    none = "no measurement was made under the claim's conditions"
    number = judgement.number
    values = {
        "measurement": judgement.measurement,
        "measured": None if number is None else number.value,
        "measured_low": None if number is None else number.low,
        "measured_high": None if number is None else number.high,
    }
    for key, value in values.items():
        entry[key] = value
        if value is None:
            entry[f"{key}_reason"] = none
    return entry
