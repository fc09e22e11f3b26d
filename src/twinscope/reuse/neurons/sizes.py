"""What a comparison of neurons holds in memory: how much goes through together, and the planned peak.

Covers sizes, from shapes alone. What is done is in stages.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from twinscope.reuse.neurons.activations import GatedLayer
from twinscope.reuse.neurons.null import null_mib
from twinscope.reuse.neurons.replaced import HEAD_ROWS, replaced_mib
from twinscope.reuse.neurons.search import search_mib
from twinscope.reuse.neurons.settings import NeuronSettings

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM
    from twinscope.reuse.texts import Passage

#: Draws of the null between two looks at the budgets.
DRAWS_AT_A_TIME = 5
#: Donors whose redrawn weights are held at a time.
NULL_BLOCK = 128
#: What a pass may hold for the tokens that go through together, in bytes.
_PASS_BYTES = 32 << 20
_MIB = 2.0**20
#: A block of the head, in MiB of its weights, and how many blocks of logits exist at once: on two threads,
#: with the exponentials of each.
_HEAD_BLOCK_MIB, _LOGITS = 3.0, 6


def planned_mib(
    lm: StreamedLM,
    layers: Mapping[int, GatedLayer],
    settings: NeuronSettings,
    passages: Sequence[Passage],
    held_mib: float | None = None,
) -> float:
    """The planned peak in MiB: what is kept of one split, and beside it the largest part of the work.

    ``held_mib`` as for ``StreamedLM.plan_mib``.
    """
    tokens = len(passages[0].ids)
    texts = max(sum(passage.split == split for passage in passages) for split in ("calibration", "heldout"))
    rows, widest = texts * tokens, max(layer.neurons for layer in layers.values())
    kept = 4 * len(layers) * rows * lm.width / _MIB
    together = min(texts, texts_together(lm.width, widest, tokens))
    base = lm.plan_mib(1, 1, held_mib)
    logits = _LOGITS * HEAD_ROWS * _HEAD_BLOCK_MIB / lm.width
    most = settings.replaced[-1]
    replacing = replaced_mib(together, tokens, lm.width, widest, most)
    passed = lm.plan_mib(together, tokens, held_mib) + max(logits, replacing)
    draws = min(DRAWS_AT_A_TIME, settings.draws)
    searched = max(search_mib(rows, lm.width, widest), null_mib(rows, lm.width, widest, draws, NULL_BLOCK))
    # Writing residuals to their file takes them twice for a moment.
    return kept + max(passed, base + searched, base + 2 * kept)


def texts_together(width: int, neurons: int, tokens: int) -> int:
    """How many texts of ``tokens`` tokens go through the model together, from shapes alone."""
    return max(1, _PASS_BYTES // (16 * (width + neurons) * tokens))
