"""The decoder: the one kind of model that every experiment of this package runs on.

Covers the protocol, the check that a given module keeps it, and the plain forward pass. Building a
decoder is the business of the modules that own an architecture.

Shapes: B texts, T positions, C channels of the residual stream, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from twinscope.lab.errors import ConfigError


class Blocks(Protocol):
    """The blocks of a decoder in order: sized, iterable, addressed by position from 0."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[nn.Module]: ...

    def __getitem__(self, index: int, /) -> nn.Module: ...


@runtime_checkable
class Decoder(Protocol):
    """A language model cut into ``embed``, ``blocks`` and ``readout`` along its residual stream.

    ``z_0 = embed(tokens)``, ``z_l = blocks[l - 1](z_{l-1})``, ``logits = readout(z_L)``.

    What an implementation promises:

    - It is an ``nn.Module``, and all its parameters are float32 or all are float64.
    - A block is an ``nn.Module`` that maps ``(B, T, C)`` to ``(B, T, C)``. Its output depends on its
      input and on its own parameters only, and no other block owns any of them.
    - The parameters that belong to no block are those of ``embed`` and ``readout``. Either may use
      any of them, and both may use the same one (a tied embedding and head).
    - Position t of any output depends on positions 0 … t of the tokens only.
    - The three are deterministic and leave the module as they found it: the same input and the same
      parameters give the same output, so dropout is off and nothing is cached between calls.

    A class may name the protocol as a base or just have its attributes. From Python 3.12 on,
    ``isinstance`` overlooks submodules of a class that does not name it; :func:`check_decoder` does not.
    """

    blocks: Blocks

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``(B, T)`` int64 to the first state ``(B, T, C)``."""
        ...

    def readout(self, z: Tensor) -> Tensor:
        """The last state ``(B, T, C)`` to logits ``(B, T, V)``, final norm included."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under the name by which gradients and checkpoints call it."""
        ...


def check_decoder(model: object) -> Decoder:
    """Return ``model`` as a :class:`Decoder` if it visibly keeps the protocol.

    Checked: the attributes, the ownership of parameters, their dtype, and dropout. That a block is a
    function of its input alone, and causality, cannot be seen from outside and are not checked.

    Raises:
        ConfigError: a promise is broken; the sentence gives every reason found.
    """
    reasons = _missing(model)
    if not reasons:
        module = cast(nn.Module, model)
        reasons = [*_ownership(cast(Decoder, model)), *_dtypes(module), *_dropout(module)]
    if reasons:
        raise ConfigError(f"{type(model).__name__} cannot be used as a decoder: {'; '.join(reasons)}")
    return cast(Decoder, model)


def forward(model: Decoder, tokens: Tensor) -> Tensor:
    """The logits ``(B, T, V)`` of token ids ``(B, T)`` int64: embed, every block in order, readout."""
    z = model.embed(tokens)
    for block in model.blocks:
        z = block(z)
    return model.readout(z)


def _missing(model: object) -> list[str]:
    if not isinstance(model, nn.Module):
        return ["it is no torch.nn.Module"]
    reasons = [
        f"it has no method {name}()"
        for name in ("embed", "readout")
        if not callable(getattr(model, name, None))
    ]
    blocks = getattr(model, "blocks", None)
    if blocks is None or not hasattr(blocks, "__getitem__") or not hasattr(blocks, "__len__"):
        reasons.append("it has no sequence of blocks called 'blocks'")
    elif len(blocks) == 0:
        reasons.append("it has no blocks: give it at least one")
    elif not all(isinstance(block, nn.Module) for block in blocks):
        reasons.append("a block is no torch.nn.Module, so its parameters cannot be told")
    return reasons


def _ownership(model: Decoder) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, int] = {}
    reasons = []
    for position, block in enumerate(model.blocks):
        for name, parameter in block.named_parameters():
            if id(parameter) not in names:
                reasons.append(
                    f"{name} of block {position} is missing from named_parameters(): "
                    "hold the blocks in an nn.ModuleList"
                )
            elif id(parameter) in owners:
                reasons.append(
                    f"blocks {owners[id(parameter)]} and {position} share {names[id(parameter)]}: "
                    "give each block its own parameters"
                )
            else:
                owners[id(parameter)] = position
    return reasons


def _dtypes(model: nn.Module) -> list[str]:
    reasons = []
    found: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(parameter.dtype, name)
    for dtype, name in found.items():
        if dtype in (torch.bfloat16, torch.float16):
            reasons.append(
                f"{name} is {_name(dtype)}: {_short(dtype)} displaced states round to exactly zero "
                "displacement and the estimated gradient goes with them, so keep the model in float32 "
                'and ask for precision = "amp"'
            )
        elif dtype not in (torch.float32, torch.float64):
            reasons.append(f"{name} is {_name(dtype)}: use float32 or float64")
    if {torch.float32, torch.float64} <= found.keys():
        reasons.append(
            f"{found[torch.float32]} is float32 but {found[torch.float64]} is float64: use one dtype"
        )
    return reasons


def _dropout(model: nn.Module) -> list[str]:
    reasons = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        # Attention layers keep the probability as a plain number under names such as attention_dropout.
        rates = {key: value for key, value in vars(module).items() if "drop" in key}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates["p"] = module.p
        for key, value in rates.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                where = f"{name}.{key}" if name else key
                reasons.append(
                    f"dropout is on ({where} = {value:g} in training mode), so two forward passes "
                    "disagree: call model.eval() or set it to 0"
                )
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp16"
