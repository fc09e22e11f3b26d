"""The search in blocks against all pairs in float64, and what it must leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from gated_models import exact, gated, inputs, matrices
from torch import Tensor

from twinscope.reuse.neurons.activations import GatedLayer, layer_of_matrices
from twinscope.reuse.neurons.search import APART, FREE, donors_of, receive, search, search_mib


def every_pair(x: Tensor, recipient: GatedLayer, donors: Sequence[GatedLayer]) -> dict[int, np.ndarray]:
    """Signed uncentred correlations ``(n, m)`` float64 with each donor layer; 0 where a neuron is itself."""
    own = exact(x, recipient)
    found = {}
    for donor in donors:
        other = exact(x, donor)
        norms = np.linalg.norm(own, axis=0)[:, None] * np.linalg.norm(other, axis=0)
        found[donor.layer] = (own.T @ other) / norms
        if donor.layer == recipient.layer:
            np.fill_diagonal(found[donor.layer], 0.0)
    return found


@pytest.fixture
def layers() -> list[GatedLayer]:
    return [gated(3, neurons=count, layer=layer) for layer, count in enumerate((30, 17, 41, 30))]


@pytest.mark.parametrize("block", [1, 7, 30, 1000])
@pytest.mark.parametrize("of", [0, 1, 2])
def test_the_best_of_all_pairs(layers, block, of):
    x = inputs(3)
    found = search(x, layers[of], layers, block)
    tables = every_pair(x, layers[of], layers)
    joined = np.concatenate([tables[layer.layer] for layer in layers], axis=1)
    place = np.abs(joined).argmax(axis=1)
    names = [(layer.layer, neuron) for layer in layers for neuron in range(layer.neurons)]
    assert list(zip(found.layer.tolist(), found.neuron.tolist(), strict=True)) == [names[p] for p in place]
    best = joined[np.arange(len(place)), place]
    np.testing.assert_allclose(found.correlation.numpy(), best, rtol=0, atol=2e-6)
    own, every = exact(x, layers[of]), {layer.layer: exact(x, layer) for layer in layers}
    for n, (layer, m) in enumerate(names[p] for p in place):
        a, b = own[:, n], every[layer][:, m]
        assert float(found.scale[n]) == pytest.approx((a @ b) / (b @ b), rel=1e-4, abs=1e-7)
        assert float(found.energy[n]) == pytest.approx(a @ a, rel=1e-5)


def test_a_scaled_neuron_of_another_sign_in_another_layer():
    x = inputs(4)
    gate, up, _ = matrices(4)
    up = up.clone()
    other_gate, other_up, _ = matrices(4, layer=1)
    gate[5], up[5] = other_gate[11], -3.0 * other_up[11]
    found = search(x, layer_of_matrices(0, gate, up), [layer_of_matrices(1, other_gate, other_up)])
    assert (int(found.layer[5]), int(found.neuron[5])) == (1, 11)
    assert float(found.correlation[5]) == pytest.approx(-1.0, abs=1e-6)
    assert float(found.scale[5]) == pytest.approx(-3.0, rel=1e-6)


@pytest.mark.parametrize("size", [1e-18, 1e12])
def test_size_has_no_part_in_it(size):
    x, (gate, up, _) = inputs(5), matrices(5)
    plain = search(x, layer_of_matrices(0, gate, up), [layer_of_matrices(0, gate, up)])
    sized = search(x, layer_of_matrices(0, gate, up), [layer_of_matrices(1, gate, up * size)])
    assert sized.neuron.tolist() == list(range(30))
    assert float(sized.correlation.min()) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(sized.scale.numpy(), 1.0 / size, rtol=1e-5)
    tiny = search(x, layer_of_matrices(0, gate, up * size), [layer_of_matrices(0, gate, up * size)])
    np.testing.assert_allclose(tiny.correlation.numpy(), plain.correlation.numpy(), atol=1e-5)


def test_no_neuron_is_its_own_match_but_of_an_equal_one(layers):
    x = inputs(3)
    alone = search(x, layers[0], [layers[0]], block=4)
    assert all(neuron != own for own, neuron in enumerate(alone.neuron.tolist()))
    copy = replace(layers[0], layer=9)
    assert search(x, layers[0], [copy], block=4).neuron.tolist() == list(range(30))


def test_the_earlier_of_equal_donors_wins(layers):
    x, own = inputs(3), layers[0]
    copies = [replace(own, layer=number) for number in (8, 9)]
    assert set(search(x, own, copies).layer.tolist()) == {8}
    assert set(search(x, own, copies[::-1]).layer.tolist()) == {9}


class TestGroups:
    def test_neurons_of_one_label_are_no_match(self, layers):
        x = inputs(3)
        best = search(x, layers[0], layers)
        n, layer, m = 12, int(best.layer[12]), int(best.neuron[12])
        groups = {one.layer: torch.full((one.neurons,), FREE) for one in layers}
        groups[0][n] = groups[layer][m] = 4
        found = search(x, layers[0], layers, block=9, groups=groups)
        assert (int(found.layer[n]), int(found.neuron[n])) != (layer, m)
        assert abs(float(found.correlation[n])) < abs(float(best.correlation[n]))
        others = [k for k in range(30) if k != n and (0, k) != (layer, m)]
        assert found.neuron[others].tolist() == best.neuron[others].tolist()
        # Without a label in common nothing is left out.
        groups[layer][m] = 5
        assert int(search(x, layers[0], layers, groups=groups).neuron[n]) == m

    def test_a_neuron_apart_neither_finds_nor_is_found(self, layers):
        x = inputs(3)
        best = search(x, layers[0], layers)
        layer, m = int(best.layer[0]), int(best.neuron[0])
        groups = {one.layer: torch.full((one.neurons,), FREE) for one in layers}
        groups[0][7] = groups[layer][m] = APART
        found = search(x, layers[0], layers, block=9, groups=groups)
        assert (int(found.layer[7]), int(found.neuron[7]), float(found.correlation[7])) == (-1, -1, 0.0)
        pairs = list(zip(found.layer.tolist(), found.neuron.tolist(), strict=True))
        assert (layer, m) not in pairs
        assert (0, 7) not in pairs


def test_silent_neurons_match_nothing():
    x, (gate, up, _) = inputs(6), matrices(6)
    gate[3], up[8] = 0.0, 0.0
    layer = layer_of_matrices(0, gate, up)
    found = search(x, layer, [layer], block=4)
    for neuron in (3, 8):
        assert int(found.layer[neuron]) == int(found.neuron[neuron]) == -1
        assert float(found.correlation[neuron]) == float(found.scale[neuron]) == 0.0
        assert float(found.energy[neuron]) == 0.0
    assert not {3, 8} & set(found.neuron.tolist())
    nothing = layer_of_matrices(1, torch.zeros(4, 12), up[:4])
    assert set(search(x, layer, [nothing]).layer.tolist()) == {-1}


def test_rows_are_read_a_block_at_a_time(layers):
    spans = []

    def gate(start, stop):
        spans.append((start, stop))
        return layers[2].gate(start, stop)

    search(inputs(3), layers[0], [replace(layers[2], gate=gate)], block=16)
    assert spans == [(0, 16), (16, 32), (32, 41)]


def test_activations_of_the_recipient_have_length_1():
    x, layer = inputs(7), gated(7)
    own = receive(x, layer, block=11)
    values = exact(x, layer)
    np.testing.assert_allclose(own.norms.numpy(), np.linalg.norm(values, axis=0), rtol=1e-6)
    np.testing.assert_allclose(own.unit.numpy(), values / np.linalg.norm(values, axis=0), atol=1e-6)


def test_planned_memory_counts_the_recipient_and_three_blocks():
    # 2048 tokens, 576 channels, 1536 neurons, blocks of 256: 4.5 + 12 + 6 of activations, 3 of tables,
    # 2.25 of weights, 8 of float64.
    assert search_mib(2048, 576, 1536, 256) == pytest.approx(4.5 + 12 + 6 + 3 + 2.25 + 8)


class TestRefusals:
    def test_what_does_not_fit(self, layers):
        x = inputs(3)
        with pytest.raises(ValueError, match="at least one donor"):
            search(x, layers[0], [])
        with pytest.raises(ValueError, match="layer 5 reads 9 channels, layer 0 12"):
            search(x, layers[0], [gated(0, width=9, layer=5)])
        with pytest.raises(ValueError, match="twice"):
            donors_of(layers[0], [layers[1], layers[1]])
        for wrong in (x[:, :5], x[:0], x[None]):
            with pytest.raises(ValueError, match="for a layer of 12 channels"):
                search(wrong, layers[0], layers)
