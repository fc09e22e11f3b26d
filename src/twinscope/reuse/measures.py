"""How far two functions lie apart on the same inputs: update, attention and next-token distributions.

Covers the measures of the method, 2.3, as pure functions of tensors. They take what they are given on any
device and in any float format, accumulate in float64, and keep texts apart: what a scan says about all
texts is made of what it says about each. Which tensors are compared is in branches.py, what counts as
close in decision.py.

Shapes: B texts, T positions, C channels, H heads, V tokens of the vocabulary, R rows of logits,
P comparisons between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

#: The numbers of most probable tokens whose agreement is measured.
LOGIT_K = (1, 5, 10)
#: The number of most attended positions whose agreement is measured.
ATTENTION_K = 5
#: A channel is massive if its RMS exceeds this many times the median channel's.
MASSIVE = 10.0

#: Runs a function of (first token, logits (R, block)) over all blocks of the vocabulary; results in order.
EachBlock = Callable[[Callable[[int, Tensor], Any]], Iterable[Any]]

_LN2 = 0.6931471805599453
#: Elements of one float64 temporary; a few of them fit the cache of a core.
_CHUNK = 2**17


@dataclass(frozen=True)
class LogitAgreement:
    """Of P comparisons, on the CPU: ``js`` (P,) float64 bits; ``topk[k]`` (P,) float64 shares in [0, 1]."""

    js: Tensor
    topk: dict[int, Tensor]


def branch_error(substitute: Tensor, reference: Tensor, keep: Tensor | None = None) -> list[float | None]:
    """‖substitute − reference‖ / ‖reference‖ over tokens and channels, text by text.

    Both ``(B, T, C)`` (or ``(B, …)``); ``keep`` ``(C,)`` bool leaves out the other channels. None where the
    reference is exactly zero, so that there is nothing to be relative to.
    """
    norms, differences = squared_norms(reference, keep), squared_norms(substitute, keep, reference)
    return [
        (difference / norm) ** 0.5 if norm > 0 else None
        for difference, norm in zip(differences, norms, strict=True)
    ]


def squared_norms(values: Tensor, keep: Tensor | None = None, origin: Tensor | None = None) -> list[float]:
    """Σ (values − origin)² over all but the first axis, float64; with the kept channels alone if given."""
    found = []
    for index, text in enumerate(values):
        # One text at a time: the float64 copy of all of them would outweigh the branches.
        part = text.double() if origin is None else text.double() - origin[index].double()
        part = part if keep is None else part[..., keep.to(part.device)]
        found.append(float(part.square().sum()))
    return found


def massive_dimensions(updates: Tensor, multiple: float = MASSIVE) -> Tensor:
    """Which channels of ``(…, C)`` carry massive values, as ``(C,)`` bool on the CPU.

    A channel is massive if its RMS over all tokens given is more than ``multiple`` times the median of the
    channels' RMS. Give calibration tokens only: the choice then knows nothing of held-out text.

    Source: Sun et al. 2024, arXiv:2402.17762, who compare with the median as well; the multiple here is
    smaller because it is taken of branch outputs and over tokens, not of single states.
    """
    rms = torch.stack([part.double().square().mean(dim=0) for part in _rows(updates)]).mean(dim=0).sqrt()
    return (rms > multiple * rms.quantile(0.5)).cpu()


def mean_update(updates: Tensor) -> Tensor:
    """The mean of ``(…, C)`` over all tokens, ``(C,)`` float32 on the CPU, summed in float64."""
    return torch.stack([part.double().mean(dim=0) for part in _rows(updates)]).mean(dim=0).float().cpu()


def attention_js(reference: Tensor, substitute: Tensor) -> Tensor:
    """Jensen–Shannon divergence of attention, ``(B, H)`` float64 bits, mean over queries.

    Both ``(B, H, T, T)``, causal, every row a distribution over keys. The first query sees one key and
    agrees always, so it is left out.

    Raises:
        ValueError: shapes differ, or T < 2.
    """
    _same_shape(reference, substitute)
    if reference.shape[-2] < 2:
        raise ValueError("attention over one position has nothing to compare")
    return torch.stack(
        [
            _js(left[:, 1:].double(), right[:, 1:].double()).mean(dim=-1)
            for left, right in zip(reference, substitute, strict=True)
        ]
    ).cpu()


def attention_topk(reference: Tensor, substitute: Tensor, k: int = ATTENTION_K) -> Tensor:
    """Share of the ``k`` most attended positions that agree, ``(B, H)`` float64, mean over queries.

    Both ``(B, H, T, T)``, causal. Queries that see at most k keys agree always and are left out. Equal
    probabilities are taken in the order of positions.

    Raises:
        ValueError: shapes differ, or T ≤ k.
    """
    _same_shape(reference, substitute)
    if reference.shape[-2] <= k:
        raise ValueError(f"no query of {reference.shape[-2]} positions sees more than {k} keys")
    first, second = (top_k(part[..., k:, :], k)[1] for part in (reference, substitute))
    return _overlap(first, second).mean(dim=-1).cpu()


def match_heads(reference: Tensor, substitute: Tensor) -> list[int]:
    """The one-to-one assignment of heads under which two attentions look most alike.

    Both ``(B, H, T, T)``; ``substitute[:, order]`` then stands beside ``reference``. The order of heads
    carries no meaning: a module with its heads permuted is the same function. Maximises the sum over heads
    and tokens of the Bhattacharyya affinity Σ √(p q), with the lowest numbers first where heads tie. Give
    calibration texts only.

    Raises:
        ValueError: shapes differ.
    """
    _same_shape(reference, substitute)
    heads = reference.shape[1]
    affinity = torch.zeros(heads, heads, dtype=torch.float64)
    for left, right in zip(reference, substitute, strict=True):
        roots = (part.double().sqrt().flatten(1) for part in (left, right))
        first, second = roots
        affinity += (first @ second.T).cpu()
    tokens = reference.shape[0] * reference.shape[2]
    # A head stays where it is unless moving it gains something beyond rounding.
    affinity += 1e-9 * tokens * torch.eye(heads, dtype=torch.float64)
    return [int(column) for column in linear_sum_assignment(np.asarray(affinity), maximize=True)[1]]


def compare_logits(
    each: EachBlock,
    reference: Sequence[int] | Tensor,
    substitute: Sequence[int] | Tensor,
    ks: Sequence[int] = LOGIT_K,
) -> LogitAgreement:
    """Jensen–Shannon divergence (bits) and top-k agreement of rows of logits that are never held whole.

    ``each(work)`` calls ``work(first token, logits (R, block))`` for every block of the vocabulary and gives
    the results in order, ascending from token 0; the calls may be on several threads. It is used twice: for
    the running log-sum-exp and top k, then for the divergence. Comparison p is between rows ``reference[p]``
    and ``substitute[p]``; a row may stand in many. Equal logits are ranked by token, the lower first.
    JS = ½ Σ p ln(2p/(p+q)) + ½ Σ q ln(2q/(p+q)) over ln 2, between 0 and 1.

    Memory: what ``each`` holds, (R, max k) and a few MiB.

    Raises:
        ValueError: blocks are not contiguous, or k exceeds the vocabulary.
    """
    left = torch.as_tensor(reference, dtype=torch.int64)
    right = torch.as_tensor(substitute, dtype=torch.int64)
    totals, tokens = _first_pass(each, max(ks))
    # A row beside itself is 0 without computing it.
    places = (left != right).nonzero().flatten().to(totals.device)
    first, second = (index.to(totals.device)[places] for index in (left, right))

    def divergence(_: int, logits: Tensor) -> Tensor:
        rows = max(1, _CHUNK // logits.shape[1])
        parts = []
        for one, other in zip(first.split(rows), second.split(rows), strict=True):
            p = (logits[one].double() - totals[one, None]).exp_()
            q = (logits[other].double() - totals[other, None]).exp_()
            parts.append(_js(p, q))
        return torch.cat(parts)

    js = torch.zeros(len(left), dtype=torch.float64, device=totals.device)
    if len(places):
        for part in each(divergence):
            js[places] += part
    ranked = tokens.cpu()
    topk = {k: _overlap(ranked[left, :k], ranked[right, :k]) for k in ks}
    return LogitAgreement(js.clamp_(0.0, 1.0).cpu(), topk)


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``(…, n)`` and their places, ``(…, k)`` each, descending; ties by the lower place.

    ``torch.topk`` leaves open which of several equal values it takes.

    Raises:
        ValueError: k exceeds n.
    """
    if k > values.shape[-1]:
        raise ValueError(f"there are no {k} largest of {values.shape[-1]}")
    flat = values.reshape(-1, values.shape[-1])
    places = flat.topk(k, dim=-1).indices.sort(dim=-1).values
    smallest = flat.gather(-1, places).amin(dim=-1, keepdim=True)
    tied = ((flat >= smallest).sum(dim=-1) > k).nonzero().flatten()
    if len(tied):
        # Only here does the choice of the library matter; a stable sort settles it.
        order = flat[tied].sort(dim=-1, descending=True, stable=True).indices
        places[tied] = order[:, :k].sort(dim=-1).values
    found, order = flat.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    shape = (*values.shape[:-1], k)
    return found.reshape(shape), places.gather(-1, order).reshape(shape)


def _first_pass(each: EachBlock, k: int) -> tuple[Tensor, Tensor]:
    """Per row: ln Σ exp (R,) float64, and the k most probable tokens (R, k) in order."""

    def reduced(start: int, logits: Tensor) -> tuple[int, int, Tensor, Tensor, Tensor]:
        rows = max(1, _CHUNK // logits.shape[1])
        total = torch.cat([chunk.double().logsumexp(dim=-1) for chunk in logits.split(rows)])
        values, places = top_k(logits, min(k, logits.shape[1]))
        return start, logits.shape[1], total, values, places + start

    totals = best = tokens = torch.empty(0)
    seen = 0
    for start, size, total, values, places in each(reduced):
        if start != seen:
            raise ValueError(f"a block of logits starts at token {start}, not at {seen}")
        seen += size
        if start == 0:
            totals, best, tokens = total, values, places
            continue
        totals = torch.logaddexp(totals, total)
        # Tokens of earlier blocks are lower, so a stable order keeps them first among equals.
        best, order = torch.cat([best, values], dim=-1).sort(dim=-1, descending=True, stable=True)
        best, tokens = best[:, :k], torch.cat([tokens, places], dim=-1).gather(-1, order)[:, :k]
    if seen < k:
        raise ValueError(f"a vocabulary of {seen} tokens has no {k} most probable ones")
    return totals, tokens


def _js(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ [p ln(1+d) + q ln(1−d)] / ln 2 over the last axis, with d = (p − q)/(p + q); float64.

    The same as the textbook form, but exactly 0 for p = q, and accurate where p and q nearly agree and the
    textbook form cancels. Blocks of distributions may be given: the sum is over what is there.
    """
    d = (p - q).div_((p + q).clamp_min_(torch.finfo(p.dtype).tiny))
    # ln 0 is only ever multiplied by 0; one rounding step above it keeps the product a number.
    edge = 1.0 - 2.0**-53
    terms = p * d.clamp(min=-edge).log1p_()
    terms += q * d.neg_().clamp_(min=-edge).log1p_()
    return terms.sum(dim=-1) / (2.0 * _LN2)


def _overlap(first: Tensor, second: Tensor) -> Tensor:
    """Share of the entries of ``first`` (…, k) that are in ``second`` (…, k), float64."""
    return (first[..., :, None] == second[..., None, :]).any(dim=-1).double().mean(dim=-1)


def _rows(values: Tensor) -> Sequence[Tensor]:
    """``(…, C)`` as equally long parts ``(n, C)``, by the first axis where there are several."""
    return [values] if values.ndim <= 2 else [part.reshape(-1, values.shape[-1]) for part in values]


def _same_shape(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        raise ValueError(f"two attentions of shapes {tuple(first.shape)} and {tuple(second.shape)}")
