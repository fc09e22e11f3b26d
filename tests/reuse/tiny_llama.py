"""A small Llama written by the library, a text for it, and a configuration that plans on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twinscope.reuse.reuse_config import ReuseConfig

SENTENCE = (
    "the state of union is strong and people nation know it well congress shall work with every citizen "
    "peace trade river iron school law winter harvest road ship letter treaty army debt silver bank canal"
)


def write_llama(folder: Path, layers: int = 4, copies: dict[str, str] | None = None, seed: int = 0) -> Path:
    """A Llama of width 16 with uneven norm gains; ``copies`` maps sites to the sites written over them."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tensors = model.state_dict()
    norms = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                tensor.add_(0.1 * torch.randn_like(tensor))
        for target, source in (copies or {}).items():
            (_, to, part), (_, of, _) = target.split("."), source.split(".")
            for module in (part, norms[part]):
                for name, tensor in tensors.items():
                    if f"layers.{to}.{module}." in name:
                        tensor.copy_(tensors[name.replace(f"layers.{to}.", f"layers.{of}.")])
    model.save_pretrained(folder)
    return folder


def write_text(path: Path, words: int = 3000, seed: int = 0) -> Path:
    """Paragraphs of random words."""
    draws = np.random.default_rng(seed)
    paragraphs = [" ".join(draws.choice(SENTENCE.split(), size=60)) for _ in range(words // 60)]
    path.write_text("\n\n".join(paragraphs))
    return path


def write_letters(path: Path, paragraphs: int = 200, seed: int = 0) -> Path:
    """Paragraphs of 60 words of five random letters, so that no two windows share more than a little."""
    letters = np.random.default_rng(seed).integers(97, 123, size=(paragraphs, 60, 5)).tolist()
    path.write_text("\n\n".join(" ".join("".join(map(chr, word)) for word in part) for part in letters))
    return path


def tiny_config(folder: Path, text: Path, **changes: Any) -> ReuseConfig:
    """The configuration of a scan of ``folder`` on ``text``; ``changes`` go into ``[reuse]``."""
    reuse: dict[str, Any] = {
        "texts": {"corpus": str(text), "tokenizer": "char", "tokens": 12, "calibration": 3, "heldout": 2},
        "budgets": {"process_mib": 65536.0, "available_mib": 1.0},
        "threads": 1,
        "parity": "receipt",
    }
    values = {"name": "tiny", "model": {"source": str(folder)}, "reuse": reuse | changes}
    return ReuseConfig.model_validate(values)
