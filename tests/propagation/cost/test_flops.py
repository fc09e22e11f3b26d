"""The ledger against the dispatcher's count, stage by stage, and against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.cost.counting import Counting, count, count_arms
from twinscope.propagation.cost.flops import compare, disagreements, forward_flops, ledger
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings, OptimizerSettings

SHAPES = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "tied": True},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "tied": False, "kv_heads": 2},
    "mixed": {"positions": "rotary", "norm": "layernorm", "mlp": "swiglu", "bias": False, "mlp_hidden": 24},
    "one": {"layers": 1, "norm": "rmsnorm", "bias": True},
}
ARMS = {
    "bp": None,
    "control": EPSettings(rounds=0),
    "fused": EPSettings(rounds=1),
    "unfused": EPSettings(rounds=1, fused=False),
    "negative": EPSettings(rounds=2, nudge="negative"),
    "three": EPSettings(rounds=3, fused=False, nudge="positive"),
    "symmetric": EPSettings(rounds=2, nudge="symmetric"),
    "refresh": EPSettings(rounds=4, top_refresh=2, nudge="symmetric", fused=False),
    "energy": EPSettings(rounds=2, fused=False, read="energy"),
    "damped": EPSettings(rounds=3, damping=0.5, beta=0.1),
    "recompute": EPSettings(rounds=2, recompute=True),
    "recompute-unfused": EPSettings(rounds=3, fused=False, nudge="symmetric", recompute=True),
    "recompute-control": EPSettings(rounds=0, recompute=True),
    "gain": EPSettings.model_validate({"rounds": 2, "gain": {"profile": "random", "max": 4.0}}),
}
MUON, ADAMW = OptimizerSettings(kind="muon"), OptimizerSettings(kind="adamw")


def shape(**options) -> GPTConfig:
    return GPTConfig(**({"vocab": 11, "layers": 3, "width": 16, "heads": 4, "context": 8} | options))


@pytest.mark.parametrize("variant", SHAPES)
def test_the_ledger_is_the_count_stage_by_stage(variant):
    config = shape(**SHAPES[variant])
    optimizer = MUON if variant != "one" else ADAMW
    counted = count_arms(Counting(shape=config, batch=3, arms=ARMS, optimizer=optimizer))
    for name, settings in ARMS.items():
        found = ledger(config, 3, settings, optimizer)
        assert {k: v for k, v in found.by_stage().items() if v} == counted[name].by_stage(), name
        assert found.total == counted[name].total
        assert disagreements(found, counted[name].by_stage()) == []


@pytest.mark.parametrize("variant", ["gpt2", "llama", "one"])
def test_diagnostics_and_checkpointed_backpropagation_are_counted_too(variant):
    config = shape(**SHAPES[variant])
    model, tokens = build_gpt(config), torch.zeros(3, config.context, dtype=torch.int64)
    for name, settings in ARMS.items():
        if settings is not None:
            counted = count(lambda settings=settings: ep_gradient(model, tokens, tokens, settings))
            found = ledger(config, 3, settings, None, diagnose=True)
            assert {k: v for k, v in found.by_stage().items() if v} == counted.by_stage(), name
    counted = count(lambda: bp_gradient(model, tokens, tokens, recompute=True))
    assert {
        k: v for k, v in ledger(config, 3, None, None, recompute=True).by_stage().items() if v
    } == counted.by_stage()


@pytest.mark.parametrize("precision", ["fp64", "amp"])
def test_the_count_does_not_depend_on_the_precision(precision):
    config = shape(**SHAPES["llama"])
    counting = Counting(
        shape=config, batch=2, arms={"bp": None, "ep": ARMS["three"]}, optimizer=MUON, precision=precision
    )
    for name, found in count_arms(counting).items():
        assert found.total == ledger(config, 2, counting.arms[name], MUON).total


# Worked out on paper: W = 12C², one product through a block 2NW, attention forward
# 4BT²C and backward 10BT²C, one product of the head 2NCV.
BY_HAND = {
    (256, 128, 8): (805_306_368, 67_108_864, 167_772_160, 25_165_824),
    (768, 256, 12): (14_495_514_624, 805_306_368, 2_013_265_920, 150_994_944),
}


@pytest.mark.parametrize("size", BY_HAND)
def test_the_two_reference_shapes_by_hand(size):
    width, context, heads = size
    config = GPTConfig(vocab=96, layers=12, width=width, heads=heads, context=context)
    block, attention, attention_back, head = BY_HAND[size]
    batch = 4
    assert forward_flops(config, batch) == 12 * (block + attention)

    bp = ledger(config, batch, None, ADAMW)
    # 12 forwards, 12 backwards of two products each; the head forward, its adjoint and its weights.
    assert bp.total == 36 * block + 12 * attention + 12 * attention_back + 3 * head

    three = ledger(config, batch, ARMS["three"], ADAMW)
    # Free 12, forces 3·11, rebuild 3·11, read 12 of two products; the head 3 times with its adjoint (the
    # loss, two refreshes), and once with its weights too.
    assert three.total == 102 * block + 45 * attention + 45 * attention_back + 9 * head

    fused = ledger(config, batch, ARMS["fused"], ADAMW)
    assert fused.total == 58 * block + 23 * attention + 23 * attention_back + 5 * head


def test_the_ratios_of_the_reference_shapes():
    found = {}
    for width, context, heads in BY_HAND:
        config = GPTConfig(vocab=96, layers=12, width=width, heads=heads, context=context)
        bp = ledger(config, 4, None, ADAMW)
        for name in ("fused", "three"):
            found[width, name] = compare(ledger(config, 4, ARMS[name], ADAMW), bp)
    assert {key: round(c.ratio, 4) for key, c in found.items()} == {
        (256, "fused"): 1.6383,
        (256, "three"): 2.9148,
        (768, "fused"): 1.6297,
        (768, "three"): 2.8892,
    }
    assert found[256, "fused"].shorthand_ratio == pytest.approx(5 / 3)
    assert found[256, "three"].shorthand_ratio == 3.0


@pytest.mark.parametrize("arm", ARMS)
def test_corrections_lead_from_the_shorthand_to_the_ledger(arm):
    config = shape(**SHAPES["llama"])
    for diagnose in (False, True):
        found = ledger(config, 3, ARMS[arm], MUON, diagnose=diagnose)
        assert found.shorthand + sum(c.flops for c in found.corrections) == found.total
        assert sum(found.by_term().values()) == sum(found.by_stage().values()) == found.total
        bp = ledger(config, 3, None, MUON)
        comparison = compare(found, bp)
        assert comparison.steps[-1].ratio == pytest.approx(found.total / bp.total)
        moved = comparison.shorthand_ratio + sum(step.change for step in comparison.steps)
        assert moved == pytest.approx(comparison.ratio)


def test_without_attention_readout_and_optimizer_the_floor_is_that_of_the_method():
    # (5L - 2) / 3L at K = 1 (METHOD 1.1): one token's attention and one word's readout weigh next to nothing.
    config = GPTConfig(vocab=1, layers=12, width=512, heads=8, context=1)
    comparison = compare(ledger(config, 1, ARMS["fused"], ADAMW), ledger(config, 1, None, ADAMW))
    assert comparison.ratio == pytest.approx((5 * 12 - 2) / 36, abs=2e-3)
    skipped = sum(step.change for step in comparison.steps[:3])
    assert skipped == pytest.approx(-2 / 36)
    text = comparison.explanation()
    assert text[0] == "shorthand 1.6667"
    assert any("block 1 is not rebuilt" in line for line in text)
    assert not any("optimizer" in line for line in text)


def test_backpropagation_and_the_control_cost_the_same():
    config = shape(**SHAPES["gpt2"])
    assert compare(ledger(config, 2, ARMS["control"], MUON), ledger(config, 2, None, MUON)).ratio == 1.0


def test_the_causal_figure_counts_every_unmasked_pair_once():
    config = shape(layers=1, context=5)
    found = ledger(config, 2, None, None)
    pairs = sum(position + 1 for position in range(5))
    attention = [line for line in found.lines if line.term == "attention"]
    assert [line.stage for line in attention] == ["forward", "backward"]
    for line, products in zip(attention, (2, 5), strict=True):
        # A product is 2 FLOPs for each batch, head, pair and channel of a head.
        assert line.causal == products * 2 * 2 * 4 * pairs * 4
        assert line.flops == products * 2 * 2 * 4 * 5 * 5 * 4
    assert found.total - found.causal_total == sum(line.flops - line.causal for line in attention)


def test_measuring_the_residual_costs_an_unfused_read_one_sweep():
    config = shape()
    unfused, fused = ARMS["unfused"], ARMS["fused"]
    more = ledger(config, 2, unfused, None, diagnose=True).total - ledger(config, 2, unfused, None).total
    weights, tokens = 12 * 16 * 16, 16
    assert more == 2 * (2 * tokens * weights + 10 * tokens * 8 * 16)
    assert ledger(config, 2, fused, None, diagnose=True).total == ledger(config, 2, fused, None).total


def test_a_count_that_is_off_is_named():
    config = shape()
    found = ledger(config, 2, None, ADAMW)
    counted = {stage: flops for stage, flops in found.by_stage().items() if flops}
    counted["backward"] = counted["backward"] * 102 // 100
    counted["elsewhere"] = 7
    first, second = disagreements(found, counted)
    assert first.startswith("stage 'backward': counted ")
    assert first.endswith("(+2.00%)")
    assert second == "stage 'elsewhere': counted 7 FLOPs where the ledger has 0"
    assert disagreements(found, counted | {"elsewhere": 0}, tolerance=0.03) == []


def test_formulas_evaluate_to_their_lines():
    config = shape(**SHAPES["llama"])
    lines = ledger(config, 3, ARMS["refresh"], MUON).lines
    for line in [*lines, *ledger(config, 3, None, MUON, recompute=True).lines]:
        if line.term in ("matmul", "attention", "readout"):
            numbers = line.formula.split("= ")[1].split(";")[0]
            assert eval(numbers.replace("×", "*").replace("·", "*").replace("²", "**2")) == line.flops
