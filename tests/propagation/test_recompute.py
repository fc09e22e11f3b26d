"""Graphs that are made again when their turn comes: the same gradient, less memory, exactly measured."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.cost.peak_memory import observe, peak
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings

LEARNED = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "tied": True}
ROTARY = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "kv_heads": 1}
TOKENS, WIDTH = 2 * 64, 64
#: Bytes of one state (B, T, C).
STATE = 4 * TOKENS * WIDTH
#: States' worth that the graph of one block with GELU and 4C hidden units keeps beside its input, LayerNorm's
#: two statistics and the attention's logarithms left out: the two norms' outputs, q, k, v, the attention's
#: output, the stream between the branches, the hidden layer before and after GELU.
GRAPH = 2 + 3 + 1 + 1 + 4 + 4
#: Without weights, what only their gradients need falls away: both norms' outputs and GELU's.
FORCES_GRAPH = GRAPH - 2 - 4


def decoder(options, layers=3, dtype=torch.float32):
    return build_gpt(GPTConfig(vocab=31, layers=layers, width=16, heads=2, context=16, **options), 0, dtype)


def batch(rows=3, length=16):
    return torch.randint(31, (2, rows, length), generator=torch.Generator().manual_seed(1))


def assert_same(found, expected):
    assert found.loss == expected.loss
    assert found.diagnostics == expected.diagnostics
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name


@pytest.mark.parametrize("options", [LEARNED, ROTARY])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "amp"])
def test_the_gradient_is_the_same_bit_for_bit(options, precision):
    model = decoder(options, dtype=torch.float64 if precision == "fp64" else torch.float32)
    tokens, targets = batch()
    for rounds, fused, nudge, read, damping, diagnose in itertools.product(
        (0, 2), (True, False), ("positive", "symmetric"), ("linear", "energy"), (1.0, 0.7), (True, False)
    ):
        if read == "energy" and (fused or damping < 1 or rounds == 0):
            continue
        settings = EPSettings(
            rounds=rounds, fused=fused, nudge=nudge, read=read, damping=damping, precision=precision
        )
        again = settings.model_copy(update={"recompute": True})
        expected = ep_gradient(model, tokens, targets, settings, diagnose=diagnose)
        assert_same(ep_gradient(model, tokens, targets, again, diagnose=diagnose), expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_few_blocks_are_no_special_case(layers):
    model = decoder(LEARNED, layers)
    tokens, targets = batch()
    for rounds, fused in itertools.product((1, 2), (True, False)):
        settings = EPSettings(rounds=rounds, fused=fused, nudge="symmetric")
        again = settings.model_copy(update={"recompute": True})
        expected = ep_gradient(model, tokens, targets, settings)
        assert_same(ep_gradient(model, tokens, targets, again), expected)


@pytest.mark.parametrize("options", [LEARNED, ROTARY])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "amp"])
def test_checkpointed_backpropagation_is_the_same_bit_for_bit(options, precision):
    model = decoder(options, dtype=torch.float64 if precision == "fp64" else torch.float32)
    tokens, targets = batch()
    expected = bp_gradient(model, tokens, targets, precision=precision)
    assert_same(bp_gradient(model, tokens, targets, precision=precision, recompute=True), expected)


def test_frozen_parameters_stay_without_gradient():
    model = decoder(LEARNED)
    tokens, targets = batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1." not in name and "mlp.up" not in name)
    for fused in (True, False):
        settings = EPSettings(rounds=2, fused=fused)
        again = settings.model_copy(update={"recompute": True})
        expected = ep_gradient(model, tokens, targets, settings)
        assert not any("blocks.1." in name for name in expected.grads)
        assert_same(ep_gradient(model, tokens, targets, again), expected)


@cache
def activations(layers: int, rule: str, **settings) -> int:
    """Peak bytes of what one gradient holds at once, the gradients it returns left out."""
    shape = GPTConfig(vocab=16, layers=layers, width=WIDTH, heads=2, context=64)
    model = build_gpt(shape)
    tokens, targets = torch.randint(16, (2, 2, 64), generator=torch.Generator().manual_seed(0))

    def gradient():
        if rule == "bp":
            return bp_gradient(model, tokens, targets, **settings)
        chosen = EPSettings(nudge="positive", **settings)
        return ep_gradient(model, tokens, targets, chosen, diagnose=False)

    gradient()
    events, found = observe(gradient, torch.device("cpu"))
    return peak(events, {grad.untyped_storage().data_ptr() for grad in found.grads.values()})


def growth(rule: str, **settings) -> float:
    """States' worth of memory that one block more takes."""
    few, many = (activations(layers, rule, **settings) for layers in (12, 16))
    return (many - few) / 4 / STATE


def test_what_a_block_more_takes_is_what_the_method_says():
    # LayerNorm's statistics and the attention's logarithms are 4 + 2 numbers a token, of 64 a state.
    small = (4 + 2) / WIDTH
    graph = pytest.approx(1 + GRAPH + small, abs=0.02)
    # Backpropagation: a state and the graph. EP holds no more at its peak, when all blocks are rebuilt.
    assert growth("bp") == graph
    assert growth("ep", rounds=1, fused=True) == graph
    # An unfused read follows the rebuild at once: graphs for forces alone are the most that stands.
    assert growth("ep", rounds=3, fused=False) == pytest.approx(1 + FORCES_GRAPH + small, abs=0.02)
    # Checkpoints: a state. EP that recomputes: a state and an adjoint. No graph in either.
    assert growth("bp", recompute=True) == pytest.approx(1, abs=0.01)
    for rounds, fused in ((1, True), (3, False)):
        assert growth("ep", rounds=rounds, fused=fused, recompute=True) == pytest.approx(2, abs=0.01)


def test_the_activation_peak_at_twelve_blocks():
    whole, checkpoints = activations(12, "bp"), activations(12, "bp", recompute=True)
    assert whole > 12 * (1 + GRAPH) * STATE
    assert activations(12, "ep", rounds=1, fused=True) < 1.05 * whole
    assert activations(12, "ep", rounds=3, fused=False) < 0.75 * whole
    # One block's graph and what its backward needs stand beside states and adjoints.
    block = (GRAPH + 9) * STATE
    assert checkpoints < 13 * STATE + block
    for rounds, fused in ((1, True), (3, False)):
        again = activations(12, "ep", rounds=rounds, fused=fused, recompute=True)
        assert again < (13 + 12) * STATE + block
        assert again < 0.35 * whole
