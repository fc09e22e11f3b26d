"""The threshold law: does ``gain_low * displacement_ratio`` depend on the number format alone (METHOD 1.4)?

Covers the regression, the controls and where the law fails, from records of ``leak``; no model is touched.
The points are read in points.py, the leak runs made in run.py.

The prediction is log gain_low = log(constant · u) − log ratio, with u the unit roundoff of the instrument's
format. Points are the blocks of the runs at the one beta that most runs have; runs at another beta are
controls: a uniform gain is a rescaled nudge, so they fall on the line by a theorem and enter no fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from twinscope.lab.evidence import claim
from twinscope.lab.record import Record
from twinscope.lab.regression import clustered_fit
from twinscope.lab.statistics import Undefined
from twinscope.propagation.collapse.points import Source, common_beta, given, points, read_sources

PREDICTION = -1.0
#: A difference of logarithms below this is rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Law:
    """Rows, summary and claims of the ``collapse`` record."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    claims: list[dict[str, str]]


def collapse_law(records: Sequence[tuple[str, Record]]) -> Law:
    """Fit the law to leak records, each with the name of its run.

    Slope: least squares of log gain_low on log displacement ratio, its interval clustered by model.
    Constant: exp of the mean of log(gain_low · ratio), the intercept at slope −1, in units of the unit
    roundoff; interval likewise. Blocks without ``gain_low`` are rows with the reason and enter no fit.

    Raises:
        ConfigError: no record, a record that is no complete ``leak``, runs under different estimators,
            formats or bands, or no beta that most runs have.
    """
    sources = read_sources(records)
    beta = common_beta(sources)
    rows = [row for source in sources for row in points(source, beta)]
    fitted = [row for row in rows if row["role"] == "point" and row["gain_low"] is not None]
    clusters = {source.run: source.cluster for source in sources}
    unit = float(sources[0].conditions["unit_roundoff"])
    x = np.array([math.log(row["displacement_ratio"]) for row in fitted])
    y = np.array([math.log(row["gain_low"]) for row in fitted])
    names = [clusters[row["run"]] for row in fitted]
    line, fit_sd, r_squared = _line(x, y, names)
    level, level_low, level_high, why = _level(x + y, names)
    residual_sd = float(np.std(x + y, ddof=1)) if len(fitted) > 1 else None
    for row in rows:
        row |= _against_law(row, level)
    every = [row for row in rows if row["role"] == "point"]
    empty = "no block has a gain_low"
    summary: dict[str, Any] = {
        "prediction": PREDICTION,
        **line,
        **given("constant", None if level is None else math.exp(level) / unit, empty),
        **given("constant_low", None if level_low is None else math.exp(level_low) / unit, why),
        **given("constant_high", None if level_high is None else math.exp(level_high) / unit, why),
        "n_points": len(fitted),
        "n_null": len(every) - len(fitted),
        "n_models": len(set(names)),
        **given("residual_sd", residual_sd, "fewer than 2 points"),
        **given("fit_residual_sd", fit_sd, "no line is fitted, or two points determine it"),
        **given("r_squared", r_squared, "no line is fitted, or gain_low does not vary"),
        "beta": beta,
        **{name: sources[0].conditions[name] for name in ("read", "rounds", "instrument", "study", "band")},
        "unit_roundoff": unit,
        "per_model": _per_model(every, unit),
        "controls": _controls(rows, sources, beta),
    }
    summary["fails"] = _fails(summary, every, rows)
    return Law(rows, summary, _claims(summary))


def _line(
    x: np.ndarray, y: np.ndarray, names: Sequence[str]
) -> tuple[dict[str, Any], float | None, float | None]:
    """Slope with its interval and the intercept at ratio 1, residual sd, and R²."""
    if len(x) < 2 or np.ptp(x) < ROUNDING:
        reason = f"{len(x)} points do not determine a slope: it takes 2 with different displacement ratios"
        keys = ("slope", "slope_low", "slope_high", "slope_dof", "intercept")
        return {k: v for key in keys for k, v in given(key, None, reason).items()}, None, None
    # Centred, so that the slope and the level are told apart without loss of digits.
    middle = float(x.mean())
    design = np.column_stack([np.ones_like(x), x - middle])
    level, slope = (float(value) for value in np.linalg.lstsq(design, y, rcond=None)[0])
    residuals = y - design @ [level, slope]
    fit = clustered_fit(design, y, names)
    interval = None if isinstance(fit, Undefined) else fit.coefficients[1]
    reason = fit.reason if isinstance(fit, Undefined) else ""
    result: dict[str, Any] = {"slope": slope, "intercept": level - slope * middle}
    for key, field in (("slope_low", "low"), ("slope_high", "high"), ("slope_dof", "dof")):
        result |= given(key, getattr(interval, field, None), reason)
    square, total = float(residuals @ residuals), float(np.sum((y - y.mean()) ** 2))
    sd = math.sqrt(square / (len(x) - 2)) if len(x) > 2 else None
    return result, sd, 1 - square / total if total > 0 else None


def _level(sums: np.ndarray, names: Sequence[str]) -> tuple[float | None, float | None, float | None, str]:
    """Mean of log(gain_low · ratio) with its interval clustered by model, and why there is no interval."""
    if not len(sums):
        return None, None, None, "no block has a gain_low"
    fit = clustered_fit(np.ones((len(sums), 1)), sums, names)
    if isinstance(fit, Undefined):
        return float(sums.mean()), None, None, fit.reason
    found = fit.coefficients[0]
    return found.estimate, found.low, found.high, ""


def _against_law(row: dict[str, Any], level: float | None) -> dict[str, Any]:
    """``predicted`` by the law and ``residual`` = log(gain_low / predicted)."""
    if level is None:
        none = "no block has a gain_low, so the law has no constant"
        return given("predicted", None, none) | given("residual", None, none)
    predicted = math.exp(level) / row["displacement_ratio"]
    if row["gain_low"] is None:
        return {"predicted": predicted, **given("residual", None, row["gain_low_reason"])}
    return {"predicted": predicted, "residual": math.log(row["gain_low"] / predicted)}


def _per_model(points: Sequence[dict[str, Any]], unit: float) -> list[dict[str, Any]]:
    """Slope, with every block a unit of its own, and constant of each model label."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in points:
        groups.setdefault(row["model"], []).append(row)
    result = []
    for model, rows in groups.items():
        known = [row for row in rows if row["gain_low"] is not None]
        x = np.array([math.log(row["displacement_ratio"]) for row in known])
        y = np.array([math.log(row["gain_low"]) for row in known])
        line, _, _ = _line(x, y, [str(index) for index in range(len(known))])
        constant = math.exp(float(np.mean(x + y))) / unit if known else None
        kept = {key: value for key, value in line.items() if not key.startswith(("slope_dof", "intercept"))}
        result.append(
            {
                "model": model,
                "n_points": len(known),
                "n_null": len(rows) - len(known),
                **kept,
                **given("constant", constant, "no block has a gain_low"),
            }
        )
    return result


def _controls(rows: Sequence[dict[str, Any]], sources: Sequence[Source], beta: float) -> dict[str, Any]:
    """Runs at another beta against the law, and block by block against the same model at ``beta``."""
    found = []
    for source in sources:
        if source.beta == beta:
            continue
        mine = [row for row in rows if row["run"] == source.run]
        known = [row for row in mine if row["gain_low"] is not None]
        products = {
            row["block"]: math.log(row["gain_low"] * row["displacement_ratio"])
            for row in rows
            if row["role"] == "point" and row["gain_low"] is not None and row["model"] == source.label
        }
        pairs = [
            math.log(row["gain_low"] * row["displacement_ratio"]) - products[row["block"]]
            for row in known
            if row["block"] in products
        ]
        residuals = [row["residual"] for row in known if row["residual"] is not None]
        alone = "no block has a gain_low both here and in a run of the same model at the common beta"
        found.append(
            {
                "run": source.run,
                "model": source.label,
                "beta": source.beta,
                "n_points": len(known),
                "n_null": len(mine) - len(known),
                **given("shift", float(np.mean(residuals)) if residuals else None, "no residual to average"),
                **given("paired_shift", float(np.mean(pairs)) if pairs else None, alone),
                **given("paired_largest", max(map(abs, pairs)) if pairs else None, alone),
            }
        )
    return {
        "description": (
            "runs at another beta, in no fit: a uniform gain is a rescaled nudge, so they fall on the line "
            "by a theorem; shift is the mean of log(gain_low / law), paired_shift and paired_largest compare "
            "log(gain_low * ratio) with the same block at the common beta"
        ),
        "runs": found,
    }


def _fails(
    summary: dict[str, Any], points: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[str]:
    """Sentences about where the law does not hold, or cannot be seen to."""
    found = []
    if _excludes(summary):
        found.append(f"the slope's interval, {_span(summary)}, excludes the predicted −1")
    elif summary["slope_low"] is None:
        found.append(f"the slope has no interval: {summary['slope_low_reason']}")
    found += [
        f"{model['model']} alone: the interval of its slope over {model['n_points']} blocks, "
        f"{_span(model)}, excludes −1"
        for model in summary["per_model"]
        if _excludes(model)
    ]
    limit = max(2 * (summary["residual_sd"] or 0.0), ROUNDING)
    for role, kind in (("point", "blocks"), ("control", "control blocks")):
        mine = [row for row in rows if row["role"] == role and row["residual"] is not None]
        far = [row for row in mine if abs(row["residual"]) > limit]
        if far:
            shown = ", ".join(f"{row['model']} block {row['block']} ({row['residual']:+.2f})" for row in far)
            found.append(
                f"{len(far)} of {len(mine)} {kind} lie more than 2 standard deviations ({limit:.2f} in "
                f"log gain_low) off the law, where a normal scatter has {0.0455 * len(mine):.1f}: {shown}"
            )
    sure = [row for row in points if row["gain_low_low"] is not None and row["gain_low_high"] is not None]
    off = [row for row in sure if not _holds_prediction(row)]
    # More than chance: above the 97.5 % quantile of intervals that each miss with 5 %.
    if len(off) > stats.binom.ppf(0.975, len(sure), 0.05):
        found.append(
            f"{len(off)} of {len(sure)} blocks have a 95 % interval of gain_low that excludes the "
            "law's value: blocks differ by more than the noise of the measurement"
        )
    missing = [row for row in points if row["gain_low"] is None]
    if missing:
        reasons: dict[str, list[str]] = {}
        for row in missing:
            reasons.setdefault(row["gain_low_reason"], []).append(f"{row['model']} block {row['block']}")
        shown = "; ".join(f"{reason}: {', '.join(places)}" for reason, places in reasons.items())
        found.append(f"{len(missing)} of {len(points)} blocks have no gain_low and are in no fit ({shown})")
    return found


def _excludes(found: dict[str, Any]) -> bool:
    low, high = found["slope_low"], found["slope_high"]
    return low is not None and (low > PREDICTION + ROUNDING or high < PREDICTION - ROUNDING)


def _holds_prediction(row: dict[str, Any]) -> bool:
    slack = 1 + ROUNDING
    return row["gain_low_low"] / slack <= row["predicted"] <= row["gain_low_high"] * slack


def _span(found: dict[str, Any]) -> str:
    return f"{found['slope']:.3f} [{found['slope_low']:.3f}, {found['slope_high']:.3f}]"


def _claims(summary: dict[str, Any]) -> list[dict[str, str]]:
    if summary["slope_low"] is None or summary["constant_low"] is None:
        return []
    return [
        claim(
            f"over {summary['n_points']} blocks of {summary['n_models']} models at beta {summary['beta']:g}, "
            f"log gain_low falls with log displacement ratio at a slope of {_span(summary)} (predicted −1), "
            f"and gain_low times ratio is {summary['constant']:.2f} [{summary['constant_low']:.2f}, "
            f"{summary['constant_high']:.2f}] unit roundoffs",
            "measured",
            f"the slope and the constant for these models with the {summary['read']} read in "
            f"{summary['study']} at a band of {summary['band']:g}",
            "other formats, bands, texts or families of models; blocks without a gain_low "
            f"({summary['n_null']} here)",
        )
    ]
