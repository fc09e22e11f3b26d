"""Which tensors a pair compares, kind by kind, and the measures of one comparison text by text.

Covers one *comparison*: a reference and a substitute on the residual stream that enters the reference's
branch, with every null beside them. A pair of sites i and j is two comparisons: i replaced by j on i's
inputs, and j replaced by i on j's inputs.

| kind | reference and substitute | compared |
|---|---|---|
| ``attention`` | pre-norm and attention of two layers | update, attention probabilities, next token |
| ``linear_attention``, ``mlp`` | pre-norm and module of two layers | update, next token |
| ``q_norm``, ``k_norm`` | the two gains within one layer, on its real q (or k) | norm output; with that one \
gain swapped, update, probabilities and next token of the layer's attention |

Heads are compared as calibration matches them one to one (``match_heads``), because their order carries no
meaning; the two norms of one layer meet in the same heads, so there nothing is matched.

What is close enough is in decision.py. Shapes: B texts, T positions, C channels, H heads, D channels of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from twinscope.lab.errors import DataError
from twinscope.reuse import measures, nulls

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

Kind = Literal["attention", "linear_attention", "mlp", "q_norm", "k_norm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NORMS = ("q_norm", "k_norm")

#: The numbers that every comparison and every null has, each a float or null with its reason.
MEASURES = (
    "branch_error",
    "branch_error_trimmed",
    "norm_error",
    "attention_js",
    "attention_js_worst",
    "attention_topk",
    "attention_topk_worst",
    "logit_js",
    *(f"logit_topk_{k}" for k in measures.LOGIT_K),
)
#: Rows that pass through the head at once, variants times tokens: each keeps a block of logits per thread.
HEAD_ROWS = 512

_ZERO_REFERENCE = "the reference is exactly zero on this text, so no error is relative to it"
_NO_NORM = "only a q or k norm has an output of its own to compare"
_NO_ATTENTION = {
    "mlp": "an MLP has no attention probabilities",
    "linear_attention": "linear attention has no attention probabilities",
}


@dataclass(frozen=True)
class Comparison:
    """``substitute`` in the place of ``reference``, on what enters there; ``others`` are null modules.

    Sites as ``lm.sites(kind)`` names them.
    """

    kind: Kind
    reference: str
    substitute: str
    others: tuple[str, ...] = ()

    @property
    def residual(self) -> str:
        """The site whose entering residual stream (``Point.z`` of ``lm.walk``) this comparison needs."""
        return attention_of(self.reference) if self.kind in NORMS else self.reference


@dataclass(frozen=True)
class Output:
    """``update`` (B, T, C), ``probabilities`` (B, H, T, T) and ``normed`` (B, T, H, D) of one function."""

    update: Tensor
    probabilities: Tensor | None = None
    normed: Tensor | None = None


@dataclass(frozen=True)
class Calibration:
    """What calibration texts decide for one comparison, and held-out texts only use.

    ``mean`` (C,) and ``mean_normed`` (D,) are the mean outputs of the reference; ``massive`` the channels
    left out of ``branch_error_trimmed``, massive in the reference or in the substitute; ``heads[site]`` the
    order of that site's heads beside the reference's.
    """

    mean: Tensor
    massive: tuple[int, ...]
    mean_normed: Tensor | None = None
    heads: dict[str, list[int]] = field(default_factory=dict)


def both_ways(
    lm: StreamedLM, kind: Kind, left: str, right: str, seed: int, others: int = nulls.OTHERS
) -> tuple[Comparison, Comparison]:
    """The two comparisons of a pair: on the inputs of ``left``, then of ``right``, with matched null modules.

    For the two norms of one layer, ``kind`` is that of ``left``; the null modules are norms of the
    substitute's kind in the nearest other layers.
    """
    found = []
    for reference, substitute in ((left, right), (right, left)):
        own, of = kind, kind
        if kind in NORMS:
            own, of = _norm_kind(reference), _norm_kind(substitute)
        matched = nulls.matched_others(lm.sites(of), reference, substitute, seed, others)
        found.append(Comparison(own, reference, substitute, tuple(matched)))
    return found[0], found[1]


def evaluate(lm: StreamedLM, comparison: Comparison, site: str, z: Tensor) -> Output:
    """What ``site`` gives in the place of the reference, on residuals ``z`` (B, T, C) that enter there.

    Raises:
        DataError: an output is not finite; names the site.
    """
    if comparison.kind not in NORMS:
        found = lm.branch(site, z, probabilities=comparison.kind == "attention")
        output = Output(found.update, found.probabilities)
    else:
        own = comparison.reference
        normed = lm.branch(site, lm.norm_input(own, z)).update
        if site == own:
            found = lm.branch(comparison.residual, z, probabilities=True)
        else:
            with lm.remapped({own: site}):
                found = lm.branch(comparison.residual, z, probabilities=True)
        output = Output(found.update, found.probabilities, normed)
    for part in (output.update, output.normed):
        if part is not None and not bool(torch.isfinite(part).all()):
            raise DataError(
                f"{site} gives NaN or infinite values on the inputs of {comparison.reference}: "
                "check the weights, or leave the pair out"
            )
    return output


def calibrate(lm: StreamedLM, comparison: Comparison, z: Tensor) -> Calibration:
    """The mean output, the massive channels and the order of heads, from calibration residuals alone.

    ``z`` (B, T, C) holds the residuals of all calibration texts at ``comparison.residual``.

    Raises:
        DataError: as for :func:`evaluate`.
    """
    reference = evaluate(lm, comparison, comparison.reference, z)
    substitute = evaluate(lm, comparison, comparison.substitute, z)
    massive = measures.massive_dimensions(reference.update) | measures.massive_dimensions(substitute.update)
    heads = {}
    if comparison.kind == "attention":
        for site in (comparison.substitute, *comparison.others):
            other = substitute if site == comparison.substitute else evaluate(lm, comparison, site, z)
            if reference.probabilities is not None and _alike(reference, other):
                assert other.probabilities is not None
                heads[site] = measures.match_heads(reference.probabilities, other.probabilities)
    return Calibration(
        mean=measures.mean_update(reference.update),
        massive=tuple(massive.nonzero().flatten().tolist()),
        mean_normed=None if reference.normed is None else measures.mean_update(reference.normed),
        heads=heads,
    )


def compare(
    lm: StreamedLM, comparison: Comparison, z: Tensor, calibration: Calibration, seed: int
) -> list[dict[str, Any]]:
    """Every measure of the substitute and of every null, one dict for each of the B texts of ``z`` (B, T, C).

    A dict holds :data:`MEASURES`, ``reference_norm`` (‖reference‖, float), ``tokens`` (T),
    ``attention_js_heads`` and ``attention_topk_heads`` (H floats, in the order of the reference's heads), and
    ``nulls``: a list of dicts with ``null`` (``zero | mean | permuted | self | other.<site>``) and
    :data:`MEASURES`. A number that does not exist is None, with ``<key>_reason`` beside it. Values are plain
    JSON. ``seed`` is the plan's; it draws the channel permutation.

    Texts do not depend on each other, but how many are given together may change the last bits.
    Memory: about (6 + others) × B·T·C float32, and as many B·H·T·T where attention is compared.

    Raises:
        DataError: as for :func:`evaluate`.
    """
    reference = evaluate(lm, comparison, comparison.reference, z)
    substitute = evaluate(lm, comparison, comparison.substitute, z)
    variants = {
        "pair": _matched(substitute, calibration.heads.get(comparison.substitute)),
        nulls.ZERO: _made(reference, nulls.zero_update),
        nulls.MEAN: Output(
            nulls.constant_update(calibration.mean, reference.update),
            normed=None
            if reference.normed is None or calibration.mean_normed is None
            else nulls.constant_update(calibration.mean_normed, reference.normed),
        ),
        nulls.PERMUTED: _made(substitute, lambda part: nulls.permuted_update(part, seed)),
        nulls.SELF: evaluate(lm, comparison, comparison.reference, z),
    }
    for site in comparison.others:
        variants[f"{nulls.OTHER}.{site}"] = _matched(
            evaluate(lm, comparison, site, z), calibration.heads.get(site)
        )
    logits = _next_tokens(lm, z, reference.update, [part.update for part in variants.values()])
    keep = torch.ones(z.shape[-1], dtype=torch.bool)
    keep[list(calibration.massive)] = False
    taken = [
        _measured(comparison, name, reference, output, keep, logits[place])
        for place, (name, output) in enumerate(variants.items())
    ]
    norms = measures.squared_norms(reference.update)
    results = []
    for text in range(z.shape[0]):
        beside = [{"null": name} | part[text] for name, part in zip(variants, taken, strict=True)]
        pair, *rest = beside
        del pair["null"]
        for part in rest:
            for key in ("attention_js_heads", "attention_topk_heads"):
                part.pop(key)
                part.pop(f"{key}_reason", None)
        results.append(
            pair | {"reference_norm": norms[text] ** 0.5, "tokens": int(z.shape[1]), "nulls": rest}
        )
    return results


def aggregate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """:data:`MEASURES` of several texts of one comparison by the frequency of real tokens.

    Errors are pooled over all tokens, √(Σ ‖difference‖² / Σ ‖reference‖²); what is a mean over tokens stays
    one. ``*_worst`` is the worst head of the worst text. None, with a reason, where a text has none.
    ``norm_error`` is the root of the mean square, weighted by tokens: a norm gives every token one size.
    """
    found: dict[str, Any] = {}
    for key in MEASURES:
        values = [row[key] for row in rows]
        missing = next((row[f"{key}_reason"] for row in rows if row[key] is None), None)
        if missing is not None or not values:
            found |= {key: None, f"{key}_reason": missing or "no text was measured"}
        elif key.endswith("_worst"):
            found[key] = min(values) if "topk" in key else max(values)
        elif key.endswith("_error") or key == "branch_error_trimmed":
            weights = [row["tokens"] if key == "norm_error" else row["reference_norm"] ** 2 for row in rows]
            squares = sum(value**2 * weight for value, weight in zip(values, weights, strict=True))
            found[key] = (squares / sum(weights)) ** 0.5
        else:
            tokens = [row["tokens"] for row in rows]
            found[key] = sum(v * n for v, n in zip(values, tokens, strict=True)) / sum(tokens)
    return found


def attention_of(norm: str) -> str:
    """``layers.3.self_attn.q_norm`` belongs to ``layers.3.self_attn``."""
    return norm.rpartition(".")[0]


def _norm_kind(site: str) -> Kind:
    return "q_norm" if site.endswith("q_norm") else "k_norm"


def _made(output: Output, make: Any) -> Output:
    """A null without probabilities: it changes outputs, and the attention behind them stays what it was."""
    return Output(make(output.update), normed=None if output.normed is None else make(output.normed))


def _matched(output: Output, order: list[int] | None) -> Output:
    if order is None or output.probabilities is None:
        return output
    return Output(output.update, output.probabilities[:, order], output.normed)


def _alike(first: Output, second: Output) -> bool:
    return (
        first.probabilities is not None
        and second.probabilities is not None
        and first.probabilities.shape == second.probabilities.shape
    )


def _measured(
    comparison: Comparison,
    name: str,
    reference: Output,
    output: Output,
    keep: Tensor,
    logits: list[dict[str, float]],
) -> list[dict[str, Any]]:
    """The measures of one variant, a dict for each text."""
    texts = range(reference.update.shape[0])
    rows: list[dict[str, Any]] = [{} for _ in texts]
    errors = measures.branch_error(output.update, reference.update)
    trimmed = measures.branch_error(output.update, reference.update, keep)
    if reference.normed is not None and output.normed is not None:
        normed = measures.branch_error(output.normed, reference.normed)
        missing = _ZERO_REFERENCE
    else:
        normed, missing = [None] * len(texts), _NO_NORM
    attention = _attention(comparison, name, reference, output)
    for text in texts:
        row = rows[text]
        _put(row, "branch_error", errors[text], _ZERO_REFERENCE)
        _put(row, "branch_error_trimmed", trimmed[text], _ZERO_REFERENCE)
        _put(row, "norm_error", normed[text], missing)
        row |= attention[text]
        row |= logits[text]
    return rows


def _attention(comparison: Comparison, name: str, reference: Output, output: Output) -> list[dict[str, Any]]:
    count, length = reference.update.shape[:2]
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    few = f"a text of {length} positions has no query that sees more than {measures.ATTENTION_K} keys"
    reason = None
    if comparison.kind in _NO_ATTENTION:
        reason = _NO_ATTENTION[comparison.kind]
    elif output.probabilities is None:
        reason = f"the null '{name}' changes outputs and has no attention of its own"
    elif not _alike(reference, output):
        reason = "the two attentions have different numbers of heads"
    js = topk = None
    if reason is None:
        assert reference.probabilities is not None
        assert output.probabilities is not None
        js = measures.attention_js(reference.probabilities, output.probabilities).tolist()
        if length > measures.ATTENTION_K:
            topk = measures.attention_topk(reference.probabilities, output.probabilities).tolist()
    for key, table, why, worst in (
        ("attention_js", js, reason, max),
        ("attention_topk", topk, reason or few, min),
    ):
        for text, row in enumerate(rows):
            heads = None if table is None else table[text]
            _put(row, key, None if heads is None else sum(heads) / len(heads), why)
            _put(row, f"{key}_worst", None if heads is None else worst(heads), why)
            _put(row, f"{key}_heads", heads, why)
    return rows


def _put(row: dict[str, Any], key: str, value: Any, reason: str | None) -> None:
    row[key] = value
    if value is None:
        row[f"{key}_reason"] = reason


def _next_tokens(
    lm: StreamedLM, z: Tensor, reference: Tensor, updates: Sequence[Tensor]
) -> list[list[dict[str, float]]]:
    """Per variant and text: divergence and agreement of the next token after z + update, mean over tokens."""
    found: list[list[dict[str, float]]] = [[] for _ in updates]
    count, length = z.shape[:2]
    together = max(1, HEAD_ROWS // (length * (1 + len(updates))))
    for first in range(0, count, together):
        texts = range(first, min(first + together, count))
        residuals: list[Tensor] = []
        left: list[int] = []
        right: list[int] = []
        for text in texts:
            base = len(residuals) * length
            residuals.append(z[text] + reference[text])
            for update in updates:
                # Equal updates share their rows, so that agreement is exact whatever the head's rounding.
                same = torch.equal(update[text], reference[text])
                start = base if same else len(residuals) * length
                if not same:
                    residuals.append(z[text] + update[text])
                left += range(base, base + length)
                right += range(start, start + length)
        stacked = torch.cat(residuals)
        agreement = measures.compare_logits(partial(lm.reduced_head, stacked), left, right)
        shape = (len(texts), len(updates), length)
        js = agreement.js.view(shape).mean(dim=-1).tolist()
        topk = {k: share.view(shape).mean(dim=-1).tolist() for k, share in agreement.topk.items()}
        for place in range(len(updates)):
            found[place] += [
                {"logit_js": js[text][place]}
                | {f"logit_topk_{k}": share[text][place] for k, share in topk.items()}
                for text in range(len(texts))
            ]
    return found
