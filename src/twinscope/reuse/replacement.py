"""The loss of a whole model with one site replaced, beside every null.

Covers one *replacement*: the tensors of one site stand in the place of another's, pre-norm and module
together (of a q or k norm, the gain), and everything behind that site sees what comes of it. In the same way
go no update, the site's mean update over calibration tokens, other modules matched in depth, and the site
itself, which must change nothing. All start from the residual stream that enters the site, so that what lies
before it is computed once. Which texts there are and what the numbers mean is in swap.py and
swap_findings.py.

Shapes: B texts, T positions, C channels; a text of T tokens has T − 1 predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.streamed.reading import LEAST_BYTES
from twinscope.reuse import measures, nulls
from twinscope.reuse.branches import HEAD_ROWS, Comparison

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

#: The substitute among the variants; the nulls go by their names in nulls.py.
PAIR = "pair"
#: The divergences of a variant from the model as it is.
DIVERGENCES = ("logit_js", *(f"logit_topk_{k}" for k in measures.LOGIT_K))
#: Tokens that go through the model together, unless one text has more: reading weights hardly counts then.
GROUP_TOKENS = 512
_MIB = 1024 * 1024
#: Blocks of logits that exist at once, and their size: two threads' own, and about as much in float64.
_LOGITS, _BLOCK_BYTES = 4, 3 * LEAST_BYTES


@dataclass(frozen=True)
class Passed:
    """One pass of texts through the model as it is: ``ids`` (B, T), residuals (B, T, C), losses.

    ``entering[site]`` enters a site, ``head`` the head; ``nll`` (B, T − 1) nats per predicted token.
    """

    ids: Tensor
    entering: Mapping[str, Tensor]
    head: Tensor
    nll: Tensor


def passed(
    lm: StreamedLM, ids: Tensor, sites: Sequence[str], each: Callable[[], None] = lambda: None
) -> Passed:
    """Take texts (B, T) through the model as it is and keep what enters ``sites``; ``each`` at every one.

    Raises:
        ConfigError, DataError, BudgetExceeded: as for ``StreamedLM.walk``; and what ``each`` raises.
    """
    entering: dict[str, Tensor] = {}
    for point in lm.walk(ids, {*sites, "head"}):
        each()
        entering[point.site] = point.z
    head = entering.pop("head")
    return Passed(ids, entering, head, lm.nll_at(head, ids))


def update_of(lm: StreamedLM, comparison: Comparison, site: str, z: Tensor) -> Tensor:
    """What the replaced site's branch adds (B, T, C) to ``z`` (B, T, C) with ``site`` in its place.

    Of a q or k norm the branch is the attention of its layer, with that one gain replaced.

    Raises:
        ConfigError: sites that cannot replace each other; DataError: a value that is not finite.
    """
    with lm.remapped({comparison.reference: site}):
        update = lm.branch(comparison.residual, z).update
    if not bool(torch.isfinite(update).all()):
        raise DataError(
            f"{site} gives NaN or infinite values in the place of {comparison.reference}: check the weights, "
            "or leave the pair out"
        )
    return update


def summed_update(lm: StreamedLM, comparison: Comparison, given: Passed) -> Tensor:
    """The site's own update summed over all tokens, (C,) float64 on the CPU."""
    update = update_of(lm, comparison, comparison.reference, given.entering[comparison.residual])
    return torch.stack([text.double().sum(dim=0) for text in update]).sum(dim=0).cpu()


def changes(
    lm: StreamedLM,
    comparison: Comparison,
    given: Passed,
    each: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Mean loss of each text with the site replaced by the substitute, ``nll``, and its change ``delta_nll``.

    Raises:
        ConfigError, DataError, BudgetExceeded: as for :func:`update_of` and the model.
    """
    each()
    head = _carried(lm, comparison, given, comparison.substitute)
    return _losses(lm, given, head)


def effects(
    lm: StreamedLM,
    comparison: Comparison,
    given: Passed,
    mean: Tensor,
    each: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Every measure of the substitute and of every null, one dict for each of the B texts.

    A dict holds ``nll`` and ``delta_nll`` (nats per predicted token, mean over the text), :data:`DIVERGENCES`
    of the next token at the same places, and ``nulls``: a list of such dicts with ``null`` (``zero | mean |
    self | other.<site>``). ``mean`` (C,) is the site's mean update over calibration tokens. ``each`` is
    called before each variant and each part of the head's work.

    Texts do not depend on each other, but how many are given together may change the last bits.
    Memory: (5 + others) × B·T·C float32 beside the pass and a block of logits.

    Raises:
        ConfigError, DataError, BudgetExceeded: as for :func:`update_of` and the model.
    """
    z = given.entering[comparison.residual]
    heads: dict[str, Tensor] = {}
    for name, site in _modules(comparison):
        each()
        heads[name] = _carried(lm, comparison, given, site)
    for name, update in (
        (nulls.ZERO, nulls.zero_update(z)),
        (nulls.MEAN, nulls.constant_update(mean, z)),
    ):
        each()
        heads[name] = lm.onward(z + update, comparison.residual)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, head in heads.items():
        each()
        rows[name] = [dict(row) for row in _losses(lm, given, head)]
    for name, found in _divergences(lm, given.head, heads, each).items():
        for row, values in zip(rows[name], found, strict=True):
            row |= values
    beside = (nulls.ZERO, nulls.MEAN, nulls.SELF, *(name for name in rows if name.startswith(nulls.OTHER)))
    return [
        pair | {"nulls": [{"null": name} | rows[name][text] for name in beside]}
        for text, pair in enumerate(rows[PAIR])
    ]


def group_size(
    lm: StreamedLM, texts: int, tokens: int, variants: int, budget_mib: float
) -> tuple[int, float]:
    """How many texts go through together within the budget, and the peak in MiB that is planned for them.

    ``variants`` is how many residual streams :func:`effects` holds beside the model's own.

    Raises:
        ConfigError: one text alone would take more.
    """
    together = max(1, min(texts, GROUP_TOKENS // tokens))
    while True:
        planned = planned_mib(lm, together, tokens, variants)
        if planned <= budget_mib:
            return together, planned
        if together == 1:
            raise ConfigError(
                f"one text of {tokens} tokens would take about {planned:.0f} MiB, over the plan's "
                f"reuse.budgets.process_mib = {budget_mib:g}: choose shorter texts with --tokens, or raise "
                "the budget in the plan"
            )
        together //= 2


def planned_mib(lm: StreamedLM, texts: int, tokens: int, variants: int) -> float:
    """The planned peak in MiB: a streamed pass, the streams of all variants, the head's rows and logits."""
    streams = lm.width * (variants + 4) * texts * tokens
    rows = max(HEAD_ROWS, texts * tokens)
    logits = _LOGITS * rows * _BLOCK_BYTES // (4 * lm.width)
    return lm.plan_mib(texts, tokens) + 4 * (streams + rows * lm.width + logits) / _MIB


def _modules(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """(variant, site whose tensors stand in the place) of every variant that is a module."""
    yield PAIR, comparison.substitute
    yield nulls.SELF, comparison.reference
    for site in comparison.others:
        yield f"{nulls.OTHER}.{site}", site


def _carried(lm: StreamedLM, comparison: Comparison, given: Passed, site: str) -> Tensor:
    """The residual (B, T, C) that enters the head with ``site`` in the place."""
    z = given.entering[comparison.residual]
    return lm.onward(z + update_of(lm, comparison, site, z), comparison.residual)


def _losses(lm: StreamedLM, given: Passed, head: Tensor) -> list[dict[str, float]]:
    """Mean loss of each text, and how far it lies above that of the model as it is; float64."""
    after, before = lm.nll_at(head, given.ids).double(), given.nll.double()
    means, change = after.mean(dim=1).tolist(), (after - before).mean(dim=1).tolist()
    if not all(map(math.isfinite, [*means, *change])):
        raise DataError("a loss with a module replaced is not finite: check the weights")
    return [{"nll": nll, "delta_nll": delta} for nll, delta in zip(means, change, strict=True)]


def _divergences(
    lm: StreamedLM, reference: Tensor, heads: Mapping[str, Tensor], each: Callable[[], None]
) -> dict[str, list[dict[str, float]]]:
    """Per variant and text: :data:`DIVERGENCES` of the next token at predicted places, mean over them.

    All residuals that enter the head, (B, T, C).
    """
    count, length, width = reference.shape
    places = torch.arange(count * length).view(count, length)[:, :-1].flatten()
    parts: dict[str, list[measures.LogitAgreement]] = {name: [] for name in heads}
    for chosen in places.split(max(1, HEAD_ROWS // (1 + len(heads)))):
        each()
        chosen = chosen.to(reference.device)
        stacked = [reference.reshape(-1, width)[chosen]]
        starts = {}
        for name, head in heads.items():
            rows = head.reshape(-1, width)[chosen]
            # Equal residuals share their rows, so that agreement is exact whatever the head's rounding.
            same = torch.equal(rows, stacked[0])
            starts[name] = 0 if same else sum(map(len, stacked))
            if not same:
                stacked.append(rows)
        left = torch.arange(len(chosen)).repeat(len(heads))
        right = torch.cat([torch.arange(len(chosen)) + start for start in starts.values()])
        found = measures.compare_logits(partial(lm.reduced_head, torch.cat(stacked)), left, right)
        for number, name in enumerate(heads):
            mine = slice(number * len(chosen), (number + 1) * len(chosen))
            topk = {k: share[mine] for k, share in found.topk.items()}
            parts[name].append(measures.LogitAgreement(found.js[mine], topk))
    return {name: _by_text(of_variant, count) for name, of_variant in parts.items()}


def _by_text(parts: Sequence[measures.LogitAgreement], count: int) -> list[dict[str, float]]:
    js = torch.cat([part.js for part in parts]).view(count, -1).mean(dim=1).tolist()
    topk = {
        k: torch.cat([part.topk[k] for part in parts]).view(count, -1).mean(dim=1).tolist()
        for k in measures.LOGIT_K
    }
    return [
        {"logit_js": js[text]} | {f"logit_topk_{k}": shares[text] for k, shares in topk.items()}
        for text in range(count)
    ]
