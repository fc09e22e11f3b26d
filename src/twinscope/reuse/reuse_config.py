"""The configuration of ``twinscope plan`` and ``scan``: which model, texts, pairs, limits and budgets.

Covers the tables and the refusal of what cannot be planned. What is made of them is in plan.py.
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from twinscope.lab.config import Section
from twinscope.lab.evidence import Weights
from twinscope.reuse.decision import Thresholds
from twinscope.reuse.neurons.settings import NeuronSettings
from twinscope.reuse.nulls import OTHERS
from twinscope.reuse.texts import TextSettings

#: Parts of a scan that have a budget of their own, in the order in which they come.
STAGES = ("parity", "first-text", "calibration", "heldout")


class ReuseModel(Section):
    """``[model]``: a model by name or the path of a Hugging Face folder.

    ``weights`` says what the weights are where the folder does not: without either, weights whose norm
    gains are all as initialised count as random, others as released.
    """

    source: str = Field(min_length=1)
    weights: Weights | None = None


class Rule(Section):
    """How many pairs the rule takes of each kind; the model may have fewer (``plan.choose_pairs``)."""

    attention: int = Field(default=3, ge=0)
    mlp: int = Field(default=2, ge=0)
    norms: int = Field(default=6, ge=0)


class Nulls(Section):
    """``others`` modules matched in depth stand beside each pair, with the nulls that need no number."""

    others: int = Field(default=OTHERS, ge=1, le=16)


class StageMinutes(Section):
    """Minutes for each part of a scan; a resume gives each its minutes anew."""

    parity: float = Field(default=30.0, gt=0)
    first_text: float = Field(default=10.0, gt=0)
    calibration: float = Field(default=40.0, gt=0)
    heldout: float = Field(default=40.0, gt=0)

    def seconds(self, stage: str) -> float:
        """The budget of one of :data:`STAGES`."""
        return 60.0 * float(getattr(self, stage.replace("-", "_")))


class Budgets(Section):
    """Where a scan stops softly: memory of the process and left on the machine, swapping, time.

    ``swap_mib_per_s`` is a rate to and from swap that must not last 10 seconds.
    """

    process_mib: float = Field(default=512.0, gt=0)
    available_mib: float = Field(default=256.0, gt=0)
    swap_mib_per_s: float = Field(default=8.0, gt=0)
    minutes: float = Field(default=120.0, gt=0)
    stage_minutes: StageMinutes = Field(default_factory=StageMinutes)


class ReuseSettings(Section):
    """``[reuse]``: what the plan fixes.

    ``pairs`` are pairs of sites such as ``"layers.3.mlp=layers.9.mlp"`` and stand instead of the ``rule``.
    ``margin`` is the change of loss in nats per token that a later replacement may make; ``layers`` the
    four whose neurons are compared later, chosen by the rule if left out, ``neurons`` how that is done.
    ``parity = "receipt"`` takes the receipt of an earlier check and makes none.
    """

    texts: TextSettings = Field(default_factory=TextSettings)
    pairs: list[str] | None = Field(default=None, min_length=1)
    rule: Rule | None = None
    thresholds: Thresholds = Field(default_factory=Thresholds)
    margin: float = Field(default=0.05, gt=0)
    nulls: Nulls = Field(default_factory=Nulls)
    budgets: Budgets = Field(default_factory=Budgets)
    layers: list[int] | None = None
    neurons: NeuronSettings = Field(default_factory=NeuronSettings)
    parity: Literal["check", "receipt"] = "check"
    seed: int = Field(default=0, ge=0)
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1, le=1024)

    @field_validator("pairs")
    @classmethod
    def _pairs_of_sites(cls, pairs: list[str] | None) -> list[str] | None:
        for pair in pairs or []:
            split_pair(pair)
        return pairs

    @model_validator(mode="after")
    def _pairs_or_rule(self) -> Self:
        if self.pairs is not None and self.rule is not None:
            raise ValueError("pairs and rule: give one of the two")
        if self.layers is not None and (len(set(self.layers)) != 4 or min(self.layers) < 0):
            raise ValueError(f"layers = {self.layers}: give four different layers, counted from 0")
        if self.neurons.skip >= self.texts.tokens:
            raise ValueError(
                f"neurons.skip = {self.neurons.skip}: texts of {self.texts.tokens} tokens have none left"
            )
        return self


class ReuseConfig(Section):
    """The configuration of ``twinscope plan``, and of ``twinscope scan`` where it plans itself."""

    name: str = "reuse"
    model: ReuseModel
    reuse: ReuseSettings = Field(default_factory=ReuseSettings)


def split_pair(pair: str) -> tuple[str, str]:
    """The two sites of ``"layers.3.mlp=layers.9.mlp"``.

    Raises:
        ValueError: it is not two different names of sites around one ``=``.
    """
    left, _, right = (part.strip() for part in pair.partition("="))
    site = re.compile(r"layers\.\d+\.\w+(\.\w+)?")
    if not (site.fullmatch(left) and site.fullmatch(right)):
        raise ValueError(
            f"'{pair}' is no pair: write two sites as in layers.3.mlp=layers.9.mlp (self_attn, linear_attn, "
            "mlp, self_attn.q_norm, self_attn.k_norm)"
        )
    if left == right:
        raise ValueError(f"'{pair}' pairs a site with itself, whose distance is 0: give two different sites")
    return left, right
