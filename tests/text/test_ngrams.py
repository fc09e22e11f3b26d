from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinscope.lab.errors import DataError
from twinscope.text import ngrams
from twinscope.text.batches import heldout_batches, heldout_positions, target_positions
from twinscope.text.datasets import Dataset, DataSettings, open_dataset
from twinscope.text.ngrams import ORDERS, count_ngrams, ngram_losses, ngram_probabilities


def direct(train: list[int], vocab: int, order: int, history: tuple[int, ...], word: int) -> float:
    """Interpolated Kneser–Ney from the definition, one probability at a time, by dictionaries."""

    def grams(length: int) -> Counter:
        return Counter(tuple(train[i : i + length]) for i in range(len(train) - length + 1))

    def level(length: int, history: tuple[int, ...], highest: bool) -> float:
        if length == 0:
            return 1 / vocab
        below = level(length - 1, history, False)
        if len(history) < length - 1:
            return below
        history = history[len(history) - length + 1 :]
        if highest:
            counts = grams(length)
        else:
            counts = Counter(gram[1:] for gram in grams(length + 1))
        once, twice = (sum(1 for count in counts.values() if count == k) for k in (1, 2))
        discount = once / (once + 2 * twice) if once and twice else 0.5
        after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == history}
        total = sum(after.values())
        if not total:
            return below
        return (max(after.get(word, 0) - discount, 0) + discount * len(after) * below) / total

    return level(order, history, True)


def dataset(train, heldout, vocab) -> Dataset:
    return Dataset(
        train=np.asarray(train, dtype=np.uint16),
        heldout=np.asarray(heldout, dtype=np.uint16),
        vocab=vocab,
        bytes_per_token=None,
        hashes={},
        description="",
        decode=None,
    )


def random_tokens(length: int, vocab: int, seed: int) -> list[int]:
    # Squared uniform numbers: some tokens are frequent, some are never drawn.
    return (np.random.default_rng(seed).random(length) ** 2 * vocab).astype(int).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(2, 7), st.integers(0, 2**32), st.sampled_from([1 << 24, 4]))
def test_probabilities_are_those_of_the_definition(length, vocab, seed, slab):
    train, heldout = random_tokens(length, vocab, seed), random_tokens(12, vocab, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "_SLAB", slab)
        counts = count_ngrams(np.array(train), vocab)
    found = ngram_probabilities(counts, np.array(heldout), np.arange(12))
    for order, name in enumerate(ORDERS, start=1):
        expected = [
            direct(train, vocab, order, tuple(heldout[max(0, place - order + 1) : place]), word)
            for place, word in enumerate(heldout)
        ]
        np.testing.assert_allclose(found[name], expected, rtol=1e-13)


@pytest.mark.parametrize("train", [random_tokens(300, 9, 0), [0], [3, 3], [0, 1, 2] * 20])
def test_probabilities_sum_to_one_after_every_history(train):
    vocab = 10
    counts = count_ngrams(np.array(train), vocab)
    words = np.arange(vocab)
    for older in range(vocab):
        for previous in range(vocab):
            stream = np.array([token for word in words for token in (older, previous, word)])
            for values in ngram_probabilities(counts, stream, 3 * words + 2).values():
                assert values.min() > 0
                assert values.sum() == pytest.approx(1, abs=1e-13)


def test_losses_are_means_over_exactly_the_targets_of_the_heldout_batches():
    train, heldout = random_tokens(400, 6, 1), random_tokens(120, 6, 2)
    data = dataset(train, heldout, 6)
    starts = heldout_positions(120, 8, 2, 3)
    losses = ngram_losses(data, target_positions(starts, 8))
    batches = heldout_batches(data.heldout, 8, 2, 3)
    for order, name in enumerate(ORDERS, start=1):
        total = 0.0
        for row, (_, targets) in zip(starts, batches, strict=True):
            for start, window in zip(row, targets, strict=True):
                for place, word in enumerate(window, start=int(start) + 1):
                    history = tuple(heldout[max(0, place - order + 1) : place])
                    total -= np.log(direct(train, 6, order, history, int(word)))
        assert losses[name] == pytest.approx(total / (2 * 3 * 8), rel=1e-12)


def test_without_positions_the_whole_heldout_text_is_read():
    data = dataset(random_tokens(300, 5, 3), random_tokens(50, 5, 4), 5)
    assert ngram_losses(data) == ngram_losses(data, np.arange(50))
    assert ngram_losses(data) != ngram_losses(data, np.arange(1, 50))


def test_a_large_vocabulary_is_counted_sparsely():
    vocab = 50_257
    train = np.random.default_rng(0).integers(0, vocab, 20_000)
    train[1000:1003] = train[2000:2003] = [vocab - 1, vocab - 2, vocab - 3]
    counts = count_ngrams(train, vocab)
    assert len(counts.highest[2].keys) <= 20_000
    found = ngram_probabilities(counts, train[1000:1003], np.array([2]))
    # Both continuations of the history agree: c = 2, T = 1, so (2 − D + D·lower) / 2 is above 1 − D/2.
    assert 1 - counts.highest[2].discount / 2 <= found["trigram"][0] < 1


def test_positions_and_vocabularies_out_of_range_are_refused():
    counts = count_ngrams(np.array([0, 1, 0]), 2)
    for bad in (-1, 3):
        with pytest.raises(ValueError, match=r"\[0, 3\)"):
            ngram_probabilities(counts, np.array([0, 1, 0]), np.array([bad]))
    with pytest.raises(DataError, match="too large to count trigrams"):
        count_ngrams(np.array([0]), 3_000_000)


def test_addresses_have_their_reference_losses():
    losses = ngram_losses(open_dataset(DataSettings()))
    assert losses["unigram"] == pytest.approx(3.11, abs=0.01)
    assert losses["bigram"] == pytest.approx(2.50, abs=0.01)
    assert losses["trigram"] == pytest.approx(2.07, abs=0.015)
