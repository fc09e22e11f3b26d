"""The configuration of ``twinscope train``: arms side by side from one start.

Covers the tables, and the refusal of what cannot be trained. The estimator's own table is in settings.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from twinscope.lab.config import Section, suggestion
from twinscope.models.source import ModelSettings
from twinscope.propagation.settings import EPSettings, OptimizerSettings
from twinscope.text.datasets import DataSettings

#: Torch and NumPy both take a seed of this range.
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class TrainSettings(Section):
    """Length, seeds and bookkeeping of a twin run; every interval is in optimizer steps.

    ``minutes`` and ``memory_mib`` stop a run so that it can be resumed; a resumed run gets them anew.
    ``compile`` compiles the blocks of every arm (see compiling.py).
    """

    steps: int = Field(default=2000, ge=1)
    seeds: list[Seed] = Field(default=[0], min_length=1)
    eval_every: int = Field(default=100, ge=1)
    eval_batches: int = Field(default=16, ge=1)
    gate_every: int = Field(default=200, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    precision: Literal["fp32", "fp64", "amp"] = "fp32"
    compile: bool = False
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    windows: int = Field(default=10, ge=1)
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1, le=1024)
    minutes: float | None = Field(default=None, gt=0)
    memory_mib: float | None = Field(default=None, gt=0)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("every seed may stand once")
        return seeds


class BaseSettings(Section):
    """A checkpoint that is trained first, by backpropagation, and cached: where all arms then start."""

    steps: int = Field(default=1000, ge=1)
    seed: Seed = 0
    optimizer: OptimizerSettings | None = None


class ArmSettings(Section):
    """One arm of a comparison: its name, its rule, and any key of ``[ep]`` to override.

    An arm whose rule is bp takes ``recompute`` alone.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")
    rule: Literal["ep", "bp"]

    @model_validator(mode="after")
    def _overrides_are_keys_of_ep(self) -> Self:
        for key in self.overrides:
            if key not in EPSettings.model_fields:
                raise ValueError(f"unknown key '{key}'{suggestion(key, list(EPSettings.model_fields))}")
            if key == "precision":
                raise ValueError("'precision' belongs to [train]: it holds for every arm")
            if self.rule == "bp" and key != "recompute":
                raise ValueError(f"'{key}' means nothing to an arm whose rule is bp")
        if self.rule == "bp" and not isinstance(self.overrides.get("recompute", False), bool):
            raise ValueError("'recompute' is true or false")
        return self

    @property
    def checkpointed(self) -> bool:
        """Whether it backpropagates through graphs that are made again (gradient checkpointing)."""
        return self.rule == "bp" and bool(self.overrides.get("recompute", False))

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """The whole configuration of ``twinscope train``."""

    name: str = "train"
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    ep: EPSettings = Field(default_factory=EPSettings)
    arms: list[ArmSettings] = Field(
        default_factory=lambda: [ArmSettings(name="ep", rule="ep"), ArmSettings(name="bp", rule="bp")],
        min_length=1,
    )
    base: BaseSettings | None = None

    @model_validator(mode="after")
    def _arms_can_be_trained(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"arms: every name may stand once, got {', '.join(names)}")
        for arm in self.arms:
            if arm.rule == "ep" and self.ep_settings(arm).rounds == 0:
                raise ValueError(
                    f"arm '{arm.name}': rounds = 0 is backpropagation, kept as a control only; "
                    "set rounds to 1 or more, or rule = 'bp'"
                )
        if "precision" in self.ep.model_fields_set and self.ep.precision != self.train.precision:
            raise ValueError("ep.precision: set [train] precision instead, it holds for every arm")
        if self.base is not None and self.model.source is not None:
            raise ValueError("base: a model with a source starts from that source; give one of the two")
        return self

    def ep_settings(self, arm: ArmSettings) -> EPSettings:
        """``[ep]`` with the arm's overrides; beta overrides displacement and the other way round."""
        values = self.ep.model_dump(exclude_unset=True) | {"precision": self.train.precision}
        for given, other in (("beta", "displacement"), ("displacement", "beta")):
            if given in arm.overrides:
                values.pop(other, None)
        try:
            return EPSettings.model_validate(values | arm.overrides)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"'{part}' " for part in first["loc"])
            raise ValueError(
                f"arm '{arm.name}': {where}{first['msg'].removeprefix('Value error, ')}"
            ) from None
