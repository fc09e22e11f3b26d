"""The operating window of a block (the gains whose projection lies in the band), and what to train with.

A function of the projections alone; no model is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tomli_w
from scipy import stats

from twinscope.propagation.settings import EPSettings

LEVEL = 0.95


@dataclass(frozen=True)
class Edge:
    """One edge of a window with its interval; what is None has its reason."""

    value: float | None
    reason: str = ""
    low: float | None = None
    high: float | None = None
    interval_reason: str = ""


@dataclass(frozen=True)
class Window:
    """``lower``: the gain above which absorption is inside the band; ``upper``: above which curvature is not.

    ``held`` are the smallest and largest gain of the grid inside, None where none is.
    """

    lower: Edge
    upper: Edge
    held: tuple[float, float] | None


def edges(gains: Sequence[float], projections: Sequence[float], band: float) -> tuple[Edge, Edge, Any]:
    """Lower edge, upper edge and the grid's gains inside, without intervals; ``gains`` ascend.

    The window is the longest run of neighbouring gains with |projection| ≤ band (of two equally long
    ones the lower). Its edges lie where the projection crosses ±band between the run's end and the gain
    outside next to it, by linear interpolation over log gain. An edge does not exist where no gain is
    inside, or where the run reaches the end of the grid.
    """
    inside = [abs(p) <= band for p in projections]
    runs: list[tuple[int, int]] = []
    for index, within in enumerate(inside):
        if within and index and inside[index - 1]:
            runs[-1] = (runs[-1][0], index)
        elif within:
            runs.append((index, index))
    if not runs:
        nearest = min(zip(projections, gains, strict=True), key=lambda pair: abs(pair[0]))
        reason = f"no gain is inside the band (nearest: {nearest[0]:.3g} at gain {nearest[1]:g})"
        return Edge(None, reason), Edge(None, reason), None
    first, last = max(runs, key=lambda run: (run[1] - run[0], -run[0]))
    lower = (
        Edge(None, f"inside the band at the smallest gain ({gains[0]:g})")
        if first == 0
        else Edge(_crossing(gains, projections, band, first - 1, first))
    )
    upper = (
        Edge(None, f"inside the band at the largest gain ({gains[-1]:g})")
        if last == len(gains) - 1
        else Edge(_crossing(gains, projections, band, last + 1, last))
    )
    return lower, upper, (gains[first], gains[last])


def operating_window(
    gains: Sequence[float], numerators: np.ndarray, denominators: np.ndarray, band: float
) -> Window:
    """The window of one block with jackknife intervals over batches.

    ``numerators`` (gains, batches) are ⟨D_b,B_b⟩, ``denominators`` (batches,) ‖B_b‖². Both edges are
    recomputed without each batch; variance (n-1)/n Σ (log g_(i) - mean)² with t_{n-1}, on the log of
    the gain. No interval where the edge does not exist without some batch.
    """
    total = denominators.sum()
    if not total > 0:
        none = Edge(None, "the reference gradient is zero")
        return Window(none, none, None)
    lower, upper, held = edges(gains, (numerators.sum(axis=1) / total).tolist(), band)
    count = len(denominators)
    deleted = [
        edges(gains, ((numerators.sum(axis=1) - numerators[:, i]) / rest).tolist(), band)
        for i in range(count)
        if (rest := total - denominators[i]) > 0
    ]
    return Window(
        _with_interval(lower, [found[0] for found in deleted], count),
        _with_interval(upper, [found[1] for found in deleted], count),
        held,
    )


def recommend(
    gains: Sequence[float],
    windows: Sequence[Window],
    displacement_ratio: Sequence[float],
    settings: EPSettings,
) -> tuple[dict[str, Any] | None, str]:
    """What ``train`` should use: displacement, gain per block and a config fragment, or None and the reason.

    A uniform gain where all windows overlap, written as a displacement at gain 1, which is the same
    thing; else the profile ``top`` where the windows of each half do. The gain chosen is the geometric
    middle of the overlap; where an edge is not known, the end of the grid inside stands for it.
    """
    missing = [str(index) for index, window in enumerate(windows, 1) if window.held is None]
    if missing:
        return None, f"no gain measured lies in the band for block {', '.join(missing)}"
    layers = len(windows)
    middle = layers // 2
    everywhere = _overlap(windows)
    if everywhere is not None:
        gain = [everywhere] * layers
        profile: dict[str, Any] = {"profile": "uniform", "value": 1.0}
    else:
        halves = [_overlap(half) if half else None for half in (windows[:middle], windows[middle:])]
        if halves[0] is None or halves[1] is None:
            return None, "the blocks' windows have no gain in common, not even within each half of the stack"
        gain = [halves[0]] * middle + [halves[1]] * (layers - middle)
        profile = {"profile": "top", "value": halves[1] / halves[0], "base": 1.0}
    displacement = max(g * ratio for g, ratio in zip(gain, displacement_ratio, strict=True))
    if not 0 < displacement < 1:
        return None, f"the displacement {displacement:.3g} that it asks for is outside what train takes"
    estimator = {
        "displacement": displacement,
        "rounds": settings.rounds,
        "fused": settings.fused,
        "read": settings.read,
        "damping": settings.damping,
        "top_refresh": settings.top_refresh,
        "gain": profile,
    }
    fragment = tomli_w.dumps({"ep": estimator})
    return {"displacement": displacement, "gain": gain, "config_fragment": fragment}, ""


def _overlap(windows: Sequence[Window]) -> float | None:
    lows, highs = [], []
    for window in windows:
        assert window.held is not None
        lows.append(window.lower.value or window.held[0])
        highs.append(window.upper.value or window.held[1])
    low, high = max(lows), min(highs)
    return math.sqrt(low * high) if low <= high else None


def _crossing(
    gains: Sequence[float], projections: Sequence[float], band: float, outside: int, inside: int
) -> float:
    far, near = projections[outside], projections[inside]
    share = (math.copysign(band, far) - far) / (near - far)
    logs = math.log(gains[outside]), math.log(gains[inside])
    return math.exp(logs[0] + share * (logs[1] - logs[0]))


def _with_interval(edge: Edge, deleted: Sequence[Edge], count: int) -> Edge:
    if edge.value is None:
        return Edge(None, edge.reason, interval_reason=edge.reason)
    values = [found.value for found in deleted if found.value is not None]
    if len(values) < count or count < 2:
        return Edge(edge.value, interval_reason="the edge does not exist without some batch")
    logs = np.log(values)
    half = stats.t.ppf((1 + LEVEL) / 2, count - 1) * math.sqrt(
        (count - 1) / count * np.sum((logs - logs.mean()) ** 2)
    )
    middle = math.log(edge.value)
    return Edge(edge.value, low=math.exp(middle - half), high=math.exp(middle + half))
