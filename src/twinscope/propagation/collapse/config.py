"""The configuration of ``twinscope collapse``: leak runs that exist, or models to measure from nothing.

Covers the tables and which leak runs they ask for. What is computed from them is in collapse.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, ValidationError, model_validator

from twinscope.lab.config import Section
from twinscope.models.source import ModelSettings
from twinscope.propagation.config import BaseSettings
from twinscope.propagation.leak.config import LeakConfig, LeakSettings
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.train import resolved_data, resolved_model
from twinscope.text.datasets import DataSettings


class GivenRuns(Section):
    """Finished leak runs to put together, by absolute path."""

    name: str = "collapse"
    runs: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        twice = sorted({run for run in self.runs if self.runs.count(run) > 1})
        if twice:
            raise ValueError(f"every leak run counts once, but {', '.join(twice)} stands twice")
        return self


@dataclass(frozen=True)
class Member:
    """One leak run that a collapse asks for; its label is unique within the collapse."""

    label: str
    config: LeakConfig


class CollapseConfig(Section):
    """Models to measure at one beta, and controls at others; the tables are those of ``twinscope leak``.

    ``[[models]]`` tables override keys of ``[model]`` and ``steps`` of ``[base]``, or give a ``source``, and
    may have a ``name``.
    ``control_betas`` are measured on the model at position ``control_model``, counted from 1.
    """

    name: str = "collapse"
    control_betas: list[float] = Field(default_factory=list)
    control_model: int = Field(default=1, ge=1)
    model: ModelSettings = Field(default_factory=ModelSettings)
    models: list[dict[str, Any]] = Field(min_length=1)
    data: DataSettings = Field(default_factory=DataSettings)
    ep: EPSettings
    leak: LeakSettings = Field(default_factory=LeakSettings)
    base: BaseSettings | None = None

    @model_validator(mode="after")
    def _can_be_compared(self) -> Self:
        beta = self.ep.beta
        if beta is None:
            raise ValueError("ep: the law is tested at one beta for all models: set ep.beta, no displacement")
        if any(control <= 0 or control == beta for control in self.control_betas):
            raise ValueError(f"control_betas: every one is positive and other than ep.beta = {beta:g}")
        if len(set(self.control_betas)) != len(self.control_betas):
            raise ValueError("control_betas: every beta stands once")
        if self.control_model > len(self.models):
            raise ValueError(f"control_model = {self.control_model}: there are {len(self.models)} models")
        labels = [member.label for member in self.members()]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"models: more than one is called {', '.join(twice)}: give each a name")
        return self

    def members(self) -> list[Member]:
        """The leak runs asked for, controls last."""
        found = [self._member(position) for position in range(len(self.models))]
        of = self.control_model - 1
        return found + [self._member(of, beta) for beta in self.control_betas]

    def resolved(self) -> CollapseConfig:
        """The same with nothing left to the machine or folder of a later resume: threads and paths."""
        models = [
            {**change, "source": resolved_model(ModelSettings(source=change["source"])).source}
            if "source" in change
            else change
            for change in self.models
        ]
        threads = self.leak.threads or torch.get_num_threads()
        return self.model_copy(
            update={
                "models": models,
                "model": resolved_model(self.model),
                "data": resolved_data(self.data),
                "leak": self.leak.model_copy(update={"threads": threads}),
                "ep": self.ep.model_copy(update={"precision": self.leak.precision}),
            }
        )

    def _member(self, position: int, beta: float | None = None) -> Member:
        change = dict(self.models[position])
        name, steps = change.pop("name", None), change.pop("steps", None)
        sourced = "source" in change
        if steps is not None and (sourced or self.base is None):
            raise ValueError(f"models, number {position + 1}: steps belongs to a model that [base] trains")
        start = {} if sourced else self.model.model_dump(exclude_unset=True)
        base = None if sourced or self.base is None else self.base.model_dump(exclude_unset=True)
        if base is not None and steps is not None:
            base["steps"] = steps
        try:
            model = ModelSettings.model_validate(start | change)
            trained = None if base is None else BaseSettings.model_validate(base)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise ValueError(
                f"models, number {position + 1}: {where}{first['msg'].removeprefix('Value error, ')}"
            ) from None
        place = f"width{model.width}-layers{model.layers}"
        if model.source is not None:
            place = Path(model.source.partition("@")[0].removeprefix("run:")).name
        label = str(name or (place if steps is None else f"{place}-steps{steps}"))
        ep = self.ep
        if beta is not None:
            label, ep = f"{label}-beta{beta:g}", ep.model_copy(update={"beta": beta})
        config = LeakConfig(
            name=f"{self.name}-{label}", model=model, data=self.data, ep=ep, leak=self.leak, base=trained
        )
        return Member(label, config)
