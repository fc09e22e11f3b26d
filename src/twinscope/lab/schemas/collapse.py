"""The record of the verb ``collapse``."""

from __future__ import annotations

from typing import Literal

from twinscope.lab.schemas.parts import Measured, Strict, Text


class CollapseModel(Strict):
    """The law within one model: slope over its blocks, and constant in unit roundoffs."""

    model: Text
    n_points: int
    n_null: int
    slope: Measured
    slope_low: Measured
    slope_high: Measured
    constant: Measured


class CollapseControl(Strict):
    """A run at another beta: mean log distance from the law, and from the same blocks at the common beta."""

    run: Text
    model: Text
    beta: float
    n_points: int
    n_null: int
    shift: Measured
    paired_shift: Measured
    paired_largest: Measured


class CollapseControls(Strict):
    """Runs that fall on the line by a theorem; they enter no fit."""

    description: Text
    runs: list[CollapseControl]


class CollapseSummary(Strict):
    """Summary of the verb ``collapse``: log gain_low against log displacement ratio, clustered by model.

    ``constant`` is the geometric mean of gain_low times ratio in units of ``unit_roundoff``. The standard
    deviations are those of log gain_low: around the law of slope ``prediction`` and around the fitted line.
    """

    prediction: float
    slope: Measured
    slope_low: Measured
    slope_high: Measured
    slope_dof: Measured
    intercept: Measured
    constant: Measured
    constant_low: Measured
    constant_high: Measured
    n_points: int
    n_null: int
    n_models: int
    residual_sd: Measured
    fit_residual_sd: Measured
    r_squared: Measured
    beta: float
    read: Literal["linear", "energy"]
    rounds: int
    instrument: Literal["fp32", "fp64"]
    study: Literal["fp32", "fp64", "amp"]
    band: float
    unit_roundoff: float
    per_model: list[CollapseModel]
    controls: CollapseControls
    fails: list[Text]


class CollapsePoint(Strict):
    """One block of one leak run; ``residual`` is log(gain_low / predicted), ``predicted`` by the law."""

    key: Text
    run: Text
    model: Text
    width: int | None
    layers: int
    block: int
    beta: float
    role: Literal["point", "control"]
    displacement_ratio: float
    gain_low: Measured
    gain_low_low: Measured
    gain_low_high: Measured
    predicted: Measured
    residual: Measured
