"""What a sweep's rows say: matrices, correction for the number of pairs, verdicts, level and claim."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from twinscope.lab.statistics import texts_needed
from twinscope.reuse.sweep import Matrix
from twinscope.reuse.sweep_findings import (
    ALPHA,
    Changes,
    changes,
    kinds_findings,
    ladder,
    needed_texts,
    sweep_claim,
    sweep_level,
    texts_needed_about,
)

MARGIN = 0.05


def matrix(count: int, kind: Any = "mlp") -> Matrix:
    return Matrix(kind, tuple(f"layers.{n}.{kind}" for n in range(count)))


def drawn(count: int, texts: int, mean: Any = 0.0, sd: Any = 0.01, seed: int = 0) -> Changes:
    draws = np.random.default_rng(seed)
    delta = mean + sd * draws.normal(size=(count, count, texts))
    delta[np.arange(count), np.arange(count)] = 0.0
    return Changes(delta, 3.0 + draws.normal(size=(count, texts)))


def found(*parts: Changes, needed: int = 2) -> list[dict[str, Any]]:
    """Findings in which calibration saw what held-out text shows."""
    matrices = [matrix(len(part.delta)) for part in parts]
    enough = [[[needed] * len(part.delta)] * len(part.delta) for part in parts]
    return kinds_findings(matrices, parts, parts, enough, MARGIN)


def off(table: list[list[Any]]) -> list[Any]:
    return [value for i, row in enumerate(table) for j, value in enumerate(row) if i != j]


def test_rows_become_matrices_with_texts_in_their_order():
    sites = matrix(3).sites

    def row(i: int, by: tuple[int, ...], texts: list[str], shift: float) -> dict[str, Any]:
        return {
            "replaced": sites[i],
            "by": [sites[j] for j in by],
            "texts": texts,
            "delta_nll": [[100 * i + 10 * j + shift + t for t in range(len(texts))] for j in by],
            "zero": [-i - shift - t for t in range(len(texts))],
            "itself": [0.0] * len(texts),
        }

    rows = [
        row(i, by, texts, shift)
        for i, by in ((0, (1, 2)), (1, (2, 0)), (2, (0, 1)))
        for texts, shift in ((["a", "b"], 0.0), (["c"], 5.0))
    ]
    part = changes(matrix(3), rows)
    expected = np.array([[[100 * i + 10 * j + add for add in (0, 1, 5)] for j in range(3)] for i in range(3)])
    expected[np.arange(3), np.arange(3)] = 0
    np.testing.assert_array_equal(part.delta, expected)
    np.testing.assert_array_equal(part.zero, [[-i, -i - 1, -i - 5] for i in range(3)])
    # The order of the replacements differs from group to group.
    rows[1] = row(0, (2, 1), ["c"], 5.0)
    np.testing.assert_array_equal(changes(matrix(3), rows).delta, expected)
    with pytest.raises(
        ValueError, match=r"layers\.2\.mlp was not replaced on the same texts as layers\.0\.mlp"
    ):
        changes(matrix(3), rows[:5])
    rows[4] = row(2, (0,), ["a", "b"], 0.0)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp was not replaced by every other site"):
        changes(matrix(3), rows)


def test_intervals_and_p_values_are_corrected_over_every_matrix_of_the_run():
    first, second = drawn(4, 6, mean=0.01, sd=0.02, seed=1), drawn(3, 6, mean=-0.02, sd=0.03, seed=2)
    kinds = found(first, second)
    family = 4 * 3 + 3 * 2
    assert [kind["pairs"] for kind in kinds] == [12, 6]
    alone, p_holm = [], []
    for part, kind in zip((first, second), kinds, strict=True):
        mean, error = part.delta.mean(axis=2), part.delta.std(axis=2, ddof=1) / 6**0.5
        np.testing.assert_allclose(kind["delta_nll"], mean, atol=1e-15)
        for level, low, high in ((0.95, "low", "high"), (1 - 0.05 / family, "low_all", "high_all")):
            half = stats.t.ppf(0.5 + level / 2, 5) * error
            np.testing.assert_allclose(kind[low], mean - half, atol=1e-12)
            np.testing.assert_allclose(kind[high], mean + half, atol=1e-12)
        np.testing.assert_allclose(kind["calibration_delta_nll"], mean, atol=1e-15)
        for site, item, values in zip(range(9), kind["zero"], part.zero, strict=False):
            half = stats.t.ppf(0.975, 5) * values.std(ddof=1) / 6**0.5
            assert item["site"] == f"layers.{site}.mlp"
            centre = values.mean()
            assert (item["delta_nll"], item["low"], item["high"]) == pytest.approx(
                (centre, centre - half, centre + half)
            )
        p_holm += off(kind["p_holm"])
        for i in range(len(mean)):
            for j in range(len(mean)):
                if i != j:
                    values = part.delta[i, j]
                    above = stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue
                    below = stats.ttest_1samp(values, MARGIN, alternative="less").pvalue
                    alone.append(max(above, below))
    # Holm, step by step: the smallest p-value is held against all, the next against all but one.
    adjusted, running = np.zeros(family), 0.0
    for rank, place in enumerate(np.argsort(alone)):
        running = max(running, min(1.0, (family - rank) * alone[place]))
        adjusted[place] = running
    np.testing.assert_allclose(p_holm, adjusted, rtol=1e-9)
    assert len(set(p_holm)) > 3
    for kind in kinds:
        for name, value in (("p_holm", 0.0), ("delta_nll", 0.0), ("low_all", 0.0), ("verdict", "equivalent")):
            assert [kind[name][i][i] for i in range(len(kind["sites"]))] == [value] * len(kind["sites"])


def test_verdicts_come_in_their_order():
    texts, count = 8, 4
    part = drawn(count, texts, sd=0.001, seed=3)
    part.delta[0, 1] += 1.0
    part.delta[0, 2] -= 1.0
    part.delta[0, 3] = np.linspace(-0.5, 0.5, texts) + 0.4
    part.delta[1, 0] = np.linspace(-0.05, 0.05, texts) + 0.018
    part.delta[2, 0] = np.linspace(-0.2, 0.2, texts)
    (kind,) = found(part)
    verdict, alone = kind["verdict"], kind["verdict_alone"]
    assert verdict[0] == ["equivalent", "different", "different", "inconclusive"]
    # What one alone would show, beyond the margin or within it, it does not show among twelve.
    assert alone[0] == ["equivalent", "different", "different", "different"]
    assert (verdict[1][0], alone[1][0]) == ("inconclusive", "equivalent")
    assert (verdict[2][0], alone[2][0]) == ("inconclusive", "underpowered")
    assert verdict[3] == ["equivalent"] * 4
    (kind,) = found(part, needed=texts + 1)
    assert kind["verdict"][0] == ["equivalent", "different", "different", "underpowered"]
    assert kind["verdict"][3] == ["underpowered"] * 3 + ["equivalent"]
    assert kind["needed"] == [[texts + 1] * 4] * 4
    (kind,) = found(part, needed=texts)
    assert kind["verdict"][3] == ["equivalent"] * 4


def test_a_site_that_differs_from_itself_has_no_verdict():
    part = drawn(3, 5, sd=0.001)
    part.delta[1, 1, 2] = 1e-9
    for calibration in (True, False):
        clean = drawn(3, 5, sd=0.001)
        before, after = (part, clean) if calibration else (clean, part)
        (kind,) = kinds_findings([matrix(3)], [before], [after], [[[2] * 3] * 3], MARGIN)
        assert [row.count(None) for row in kind["verdict"]] == [0, 3, 0]
        assert kind["verdict_alone"][1] == [None] * 3
        assert kind["verdict_reason"] == (
            "replaced by itself, layers.1.mlp changes the loss, so nothing measured in its place counts"
        )
        assert kind["p_holm"][1] == [1.0, 0.0, 1.0]
    claim = sweep_claim([kind], 5, MARGIN, True, "released", False)
    assert "4 equivalent, 2 without a verdict" in claim["statement"]
    assert "verdict_reason" not in found(clean)[0]


def test_no_more_false_equivalences_and_misses_than_stated():
    """Twelve replacements that share their texts: all at the margin, then all beyond nothing."""
    runs, texts, count = 150, 6, 4
    draws = np.random.default_rng(7)
    false = outside = 0
    for _ in range(runs):
        shared = draws.normal(size=texts)
        noise = 0.5**0.5 * (shared + draws.normal(size=(count, count, texts)))
        part = Changes(MARGIN + 0.02 * noise, np.zeros((count, texts)))
        part.delta[np.arange(count), np.arange(count)] = 0.0
        (kind,) = found(part)
        false += "equivalent" in off(kind["verdict"])
        low, high = np.array(off(kind["low_all"])), np.array(off(kind["high_all"]))
        outside += bool(np.any((low > MARGIN) | (high < MARGIN)))
    # 0.05 and three standard errors of a rate of 0.05.
    most = 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert false / runs <= most
    assert outside / runs <= most
    assert false + outside > 0


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 1740])
def test_needed_texts_are_those_of_the_test_rounded_up_to_the_ladder(alpha):
    steps = ladder()
    assert steps[:31] == list(range(2, 33))
    assert all(one < two <= 1.25 * one + 1 for one, two in pairwise(steps))
    for sd in (1e-9, 0.01, 0.05, 0.13, 0.4, 2.0):
        exact = texts_needed(sd, MARGIN, alpha=alpha)
        assert texts_needed_about(sd, MARGIN, alpha) == next(step for step in steps if step >= exact), sd
    assert texts_needed_about(0.0, MARGIN, alpha) == 2
    assert texts_needed_about(1e6, MARGIN, alpha) == 10**8


def test_needed_texts_are_computed_for_the_number_of_replacements():
    parts = drawn(4, 4, sd=0.02, seed=5), drawn(3, 4, sd=0.1, seed=6)
    tables = needed_texts(parts, MARGIN)
    assert [len(table) for table in tables] == [4, 3]
    for part, table in zip(parts, tables, strict=True):
        for i, row in enumerate(table):
            for j, needed in enumerate(row):
                if i == j:
                    assert needed == 2
                    continue
                exact = texts_needed(part.delta[i, j].std(ddof=1), MARGIN, alpha=ALPHA / 18)
                assert exact <= needed <= 1.25 * exact + 1


def test_no_sweep_is_above_parity():
    for weights in ("random", "trained", "released"):
        for planted in (False, True):
            assert sweep_level(True, weights, planted) == "parity"
            assert sweep_level(False, weights, planted) == "capacity"
    part = drawn(3, 5, mean=0.01, sd=1e-4)
    part.delta[2, 1] = -0.002
    kinds = found(part)
    claim = sweep_claim(kinds, 5, MARGIN, True, "random", True)
    assert claim["level"] == "parity"
    assert claim["statement"] == (
        "every replacement among the sites swept (6 of kind mlp) on 5 held-out texts, with correction for "
        "their number and a margin of ±0.05 nats per token: 6 equivalent; the least change is -0.002, "
        "layers.2.mlp <- layers.1.mlp; parity"
    )
    for limit in ("any reuse of one module by another", "copies were planted", "the weights are random"):
        assert limit in claim["does_not_support"]
    assert claim["does_not_support"].endswith("judge it by a swap on other texts")
