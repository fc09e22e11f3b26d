"""Gradients as one vector per block, their inner products, and group means that may outgrow memory.

Covers flattening, products accumulated in float64, and means over groups of batches held in memory or in a
scratch file. What the products mean is in spectrum.py.

Legend: L blocks; P_l parameters of block l; J groups of batches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twinscope.lab.durable import writing

#: Elements converted to float64 at a time: eight rows of them stay in a processor's second cache.
CHUNK = 1 << 14

Group = Sequence[tuple[str, nn.Parameter]]


def flatten(found: Callable[[str], Tensor | None], group: Group) -> Tensor:
    """The gradients of one block's parameters as one vector (P_l,), zeros where nothing reached one.

    The vector has memory of its own.
    """
    parts = []
    for name, parameter in group:
        grad = found(name)
        parts.append(torch.zeros_like(parameter).view(-1) if grad is None else grad.reshape(-1))
    if not parts:
        return torch.zeros(0)
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def sizes(blocks: Sequence[Group]) -> list[int]:
    """P_l, the number of trainable parameters of each block."""
    return [sum(parameter.numel() for _, parameter in group) for group in blocks]


def gram(rows: Sequence[Tensor] | Tensor, vectors: Sequence[Tensor]) -> np.ndarray:
    """``⟨row, vector⟩`` for every pair, (rows, vectors) float64; all of one length P.

    Products and sums are float64 whatever the dtype, a chunk of elements at a time, so that no float64
    copy of a vector is made.
    """
    count, length = len(rows), vectors[0].numel()
    device = vectors[0].device
    total = torch.zeros(count, len(vectors), dtype=torch.float64, device=device)
    for start in range(0, length, CHUNK):
        part = slice(start, start + CHUNK)
        if isinstance(rows, Tensor):
            left = rows[:, part].to(device, torch.float64)
        else:
            left = torch.stack([row[part].to(device) for row in rows]).double()
        right = torch.stack([vector[part] for vector in vectors]).double()
        total.addmm_(left, right.T)
    return total.cpu().numpy()


class GroupMeans:
    """Means of block vectors over J groups of equal size: (J, P_l) per block, in the gradients' dtype.

    Held in memory, or with ``folder`` in a scratch file there that :meth:`close` removes. Sums are made in
    place and divided once, so a mean of n vectors is rounded n times.
    """

    def __init__(self, lengths: Sequence[int], groups: int, dtype: torch.dtype, folder: Path | None) -> None:
        self.groups = groups
        self._path: Path | None = None
        total = groups * sum(lengths)
        if folder is None or total == 0:
            flat = torch.zeros(total, dtype=dtype)
        else:
            flat = self._reserve(total, dtype, folder)
        ends = np.cumsum([groups * length for length in lengths]).tolist()
        self._blocks = [
            flat[end - groups * length : end].view(groups, length)
            for end, length in zip(ends, lengths, strict=True)
        ]

    def _reserve(self, total: int, dtype: torch.dtype, folder: Path) -> Tensor:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".group-means-", suffix=".tmp", dir=folder)
        self._path = Path(name)
        kind = np.dtype(str(dtype).removeprefix("torch."))
        try:
            # Writing to a mapped page that the disk cannot hold ends the process; reserving it says so here.
            with writing(self._path):
                os.posix_fallocate(descriptor, 0, total * kind.itemsize)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)
        return torch.from_numpy(np.memmap(self._path, dtype=kind, mode="r+", shape=(total,)))

    def add(self, group: int, block: int, vector: Tensor) -> None:
        """Add one batch's vector (P_l,) of ``block`` (from 0) to ``group``; call it for every block."""
        self._blocks[block][group] += vector.to(self._blocks[block].device)

    def divide(self, count: int) -> None:
        """Turn sums over ``count`` batches a group into means."""
        for block in self._blocks:
            block /= count

    def block(self, index: int) -> Tensor:
        """The J means of one block, (J, P_l)."""
        return self._blocks[index]

    def close(self) -> None:
        """Forget the means and remove the scratch file; closing twice is harmless."""
        self._blocks = []
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
