"""The count against products worked out by hand, and in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from twinscope.lab.errors import TwinscopeError
from twinscope.models.gpt import GPTConfig
from twinscope.propagation.cost import apart
from twinscope.propagation.cost.counting import Counting, count, count_apart, count_arms
from twinscope.propagation.settings import EPSettings, OptimizerSettings
from twinscope.propagation.stages import stage


def test_products_by_hand():
    a, b, c = torch.randn(3, 5), torch.randn(5, 7), torch.randn(4, 3, 5)
    v = torch.randn(5)
    cases = {
        lambda: a @ b: 2 * 3 * 5 * 7,
        lambda: torch.addmm(torch.randn(7), a, b): 2 * 3 * 5 * 7,
        lambda: torch.bmm(c, c.mT): 2 * 4 * 3 * 5 * 3,
        lambda: torch.bmm(c, c.mT, out=torch.empty(4, 3, 3)): 2 * 4 * 3 * 5 * 3,
        lambda: torch.baddbmm(torch.randn(4, 3, 3), c, c.mT): 2 * 4 * 3 * 5 * 3,
        lambda: torch.addbmm(torch.randn(3, 3), c, c.mT): 2 * 4 * 3 * 5 * 3,
        lambda: a @ v: 2 * 3 * 5,
        lambda: torch.addmv(torch.randn(3), a, v): 2 * 3 * 5,
        lambda: v @ v: 2 * 5,
        lambda: torch.relu(a): 0,
    }
    for step, flops in cases.items():
        assert count(step).total == flops
    assert count(lambda: torch.relu(a)).without_formula == {"relu": 1}


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_on_the_cpu_by_hand(key_heads):
    # (B, H, T, D) = (2, 4, 6, 8): two products forward, five backward, 2·B·H·T·T·D FLOPs each.
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(2, key_heads, 6, 8, requires_grad=True) for _ in range(2))

    def attend():
        with stage("forward"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with stage("backward"):
            torch.autograd.grad(y.sum(), [q, k, v])

    product = 2 * 2 * 4 * 6 * 6 * 8
    assert count(attend).by_stage() == {"forward": 2 * product, "backward": 5 * product}
    with FlopCounterMode(display=False) as stock:
        attend()
    assert stock.get_total_flops() == 0, "torch counts CPU attention by itself: drop the formula here"


def test_a_backward_for_inputs_alone_counts_one_product():
    layer = torch.nn.Linear(5, 7)
    x = torch.randn(3, 5, requires_grad=True)

    def step():
        with stage("free"):
            y = layer(x)
        with stage("forces"):
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        with stage("read"):
            torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))
        y @ torch.ones(7, 2)

    product = 2 * 3 * 5 * 7
    found = count(step)
    assert found.by_stage() == {"free": product, "forces": product, "read": 2 * product, "unmarked": 84}
    assert found.by_operator() == {"addmm": product, "mm": 3 * product + 84}


COUNTING = Counting(
    shape=GPTConfig(vocab=11, layers=2, width=16, heads=2, context=8),
    batch=2,
    arms={"bp": None, "ep": EPSettings(rounds=2, fused=False)},
    optimizer=OptimizerSettings(kind="muon"),
)


def test_a_process_apart_counts_the_same():
    assert count_apart(COUNTING) == count_arms(COUNTING)


def test_a_failing_or_slow_process_is_one_sentence(monkeypatch):
    with pytest.raises(TwinscopeError, match=r"^counting failed in its own process \(exit 1\): .*nowhere"):
        count_apart(COUNTING.model_copy(update={"device": "nowhere"}))

    def slow(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired(sys.executable, timeout)

    monkeypatch.setattr(apart.subprocess, "run", slow)
    with pytest.raises(TwinscopeError, match=r"^counting took longer than 5 s in its own process"):
        count_apart(COUNTING, timeout=5)
