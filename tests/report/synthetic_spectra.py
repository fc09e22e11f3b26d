"""Synthetic ``leak`` and ``collapse`` records with the shape and the numbers of real ones, from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conftest import _provenance
from twinscope.lab.draws import generator

UNIT = 2.0**-24
BAND = 0.02
LEAK_CONFIG = 'name = "absorption"\n\n[ep]\ndisplacement = 1e-8\nread = "energy"\n\n[leak]\nbatches = 16\n'
COLLAPSE_CONFIG = 'name = "five-widths"\n\n[collapse]\nwidths = [32, 48]\n'


def leak_record(
    blocks: int = 8,
    gains: Sequence[float] = tuple(2.0**k for k in range(0, 23, 2)),
    ratio: float = 4e-9,
    study: str = "fp32",
    seed: int = 0,
) -> dict[str, Any]:
    """Absorption below gain·ratio of about 1e-7, curvature above about 1e-2; block 1 never bends.

    The mean projection does not exist in block 2.
    """
    draws = generator(seed, "leak")
    ratios = [ratio * (2.2 if block == 0 else 1.25 - 0.2 * block / blocks) for block in range(blocks)]
    rows = []
    lost: list[list[float]] = []
    for block, part in enumerate(ratios):
        lost.append([])
        for gain, sign in [*((gain, 1) for gain in gains), (1.0, -1)]:
            bend = 0.0 if block == 0 else 0.5 * (gain * part / 0.05) ** 0.5 * (gain * part > 1e-3)
            value = -0.95 * math.exp(-gain * part / (0.33 * UNIT)) - bend - 1e-7
            half = 0.08 * abs(value) + 2e-4 * gain**-0.5
            if sign > 0:
                lost[block].append(value)
            rows.append(_leak_row(block + 1, gain, sign, value, half, float(draws.normal(0, half))))
    edges = [_edges(gains, values) for values in lost]
    low, high = [pair[0] for pair in edges], [pair[1] for pair in edges]
    at_one = [values[0] for values in lost]
    control = [float(value) for value in draws.normal(0, 2e-6, blocks)]
    return {
        "schema": "twinscope.leak/1",
        "status": "complete",
        "config": {"name": "absorption"},
        "provenance": _provenance([0]) | {"verb": "leak", "name": "absorption"},
        "summary": {
            "model": "20261130T151756Z-train-base, step 300, arm bp",
            "blocks": blocks,
            "parameters": [198272] * blocks,
            "beta": 3.2e-9,
            "displacement_ratio": ratios,
            **_list("gain_low", low, f"inside the band at the smallest gain ({gains[0]:g})"),
            **_list("gain_low_low", [v and v / 1.3 for v in low], "inside the band at the smallest gain (1)"),
            **_list(
                "gain_low_high", [v and v * 1.3 for v in low], "inside the band at the smallest gain (1)"
            ),
            **_list("gain_high", high, f"inside the band at the largest gain ({gains[-1]:g})"),
            **_list("gain_high_low", [v and v / 1.8 for v in high], "no edge without some batch"),
            **_list("gain_high_high", [v and v * 1.8 for v in high], "no edge without some batch"),
            "odd": [1e-9 * block for block in range(blocks)],
            "odd_low": [-2e-9] * blocks,
            "odd_high": [2e-8] * blocks,
            "even": at_one,
            "even_low": [value - 0.06 for value in at_one],
            "even_high": [value + 0.06 for value in at_one],
            "band": BAND,
            "batches": 16,
            "groups": 8,
            "instrument": "fp32",
            "study": study,
            "unit_roundoff": UNIT,
            "self_test": {
                "null": {"passed": True, "detail": "BP against BP: largest product 0, must be exactly 0"},
                "planted": {"passed": True, "detail": "thresholds 1 : 4: gain_low ratio 3.990 to 4.020"},
            },
            "control": {
                "description": "linear read, one round, gain 1, displacement 6.4e-06, on the same batches",
                "beta": 2.9e-7,
                "displacement": 6.4e-6,
                "projection": control,
                "projection_low": [value - 5e-6 for value in control],
                "projection_high": [value + 5e-6 for value in control],
            },
            "recommended": {
                "displacement": 4.4e-5,
                "gain": [5268.0] * blocks,
                "config_fragment": "[ep]\ndisplacement = 4.4e-05\n",
            },
            "memory": {
                "budget_mib": 1024.0,
                "group_means_mib": 48.4,
                "spilled": False,
                "arms_with_vectors": 13,
                "vectors_mib": 822.9,
            },
            "extended_from": [],
            "recomputed": [],
        },
        "rows": rows,
        "claims": [
            {
                "statement": "at gain 1 EP departs from backpropagation",
                "level": "measured",
                "supports": "this leak in each block",
                "does_not_support": "other models",
            }
        ],
    }


def _leak_row(block: int, gain: float, sign: int, value: float, half: float, noise: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": f"block={block} gain={gain} sign={sign}",
        "block": block,
        "gain": gain,
        "beta_sign": sign,
        "projection": value,
        "projection_low": value - half,
        "projection_high": value + half,
        "proj_on_bp": value,
        "rel_leak": abs(value) + 0.1,
        "leak_squared": value**2,
        "leak_squared_low": value**2 - 0.01,
        "leak_squared_high": value**2 + 0.01,
        "half_split": 0.4,
        "cosine": 1 - 0.1 * abs(value),
    }
    for key, number in (("", value + noise), ("_low", value - 3 * half), ("_high", value + 3 * half)):
        row[f"mean_projection{key}"] = None if block == 2 else number
        if block == 2:
            row[f"mean_projection{key}_reason"] = "the denominator is not clearly positive: 8e-05"
    return row


def _edges(gains: Sequence[float], values: Sequence[float]) -> tuple[float | None, float | None]:
    inside = [gain for gain, value in zip(gains, values, strict=True) if abs(value) <= BAND]
    low = None if not inside or inside[0] == gains[0] else inside[0] / 1.4
    return low, None if not inside or inside[-1] == gains[-1] else inside[-1] * 1.4


def _list(key: str, values: Sequence[float | None], reason: str) -> dict[str, Any]:
    missing = [str(block) for block, value in enumerate(values, 1) if value is None]
    explained = {f"{key}_reason": f"block {', '.join(missing)}: {reason}"} if missing else {}
    return {key: list(values), **explained}


def collapse_record(
    widths: Sequence[int] = (32, 48, 64, 96, 128), blocks: int = 12, slope: float = -0.97, seed: int = 0
) -> dict[str, Any]:
    """Points about the law with constant 1.6, one without a gain_low, and controls at ten times the β."""
    draws = generator(seed, "collapse")
    rows: list[dict[str, Any]] = []
    reason = "inside the band at the smallest gain (1)"
    for role, each in [("point", width) for width in widths] + [("control", widths[-1])]:
        for block in range(1, blocks + 1):
            ratio = 1e-8 * (40 / each) ** 0.8 * (1.6 - block / blocks) * (10 if role == "control" else 1)
            gain = 1.6 * UNIT / 1e-8 * (ratio / 1e-8) ** slope * float(np.exp(draws.normal(0, 0.15)))
            missing = role == "point" and each == widths[0] and block == blocks
            row: dict[str, Any] = {
                "key": f"{role} {each} {block}",
                "run": f"20261130T160000Z-leak-w{each}-{role}",
                "model": f"{blocks} blocks, width {each}",
                "width": each,
                "layers": blocks,
                "block": block,
                "beta": 1e-8 if role == "point" else 1e-7,
                "role": role,
                "displacement_ratio": ratio,
                "predicted": None,
            }
            for key, factor in (("gain_low", 1.0), ("gain_low_low", 1 / 1.25), ("gain_low_high", 1.25)):
                row |= {key: None, f"{key}_reason": reason} if missing else {key: gain * factor}
            rows.append(row)
    fitted = [row for row in rows if row["role"] == "point" and row["gain_low"] is not None]
    x = np.log([row["displacement_ratio"] for row in fitted])
    y = np.log([row["gain_low"] for row in fitted])
    found, intercept = np.polyfit(x, y, 1)
    level = float(np.mean(x + y))
    for row in rows:
        row["predicted"] = math.exp(level) / row["displacement_ratio"]
        row |= (
            {"residual": None, "residual_reason": reason}
            if row["gain_low"] is None
            else {"residual": math.log(row["gain_low"] / row["predicted"])}
        )
    constant = math.exp(level) / UNIT
    return {
        "schema": "twinscope.collapse/1",
        "status": "complete",
        "config": {"name": "five-widths"},
        "provenance": _provenance([0]) | {"verb": "collapse", "name": "five-widths"},
        "summary": {
            "prediction": -1.0,
            "slope": float(found),
            "slope_low": float(found) - 0.06,
            "slope_high": float(found) + 0.06,
            "slope_dof": 3.4,
            "intercept": float(intercept),
            "constant": constant,
            "constant_low": constant * 0.9,
            "constant_high": constant * 1.1,
            "n_points": len(fitted),
            "n_null": 1,
            "n_models": len(widths),
            "residual_sd": float(np.std(x + y, ddof=1)),
            "fit_residual_sd": float(np.std(y - found * x - intercept)),
            "r_squared": 0.9,
            "beta": 1e-8,
            "read": "energy",
            "rounds": 1,
            "instrument": "fp32",
            "study": "fp32",
            "band": BAND,
            "unit_roundoff": UNIT,
            "per_model": [
                {
                    "model": f"{blocks} blocks, width {width}",
                    "n_points": blocks,
                    "n_null": 0,
                    "slope": -0.9,
                    "slope_low": None,
                    "slope_low_reason": "too few blocks",
                    "slope_high": None,
                    "slope_high_reason": "too few blocks",
                    "constant": constant,
                }
                for width in widths
            ],
            "controls": {
                "description": "runs at another beta, in no fit",
                "runs": [
                    {
                        "run": rows[-1]["run"],
                        "model": rows[-1]["model"],
                        "beta": 1e-7,
                        "n_points": blocks,
                        "n_null": 0,
                        "shift": 0.05,
                        "paired_shift": 0.02,
                        "paired_largest": 0.3,
                    }
                ],
            },
            "fails": ["1 of 60 blocks have no gain_low and are in no fit"],
        },
        "rows": rows,
        "claims": [],
    }
