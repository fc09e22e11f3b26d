"""What a sweep's rows say: changes, intervals and verdicts in spite of the number of pairs, summary, claims.

Covers turning rows into matrices; it touches no model. A sweep tries every pair, so it is exploratory
whatever it finds: no level above parity comes of it.

With m replacements in the whole run, over every matrix of it: p-values of equivalence are adjusted by Holm,
and intervals that hold at once are mean ± t_{n−1, 1−α/(2m)} s/√n, since the largest of m such deviations
exceeds its quantile with a probability of at most m times that of one (Bonferroni). Both hold however the
replacements depend on each other, which they do: they share their texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from twinscope.lab.evidence import Facts, Level, Weights, assign_level, reuse_claim
from twinscope.lab.statistics import (
    Interval,
    Verdict,
    equivalence_verdict,
    holm,
    mean_interval,
    paired_interval,
    tost,
    tost_power,
)
from twinscope.reuse.swap_findings import MOST_TEXTS
from twinscope.reuse.swap_plan import ALPHA, POWER
from twinscope.reuse.sweep import Matrix

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Changes:
    """Change of the mean loss in nats per token, over the sites of one matrix and the texts of one split.

    ``delta[i, j, t]`` is that of site i replaced by site j on text t, on the diagonal by itself;
    ``zero[i, t]`` that with nothing in the place of site i.
    """

    delta: np.ndarray
    zero: np.ndarray

    @property
    def faulty(self) -> np.ndarray:
        """(n,) bool: whether a site replaced by itself changes anything, which no replacement can excuse."""
        itself = self.delta[np.arange(len(self.delta)), np.arange(len(self.delta))]
        return np.any(itself != 0, axis=1)


def changes(matrix: Matrix, rows: Rows) -> Changes:
    """The changes in the rows of one matrix and split, texts in the order of the rows.

    Raises:
        ValueError: a site has no row, or other texts or replacements than the first.
    """
    by_site: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_site.setdefault(row["replaced"], []).append(row)
    place = {site: index for index, site in enumerate(matrix.sites)}
    texts = [name for row in by_site.get(matrix.sites[0], []) for name in row["texts"]]
    delta = np.zeros((len(place), len(place), len(texts)))
    zero = np.zeros((len(place), len(texts)))
    for site, here in place.items():
        found = by_site.get(site, [])
        if [name for row in found for name in row["texts"]] != texts or not texts:
            raise ValueError(f"{site} was not replaced on the same texts as {matrix.sites[0]}")
        zero[here] = [value for row in found for value in row["zero"]]
        delta[here, here] = [value for row in found for value in row["itself"]]
        for row in found:
            if {*row["by"], site} != set(place):
                raise ValueError(f"{site} was not replaced by every other site")
        for other in found[0]["by"]:
            delta[here, place[other]] = [
                value for row in found for value in row["delta_nll"][row["by"].index(other)]
            ]
    return Changes(delta, zero)


def needed_texts(calibration: Sequence[Changes], margin: float) -> list[list[list[int]]]:
    """For each matrix (n, n), the texts with which the corrected test finds a true change of 0 equivalent.

    A power of :data:`POWER` at the level α/m, with m replacements in all matrices: where Holm's procedure
    starts. Rounded up to :func:`ladder`; the diagonal needs 2.
    """
    family = sum(len(part.delta) * (len(part.delta) - 1) for part in calibration)
    return [_needed(part, margin, ALPHA / family) for part in calibration]


def ladder() -> list[int]:
    """The numbers of texts that are told apart: every one to 32, then steps of a quarter."""
    steps = list(range(2, 33))
    while steps[-1] < MOST_TEXTS:
        steps.append(min(MOST_TEXTS, -(-5 * steps[-1] // 4)))
    return steps


def texts_needed_about(sd: float, margin: float, alpha: float = ALPHA) -> int:
    """As ``lab.statistics.texts_needed``, rounded up to the next of :func:`ladder`: quick for many pairs.

    An estimate of the spread from a few texts is off by more than such a step. At most :data:`MOST_TEXTS`.
    """
    steps = ladder()
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if _widest_spread(steps[middle], alpha) * margin >= sd:
            high = middle
        else:
            low = middle + 1
    return steps[low]


def kinds_findings(
    matrices: Sequence[Matrix],
    calibration: Sequence[Changes],
    heldout: Sequence[Changes],
    needed: Sequence[Sequence[Sequence[int]]],
    margin: float,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The matrices as the summary has them; ``needed`` as :func:`needed_texts` gave it before held-out text.

    The verdict on one replacement, in this order: ``different`` if the interval that holds for all at once
    lies wholly outside ±margin; ``underpowered`` if there are fewer texts than needed; ``equivalent`` if
    Holm's adjusted p-value is below α; else ``inconclusive``. ``seed`` is that of the bootstrap from 30 texts
    on.
    """
    family = sum(matrix.pairs for matrix in matrices)
    faults = [before.faulty | after.faulty for before, after in zip(calibration, heldout, strict=True)]
    p_values = [_p_values(part, fault, margin) for part, fault in zip(heldout, faults, strict=True)]
    corrected = holm([p for table in p_values for p in _off(table.tolist())])
    found = []
    for number, matrix in enumerate(matrices):
        here, corrected = corrected[: matrix.pairs], corrected[matrix.pairs :]
        p_holm = np.zeros_like(p_values[number])
        p_holm[~np.eye(len(p_holm), dtype=bool)] = here
        alone = _needed(calibration[number], margin, ALPHA)
        cells = _Cells(margin, 1.0 - ALPHA / family, needed[number], alone, p_holm, seed)
        found.append(_kind(matrix, calibration[number], heldout[number], faults[number], cells))
    return found


def sweep_level(parity_passed: bool, weights: Weights, planted: bool) -> Level:
    """The level of a sweep: parity at most, since its pairs were chosen by nothing."""
    return assign_level(_facts(parity_passed, weights, planted))


def sweep_claim(
    kinds: Sequence[Mapping[str, Any]],
    texts: int,
    margin: float,
    parity_passed: bool,
    weights: Weights,
    planted: bool,
) -> dict[str, str]:
    """The claim of a sweep, from its matrices; ``texts`` are those held out."""
    facts = _facts(parity_passed, weights, planted)
    verdicts = Counter(verdict or "without a verdict" for kind in kinds for verdict in _off(kind["verdict"]))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    least = min(
        (abs(kind["delta_nll"][i][j]), kind["delta_nll"][i][j], f"{kind['sites'][i]} <- {kind['sites'][j]}")
        for kind in kinds
        for i, j in _places(len(kind["sites"]))
    )
    swept = " and ".join(f"{kind['pairs']} of kind {kind['kind']}" for kind in kinds)
    found = reuse_claim(
        f"every replacement among the sites swept ({swept}) on {texts} held-out texts, with correction for "
        f"their number and a margin of ±{margin:g} nats per token: {counts}; the least change is "
        f"{least[1]:+.3g}, {least[2]}; {assign_level(facts)}",
        facts,
    )
    found["does_not_support"] += "; a pair that this sweep picks out: judge it by a swap on other texts"
    return found


def _facts(parity_passed: bool, weights: Weights, planted: bool) -> Facts:
    return Facts(
        ran=True,
        parity_passed=parity_passed,
        candidate_passed=False,
        weights=weights,
        planted=planted,
        seal_intact=True,
    )


def _needed(calibration: Changes, margin: float, alpha: float) -> list[list[int]]:
    sd = calibration.delta.std(axis=2, ddof=1)
    np.fill_diagonal(sd, 0.0)
    return [[texts_needed_about(float(value), margin, alpha) for value in row] for row in sd]


@lru_cache(maxsize=4096)
def _widest_spread(texts: int, alpha: float) -> float:
    """The largest spread, in margins, at which so many texts have the power."""

    def short(log: float) -> float:
        return tost_power(texts, float(np.exp(log)), 1.0, 0.0, alpha) - POWER

    # With a spread of s margins the power is 0 from about √n / t on, whatever t is.
    top = float(np.log(texts**0.5 / stats.t.ppf(1.0 - alpha, texts - 1)) + 2.0)
    root: Any = brentq(short, top - 12.0, top, xtol=1e-9)
    return float(np.exp(root))


def _p_values(part: Changes, faults: np.ndarray, margin: float) -> np.ndarray:
    """(n, n) p-values of equivalence; 1 where the instrument is at fault, 0 on the diagonal."""
    found = np.zeros(part.delta.shape[:2])
    for i, j in _places(len(found)):
        found[i, j] = 1.0 if faults[i] else tost(part.delta[i, j], margin, ALPHA).p_value
    return found


@dataclass(frozen=True)
class _Cells:
    """What the entries of one matrix are judged by; ``level`` is that of intervals that hold at once."""

    margin: float
    level: float
    needed: Sequence[Sequence[int]]
    needed_alone: Sequence[Sequence[int]]
    p_holm: np.ndarray
    seed: int

    def of(self, i: int, j: int, values: np.ndarray, fault: bool) -> dict[str, Any]:
        """Intervals and verdicts of the changes ``values`` (n,) of entry (i, j)."""
        alone, every = paired_interval(values, 1.0 - ALPHA, seed=self.seed), mean_interval(values, self.level)
        verdicts: tuple[Verdict | None, Verdict | None] = None, None
        if i == j and not fault:
            verdicts = "equivalent", "equivalent"
        elif not fault:
            verdicts = (
                self._verdict(every, values.size, self.needed[i][j], float(self.p_holm[i, j])),
                equivalence_verdict(values, self.margin, self.needed_alone[i][j], seed=self.seed),
            )
        return {
            "delta_nll": alone.estimate,
            "low": alone.low,
            "high": alone.high,
            "low_all": every.low,
            "high_all": every.high,
            "verdict": verdicts[0],
            "verdict_alone": verdicts[1],
        }

    def _verdict(self, every: Interval, texts: int, needed: int, p_holm: float) -> Verdict:
        if every.low > self.margin or every.high < -self.margin:
            return "different"
        if texts < needed:
            return "underpowered"
        return "equivalent" if p_holm < ALPHA else "inconclusive"


def _kind(
    matrix: Matrix, calibration: Changes, heldout: Changes, faults: np.ndarray, cells: _Cells
) -> dict[str, Any]:
    sites = matrix.sites
    rows = [
        [cells.of(i, j, heldout.delta[i, j], bool(faults[i])) for j in range(len(sites))]
        for i in range(len(sites))
    ]
    zero = [paired_interval(values, 1.0 - ALPHA, seed=cells.seed) for values in heldout.zero]
    found: dict[str, Any] = {
        "kind": matrix.kind,
        "sites": list(sites),
        "pairs": matrix.pairs,
        **{name: [[cell[name] for cell in row] for row in rows] for name in rows[0][0]},
        "p_holm": cells.p_holm.tolist(),
        "needed": [list(row) for row in cells.needed],
        "calibration_delta_nll": calibration.delta.mean(axis=2).tolist(),
        "zero": [
            {"site": site, "delta_nll": part.estimate, "low": part.low, "high": part.high}
            for site, part in zip(sites, zero, strict=True)
        ],
    }
    if faults.any():
        at_fault = ", ".join(site for site, fault in zip(sites, faults, strict=True) if fault)
        reason = f"replaced by itself, {at_fault} changes the loss, so nothing measured in its place counts"
        found |= {"verdict_reason": reason, "verdict_alone_reason": reason}
    return found


def _off(table: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries beside the diagonal, row by row."""
    return [table[i][j] for i, j in _places(len(table))]


def _places(count: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(count) for j in range(count) if i != j)
