"""Measures against scipy, dense float64 softmax and sorting by hand; edge cases exactly."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from twinscope.reuse import measures


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def attention(batch: int, heads: int, length: int, seed: int, sharpness: float = 2.0) -> Tensor:
    """Causal probabilities (B, H, T, T) in float32, as eager attention gives them."""
    scores = sharpness * draws(batch, heads, length, length, seed=seed)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return scores.softmax(-1).float()


def blocks_of(logits: Tensor, size: int):
    def each(work):
        for start in range(0, logits.shape[1], size):
            yield work(start, logits[:, start : start + size])

    return each


def ranked(row: np.ndarray, k: int) -> list[int]:
    """By value, then by place: Python's own stable sort."""
    return sorted(range(len(row)), key=lambda place: -row[place])[:k]


class TestBranchError:
    def test_is_the_ratio_of_norms_over_tokens_and_channels(self):
        reference, substitute = draws(3, 5, 7), draws(3, 5, 7, seed=1)
        found = measures.branch_error(substitute.float(), reference.float())
        for text in range(3):
            one, other = (part[text].float().double().numpy() for part in (reference, substitute))
            expected = np.linalg.norm(other - one) / np.linalg.norm(one)
            assert found[text] == pytest.approx(expected, rel=1e-13)

    def test_a_scaled_copy_is_off_by_the_scale_on_either_side(self):
        reference = draws(2, 4, 6)
        assert measures.branch_error(1.3 * reference, reference) == pytest.approx([0.3, 0.3])
        assert measures.branch_error(reference, 1.3 * reference) == pytest.approx([0.3 / 1.3] * 2)

    def test_equal_is_exactly_0_and_nothing_exactly_1(self):
        reference = draws(2, 4, 6).float()
        assert measures.branch_error(reference.clone(), reference) == [0.0, 0.0]
        assert measures.branch_error(torch.zeros_like(reference), reference) == [1.0, 1.0]

    def test_a_reference_of_zeros_has_no_error(self):
        reference = draws(2, 4, 6)
        reference[1] = 0
        assert measures.branch_error(draws(2, 4, 6, seed=1), reference)[1] is None

    def test_left_out_channels_do_not_count(self):
        reference, substitute = draws(1, 5, 4), draws(1, 5, 4, seed=1)
        keep = torch.tensor([True, False, True, True])
        (found,) = measures.branch_error(substitute, reference, keep)
        (expected,) = measures.branch_error(substitute[..., keep], reference[..., keep])
        assert found == expected
        assert measures.branch_error(substitute, torch.where(keep, 0.0, reference), keep) == [None]

    def test_bfloat16_is_summed_in_float64(self):
        reference = torch.ones(1, 64, 512, dtype=torch.bfloat16)
        (found,) = measures.branch_error(reference * 1.0078125, reference)
        assert found == pytest.approx(0.0078125, rel=1e-14)


class TestMassiveChannels:
    def test_only_channels_far_above_the_median_are_massive(self):
        updates = draws(4, 50, 40)
        updates[..., 3] *= 30
        updates[..., 17] *= 3
        found = measures.massive_dimensions(updates)
        assert found.nonzero().flatten().tolist() == [3]
        assert measures.massive_dimensions(updates, multiple=2.0).nonzero().flatten().tolist() == [3, 17]

    def test_the_rule_is_the_rms_over_all_tokens(self):
        updates = torch.ones(2, 3, 5)
        updates[0, 0, 2] = 24.0  # RMS over 6 tokens √((576 + 5)/6) = 9.84
        assert not measures.massive_dimensions(updates).any()
        updates[0, 0, 2] = 24.5  # 10.04
        assert measures.massive_dimensions(updates).tolist() == [False, False, True, False, False]

    def test_mean_update(self):
        updates = draws(3, 4, 5)
        expected = updates.reshape(-1, 5).mean(dim=0).float()
        assert torch.allclose(measures.mean_update(updates), expected, rtol=1e-6, atol=0)
        assert torch.allclose(measures.mean_update(updates[:, :, None]), expected, rtol=1e-6, atol=0)


class TestAttention:
    def test_divergence_is_scipys_squared_in_bits(self):
        one, other = attention(2, 3, 6, seed=0), attention(2, 3, 6, seed=1)
        found = measures.attention_js(one, other)
        assert found.shape == (2, 3)
        for text, head in itertools.product(range(2), range(3)):
            rows = [
                jensenshannon(one[text, head, q].double(), other[text, head, q].double(), base=2) ** 2
                for q in range(1, 6)
            ]
            assert float(found[text, head]) == pytest.approx(np.mean(rows), rel=1e-6)

    def test_equal_is_0_and_disjoint_is_1_bit(self):
        one = attention(1, 2, 5, seed=0)
        assert measures.attention_js(one, one.clone()).tolist() == [[0.0, 0.0]]
        first, second = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
        first[..., 0], second[..., 1] = 1.0, 1.0
        assert measures.attention_js(first, second).tolist() == [[1.0]]

    def test_agreement_by_sorting(self):
        one, other = attention(2, 2, 9, seed=0), attention(2, 2, 9, seed=1)
        found = measures.attention_topk(one, other, k=3)
        for text, head in itertools.product(range(2), range(2)):
            shares = [
                len(set(ranked(one[text, head, q].numpy(), 3)) & set(ranked(other[text, head, q].numpy(), 3)))
                / 3
                for q in range(3, 9)
            ]
            assert float(found[text, head]) == pytest.approx(np.mean(shares))

    def test_too_short_or_of_other_shape_is_refused(self):
        with pytest.raises(ValueError, match="nothing to compare"):
            measures.attention_js(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
        with pytest.raises(ValueError, match="no query of 5 positions sees more than 5"):
            measures.attention_topk(attention(1, 1, 5, 0), attention(1, 1, 5, 1))
        with pytest.raises(ValueError, match="shapes"):
            measures.attention_js(attention(1, 2, 5, 0), attention(1, 3, 5, 1))

    def test_heads_in_another_order_are_matched(self):
        one = attention(2, 6, 8, seed=0)
        order = [3, 0, 5, 1, 4, 2]
        shuffled = one[:, order]
        found = measures.match_heads(one, shuffled)
        assert [order[place] for place in found] == list(range(6))
        assert measures.attention_js(one, shuffled[:, found]).max() == 0
        assert measures.attention_js(one, shuffled).max() > 0.1

    def test_the_match_is_the_best_of_all_orders(self):
        one, other = attention(2, 4, 6, seed=0), attention(2, 4, 6, seed=1)
        roots = [part.double().sqrt() for part in (one, other)]

        def affinity(order):
            return float((roots[0] * roots[1][:, list(order)]).sum())

        best = max(itertools.permutations(range(4)), key=affinity)
        assert tuple(measures.match_heads(one, other)) == best

    def test_equal_heads_stay_in_place(self):
        one = attention(1, 1, 6, seed=0).expand(1, 4, 6, 6)
        assert measures.match_heads(one, one.clone()) == [0, 1, 2, 3]


class TestLogits:
    @pytest.mark.parametrize("size", [1, 7, 50, 300])
    def test_divergence_and_agreement_are_those_of_the_dense_distributions(self, size):
        logits = (4 * draws(6, 300)).float()
        left, right = [0, 0, 1, 5, 2], [1, 2, 0, 4, 2]
        found = measures.compare_logits(blocks_of(logits, size), left, right)
        dense = logits.double().softmax(-1).numpy()
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            expected = jensenshannon(dense[one], dense[other], base=2) ** 2
            assert float(found.js[place]) == pytest.approx(expected, rel=1e-9, abs=1e-15)
            for k in measures.LOGIT_K:
                first, second = (set(ranked(logits[row].numpy(), k)) for row in (one, other))
                assert float(found.topk[k][place]) == pytest.approx(len(first & second) / k)

    def test_nearly_equal_distributions_keep_their_digits(self):
        # JS of p and p + δ is δᵀ diag(1/p) δ / 8 nats to second order.
        logits = draws(1, 40).repeat(2, 1)
        logits[1] += 1e-6 * draws(40, seed=1)
        found = measures.compare_logits(blocks_of(logits, 9), [0], [1])
        p, q = logits.softmax(-1)
        expected = float(((p - q) ** 2 / p).sum()) / 8 / np.log(2)
        assert float(found.js[0]) == pytest.approx(expected, rel=1e-5)
        assert 1e-14 < expected < 1e-12

    def test_equal_is_exactly_0_and_disjoint_is_1_bit(self):
        logits = draws(2, 30).float()
        logits[1] = logits[0]
        found = measures.compare_logits(blocks_of(logits, 8), [0, 0], [0, 1])
        assert found.js.tolist() == [0.0, 0.0]
        assert all(share.tolist() == [1.0, 1.0] for share in found.topk.values())
        apart = torch.full((2, 30), -torch.inf)
        apart[0, :12], apart[1, 12:] = 0.0, 0.0
        # Whole blocks of a row may hold no probability at all.
        found = measures.compare_logits(blocks_of(apart, 6), [0], [1])
        assert found.js.tolist() == [pytest.approx(1.0, abs=1e-14)]
        assert [float(share) for share in found.topk.values()] == [0.0, 0.0, 0.0]

    def test_equal_logits_are_ranked_by_token(self):
        logits = torch.zeros(2, 25)
        logits[1, 3:] = 1.0
        logits[1, 9] = 2.0
        found = measures.compare_logits(blocks_of(logits, 4), [0], [1])
        # Row 0 ranks 0, 1, 2, …; row 1 ranks 9, 3, 4, 5, 6, 7, 8, 10, 11, 12.
        shares = {k: float(share) for k, share in found.topk.items()}
        assert shares == {1: 0.0, 5: pytest.approx(0.4), 10: pytest.approx(0.7)}

    def test_large_logits_do_not_overflow(self):
        logits = (1e4 * draws(2, 50)).float()
        found = measures.compare_logits(blocks_of(logits, 20), [0], [1])
        assert found.js.tolist() == [pytest.approx(1.0)]

    def test_blocks_out_of_order_or_too_few_tokens_are_refused(self):
        logits = draws(2, 20)
        with pytest.raises(ValueError, match="starts at token 10, not at 0"):
            measures.compare_logits(lambda work: [work(10, logits[:, 10:])], [0], [1])
        with pytest.raises(ValueError, match="9 tokens has no 10"):
            measures.compare_logits(blocks_of(logits[:, :9], 4), [0], [1])

    def test_blocks_of_several_threads_give_the_same(self):
        logits = (3 * draws(40, 300)).float()
        left, right = list(range(20)), list(range(20, 40))

        def each(work):
            with ThreadPoolExecutor(4) as pool:
                parts = [(start, logits[:, start : start + 32]) for start in range(0, 300, 32)]
                yield from pool.map(lambda part: work(*part), parts)

        found, expected = (measures.compare_logits(way, left, right) for way in (each, blocks_of(logits, 32)))
        assert torch.equal(found.js, expected.js)
        assert all(torch.equal(found.topk[k], expected.topk[k]) for k in measures.LOGIT_K)


class TestTopK:
    def test_against_sorting_with_many_ties(self):
        values = torch.from_numpy(np.random.default_rng(0).integers(0, 4, size=(40, 30))).float()
        found, places = measures.top_k(values, 7)
        for row in range(40):
            assert places[row].tolist() == ranked(values[row].numpy(), 7)
            assert torch.equal(found[row], values[row, places[row]])

    def test_any_shape_and_no_more_than_there_is(self):
        values = draws(2, 3, 8)
        assert measures.top_k(values, 8)[1].shape == (2, 3, 8)
        with pytest.raises(ValueError, match="no 9 largest of 8"):
            measures.top_k(values, 9)
