"""What the estimators must keep on a GPU; skipped where there is none. benchmarks/gpu.sh runs it."""

from __future__ import annotations

import os

import pytest
import torch

from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.cost.peak_memory import observe, peak
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# Read when torch first multiplies on the GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
SHAPE = {"vocab": 64, "layers": 4, "width": 128, "heads": 2, "context": 64}


def model_and_batch(dtype, device):
    model = build_gpt(GPTConfig.model_validate(SHAPE), 0, dtype, device)
    tokens, targets = torch.randint(64, (2, 3, 64), generator=torch.Generator().manual_seed(1)).to(device)
    return model, tokens, targets


def distance(found, expected) -> float:
    return max(
        float((found.grads[name].cpu().double() - grad.cpu().double()).norm() / grad.double().norm().cpu())
        for name, grad in expected.grads.items()
    )


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_the_gpu_computes_what_the_cpu_computes(rounds, fused):
    settings = EPSettings(rounds=rounds, fused=fused, nudge="symmetric", precision="fp64")
    expected = ep_gradient(*model_and_batch(torch.float64, "cpu"), settings)
    found = ep_gradient(*model_and_batch(torch.float64, "cuda"), settings)
    assert distance(found, expected) < 1e-10
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_graphs_made_again_give_the_same_gradient_in_less_memory(precision):
    model, tokens, targets = model_and_batch(torch.float32, "cuda")
    peaks = {}
    for rule in ("bp", "ep"):
        for recompute in (False, True):

            def gradient(rule=rule, recompute=recompute):
                if rule == "bp":
                    return bp_gradient(model, tokens, targets, precision=precision, recompute=recompute)
                settings = EPSettings(precision=precision, recompute=recompute, nudge="positive")
                return ep_gradient(model, tokens, targets, settings, diagnose=False)

            gradient()
            events, found = observe(gradient, torch.device("cuda"))
            peaks[rule, recompute] = peak(events), found
        # Kernels may sum in another order from one call to the next.
        assert distance(peaks[rule, True][1], peaks[rule, False][1]) < (1e-5 if precision == "fp32" else 1e-2)
        assert peaks[rule, True][0] < peaks[rule, False][0]
    assert peaks["ep", False][0] < 1.15 * peaks["bp", False][0]


def test_amp_stays_near_full_precision():
    model, tokens, targets = model_and_batch(torch.float32, "cuda")
    full = ep_gradient(model, tokens, targets, EPSettings(nudge="positive"))
    amp = ep_gradient(model, tokens, targets, EPSettings(nudge="positive", precision="amp"))
    for name, grad in full.grads.items():
        assert torch.nn.functional.cosine_similarity(amp.grads[name].flatten(), grad.flatten(), 0) > 0.98, (
            name
        )
