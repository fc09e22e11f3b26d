"""From matches to pairs: both directions, each pair once, ranks that share no neuron, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gated_models import exact, gated, inputs

from twinscope.reuse.neurons.pairs import (
    Direction,
    Pair,
    decided,
    found_partners,
    from_json,
    measured,
    ranked,
    to_json,
)
from twinscope.reuse.neurons.search import Matches


def matches(*best: tuple[int, int]) -> Matches:
    layers, neurons = torch.tensor(best).t()
    nothing = torch.zeros(len(best), dtype=torch.float64)
    return Matches(layers, neurons, nothing, nothing, nothing)


def direction(
    one: tuple[int, int], other: tuple[int, int], correlation: float, scale: float = 1.0
) -> Direction:
    return Direction(one, other, correlation, scale)


def pair(one: tuple[int, int], other: tuple[int, int], forward: float, backward: float = 1.0) -> Pair:
    return Pair(direction(one, other, forward), direction(other, one, backward), True)


def test_a_mutual_match_is_one_pair_and_silent_neurons_are_in_none():
    found = {
        3: matches((7, 1), (3, 2), (3, 1), (-1, -1)),
        7: matches((3, 0), (3, 0)),
    }
    assert found_partners(found, set()) == [
        ((3, 0), (7, 1)),
        ((3, 1), (3, 2)),
        ((7, 0), (3, 0)),
    ]
    assert found_partners(found, {(3, 0)}) == [((3, 1), (3, 2))]


def test_each_direction_is_measured_on_the_input_of_the_neuron_that_is_replaced():
    layers = {number: gated(1, layer=number) for number in (2, 6)}
    x = {number: inputs(number, dominant=0.5) for number in layers}
    ways = [((6, 3), (2, 1)), ((2, 1), (6, 3)), ((2, 4), (2, 9)), ((6, 0), (2, 0))]
    for way, found in zip(ways, measured(layers, x.__getitem__, ways), strict=True):
        (layer, neuron), (of, by) = way
        one = exact(x[layer], layers[layer])[:, neuron]
        other = exact(x[layer], layers[of])[:, by]
        assert (found.neuron, found.by) == way
        assert found.correlation == pytest.approx(
            one @ other / np.sqrt((one @ one) * (other @ other)), abs=1e-6
        )
        assert found.scale == pytest.approx(one @ other / (other @ other), rel=1e-5)
    assert found.name == "layers.6.mlp.0 <- layers.2.mlp.0"


def test_of_pairs_that_share_a_neuron_the_stronger_has_a_rank():
    weak, strong = pair((1, 0), (2, 0), 0.9, -0.95), pair((1, 1), (2, 1), -0.99)
    shared, last = pair((1, 2), (2, 0), 0.85), pair((1, 2), (2, 7), 1.0, 0.6)
    found = ranked([weak, last, strong, shared])
    assert [(item.id, item.rank) for item in found] == [
        ("layers.1.mlp.1=layers.2.mlp.1", 1),
        ("layers.1.mlp.0=layers.2.mlp.0", 2),
        ("layers.1.mlp.2=layers.2.mlp.0", None),
        ("layers.1.mlp.2=layers.2.mlp.7", 3),
    ]
    assert [item.strength for item in found] == [0.99, 0.9, 0.85, 0.6]


def test_both_directions_have_to_beat_the_null_and_the_floor():
    values = [(0.95, 0.9), (0.95, -0.8), (0.8, 0.95), (-0.9, -0.81)]
    forward = [direction((0, i), (1, i), one) for i, (one, _) in enumerate(values)]
    backward = [direction((1, i), (0, i), other) for i, (_, other) in enumerate(values)]

    def beyond(threshold: float, floor: float) -> set[int]:
        pairs = decided(forward, backward, threshold, floor, most=10)
        return {pair.forward.neuron[1] for pair in pairs if pair.beyond_null}

    assert beyond(0.8, 0.5) == {0, 3}
    assert beyond(0.7, 0.7) == {0}
    assert beyond(0.7, 0.64 - 1e-9) == {0, 1, 2, 3}
    # Beside those that count, the best that are to be replaced; no more.
    few = decided(forward, backward, 0.85, 0.5, most=2)
    assert [(pair.forward.neuron[1], pair.rank, pair.beyond_null) for pair in few] == [
        (0, 1, True),
        (3, 2, False),
    ]


def test_a_pair_survives_the_journal():
    kept = ranked([pair((1, 0), (2, 0), 0.9, -0.1), pair((1, 0), (2, 3), 0.4)])
    assert [from_json(to_json(item)) for item in kept] == kept
