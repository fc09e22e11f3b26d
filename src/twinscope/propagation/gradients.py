"""A gradient by parameter name, what an estimate says about itself, and how gradients add up.

Covers the types that both estimators share, and which parameters act where. Computing a gradient is in
estimators.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder
from twinscope.propagation.ranks.buckets import Reduction


@dataclass(frozen=True)
class Diagnostics:
    """What an estimate says about itself; empty lists and ``None`` where nothing was measured."""

    rule: str  # "ep" | "bp"
    rounds: int
    beta: float | None  # strength of the nudge, without its sign
    signs: tuple[int, ...]  # signs of the nudged phases
    gain: list[float]  # g_l, blocks 1 … L
    displacement_ratio: list[float]  # RMS(z_l - o_l) / RMS(z_l) at the states that were read
    residual: float | None  # max_l |z_l - o_l - g_l d_l| / |g_l d_l|, d recomputed at those states


@dataclass(frozen=True)
class Gradient:
    """Loss (nats per token, of the free phase) and the gradient of the mean loss per parameter name."""

    loss: float
    grads: dict[str, Tensor]
    diagnostics: Diagnostics


@dataclass(frozen=True)
class ParameterNames:
    """The trainable parameters by where they act: in one block, or outside (embedding and readout)."""

    outer: list[tuple[str, nn.Parameter]]
    blocks: list[list[tuple[str, nn.Parameter]]]


def parameter_names(model: Decoder) -> ParameterNames:
    """Group the trainable parameters of ``model``; a parameter shared by two blocks stands in both.

    Raises:
        ConfigError: a block has a parameter that ``model.named_parameters()`` does not list.
    """
    named = {id(p): name for name, p in model.named_parameters()}
    blocks: list[list[tuple[str, nn.Parameter]]] = []
    inner: set[int] = set()
    for index, block in enumerate(model.blocks):
        trainable = [p for p in block.parameters() if p.requires_grad]
        if any(id(p) not in named for p in trainable):
            raise ConfigError(
                f"block {index + 1} has parameters that the model does not register: "
                "keep the blocks in an nn.ModuleList of the model"
            )
        inner.update(id(p) for p in trainable)
        blocks.append([(named[id(p)], p) for p in trainable])
    outer = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in inner]
    return ParameterNames(outer, blocks)


class GradientSum:
    """Gradients by parameter name; contributions to one parameter (tied weights, two phases) add.

    With a ``reduction``, they add over ranks too: a block's sum is sent off once it was read in each of the
    ``phases``, while lower blocks are still to be read.
    """

    def __init__(self, model: Decoder, reduction: Reduction | None = None, phases: int = 1) -> None:
        self._model = model
        self._grads: dict[str, Tensor] = {}
        self._reduction = reduction
        self._phases = phases
        self._reads: Counter[str] = Counter()

    def add(self, named: Sequence[tuple[str, nn.Parameter]], found: Sequence[Tensor | None]) -> None:
        for (name, _), grad in zip(named, found, strict=True):
            if grad is not None:
                held = self._grads.get(name)
                self._grads[name] = grad if held is None else held + grad

    def add_block(self, named: Sequence[tuple[str, nn.Parameter]], found: Sequence[Tensor | None]) -> None:
        """As :meth:`add`, for a read of one block: nothing but its reads adds to its parameters."""
        self.add(named, found)
        if self._reduction is not None and named:
            self._reads[named[0][0]] += 1
            if self._reads[named[0][0]] == self._phases:
                self._send([name for name, _ in named])

    def _send(self, names: Sequence[str]) -> None:
        assert self._reduction is not None
        self._reduction.add({name: self._grads.pop(name) for name in names if name in self._grads})

    def found(self, name: str) -> Tensor | None:
        """The gradient of one parameter, None where nothing reached it."""
        return self._grads.get(name)

    def result(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Every trainable parameter's gradient, in the model's order; zero where nothing reached it."""
        if self._reduction is not None:
            self._send(list(self._grads))
            self._grads = self._reduction.result()
        if scale != 1.0:
            for grad in self._grads.values():
                grad.mul_(scale)
        return {
            name: self._grads[name] if name in self._grads else torch.zeros_like(p)
            for name, p in self._model.named_parameters()
            if p.requires_grad
        }
