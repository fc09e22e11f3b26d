"""A model of plain matrices with the interface of the streamed one: every branch is a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIX = {
    "attention": "self_attn",
    "mlp": "mlp",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


class PlainModel:
    """``layers`` layers of width ``heads · size``: attention with q/k norms, and an MLP of one matrix.

    ``weights[site]`` may be changed by a test. There is no pre-norm, so a branch is the module alone.
    """

    def __init__(
        self, layers: int = 6, heads: int = 2, size: int = 4, vocab: int = 40, seed: int = 0
    ) -> None:
        self.layers, self.heads, self.size, self.width, self.vocab = (
            layers,
            heads,
            size,
            heads * size,
            vocab,
        )
        self.weights: dict[str, Tensor] = {}
        for index, (kind, suffix) in enumerate(SUFFIX.items()):
            for layer in range(layers):
                rng = np.random.default_rng([seed, index, layer])
                norm = kind.endswith("norm")
                shape = (size,) if norm else (self.width, self.width)
                values = torch.from_numpy(rng.normal(size=shape)).float()
                self.weights[f"layers.{layer}.{suffix}"] = values.abs() + 0.2 if norm else values
        self.head = torch.from_numpy(
            np.random.default_rng([seed, 9]).normal(size=(vocab, self.width))
        ).float()
        self.mapping: dict[str, str] = {}
        self.calls: list[str] = []

    def sites(self, kind: str) -> list[str]:
        return [f"layers.{layer}.{SUFFIX[kind]}" for layer in range(self.layers)] if kind in SUFFIX else []

    def branch(self, site: str, z: Tensor, probabilities: bool = False) -> SimpleNamespace:
        self.calls.append(site)
        weight = self._weight(site)
        if site.endswith("_norm"):
            return SimpleNamespace(update=normed(z, weight), probabilities=None)
        if site.endswith("mlp"):
            return SimpleNamespace(update=torch.tanh(z @ weight.T), probabilities=None)
        q, k = (
            normed(self.norm_input(f"{site}.{name}", z), self._weight(f"{site}.{name}"))
            for name in ("q_norm", "k_norm")
        )
        mixed = attend(q, k)
        values = (z @ weight.T).view(*z.shape[:2], self.heads, self.size)
        update = torch.einsum("bhts,bshd->bthd", mixed, values).reshape(z.shape)
        return SimpleNamespace(update=update, probabilities=mixed if probabilities else None)

    def norm_input(self, site: str, z: Tensor) -> Tensor:
        shift = 1 if site.endswith("k_norm") else 0
        return z.roll(shift, dims=-1).view(*z.shape[:2], self.heads, self.size)

    @contextmanager
    def remapped(self, mapping: Mapping[str, str]) -> Iterator[None]:
        before = dict(self.mapping)
        self.mapping |= mapping
        try:
            yield
        finally:
            self.mapping = before

    def reduced_head(self, z: Tensor, work: Callable[[int, Tensor], Any]) -> Iterator[Any]:
        for start in range(0, self.vocab, 16):
            yield work(start, z @ self.head[start : start + 16].T)

    def _weight(self, site: str) -> Tensor:
        return self.weights[self.mapping.get(site, site)]


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * gain


def attend(q: Tensor, k: Tensor) -> Tensor:
    length = q.shape[1]
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
