"""The nulls: exact where they must be exact, matched in depth, and a function of the seed alone."""

from __future__ import annotations

import pytest
import torch

from twinscope.reuse import nulls
from twinscope.reuse.measures import branch_error

MLPS = [f"layers.{layer}.mlp" for layer in range(12)]


def test_no_update_is_off_by_exactly_1():
    reference = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert branch_error(nulls.zero_update(reference), reference) == [1.0, 1.0]


def test_the_mean_is_the_constant_of_least_error():
    reference = torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    mean = reference.mean(dim=(0, 1))
    (best,) = branch_error(nulls.constant_update(mean, reference), reference)
    shares = reference.square().sum(), (reference - mean).square().sum()
    assert best == pytest.approx(float((shares[1] / shares[0]).sqrt()))
    (moved,) = branch_error(nulls.constant_update(mean + 0.1, reference), reference)
    assert moved > best


def test_permuting_moves_every_channel_alike_at_all_tokens():
    values = torch.arange(2 * 3 * 16, dtype=torch.float32).view(2, 3, 16)
    found = nulls.permuted_update(values, seed=3)
    order = (found[0, 0] - values[0, 0, 0]).long()
    assert sorted(order.tolist()) == list(range(16))
    assert all(place != channel for place, channel in enumerate(order.tolist()))
    assert torch.equal(found, values[..., order])


def test_the_permutation_is_one_cycle_that_the_seed_draws():
    order = nulls.channel_cycle(50, seed=1).tolist()
    place, seen = 0, 0
    while seen == 0 or place != 0:
        place, seen = order[place], seen + 1
    assert seen == 50
    assert nulls.channel_cycle(50, seed=1).tolist() == order
    assert nulls.channel_cycle(50, seed=2).tolist() != order
    assert nulls.channel_cycle(1, seed=0).tolist() == [0]


def test_others_are_matched_in_depth():
    # From layer 5 the substitute, 8, is 3 away: so is 2; then 1 and 9 (4 away), 3 and 7 (2 away).
    first, second, third = nulls.matched_others(MLPS, "layers.5.mlp", "layers.8.mlp", seed=0, count=3)
    assert first == "layers.2.mlp"
    assert {second, third} < {f"layers.{n}.mlp" for n in (1, 9, 3, 7)}


def test_ties_are_drawn_by_the_seed_for_each_direction():
    def choice(seed):
        return nulls.matched_others(MLPS, "layers.5.mlp", "layers.8.mlp", seed, count=2)[1]

    assert len({choice(seed) for seed in range(40)}) == 4
    assert choice(7) == choice(7)


def test_neither_module_nor_a_layer_of_its_own_is_a_null():
    every = nulls.matched_others(MLPS, "layers.0.mlp", "layers.1.mlp", seed=0, count=99)
    assert sorted(every) == sorted(MLPS[2:])
    assert nulls.matched_others(MLPS[:2], "layers.0.mlp", "layers.1.mlp", seed=0) == []
    norms = [f"layers.{layer}.self_attn.k_norm" for layer in range(4)]
    found = nulls.matched_others(norms, "layers.2.self_attn.q_norm", "layers.2.self_attn.k_norm", 0, 2)
    # Within one layer the distance is 0, so the nearest layers stand in.
    assert sorted(found) == ["layers.1.self_attn.k_norm", "layers.3.self_attn.k_norm"]


def test_a_name_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="'norm' is no site"):
        nulls.layer_of("norm")
