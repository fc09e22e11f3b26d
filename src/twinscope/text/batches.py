"""Windows of tokens addressed by number: training batches by step, held-out batches by position.

Covers which windows are read and in what order. Does not open corpora, and keeps no state: the batch of
a step never depends on the batches before it, so a resumed run reads what an uninterrupted one reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinscope.lab.draws import generator
from twinscope.lab.errors import DataError

Ids = npt.NDArray[np.int64]
Batch = tuple[Ids, Ids]


def train_batch(tokens: np.ndarray, context: int, batch: int, seed: int, step: int) -> Batch:
    """Inputs and targets, each ``(batch, context)`` int64, of uniformly random windows of ``tokens``.

    A pure function of ``(seed, step)``. ``targets[b, t]`` is the token after ``inputs[b, t]``. Windows are
    drawn with replacement from the ``len(tokens) - context`` possible ones.

    Raises:
        DataError: ``tokens`` is shorter than ``context + 1``.
    """
    _check_length(len(tokens), context, "training")
    starts = generator(seed, "batch", step).integers(0, len(tokens) - context, size=batch)
    return _windows(tokens, starts, context)


def heldout_batches(tokens: np.ndarray, context: int, batch: int, count: int) -> list[Batch]:
    """The ``count`` fixed batches, each ``(batch, context)`` int64 twice, at :func:`heldout_positions`.

    Raises:
        DataError: as for :func:`heldout_positions`.
    """
    starts = heldout_positions(len(tokens), context, batch, count)
    return [_windows(tokens, row, context) for row in starts]


def heldout_positions(length: int, context: int, batch: int, count: int) -> Ids:
    """First input position of every held-out window, ``(count, batch)`` int64, ascending in reading order.

    The windows are spread evenly from the first token to the last. No target is read twice as long as
    ``count · batch · context ≤ length − 1``; beyond that, windows overlap. A batch holds neighbouring
    windows, because an interval over batches then includes the scatter between passages of the text.

    Raises:
        DataError: ``length`` is below ``context + 1``, or there are fewer than ``count · batch`` windows.
    """
    _check_length(length, context, "held-out")
    wanted, available = count * batch, length - context
    if wanted > available:
        raise DataError(
            f"{count} held-out batches of {batch} need {wanted} windows, and the held-out text of {length} "
            f"tokens has {available} of {context} tokens: lower eval_batches or batch, or hold out more text"
        )
    # Integer arithmetic: every position is exact, and windows that fit side by side stay side by side.
    starts = np.arange(wanted, dtype=np.int64) * (available - 1) // max(wanted - 1, 1)
    return starts.reshape(count, batch)


def target_positions(starts: Ids, context: int) -> Ids:
    """Positions in the token stream of all targets of the windows at ``starts``: int64, one dimension.

    The order is that of the targets of :func:`heldout_batches`, flattened.
    """
    return (starts.reshape(-1, 1) + np.arange(1, context + 1)).reshape(-1)


def _windows(tokens: np.ndarray, starts: Ids, context: int) -> Batch:
    windows = np.asarray(tokens[starts[:, None] + np.arange(context + 1)]).astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def _check_length(length: int, context: int, part: str) -> None:
    if length <= context:
        raise DataError(
            f"a context of {context} tokens needs a {part} text of at least {context + 1}, and it has "
            f"{length}: shorten the context or give more text"
        )
