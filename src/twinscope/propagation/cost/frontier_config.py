"""The table ``[frontier]``: which estimators to set side by side, cost beside fidelity.

Covers the sweep and its names. What is measured of each is in frontier.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from twinscope.lab.config import Section, suggestion
from twinscope.propagation.settings import EPSettings

Nudge = Literal["positive", "negative", "random", "symmetric"]
#: ``trained`` is where the arms start ([base], or a model's source); ``fresh`` is the same shape untrained.
StartName = Literal["trained", "fresh"]

#: What a label names in any case; other keys only where they differ from the default.
_NAMED = ("rounds", "fused", "nudge", "read")
#: Keys that do not belong to a variant: the displacement is given per point, precision is that of the study.
_PER_POINT = ("beta", "displacement", "precision")


class ReferencePoint(Section):
    """A cost and a fidelity to draw in, with the conditions they hold under."""

    name: str = Field(min_length=1)
    cost_ratio: float = Field(gt=0)
    median_cosine: float = Field(ge=-1, le=1)
    conditions: str = Field(min_length=1)
    source: str = Field(min_length=1)


class FrontierSettings(Section):
    """Every combination of rounds, fused, nudge and read that is allowed, at every displacement and start.

    ``also`` holds further variants as tables of ``[ep]`` keys. Energy reads exist unfused only, and 0
    rounds are one control whatever the rest says. A displacement is that of the largest block at the states
    that are read, not the one asked of the first force sweep. Cosines are means over ``batches``; every
    cost is timed in ``windows`` windows of ``steps`` steps for each of the two arms, with ``measure``.
    """

    rounds: list[int] = Field(default=[0, 1, 2, 3], min_length=1)
    fused: list[bool] = Field(default=[True, False], min_length=1)
    nudges: list[Nudge] = Field(default=["positive", "negative", "random", "symmetric"], min_length=1)
    reads: list[Literal["linear", "energy"]] = Field(default=["linear", "energy"], min_length=1)
    also: list[dict[str, Any]] = Field(default_factory=list)
    displacements: list[float] = Field(default=[1e-3, 1e-2], min_length=1)
    starts: list[StartName] = Field(default=["trained", "fresh"], min_length=1)
    batches: int = Field(default=4, ge=2)
    measure: bool = True
    windows: int = Field(default=4, ge=2)
    steps: int = Field(default=4, ge=2)
    warmup: int = Field(default=1, ge=0)
    references: list[ReferencePoint] = Field(default_factory=list)

    @field_validator("rounds", "fused", "nudges", "reads", "displacements", "starts")
    @classmethod
    def _distinct(cls, values: list[Any]) -> list[Any]:
        if len(set(values)) != len(values):
            raise ValueError("every value may stand once")
        return values

    @model_validator(mode="after")
    def _can_be_estimated(self) -> Self:
        if min(self.rounds) < 0:
            raise ValueError("rounds: give 0 or more")
        for value in self.displacements:
            if not 0 < value < 1:
                raise ValueError(f"displacements: {value:g} is no ratio between 0 and 1")
        if all(variant.control for variant in self.variants(EPSettings())):
            raise ValueError("the sweep holds no estimator but the control: energy reads exist unfused only")
        return self

    def variants(self, ep: EPSettings) -> list[Variant]:
        """What is measured, each once, the control first; keys left open are those of ``ep``.

        Raises:
            ValueError: a table of ``also`` is none of ``[ep]``.
        """
        base = ep.model_dump(exclude_unset=True, exclude=set(_PER_POINT))
        found = []
        for rounds, fused, read, nudge in product(self.rounds, self.fused, self.reads, self.nudges):
            if rounds == 0:
                found.append(
                    _variant(base | {"rounds": 0, "fused": True, "nudge": "positive", "read": "linear"})
                )
            elif not (read == "energy" and (fused or ep.damping < 1)):
                found.append(
                    _variant(base | {"rounds": rounds, "fused": fused, "nudge": nudge, "read": read})
                )
        for position, change in enumerate(self.also, 1):
            found.append(_variant(base | change, f"also, number {position}: ", change))
        distinct = {variant.label: variant for variant in found}
        return sorted(distinct.values(), key=lambda variant: variant.overrides["rounds"] > 0)


@dataclass(frozen=True)
class Variant:
    """One estimator without its displacement: a label, and the ``[ep]`` keys it consists of."""

    label: str
    overrides: dict[str, Any]

    def at(self, displacement: float) -> EPSettings:
        """The settings, in fp32, asking the first force sweep for ``displacement``."""
        return EPSettings.model_validate(self.overrides | {"displacement": displacement})

    @property
    def control(self) -> bool:
        """Whether it leaves the states free, which is backpropagation."""
        return self.overrides["rounds"] == 0

    @property
    def cost(self) -> Variant:
        """The variant that stands for it where cost is measured: sign and gain of a nudge cost nothing."""
        nudge = "symmetric" if self.overrides["nudge"] == "symmetric" else "positive"
        kept = {key: value for key, value in self.overrides.items() if key != "gain"}
        return _variant(kept | {"nudge": nudge})


def _variant(values: dict[str, Any], where: str = "", change: dict[str, Any] | None = None) -> Variant:
    for key in change or {}:
        if key in _PER_POINT or key not in EPSettings.model_fields:
            known = [name for name in EPSettings.model_fields if name not in _PER_POINT]
            raise ValueError(f"{where}'{key}' is no key of a variant{suggestion(key, known)}")
    try:
        settings = EPSettings.model_validate(values)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}{message}") from None
    overrides = settings.model_dump(exclude={"beta", "displacement", "precision"})
    # A table that was written out and read again has every default in it, and is the same variant.
    overrides["gain"] = settings.gain.model_dump(exclude_none=True)
    return Variant(_label(overrides), overrides)


def _label(overrides: dict[str, Any]) -> str:
    if overrides["rounds"] == 0:
        return "k0"
    fused = "fused" if overrides["fused"] else "unfused"
    words = [f"k{overrides['rounds']}", fused, overrides["nudge"], overrides["read"]]
    default = EPSettings()
    for key, value in overrides.items():
        if key == "gain":
            numbers = [f"{name}{number:g}" for name, number in value.items() if name != "profile"]
            words += ["gain", value["profile"], *numbers] if value != {"profile": "uniform"} else []
        elif key not in _NAMED and value != getattr(default, key):
            words.append(key if value is True else f"{key}{value}")
    return "-".join(words)
