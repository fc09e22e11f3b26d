"""The layers of the pinned library's Qwen3.5 against plain loops in float64: parity with it means something.

A streamed model runs the library's own modules, so equality with the library shows nothing about them. Here
every part of the hybrid is written out once more from its formula: the gated delta rule token by token, the
(1 + w) norm, partial rotary angles, the gate on the attention output, grouped heads, the causal convolution.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy import ndarray
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as library

WIDTH, HEADS, KEY_HEADS, HEAD, ROTATED, THETA, EPS = 24, 4, 2, 16, 4, 1e4, 1e-6
LINEAR_KEYS, LINEAR_VALUES, LINEAR_HEAD, KERNEL = 2, 4, 8, 4
TOKENS = 9
TOLERANCE = 1e-5


@pytest.fixture
def config() -> Qwen3_5TextConfig:
    config = Qwen3_5TextConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        linear_num_key_heads=LINEAR_KEYS,
        linear_num_value_heads=LINEAR_VALUES,
        linear_key_head_dim=LINEAR_HEAD,
        linear_value_head_dim=LINEAR_HEAD,
        linear_conv_kernel_dim=KERNEL,
        rms_norm_eps=EPS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": ROTATED / HEAD,
            "mrope_section": [1, 1, 0],
        },
    )
    config._attn_implementation = "sdpa"
    return config


def random_weights(module: torch.nn.Module, seed: int) -> dict[str, ndarray]:
    """Fill ``module`` with values that make every factor visible, and return them in float64."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.4)
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


def sample(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(theirs: torch.Tensor, ours: ndarray, tolerance: float = TOLERANCE) -> None:
    found = theirs.detach().double().numpy()
    assert found.shape == ours.shape
    assert np.abs(found - ours).max() <= tolerance * np.abs(ours).max()


def sigmoid(x: ndarray) -> ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: ndarray) -> ndarray:
    return x * sigmoid(x)


def norm(x: ndarray, factor: ndarray) -> ndarray:
    """x over its root mean square along the last dimension, times ``factor``."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * factor


def rotated(x: ndarray, position: int) -> ndarray:
    """One head's vector, its first ROTATED channels turned in pairs (i, i + R/2); the others pass."""
    out = x.copy()
    for i in range(ROTATED // 2):
        angle = position * THETA ** (-2.0 * i / ROTATED)
        a, b = x[i], x[i + ROTATED // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + ROTATED // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def delta_rule(q: ndarray, k: ndarray, v: ndarray, log_decay: ndarray, beta: ndarray) -> ndarray:
    """The gated delta rule of one head, token by token: S ← e^g S, S ← S + k ⊗ β(v − Sᵀk), o = Sᵀq.

    Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464); q and k of unit length, q over √d besides.
    """
    state = np.zeros((k.shape[1], v.shape[1]))
    out = np.zeros_like(v)
    for t in range(len(q)):
        query = q[t] / np.sqrt((q[t] ** 2).sum() + 1e-6) / math.sqrt(q.shape[1])
        key = k[t] / np.sqrt((k[t] ** 2).sum() + 1e-6)
        state = state * math.exp(log_decay[t])
        state = state + np.outer(key, beta[t] * (v[t] - state.T @ key))
        out[t] = state.T @ query
    return out


def convolved(x: ndarray, weights: ndarray) -> ndarray:
    """``x (T, C)`` with one filter per channel over this token and the KERNEL − 1 before it, then SiLU."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(KERNEL, t + 1)):
            out[t] += weights[:, KERNEL - 1 - back] * x[t - back]
    return silu(out)


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_gated_delta_rule_is_its_recurrence(form: str) -> None:
    # Longer than one chunk of 64, with decays from hardly any to strong, and two value heads to a key head.
    length = 70
    q, k = (sample(1, length, LINEAR_KEYS, LINEAR_HEAD, seed=seed) for seed in (1, 2))
    v = sample(1, length, LINEAR_VALUES, LINEAR_HEAD, seed=3)
    decay = -torch.nn.functional.softplus(sample(1, length, LINEAR_VALUES, seed=4) * 3 - 2)
    beta = sample(1, length, LINEAR_VALUES, seed=5).sigmoid()
    out, _ = getattr(library, form)(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    doubles = [x[0].double().numpy() for x in (q, k, v, decay, beta)]
    expected = np.stack(
        [
            delta_rule(
                doubles[0][:, head // 2], doubles[1][:, head // 2], doubles[2][:, head],
                doubles[3][:, head], doubles[4][:, head],
            )
            for head in range(LINEAR_VALUES)
        ],
        axis=1,
    )  # fmt: skip
    agree(out[0], expected)


def test_the_norm_multiplies_by_one_plus_its_weight() -> None:
    module = library.Qwen3_5RMSNorm(WIDTH, eps=EPS)
    weights = random_weights(module, 1)
    x = sample(3, WIDTH, seed=2)
    agree(module(x), norm(x.double().numpy(), 1.0 + weights["weight"]))


def test_the_gated_norm_multiplies_by_its_weight_and_the_silu_of_the_gate() -> None:
    module = library.Qwen3_5RMSNormGated(LINEAR_HEAD, eps=EPS)
    weights = random_weights(module, 1)
    x, gate = sample(5, LINEAR_HEAD, seed=2), sample(5, LINEAR_HEAD, seed=3)
    agree(module(x, gate), norm(x.double().numpy(), weights["weight"]) * silu(gate.double().numpy()))


def test_rotary_angles_turn_the_first_quarter_of_a_head(config: Qwen3_5TextConfig) -> None:
    x = sample(1, HEADS, TOKENS, HEAD, seed=1)
    positions = torch.arange(TOKENS)[None]
    cos, sin = library.Qwen3_5TextRotaryEmbedding(config)(x, positions)
    turned, _ = library.apply_rotary_pos_emb(x, x, cos, sin)
    doubles = x[0].double().numpy()
    expected = np.stack([[rotated(head[t], t) for t in range(TOKENS)] for head in doubles])
    agree(turned[0], expected)
    torch.testing.assert_close(turned[..., ROTATED:], x[..., ROTATED:], rtol=0, atol=0)
    assert not torch.allclose(turned[0, :, 5, :ROTATED], x[0, :, 5, :ROTATED], atol=0.1)


def test_attention_groups_heads_and_gates_its_output(config: Qwen3_5TextConfig) -> None:
    module = library.Qwen3_5Attention(config, layer_idx=3).eval()
    weights = random_weights(module, 1)
    h = sample(1, TOKENS, WIDTH, seed=2)
    angles = library.Qwen3_5TextRotaryEmbedding(config)(h, torch.arange(TOKENS)[None])
    with torch.no_grad():
        out, _ = module(h, position_embeddings=angles, attention_mask=None)
    x = h[0].double().numpy()
    # Each query head has HEAD rows of query and then HEAD rows of gate.
    both = (x @ weights["q_proj.weight"].T).reshape(TOKENS, HEADS, 2, HEAD)
    keys = (x @ weights["k_proj.weight"].T).reshape(TOKENS, KEY_HEADS, HEAD)
    values = (x @ weights["v_proj.weight"].T).reshape(TOKENS, KEY_HEADS, HEAD)
    mixed = np.zeros((TOKENS, HEADS, HEAD))
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        for t in range(TOKENS):
            query = rotated(norm(both[t, head, 0], 1.0 + weights["q_norm.weight"]), t)
            scores = np.array(
                [
                    query @ rotated(norm(keys[s, shared], 1.0 + weights["k_norm.weight"]), s)
                    for s in range(t + 1)
                ]
            ) / math.sqrt(HEAD)
            share = np.exp(scores - scores.max())
            share /= share.sum()
            mixed[t, head] = sum(share[s] * values[s, shared] for s in range(t + 1))
            mixed[t, head] *= sigmoid(both[t, head, 1])
    agree(out[0], mixed.reshape(TOKENS, -1) @ weights["o_proj.weight"].T)


def test_the_convolution_is_causal_depthwise_and_silu() -> None:
    channels = 6
    x, filters = sample(1, channels, TOKENS, seed=1), sample(channels, KERNEL, seed=2)
    out = library.causal_conv1d_fn(x, filters, None, activation="silu")
    agree(out[0].T, convolved(x[0].T.double().numpy(), filters.double().numpy()))


def test_linear_attention_is_its_parts_put_together(config: Qwen3_5TextConfig) -> None:
    module = library.Qwen3_5GatedDeltaNet(config, layer_idx=0).eval()
    weights = random_weights(module, 1)
    h = sample(1, TOKENS, WIDTH, seed=2)
    with torch.no_grad():
        out = module(h)
    x = h[0].double().numpy()
    mixed = convolved(x @ weights["in_proj_qkv.weight"].T, weights["conv1d.weight"][:, 0])
    wide = LINEAR_KEYS * LINEAR_HEAD
    q = mixed[:, :wide].reshape(TOKENS, LINEAR_KEYS, LINEAR_HEAD)
    k = mixed[:, wide : 2 * wide].reshape(TOKENS, LINEAR_KEYS, LINEAR_HEAD)
    v = mixed[:, 2 * wide :].reshape(TOKENS, LINEAR_VALUES, LINEAR_HEAD)
    beta = sigmoid(x @ weights["in_proj_b.weight"].T)
    step = np.log1p(np.exp(x @ weights["in_proj_a.weight"].T + weights["dt_bias"]))
    decay = -np.exp(weights["A_log"]) * step
    gate = (x @ weights["in_proj_z.weight"].T).reshape(TOKENS, LINEAR_VALUES, LINEAR_HEAD)
    heads = []
    for head in range(LINEAR_VALUES):
        shared = head // (LINEAR_VALUES // LINEAR_KEYS)
        read = delta_rule(q[:, shared], k[:, shared], v[:, head], decay[:, head], beta[:, head])
        heads.append(norm(read, weights["norm.weight"]) * silu(gate[:, head]))
    agree(out[0], np.stack(heads, axis=1).reshape(TOKENS, -1) @ weights["out_proj.weight"].T)
