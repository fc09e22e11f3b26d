"""The estimators against closed forms, an independent solver, and each other (float64)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oracles import (
    LinearDecoder,
    energy_gradient,
    half_squared_error,
    newton_equilibrium,
    solve_linear,
)
from twinscope.lab.errors import ConfigError
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.gain import gains
from twinscope.propagation.settings import EPSettings

EXACT = {"fused": False, "nudge": "positive", "precision": "fp64"}
VARIANTS = [
    {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "tied": True},
    {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "tied": False},
]


def tiny(layers: int = 3, width: int = 8, **options):
    config = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "tied": True} | options
    model = build_gpt(GPTConfig(vocab=11, layers=layers, width=width, heads=2, context=6, **config), seed=1)
    model = model.double()
    with torch.no_grad():  # away from the flat fresh initialisation, so that curvature is felt
        for parameter in model.parameters():
            noise = np.random.default_rng(parameter.numel()).normal(size=tuple(parameter.shape))
            parameter.add_(0.15 * torch.from_numpy(noise))
    rng = np.random.default_rng(2)
    tokens, targets = (torch.from_numpy(rng.integers(0, 11, size=(2, 5))) for _ in range(2))
    return model, tokens, targets


def distance(a, b) -> float:
    """Largest relative difference over the parameters, each against its own norm."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def slope(values: list[float], betas: list[float]) -> float:
    return float(np.polyfit(np.log(betas), np.log(values), 1)[0])


@pytest.mark.parametrize("gain", [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]])
@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("fused", [True, False])
def test_linear_stack_converges_to_the_linear_solve(gain, damping, fused):
    model = LinearDecoder(vocab=7, width=4, layers=3, out=3, seed=0)
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, 7, size=(1, 6)), rng.normal(size=(1, 6, 3))
    beta = 0.01
    oracle = solve_linear(model, tokens[0], targets[0], beta, gain)
    profile = {"profile": "uniform"} if gain[1] == 1 else {"profile": "geometric", "ratio": 2.0}
    settings = EPSettings(
        beta=beta, rounds=80, damping=damping, fused=fused, nudge="positive", precision="fp64", gain=profile
    )
    found = ep_gradient(
        model, torch.from_numpy(tokens), torch.from_numpy(targets), settings, cost=half_squared_error
    )
    assert set(found.grads) == set(oracle.grads)
    for name, expected in oracle.grads.items():
        np.testing.assert_allclose(found.grads[name].numpy(), expected, rtol=1e-9, atol=1e-11, err_msg=name)
    assert found.diagnostics.residual is not None
    assert found.diagnostics.residual < 1e-9
    moved = oracle.states[1:] - np.stack(
        [
            z @ b.weight.detach().numpy().T + b.bias.detach().numpy()
            for z, b in zip(oracle.states, model.blocks, strict=False)
        ]
    )
    ratio = np.linalg.norm(moved, axis=(1, 2)) / np.linalg.norm(oracle.states[1:], axis=(1, 2))
    np.testing.assert_allclose(found.diagnostics.displacement_ratio, ratio, rtol=1e-9)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("gain", [[1.0, 1.0], [1.0, 3.0]])
def test_many_rounds_reach_the_equilibrium_that_newton_finds(options, gain):
    model, tokens, targets = tiny(layers=2, **options)
    beta = 0.02
    states = newton_equilibrium(model, tokens, targets, beta, gain)
    expected = energy_gradient(model, states, tokens, targets, beta, gain)
    for read in ("linear", "energy"):
        settings = EPSettings(
            beta=beta, rounds=40, read=read, gain={"profile": "geometric", "ratio": gain[1]}, **EXACT
        )
        found = ep_gradient(model, tokens, targets, settings)
        assert found.diagnostics.residual is not None
        assert found.diagnostics.residual < 1e-10
        assert distance(found.grads, expected) < 1e-10


@pytest.mark.parametrize("options", VARIANTS)
def test_zero_rounds_is_backpropagation(options):
    model, tokens, targets = tiny(**options)
    control = ep_gradient(model, tokens, targets, EPSettings(beta=0.1, rounds=0, precision="fp64"))
    reference = bp_gradient(model, tokens, targets, precision="fp64")
    assert distance(control.grads, reference.grads) < 1e-14
    assert control.loss == pytest.approx(reference.loss, rel=1e-15)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(
    ("nudge", "expected"), [("positive", 1.0), ("negative", 1.0), ("random", 1.0), ("symmetric", 2.0)]
)
@pytest.mark.parametrize("fused", [True, False])
def test_bias_against_bp_shrinks_with_the_nudge(options, nudge, expected, fused):
    model, tokens, targets = tiny(**options)
    reference = bp_gradient(model, tokens, targets, precision="fp64").grads
    betas = [1e-3, 5e-4, 2.5e-4, 1.25e-4]
    found = {
        beta: ep_gradient(
            model,
            tokens,
            targets,
            EPSettings(beta=beta, rounds=4, nudge=nudge, fused=fused, precision="fp64"),
            seed=3,
            step=5,
        ).grads
        for beta in betas
    }
    for name in reference:  # embedding, readout, norms and every block matrix one by one
        errors = [float((found[b][name] - reference[name]).norm()) for b in betas]
        assert slope(errors, betas) == pytest.approx(expected, abs=0.06), name


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_fused_differs_from_one_more_round_by_the_order_of_its_rounds(options, rounds):
    model, tokens, targets = tiny(**options)
    # Both ranges lie between the rounding floor and the end of the asymptotic regime.
    betas = [2e-2, 1e-2, 5e-3] if options["tied"] else [4e-3, 2e-3, 1e-3]
    errors: dict[str, list[float]] = {}
    for beta in betas:
        common = {"beta": beta, "nudge": "positive", "precision": "fp64"}
        fused = ep_gradient(model, tokens, targets, EPSettings(rounds=rounds, fused=True, **common)).grads
        plain = ep_gradient(
            model, tokens, targets, EPSettings(rounds=rounds + 1, fused=False, **common)
        ).grads
        for name in fused:
            errors.setdefault(name, []).append(float((fused[name] - plain[name]).norm()))
    for name, values in errors.items():
        # Block 1 and what lies below it read the same force at the same clamped input in both, and
        # the last bias of a block reads its force whatever the input.
        unmoved = name.startswith(("blocks.0.", "pos.")) or name.endswith("mlp.down.bias")
        if unmoved or (name == "tok.weight" and not options["tied"]):
            assert max(values) < 1e-14, name
        else:
            assert slope(values, betas) == pytest.approx(rounds + 1, abs=0.15), name


@pytest.mark.parametrize("options", VARIANTS)
def test_the_read_does_not_matter_in_exact_arithmetic(options):
    model, tokens, targets = tiny(**options)
    gain = {"profile": "top", "value": 3.0, "base": 2.0}
    for nudge in ("positive", "symmetric"):
        common = {
            "beta": 1e-2,
            "rounds": 3,
            "fused": False,
            "nudge": nudge,
            "precision": "fp64",
            "gain": gain,
        }
        linear = ep_gradient(model, tokens, targets, EPSettings(read="linear", **common))
        energy = ep_gradient(model, tokens, targets, EPSettings(read="energy", **common))
        assert distance(energy.grads, linear.grads) < 1e-11


@pytest.mark.parametrize("read", ["linear", "energy"])
def test_uniform_gain_is_a_rescaled_nudge(read):
    model, tokens, targets = tiny()
    with_gain = EPSettings(
        beta=2e-3, rounds=3, read=read, gain={"profile": "uniform", "value": 16.0}, **EXACT
    )
    without = EPSettings(beta=16 * 2e-3, rounds=3, read=read, **EXACT)
    a, b = (ep_gradient(model, tokens, targets, s) for s in (with_gain, without))
    assert distance(a.grads, b.grads) < 1e-11
    assert a.diagnostics.displacement_ratio == pytest.approx(b.diagnostics.displacement_ratio, rel=1e-10)
    assert a.diagnostics.residual == pytest.approx(b.diagnostics.residual, rel=1e-6)


def test_gain_profile_matters_at_first_order_of_the_nudge_even_on_linear_blocks():
    model = LinearDecoder(vocab=7, width=4, layers=3, out=5, seed=0)
    rng = np.random.default_rng(1)
    tokens, targets = (torch.from_numpy(rng.integers(0, k, size=(1, 6))) for k in (7, 5))
    betas = [1e-3, 5e-4, 2.5e-4, 1.25e-4]
    differences: dict[str, list[float]] = {}
    for beta in betas:
        flat = ep_gradient(model, tokens, targets, EPSettings(beta=beta, rounds=6, **EXACT)).grads
        profile = EPSettings(beta=beta, rounds=6, gain={"profile": "geometric", "ratio": 4.0}, **EXACT)
        steep = ep_gradient(model, tokens, targets, profile).grads
        for name in flat:
            differences.setdefault(name, []).append(float((flat[name] - steep[name]).norm()))
    for name, values in differences.items():
        assert slope(values, betas) == pytest.approx(1.0, abs=0.05), name


def test_damping_leaves_the_fixed_point_unchanged():
    model, tokens, targets = tiny()
    common = {"beta": 2e-2, "nudge": "positive", "precision": "fp64", "fused": False}
    undamped = ep_gradient(model, tokens, targets, EPSettings(rounds=40, **common)).grads
    damped = ep_gradient(model, tokens, targets, EPSettings(rounds=120, damping=0.5, **common)).grads
    assert distance(damped, undamped) < 1e-11


def test_damping_is_the_share_of_the_fresh_state():
    model, tokens, targets = tiny()

    def first_block(damping: float) -> float:
        settings = EPSettings(beta=1e-4, rounds=1, damping=damping, **EXACT)
        return ep_gradient(model, tokens, targets, settings).diagnostics.displacement_ratio[0]

    # Block 1 starts at o_1 and its input is clamped: one round moves it by eta g d.
    assert first_block(0.25) == pytest.approx(0.25 * first_block(1.0), rel=1e-3)


def test_error_of_k_rounds_shrinks_by_one_order_of_the_nudge_per_round():
    model, tokens, targets = tiny()
    betas = [4e-2, 2e-2, 1e-2]
    for rounds in (1, 2):
        errors = []
        for beta in betas:
            common = {"beta": beta, **EXACT}
            exact = ep_gradient(model, tokens, targets, EPSettings(rounds=30, **common)).grads
            short = ep_gradient(model, tokens, targets, EPSettings(rounds=rounds, **common)).grads
            errors.append(distance(short, exact))
        assert slope(errors, betas) == pytest.approx(rounds, abs=0.2)


def test_top_refresh_keeps_the_top_force_of_earlier_rounds():
    model, tokens, targets = tiny()
    common = {"beta": 5e-2, **EXACT}
    every = ep_gradient(model, tokens, targets, EPSettings(rounds=4, top_refresh=1, **common)).grads
    never = ep_gradient(model, tokens, targets, EPSettings(rounds=4, top_refresh=4, **common)).grads
    third = ep_gradient(model, tokens, targets, EPSettings(rounds=4, top_refresh=3, **common)).grads
    assert distance(every, never) > 1e-4
    assert 1e-12 < distance(every, third) < distance(every, never)


def test_displacement_sets_beta_without_changing_what_is_computed():
    model, tokens, targets = tiny()
    gain = {"profile": "top", "value": 5.0}
    wanted = 3e-3
    by_ratio = ep_gradient(
        model, tokens, targets, EPSettings(displacement=wanted, rounds=1, gain=gain, **EXACT)
    )
    beta = by_ratio.diagnostics.beta
    assert beta is not None
    by_beta = ep_gradient(model, tokens, targets, EPSettings(beta=beta, rounds=1, gain=gain, **EXACT))
    assert distance(by_ratio.grads, by_beta.grads) < 1e-14
    # The ratio is taken against free states, the diagnostic against displaced ones: O(ratio) apart.
    assert max(by_ratio.diagnostics.displacement_ratio) == pytest.approx(wanted, rel=5 * wanted)


def test_symmetric_is_the_mean_of_the_two_signs():
    model, tokens, targets = tiny()
    for fused in (True, False):
        common = {"beta": 3e-2, "rounds": 2, "fused": fused, "precision": "fp64"}
        plus, minus, both = (
            ep_gradient(model, tokens, targets, EPSettings(nudge=nudge, **common)).grads
            for nudge in ("positive", "negative", "symmetric")
        )
        assert distance(both, {name: (plus[name] + minus[name]) / 2 for name in plus}) < 1e-13


def test_random_nudge_takes_both_signs_and_depends_on_seed_and_step_alone():
    model, tokens, targets = tiny(layers=1)
    settings = EPSettings(beta=0.1, nudge="random", precision="fp64")

    def sign(seed: int, step: int) -> int:
        return ep_gradient(model, tokens, targets, settings, seed, step).diagnostics.signs[0]

    signs = [sign(0, step) for step in range(40)]
    assert {-1, 1} == set(signs)
    assert 8 <= signs.count(1) <= 32
    assert signs == [sign(0, step) for step in range(40)]
    assert signs != [sign(1, step) for step in range(40)]


def test_nothing_of_the_model_is_touched():
    model, tokens, targets = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rounds in (0, 2):
        ep_gradient(model, tokens, targets, EPSettings(beta=0.1, rounds=rounds, precision="fp64"))
    bp_gradient(model, tokens, targets, precision="fp64")
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_a_frozen_parameter_has_no_gradient_and_changes_no_other():
    model, tokens, targets = tiny()
    settings = EPSettings(beta=0.05, rounds=2, precision="fp64")
    full = ep_gradient(model, tokens, targets, settings).grads
    frozen = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    some = ep_gradient(model, tokens, targets, settings).grads
    assert set(some) == set(full) - set(frozen)
    assert distance(some, {name: full[name] for name in some}) < 1e-14


def test_fp32_agrees_with_fp64_and_amp_stays_near():
    model, tokens, targets = tiny()
    exact = ep_gradient(model, tokens, targets, EPSettings(precision="fp64", nudge="positive"))
    single = ep_gradient(model.float(), tokens, targets, EPSettings(nudge="positive"))
    assert distance({k: v.double() for k, v in single.grads.items()}, exact.grads) < 2e-4
    amp = ep_gradient(model, tokens, targets, EPSettings(precision="amp", nudge="positive"))
    assert all(grad.dtype == torch.float32 for grad in amp.grads.values())
    for name, grad in amp.grads.items():
        cosine = torch.nn.functional.cosine_similarity(
            grad.double().flatten(), exact.grads[name].flatten(), 0
        )
        assert cosine > 0.98, name
    assert distance({k: v.double() for k, v in amp.grads.items()}, exact.grads) > 1e-4


def test_wrong_precision_is_refused():
    model, tokens, targets = tiny()
    with pytest.raises(ConfigError, match="fp64 needs"):
        ep_gradient(model.float(), tokens, targets, EPSettings(precision="fp64"))
    with pytest.raises(ConfigError, match="bf16 displaced states"):
        ep_gradient(model.bfloat16(), tokens, targets, EPSettings())


def test_batches_of_the_wrong_shape_are_refused():
    model, tokens, targets = tiny()
    settings = EPSettings(precision="fp64")
    for x, y in ((tokens, targets.T), (tokens[0], targets[0]), (tokens[:0], targets[:0])):
        for gradient in (
            lambda x=x, y=y: ep_gradient(model, x, y, settings),
            lambda x=x, y=y: bp_gradient(model, x, y),
        ):
            with pytest.raises(ConfigError, match="one batch of token ids"):
                gradient()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        ep_gradient(model, tokens, targets, settings)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_gain_profiles(layers):
    def profile(**numbers):
        return gains(EPSettings(gain=numbers).gain, layers, seed=4, step=9)

    middle = layers // 2
    assert profile(profile="uniform", value=3.0) == [3.0] * layers
    assert profile(profile="top", value=4.0, base=0.5) == [0.5] * middle + [2.0] * (layers - middle)
    assert profile(profile="geometric", ratio=2.0, cap=8.0) == [1.0, 2.0, 4.0, 8.0, 8.0][:layers]
    drawn = profile(profile="random", max=16.0, base=2.0)
    assert drawn[:middle] == [2.0] * middle
    assert len(set(drawn[middle:])) == 1
    assert drawn == profile(profile="random", max=16.0, base=2.0)


def test_random_gain_is_log_uniform():
    settings = EPSettings(gain={"profile": "random", "max": 16.0}).gain
    logs = np.array([math.log(gains(settings, 2, seed=0, step=step)[1]) for step in range(2000)])
    high = math.log(16.0)
    assert logs.min() >= 0
    assert logs.max() <= high
    # Mean and variance of a uniform law on [0, log 16], each within four standard errors.
    assert abs(logs.mean() - high / 2) < 4 * high / math.sqrt(12 * 2000)
    assert abs(logs.var() - high**2 / 12) < 4 * high**2 / 12 * math.sqrt(0.8 / 2000)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"beta": -0.1}, "greater than 0"),
        ({"beta": 0.1, "displacement": 1e-3}, "either beta or displacement"),
        ({"read": "energy"}, "cannot be fused"),
        ({"read": "energy", "fused": False, "damping": 0.9}, "undamped last round"),
        ({"read": "energy", "fused": False, "rounds": 0}, "at least one round"),
        ({"rounds": -1}, "greater than or equal to 0"),
        ({"gain": {"profile": "uniform", "cap": 3.0}}, "takes value"),
        ({"nugde": "random"}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused_with_the_reason(values, reason):
    with pytest.raises(ValueError, match=reason):
        EPSettings(**values)
