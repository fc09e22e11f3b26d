"""Modules whose matrix stays on disk: it is read when they are called, some rows at a time.

Covers the linear map, GPT-2's transposed linear map, the embedding, and stacks of experts that are indexed
one by one. Each stands where the library's module stood and does its arithmetic on float32. What reads the
rows, and when, is the business of ``reading.py``. No gradients.

Shapes: N tokens (all leading dimensions together), I and O features in and out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from twinscope.models.streamed.reading import WeightReader


class StreamedLinear(nn.Module):
    """``x Wᵀ + b`` with ``W (O, I)`` on disk: blocks of output features, each multiplied when it is there."""

    def __init__(self, reader: WeightReader, key: str, module: nn.Linear) -> None:
        super().__init__()
        self.key, self.in_features, self.out_features = key, module.in_features, module.out_features
        self.bias = module.bias
        self._reader = reader
        self._instead = threading.local()

    @contextmanager
    def standing_in(self, value: Tensor | None) -> Iterator[None]:
        """Let calls on this thread return ``value``, or with None their own input, and read nothing."""
        self._instead.value = (value,)
        try:
            yield
        finally:
            del self._instead.value

    def forward(self, x: Tensor) -> Tensor:
        """``(…, I)`` to ``(…, O)`` float32."""
        instead: tuple[Tensor | None] | None = getattr(self._instead, "value", None)
        if instead is not None:
            return x if instead[0] is None else instead[0]
        flat = x.reshape(-1, self.in_features)
        out = x.new_empty((flat.shape[0], self.out_features))

        def multiply(start: int, stop: int, block: Tensor) -> None:
            if self.bias is None:
                torch.mm(flat, block.t(), out=out[:, start:stop])
            else:
                torch.addmm(self.bias[start:stop], flat, block.t(), out=out[:, start:stop])

        for _ in self._reader.each(self.key, multiply):
            pass
        return out.view(*x.shape[:-1], self.out_features)


class StreamedConv1D(nn.Module):
    """``x W + b`` with ``W (I, O)`` on disk, as GPT-2 keeps it: blocks of input features, summed up.

    A matrix of one block takes one product, as in the library; several differ in the order of the sum.
    """

    def __init__(self, reader: WeightReader, key: str, module: nn.Module) -> None:
        super().__init__()
        self.key, self.nf = key, int(module.nf)  # pyright: ignore[reportArgumentType]
        self.bias: nn.Parameter = module.bias  # pyright: ignore[reportAttributeAccessIssue]
        self._reader = reader

    def forward(self, x: Tensor) -> Tensor:
        """``(…, I)`` to ``(…, O)`` float32."""
        flat = x.reshape(-1, x.shape[-1])

        def multiply(start: int, stop: int, block: Tensor) -> Tensor:
            part = flat[:, start:stop]
            return torch.mm(part, block) if start else torch.addmm(self.bias, part, block)

        parts = self._reader.each(self.key, multiply)
        out = next(parts)
        for part in parts:
            out += part
        return out.view(*x.shape[:-1], self.nf)


class StreamedEmbedding(nn.Module):
    """Rows of a table on disk, only those that the ids name; times ``scale`` where the family scales."""

    def __init__(self, reader: WeightReader, key: str, module: nn.Embedding) -> None:
        super().__init__()
        self.key, self.num_embeddings, self.embedding_dim = key, module.num_embeddings, module.embedding_dim
        self.scale: float | None = getattr(module, "scalar_embed_scale", None)
        self._reader = reader

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``(…)`` int64 to ``(…, C)`` float32."""
        rows, places = np.unique(ids.cpu().numpy(), return_inverse=True)
        found = self._reader.rows(self.key, rows.tolist())
        out = found[torch.from_numpy(places.reshape(ids.shape)).to(found.device)]
        return out if self.scale is None else out * torch.tensor(self.scale, device=out.device)


class StreamedExperts:
    """A stack ``(E, …)`` of which one expert is read when it is indexed; it stands for the parameter."""

    def __init__(self, reader: WeightReader, key: str, shape: torch.Size) -> None:
        self.key, self.shape = key, shape
        self._reader = reader

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        return self._reader.expert(self.key, int(expert))
