"""The null: what a redrawn donor keeps, that its search is the search, and that its threshold is exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gated_models import gated, inputs, matrices
from scipy import stats

from twinscope.lab.draws import generator
from twinscope.reuse.neurons.activations import layer_of_matrices
from twinscope.reuse.neurons.null import (
    eigenbasis,
    judge,
    judge_each,
    null_mib,
    null_search,
    signs,
    threshold,
    turned,
)
from twinscope.reuse.neurons.search import APART, FREE, search, search_mib


def moments_of(gate, up, x):
    """Everything that a redraw with signs keeps, ``(5, n)`` float64."""
    gate, up, x = gate.double(), up.double(), x.double()
    s = x.t() @ x / len(x)
    return torch.stack(
        [
            (gate * gate).sum(dim=1),
            (up * up).sum(dim=1),
            ((gate @ s) * gate).sum(dim=1),
            ((up @ s) * up).sum(dim=1),
            ((gate @ s) * up).sum(dim=1),
        ]
    )


def redrawn(layer, x, seed, recipient, draw):
    """The donor of one draw by signs, in the basis of the channels."""
    basis = eigenbasis(x).double()
    flips = signs(
        (layer.neurons, layer.width), generator(seed, f"neurons null signs {recipient} {layer.layer}", draw)
    )
    gate, up = (part(0, layer.neurons).double() for part in (layer.gate, layer.up))
    gate, up = (((part @ basis) * flips) @ basis.t() for part in (gate, up))
    return layer_of_matrices(layer.layer, gate.float(), up.float())


class TestSigns:
    def test_the_basis_is_that_of_the_second_moment(self):
        x = inputs(0, tokens=3000, dominant=3.0)
        basis = eigenbasis(x).double()
        moment = x.double().t() @ x.double() / 3000
        torch.testing.assert_close(basis.t() @ basis, torch.eye(12).double(), rtol=0, atol=1e-6)
        turned_moment = basis.t() @ moment @ basis
        torch.testing.assert_close(turned_moment, turned_moment.diagonal().diag(), rtol=0, atol=1e-5)

    def test_signs_are_fair_and_the_same_whatever_the_block(self):
        found = signs((4000, 70), generator(1, "test"))
        assert set(found.unique().tolist()) == {-1.0, 1.0}
        # 280,000 fair coins: 5 standard deviations of the mean, and of each column's.
        assert abs(float(found.mean())) < 5 / 280_000**0.5
        assert float(found.mean(dim=0).abs().max()) < 5 / 4000**0.5
        assert float((found.t() @ found / 4000 - torch.eye(70)).abs().max()) < 6 / 4000**0.5
        source = generator(1, "test")
        parts = torch.cat([signs((rows, 70), source) for rows in (1, 999, 3000)])
        assert torch.equal(parts, found)

    def test_a_redrawn_donor_keeps_norms_and_response_energies(self):
        x, layer = inputs(2, dominant=2.0), gated(2, layer=1)
        other = redrawn(layer, x, seed=5, recipient=0, draw=3)
        plain = moments_of(layer.gate(0, 30), layer.up(0, 30), x)
        torch.testing.assert_close(
            moments_of(other.gate(0, 30), other.up(0, 30), x), plain, rtol=1e-4, atol=1e-5
        )
        cosine = torch.nn.functional.cosine_similarity(other.gate(0, 30), layer.gate(0, 30))
        assert float(cosine.abs().median()) < 0.6

    @pytest.mark.parametrize("block", [7, 64])
    def test_its_search_is_the_search_over_redrawn_donors(self, block):
        x, own = inputs(3), gated(3)
        donors = [own, gated(3, neurons=45, layer=2)]
        groups = {0: torch.full((30,), FREE), 2: torch.full((45,), FREE)}
        groups[0][4] = groups[2][40] = 1
        groups[0][9] = APART
        found = null_search(x, own, donors, [0, 6], seed=8, block=block, groups=groups)
        for row, draw in zip(found, (0, 6), strict=True):
            drawn = [redrawn(layer, x, 8, 0, draw) for layer in donors]
            expected = search(x, own, drawn, groups=groups).correlation.abs()
            torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)


class TestTurned:
    def test_norms_and_angle_stay(self):
        gate, up, _ = matrices(4, neurons=50)
        first, second = turned(gate, up, generator(0, "test"))
        for one, other, left, right in (
            (first, first, gate, gate),
            (second, second, up, up),
            (first, second, gate, up),
        ):
            torch.testing.assert_close(
                (one * other).sum(dim=1), (left * right).sum(dim=1), rtol=1e-4, atol=1e-6
            )

    def test_every_direction_is_as_likely(self):
        gate = torch.tensor([[2.0, 0.0, 0.0]]).expand(40_000, 3)
        up = torch.tensor([[1.0, 1.0, 0.0]]).expand(40_000, 3)
        first, second = turned(gate, up, generator(1, "test"))
        across = second - first / 2
        for unit in (first / 2, across):
            # Uniform on the sphere: mean 0 and second moment I/3; a square has the variance 4/45.
            assert float(unit.mean(dim=0).abs().max()) < 5 * (1 / 3 / 40_000) ** 0.5
            moment = unit.t() @ unit / 40_000
            assert float((moment - torch.eye(3) / 3).abs().max()) < 5 * (4 / 45 / 40_000) ** 0.5

    def test_rows_that_have_no_direction(self):
        gate, up = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        first, second = turned(gate, up, generator(2, "test"))
        torch.testing.assert_close(first.norm(dim=1), torch.tensor([0.0, 5.0**0.5]))
        torch.testing.assert_close(second.norm(dim=1), torch.tensor([5.0, 0.0]))
        one = turned(torch.tensor([[-2.0]]), torch.tensor([[3.0]]), generator(3, "test"))
        assert float(one[0] * one[1]) == pytest.approx(-6.0)

    def test_its_search_is_the_search_over_turned_donors(self):
        x, own, donor = inputs(3), gated(3), gated(3, layer=2)
        found = null_search(x, own, [donor], [2], seed=8, method="isotropic", block=9)
        pair = turned(donor.gate(0, 30), donor.up(0, 30), generator(8, "neurons null isotropic 0 2", 2))
        expected = search(x, own, [layer_of_matrices(2, *pair)]).correlation.abs()
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["signs", "isotropic"])
def test_a_draw_is_the_same_in_any_company_and_any_block(method):
    x, layers = inputs(4), [gated(4), gated(4, layer=1)]
    every = null_search(x, layers[0], layers, range(5), seed=3, method=method)
    assert every.shape == (5, 30)
    assert every.dtype == torch.float64
    for draw in range(5):
        alone = null_search(x, layers[0], layers, [draw], seed=3, method=method, block=4)
        torch.testing.assert_close(alone[0], every[draw], rtol=0, atol=1e-5)
    assert len({round(float(value), 6) for value in every.amax(dim=1)}) == 5
    other = null_search(x, layers[0], layers, range(5), seed=4, method=method)
    assert float((other - every).abs().max()) > 0.01


class TestThreshold:
    def test_which_of_the_maxima(self):
        maxima = list(np.random.default_rng(0).permutation(np.linspace(0.1, 0.9, 19)))
        assert threshold(maxima) == max(maxima)
        many = list(range(99))
        assert threshold(many) == 94  # five are as large or larger: 5/100
        assert threshold(many, alpha=0.01) == 98
        assert threshold(list(range(39))) == 37

    def test_too_few_draws(self):
        with pytest.raises(ValueError, match=r"18 draws give no threshold at a level of 0\.05"):
            threshold([0.5] * 18)

    @pytest.mark.parametrize("draws", [19, 59])
    def test_it_is_exceeded_in_exactly_5_percent(self, draws):
        values = np.random.default_rng(draws).normal(size=(40_000, draws + 1))
        above = sum(row[0] > threshold(row[1:].tolist()) for row in values)
        low, high = stats.binom.ppf([1e-5, 1 - 1e-5], 40_000, 0.05)
        assert low <= above <= high


class TestJudge:
    def test_the_maximum_runs_over_all_layers_and_neurons(self):
        rng = np.random.default_rng(1)
        nulls = {layer: torch.from_numpy(rng.uniform(0, 0.9, size=(19, 6))) for layer in (3, 7)}
        nulls[7][11, 2] = 0.95
        observed = {3: torch.tensor([0.96, -0.97, 0.1]), 7: torch.tensor([0.94, -0.2])}
        found = judge(observed, nulls)
        expected = np.maximum(*(part.numpy().max(axis=1) for part in nulls.values()))
        np.testing.assert_array_equal(found.maxima, expected)
        assert found.max_correlation == 0.95
        assert found.passed[3].tolist() == [True, True, False]
        assert found.passed[7].tolist() == [False, False]
        assert found.p_values[3].tolist() == [1 / 20, 1 / 20, 1.0]
        assert float(found.p_values[7][0]) == 2 / 20

    def test_equal_to_the_threshold_does_not_pass(self):
        found = judge({0: torch.tensor([0.5, 1.0])}, {0: torch.full((19, 2), 0.5)})
        assert found.passed[0].tolist() == [False, True]

    def test_a_maximum_of_each_draw_serves_as_well(self):
        nulls = torch.from_numpy(np.random.default_rng(2).uniform(size=(19, 30)))
        whole, short = (judge({0: torch.tensor([0.9])}, {0: part}) for part in (nulls, nulls.amax(1, True)))
        assert whole.maxima == short.maxima

    def test_layers_and_draws_must_agree(self):
        with pytest.raises(ValueError, match=r"layers \[0\] against nulls of layers \[1\]"):
            judge({0: torch.zeros(2)}, {1: torch.zeros(19, 2)})
        with pytest.raises(ValueError, match=r"\[18, 19\] draws"):
            judge({0: torch.zeros(2), 1: torch.zeros(2)}, {0: torch.zeros(19, 2), 1: torch.zeros(18, 2)})


class TestJudgeEach:
    def test_it_is_the_formula(self):
        rng = np.random.default_rng(3)
        observed = {layer: torch.from_numpy(rng.uniform(-0.9, 0.9, size=7)) for layer in (2, 5)}
        nulls = {layer: torch.from_numpy(rng.uniform(0, 0.9, size=(39, 7))) for layer in (2, 5)}
        found = judge_each(observed, nulls)
        excess = {}
        for layer in (2, 5):
            values = np.arctanh(np.concatenate([np.abs(observed[layer].numpy())[None], nulls[layer].numpy()]))
            middle = np.sort(values, axis=0)[19]  # of 40 the lower of the two in the middle
            spread = np.sort(np.abs(values - middle), axis=0)[19]
            spread = np.maximum(spread, np.sort(spread)[3])
            excess[layer] = (values - middle) / spread
            limit = np.tanh(middle + found.max_excess * spread)
            np.testing.assert_allclose(found.thresholds[layer].numpy(), limit, rtol=1e-12)
        maxima = np.maximum(excess[2].max(axis=1), excess[5].max(axis=1))[1:]
        assert found.max_excess == pytest.approx(np.sort(maxima)[-2], rel=1e-12)
        for layer in (2, 5):
            above = np.abs(observed[layer].numpy()) > found.thresholds[layer].numpy()
            assert found.passed[layer].tolist() == above.tolist()
            expected = [(1 + (maxima >= value).sum()) / 40 for value in excess[layer][0]]
            np.testing.assert_allclose(found.p_values[layer].numpy(), expected)

    def test_a_dense_neuron_is_found_beside_one_whose_null_is_near_1(self):
        rng = np.random.default_rng(4)
        centre = np.r_[0.99, np.full(20, 0.3)]
        nulls = torch.from_numpy(np.tanh(np.arctanh(centre) + 0.03 * rng.normal(size=(19, 21))))
        observed = torch.from_numpy(centre.copy())
        observed[5] = 0.8
        assert not judge({0: observed}, {0: nulls}).passed[0].any()
        found = judge_each({0: observed}, {0: nulls})
        assert found.passed[0].nonzero().flatten().tolist() == [5]
        assert 0.3 < float(found.thresholds[0][6]) < 0.6
        assert float(found.thresholds[0][0]) > 0.99

    def test_its_level_is_5_percent_where_neurons_differ_in_size_and_spread(self):
        rng = np.random.default_rng(5)
        above = 0
        for _ in range(2000):
            # Heavy upper tails, as maxima have, of neurons with nulls of their own.
            middle, width = rng.uniform(0.1, 1.5, size=30), rng.uniform(0.01, 0.3, size=30)
            values = torch.from_numpy(np.tanh(middle + width * rng.gumbel(size=(20, 30)).clip(-3)).clip(0))
            above += bool(judge_each({0: values[0]}, {0: values[1:]}).passed[0].any())
        low, high = stats.binom.ppf([1e-5, 1 - 1e-5], 2000, 0.05)
        assert low <= above <= high

    def test_equal_values_and_correlations_of_1(self):
        ones = judge_each({0: torch.tensor([1.0, -1.0])}, {0: torch.ones(19, 2)})
        assert not ones.passed[0].any()
        assert ones.p_values[0].tolist() == [1.0, 1.0]

    def test_maxima_alone_do_not_do(self):
        with pytest.raises(ValueError, match=r"layer 0: draws of \(1,\) neurons for \(2,\)"):
            judge_each({0: torch.zeros(2)}, {0: torch.zeros(19, 1)})
        with pytest.raises(ValueError, match=r"layers \[0\] against nulls of layers \[1\]"):
            judge_each({0: torch.zeros(2)}, {1: torch.zeros(19, 2)})


@pytest.mark.parametrize("dominant", [0.0, 4.0])
def test_random_weights_are_not_found_and_a_planted_neuron_is(dominant):
    # 30 models of 3 layers, each with a true level of 5 %: more than 8 false ones have a chance below 1e-4.
    false = found = 0
    for seed in range(30):
        x = inputs(seed, tokens=150, dominant=dominant)
        layers = [gated(100 + seed, neurons=20, layer=layer) for layer in range(3)]
        nulls = {0: null_search(x, layers[0], layers, range(19), seed)}
        false += bool(judge({0: search(x, layers[0], layers).correlation}, nulls).passed[0].any())
        gate, up = layers[2].gate(0, 20), layers[2].up(0, 20)
        gate[13], up[13] = layers[0].gate(6, 7)[0], -2.0 * layers[0].up(6, 7)[0]
        planted = [layers[0], layers[1], layer_of_matrices(2, gate, up)]
        best = search(x, layers[0], planted)
        found += bool(judge({0: best.correlation}, nulls).passed[0][6]) and int(best.neuron[6]) == 13
    assert false <= 8
    assert found == 30


def test_planned_memory_is_beyond_that_of_the_search():
    # Turned input 4.5, six blocks of weights 3.375, C × C five times in float64 12.66, 19 draws 0.89.
    more = null_mib(2048, 576, 1536, 19, 256) - search_mib(2048, 576, 1536, 256)
    assert more == pytest.approx(4.5 + 3.375 + 12.65625 + 0.890625)


def test_ways_that_are_none():
    x, layer = inputs(0), gated(0)
    with pytest.raises(ValueError, match="at least one, by 'signs' or 'isotropic'"):
        null_search(x, layer, [layer], [], 0)
    with pytest.raises(ValueError, match="by 'tokens'"):
        null_search(x, layer, [layer], [0], 0, method="tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="twice"):
        null_search(x, layer, [layer, replace(layer)], [0], 0)
