"""Importing: GGUF files of every architecture against the library, folders, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_files import HEADS, HIDDEN, KEY_HEADS, LAYERS, THETA, TOKENS, WIDTH, weights, write_gguf
from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.hf import open_causal_lm
from twinscope.models.store.gguf_import import ARCHITECTURES, convert_gguf
from twinscope.models.store.imports import import_model
from twinscope.models.store.library import known_models, model_folder
from twinscope.models.store.origin import is_whole, read_origin
from twinscope.text.tokenizers import file_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    import_model(path, out=tmp_path / "out", quiet=True)
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
    path = write_gguf(tmp_path / "tiny.gguf", tensors, quantised=True)
    import_model(path, out=tmp_path / "out", quiet=True)
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
        (
            lambda p: write_gguf(p, weights(), architecture="mamba"),
            "architecture 'mamba', which is not converted",
        ),
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
        import_model(path, out=tmp_path / "out", quiet=True)
    assert [item.name for item in tmp_path.iterdir()] == ["tiny.gguf"]


Metadata = dict[str, Any]
ROPE = {"rope_type": "default", "rope_theta": THETA}
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "rope_parameters": ROPE, "rms_norm_eps": 1e-5}
KEYS = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": THETA,
        "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
GEMMA = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
GEMMA_KEYS = {**KEYS, "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 4}
CASES: dict[str, tuple[Any, dict[str, Any], Metadata]] = {
    "qwen2": (transformers.Qwen2Config, GROUPED, KEYS),
    "qwen3": (
        transformers.Qwen3Config,
        {**GROUPED, "head_dim": 16, "tie_word_embeddings": True},
        {**KEYS, "attention.key_length": 16, "attention.value_length": 16},
    ),
    "phi3": (
        transformers.Phi3Config,
        {**GROUPED, "sliding_window": 8, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0},
        {**KEYS, "attention.sliding_window": 8, "rope.dimension_count": 8,
         "rope.scaling.original_context_length": 64},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        {**GEMMA_KEYS, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {**{k: v for k, v in GEMMA.items() if k != "rope_parameters"}, "num_hidden_layers": 7,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
         }},
        {**GEMMA_KEYS, "block_count": 7, "rope.freq_base": 1e6},
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
        {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
         "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5},
    ),
}  # fmt: skip


def library_model(architecture: str) -> Any:
    """A tiny model of the library with random weights, biases and norms included, exact in bf16."""
    kind, settings, _ = CASES[architecture]
    implementation = "eager" if architecture == "gemma2" else "sdpa"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**settings), attn_implementation=implementation
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 0.3).bfloat16())
    return model


def write_library_model(path: Path, architecture: str, model: Any, more: Metadata | None = None) -> Path:
    """The model as llama.cpp would store it: its names, and what it does to some tensors."""
    writer = GGUFWriter(path, architecture)
    for key, value in {**CASES[architecture][2], **(more or {})}.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    layers = model.config.num_hidden_layers
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == architecture)
    names = get_tensor_name_map(arch, layers)
    for name, parameter in model.named_parameters():
        stem, suffix = name.rsplit(".", 1)
        values = parameter.detach().clone()
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        if architecture == "gpt2" and values.ndim == 2 and "c_" in name:
            values = values.T
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", list(CASES))
def test_every_architecture_computes_what_it_was_made_from(tmp_path: Path, architecture: str) -> None:
    model = library_model(architecture)
    path = write_library_model(tmp_path / f"{architecture}.gguf", architecture, model)
    folder = import_model(path, quiet=True)
    assert folder == model_folder(architecture)
    origin = read_origin(folder)
    assert origin is not None
    assert "--tokenizer" in origin.details["no_tokenizer"]
    # What goes through one step of float32 arithmetic and back may need more bits than bf16 has.
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=model.config._attn_implementation
    )
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        theirs, ours = (m(input_ids=ids, use_cache=False).logits for m in (model, again))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_every_architecture_is_tested() -> None:
    assert {*CASES, "llama"} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "more", "words"),
    [
        ("qwen3", {"logit_scale": 2.0}, r"its setting 'qwen3\.logit_scale' = 2.0 has no place"),
        (
            "qwen3",
            {"attention.key_length": 8, "attention.value_length": 8},
            r"has the shape \(64, 32\), but its metadata say \(32, 32\)",
        ),
        ("qwen3", {"attention.head_count": 3}, "make no qwen3 model|but its metadata say"),
        ("qwen2", {"rope.scaling.type": "yarn"}, r"scales its rotary angles \('yarn'\)"),
        ("gpt2", {"block_count": 3}, r"transformer\.h\.2\.ln_1\.weight is missing"),
        ("qwen2", {"block_count": 1}, r"has a tensor 'blk\.1"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(
    tmp_path: Path, architecture: str, more: Metadata, words: str
) -> None:
    path = write_library_model(tmp_path / "x.gguf", architecture, library_model(architecture), more)
    with pytest.raises(DataError, match=words):
        import_model(path, quiet=True)
    assert known_models() == []


def damaged(path: Path, at: int, value: bytes) -> Path:
    """A tiny Llama whose bytes ``at`` (counted from the magic) are others."""
    data = bytearray(write_gguf(path, weights()).read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def with_huge_list(path: Path) -> Path:
    """A list of 2^60 bytes of which none is there: a reader that trusts it never ends."""
    key = b"general.list"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
        + struct.pack("<IIQ", 9, 0, 1 << 60)
    )  # fmt: skip
    return path


def tensor_at(path: Path, offset: int) -> Path:
    """A tiny Llama whose second tensor says that it begins at ``offset``."""
    data = bytearray(write_gguf(path, weights()).read_bytes())
    name = b"output_norm.weight"
    # After the name: dimensions (4 + 8 bytes for one), type (4), offset (8).
    place = data.rindex(name) + len(name) + 4 + 8 + 4
    data[place : place + 8] = struct.pack("<Q", offset)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p.write_bytes(b""), "it ends inside its first bytes"),
        (lambda p: damaged(p, 0, b"ABCD"), "does not begin with GGUF"),
        (lambda p: damaged(p, 4, struct.pack("<I", 99)), "unknown version 99"),
        (lambda p: damaged(p, 4, struct.pack(">I", 3)), "big-endian"),
        (lambda p: damaged(p, 8, struct.pack("<Q", 1 << 60)), "1152921504606846976 tensors"),
        (lambda p: damaged(p, 16, struct.pack("<Q", 1 << 60)), "1152921504606846976 keys"),
        (lambda p: damaged(p, 24, struct.pack("<Q", 1 << 40)), "a key would be 1099511627776 bytes long"),
        (with_huge_list, "the list b'general.list' has 1152921504606846976 items"),
        (lambda p: tensor_at(p, 0), "overlaps another"),
        (lambda p: tensor_at(p, 1 << 40), "ends at byte"),
    ],
)
def test_hostile_gguf_headers_are_a_sentence(
    tmp_path: Path, write: Callable[[Path], Any], words: str
) -> None:
    path = tmp_path / "hostile.gguf"
    write(path)
    with pytest.raises(DataError, match=words):
        import_model(path, quiet=True)
    assert known_models() == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of a tiny Llama in fp32, as the library saves it."""
    import_model(write_gguf(tmp_path / "tiny.gguf", weights()), out=tmp_path / "source", quiet=True)
    (tmp_path / "source" / "twinscope.json").unlink()
    return tmp_path / "source"


def test_a_folder_is_copied_whole_and_found_again(folder: Path, cache: Path) -> None:
    made = import_model(folder, name="my-llama", quiet=True)
    assert made == cache / "models" / "my-llama"
    origin = read_origin(made)
    assert origin is not None
    assert origin.weights == "released"
    assert sorted(origin.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    for name in origin.files:
        assert (made / name).read_bytes() == (folder / name).read_bytes()
    assert is_whole(made)
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert import_model(folder, name="my-llama", quiet=True) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert model_folder("my-llama") == made
    # Kind and origin travel with a folder that says what it is.
    second = import_model(made, name="second", weights=None, quiet=True)
    assert read_origin(second).source == origin.source  # pyright: ignore[reportOptionalMemberAccess]
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ConfigError, match="holds another model"):
        import_model(folder, name="my-llama", quiet=True)


def spoiled(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configured(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def looped(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def shortened(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-7])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (only_pickles, DataError, r"pickles \(pytorch_model\.bin\)"),
        (shortened, DataError, "outside the file"),
        (looped, DataError, "symbolic links|Too many levels"),
        (
            lambda f: spoiled(f, not_a_number),
            DataError,
            r"NaN or infinite values in model\.layers\.1\.mlp\.up",
        ),
        (lambda f: spoiled(f, lambda t: t.pop("model.norm.weight")), DataError, r"model\.norm\.weight"),
        (lambda f: configured(f, auto_map={"AutoModel": "x.Y"}), DataError, "auto_map"),
        (lambda f: configured(f, hidden_size=128), DataError, "config.json"),
        (lambda f: configured(f, model_type="llama9"), ConfigError, "'llama9' model, which the installed"),
        (lambda f: configured(f, quantization_config={"bits": 4}), DataError, "quantised"),
        (lambda f: (f / "config.json").unlink(), DataError, "no Hugging Face folder"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), DataError, "truncated"),
    ],
)
def test_folders_that_cannot_be_trusted_are_refused(
    folder: Path, cache: Path, change: Callable[[Path], Any], kind: type[Exception], words: str
) -> None:
    change(folder)
    with pytest.raises(kind, match=words):
        import_model(folder, quiet=True)
    assert known_models() == []
    assert not (cache / "models").exists() or list((cache / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights.bin", "is a pickle by its name"),
        ("model.safetensors", "are weights alone"),
        ("nowhere", "there is no"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, words: str) -> None:
    if name != "nowhere":
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises((DataError, ConfigError), match=words):
        import_model(tmp_path / name, quiet=True)


def test_names_and_places_that_are_taken_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the name of a model that is fetched"):
        import_model(folder, name="smollm2", quiet=True)
    with pytest.raises(ConfigError, match="cannot name a model"):
        import_model(folder, name="../x", quiet=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that twinscope did not make"):
        import_model(folder, out=tmp_path / "full", quiet=True)
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    with pytest.raises(ConfigError, match=r"neither a model in the cache nor a folder"):
        model_folder("smollm3x")


def test_a_full_disk_is_told_before_anything_is_written(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1 << 20})())
    with pytest.raises(Exception, match=r"takes 0 MiB in .*, where 1 MiB are free") as caught:
        import_model(folder, name="x", quiet=True)
    assert getattr(caught.value, "exit_code", None) == 75
    assert list((cache / "models").iterdir()) == []
