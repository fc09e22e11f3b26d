"""Hugging Face decoders: parity with the library's own forward and backward, folders, and what is refused.

The library's loss is computed in float32 whatever the dtype, so its logits are compared with the loss and
gradients of float64, and its own loss only to float32's precision.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.decoder import check_decoder
from twinscope.models.hf import HFDecoder, open_causal_lm, wrap_causal_lm
from twinscope.models.source import ModelSettings, open_decoder, open_model, source_tokenizer
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings

# The reference models must come from the installed package alone: no kernels or files from a hub.
os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

TOLERANCE = 1e-10
VOCAB, CONTEXT = 19, 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ROTARY = {**COMMON, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 24}
GEMMA = {**ROTARY, "hidden_activation": "gelu_pytorch_tanh"}
BY_LAYER = ["sliding_attention", "full_attention"] * 2

#: Every option that changes what happens between the layers, at a length where it matters (T > 5).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**COMMON, "scale_attn_by_inverse_layer_idx": True, "attn_pdrop": 0.1}),
    "llama": ("Llama", {**ROTARY, "attention_bias": True, "attention_dropout": 0.1}),
    "llama tied, scaled": (
        "Llama",
        {
            **ROTARY,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "mistral": ("Mistral", {**ROTARY, "sliding_window": 4}),
    "mistral without a window": ("Mistral", {**ROTARY, "sliding_window": None}),
    "qwen2": ("Qwen2", {**ROTARY, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {**ROTARY, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma": ("Gemma", GEMMA),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 4,
            "layer_types": BY_LAYER,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 7,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "sliding_window": 4,
            "layer_types": BY_LAYER,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
        },
    ),
}


def build(case: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The library's model with every parameter moved away from its initial value, in eval mode."""
    family, options = CASES[case]
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}{head}")(config(**{**options, **changes})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def batch(length: int = 11) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (3, length + 1), generator=draws)
    return ids[:, :-1], ids[:, 1:]


def reference(model: Any, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the library's own forward, and the gradient of its own backward."""
    loss = F.cross_entropy(model(input_ids=tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())
    named = dict(model.named_parameters())
    return loss.detach(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_equal_the_library(case: str) -> None:
    model = build(case)
    tokens, targets = batch()
    loss, grads = reference(model, tokens, targets)
    # Built a second time: the wrapped model shares nothing with the reference.
    decoder = wrap_causal_lm(build(case).train())
    assert check_decoder(decoder) is decoder
    assert list(grads) == [name for name, _ in decoder.named_parameters()]
    assert list(decoder.state_dict()) == list(model.state_dict())
    control = EPSettings(beta=1.0, rounds=0, precision="fp64")
    for gradient in (bp_gradient(decoder, tokens, targets), ep_gradient(decoder, tokens, targets, control)):
        assert abs(gradient.loss - loss.item()) < TOLERANCE * loss.item()
        worst = {name: relative(gradient.grads[name], grads[name]) for name in grads}
        assert max(worst.values()) < TOLERANCE, worst
        assert all(float(grad.norm()) > 1e-4 for grad in grads.values())


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_one_the_library_reports(case: str) -> None:
    tokens, targets = batch()
    ids = torch.cat((tokens, targets[:, -1:]), dim=1)
    theirs = build(case)(input_ids=ids, labels=ids, use_cache=False).loss.item()
    ours = bp_gradient(wrap_causal_lm(build(case)), tokens, targets).loss
    assert ours == pytest.approx(theirs, rel=3e-7)


@pytest.mark.parametrize("case", CASES)
def test_any_length_and_no_memory_of_other_lengths(case: str) -> None:
    model, decoder = build(case), wrap_causal_lm(build(case))
    tokens, _ = batch(CONTEXT)
    for length in (CONTEXT, 1, 6, CONTEXT):
        with torch.no_grad():
            expected = model(input_ids=tokens[:, :length], use_cache=False).logits
            found = decoder(tokens[:, :length])
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_an_equilibrium_gradient_points_along_backpropagation_in_every_block(case: str) -> None:
    decoder = wrap_causal_lm(build(case))
    tokens, targets = batch()
    settings = EPSettings(displacement=1e-4, rounds=1, nudge="positive", precision="fp64")
    ep, bp = ep_gradient(decoder, tokens, targets, settings), bp_gradient(decoder, tokens, targets)
    assert max(ep.diagnostics.displacement_ratio) == pytest.approx(1e-4, rel=0.2)
    names = {id(parameter): name for name, parameter in decoder.named_parameters()}
    for block in decoder.blocks:
        own = [names[id(parameter)] for parameter in block.parameters()]
        left, right = (torch.cat([g.grads[name].flatten() for name in own]) for g in (ep, bp))
        assert float(F.cosine_similarity(left, right, dim=0)) > 0.999
        assert not torch.equal(left, right)


def test_wrapping_shares_parameters_and_switches_dropout_off() -> None:
    model = build("gpt2").train()
    decoder = wrap_causal_lm(model)
    assert not any(module.training for module in decoder.modules())
    assert decoder.get_parameter("transformer.wte.weight") is model.lm_head.weight
    assert (decoder.vocab, decoder.context, decoder.family) == (VOCAB, CONTEXT, "gpt2")
    tokens, _ = batch()
    torch.testing.assert_close(decoder(tokens), decoder(tokens), rtol=0, atol=0)
    decoder.train()
    with pytest.raises(ConfigError, match="dropout is on"):
        bp_gradient(decoder, *batch())


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_text_that_does_not_fit_is_a_sentence(case: str) -> None:
    decoder = wrap_causal_lm(build(case))
    for length in (0, CONTEXT + 1):
        with pytest.raises(DataError, match=f"a text of {length} tokens does not fit .* 1 to {CONTEXT}"):
            decoder(torch.zeros(1, length, dtype=torch.int64))
    with pytest.raises(DataError, match=f"outside 0 … {VOCAB - 1}"):
        decoder(torch.full((1, 2), VOCAB))


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """A class of a supported name that does not come with the library."""


def opt() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 8}
    return transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=5, word_embed_proj_dim=8, **sizes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (opt, r"OPTForCausalLM is not supported .* LlamaForCausalLM \(llama\), .*Gemma3ForCausalLM"),
        (lambda: LlamaForCausalLM(build("llama").config), "LlamaForCausalLM is not supported"),
        (lambda: build("llama", torch.bfloat16), "bf16 displaced states round to exactly zero"),
        (lambda: build("gemma3", use_bidirectional_attention=True), "attends to later positions"),
        (lambda: build("llama", attn_implementation="flex_attention"), "by 'flex_attention': .* = 'sdpa'"),
        (
            lambda: build(
                "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}
            ),
            "rotary angles of the type 'dynamic'",
        ),
    ],
)
def test_what_cannot_be_a_decoder_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrap_causal_lm(make())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    build("llama tied, scaled", torch.float32).save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("case", ["gpt2", "llama", "llama tied, scaled", "gemma2", "gemma3"])
def test_a_saved_model_comes_back(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(case, torch.float32)
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    for dtype in (torch.float32, torch.float64):
        decoder = open_causal_lm(tmp_path, dtype)
        tokens, _ = batch()
        expected = model.to(dtype)(input_ids=tokens).logits
        torch.testing.assert_close(decoder(tokens), expected, rtol=1e-6, atol=1e-6)
        assert {parameter.dtype for parameter in decoder.parameters()} == {dtype}
    assert capsys.readouterr() == ("", "")


def test_half_precision_files_are_computed_in_float32(tmp_path: Path) -> None:
    exact = build("llama", torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    build("llama", torch.bfloat16).save_pretrained(tmp_path)
    save_file(
        {name: tensor.bfloat16() for name, tensor in exact.state_dict().items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    tokens, _ = batch()
    expected = exact(input_ids=tokens).logits
    torch.testing.assert_close(open_causal_lm(tmp_path)(tokens), expected, rtol=1e-6, atol=1e-6)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    no_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-40])


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), DataError, "is no Hugging Face folder"),
        (lambda folder: (folder / "config.json").write_text("{"), DataError, "config.json is no JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), DataError, "names no model_type"),
        (lambda folder: edit(folder, auto_map={"AutoModel": "x.Y"}), DataError, "never run"),
        (lambda folder: edit(folder, quantization_config={}), DataError, "quantised weights"),
        (lambda folder: edit(folder, model_type="mamba"), ConfigError, "'mamba' model, .* use one of GPT2"),
        (lambda folder: edit(folder, num_hidden_layers=5), DataError, "lack model.layers.4.*belongs to anot"),
        (lambda folder: edit(folder, num_hidden_layers=3), DataError, "hold, without a place .*layers.3"),
        (lambda folder: edit(folder, intermediate_size=32), DataError, "cannot be opened as a LlamaFor"),
        (lambda folder: edit(folder, hidden_size="wide"), DataError, "cannot be opened as a LlamaFor"),
        (no_weights, DataError, "cannot be opened as a LlamaForCausalLM"),
        (pickled, DataError, "cannot be opened as a LlamaForCausalLM"),
        (truncated, DataError, "cannot be opened as a LlamaForCausalLM"),
        (not_finite, DataError, "NaN or infinite values in model.norm.weight"),
    ],
)
def test_a_bad_folder_is_one_sentence(
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    error: type[Exception],
    words: str,
) -> None:
    damage(saved)
    capsys.readouterr()
    with pytest.raises(error, match=words) as caught:
        open_causal_lm(saved)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_folder_is_a_source(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    settings = ModelSettings(source=str(saved), context=8)
    assert parse_config({"source": str(saved), "context": 8}, ModelSettings, "x") == settings
    assert "width" not in to_toml(settings)
    assert "context = 8" in to_toml(settings)
    assert source_tokenizer(settings) == saved / "tokenizer.json"
    digest = hashlib.sha256(b"{}").hexdigest()
    opened = open_decoder(settings, VOCAB, {"tokenizer": digest}, dtype=torch.float64)
    assert isinstance(opened.decoder, HFDecoder)
    assert opened.decoder.get_parameter("model.norm.weight").dtype == torch.float64
    assert (opened.context, opened.tokenizer) == (8, saved / "tokenizer.json")
    assert opened.description.startswith(f"{saved}, llama, ")
    assert open_decoder(ModelSettings(source=str(saved)), VOCAB - 2, {}).context == CONTEXT
    with pytest.raises(DataError, match=r"another tokenizer: set data\.tokenizer = .*tokenizer\.json"):
        open_decoder(settings, VOCAB, {"tokenizer": "0" * 64})
    with pytest.raises(DataError, match=f"reads {VOCAB} tokens, but the data has {VOCAB + 1}"):
        open_decoder(settings, VOCAB + 1, {"tokenizer": digest})
    with pytest.raises(ConfigError, match=r"model\.context = 99 is more than the 16 positions"):
        open_decoder(ModelSettings(source=str(saved), context=99), VOCAB, {"tokenizer": digest})
    with pytest.raises(ConfigError, match="training starts from a shape or from run:DIR"):
        open_model(settings, VOCAB, {})


def test_a_shape_is_a_source_too(tmp_path: Path) -> None:
    opened = open_decoder(ModelSettings(layers=2, width=8, heads=2, context=4), 5, {}, seed=3)
    assert (opened.context, opened.tokenizer, opened.description) == (4, None, "fresh weights")
    assert len(opened.decoder.blocks) == 2
    assert source_tokenizer(ModelSettings()) is None
    for wrong in (
        {"arm": "ep"},
        {"source": "run:x", "context": 3},
        {"source": "x", "width": 8},
        {"source": "x", "arm": "ep"},
        {"source": ""},
    ):
        with pytest.raises(ConfigError, match=r"belongs to|comes from the source|source: give run:DIR"):
            parse_config(wrong, ModelSettings, "x")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Opening a folder sets two variables for good; the tests leave the environment as it was."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
