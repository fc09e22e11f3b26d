"""The configuration of ``twinscope leak``: the spectrometer on one model.

Covers the tables and the refusal of what cannot be measured. What is measured is in leak.py.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from twinscope.lab.config import Section
from twinscope.models.source import ModelSettings
from twinscope.propagation.config import BaseSettings, Seed
from twinscope.propagation.settings import EPSettings
from twinscope.text.datasets import DataSettings

#: Gains of the default arms.
GAINS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class LeakSettings(Section):
    """Batches, arms and bookkeeping of one spectrum.

    ``precision`` is the instrument's. ``study = "amp"`` puts EP in amp under it; the reference stays
    backpropagation in the instrument's precision. ``budget_mib`` is for group means: beyond it those of
    the reference go to disk, and the statistics that need vectors per arm are left out.
    """

    batches: int = Field(default=16, ge=8)
    groups: int = Field(default=8, ge=8)
    gains: list[float] = Field(default=list(GAINS), min_length=1)
    band: float = Field(default=0.02, gt=0, lt=1)
    precision: Literal["fp32", "fp64"] = "fp32"
    study: Literal["amp"] | None = None
    budget_mib: float = Field(default=1024.0, ge=0)
    seed: Seed = 0
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1, le=1024)
    minutes: float | None = Field(default=None, gt=0)
    memory_mib: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _groups_and_gains(self) -> Self:
        if self.groups % 2:
            raise ValueError(f"groups = {self.groups}: even and odd halves need an even number of groups")
        if self.batches % self.groups:
            raise ValueError(
                f"batches = {self.batches} do not split into {self.groups} groups of equal size: "
                "make batches a multiple of groups"
            )
        if any(gain <= 0 for gain in self.gains) or len(set(self.gains)) != len(self.gains):
            raise ValueError("gains: every gain is positive and stands once")
        if 1.0 not in self.gains:
            raise ValueError("gains: the arm at -beta is taken at gain 1, so gain 1 must stand among them")
        return self


class LeakConfig(Section):
    """The configuration of ``twinscope leak``; ``[base]`` is trained first and cached, as in ``train``."""

    name: str = "leak"
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    ep: EPSettings = Field(default_factory=EPSettings)
    leak: LeakSettings = Field(default_factory=LeakSettings)
    base: BaseSettings | None = None

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        if self.ep.rounds == 0:
            raise ValueError("ep.rounds = 0 is backpropagation, whose leak is zero: set rounds to 1 or more")
        if self.ep.gain.profile != "uniform" or (self.ep.gain.value or 1.0) != 1.0:
            raise ValueError("ep.gain: the arms set the gain, list it under [leak] gains")
        if "precision" in self.ep.model_fields_set and self.ep.precision != self.leak.precision:
            raise ValueError("ep.precision: set [leak] precision, or [leak] study = 'amp'")
        if self.base is not None and self.model.source is not None:
            raise ValueError("base: a model with a source starts from that source; give one of the two")
        return self

    def studied(self) -> EPSettings:
        """``[ep]`` in the precision under study, its nudge positive: the arms turn it round."""
        precision = self.leak.study or self.leak.precision
        return self.ep.model_copy(update={"precision": precision, "nudge": "positive"})
