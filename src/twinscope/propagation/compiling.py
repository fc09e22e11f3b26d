"""Compiling a decoder's blocks, one by one, for either rule.

Covers the check that this machine can compile, and the compilation. Blocks are compiled alone because
equilibrium propagation runs and differentiates them alone; embedding, readout and optimizer stay as they are.
Why no step is captured as a CUDA graph is in docs/decisions/0006-compiling.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder

#: torch's default compiler backend.
BACKEND = "inductor"


def compile_blocks(model: Decoder, backend: str | Callable[..., Any] | None = None) -> None:
    """Have every block of ``model`` compiled when it first runs; names, parameters and state stay the same.

    Blocks of one shape share their code. It is made once for every kind of call: without a graph, with one
    to the input alone (forces), with one to input and parameters. Rounding differs from uncompiled blocks.
    ``backend`` is that of ``torch.compile``; None is torch's own.

    Raises:
        ConfigError: this machine cannot compile for the device of the parameters.
    """
    backend = backend or BACKEND
    device = next(parameter.device for _, parameter in model.named_parameters())
    _require(device, backend)
    # A symmetric nudge and the residual differentiate one graph twice, which torch refuses for compiled code
    # that may overwrite what it saved. The choice is made when code is made, so it holds for the process.
    functorch.donated_buffer = False
    for block in model.blocks:
        # Every batch of a run has one shape, so code for all shapes would be slower for nothing.
        block.compile(backend=backend, dynamic=False)


def _require(device: torch.device, backend: str | Callable[..., Any]) -> None:
    """Compile one small function: whether a machine can is seen by trying."""
    try:
        torch.compile(_probe, backend=backend, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        needed = "Triton" if device.type == "cuda" else "a C++ compiler such as g++"
        raise ConfigError(
            f"compile = true, but torch cannot compile for {device.type} here ({reason}): "
            f"install {needed}, or set compile = false"
        ) from None


def _probe(x: Tensor) -> Tensor:
    return 2 * x + 1
