"""A tiny Llama, and how it is written as a GGUF file, for the tests of imports and of fetching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from torch import Tensor

#: Sizes are multiples of 32, the block of the quantised types; heads are 4 and 2 of 16 channels.
WIDTH, HIDDEN, HEADS, KEY_HEADS, LAYERS, THETA = 64, 96, 4, 2, 2, 100.0
TOKENS = ["<|endoftext|>", "<|im_start|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]
Change = Callable[[GGUFWriter], object]


def weights() -> dict[str, Tensor]:
    """A tiny Llama under the names, and in the row order, of transformers; every value is in bf16."""
    draws = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).mul(0.3).bfloat16().float()

    tensors = {"model.embed_tokens.weight": draw(len(TOKENS), WIDTH), "model.norm.weight": draw(WIDTH)}
    for layer in range(LAYERS):
        for name, shape in (
            ("input_layernorm", (WIDTH,)),
            ("self_attn.q_proj", (WIDTH, WIDTH)),
            ("self_attn.k_proj", (WIDTH * KEY_HEADS // HEADS, WIDTH)),
            ("self_attn.v_proj", (WIDTH * KEY_HEADS // HEADS, WIDTH)),
            ("self_attn.o_proj", (WIDTH, WIDTH)),
            ("post_attention_layernorm", (WIDTH,)),
            ("mlp.gate_proj", (HIDDEN, WIDTH)),
            ("mlp.up_proj", (HIDDEN, WIDTH)),
            ("mlp.down_proj", (WIDTH, HIDDEN)),
        ):
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
    return tensors


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows in the order of GGUF: row i and row i + D/2 of a head next to each other."""
    out = torch.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    kinds: list[int] | None = None,
    quantised: bool = False,
    change: Change = lambda writer: None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(kinds or [3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    change(writer)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        layer = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{number}."
        rows = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KEY_HEADS}.get(stem)
        values = (tensor if rows is None else neighbours(tensor, rows)).numpy()
        place = f"{layer}{GGUF_NAMES.get(stem, stem)}.weight"
        if quantised and values.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(place, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(place, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
