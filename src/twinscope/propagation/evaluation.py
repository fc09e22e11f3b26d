"""Held-out loss of a decoder, on one rank or split over several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twinscope.models.decoder import Decoder, forward
from twinscope.propagation.ranks.group import Ranks


@torch.no_grad()
def heldout_losses(
    model: Decoder, heldout: Sequence[tuple[Tensor, Tensor]], ranks: Ranks | None
) -> list[float]:
    """Mean cross-entropy of each batch (B, T) in nats per token; with ``ranks``, each reads its texts."""
    if ranks is None:
        return [evaluate(model, tokens, targets) for tokens, targets in heldout]
    rows = [ranks.rows(len(tokens)) for tokens, _ in heldout]
    # Weighted by tokens, so that ranks may have a text more or less.
    sums = [
        evaluate(model, tokens[part], targets[part]) * targets[part].numel()
        for (tokens, targets), part in zip(heldout, rows, strict=True)
    ]
    totals = ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    return [total / targets.numel() for total, (_, targets) in zip(totals, heldout, strict=True)]


@torch.no_grad()
def evaluate(model: Decoder, tokens: Tensor, targets: Tensor) -> float:
    """Mean cross-entropy of one batch (B, T) in nats per token, in the parameters' own precision."""
    logits = forward(model, tokens)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item()
