"""Muon and AdamW against closed forms, hand-written float64 references and torch's own Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from twinscope.lab.errors import DataError
from twinscope.models.gpt import GPT, GPTConfig, build_gpt
from twinscope.models.weights import load_tensors, save_tensors
from twinscope.propagation import optimizers
from twinscope.propagation.optimizers import (
    DEFAULT_ADAMW_LR,
    Optimizer,
    build_optimizer,
    learning_rate,
    newton_schulz_dtype,
    newton_schulz_flops,
    orthogonalize,
)
from twinscope.propagation.settings import OptimizerSettings

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = [(6, 6), (12, 5), (5, 12), (1, 7), (40, 3)]
#: Blocks with square, tall and wide matrices, vectors, and every kind of parameter outside of the blocks.
CONFIG = GPTConfig(vocab=11, layers=2, width=8, heads=2, context=6)


def model_of(dtype: torch.dtype, seed: int = 0) -> GPT:
    return build_gpt(CONFIG, seed, dtype)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    rng = np.random.default_rng([7, step])
    return {
        name: torch.from_numpy(rng.normal(size=tuple(p.shape))).to(p.dtype)
        for name, p in model.named_parameters()
    }


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_muons(name: str, tensor: Tensor) -> bool:
    return name.startswith("blocks.") and tensor.dim() == 2


def flat_settings(**changes: object) -> OptimizerSettings:
    """A constant rate, no decay and no clipping unless said."""
    plain = {"warmup": 0, "final_lr_fraction": 1.0, "weight_decay": 0.0, "clip": None}
    return OptimizerSettings.model_validate(plain | changes)


def by_singular_values(matrix: np.ndarray) -> np.ndarray:
    """The polynomial on the singular values of the normalised matrix, in float64."""
    u, s, vt = np.linalg.svd(np.asarray(matrix, dtype=np.float64), full_matrices=False)
    s = s / max(float(np.sqrt((s**2).sum())), 1e-7)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return u * s @ vt


# Newton–Schulz


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalize_is_the_polynomial_on_singular_values(shape: tuple[int, int]) -> None:
    batch = np.random.default_rng(0).normal(size=(3, *shape)) * 10.0 ** np.arange(-3, 3, 2)[:, None, None]
    found = orthogonalize(torch.from_numpy(batch))
    assert found.shape == batch.shape
    for matrix, result in zip(batch, found.numpy(), strict=True):
        np.testing.assert_allclose(result, by_singular_values(matrix), rtol=0, atol=1e-12)


def test_orthogonalize_brings_singular_values_into_the_band() -> None:
    rng = np.random.default_rng(1)
    u, _ = np.linalg.qr(rng.normal(size=(60, 12)))
    v, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    s = np.geomspace(0.003, 1, 12)  # over a norm of about 1.2, so at least 0.002 after normalisation
    found = np.linalg.svd(orthogonalize(torch.from_numpy(u * s @ v.T)).numpy(), compute_uv=False)
    assert 0.68 < found.min() < 0.8
    assert 1.0 < found.max() < 1.21


def test_orthogonalize_in_float32_differs_from_float64_by_rounding_only() -> None:
    matrix = torch.from_numpy(np.random.default_rng(2).normal(size=(48, 32)))
    exact = orthogonalize(matrix)
    single = orthogonalize(matrix.float())
    assert single.dtype == torch.float32
    error = float((single.double() - exact).norm() / exact.norm())
    assert 1e-9 < error < 3e-6
    # A dtype that is asked for is computed in, and the result comes back in the matrix's own.
    asked = orthogonalize(matrix, torch.float32)
    assert asked.dtype == torch.float64
    assert float((asked - single.double()).norm() / exact.norm()) < 3e-6
    assert float((asked - exact).norm() / exact.norm()) > 1e-9
    assert float((orthogonalize(matrix.float(), torch.float64).double() - exact).norm()) < 1e-5


def test_orthogonalize_of_a_wide_matrix_is_that_of_its_transpose_exactly() -> None:
    matrix = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonalize(matrix.mT), orthogonalize(matrix).mT)


def test_orthogonalize_leaves_zero_at_zero_and_its_argument_alone() -> None:
    assert torch.equal(orthogonalize(torch.zeros(4, 3)), torch.zeros(4, 3))
    matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    orthogonalize(matrix)
    assert torch.equal(matrix, before)
    # Below the smallest norm the division is by 1e-7: to first order a^5 remains.
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(1e-12 * identity), A**5 * 1e-5 * identity, rtol=1e-4, atol=0)


def test_a_cpu_never_iterates_in_bfloat16() -> None:
    assert newton_schulz_dtype(torch.zeros(2, 2)) == torch.float32
    assert newton_schulz_dtype(torch.zeros(2, 2, dtype=torch.float64)) == torch.float64


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_the_dispatcher_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    assert counter.get_total_flops() == 3 * newton_schulz_flops(*shape)


# Muon


@pytest.fixture
def _torch_muon_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_precision(grad: Tensor, coefficients: object, steps: int, eps: float) -> Tensor:
        assert (coefficients, steps, eps) == ((A, B, C), 5, 1e-7)
        return torch.from_numpy(by_singular_values(grad.numpy())).to(grad.dtype)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", full_precision)


@pytest.mark.usefixtures("_torch_muon_in_full_precision")
@pytest.mark.parametrize("batch_elements", [1, 2**18])  # in pairs, all of one shape together
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_muon_takes_the_steps_of_torch_muon(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, batch_elements: int
) -> None:
    monkeypatch.setattr(optimizers, "_BATCH_ELEMENTS", batch_elements)
    model, peer = model_of(dtype), model_of(dtype)
    settings = flat_settings(
        kind="muon", lr=0.02, adamw_lr=0.005, weight_decay=0.3, warmup=3, momentum=0.9, final_lr_fraction=0.1
    )
    ours = build_optimizer(model, settings, horizon=20)
    matrices = [p for name, p in peer.named_parameters() if is_muons(name, p)]
    theirs = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=True)
    for step in range(6):
        grads = gradients(model, step)
        ours.step(grads, step)
        for name, p in peer.named_parameters():
            p.grad = grads[name]
        theirs.param_groups[0]["lr"] = learning_rate(settings, 20, step)
        theirs.step()
    expected = dict(peer.named_parameters())
    compared = 0
    for name, p in model.named_parameters():
        if is_muons(name, p):
            torch.testing.assert_close(p, expected[name], rtol=0, atol=tolerance)
            compared += 1
    assert compared == 8


def test_muon_takes_exactly_the_matrices_of_the_blocks() -> None:
    model = model_of(torch.float32)
    state = build_optimizer(model, flat_settings(kind="muon"), 10).state()
    muons = {name.removeprefix("muon.momentum.") for name in state if name.startswith("muon.")}
    of_a_block = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert muons == {f"blocks.{block}.{name}.weight" for block in range(2) for name in of_a_block}
    others = {name for name, _ in model.named_parameters()} - muons
    assert {name for name in state if not name.startswith("muon.")} == {
        f"adamw.{moment}.{name}" for name in others for moment in ("step", "exp_avg", "exp_avg_sq")
    }
    alone = build_optimizer(model, flat_settings(kind="adamw"), 10).state()
    assert len(alone) == 3 * len(list(model.named_parameters()))


# AdamW


def adamw_reference(
    start: np.ndarray, grads: list[np.ndarray], rates: list[float], decay: float, settings: OptimizerSettings
) -> np.ndarray:
    """Loshchilov & Hutter 2019, algorithm 2 with the rate as the schedule, in float64."""
    beta1, beta2 = settings.betas
    theta, mean, square = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad**2
        corrected = (mean / (1 - beta1**t)) / (np.sqrt(square / (1 - beta2**t)) + settings.eps)
        theta = theta - rate * decay * theta - rate * corrected
    return theta


@pytest.mark.parametrize(
    ("kind", "adamw_lr", "peak"),
    [("adamw", None, 0.01), ("muon", 0.004, 0.004), ("muon", None, DEFAULT_ADAMW_LR)],
)
def test_adamw_takes_the_steps_of_the_reference(kind: str, adamw_lr: float | None, peak: float) -> None:
    settings = flat_settings(
        kind=kind, lr=0.01, adamw_lr=adamw_lr, weight_decay=0.5, warmup=2, betas=(0.8, 0.97), eps=1e-3
    )
    model = model_of(torch.float64)
    start = snapshot(model)
    optimizer = build_optimizer(model, settings, horizon=10)
    grads = [gradients(model, step) for step in range(5)]
    for step, grad in enumerate(grads):
        optimizer.step(grad, step)
    rates = [peak / 0.01 * learning_rate(settings, 10, step) for step in range(5)]
    compared = 0
    for name, p in model.named_parameters():
        if kind == "muon" and is_muons(name, p):
            continue
        decay = 0.5 if p.dim() == 2 else 0.0
        of_name = [grad[name].numpy() for grad in grads]
        expected = adamw_reference(start[name].numpy(), of_name, rates, decay, settings)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-12)
        compared += 1
    assert compared == len(start) - (8 if kind == "muon" else 0)


# Schedule and clipping


def test_the_rate_at_known_steps() -> None:
    settings = OptimizerSettings(lr=0.4, warmup=4, final_lr_fraction=0.1)
    rates = [learning_rate(settings, 24, index) for index in (0, 1, 2, 3, 4, 9, 14, 19, 24, 25, 1000)]
    middle, swing = 0.22, 0.18
    cosine = [0.4, middle + swing / math.sqrt(2), middle, middle - swing / math.sqrt(2), 0.04]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, *cosine, 0.04, 0.04], rtol=1e-14)


def test_the_rate_without_warmup_and_with_nothing_but_warmup() -> None:
    assert learning_rate(OptimizerSettings(lr=0.4, warmup=0), 10, 0) == 0.4
    assert learning_rate(OptimizerSettings(lr=0.4, warmup=0), 10, 10) == pytest.approx(0.0, abs=1e-17)
    assert learning_rate(OptimizerSettings(lr=0.4, warmup=10), 10, 9) == 0.4
    assert learning_rate(OptimizerSettings(lr=0.4, warmup=20), 10, 9) == 0.2


def test_a_horizon_in_the_settings_outlives_another_number_of_steps() -> None:
    model = model_of(torch.float32)
    grads = gradients(model, 0)
    fixed = build_optimizer(model, OptimizerSettings(lr=0.4, warmup=0, horizon=20), horizon=10)
    assert fixed.step(grads, 10)["lr"] == pytest.approx(0.2, rel=1e-12)
    free = build_optimizer(model, OptimizerSettings(lr=0.4, warmup=0), horizon=10)
    assert free.step(grads, 5)["lr"] == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_clipping_scales_all_gradients_to_the_global_norm(kind: str) -> None:
    model = model_of(torch.float64)
    grads = gradients(model, 0)
    before = {name: grad.clone() for name, grad in grads.items()}
    norm = math.sqrt(sum(float((grad.numpy() ** 2).sum()) for grad in grads.values()))
    for clip, scale in ((0.25, 0.25 / norm), (norm * 1.01, 1.0), (None, 1.0)):
        optimizer = build_optimizer(model, flat_settings(kind=kind, clip=clip), 10)
        assert optimizer.step(grads, 0)["grad_norm"] == pytest.approx(norm, rel=1e-12)
        for name, moment in optimizer.state().items():
            key, _, parameter = name.partition(".exp_avg.")
            if name.startswith("muon.momentum."):
                key, parameter = "muon", name.removeprefix("muon.momentum.")
                expected = (1 - 0.95) * scale * grads[parameter]
            elif key == "adamw":
                expected = (1 - 0.9) * scale * grads[parameter]
            else:
                continue
            torch.testing.assert_close(moment, expected, rtol=1e-12, atol=1e-16)
    assert all(torch.equal(grads[name], before[name]) for name in grads)


# State


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_state_continues_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    settings = OptimizerSettings.model_validate({"kind": kind, "lr": 0.02, "warmup": 3})
    model = model_of(dtype)
    optimizer = build_optimizer(model, settings, 12)
    for step in range(12):
        for saved in ("weights", "state") if step in (0, 5) else ():
            tensors = snapshot(model) if saved == "weights" else optimizer.state()
            save_tensors(tmp_path / f"{saved}-{step}.safetensors", tensors)
        optimizer.step(gradients(model, step), step)
    for start in (0, 5):
        resumed = model_of(dtype, seed=1)
        continuation = build_optimizer(resumed, settings, 12)
        continuation.step(gradients(resumed, 99), 99)  # whatever was there before is replaced
        weights = load_tensors(tmp_path / f"weights-{start}.safetensors")
        with torch.no_grad():
            for name, p in resumed.named_parameters():
                p.copy_(weights[name])
        continuation.load_state(load_tensors(tmp_path / f"state-{start}.safetensors"))
        for step in range(start, 12):
            continuation.step(gradients(resumed, step), step)
        assert _differing(snapshot(resumed), snapshot(model)) == []
        assert _differing(continuation.state(), optimizer.state()) == []


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_a_state_is_a_copy() -> None:
    model = model_of(torch.float32)
    optimizer = build_optimizer(model, flat_settings(kind="muon"), 10)
    state = optimizer.state()
    optimizer.step(gradients(model, 0), 0)
    assert not any(bool(tensor.any()) for tensor in state.values())
    assert all(bool(tensor.any()) for tensor in optimizer.state().values())


def _damaged_states(good: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    name = "muon.momentum.blocks.0.attn.qkv.weight"
    yield f"lacks {name}", {key: tensor for key, tensor in good.items() if key != name}
    yield "holds adamw.exp_avg.extra", good | {"adamw.exp_avg.extra": torch.zeros(2)}
    yield f"{name} is 8×24 float32 but this model needs 24×8 float32", good | {name: good[name].mT}
    yield f"{name} is 24×8 float64 but this model needs 24×8 float32", good | {name: good[name].double()}


def test_a_state_that_does_not_fit_is_refused_whole() -> None:
    model = model_of(torch.float32)
    optimizer = build_optimizer(model, flat_settings(kind="muon"), 10)
    optimizer.step(gradients(model, 0), 0)
    before = optimizer.state()
    other = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    for sentence, state in _damaged_states(other):
        with pytest.raises(DataError, match=sentence):
            optimizer.load_state(state)
        assert _differing(optimizer.state(), before) == []
    optimizer.load_state(other)
    assert _differing(optimizer.state(), other) == []


# What is left on the model


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_no_gradient_stays_on_the_parameters(kind: str) -> None:
    model = model_of(torch.float32)
    optimizer = build_optimizer(model, flat_settings(kind=kind), 10)
    grads = gradients(model, 0)
    optimizer.step(grads, 0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_layout_of_a_gradient_does_not_matter(kind: str) -> None:
    results = []
    for layout in ("rows", "columns"):
        model = model_of(torch.float32)
        optimizer = build_optimizer(model, flat_settings(kind=kind), 10)
        grads = gradients(model, 0)
        if layout == "columns":
            grads = {
                name: grad.t().contiguous().t() if grad.dim() == 2 else grad for name, grad in grads.items()
            }
        optimizer.step(grads, 0)
        results.append(snapshot(model))
    assert _differing(*results) == []


def test_gradients_that_do_not_fit_are_refused_and_frozen_parameters_left_alone() -> None:
    model = model_of(torch.float32)
    grads = gradients(model, 0)
    optimizer = build_optimizer(model, flat_settings(kind="muon"), 10)
    missing = {name: grad for name, grad in grads.items() if name != "tok.weight"}
    with pytest.raises(ValueError, match=r"differ in tok\.weight"):
        optimizer.step(missing, 0)
    with pytest.raises(ValueError, match="differ in more"):
        optimizer.step(grads | {"more": torch.zeros(1)}, 0)
    with pytest.raises(ValueError, match=r"differ in norm\.weight"):
        optimizer.step(grads | {"norm.weight": torch.zeros(1)}, 0)
    model.tok.weight.requires_grad_(False)
    before = model.tok.weight.clone()
    build_optimizer(model, flat_settings(kind="muon", weight_decay=0.5), 10).step(missing, 0)
    assert torch.equal(model.tok.weight, before)


def test_either_part_may_be_empty() -> None:
    settings = flat_settings(kind="muon", lr=0.1, adamw_lr=0.01)
    singular_value = by_singular_values(np.ones((1, 1))).item()
    step = {"muon": 0.1 * math.sqrt(3 / 2) * singular_value / math.sqrt(6), "adamw": 0.01}
    for kind in step:
        w = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        matrices, others = ({"w": w}, {}) if kind == "muon" else ({}, {"w": w})
        Optimizer(matrices, others, settings, 10).step({"w": torch.ones_like(w)}, 0)
        torch.testing.assert_close(w.detach(), torch.full_like(w, 1 - step[kind]), rtol=1e-8, atol=0)
