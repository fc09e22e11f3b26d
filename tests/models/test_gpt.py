"""GPT: parity with two independent implementations in float64, its initial weights, and what it refuses."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinscope.lab.config import parse_config
from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.gpt import GPT, GPTConfig, build_gpt

# The reference models must come from the installed package alone: no kernels or files from a hub.
os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL: dict[str, Any] = {"vocab": 23, "layers": 3, "width": 24, "heads": 4, "context": 12}
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu"}
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def llama_in_float64(monkeypatch: pytest.MonkeyPatch, transformers: Any) -> None:
    """Llama's own code with its casts to float32 (norms, angles, eager softmax) widened to float64."""

    class Widened:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "torch", Widened())


def strewn(config: GPTConfig, seed: int = 5) -> GPT:
    """A float64 model whose every parameter matters: gains, biases, and attention far from uniform."""
    model = build_gpt(config, seed, dtype=torch.float64)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return model


def batch(config: GPTConfig, length: int | None = None) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(11)
    shape = (3, length or config.context)
    return tuple(torch.randint(0, config.vocab, shape, generator=draws) for _ in range(2))  # type: ignore[return-value]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def as_gpt2(own: dict[str, Tensor], _: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Our weights (or gradients) under GPT-2's names; its projections are stored transposed."""
    stems = {
        "tok": "wte",
        "pos": "wpe",
        "norm": "ln_f",
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for name, tensor in own.items():
        if name == "head.weight":
            yield "lm_head.weight", tensor
            continue
        stem, _dot, kind = name.rpartition(".")
        prefix = "transformer."
        if stem.startswith("blocks."):
            _blocks, layer, stem = stem.split(".", 2)
            prefix = f"transformer.h.{layer}."
        turned = kind == "weight" and stem.startswith(("attn.", "mlp."))
        yield f"{prefix}{stems[stem]}.{kind}", tensor.T if turned else tensor


def as_llama(own: dict[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Our weights (or gradients) under Llama's names; the stacked projections come apart."""
    query, key = config.heads * config.head_width, config.key_heads * config.head_width
    outside = {"tok.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    stems = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.out": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
    }
    for name, tensor in own.items():
        if not name.startswith("blocks."):
            yield outside.get(name, "lm_head.weight"), tensor
            continue
        _blocks, layer, rest = name.split(".", 2)
        stem, _dot, kind = rest.rpartition(".")
        if stem == "attn.qkv":
            for part, rows in zip("qkv", tensor.split((query, key, key)), strict=True):
                yield f"model.layers.{layer}.self_attn.{part}_proj.{kind}", rows
        elif stem == "mlp.gate_up":
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"model.layers.{layer}.mlp.{part}_proj.{kind}", rows
        else:
            yield f"model.layers.{layer}.{stems[stem]}.{kind}", tensor


def gpt2(transformers: Any, config: GPTConfig, attention: str) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.mlp_hidden,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=config.tied,
            attn_implementation=attention,
        )
    ).to(torch.float64)


def llama(transformers: Any, config: GPTConfig, attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            max_position_embeddings=config.context,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=config.biased,
            mlp_bias=config.biased,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=config.tied,
            attn_implementation=attention,
        )
    ).to(torch.float64)


Renaming = Callable[[dict[str, Tensor], GPTConfig], Iterator[tuple[str, Tensor]]]


def assert_parity(model: GPT, reference: nn.Module, renamed: Renaming, tolerance: float = TOLERANCE) -> None:
    """Same weights, same batch: logits, loss and every parameter's gradient agree to ``tolerance``."""
    theirs = dict(reference.named_parameters())
    ours = dict(renamed({name: p.detach() for name, p in model.named_parameters()}, model.config))
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            assert parameter.shape == ours[name].shape
            parameter.copy_(ours[name])

    tokens, targets = batch(model.config)
    logits = model(tokens)
    expected = reference(input_ids=tokens, use_cache=False).logits
    assert expected.dtype == torch.float64
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)

    own_grads = torch.autograd.grad(summed_loss(logits, targets), list(model.parameters()))
    their_grads = torch.autograd.grad(summed_loss(expected, targets), list(theirs.values()))
    named = dict(zip(dict(model.named_parameters()), own_grads, strict=True))
    gradients = dict(renamed(named, model.config))
    for name, gradient in zip(theirs, their_grads, strict=True):
        assert gradient.abs().max() > 1e-2, f"{name}: too small a gradient to compare"
        torch.testing.assert_close(
            gradients[name], gradient, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mlp_hidden", [None, 20])
def test_parity_with_gpt2(transformers: Any, attention: str, tied: bool, mlp_hidden: int | None) -> None:
    config = GPTConfig(**SMALL, tied=tied, mlp_hidden=mlp_hidden, norm_eps=1e-3)
    assert_parity(strewn(config), gpt2(transformers, config, attention), as_gpt2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tied": True, "kv_heads": 2},
        {"kv_heads": 1, "rope_theta": 50.0, "norm_eps": 1e-3},
        {"bias": True, "kv_heads": 2, "mlp_hidden": 20},
    ],
)
@pytest.mark.usefixtures("llama_in_float64")
def test_parity_with_llama(transformers: Any, attention: str, extra: dict[str, Any]) -> None:
    config = GPTConfig(**SMALL, **LLAMA, **extra)
    assert_parity(strewn(config), llama(transformers, config, attention), as_llama)


def test_parity_with_llama_as_it_is(transformers: Any) -> None:
    config = GPTConfig(**SMALL, **LLAMA, kv_heads=2)
    # Its norms and angles round to float32 whatever the model's dtype: 1e-7, times gradients of order 10.
    assert_parity(strewn(config), llama(transformers, config, "sdpa"), as_llama, tolerance=5e-4)


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    config = GPTConfig(**{**SMALL, "layers": 1}, **LLAMA, rope_theta=100.0)
    rotary = build_gpt(config, dtype=torch.float64).get_submodule("blocks.0.attn.rotary")
    x = torch.randn(2, 12, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotary(x)
    for t in (0, 1, 11):
        for i in range(3):
            pair = torch.complex(x[:, t, :, i], x[:, t, :, i + 3])
            angle = t * 100.0 ** (-2 * i / 6)
            pair = pair * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(turned[:, t, :, i], pair.real, rtol=0, atol=1e-14)
            torch.testing.assert_close(turned[:, t, :, i + 3], pair.imag, rtol=0, atol=1e-14)


@pytest.mark.parametrize("extra", [{}, {**LLAMA, "kv_heads": 2}])
def test_a_position_sees_itself_and_what_came_before(extra: dict[str, Any]) -> None:
    model = strewn(GPTConfig(**SMALL, **extra))
    tokens, _ = batch(model.config)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.config.vocab
    with torch.no_grad():
        before, after, short = model(tokens), model(changed), model(tokens[:, :7])
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before - after).abs().amax(-1)[:, 7:] > 1e-6).all()
    torch.testing.assert_close(short, before[:, :7], rtol=0, atol=1e-12)


@pytest.mark.parametrize("extra", [{}, {**LLAMA, "tied": True}])
def test_a_forward_pass_leaves_nothing_behind(extra: dict[str, Any]) -> None:
    model = strewn(GPTConfig(**SMALL, **extra))
    tokens, _ = batch(model.config)

    def trace() -> list[tuple[str, list[str], list[tuple[int, int]]]]:
        return [
            (name, sorted(vars(m)), [(id(t), t._version) for t in (*m.parameters(), *m.buffers())])
            for name, m in model.named_modules()
        ]

    before = trace()
    first = model(tokens)
    summed_loss(first, tokens).backward()
    model.zero_grad(set_to_none=True)
    assert trace() == before
    assert torch.equal(model(tokens), first)


def test_parameter_names_and_shapes() -> None:
    model = build_gpt(GPTConfig(vocab=96, layers=4, width=128, heads=4, context=64, tied=False), seed=0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(shapes) == [
        "tok.weight",
        "pos.weight",
        *(
            f"blocks.{layer}.{part}.{kind}"
            for layer in range(4)
            for part in ("attn_norm", "attn.qkv", "attn.out", "mlp_norm", "mlp.up", "mlp.down")
            for kind in ("weight", "bias")
        ),
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
    assert shapes["blocks.2.attn.qkv.weight"] == (384, 128)
    assert shapes["blocks.2.mlp.up.weight"] == (512, 128)
    assert model(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 64, 96)

    model = build_gpt(
        GPTConfig(vocab=96, layers=1, width=128, heads=4, context=64, tied=True, **LLAMA, kv_heads=2)
    )
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "tok.weight": (96, 128),
        "blocks.0.attn_norm.weight": (128,),
        "blocks.0.attn.qkv.weight": (256, 128),
        "blocks.0.attn.out.weight": (128, 128),
        "blocks.0.mlp_norm.weight": (128,),
        "blocks.0.mlp.gate_up.weight": (688, 128),
        "blocks.0.mlp.down.weight": (128, 344),
        "norm.weight": (128,),
    }
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_initial_weights() -> None:
    config = GPTConfig(vocab=300, layers=8, width=128, heads=4, context=200, bias=True)
    for name, parameter in build_gpt(config, seed=4).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            wanted = 0.02 / 4 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            # Five standard errors of a standard deviation and of a mean, from at least 16,384 draws.
            count = parameter.numel()
            assert abs(parameter.std().item() / wanted - 1) < 5 / math.sqrt(2 * count), name
            assert abs(parameter.mean().item()) < 5 * wanted / math.sqrt(count), name


@pytest.mark.parametrize("extra", [{}, {**LLAMA, "kv_heads": 2}])
def test_weights_are_a_function_of_config_and_seed(extra: dict[str, Any]) -> None:
    config = GPTConfig(**SMALL, **extra)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = build_gpt(config, seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other, double = (
        build_gpt(config, 9),
        build_gpt(config, 10),
        build_gpt(config, 9, dtype=torch.float64),
    )
    for name, parameter in one.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
        assert torch.equal(double.get_parameter(name), parameter.double())
        if parameter.dim() > 1:
            assert not torch.equal(other.get_parameter(name), parameter)
    # Equal shapes must not get equal draws.
    first, second = (one.get_parameter(f"blocks.{layer}.attn.qkv.weight") for layer in (0, 1))
    assert not torch.equal(first, second)


def test_a_model_cast_up_computes_what_one_built_there_computes() -> None:
    config = GPTConfig(**SMALL, **LLAMA)
    tokens, _ = batch(config)
    cast = copy.deepcopy(build_gpt(config, seed=2)).double()
    assert torch.equal(cast(tokens), build_gpt(config, seed=2, dtype=torch.float64)(tokens))


@pytest.mark.parametrize("extra", [{}, LLAMA])
def test_float32_and_autocast_stay_near_float64(extra: dict[str, Any]) -> None:
    exact = strewn(GPTConfig(**SMALL, **extra))
    tokens, _ = batch(exact.config)
    single = copy.deepcopy(exact).float()
    with torch.no_grad():
        expected = exact(tokens)
        torch.testing.assert_close(single(tokens).double(), expected, rtol=0, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = single.embed(tokens)
            for block in single.blocks:
                z = block(z)
            logits = single.readout(z)
    # The residual stream stays in float32: only products inside a branch are rounded to bfloat16.
    assert z.dtype == torch.float32
    error = (logits.double() - expected).norm() / expected.norm()
    assert 1e-4 < error < 3e-2


def test_two_spellings_of_one_shape_are_one_model() -> None:
    tokens, _ = batch(GPTConfig(**SMALL))
    short = build_gpt(GPTConfig(**SMALL), 1)
    spelled = build_gpt(GPTConfig(**SMALL, bias=True, mlp_hidden=96, kv_heads=4), 1)
    assert torch.equal(short(tokens), spelled(tokens))
    assert GPTConfig(**SMALL, mlp="swiglu").hidden == 64
    assert GPTConfig(**{**SMALL, "width": 128}, mlp="swiglu").hidden == 344
    assert not GPTConfig(**SMALL, norm="rmsnorm").biased
    # Four projections in each of three blocks; LayerNorm adds two a block and the last.
    for norm, biases in (("layernorm", 12 + 7), ("rmsnorm", 12)):
        shape = {**SMALL, "norm": norm}
        names = dict(build_gpt(GPTConfig(**shape, bias=True)).named_parameters())
        assert sum(name.endswith("bias") for name in names) == biases
        names = dict(build_gpt(GPTConfig(**shape, bias=False)).named_parameters())
        assert not any(name.endswith("bias") for name in names)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 25}, "model: width 25 does not split evenly over 4 heads: make width a multiple of heads"),
        ({"kv_heads": 3}, "model: 4 heads do not split evenly over 3 key/value heads"),
        ({"kv_heads": 8}, "model: 4 heads do not split evenly over 8 key/value heads"),
        (
            {"width": 20, "positions": "rotary"},
            r"a head has 5 \(width 20 / heads 4\): make width / heads even",
        ),
        ({"layers": 0}, "'layers' = 0 is refused: input should be greater than 0"),
        ({"heads": -4}, "'heads' = -4 is refused: input should be greater than 0"),
        ({"vocab": 0}, "'vocab' = 0 is refused"),
        ({"context": 1.5}, "'context' = 1.5 is refused"),
        ({"norm_eps": 0.0}, "'norm_eps' = 0.0 is refused"),
        ({"rope_theta": float("inf")}, "'rope_theta' = inf is refused"),
        ({"positions": "alibi"}, "'positions' = 'alibi' is refused"),
        ({"head": 4}, r"unknown key 'head' \(did you mean 'heads'\?\)"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({**SMALL, **change}, GPTConfig, "model")


@pytest.mark.parametrize("extra", [{}, LLAMA])
def test_tokens_that_do_not_fit_are_refused(extra: dict[str, Any]) -> None:
    model = build_gpt(GPTConfig(**SMALL, **extra))
    for length in (0, 13):
        with pytest.raises(DataError, match=f"a text of {length} tokens does not fit .* reads 1 to 12"):
            model(torch.zeros(1, length, dtype=torch.int64))
    for outside in (-1, 23):
        with pytest.raises(DataError, match=r"outside 0 … 22, the vocabulary"):
            model(torch.full((1, 4), outside))
