"""Small gated MLPs in memory and on disk, and their neurons computed in float64 by the formula."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinscope.models.store.origin import write_origin
from twinscope.reuse.neurons.activations import GatedLayer, layer_of_matrices

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def write_gated(folder: Path, family: str = "Llama", weights: str = "trained", **changes: Any) -> Path:
    """A folder of the library's class with drawn weights and uneven norm gains."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    offset = float(family.startswith("Gemma"))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            values = rng.normal(size=tuple(parameter.shape))
            if parameter.ndim == 1:
                values = np.exp(0.3 * values) - offset
            else:
                values *= 1.5 / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values).float())
    model.save_pretrained(folder)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    write_origin(folder, weights, "drawn for a test", files)  # pyright: ignore[reportArgumentType]
    return folder


def matrices(seed: int, neurons: int = 30, width: int = 12, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up ``(n, C)`` and down ``(C, n)`` of normal numbers of variance 1/C."""
    rng = np.random.default_rng([seed, layer])
    gate, up, down = (rng.normal(size=(neurons, width)) / np.sqrt(width) for _ in range(3))
    return (
        torch.from_numpy(gate).float(),
        torch.from_numpy(up).float(),
        torch.from_numpy(down.T.copy()).float(),
    )


def gated(seed: int, neurons: int = 30, width: int = 12, layer: int = 0) -> GatedLayer:
    return layer_of_matrices(layer, *matrices(seed, neurons, width, layer))


def inputs(seed: int, tokens: int = 200, width: int = 12, dominant: float = 1.0) -> Tensor:
    """Tokens ``(N, C)`` of RMS 1 that share a direction of ``dominant`` standard deviations."""
    rng = np.random.default_rng([seed, 77])
    x = rng.normal(size=(tokens, width)) + dominant * rng.normal(size=width)
    return torch.from_numpy(x / np.sqrt((x**2).mean(axis=1, keepdims=True))).float()


def silu(t: np.ndarray) -> np.ndarray:
    return t / (1.0 + np.exp(-t))


def exact(x: Tensor, layer: GatedLayer) -> np.ndarray:
    """Activations ``(N, n)`` float64 by the formula, with SiLU."""
    gate, up = (part(0, layer.neurons).double().numpy() for part in (layer.gate, layer.up))
    values = x.double().numpy()
    return silu(values @ gate.T) * (values @ up.T)
