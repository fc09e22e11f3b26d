"""Statistics against hand-computed cases, brute definitions and simulated error rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from twinscope.lab.draws import generator
from twinscope.lab.statistics import (
    Interval,
    Undefined,
    cross_fit_ratio,
    cross_fit_square,
    equivalence_verdict,
    holm,
    mean_interval,
    paired_bootstrap,
    paired_difference,
    paired_interval,
    ratio_jackknife,
    texts_needed,
    tost,
    tost_power,
)

SIMULATIONS = 2_000

# Two-sided 95 % quantiles of Student's t on 1, 3 and 5 degrees of freedom; the first is tan(0.475 π).
T1, T3, T5 = np.tan(0.475 * np.pi), 3.182446305284263, 2.5705818356363


def close(interval: Interval | Undefined, estimate: float, half: float, tolerance: float = 1e-12) -> bool:
    assert isinstance(interval, Interval)
    got = (interval.estimate, interval.low, interval.high)
    return got == pytest.approx((estimate, estimate - half, estimate + half), rel=tolerance, abs=tolerance)


def coverage(intervals: list[Interval | Undefined], truth: float) -> float:
    """Share of the defined intervals that hold the truth; at least 90 % of them must be defined."""
    defined = [item for item in intervals if isinstance(item, Interval)]
    assert len(defined) >= 0.9 * len(intervals)
    return sum(item.low <= truth <= item.high for item in defined) / len(defined)


# ------------------------------------------------------------------------------------------ means


def test_mean_interval_of_four_numbers_by_hand() -> None:
    # mean 2.5, s² = 5/3, s/√n = √(5/12)
    result = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert close(result, 2.5, T3 * np.sqrt(5 / 12))
    assert (result.n, result.method) == (4, "student-t")


def test_mean_interval_agrees_with_scipy_at_another_level() -> None:
    values = generator(0, "test mean").normal(size=17)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.8)
    result = mean_interval(values, level=0.8)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_a_constant_sample_has_a_point_interval() -> None:
    assert close(mean_interval([0.5, 0.5, 0.5]), 0.5, 0.0)
    assert close(paired_bootstrap(np.full(30, 0.5)), 0.5, 0.0)


def test_paired_difference_is_the_interval_of_the_differences() -> None:
    a, b = generator(1, "test pair").normal(size=(2, 9))
    assert paired_difference(a, b, 0.9) == mean_interval(a - b, 0.9)


@pytest.mark.parametrize("n", [4, 30])
def test_mean_interval_covers(n: int) -> None:
    samples = generator(2, "test coverage", n).normal(3.0, 2.0, size=(SIMULATIONS, n))
    assert 0.93 <= coverage([mean_interval(sample) for sample in samples], 3.0) <= 0.97


# -------------------------------------------------------------------------------------- bootstrap


def test_bootstrap_agrees_with_a_loop_over_the_same_resamples() -> None:
    values = generator(3, "test bootstrap").exponential(size=31)
    chosen = generator(7, "paired bootstrap").integers(0, 31, size=(999, 31))
    studentised = []
    for indices in chosen:
        picked = [values[index] for index in indices]
        error = np.sqrt(sum((x - np.mean(picked)) ** 2 for x in picked) / 30 / 31)
        studentised.append((np.mean(picked) - np.mean(values)) / error)
    studentised.sort()
    error = stats.sem(values)
    # With 999 draws the 2.5 % and 97.5 % quantiles are the 25th and 975th order statistics.
    expected = (values.mean() - studentised[974] * error, values.mean() - studentised[24] * error)
    result = paired_bootstrap(values, draws=999, seed=7)
    assert (result.low, result.high) == pytest.approx(expected, rel=1e-12)
    assert (result.estimate, result.n, result.method) == (pytest.approx(values.mean()), 31, "bootstrap-t")


def test_bootstrap_is_a_function_of_its_seed() -> None:
    values = generator(4, "test bootstrap").normal(size=40)
    assert paired_bootstrap(values, seed=5) == paired_bootstrap(values, seed=5)
    assert paired_bootstrap(values, seed=5) != paired_bootstrap(values, seed=6)


def test_bootstrap_of_many_normal_values_approaches_students_interval() -> None:
    # 2,000 values × 4,000 draws also crosses the bound on resamples held at once.
    values = generator(5, "test bootstrap").normal(size=2_000)
    boot, student = paired_bootstrap(values, draws=4_000), mean_interval(values)
    width = student.high - student.low
    assert boot.low == pytest.approx(student.low, abs=0.04 * width)
    assert boot.high == pytest.approx(student.high, abs=0.04 * width)


def test_bootstrap_of_nearly_constant_values_falls_back_and_says_so() -> None:
    values = np.zeros(40)
    values[0] = 1.0
    assert paired_bootstrap(values) == mean_interval(values)
    assert paired_bootstrap(values).method == "student-t"


def test_the_interval_over_texts_changes_method_at_thirty() -> None:
    values = generator(6, "test bootstrap").normal(size=30)
    assert paired_interval(values[:29], 0.9) == mean_interval(values[:29], 0.9)
    assert paired_interval(values, 0.9, 500, 3) == paired_bootstrap(values, 0.9, 500, 3)


@pytest.mark.parametrize(
    ("shape", "n"), [("normal", 30), ("exponential", 30), ("exponential", 60)], ids=lambda value: str(value)
)
def test_bootstrap_covers(shape: str, n: int) -> None:
    draw = getattr(generator(7, f"test coverage {shape}", n), shape)
    truth = {"normal": 0.0, "exponential": 1.0}[shape]
    samples = draw(size=(SIMULATIONS, n))
    intervals: list[Interval | Undefined] = [
        paired_bootstrap(sample, draws=499, seed=seed) for seed, sample in enumerate(samples)
    ]
    assert 0.93 <= coverage(intervals, truth) <= 0.97


# ------------------------------------------------------------------------------- ratio over batches


def test_ratio_jackknife_of_two_batches_by_hand() -> None:
    # r = 3/4; without one batch 2/3 and 1; variance ½(1/6² + 1/6²) = 1/36
    result = ratio_jackknife([1.0, 2.0], [1.0, 3.0])
    assert close(result, 0.75, T1 / 6)
    assert isinstance(result, Interval)
    assert (result.n, result.method) == (2, "jackknife")


def test_ratio_jackknife_with_equal_denominators_is_students_interval() -> None:
    top = generator(8, "test ratio").normal(size=12)
    expected = mean_interval(top / 3.0, 0.9)
    assert close(
        ratio_jackknife(top, np.full(12, 3.0), 0.9), expected.estimate, expected.high - expected.estimate
    )


def test_ratio_jackknife_agrees_with_deleting_each_batch() -> None:
    rng = generator(9, "test ratio")
    top, bottom = rng.normal(size=9), rng.exponential(size=9)
    without = [np.delete(top, i).sum() / np.delete(bottom, i).sum() for i in range(9)]
    half = stats.t.ppf(0.975, 8) * np.sqrt(8 * np.var(without))
    assert close(ratio_jackknife(top, bottom), top.sum() / bottom.sum(), half)


def test_ratio_jackknife_of_an_exact_multiple_has_no_width() -> None:
    bottom = generator(10, "test ratio").exponential(size=8)
    assert close(ratio_jackknife(-0.25 * bottom, bottom), -0.25, 0.0)


def test_ratio_jackknife_of_a_dead_block_is_undefined() -> None:
    result = ratio_jackknife([0.0, 0.0, 1.0], [0.0, 0.0, 2.0])
    assert isinstance(result, Undefined)
    assert "zero in all but 1 of 3 batches" in result.reason


@pytest.mark.parametrize("batches", [8, 24])
def test_ratio_jackknife_covers(batches: int) -> None:
    # ⟨D_b,B_b⟩ against ‖B_b‖² with D = c B + noise: both vary from batch to batch and are correlated.
    rng = generator(11, "test coverage", batches)
    base = 0.5 + rng.normal(size=(SIMULATIONS, batches, 40))
    leak = -0.4 * base + 0.8 * rng.normal(size=base.shape)
    top, bottom = (leak * base).sum(-1), (base * base).sum(-1)
    intervals = [ratio_jackknife(a, b) for a, b in zip(top, bottom, strict=True)]
    assert 0.93 <= coverage(intervals, -0.4) <= 0.97


# ------------------------------------------------------------------------- cross-fit over group means


def brute_cross_fit(cross: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """Ratio and half-width from the definitions: loops over pairs, deletions, and a least-squares fit."""
    groups = len(base)
    pairs = list(itertools.permutations(range(groups), 2))

    def ratio(kept: list[int]) -> float:
        inside = [(j, k) for j, k in pairs if j in kept and k in kept]
        return sum(cross[p] for p in inside) / sum(base[p] for p in inside)

    estimate = ratio(list(range(groups)))
    without = [ratio([k for k in range(groups) if k != i]) for i in range(groups)]
    plain = (groups - 1) * float(np.var(without))
    scale = sum(base[p] for p in pairs) / len(pairs)
    halves = list(itertools.combinations(range(groups), 2))
    residual = (cross - estimate * base) / scale
    linear = np.array([(residual[j, k] + residual[k, j]) / 2 for j, k in halves])
    design = np.array([[float(i in pair) for i in range(groups)] for pair in halves])
    _, (squares,), *_ = np.linalg.lstsq(design, linear, rcond=None)
    interaction = squares / (len(halves) - groups)
    excess = 2 * interaction / ((groups - 1) * (groups - 2))
    floor = 2 * interaction / (groups * (groups - 1))
    free = len(halves) - groups
    if plain - excess <= floor:
        return estimate, float(stats.t.ppf(0.975, free) * np.sqrt(floor))
    dof = (plain - excess) ** 2 / (plain**2 / (groups - 1) + excess**2 / free)
    return estimate, float(stats.t.ppf(0.975, max(dof, (groups - 1) / 2)) * np.sqrt(plain - excess))


def gram(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.einsum("...jd,...kd->...jk", left, right)


@pytest.mark.parametrize(("groups", "signal"), [(4, 3.0), (8, 1.0), (8, 0.3), (11, 0.4)])
def test_cross_fit_agrees_with_the_definitions(groups: int, signal: float) -> None:
    rng = generator(12, "test cross-fit", groups)
    base = signal + rng.normal(size=(groups, 300))
    leak = 0.3 * base + rng.normal(size=base.shape)
    for tables in ((gram(leak, base), gram(base, base)), (gram(leak, leak), gram(base, base))):
        assert close(cross_fit_ratio(*tables), *brute_cross_fit(*tables), tolerance=1e-9)


def test_cross_fit_variance_is_the_unbiased_one_of_a_mean_over_pairs() -> None:
    # With ⟨B_j,B_k⟩ = 1 the ratio is a mean over pairs, whose variance E[U²] − (E U)² has one unbiased
    # symmetric estimate: U² less the mean of h_ij h_kl over disjoint pairs.
    rng = generator(13, "test cross-fit")
    effects = 3.0 * rng.normal(size=7)
    noise = rng.normal(size=(7, 7))
    table = effects[:, None] + effects[None, :] + noise + noise.T
    mean = table[~np.eye(7, dtype=bool)].mean()
    disjoint = [table[i, j] * table[k, m] for i, j, k, m in itertools.permutations(range(7), 4)]
    variance = mean**2 - np.mean(disjoint)
    without = [np.delete(np.delete(table, i, 0), i, 1)[~np.eye(6, dtype=bool)].mean() for i in range(7)]
    plain = 6 * np.var(without)
    assert 0.2 * plain < variance < 0.999 * plain
    dof = variance**2 / (plain**2 / 6 + (plain - variance) ** 2 / 14)
    assert close(
        cross_fit_ratio(table, np.ones((7, 7))), mean, stats.t.ppf(0.975, dof) * np.sqrt(variance), 1e-10
    )


def test_cross_fit_of_pure_interaction_by_hand() -> None:
    # A pentagon: +1 on its 5 sides, −1 on its 5 diagonals. Every row sums to 0, so nothing varies with the
    # group deleted; M = 10/5 on 5 degrees of freedom and the variance is 2M/(5·4) = 1/5.
    distance = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    table = np.where((distance == 1) | (distance == 4), 1.0, -1.0)
    result = cross_fit_ratio(table, np.ones((5, 5)))
    assert close(result, 0.0, T5 * np.sqrt(0.2))
    assert isinstance(result, Interval)
    assert (result.n, result.method) == (5, "cross-fit-jackknife")


def test_cross_fit_of_an_exact_multiple_has_no_width() -> None:
    base = 1.0 + generator(14, "test cross-fit").normal(size=(8, 50))
    assert close(cross_fit_ratio(gram(-0.2 * base, base), gram(base, base)), -0.2, 0.0, 1e-7)
    assert close(cross_fit_square(gram(-0.2 * base, -0.2 * base), gram(base, base)), 0.04, 0.0, 1e-7)


def test_cross_fit_does_not_read_the_diagonal() -> None:
    rng = generator(15, "test cross-fit")
    base = 1.0 + rng.normal(size=(8, 50))
    cross, square = gram(rng.normal(size=(8, 50)), base), gram(base, base)
    expected = cross_fit_ratio(cross, square)
    np.fill_diagonal(cross, np.nan)
    np.fill_diagonal(square, np.nan)
    assert cross_fit_ratio(cross, square) == expected


def test_cross_fit_square_may_be_negative() -> None:
    directions = np.array([[np.cos(a), np.sin(a)] for a in 2 * np.pi * np.arange(8) / 8])
    result = cross_fit_square(gram(directions, directions), np.ones((8, 8)))
    # The vectors sum to zero: Σ_{j≠k}⟨D_j,D_k⟩ = −Σ‖D_j‖² = −8 over 56 pairs.
    assert isinstance(result, Interval)
    assert result.estimate == pytest.approx(-8 / 56, rel=1e-12)


@pytest.mark.parametrize("mean", [0.0, -5.0])
def test_cross_fit_without_a_clear_denominator_is_undefined(mean: float) -> None:
    noise = generator(16, "test cross-fit").normal(size=(8, 8))
    result = cross_fit_ratio(np.ones((8, 8)), mean + noise + noise.T)
    assert isinstance(result, Undefined)
    assert "the denominator is not clearly positive" in result.reason
    assert "over 8 groups" in result.reason


def test_cross_fit_of_a_dead_block_is_undefined() -> None:
    result = cross_fit_ratio(np.zeros((8, 8)), np.zeros((8, 8)))
    assert isinstance(result, Undefined)
    assert "not clearly positive: 0, 95 % interval [0, 0]" in result.reason


def test_cross_fit_refuses_at_the_edge_of_the_denominators_interval() -> None:
    table = generator(17, "test cross-fit").normal(size=(8, 8))
    spread = cross_fit_ratio(table, np.ones((8, 8)))
    assert isinstance(spread, Interval)
    assert isinstance(cross_fit_ratio(table, table - spread.low - 1e-6), Undefined)
    assert isinstance(cross_fit_ratio(table, table - spread.low + 1e-6), Interval)


def noisy_tables(groups: int, noise: float, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """⟨D,B⟩, ⟨D,D⟩ and ⟨B,B⟩, (SIMULATIONS, J, J): D = −0.3 B + more noise, over means of 4 batches.

    ``noise`` is the ratio ‖noise‖²/‖signal‖² in one batch, in 300 dimensions.
    """
    rng = generator(18, "test coverage", index)
    signal = np.full(300, np.sqrt(4.0 / noise))  # the mean over 4 batches has noise of unit variance
    tables = [np.empty((SIMULATIONS, groups, groups)) for _ in range(3)]
    for rows in np.array_split(np.arange(SIMULATIONS), 10):
        base = signal + rng.normal(size=(rows.size, groups, 300))
        leak = -0.3 * base + 0.5 * rng.normal(size=base.shape)
        for table, left, right in zip(tables, (leak, leak, base), (base, leak, base), strict=True):
            table[rows] = gram(left, right)
    return tables[0], tables[1], tables[2]


@pytest.mark.parametrize(("groups", "noise"), [(8, 1.0), (8, 16.0), (16, 40.0)])
def test_cross_fit_covers_under_heavy_noise(groups: int, noise: float) -> None:
    cross, square, base = noisy_tables(groups, noise, groups + int(noise))
    assert 0.93 <= coverage([cross_fit_ratio(a, b) for a, b in zip(cross, base, strict=True)], -0.3) <= 0.97
    assert 0.93 <= coverage([cross_fit_square(a, b) for a, b in zip(square, base, strict=True)], 0.09) <= 0.97


def test_the_plain_group_jackknife_is_too_long_under_heavy_noise() -> None:
    # Why cross_fit_ratio subtracts a second-order term.
    cross, _, base = noisy_tables(16, 40.0, 0)
    for table in (cross, base):
        table[:, np.arange(16), np.arange(16)] = 0.0

    def without_each(table: np.ndarray) -> np.ndarray:
        return table.sum((1, 2))[:, None] - table.sum(1) - table.sum(2)

    estimate = cross.sum((1, 2)) / base.sum((1, 2))
    half = stats.t.ppf(0.975, 15) * np.sqrt(15 * np.var(without_each(cross) / without_each(base), axis=1))
    assert np.mean(np.abs(estimate + 0.3) <= half) > 0.975


# ------------------------------------------------------------------------------------ equivalence


def test_tost_agrees_with_two_one_sided_scipy_tests() -> None:
    values = generator(19, "test tost").normal(0.1, 1.0, size=14)
    below = np.asarray(stats.ttest_1samp(values, 0.7, alternative="less"))[1]
    above = np.asarray(stats.ttest_1samp(values, -0.7, alternative="greater"))[1]
    result = tost(values, 0.7)
    assert result.p_value == pytest.approx(max(below, above), rel=1e-12)
    assert result.interval == mean_interval(values, 0.9)
    mirrored = tost(-values, 0.7)
    assert mirrored.p_value == pytest.approx(result.p_value, rel=1e-12)


def test_tost_and_its_interval_agree() -> None:
    for seed, alpha in itertools.product(range(40), (0.01, 0.05, 0.2)):
        values = generator(seed, "test tost").normal(0.2, 1.0, size=10)
        result = tost(values, 0.6, alpha)
        assert result.interval == mean_interval(values, 1 - 2 * alpha)
        assert result.equivalent == (result.p_value < alpha)
        assert result.equivalent == (result.interval.low > -0.6 and result.interval.high < 0.6)


def test_tost_of_constant_differences() -> None:
    assert tost([0.25, 0.25, 0.25], 0.5).p_value == 0.0
    assert tost([0.5, 0.5, 0.5], 0.5).p_value == 1.0


def test_power_far_from_the_other_margin_is_a_t_tail() -> None:
    # With the other margin far away only one test matters. At the margin its level is α exactly …
    assert tost_power(9, 1.0, 200.0, 200.0) == pytest.approx(0.05, rel=1e-9)
    assert tost_power(2, 1.0, 1e5, -1e5, 0.1) == pytest.approx(0.1, rel=1e-4)
    # … and inside it the power is a noncentral t tail; at 0 the two failures are disjoint.
    shift = 0.8 * np.sqrt(40)
    failure = stats.nct.cdf(stats.t.ppf(0.95, 39), 39, shift)
    assert tost_power(40, 1.0, 0.8) == pytest.approx(1 - 2 * failure, rel=1e-8)
    assert tost_power(40, 2.0, 100.0, 100.0 - 1.6) == pytest.approx(1 - failure, rel=1e-8)


@pytest.mark.parametrize(("n", "sd"), [(2, 1.0), (3, 1.0), (8, 3.0), (30, 3.0)])
def test_power_agrees_with_the_integral_taken_over_the_mean(n: int, sd: float) -> None:
    # Power is low here: given the mean, equivalence is s < (margin − |mean|)√n/t.
    quantile, dof = stats.t.ppf(0.95, n - 1), n - 1
    error = sd / np.sqrt(n)

    def density(mean: float) -> float:
        largest = (1.0 - abs(mean)) * np.sqrt(n) / quantile
        return float(stats.norm.pdf(mean, 0.3, error) * stats.chi.cdf(largest * np.sqrt(dof) / sd, dof))

    expected, _ = integrate.quad(density, -1.0, 1.0, points=[0.0], epsabs=1e-13, epsrel=1e-11)
    assert 1e-4 < expected < 0.4
    assert tost_power(n, sd, 1.0, 0.3) == pytest.approx(expected, rel=1e-8)


def test_tost_error_at_the_margin_never_exceeds_its_level() -> None:
    for n, spread in itertools.product((2, 3, 4, 8, 30, 200), (0.01, 0.1, 0.5, 1.0, 3.0)):
        for difference in (1.0, -1.0, 1.2):
            assert tost_power(n, spread, 1.0, difference) <= 0.05 * (1 + 1e-6)


def test_simulated_tost_error_and_power() -> None:
    def rate(difference: float, index: int) -> float:
        samples = generator(20, "test tost", index).normal(difference, 1.0, size=(4_000, 8))
        return float(np.mean([tost(sample, 1.0).equivalent for sample in samples]))

    error = np.sqrt(0.05 * 0.95 / 4_000)
    assert 0.04 < rate(1.0, 0) <= 0.05 + 2 * error
    assert rate(0.0, 1) == pytest.approx(tost_power(8, 1.0, 1.0), abs=0.02)
    assert rate(-0.4, 2) == pytest.approx(tost_power(8, 1.0, 1.0, -0.4), abs=0.02)


@pytest.mark.parametrize(("sd", "power", "alpha"), [(0.3, 0.8, 0.05), (1.0, 0.8, 0.05), (4.0, 0.9, 0.01)])
def test_texts_needed_is_the_smallest_number_that_suffices(sd: float, power: float, alpha: float) -> None:
    needed = texts_needed(sd, 1.0, power, alpha)
    assert tost_power(needed, sd, 1.0, 0.0, alpha) >= power > tost_power(needed - 1, sd, 1.0, 0.0, alpha)
    assert texts_needed(10 * sd, 10.0, power, alpha) == needed


def test_texts_needed_at_its_limits() -> None:
    assert texts_needed(0.0, 0.1) == 2
    assert texts_needed(1e-6, 1.0) == 2
    # Many texts: n → ((z_0.95 + z_0.9) sd/margin)².
    limit = ((stats.norm.ppf(0.95) + stats.norm.ppf(0.9)) * 100.0) ** 2
    assert texts_needed(1.0, 0.01) == pytest.approx(limit, rel=1e-4)
    with pytest.raises(ValueError, match="more than"):
        texts_needed(1.0, 1e-6)


VERDICTS: list[tuple[list[float], float, int, str]] = [
    ([2.0, 2.1, 1.9, 2.0], 1.0, 4, "different"),
    ([-2.0, -2.1, -1.9, -2.0], 1.0, 4, "different"),
    ([2.0, 2.1, 1.9, 2.0], 1.0, 50, "different"),  # judged before power
    ([0.0, 0.1, -0.1, 0.0], 1.0, 5, "underpowered"),  # judged before equivalence
    ([0.0, 0.1, -0.1, 0.0], 1.0, 4, "equivalent"),
    ([0.0], 1.0, 2, "underpowered"),
    ([0.0, 1.0, -1.0, 2.0], 1.0, 4, "inconclusive"),
    ([-0.1, 0.0, 0.1, 0.0], 0.0961, 4, "equivalent"),  # 90 %: ±2.3534 · 0.08165/2 = ±0.09607
    ([-0.1, 0.0, 0.1, 0.0], 0.0960, 4, "inconclusive"),
    ([0.9, 1.0, 1.1, 1.0], 0.8700, 4, "different"),  # 95 %: 1 − 3.1824 · 0.08165/2 = 0.87008
    ([0.9, 1.0, 1.1, 1.0], 0.8702, 4, "inconclusive"),
]


@pytest.mark.parametrize(("differences", "margin", "needed", "word"), VERDICTS)
def test_verdict(differences: list[float], margin: float, needed: int, word: str) -> None:
    assert equivalence_verdict(differences, margin, needed) == word


@pytest.mark.parametrize("n", [6, 36])
def test_verdict_error_rates(n: int) -> None:
    """Below 30 texts the interval is Student's, above it the bootstrap's; both keep the same rates."""
    noise = generator(21, "test verdict", n).normal(size=(SIMULATIONS, n))

    def rates(difference: float, margin: float) -> dict[str, float]:
        words = [
            equivalence_verdict(row + difference, margin, n, draws=299, seed=seed)
            for seed, row in enumerate(noise)
        ]
        return {word: words.count(word) / len(words) for word in set(words)}

    margin = 6.0 / np.sqrt(n)
    at_margin = rates(margin, margin)
    assert 0.03 <= at_margin["equivalent"] <= 0.065
    assert 0.015 <= at_margin["different"] <= 0.035
    # A margin for which exactly n texts are needed keeps the promised power.
    found = optimize.root_scalar(lambda trial: tost_power(n, 1.0, trial) - 0.8, bracket=(0.3, 3.0))
    powered = found.root + 1e-9
    assert texts_needed(1.0, powered) == n
    at_zero = rates(0.0, powered)
    assert 0.77 <= at_zero["equivalent"] <= 0.83
    assert at_zero.get("different", 0.0) <= 0.001


# --------------------------------------------------------------------------------- multiple comparisons


def test_holm_by_hand() -> None:
    # Sorted .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 → .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-14)
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]).shape == (0,)


def test_holm_is_the_closed_bonferroni_test() -> None:
    rng = generator(22, "test holm")
    for _ in range(20):
        p = rng.uniform(size=5) ** 3
        p[0] = p[3]  # a tie
        sets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size)]
        brute = [max(min(1.0, len(s) * min(p[list(s)])) for s in sets if i in s) for i in range(5)]
        assert holm(p) == pytest.approx(brute, rel=1e-14)


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_holm_keeps_the_family_wise_error(shared: float) -> None:
    """Ten hypotheses, six of them true, with independent and with correlated statistics."""
    rng = generator(23, "test holm", int(10 * shared))
    z = np.sqrt(1 - shared) * rng.normal(size=(8_000, 10)) + np.sqrt(shared) * rng.normal(size=(8_000, 1))
    z[:, 6:] += 4.0
    rejected = np.array([holm(p) <= 0.05 for p in 2 * stats.norm.sf(np.abs(z))])
    family = rejected[:, :6].any(axis=1).mean()
    assert family <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 8_000)
    # Where the false ones are found, the six true ones share α: more is rejected than by Bonferroni.
    assert rejected[:, 6:].mean() > (2 * stats.norm.sf(np.abs(z)) <= 0.005)[:, 6:].mean() + 0.01
    if shared == 0.0:
        assert family >= 0.035


# ---------------------------------------------------------------------------------------- refusals

TABLE = np.ones((8, 8))
REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: mean_interval([1.0]), "at least 2 numbers"),
    (lambda: mean_interval([1.0, np.nan]), "not finite"),
    (lambda: mean_interval([[1.0, 2.0], [3.0, 4.0]]), "must be a list"),
    (lambda: mean_interval([1.0, 2.0], level=95), "level"),
    (lambda: paired_difference([1.0, 2.0], [1.0, 2.0, 3.0]), "differ in shape"),
    (lambda: paired_bootstrap(np.arange(29.0)), "use mean_interval"),
    (lambda: paired_bootstrap(np.arange(30.0), draws=99), "draws"),
    (lambda: paired_bootstrap(np.arange(30.0), level=1.0), "level"),
    (lambda: ratio_jackknife([1.0, 2.0], [1.0, -2.0]), "negative"),
    (lambda: ratio_jackknife([1.0, 2.0], [1.0, 2.0, 3.0]), "differ in shape"),
    (lambda: cross_fit_ratio(np.ones((3, 3)), np.ones((3, 3))), "at least 4 groups"),
    (lambda: cross_fit_ratio(np.ones((8, 7)), TABLE), "square"),
    (lambda: cross_fit_ratio(np.ones((9, 9)), TABLE), "differ in shape"),
    (lambda: cross_fit_ratio(np.full((8, 8), np.inf), TABLE), "not finite"),
    (lambda: tost([1.0, 2.0], 0.0), "margin"),
    (lambda: tost([1.0, 2.0], 1.0, 0.5), "alpha"),
    (lambda: equivalence_verdict([], 1.0, 4), "at least 1 numbers"),
    (lambda: equivalence_verdict([0.0, 0.1], -1.0, 4), "margin"),
    (lambda: equivalence_verdict([0.0, 0.1], 1.0, 1), "needed"),
    (lambda: tost_power(1, 1.0, 1.0), "n must"),
    (lambda: tost_power(4, 0.0, 1.0), "sd"),
    (lambda: texts_needed(np.nan, 1.0), "sd"),
    (lambda: texts_needed(1.0, 1.0, power=1.0), "power"),
    (lambda: holm([0.1, 1.2]), r"\[0, 1\]"),
    (lambda: holm([0.1, np.nan]), r"\[0, 1\]"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSALS)
def test_refusals(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
