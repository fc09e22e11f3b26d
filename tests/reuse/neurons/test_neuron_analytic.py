"""Identities of the weights: found at any scale and sign they may have, and nothing else filed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gated_models import exact, gated, inputs, matrices
from torch import Tensor

from twinscope.reuse.neurons import parallel
from twinscope.reuse.neurons.activations import ROUNDING, GatedLayer, layer_of_matrices
from twinscope.reuse.neurons.analytic import Analytic, identities, silent, silent_neurons
from twinscope.reuse.neurons.parallel import compare_weights, homogeneous, parallel_pairs, sketch
from twinscope.reuse.neurons.search import APART, FREE, search

Matrices = tuple[Tensor, Tensor, Tensor]


def filed(found, kind: str) -> dict[tuple[int, int], Analytic]:
    return {(item.neuron, item.other_neuron): item for item in found.filed if item.kind == kind}


def copied(
    source: Matrices,
    order: np.ndarray,
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    gate_scale: float = 1.0,
) -> Matrices:
    gate, up, down = source
    places = torch.from_numpy(order)
    return gate_scale * gate[places], up_scale * up[places], down_scale * down[:, places]


class TestWithinALayer:
    @pytest.fixture
    def layer(self) -> GatedLayer:
        gate, up, down = matrices(0)
        gate[4], up[4] = gate[20], -2.5 * up[20]  # merges
        gate[7], up[7], down[:, 7] = 1.7 * gate[1], up[1], 3.0 * down[:, 1]  # another temperature
        gate[9], up[9] = -gate[2], up[2]  # another function
        gate[11] = gate[3]  # another function
        return layer_of_matrices(5, gate, up, down)

    def test_parallel_gate_and_up_are_filed(self, layer):
        found = identities([layer])
        pairs = filed(found, "parallel")
        assert list(pairs) == [(1, 7), (4, 20)]
        assert len(found.filed) == 2
        merged = pairs[4, 20]
        assert (merged.layer, merged.other_layer, merged.exact) == (5, 5, True)
        assert merged.gate_scale == pytest.approx(1.0, abs=1e-7)
        assert merged.up_scale == pytest.approx(-2.5, rel=1e-6)
        assert merged.down_scale is None

    def test_a_gate_of_another_length_does_not_merge(self, layer):
        other = filed(identities([layer]), "parallel")[1, 7]
        assert not other.exact
        assert other.reason.endswith("the gates differ in length, so the two do not merge exactly")
        assert other.gate_scale == pytest.approx(1 / 1.7, rel=1e-6)
        assert other.up_scale == pytest.approx(1.0, rel=1e-6)
        assert other.down_scale == pytest.approx(1 / 3.0, rel=1e-6)

    def test_what_is_exact_holds_for_every_input_and_the_rest_does_not(self, layer):
        values = exact(inputs(1), layer)
        np.testing.assert_allclose(values[:, 4], -2.5 * values[:, 20], rtol=1e-4, atol=1e-6)
        best = (values[:, 1] @ values[:, 7]) / (values[:, 7] @ values[:, 7])
        assert np.abs(values[:, 1] - best * values[:, 7]).max() > 0.01

    def test_the_search_leaves_them_out(self, layer):
        x, groups = inputs(1), identities([layer]).groups
        assert groups[5][4] == groups[5][20] != groups[5][1] == groups[5][7]
        assert int((groups[5] == FREE).sum()) == 26
        assert search(x, layer, [layer]).neuron[[4, 20]].tolist() == [20, 4]
        found = search(x, layer, [layer], groups=groups).neuron
        assert int(found[4]) != 20
        assert int(found[20]) != 4

    def test_three_parallel_neurons_are_one_group(self):
        gate, up, down = matrices(1)
        for to, scale in ((12, 2.0), (25, -0.5)):
            gate[to], up[to] = gate[6], scale * up[6]
        layer = layer_of_matrices(0, gate, up, down)
        groups = identities([layer]).groups
        assert len({int(groups[0][n]) for n in (6, 12, 25)}) == 1
        found = search(inputs(1), layer, [layer], groups=groups)
        assert not {6, 12, 25} & {int(found.neuron[n]) for n in (6, 12, 25)}

    def test_with_relu_a_gates_length_only_scales(self):
        gate, up, down = matrices(2)
        gate[3], up[3] = 4.0 * gate[8], -0.5 * up[8]
        layer = layer_of_matrices(0, gate, up, down, act=torch.nn.functional.relu)
        assert filed(identities([layer]), "parallel")[3, 8].exact
        found = compare_weights(layer, [3], layer, [8])
        assert float(found.factor) == pytest.approx(-2.0, rel=1e-6)
        assert homogeneous(torch.relu)
        assert not homogeneous(torch.nn.functional.silu)
        assert not homogeneous(torch.nn.functional.gelu)


class TestDead:
    def test_a_zero_part_is_dead_and_takes_no_part(self):
        gate, up, down = matrices(3)
        gate[2], up[14], down[:, 21] = 0.0, 0.0, 0.0
        gate[5], up[5] = gate[21], up[21]  # parallel to a dead one: the one that is left needs no merging
        layer = layer_of_matrices(1, gate, up, down)
        found = identities([layer])
        dead = filed(found, "dead")
        assert {neuron: item.reason for (neuron, _), item in dead.items()} == {
            2: "its gate is zero",
            14: "its up is zero",
            21: "its down is zero",
        }
        assert len(found.filed) == 3
        assert (found.groups[1] == APART).nonzero().flatten().tolist() == [2, 14, 21]
        best = search(inputs(3), layer, [layer], groups=found.groups)
        assert not {2, 14, 21} & set(best.neuron.tolist())
        assert best.layer[[2, 14, 21]].tolist() == [-1, -1, -1]

    def test_neurons_that_say_nothing_on_these_tokens(self):
        x, (gate, up, down) = inputs(4).abs(), matrices(4)
        gate[6] = -1e3  # far below zero on positive inputs: SiLU underflows
        down[:, 9] *= 1e-9
        down[:, 10] *= 1e-4
        down[:, 12] = 0.0
        layer = layer_of_matrices(0, gate, up, down)
        energy = search(x, layer, [layer]).energy
        assert silent(layer, energy).nonzero().flatten().tolist() == [6, 9, 12]
        found = silent_neurons(layer, energy, identities([layer]).groups)
        assert [item.neuron for item in found] == [6, 9]
        assert {item.kind for item in found} == {"dead"}
        assert "below 1e-06 of the layer's median" in found[0].reason


class TestModuleCopies:
    ORDER = np.random.default_rng(9).permutation(30)

    def test_a_permuted_and_rescaled_module(self):
        source = matrices(5)
        layers = [
            layer_of_matrices(2, *source),
            layer_of_matrices(6, *copied(source, self.ORDER, up_scale=-2.0, down_scale=-1.5)),
        ]
        found = identities(layers)
        (copy,) = found.copies
        assert (copy.layer, copy.other_layer, copy.folded, copy.share, copy.same_update) == (
            2,
            6,
            False,
            1.0,
            1.0,
        )
        # The second writes 3 times what the first does, so the first a third of the second.
        assert copy.update_scale == pytest.approx(1 / 3, rel=1e-6)
        pairs = filed(found, "module_copy")
        assert sorted(pairs) == sorted((int(of), to) for to, of in enumerate(self.ORDER))
        assert all(item.exact and item.other_layer == 6 for item in pairs.values())
        assert len(found.filed) == 30
        best = search(inputs(5), layers[0], layers, groups=found.groups)
        assert not any(
            layer == 6 and int(self.ORDER[m]) == n
            for n, (layer, m) in enumerate(zip(best.layer.tolist(), best.neuron.tolist(), strict=True))
        )

    def test_copied_neurons_with_outputs_of_their_own(self):
        gate, up, down = matrices(6)
        layers = [layer_of_matrices(0, gate, up, down), layer_of_matrices(1, gate, up, matrices(7)[2])]
        (copy,) = identities(layers).copies
        assert (copy.share, copy.same_update, copy.update_scale) == (1.0, 0.0, None)

    @pytest.mark.parametrize(("count", "kinds"), [(15, {"module_copy"}), (14, set())])
    def test_half_of_a_module_is_a_copy_and_less_are_duplicates(self, count, kinds):
        source, target = matrices(8), [part.clone() for part in matrices(8, layer=1)]
        gate, up, _ = copied(source, self.ORDER)
        for part, new in zip(target[:2], (gate, up), strict=True):
            part[:count] = new[:count]
        layers = [layer_of_matrices(0, *source), layer_of_matrices(1, *target)]
        found = identities(layers)
        assert {item.kind for item in found.filed} == kinds
        assert len(found.filed) == (count if kinds else 0)
        best = search(inputs(8), layers[1], layers, groups=found.groups)
        matched = [
            int(best.neuron[n]) == int(self.ORDER[n]) and int(best.layer[n]) == 0 for n in range(count)
        ]
        assert set(matched) == {not kinds}

    def test_many_parallel_to_one_are_no_module(self):
        gate, up, down = matrices(10)
        other = layer_of_matrices(1, gate[:1].repeat(30, 1), up[:1].repeat(30, 1), down)
        found = identities([layer_of_matrices(0, gate, up, down), other])
        assert not found.copies
        assert {item.kind for item in found.filed} == {"parallel"}

    @pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
    def test_a_copy_with_its_gain_folded(self, dtype, name):
        rng = np.random.default_rng(11)
        gain = torch.from_numpy(np.exp(0.4 * rng.normal(size=64))).to(dtype).float()
        source = tuple(part.to(dtype).float() for part in matrices(11, width=64))
        gate, up, down = copied(source, self.ORDER)
        folded = tuple(part.to(dtype).float() for part in (gate * gain, up * gain, down))
        rounding = ROUNDING[name]
        layers = [
            layer_of_matrices(0, *source, gain=gain, rounding=rounding),
            layer_of_matrices(1, *folded, rounding=rounding),
        ]
        found = identities(layers)
        (copy,) = found.copies
        assert (copy.folded, copy.share, copy.same_update) == (True, 1.0, 1.0)
        assert copy.update_scale == pytest.approx(1.0, abs=2e-2 if name == "BF16" else 1e-6)
        assert found.filed[0].reason.endswith("after folding the norm gains")

    def test_a_few_folded_neurons_are_filed_and_a_few_plain_ones_are_not(self):
        rng = np.random.default_rng(12)
        gain = torch.from_numpy(np.exp(0.4 * rng.normal(size=12))).float()
        source, (gate, up, down) = matrices(12), matrices(12, layer=1)
        gate[3], up[3] = source[0][17] * gain, -source[1][17] * gain
        gate[4], up[4] = source[0][18], source[1][18]
        layers = [layer_of_matrices(0, *source, gain=gain), layer_of_matrices(1, gate, up, down)]
        found = identities(layers)
        (item,) = found.filed
        assert (item.kind, item.layer, item.neuron, item.other_layer, item.other_neuron) == (
            "folded",
            0,
            17,
            1,
            3,
        )
        assert item.up_scale == pytest.approx(-1.0, rel=1e-6)
        best = search(inputs(12), layers[1], layers, groups=found.groups)
        assert (int(best.layer[4]), int(best.neuron[4])) == (0, 18)
        assert bool(compare_weights(layers[1], [4], layers[0], [18]).identical)
        assert not bool(compare_weights(layers[1], [3], layers[0], [17]).parallel)
        assert bool(compare_weights(layers[1], [3], layers[0], [17], folded=True).identical)


class TestParallel:
    @pytest.mark.parametrize(
        ("noise", "rounding", "same"),
        [
            (3e-3, "BF16", True),
            (3e-3, "F32", False),
            (3e-2, "BF16", False),
            (3e-4, "F16", True),
            (2e-7, "F32", True),
        ],
    )
    def test_rounding_is_that_of_the_files(self, noise, rounding, same):
        gate, up, down = matrices(13, width=100)
        rng = np.random.default_rng([13, 5])
        rms = 1 / 10
        near = tuple(
            part + noise * rms * torch.from_numpy(rng.normal(size=tuple(part.shape))).float()
            for part in (gate, up)
        )
        one = layer_of_matrices(0, gate, up, down, rounding=ROUNDING[rounding])
        other = layer_of_matrices(1, *near, down, rounding=ROUNDING[rounding])
        assert set(compare_weights(one, range(30), other, range(30)).parallel.tolist()) == {same}

    def test_the_sketch_misses_none_and_adds_none(self):
        # Wide rows, of which the sketch sees a part only; all pairs compared whole beside it.
        gate, up, down = matrices(14, neurons=60, width=300)
        other = [part.clone() for part in matrices(14, neurons=50, width=300, layer=1)]
        rng = np.random.default_rng(14)
        taken = dict(zip(rng.permutation(50)[:20].tolist(), rng.permutation(60)[:20].tolist(), strict=True))
        for to, of in taken.items():
            other[0][to] = gate[of] * float(rng.uniform(0.2, 5.0))
            other[1][to] = up[of] * float(rng.choice([-1, 1]) * rng.uniform(0.2, 5.0))
        layers = layer_of_matrices(0, gate, up, down), layer_of_matrices(1, *other)
        found, weights = parallel_pairs(*layers, (sketch(layers[0]), sketch(layers[1])), block=16)
        cosines = [
            torch.nn.functional.normalize(one.double()) @ torch.nn.functional.normalize(two.double()).t()
            for one, two in ((gate, other[0]), (up, other[1]))
        ]
        same = ((cosines[0] > 1 - 1e-9) & (cosines[1].abs() > 1 - 1e-9)).nonzero().tolist()
        assert found.tolist() == same
        assert sorted((of, to) for to, of in taken.items()) == sorted(map(tuple, same))
        for (of, to), scale in zip(found.tolist(), weights.gate_scale.tolist(), strict=True):
            assert scale == pytest.approx(float(gate[of].norm() / other[0][to].norm()), rel=1e-5)

    def test_zero_rows_are_parallel_to_nothing(self):
        gate, up, down = matrices(15)
        gate[0] = gate[1] = 0.0
        layer = layer_of_matrices(0, gate, up, down)
        found = compare_weights(layer, [0, 0, 2], layer, [1, 2, 0])
        assert not found.parallel.any()
        assert bool(found.gate_scale.isnan().all())

    def test_many_pairs_are_compared_some_at_a_time(self, monkeypatch):
        gate, up, down = matrices(17)
        one, other = layer_of_matrices(0, gate, up, down), layer_of_matrices(1, 2.0 * gate, -up, down)
        whole = compare_weights(one, range(30), other, range(30))
        monkeypatch.setattr(parallel, "BLOCK", 7)
        parts = compare_weights(one, range(30), other, range(30))
        assert whole.gate_scale.tolist() == parts.gate_scale.tolist() == [0.5] * 30
        assert whole.up_scale.tolist() == parts.up_scale.tolist() == [-1.0] * 30
        assert not (whole.identical | parts.identical).any()

    def test_unequal_lists(self):
        layer = gated(0)
        with pytest.raises(ValueError, match="2 neurons and 1 others are no pairs"):
            compare_weights(layer, [0, 1], layer, [2])
        assert compare_weights(layer, [], layer, []).parallel.shape == (0,)


def test_random_layers_have_no_identities():
    layers: list[Any] = [gated(16, layer=number) for number in range(4)]
    found = identities(layers, block=8)
    assert not found.filed
    assert not found.copies
    assert all(bool((labels == FREE).all()) for labels in found.groups.values())
