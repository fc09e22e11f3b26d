"""When two modules count as a candidate: limits set on calibration, confirmed on held-out text.

Covers thresholds, the limits that calibration makes of them, the verdict of a pair with its one-sentence
reason, and its level. It reads rows as ``branches.compare`` makes them and touches no model. There is no
p-value here: with a few texts none over a dozen pairs could be small (method, 2.4), so a pair stands on the
size of its distances against the nulls, on every text and both inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from twinscope.lab.config import Section
from twinscope.lab.evidence import Facts, Level, Weights, assign_level
from twinscope.reuse import nulls

Row = Mapping[str, Any]

#: Distances by kind: smaller is closer, 0 is the same. Each has to lie beyond every null.
DISTANCES: Mapping[str, tuple[str, ...]] = {
    "mlp": ("branch_error", "branch_error_trimmed", "logit_js"),
    "linear_attention": ("branch_error", "branch_error_trimmed", "logit_js"),
    "attention": (
        "branch_error",
        "branch_error_trimmed",
        "attention_js",
        "attention_js_worst",
        "logit_js",
    ),
    "q_norm": (
        "norm_error",
        "branch_error",
        "branch_error_trimmed",
        "attention_js",
        "attention_js_worst",
        "logit_js",
    ),
}
#: Agreements: shares of a few tokens, too coarse to lie beyond a null with a margin, so a least share alone.
AGREEMENTS: Mapping[str, tuple[str, ...]] = {
    kind: (
        *(("attention_topk",) if kind in ("attention", "q_norm") else ()),
        "logit_topk_1",
        "logit_topk_5",
        "logit_topk_10",
    )
    for kind in DISTANCES
}
_NAMES = {
    "branch_error": "branch error",
    "branch_error_trimmed": "branch error without massive channels",
    "norm_error": "error of the norm's output",
    "attention_js": "divergence of attention",
    "attention_js_worst": "divergence of attention in the worst head",
    "attention_topk": "agreement on the most attended positions",
    "logit_js": "divergence of the next token",
    "logit_topk_1": "agreement on the most probable token",
    "logit_topk_5": "agreement on the 5 most probable tokens",
    "logit_topk_10": "agreement on the 10 most probable tokens",
}


class Thresholds(Section):
    """What counts as the same function, fixed in the plan before any activation is read.

    Errors are relative, divergences in bits. ``error`` 0.15 leaves 2 % of the branch's energy unexplained;
    it lies between what a copy with 1 % noise on its weights gives (0.03 to 0.08 in SmolLM2) and a copy
    scaled by 1.3 (0.23 and 0.3). ``null_share`` is the largest share of the nearest null's distance that a
    pair may have. Divergences of attention and of the next token lie ten times and more above those of that
    noisy copy, and below those of every null but the weakest. Agreements are least shares of tokens, as
    means over a text: of 32 tokens, 0.8 lets six near-ties fall the other way.
    """

    error: float = Field(default=0.15, gt=0, le=1)
    attention_js: float = Field(default=0.01, gt=0, le=1)
    attention_js_worst: float = Field(default=0.05, gt=0, le=1)
    attention_topk: float = Field(default=0.9, ge=0, le=1)
    logit_js: float = Field(default=0.01, gt=0, le=1)
    logit_topk: float = Field(default=0.8, ge=0, le=1)
    null_share: float = Field(default=0.5, gt=0, lt=1)

    def of(self, measure: str) -> float:
        """The threshold of one measure: the most of a distance, the least of an agreement."""
        if "error" in measure:
            return self.error
        if measure.startswith("logit_topk"):
            return self.logit_topk
        return float(getattr(self, measure))


@dataclass(frozen=True)
class Limit:
    """The most that one distance of one comparison may be, and what set it; ``null`` is the nearest null.

    ``nearest`` is that null's smallest distance on calibration; None where no null has this measure.
    """

    most: float
    null: str | None
    nearest: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether a pair is a candidate, and why, in one sentence.

    ``failed_on`` is where it failed first: ``instrument | calibration | heldout``, or None. ``strain`` is
    the largest distance over its limit on calibration (below 1 if it passed there), by which candidates
    are ranked without held-out text; None where there is none.
    """

    candidate: bool
    reason: str
    failed_on: str | None
    strain: float | None


@dataclass(frozen=True)
class _Failure:
    strain: float
    words: str


def limits(calibration: Sequence[Row], thresholds: Thresholds) -> dict[str, dict[str, Limit]]:
    """For each reference site, the limit of every distance: a pure function of the calibration rows.

    A limit is the threshold, or ``null_share`` times the smallest distance of any null on any calibration
    text where that is less. Rows have ``kind``, ``reference`` and what ``branches.compare`` gives.
    """
    found: dict[str, dict[str, Limit]] = {}
    for reference in dict.fromkeys(row["reference"] for row in calibration):
        rows = [row for row in calibration if row["reference"] == reference]
        found[reference] = {}
        for measure in DISTANCES[_group(rows[0]["kind"])]:
            most = thresholds.of(measure)
            beside = [entry for row in rows for entry in _beside(row, measure)]
            if not beside:
                found[reference][measure] = Limit(most, None, None)
                continue
            nearest, null = min(beside)
            found[reference][measure] = Limit(min(most, thresholds.null_share * nearest), null, nearest)
    return found


def judge(calibration: Sequence[Row], heldout: Sequence[Row], thresholds: Thresholds) -> Verdict:
    """The verdict on one pair from all its rows; with no held-out rows, what calibration alone says.

    Rows are what ``branches.compare`` gives, with ``kind``, ``reference``, ``substitute`` and ``text`` (a
    name) beside it. A pair is a candidate if, on the inputs of both sites and on every text of both
    splits, every distance is within its limit (:func:`limits`, from calibration), every agreement reaches
    its least share, and on held-out text every distance is also within ``null_share`` of that text's own
    nulls. Without a null module of the same kind nothing shows that closeness is special to the pair, so it
    is no candidate.

    Raises:
        ValueError: no calibration rows.
    """
    if not calibration:
        raise ValueError("a verdict needs calibration rows")
    fault = _instrument_fault([*calibration, *heldout])
    if fault is not None:
        return Verdict(False, fault, "instrument", None)
    set_here = limits(calibration, thresholds)
    strain = max(_strains(calibration, set_here))
    missing = _missing(calibration, heldout)
    if missing is not None:
        return Verdict(False, missing, "calibration", strain)
    for split, rows in (("calibration", calibration), ("heldout", heldout)):
        failures = [failure for row in rows for failure in _failures(row, split, set_here, thresholds)]
        if failures:
            worst = max(failures, key=lambda failure: failure.strain)
            return Verdict(False, worst.words, split, strain)
    return Verdict(True, _praise(calibration, heldout, set_here), None, strain)


def pair_level(
    verdict: Verdict,
    *,
    confirmed: bool,
    parity_passed: bool,
    weights: Weights,
    planted: bool,
    seal_intact: bool,
) -> tuple[Level, str]:
    """The level that a scan gives a pair, and the reason: the verdict's, or what holds the level below it.

    ``confirmed`` says that held-out text was opened and is in the verdict.
    """
    passed = verdict.candidate and confirmed
    level = assign_level(Facts(True, parity_passed, passed, weights, planted, seal_intact))
    if not passed or level == "candidate":
        if verdict.candidate and not confirmed:
            return level, f"held-out text was not opened; on calibration, {verdict.reason}"
        return level, verdict.reason
    if not parity_passed:
        return level, "the streamed forward was not shown to equal the library's: run `twinscope model check`"
    held_back = "the weights are random" if weights == "random" else "the seal of the plan is broken"
    return level, f"{held_back}, so the pair stays below a candidate although {verdict.reason}"


def _group(kind: str) -> str:
    return "q_norm" if kind in ("q_norm", "k_norm", "qk_norm") else kind


def _beside(row: Row, measure: str) -> Iterator[tuple[float, str]]:
    """(distance, name) of every null of a row that has the measure, the module itself aside."""
    for null in row["nulls"]:
        if null["null"] != nulls.SELF and null[measure] is not None:
            yield float(null[measure]), str(null["null"])


def _instrument_fault(rows: Sequence[Row]) -> str | None:
    for row in rows:
        itself = next(null for null in row["nulls"] if null["null"] == nulls.SELF)
        group = _group(row["kind"])
        for measures, exact in ((DISTANCES[group], 0.0), (AGREEMENTS[group], 1.0)):
            for measure in measures:
                if itself[measure] not in (exact, None):
                    return (
                        f"{row['reference']} against itself gives a {_NAMES[measure]} of "
                        f"{itself[measure]:.3g} on {row['text']} instead of exactly {exact:g}, so nothing "
                        "measured here can be trusted"
                    )
    return None


def _missing(calibration: Sequence[Row], heldout: Sequence[Row]) -> str | None:
    """What a verdict lacks: one direction, or null modules."""
    for name, rows in (("calibration", calibration), ("held-out", heldout)):
        ways = {(row["reference"], row["substitute"]) for row in rows}
        if rows and (len(ways) != 2 or any((there, here) not in ways for here, there in ways)):
            return f"{name} text was measured on the inputs of one site only"
    for row in (*calibration, *heldout):
        if not any(null["null"].startswith(f"{nulls.OTHER}.") for null in row["nulls"]):
            return (
                f"there is no other module of its kind to stand beside {row['substitute']}, so closeness "
                "would not be special to the pair"
            )
    return None


def _strains(rows: Sequence[Row], found: Mapping[str, Mapping[str, Limit]]) -> Iterator[float]:
    for row in rows:
        for measure, limit in found[row["reference"]].items():
            yield _strain(row[measure], limit.most)


def _strain(value: float | None, most: float) -> float:
    """How far a distance fills its limit: 1 at the limit, beyond every number where it cannot be told."""
    if value is None or (most == 0 and value >= 0):
        # A null at distance 0 leaves nothing to be closer than.
        return 1e9
    return min(value / most, 1e9)


def _failures(
    row: Row, split: str, found: Mapping[str, Mapping[str, Limit]], thresholds: Thresholds
) -> Iterator[_Failure]:
    text = "held-out text" if split == "heldout" else "calibration text"
    where = f"on {text} {row['text']} with the inputs of {row['reference']}"
    for measure, limit in found[row["reference"]].items():
        value = row[measure]
        if value is None:
            yield _Failure(2e9, f"the {_NAMES[measure]} does not exist {where}: {row[f'{measure}_reason']}")
            continue
        threshold = thresholds.of(measure)
        said = f"the {_NAMES[measure]} is {_written(value)} {where}"
        strain = _strain(value, limit.most)
        if strain > 1 and value > threshold:
            yield _Failure(strain, f"{said}, where at most {threshold:g} counts as the same")
        elif strain > 1:
            yield _Failure(
                strain,
                f"{said}, more than {thresholds.null_share:g} times that of the nearest null on "
                f"calibration ({_called(limit.null)}, {_written(limit.nearest)})",
            )
        elif split == "heldout":
            beside = list(_beside(row, measure))
            if beside and value > thresholds.null_share * min(beside)[0]:
                nearest, null = min(beside)
                yield _Failure(
                    _strain(value, thresholds.null_share * nearest),
                    f"{said}, more than {thresholds.null_share:g} times that of the nearest null there "
                    f"({_called(null)}, {_written(nearest)})",
                )
    for measure in AGREEMENTS[_group(row["kind"])]:
        value, least = row[measure], thresholds.of(measure)
        if value is None:
            yield _Failure(2e9, f"the {_NAMES[measure]} does not exist {where}: {row[f'{measure}_reason']}")
        elif value < least:
            yield _Failure(
                1 + least - value,
                f"the {_NAMES[measure]} is {value:.2f} {where}, where {least:g} is the least",
            )


def _praise(calibration: Sequence[Row], heldout: Sequence[Row], found: Mapping[str, Any]) -> str:
    rows = [*calibration, *heldout]
    texts = len({row["text"] for row in rows})
    error = max(row["branch_error"] for row in rows)
    nearest = min(entry for row in rows for entry in _beside(row, "branch_error"))
    js = max(row["logit_js"] for row in rows)
    return (
        f"on all {texts} texts and both inputs the branch error is at most {_written(error)} (nearest null: "
        f"{_called(nearest[1])}, {_written(nearest[0])}) and the next token diverges by at most "
        f"{_written(js)} bits"
    )


def _called(null: str | None) -> str:
    names = {
        nulls.ZERO: "no update",
        nulls.MEAN: "the mean update",
        nulls.PERMUTED: "permuted channels",
    }
    text = null or "none"
    return names.get(text, text.removeprefix(f"{nulls.OTHER}."))


def _written(value: float | None) -> str:
    return "none" if value is None else "exactly 0" if value == 0 else f"{value:.3g}"
