"""Displacement gain per block: profiles only; what a gain does to the states is in phases.py."""

from __future__ import annotations

import math

from twinscope.lab.draws import generator
from twinscope.propagation.settings import GainSettings


def gains(settings: GainSettings, layers: int, seed: int = 0, step: int = 0) -> list[float]:
    """The gain ``g_l`` of blocks ``1 … layers``, in this order (METHOD 1.3).

    ``uniform(value)`` · ``top(value, base)``: ``base * value`` above the middle, else ``base`` ·
    ``geometric(ratio, cap)``: ``min(ratio ** (l - 1), cap)``, the same for any number of blocks ·
    ``random(max, base)``: as ``top`` with the value drawn log-uniformly from [1, max] for this step,
    a function of ``(seed, step)`` alone.
    """
    value, base = settings.value or 1.0, settings.base or 1.0
    if settings.profile == "uniform":
        return [value] * layers
    if settings.profile == "geometric":
        ratio, cap = settings.ratio or 2.0, settings.cap or math.inf
        return [min(ratio**exponent, cap) for exponent in range(layers)]
    if settings.profile == "random":
        value = math.exp(generator(seed, "gain", step).uniform(0.0, math.log(settings.max or 2.0)))
    lower = layers // 2
    return [base] * lower + [base * value] * (layers - lower)
