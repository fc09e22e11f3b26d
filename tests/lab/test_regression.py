"""Clustered least squares: against the formula written out in loops, closed forms, and simulated coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg, stats

from twinscope.lab.regression import Fit, clustered_fit
from twinscope.lab.statistics import Undefined, mean_interval


def fitted(*arguments) -> Fit:
    found = clustered_fit(*arguments)
    assert isinstance(found, Fit)
    return found


def by_loops(design, response, clusters, level):
    """CR2 and Bell–McCaffrey degrees of freedom, one matrix at a time, by scipy's general matrix root."""
    n, p = design.shape
    bread = np.linalg.inv(design.T @ design)
    b = np.linalg.lstsq(design, response, rcond=None)[0]
    e = response - design @ b
    hat = design @ bread @ design.T
    meat, columns = np.zeros((p, p)), [[] for _ in range(p)]
    for name in sorted(set(clusters)):
        rows = [i for i in range(n) if clusters[i] == name]
        root = linalg.inv(np.real(linalg.sqrtm(np.eye(len(rows)) - hat[np.ix_(rows, rows)])))
        score = design[rows].T @ root @ e[rows]
        meat += np.outer(score, score)
        for k in range(p):
            columns[k].append((np.eye(n) - hat)[:, rows] @ root @ design[rows] @ bread[:, k])
    variance = bread @ meat @ bread
    result = []
    for k in range(p):
        omega = np.array([[u @ v for v in columns[k]] for u in columns[k]])
        dof = np.trace(omega) ** 2 / np.trace(omega @ omega)
        half = stats.t.ppf((1 + level) / 2, dof) * np.sqrt(variance[k, k])
        result.append((b[k], b[k] - half, b[k] + half, dof))
    return result, e


def test_the_fit_is_the_sandwich_formula_written_out():
    rng = np.random.default_rng(3)
    clusters = list(np.repeat(["a", "b", "c", "d"], [3, 9, 5, 7])[rng.permutation(24)])
    design = np.column_stack([np.ones(24), rng.normal(size=24), rng.normal(size=24)])
    response = design @ [2.0, -1.0, 0.5] + rng.standard_t(4, size=24)
    found = fitted(design, response, clusters, 0.9)
    expected, residuals = by_loops(design, response, clusters, 0.9)
    for coefficient, values in zip(found.coefficients, expected, strict=True):
        read = (coefficient.estimate, coefficient.low, coefficient.high, coefficient.dof)
        assert read == pytest.approx(values, rel=1e-10)
    assert found.residuals == pytest.approx(residuals, abs=1e-12)
    assert found.clusters == 4


def test_a_mean_over_single_units_has_students_interval():
    values = np.random.default_rng(0).exponential(size=11)
    (found,) = fitted(np.ones((11, 1)), values, list(range(11))).coefficients
    known = mean_interval(values)
    assert (found.estimate, found.low, found.high) == pytest.approx((known.estimate, known.low, known.high))
    assert found.dof == pytest.approx(10)


def test_a_mean_over_equal_clusters_has_students_interval_of_the_cluster_means():
    values = np.random.default_rng(1).normal(size=(5, 12))
    (found,) = fitted(np.ones((60, 1)), values.ravel(), np.repeat(range(5), 12).tolist()).coefficients
    known = mean_interval(values.mean(axis=1))
    assert (found.estimate, found.low, found.high) == pytest.approx((known.estimate, known.low, known.high))
    assert found.dof == pytest.approx(4)


@pytest.mark.parametrize(
    ("between", "correlation", "slopes"), [(0.3, 0.5, 0.0), (1.0, 0.9, 0.0), (0.3, 0, 0.1)]
)
def test_five_clusters_of_twelve_cover_at_the_stated_level(between, correlation, slopes):
    draws, rng = 1000, np.random.default_rng(7)
    names = np.repeat(range(5), 12).tolist()
    shift, spread = np.linspace(-between, between, 5)[:, None], np.linspace(-1, 1, 12)
    held = held_level = 0
    for _ in range(draws):
        x = shift + spread + 0.1 * rng.normal(size=(5, 12))
        noise = np.sqrt(correlation) * rng.normal(size=(5, 1))
        noise = noise + np.sqrt(1 - correlation) * rng.normal(size=(5, 12))
        y = (-1 + slopes * rng.normal(size=(5, 1))) * x + 0.2 * noise
        design = np.column_stack([np.ones(60), x.ravel() - x.mean()])
        slope = fitted(design, y.ravel(), names).coefficients[1]
        held += slope.low <= -1 <= slope.high
        level = fitted(np.ones((60, 1)), (y + x).ravel(), names).coefficients[0]
        held_level += level.low <= 0 <= level.high
    assert 0.93 <= held / draws <= 0.97
    assert 0.93 <= held_level / draws <= 0.97


def test_what_has_no_interval_says_why():
    x = np.arange(6.0)
    line = np.column_stack([np.ones(6), x])
    for design, clusters, words in (
        (line, [1] * 6, "at least 2"),
        (line[:2], [1, 2], "do not determine"),
        (np.ones((6, 2)), [1, 1, 2, 2, 3, 3], "do not differ"),
        (np.column_stack([np.ones(6), [1, 0, 0, 0, 0, 0]]), [1, 2, 2, 2, 2, 2], "one cluster alone"),
    ):
        found = clustered_fit(design, np.cos(x)[: len(design)], clusters)
        assert isinstance(found, Undefined)
        assert words in found.reason


def test_impossible_arguments_are_refused():
    for design, response, clusters, level in (
        (np.ones((3, 1)), [1.0, 2.0], [1, 2, 3], 0.95),
        (np.ones((3, 1)), [1.0, 2.0, np.nan], [1, 2, 3], 0.95),
        (np.ones((3, 1)), [1.0, 2.0, 3.0], [1, 2], 0.95),
        (np.ones((3, 1)), [1.0, 2.0, 3.0], [1, 2, 3], 95),
    ):
        with pytest.raises(ValueError):
            clustered_fit(design, response, clusters, level)
