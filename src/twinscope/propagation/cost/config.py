"""The configuration of ``twinscope cost``: arms timed against one of them, at one shape or several.

Covers the tables and the refusal of what cannot be measured. What is measured is in bench.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from twinscope.lab.config import Section, suggestion
from twinscope.models.gpt import GPTShape
from twinscope.models.source import ModelSettings
from twinscope.propagation.config import ArmSettings, BaseSettings, Seed, TrainConfig, TrainSettings
from twinscope.propagation.cost.claims import Claim, Published, load_published
from twinscope.propagation.cost.frontier_config import FrontierSettings
from twinscope.propagation.settings import EPSettings, OptimizerSettings
from twinscope.text.datasets import DataSettings


class CostSettings(Section):
    """Windows, passes and bounds of one measurement.

    Every arm has ``windows`` windows of ``steps`` steps after ``warmup`` that do not count; windows of one
    arm agree if the slowest is at most ``band`` slower than the fastest. A run is taken to evaluate
    ``eval_batches`` batches every ``eval_every`` steps. ``part_steps`` and ``fidelity_batches`` of 0, and
    ``memory``, ``count`` and ``overhead`` of false, leave that pass out. ``other_cpus`` and
    ``excess_load`` bound what else may use the machine in a controlled measurement. ``compile`` compiles the
    blocks of every arm; the counts are of the same step uncompiled.
    """

    windows: int = Field(default=4, ge=2)
    steps: int = Field(default=10, ge=2)
    warmup: int = Field(default=2, ge=0)
    numerator: str = "ep"
    denominator: str = "bp"
    eval_every: int = Field(default=100, ge=1)
    eval_batches: int = Field(default=4, ge=1)
    band: float = Field(default=0.05, gt=0, lt=1)
    other_cpus: float = Field(default=0.1, gt=0)
    excess_load: float = Field(default=0.5, gt=0)
    part_steps: int = Field(default=4, ge=0)
    fidelity_batches: int = Field(default=2, ge=0)
    memory: bool = True
    count: bool = True
    overhead: bool = True
    precision: Literal["fp32", "fp64", "amp"] = "fp32"
    compile: bool = False
    seed: Seed = 0
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1, le=1024)
    minutes: float | None = Field(default=None, gt=0)
    memory_mib: float | None = Field(default=None, gt=0)


class ShapeSettings(Section):
    """``[[shapes]]``: a name, ``batch``, and any key of ``[model]`` to override."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")
    batch: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _overrides_are_keys_of_model(self) -> Self:
        for key in self.overrides:
            if key not in GPTShape.model_fields:
                known = [*GPTShape.model_fields, "batch"]
                raise ValueError(f"unknown key '{key}'{suggestion(key, known)}")
        return self

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class CostConfig(Section):
    """The whole configuration; tables of the same name are those of ``twinscope train``.

    ``published`` are files, relative to the configuration's folder until they are read. ``[frontier]`` adds
    a study of many estimators at the first shape.
    """

    name: str = "cost"
    published: list[str | Published] = Field(default_factory=list)
    model: ModelSettings = Field(default_factory=ModelSettings)
    shapes: list[ShapeSettings] = Field(default_factory=list)
    data: DataSettings = Field(default_factory=DataSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    ep: EPSettings = Field(default_factory=EPSettings)
    arms: list[ArmSettings] = Field(
        default_factory=lambda: [ArmSettings(name="ep", rule="ep"), ArmSettings(name="bp", rule="bp")],
        min_length=2,
    )
    cost: CostSettings = Field(default_factory=CostSettings)
    base: BaseSettings | None = None
    claims: list[Claim] = Field(default_factory=list)
    frontier: FrontierSettings | None = None

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        arms = [arm.name for arm in self.arms]
        for key in ("numerator", "denominator"):
            name = getattr(self.cost, key)
            if name not in arms:
                raise ValueError(f"cost.{key} = '{name}' is no arm{suggestion(name, arms)}")
        if self.cost.numerator == self.cost.denominator:
            raise ValueError("cost: numerator and denominator are one arm, whose ratio is 1: name two arms")
        if self.cost.compile and not self.cost.warmup:
            raise ValueError("cost: blocks are compiled in the first steps, so compile needs a warmup")
        if "precision" in self.ep.model_fields_set and self.ep.precision != self.cost.precision:
            raise ValueError("ep.precision: set [cost] precision instead, it holds for every arm")
        if self.shapes and self.model.source is not None:
            raise ValueError("shapes: a model with a source has the shape of that source")
        for what, names in (
            ("shapes", [shape.name for shape in self.shapes]),
            ("claims", [claim.name for claim in self.claims]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what}: every name may stand once, got {', '.join(names)}")
        for shape in self.measured_shapes():
            self.training(shape)
        if self.frontier is not None:
            self.frontier.variants(self.ep)
            if len(self.shapes) > 1:
                raise ValueError("frontier: it is measured at one shape, so [[shapes]] may hold one at most")
            if "trained" in self.frontier.starts and self.base is None and self.model.source is None:
                raise ValueError("frontier.starts: 'trained' needs a [base], or a model with a source")
        return self

    def measured_shapes(self) -> list[ShapeSettings]:
        """The shapes to measure: ``[[shapes]]``, or ``[model]`` as it stands."""
        return self.shapes or [ShapeSettings(name="model")]

    def training(self, shape: ShapeSettings) -> TrainConfig:
        """The training that is timed: that of every arm at one shape.

        Raises:
            ValueError: there is no such model, or an arm cannot be trained.
        """
        cost = self.cost
        start = self.model.model_dump(exclude_unset=True)
        data = self.data if shape.batch is None else self.data.model_copy(update={"batch": shape.batch})
        try:
            return TrainConfig(
                name=f"{self.name}-{shape.name}",
                model=ModelSettings.model_validate(start | shape.overrides),
                data=data,
                train=TrainSettings(
                    steps=cost.windows * (cost.steps + cost.warmup),
                    seeds=[cost.seed],
                    eval_every=cost.eval_every,
                    eval_batches=cost.eval_batches,
                    precision=cost.precision,
                    compile=cost.compile,
                    device=cost.device,
                    threads=cost.threads,
                ),
                optimizer=self.optimizer,
                ep=self.ep,
                arms=self.arms,
                base=self.base,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"shape '{shape.name}': {where}{message}") from None

    def with_published(self, folder: Path) -> CostConfig:
        """The same with every published measurement read, so that a resume needs none of the files.

        Raises:
            ConfigError: a file is missing or refused.
        """
        read = [
            load_published(folder / Path(item).expanduser()) if isinstance(item, str) else item
            for item in self.published
        ]
        return self.model_copy(update={"published": read})

    def arm(self, name: str) -> ArmSettings:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)
