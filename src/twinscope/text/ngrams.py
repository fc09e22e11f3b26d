"""Smoothed n-gram baselines: what counting one, two or three tokens predicts on the held-out text.

Covers unigram, bigram and trigram models with interpolated Kneser–Ney smoothing, in nats per token. Each
order is a model of its own. One discount per level, not the three of the modified form.

Sources: Kneser & Ney 1995 (ICASSP, 181–184), in the interpolated form of Chen & Goodman 1998 (Harvard
TR-10-98):

    p(w | h) = max(c(h w) − D, 0) / c(h) + D · T(h) / c(h) · p(w | h')

with ``c`` counts in the training tokens, ``T(h)`` the number of different tokens seen after ``h``, and ``h'``
the history without its oldest token. Below the highest order, ``c(h w)`` is the number of different tokens
seen before ``h w``. Below the unigram lies the uniform distribution; after an unseen history
``p(w | h) = p(w | h')``. ``D = n₁ / (n₁ + 2 n₂)``, with ``n_k`` the number of n-grams that count k (Ney,
Essen & Kneser 1994, Computer Speech & Language 8, 1–38), and ½ where n₁ or n₂ is zero, as can happen with
characters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinscope.lab.errors import DataError
from twinscope.text.datasets import Dataset

ORDERS = ("unigram", "bigram", "trigram")
_SLAB = 1 << 24


@dataclass(frozen=True, eq=False)
class Level:
    """Sparse counts of one length; sorted int64 keys, each its history's key · vocab + token."""

    keys: np.ndarray
    counts: np.ndarray
    histories: np.ndarray
    totals: np.ndarray  # c(h), aligned with histories
    kinds: np.ndarray  # T(h), aligned with histories
    discount: float  # D


@dataclass(frozen=True, eq=False)
class NgramCounts:
    """Counts of a training text for lengths 1, 2, 3 (``highest``), and for 1, 2 below a higher order."""

    vocab: int
    highest: tuple[Level, Level, Level]
    below: tuple[Level, Level]


def ngram_losses(dataset: Dataset, positions: np.ndarray | None = None) -> dict[str, float]:
    """Mean loss in nats per token of ``"unigram"``, ``"bigram"`` and ``"trigram"`` on held-out tokens.

    Counts come from ``dataset.train``. ``positions`` are the predicted tokens' places in
    ``dataset.heldout`` (int64, any number; ``batches.target_positions`` gives those of the held-out
    batches), each predicted from the tokens that stand before it in the text; None means all tokens.

    Raises:
        DataError: the vocabulary is too large to count trigrams in 64-bit keys.
        ValueError: a position lies outside the held-out text.
    """
    counts = count_ngrams(dataset.train, dataset.vocab)
    if positions is None:
        positions = np.arange(len(dataset.heldout))
    probabilities = ngram_probabilities(counts, dataset.heldout, positions)
    return {name: float(-np.log(values).mean()) for name, values in probabilities.items()}


def count_ngrams(tokens: np.ndarray, vocab: int) -> NgramCounts:
    """Count the n-grams of ``tokens`` (one dimension, ids below ``vocab``); memory grows with distinct ones.

    Raises:
        DataError: ``vocab³`` does not fit 64-bit keys.
    """
    if vocab**3 >= 1 << 63:
        raise DataError(f"a vocabulary of {vocab} is too large to count trigrams: keep it below 2 million")
    seen = [_distinct(tokens, vocab, length) for length in (1, 2, 3)]
    one, two, three = (_level(keys, counts, vocab) for keys, counts in seen)
    below_two, below_three = (
        _level(*np.unique(level.keys % vocab**length, return_counts=True), vocab)
        for length, level in ((1, two), (2, three))
    )
    return NgramCounts(vocab, (one, two, three), (below_two, below_three))


def ngram_probabilities(
    counts: NgramCounts, tokens: np.ndarray, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Probability of each of ``tokens[positions]`` given what precedes it: ``(N,)`` float64 for each order.

    Where too few tokens precede, a model falls back to its lower order, as after an unseen history.

    Raises:
        ValueError: a position lies outside ``tokens``.
    """
    positions = np.asarray(positions, dtype=np.int64)
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(tokens):
        raise ValueError(f"positions must lie in [0, {len(tokens)})")
    target = tokens[positions]
    previous = tokens[np.maximum(positions - 1, 0)].astype(np.int64)
    older = tokens[np.maximum(positions - 2, 0)].astype(np.int64)
    # The empty history has key 0; -1 is the key of none, never found.
    histories = (
        np.zeros_like(positions),
        np.where(positions >= 1, previous, -1),
        np.where(positions >= 2, older * counts.vocab + previous, -1),
    )
    lower = np.full(len(positions), 1 / counts.vocab)
    result: dict[str, np.ndarray] = {}
    for order, (name, history) in enumerate(zip(ORDERS, histories, strict=True)):
        result[name] = _interpolated(counts.highest[order], history, target, lower, counts.vocab)
        if order < len(counts.below):
            lower = _interpolated(counts.below[order], history, target, lower, counts.vocab)
    return result


def _interpolated(
    level: Level, history: np.ndarray, target: np.ndarray, lower: np.ndarray, vocab: int
) -> np.ndarray:
    total = _values_at(level.histories, level.totals, history)
    kinds = _values_at(level.histories, level.kinds, history)
    count = _values_at(level.keys, level.counts, history * vocab + target)
    seen = total > 0
    kept = np.maximum(count - level.discount, 0) + level.discount * kinds * lower
    return np.where(seen, kept / np.where(seen, total, 1), lower)


def _values_at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if not len(keys):
        return np.zeros_like(wanted)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def _level(keys: np.ndarray, counts: np.ndarray, vocab: int) -> Level:
    histories, first, kinds = np.unique(keys // vocab, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(keys) else counts
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once and twice else 0.5
    return Level(keys, counts, histories, totals, kinds, discount)


def _distinct(tokens: np.ndarray, vocab: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    keys = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens) - length + 1, _SLAB):
        piece = np.asarray(tokens[start : start + _SLAB + length - 1]).astype(np.int64)
        size = len(piece) - length + 1
        slab = piece[:size]
        for offset in range(1, length):
            slab = slab * vocab + piece[offset : offset + size]
        more, numbers = np.unique(slab, return_counts=True)
        keys, counts = _merged(np.concatenate([keys, more]), np.concatenate([counts, numbers]))
    return keys, counts


def _merged(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    return distinct, np.add.reduceat(counts[order], first)
