"""From products per batch to the leak's rows and summary (METHOD 1.4); no model is touched.

Covers the statistics and the reasons where one does not exist. The operating window is in window.py.

Legend: A arms, n batches, L blocks, J groups; batch b belongs to group b mod J. Tables are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinscope.lab.statistics import Interval, Undefined, cross_fit_ratio, cross_fit_square, ratio_jackknife
from twinscope.propagation.leak.window import Edge, operating_window, recommend
from twinscope.propagation.settings import EPSettings


@dataclass(frozen=True)
class Arm:
    """One arm: a uniform gain and the sign of the nudge."""

    gain: float
    sign: int

    @property
    def label(self) -> str:
        return f"gain={self.gain!r} sign={self.sign:+d}"


@dataclass(frozen=True)
class Tables:
    """Every product that was measured."""

    arms: list[Arm]
    bb: np.ndarray  # (n, L)  ‖B_b‖²
    db: np.ndarray  # (A, n, L)  ⟨D_b,B_b⟩
    dd: np.ndarray  # (A, n, L)  ‖D_b‖²
    gg: np.ndarray  # (A, n, L)  ‖g_EP‖²
    base: np.ndarray  # (n, L, J)  ⟨B_b,B_k⟩ with the group means B_k
    cross: np.ndarray  # (A, n, L, J)  ⟨D_b,B_k⟩
    gram: Mapping[int, np.ndarray]  # arm -> (L, J, J)  ⟨D_j,D_k⟩ of its group means, where they fitted
    displacement: np.ndarray  # (n, L)  RMS(d_l) / RMS(z_l) at gain 1
    control: np.ndarray  # (n, L)  ⟨D_b,B_b⟩ of the control arm

    def arm(self, gain: float, sign: int) -> int:
        return next(i for i, arm in enumerate(self.arms) if (arm.gain, arm.sign) == (gain, sign))


def rows(tables: Tables, without_vectors: str) -> list[dict[str, Any]]:
    """One row per block and arm; ``without_vectors`` is the reason for the fields that need vectors."""
    found = []
    for block in range(tables.bb.shape[1]):
        base = _by_group(tables.base[:, block])
        for index, arm in enumerate(tables.arms):
            row: dict[str, Any] = {
                "key": f"block={block + 1} {arm.label}",
                "block": block + 1,
                "gain": arm.gain,
                "beta_sign": arm.sign,
            }
            row |= _interval("projection", ratio_jackknife(tables.db[index, :, block], tables.bb[:, block]))
            cross = _by_group(tables.cross[index, :, block])
            row |= _interval("mean_projection", cross_fit_ratio(cross, base))
            square = float(base.sum())
            row |= _given("proj_on_bp", float(cross.sum()) / square if square > 0 else None, _ZERO)
            row |= _with_vectors(tables.gram.get(index), block, base, without_vectors)
            row |= _cosine(tables, index, block)
            found.append(row)
    return found


def summary(tables: Tables, gains: Sequence[float], band: float, settings: EPSettings) -> dict[str, Any]:
    """Lists over blocks (displacement ratio, window, odd and even part), and what to train with."""
    blocks = tables.bb.shape[1]
    ascending = sorted(gains)
    order = [tables.arm(gain, 1) for gain in ascending]
    plus, minus = tables.arm(1.0, 1), tables.arm(1.0, -1)
    ratio = tables.displacement.mean(axis=0).tolist()
    result: dict[str, Any] = {"displacement_ratio": ratio}
    windows = [
        operating_window(ascending, tables.db[order, :, block], tables.bb[:, block], band)
        for block in range(blocks)
    ]
    result |= _edges("gain_low", [window.lower for window in windows])
    result |= _edges("gain_high", [window.upper for window in windows])
    for name, sign in (("odd", -1), ("even", 1)):
        parts = [
            ratio_jackknife(
                (tables.db[plus, :, block] + sign * tables.db[minus, :, block]) / 2, tables.bb[:, block]
            )
            for block in range(blocks)
        ]
        result |= intervals(name, parts)
    found, reason = recommend(ascending, windows, ratio, settings)
    return result | _given("recommended", found, reason)


def intervals(name: str, parts: Sequence[Interval | Undefined]) -> dict[str, Any]:
    """``name``, ``name_low`` and ``name_high``: lists over blocks, null where undefined, with the reasons."""
    result: dict[str, Any] = {}
    reasons = [(i, part.reason) for i, part in enumerate(parts, 1) if isinstance(part, Undefined)]
    for suffix, field in (("", "estimate"), ("_low", "low"), ("_high", "high")):
        result[name + suffix] = [getattr(part, field, None) for part in parts]
        if reasons:
            result[f"{name}{suffix}_reason"] = _joined(reasons)
    return result


_ZERO = "the reference gradient is zero"


def _by_group(table: np.ndarray) -> np.ndarray:
    """Means over the batches of each group of (n, J): the (J, J) table of ⟨X_j,B_k⟩."""
    groups = table.shape[1]
    return table.reshape(-1, groups, groups).mean(axis=0)


def _with_vectors(gram: np.ndarray | None, block: int, base: np.ndarray, without: str) -> dict[str, Any]:
    names = ("rel_leak", "half_split", "leak_squared", "leak_squared_low", "leak_squared_high")
    if gram is None:
        return {key: value for name in names for key, value in _given(name, None, without).items()}
    table = gram[block]
    groups = len(table)
    halves = np.where(np.arange(groups) % 2 == 0, 1.0, -1.0)
    # Rounding can leave the square of a vanishing mean a little below zero.
    whole, split = max(float(table.sum()), 0.0), max(float(halves @ table @ halves), 0.0)
    square = float(base.sum())
    row = _given("rel_leak", (whole / square) ** 0.5 if square > 0 else None, _ZERO)
    row |= _given("half_split", 2 * (split / whole) ** 0.5 if whole > 0 else None, "the mean leak is zero")
    return row | _interval("leak_squared", cross_fit_square(table, base))


def _cosine(tables: Tables, index: int, block: int) -> dict[str, Any]:
    norms = np.sqrt(tables.gg[index, :, block] * tables.bb[:, block])
    if not np.all(norms > 0):
        return _given("cosine", None, "one of the two gradients is zero on some batch")
    return {"cosine": float(np.mean((tables.db[index, :, block] + tables.bb[:, block]) / norms))}


def _interval(name: str, found: Interval | Undefined) -> dict[str, Any]:
    if isinstance(found, Undefined):
        parts = [_given(name + suffix, None, found.reason) for suffix in ("", "_low", "_high")]
        return parts[0] | parts[1] | parts[2]
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def _given(name: str, value: Any, reason: str) -> dict[str, Any]:
    return {name: None, f"{name}_reason": reason} if value is None else {name: value}


def _edges(name: str, found: Sequence[Edge]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for suffix, field, why in (
        ("", "value", "reason"),
        ("_low", "low", "interval_reason"),
        ("_high", "high", "interval_reason"),
    ):
        values = [getattr(edge, field) for edge in found]
        result[name + suffix] = values
        reasons = [(i, getattr(edge, why)) for i, edge in enumerate(found, 1) if values[i - 1] is None]
        if reasons:
            result[f"{name}{suffix}_reason"] = _joined(reasons)
    return result


def _joined(reasons: Sequence[tuple[int, str]]) -> str:
    """``"block 1, 2: this; block 3: that"``."""
    blocks: dict[str, list[str]] = {}
    for block, reason in reasons:
        blocks.setdefault(reason, []).append(str(block))
    return "; ".join(f"block {', '.join(numbers)}: {reason}" for reason, numbers in blocks.items())
