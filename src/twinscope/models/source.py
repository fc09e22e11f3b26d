"""Where a model comes from: a shape with fresh weights, a checkpoint of a run, or a folder of weights.

Covers the ``[model]`` table. Which arms then train the model, or what is measured on it, is the business
of the verb.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.run import cache_root
from twinscope.models.checkpoints import Manifest, find_checkpoints, read_manifest, read_part
from twinscope.models.decoder import Decoder
from twinscope.models.gpt import GPT, GPTConfig, GPTShape, build_gpt
from twinscope.models.weights import load_into

_OF_A_SOURCE = {"source", "arm", "seed"}


class ModelSettings(GPTShape):
    """``[model]``: a shape, or a ``source``.

    ``source = "run:DIR[@STEP]"`` is a checkpoint, with the arm and seed to take (first if left out);
    ``"smollm2"`` is SmolLM2-135M-Instruct, fetched on first use; anything else is the path of a Hugging
    Face folder. With the last two, ``context`` may shorten the windows of text.
    """

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
        if not self.source:
            raise ValueError('source: give run:DIR, run:DIR@STEP, "smollm2" or the path of a folder')
        given = sorted(self.model_fields_set - self._own_fields())
        if given:
            raise ValueError(f"{', '.join(given)}: the shape comes from the source, leave it out")
        return self

    @property
    def of_a_run(self) -> bool:
        """Whether the source is a checkpoint of a train run."""
        return self.source is not None and self.source.startswith("run:")

    @model_serializer(mode="wrap")
    def _without_a_shape_of_its_own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A model with a source is written without the defaults that its shape would have."""
        values = handler(self)
        if self.source is None:
            return values
        return {k: v for k, v in values.items() if k in self._own_fields() and k in self.model_fields_set}

    def _own_fields(self) -> set[str]:
        """The keys that a model with this source has."""
        return _OF_A_SOURCE if self.of_a_run else {"source", "context"}


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


@dataclass(frozen=True)
class Opened:
    """A decoder to measure: what it is, the most tokens of a window, and the tokenizer that came with it."""

    decoder: Decoder
    description: str
    tokenizer: Path | None
    context: int


def open_decoder(
    settings: ModelSettings,
    vocab: int,
    data: Mapping[str, str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quiet: bool = False,
) -> Opened:
    """Resolve ``[model]`` to one decoder; ``seed`` draws the weights of a shape, and nothing else.

    ``vocab`` and the hashes ``data`` are those of the text, which is to be tokenised with
    :func:`source_tokenizer` where there is one. Token files carry no tokenizer to compare.

    Raises:
        ConfigError, DataError: as for :func:`open_model`, ``open_causal_lm`` and ``fetch_smollm2``; the
            text has another tokenizer or more tokens than the model, or ``context`` exceeds it.
    """
    folder = _source_folder(settings, quiet)
    if folder is None:
        initial = open_model(settings, vocab, data)
        return Opened(initial.build(seed, dtype, device), initial.origin, None, initial.config.context)
    from twinscope.models.hf import open_causal_lm

    tokenizer = source_tokenizer(settings, quiet)
    ours = data.get("tokenizer")
    if tokenizer is not None and ours not in (None, hashlib.sha256(tokenizer.read_bytes()).hexdigest()):
        raise DataError(f"{folder} was trained with another tokenizer: set data.tokenizer = '{tokenizer}'")
    decoder = open_causal_lm(folder, dtype)
    if vocab > decoder.vocab:
        raise DataError(f"{folder} reads {decoder.vocab} tokens, but the data has {vocab}: use its tokenizer")
    context = settings.context if "context" in settings.model_fields_set else decoder.context
    if context > decoder.context:
        raise ConfigError(
            f"model.context = {context} is more than the {decoder.context} positions that {folder} reads"
        )
    size = sum(parameter.numel() for _, parameter in decoder.named_parameters())
    return Opened(decoder.to(device), f"{folder}, {decoder.family}, {size:,} parameters", tokenizer, context)


def source_tokenizer(settings: ModelSettings, quiet: bool = False) -> Path | None:
    """The ``tokenizer.json`` that comes with the source, fetched where it has to be; None if none does.

    Raises:
        ConfigError, DataError: as for ``fetch_smollm2``.
    """
    folder = _source_folder(settings, quiet)
    path = None if folder is None else folder / "tokenizer.json"
    return path if path is not None and path.is_file() else None


def _source_folder(settings: ModelSettings, quiet: bool) -> Path | None:
    """The Hugging Face folder of the source, or None for a shape or a run."""
    if settings.source is None or settings.of_a_run:
        return None
    if settings.source != "smollm2":
        return Path(settings.source).expanduser().absolute()
    from twinscope.models.store.fetch import fetch_smollm2

    return fetch_smollm2(cache_root(), quiet)


def open_model(settings: ModelSettings, vocab: int, data: Mapping[str, str]) -> Initial:
    """Resolve ``[model]`` for a vocabulary; ``data`` are the hashes of the text and tokenizer to be used.

    Raises:
        ConfigError: the source names no run, checkpoint, arm or seed that exists.
        DataError: the checkpoint is damaged, or was trained with another vocabulary or tokenizer.
    """
    if settings.source is None:
        shape = settings.model_dump(exclude=_OF_A_SOURCE, exclude_none=True)
        return Initial(GPTConfig(vocab=vocab, **shape), None, "fresh weights")
    if not settings.of_a_run:
        raise ConfigError(
            f"model.source = '{settings.source}' cannot be trained: training starts from a shape or from "
            "run:DIR; `twinscope leak` measures it as it is"
        )
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
    place, step_text = settings.source.removeprefix("run:"), ""
    if named := re.fullmatch(r"(.+)@(\d{1,12})", place):
        place, step_text = named.groups()
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
