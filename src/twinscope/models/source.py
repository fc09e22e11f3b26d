"""Where a model comes from: a shape with fresh weights, or a checkpoint of an earlier run.

Covers the ``[model]`` table. Which arms then train the model is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.checkpoints import Manifest, find_checkpoints, read_manifest, read_part
from twinscope.models.gpt import GPT, GPTConfig, GPTShape, build_gpt
from twinscope.models.weights import load_into

_OF_A_SOURCE = {"source", "arm", "seed"}


class ModelSettings(GPTShape):
    """``[model]``: a shape, or ``source = "run:DIR[@STEP]"`` with the arm and seed to take (first if left out)."""

    source: str | None = None
    arm: str | None = None
    seed: int | None = None

    @model_validator(mode="after")
    def _either_shape_or_source(self) -> Self:
        if self.source is None:
            given = sorted(self.model_fields_set & {"arm", "seed"})
            if given:
                raise ValueError(f'{", ".join(given)}: belongs to a source = "run:DIR[@STEP]"')
            return self
        if not self.source.startswith("run:"):
            raise ValueError(f"source '{self.source}' is not of the form run:DIR or run:DIR@STEP")
        given = sorted(self.model_fields_set - _OF_A_SOURCE)
        if given:
            raise ValueError(f"{', '.join(given)}: the shape comes from the source, leave it out")
        return self


    @model_serializer(mode="wrap")
    def _without_a_shape_of_its_own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A model with a source is written without the defaults that its shape would have."""
        values = handler(self)
        return values if self.source is None else {k: v for k, v in values.items() if k in _OF_A_SOURCE}


@dataclass(frozen=True)
class Initial:
    """The shape every arm has and the weights it starts from; ``weights`` is None for a fresh model."""

    config: GPTConfig
    weights: dict[str, Tensor] | None
    origin: str

    def build(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> GPT:
        """One model: fresh weights are those of ``seed``, a source's are the same for every seed."""
        model = build_gpt(self.config, seed, dtype, device)
        if self.weights is not None:
            load_into(model, {name: tensor.to(dtype) for name, tensor in self.weights.items()})
        return model


def open_model(settings: ModelSettings, vocab: int, data: Mapping[str, str]) -> Initial:
    """Resolve ``[model]`` for a vocabulary; ``data`` are the hashes of the text and tokenizer to be used.

    Raises:
        ConfigError: the source names no run, checkpoint, arm or seed that exists.
        DataError: the checkpoint is damaged, or was trained with another vocabulary or tokenizer.
    """
    if settings.source is None:
        shape = settings.model_dump(exclude=_OF_A_SOURCE, exclude_none=True)
        return Initial(GPTConfig(vocab=vocab, **shape), None, "fresh weights")
    checkpoint, manifest, arm = find_source(settings)
    if manifest.shape.vocab != vocab:
        raise DataError(
            f"{checkpoint} was trained with {manifest.shape.vocab} tokens, but the data has {vocab}: "
            "use the tokenizer it was trained with"
        )
    theirs, ours = manifest.data.get("tokenizer"), data.get("tokenizer")
    if theirs != ours:
        raise DataError(f"{checkpoint} was trained with another tokenizer: use the one it was trained with")
    weights = read_part(checkpoint, manifest, f"{arm}.weights")
    return Initial(
        manifest.shape, weights, f"{checkpoint.parent.parent.name}, step {manifest.step}, arm {arm}"
    )


def find_source(settings: ModelSettings) -> tuple[Path, Manifest, str]:
    """The checkpoint folder that a ``run:`` source names, its manifest, and the arm to take.

    Raises:
        ConfigError: no such run, step, seed or arm; the sentence lists what exists.
        DataError: the checkpoint's manifest is damaged.
    """
    assert settings.source is not None
    place, _, step_text = settings.source.removeprefix("run:").partition("@")
    if step_text and not step_text.isdigit():
        raise ConfigError(f"model.source: '@{step_text}' is no step; write run:DIR@STEP with a number")
    folder = Path(place).expanduser() / "checkpoints"
    found = find_checkpoints(folder, settings.seed)
    if not found:
        raise ConfigError(f"model.source: no checkpoint in {folder}; give the directory of a train run")
    seed = found[0][0] if settings.seed is None else settings.seed
    steps = {step: path for of, step, path in found if of == seed}
    step = int(step_text) if step_text else max(steps)
    if step not in steps:
        raise ConfigError(
            f"model.source: {folder} has no checkpoint of step {step} for seed {seed} "
            f"(it has {', '.join(map(str, sorted(steps)))})"
        )
    manifest = read_manifest(steps[step])
    arm = settings.arm or next(iter(manifest.arms))
    if arm not in manifest.arms:
        raise ConfigError(f"model.arm: {steps[step]} has no arm '{arm}' (it has {', '.join(manifest.arms)})")
    return steps[step], manifest, arm
