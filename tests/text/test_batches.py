from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinscope.lab.draws import generator
from twinscope.lab.errors import DataError
from twinscope.text.batches import heldout_batches, heldout_positions, target_positions, train_batch

STREAM = np.arange(1000, 3000, dtype=np.uint16)


def test_training_windows_are_consecutive_tokens_at_the_drawn_starts():
    inputs, targets = train_batch(STREAM, context=16, batch=5, seed=3, step=7)
    starts = generator(3, "batch", 7).integers(0, len(STREAM) - 16, size=5)
    assert inputs.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(inputs, 1000 + starts[:, None] + np.arange(16))
    np.testing.assert_array_equal(targets, inputs + 1)


def test_a_batch_depends_on_seed_and_step_only():
    once = [train_batch(STREAM, 8, 4, seed=1, step=step)[0] for step in range(5)]
    again = [train_batch(STREAM, 8, 4, seed=1, step=step)[0] for step in reversed(range(5))][::-1]
    np.testing.assert_array_equal(once, again)
    assert len({batch.tobytes() for batch in once}) == 5
    assert not np.array_equal(once[0], train_batch(STREAM, 8, 4, seed=2, step=0)[0])


def test_training_windows_are_uniform_over_all_starts():
    tokens = np.arange(12, dtype=np.int32)
    starts = np.concatenate([train_batch(tokens, 4, 64, seed=0, step=step)[0][:, 0] for step in range(200)])
    counts = np.bincount(starts, minlength=8)
    expected = len(starts) / 8
    assert len(counts) == 8
    # Chi-square with 7 degrees of freedom stays below 29.9 with probability 0.9999.
    assert ((counts - expected) ** 2 / expected).sum() < 29.9


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 20), st.integers(1, 5), st.integers(1, 8))
def test_heldout_windows_are_spread_evenly_and_disjoint_where_there_is_room(length, context, batch, count):
    wanted, available = batch * count, length - context
    if available < 1 or wanted > available:
        with pytest.raises(DataError):
            heldout_positions(length, context, batch, count)
        return
    starts = heldout_positions(length, context, batch, count)
    assert starts.shape == (count, batch)
    assert starts.dtype == np.int64
    flat = starts.ravel()
    gaps = np.diff(flat)
    assert flat[0] == 0
    if wanted > 1:
        assert flat[-1] == length - context - 1
        assert gaps.max() - gaps.min() <= 1
        assert gaps.min() >= 1
    targets = target_positions(starts, context)
    assert targets.max() < length
    if wanted * context <= length - 1:
        assert len(np.unique(targets)) == len(targets)


def test_heldout_batches_are_the_tokens_at_their_positions():
    starts = heldout_positions(len(STREAM), 32, 3, 4)
    batches = heldout_batches(STREAM, 32, 3, 4)
    assert len(batches) == 4
    for row, (inputs, targets) in zip(starts, batches, strict=True):
        np.testing.assert_array_equal(inputs, 1000 + row[:, None] + np.arange(32))
        np.testing.assert_array_equal(targets, inputs + 1)
        assert inputs.dtype == targets.dtype == np.int64
    streamed = STREAM[target_positions(starts, 32)]
    np.testing.assert_array_equal(streamed, np.concatenate([targets.ravel() for _, targets in batches]))


def test_a_context_longer_than_the_text_is_a_sentence_with_both_lengths():
    with pytest.raises(
        DataError, match=r"context of 2000 tokens needs a training text of at least 2001.*2000"
    ):
        train_batch(STREAM, 2000, 1, 0, 0)
    assert train_batch(STREAM, 1999, 1, 0, 0)[0].shape == (1, 1999)
    with pytest.raises(DataError, match=r"held-out text of at least 2001.*2000"):
        heldout_batches(STREAM, 2000, 1, 1)


def test_too_many_heldout_windows_are_a_sentence_with_both_numbers():
    with pytest.raises(DataError, match=r"need 21 windows.*50 tokens has 20"):
        heldout_positions(50, 30, 3, 7)
