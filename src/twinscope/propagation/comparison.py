"""From the journal of a twin run to its summary: paired differences, gates, and the yardsticks beside them.

A pure function of the rows; no model is touched. Losses are nats per token on the same held-out batches
for every arm. Intervals are over held-out batches, within a seed or over the mean of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, stdev
from typing import Any

import numpy as np

from twinscope.lab.evidence import claim
from twinscope.lab.statistics import Interval, mean_interval
from twinscope.propagation.config import TrainConfig

Row = dict[str, Any]


def summarize(
    config: TrainConfig, rows: Sequence[Row], bytes_per_token: float | None, baselines: dict[str, float]
) -> dict[str, Any]:
    """The summary of a complete run (see ``TrainSummary`` in lab/schemas/train.py)."""
    evals = [row for row in rows if row["kind"] == "eval"]
    reference = reference_arm(config)
    others = [arm.name for arm in config.arms if arm.name != reference]
    return {
        "arms": {arm.name: _arm(config, arm.name, arm.rule, evals, bytes_per_token) for arm in config.arms},
        "difference": {
            name: {"windows": _windows(config, evals, name, reference)} for name in others if reference
        },
        "gate": _gates(config, [row for row in rows if row["kind"] == "gate"]),
        "baselines": baselines,
        "seed_scatter": _scatter(config, evals, reference),
    }


def reference_arm(config: TrainConfig) -> str | None:
    """The arm that differences are taken against: the first that backpropagates, if any does."""
    return next((arm.name for arm in config.arms if arm.rule == "bp"), None)


def claims(config: TrainConfig, summary: dict[str, Any]) -> list[dict[str, str]]:
    """What the run shows, arm by arm, and what it leaves open."""
    found = []
    for arm in config.arms:
        windows = summary["difference"].get(arm.name, {}).get("windows", [])
        if arm.rule != "ep" or not windows or windows[-1]["mean"] is None:
            continue
        last, seeds = windows[-1], len(config.train.seeds)
        gate = summary["gate"]["per_arm"].get(arm.name)
        fidelity = ""
        if gate and gate["median_cosine"] is not None:
            fidelity = (
                f"; the median block cosine to BP is {gate['median_cosine']:.4f} at displacement "
                f"{gate['displacement']:.1e} and residual {gate['residual']:.1e}"
            )
        found.append(
            claim(
                f"after {config.train.steps} steps, arm '{arm.name}' differs from backpropagation by "
                f"{last['mean']:+.4f} nats per token on held-out text, mean over steps {last['start']} to "
                f"{last['end']} and {seeds} {'seed' if seeds == 1 else 'seeds'}{fidelity}",
                "measured",
                "that this model, on this text and with these settings, trains so under both rules",
                "other models, sizes, texts or longer training; nor an interval over seeds, since the one "
                "shown is over held-out batches with the seeds as they are",
            )
        )
    return found


def _arm(
    config: TrainConfig, name: str, rule: str, evals: Sequence[Row], bytes_per_token: float | None
) -> dict[str, Any]:
    last = [
        row
        for seed in config.train.seeds
        for row in evals
        if (row["seed"], row["arm"], row["step"]) == (seed, name, config.train.steps)
    ]
    per_seed = [
        {
            "seed": row["seed"],
            **_losses(row["val_loss"], bytes_per_token),
            "skipped_steps": row["skipped_steps"],
        }
        for row in last
    ]
    values = [row["val_loss"] for row in last]
    return {
        "rule": rule,
        **_losses(None if None in values else float(np.mean(values)), bytes_per_token),
        "steps": config.train.steps,
        "skipped_steps": sum(row["skipped_steps"] for row in last),
        "per_seed": per_seed,
    }


def _losses(loss: float | None, bytes_per_token: float | None) -> dict[str, Any]:
    if loss is None:
        reason = "the held-out loss is not finite"
        return _null("val_loss", reason) | _null("val_bits_per_byte", reason)
    if bytes_per_token is None:
        return {"val_loss": loss} | _null(
            "val_bits_per_byte", "the data does not say how many bytes a token has"
        )
    return {"val_loss": loss, "val_bits_per_byte": loss / math.log(2) / bytes_per_token}


def _windows(config: TrainConfig, evals: Sequence[Row], name: str, reference: str) -> list[dict[str, Any]]:
    by_point = {(row["seed"], row["step"], row["arm"]): row["val_losses"] for row in evals}
    # Step 0 precedes training: all arms are the same model there.
    steps = sorted({row["step"] for row in evals if row["step"] > 0})
    windows = []
    for part in np.array_split(steps, min(config.train.windows, len(steps))):
        differences = []  # (seeds, points, batches)
        for seed in config.train.seeds:
            pairs = [(by_point[seed, int(s), name], by_point[seed, int(s), reference]) for s in part]
            differences.append([[_minus(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs])
        table = np.array(differences, dtype=float).mean(axis=1)  # (seeds, batches)
        window: dict[str, Any] = {"start": int(part[0]), "end": int(part[-1])}
        window |= _interval(table.mean(axis=0)) | {"n": table.shape[1]}
        window["per_seed"] = [
            {"seed": seed, **_interval(row)} for seed, row in zip(config.train.seeds, table, strict=True)
        ]
        windows.append(window)
    return windows


def _minus(a: float | None, b: float | None) -> float:
    return math.nan if a is None or b is None else a - b


def _interval(values: np.ndarray) -> dict[str, Any]:
    if not np.isfinite(values).all():
        reason = "a held-out loss in this window is not finite"
        return _null("mean", reason) | _null("low", reason) | _null("high", reason)
    if len(values) < 2:
        reason = "one held-out batch gives no interval"
        return {"mean": float(values[0])} | _null("low", reason) | _null("high", reason)
    found: Interval = mean_interval(values)
    return {"mean": found.estimate, "low": found.low, "high": found.high}


def _gates(config: TrainConfig, gates: Sequence[Row]) -> dict[str, Any]:
    arms = [arm.name for arm in config.arms if arm.rule == "ep"]
    per_arm = {name: _fidelity([row for row in gates if row["arm"] == name]) for name in arms}
    return _fidelity(gates) | {"per_arm": per_arm}


def _fidelity(gates: Sequence[Row]) -> dict[str, Any]:
    """Median and worst block cosine, smallest displacement (of the largest block), largest residual."""
    usable = [row for row in gates if None not in (*row["block_cosine"], row["residual"])]
    if not usable:
        reason = "no gate was measured" if not gates else "no gate had finite gradients"
        names = ("median_cosine", "worst_cosine", "displacement", "residual")
        return {key: value for name in names for key, value in _null(name, reason).items()}
    values = [cosine for row in usable for cosine in row["block_cosine"]]
    return {
        "median_cosine": median(values),
        "worst_cosine": min(values),
        "displacement": min(max(row["displacement_ratio"]) for row in usable),
        "residual": max(row["residual"] for row in usable),
    }


def _scatter(config: TrainConfig, evals: Sequence[Row], reference: str | None) -> dict[str, Any]:
    final = [
        row["val_loss"] for row in evals if row["arm"] == reference and row["step"] == config.train.steps
    ]
    n = len(config.train.seeds)
    if reference is None:
        reason = "no arm backpropagates"
    elif n < 2:
        reason = "one seed shows no scatter between seeds"
    elif None in final:
        reason = "a held-out loss is not finite"
    else:
        note = "two seeds give no interval over seeds" if n == 2 else "spread of final losses between seeds"
        return {"bp_final_sd": stdev(final), "n": n, "note": note}
    return _null("bp_final_sd", reason) | {"n": n, "note": reason}


def _null(name: str, reason: str) -> dict[str, Any]:
    return {name: None, f"{name}_reason": reason}
