"""Gradients summed over ranks while later ones are still being computed.

Covers packing them into buckets and unpacking the sums. Which gradient is final, and when, is the business
of who computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinscope.propagation.ranks.group import Ranks

#: A bucket is sent off once it holds this many bytes. Smaller ones begin earlier, and pay a round of messages
#: each; blocks of a large model fill one alone.
BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Bucket:
    """Gradients that travel as one tensor, and what waits until their sums have arrived."""

    flat: Tensor
    shapes: dict[str, torch.Size]
    finish: Callable[[], None]


class Reduction:
    """The sums over ranks of one estimate's gradients, from the first that is final to the last.

    Every rank must add the same names in the same order.
    """

    def __init__(self, ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._sent: list[_Bucket] = []

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Take gradients that are final on this rank; their sums begin when their bucket is full."""
        for name, grad in grads.items():
            self._open[name] = grad
            self._open_bytes += grad.nbytes
            if self._open_bytes >= self._bucket_bytes:
                self._send()

    def result(self) -> dict[str, Tensor]:
        """The sums of all gradients that were added; waits for those under way."""
        self._send()
        sums: dict[str, Tensor] = {}
        for bucket in self._sent:
            bucket.finish()
            parts = bucket.flat.split([shape.numel() for shape in bucket.shapes.values()])
            for (name, shape), part in zip(bucket.shapes.items(), parts, strict=True):
                sums[name] = part.view(shape)
        self._sent = []
        return sums

    def _send(self) -> None:
        if not self._open:
            return
        # A copy also where one tensor fills the bucket: autograd may have returned it under two names.
        flat = torch.cat([grad.flatten() for grad in self._open.values()])
        shapes = {name: grad.shape for name, grad in self._open.items()}
        self._open, self._open_bytes = {}, 0
        self._sent.append(_Bucket(flat, shapes, self._ranks.start_sum(flat)))


def reduction(ranks: Ranks | None) -> Reduction | None:
    """The reduction of one estimate over ``ranks``; None where there is one alone."""
    return None if ranks is None else Reduction(ranks)
