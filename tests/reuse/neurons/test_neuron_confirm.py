"""Moments, scales and held-out R² of pairs against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gated_models import exact, gated, inputs, matrices

from twinscope.reuse.neurons import confirm
from twinscope.reuse.neurons.activations import layer_of_matrices
from twinscope.reuse.neurons.confirm import Moments, moments

OWN, OTHER = [3, 3, 29, 0], [1, 14, 29, 7]


@pytest.mark.parametrize("block", [2, 256])
def test_moments_are_the_sums(monkeypatch, block):
    monkeypatch.setattr(confirm, "BLOCK", block)
    x, layer, donor = inputs(0), gated(0), gated(0, layer=1)
    found = moments(x, layer, OWN, donor, torch.tensor(OTHER))
    a, b = exact(x, layer)[:, OWN], exact(x, donor)[:, OTHER]
    np.testing.assert_allclose(found.own.numpy(), (a * a).sum(0), rtol=1e-5)
    np.testing.assert_allclose(found.other.numpy(), (b * b).sum(0), rtol=1e-5)
    np.testing.assert_allclose(found.both.numpy(), (a * b).sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.both_squared.numpy(), ((a * b) ** 2).sum(0), rtol=1e-4)
    assert found.own.dtype == torch.float64


def test_correlation_scale_and_r2_are_those_of_the_regression():
    x, more, layer, donor = inputs(1), inputs(2), gated(1), gated(1, layer=1)
    found, held = moments(x, layer, OWN, donor, OTHER), moments(more, layer, OWN, donor, OTHER)
    a, b = exact(x, layer)[:, OWN], exact(x, donor)[:, OTHER]
    scale = np.array([np.linalg.lstsq(b[:, [p]], a[:, p], rcond=None)[0][0] for p in range(4)])
    np.testing.assert_allclose(found.scale.numpy(), scale, rtol=1e-4, atol=1e-6)
    cosine = (a * b).sum(0) / np.linalg.norm(a, axis=0) / np.linalg.norm(b, axis=0)
    np.testing.assert_allclose(found.correlation.numpy(), cosine, atol=1e-5)
    # At the fitted scale the R² is the squared correlation, on other tokens what that scale leaves.
    np.testing.assert_allclose(found.r2(found.scale).numpy(), cosine**2, atol=1e-5)
    a, b = exact(more, layer)[:, OWN], exact(more, donor)[:, OTHER]
    expected = 1 - ((a - scale * b) ** 2).sum(0) / (a**2).sum(0)
    np.testing.assert_allclose(held.r2(found.scale).numpy(), expected, atol=1e-5)
    assert (held.r2(found.scale) < held.r2(held.scale)).all()


def test_sums_of_parts_are_those_of_all_tokens():
    x, layer, donor = inputs(3), gated(3), gated(3, layer=1)
    parts = moments(x[:70], layer, OWN, donor, OTHER) + moments(x[70:], layer, OWN, donor, OTHER)
    whole = moments(x, layer, OWN, donor, OTHER)
    for part in ("own", "other", "both", "both_squared"):
        torch.testing.assert_close(getattr(parts, part), getattr(whole, part), rtol=1e-6, atol=1e-6)


def test_an_equal_pair_explains_everything_and_a_useless_one_less_than_nothing():
    x, layer = inputs(4), gated(4)
    same = moments(x, layer, [5], layer, [5])
    assert float(same.r2(torch.ones(1))) == 1.0
    assert float(same.correlation) == 1.0
    assert float(same.r2(torch.zeros(1))) == 0.0
    assert float(same.r2(torch.tensor([-1.0]))) == pytest.approx(-3.0)


def test_silent_neurons_have_no_r2():
    gate, up, _ = matrices(5)
    gate[2] = 0.0
    layer = layer_of_matrices(0, gate, up)
    found = moments(inputs(5), layer, [2, 3], layer, [3, 2])
    assert found.scale.tolist() == [0.0, 0.0]
    assert found.correlation.tolist() == [0.0, 0.0]
    left = found.r2(found.scale)
    assert bool(left[0].isnan())
    assert float(left[1]) == 0.0


def test_no_pairs_and_unequal_lists():
    layer = gated(6)
    assert moments(inputs(6), layer, [], layer, []).own.shape == (0,)
    with pytest.raises(ValueError, match="2 neurons and 1 partners are no pairs"):
        moments(inputs(6), layer, [1, 2], layer, [1])


def test_effective_tokens_are_those_that_decide():
    x = torch.cat([torch.ones(99, 2), torch.full((1, 2), 30.0)])
    rows = torch.tensor([[0.5, 0.5]])
    layer = layer_of_matrices(0, rows, rows)
    # SiLU(t) t of equal tokens is one number each; of a token 30 times as large about 1300 times that.
    assert float(moments(x[:99], layer, [0], layer, [0]).effective_tokens) == pytest.approx(99.0, rel=1e-6)
    assert float(moments(x, layer, [0], layer, [0]).effective_tokens) == pytest.approx(1.0, abs=1e-3)
    assert Moments(*torch.zeros(4, 1).double()).effective_tokens.tolist() == [0.0]
