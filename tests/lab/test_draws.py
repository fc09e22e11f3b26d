"""Counter-based draws: fixed, order-free, and independent over seeds, streams and indices."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from twinscope.lab.draws import generator

GOLDEN_START = [3219823388, 1935192204, 1310132245, 1846522886]
GOLDEN_LATER = [920812262, 2777478928, 841998223, 2816488245]


def test_draws_are_the_same_on_every_machine_and_for_good() -> None:
    # Fixed on purpose: another value here changes every result that was ever stored.
    assert generator(0, "nudge").integers(0, 2**32, 4).tolist() == GOLDEN_START
    assert generator(7, "batch", 12345).integers(0, 2**32, 4).tolist() == GOLDEN_LATER


def test_what_was_drawn_before_does_not_matter() -> None:
    forward = [generator(3, "batch", index).random(5) for index in range(20)]
    backward = [generator(3, "batch", index).random(5) for index in reversed(range(20))][::-1]
    np.testing.assert_array_equal(forward, backward)
    long = generator(3, "batch", 0).random(100_000)
    assert not np.isin(forward[1], long).any(), "one index runs into the next"


@pytest.mark.parametrize(
    "other", [(1, "nudge", 5), (0, "nudge", 6), (0, "gain", 5), (-1, "nudge", 5), (0, "nudge", 2**63)]
)
def test_another_seed_stream_or_index_is_another_sequence(other: tuple[int, str, int]) -> None:
    count = 20_000
    ours, theirs = generator(0, "nudge", 5).random(count), generator(*other).random(count)
    assert not np.isin(ours[:100], theirs).any()
    # Under independence the correlation is normal with deviation 1/sqrt(n): 4.5 of them is 7e-6.
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 4.5 / np.sqrt(count)


def test_the_first_draws_over_indices_are_uniform() -> None:
    # What a run uses: one draw at each of many steps. The seeds are fixed, so the test cannot flicker.
    for stream in ("nudge", "gain"):
        first = np.array([generator(1, stream, step).random() for step in range(4000)])
        assert stats.kstest(first, "uniform").pvalue > 1e-3
        signs = np.where(first < 0.5, -1.0, 1.0)
        assert abs(signs.mean()) < 4.5 / np.sqrt(4000)
        assert abs((signs[1:] * signs[:-1]).mean()) < 4.5 / np.sqrt(4000)


def test_stream_and_seed_do_not_run_together() -> None:
    assert generator(11, "a").random() != generator(1, "a1").random()


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="index must not be negative, got -1"):
        generator(0, "nudge", -1)
