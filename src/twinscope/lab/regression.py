"""Least squares with intervals that hold when the errors within a cluster are dependent.

Covers an ordinary least-squares fit of a few coefficients, the bias-reduced cluster-robust variance (CR2)
and the degrees of freedom that go with few clusters. Does not cover weights, instruments or hypotheses on
several coefficients at once.

Sources
    CR2 variance         Bell & McCaffrey, "Bias reduction in standard errors for linear regression with
                         multi-stage samples", Survey Methodology 28 (2002)
    degrees of freedom   the same, equation for a single coefficient; Imbens & Kolesár, "Robust standard
                         errors in small samples", Rev. Econ. Stat. 98 (2016)

Legend: n points, p coefficients, G clusters; X the (n, p) design, H = X(XᵀX)⁻¹Xᵀ. Arrays are float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from twinscope.lab.statistics import Undefined


@dataclass(frozen=True)
class Coefficient:
    """One coefficient with its interval; ``dof`` are the degrees of freedom of its Student quantile."""

    estimate: float
    low: float
    high: float
    dof: float


@dataclass(frozen=True)
class Fit:
    """Coefficients in the order of the design's columns and the residuals y − Xb, (n,)."""

    coefficients: tuple[Coefficient, ...]
    residuals: np.ndarray
    clusters: int


def clustered_fit(
    design: ArrayLike, response: ArrayLike, clusters: Sequence[Hashable], level: float = 0.95
) -> Fit | Undefined:
    """Least squares of (n,) ``response`` on (n, p) ``design`` with CR2 intervals over ``clusters``.

    With e = y − Xb and A_g = (I − H_gg)^(−1/2), the variance of b is
    (XᵀX)⁻¹ Σ_g X_gᵀ A_g e_g e_gᵀ A_g X_g (XᵀX)⁻¹, unbiased for independent errors of one variance. Student's
    quantile has the degrees of freedom (tr Ω)²/tr Ω², Ω_gh = p_gᵀp_h, p_g = (I − H)_{·g} A_g X_g (XᵀX)⁻¹ c
    for the coefficient c: 1 to G − 1, less where few clusters carry the coefficient.

    Undefined with fewer than two clusters, no more points than coefficients, columns that are linearly
    dependent, or a combination of coefficients that one cluster alone determines.

    Raises:
        ValueError: shapes that do not fit, a value that is not finite, or a level outside (0, 1).
    """
    matrix, y = np.asarray(design, dtype=np.float64), np.asarray(response, dtype=np.float64)
    if matrix.ndim != 2 or y.shape != (len(matrix),) or len(clusters) != len(y):
        raise ValueError(
            f"a design {matrix.shape} needs as many responses {y.shape} and clusters ({len(clusters)})"
        )
    if not (np.isfinite(matrix).all() and np.isfinite(y).all()):
        raise ValueError("the design and the response must be finite")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    count, width = matrix.shape
    members: dict[Hashable, list[int]] = {}
    for index, name in enumerate(clusters):
        members.setdefault(name, []).append(index)
    if len(members) < 2:
        return Undefined(f"an interval over clusters needs at least 2 of them, there are {len(members)}")
    if count <= width:
        return Undefined(f"{count} points do not determine {width} coefficients and their scatter")
    if np.linalg.matrix_rank(matrix) < width:
        return Undefined("the points do not differ in what the fit is on")
    bread = np.linalg.inv(matrix.T @ matrix)
    estimate = bread @ (matrix.T @ y)
    residuals = y - matrix @ estimate
    maker = np.eye(count) - matrix @ bread @ matrix.T
    variance = np.zeros(width)
    columns = np.empty((len(members), count, width))
    for number, rows in enumerate(members.values()):
        values, vectors = np.linalg.eigh(maker[np.ix_(rows, rows)])
        # A null direction is one that no other cluster has: its residual is zero whatever the scatter.
        if values[0] < 1e-10:
            return Undefined("one cluster alone determines part of the fit, which then shows no scatter")
        loadings = (vectors / np.sqrt(values)) @ vectors.T @ matrix[rows] @ bread  # (n_g, p)
        variance += (loadings.T @ residuals[rows]) ** 2
        columns[number] = maker[:, rows] @ loadings
    found = []
    for index in range(width):
        gram = columns[:, :, index] @ columns[:, :, index].T
        dof = float(np.trace(gram)) ** 2 / float(np.sum(gram**2))
        half = float(stats.t.ppf((1 + level) / 2, dof)) * float(np.sqrt(variance[index]))
        middle = float(estimate[index])
        found.append(Coefficient(middle, middle - half, middle + half, dof))
    return Fit(tuple(found), residuals, len(members))
