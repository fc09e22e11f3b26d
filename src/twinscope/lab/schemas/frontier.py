"""The part of a ``cost`` record that sets cost beside fidelity."""

from __future__ import annotations

from typing import Literal

from twinscope.lab.schemas.parts import Measured, Strict, Text


class FrontierReference(Strict):
    """A cost and a fidelity known from elsewhere, with the conditions they hold under."""

    name: Text
    cost_ratio: float
    median_cosine: float
    conditions: Text
    source: Text


class FrontierShown(Strict):
    """One point of a frontier; ``target`` is the displacement it was measured at."""

    start: Text
    label: Text
    target: Measured
    analytic_ratio: float
    counted_ratio: Measured
    measured_ratio: Measured
    measured_low: Measured
    measured_high: Measured
    median_cosine: Measured
    worst_cosine: Measured
    displacement: Measured
    residual: Measured


class FrontierSummary(Strict):
    """By start and displacement: the points that none betters, and the cheapest with a cosine of ``enough``.

    ``beyond_reference`` holds, by the reference's name, points of a frontier at most as dear and at least as
    near to backpropagation; the reference's conditions are not those of the points.
    """

    points: int
    valid: int
    enough: float
    frontier: list[FrontierShown]
    cheapest: list[FrontierShown]
    control: list[FrontierShown]
    references: list[FrontierReference]
    beyond_reference: dict[str, list[FrontierShown]]


class FrontierCount(Strict):
    """FLOPs of one step of every setting, and of ``bp``, as the dispatcher counts them."""

    key: Text
    shape: Text
    kind: Literal["frontier_count"]
    flops: dict[str, int]


class _Settings(Strict):
    key: Text
    shape: Text
    label: Text
    rounds: int
    fused: bool
    nudge: Literal["positive", "negative", "random", "symmetric"]
    read: Literal["linear", "energy"]
    damping: float
    top_refresh: int
    analytic_ratio: float
    counted_ratio: Measured
    measured_ratio: Measured
    measured_low: Measured
    measured_high: Measured
    windows_agree: bool | None
    controlled: bool | None


class FrontierCost(_Settings):
    """One step over one of backpropagation; ``step_seconds`` of ``ep`` and ``bp``, window by window.

    ``causal_ratio`` counts masked pairs of attention as free, ``shorthand_ratio`` is (1 + 2K + 2) / 3.
    """

    kind: Literal["frontier_cost"]
    causal_ratio: float
    shorthand_ratio: float
    step_seconds: dict[str, list[float]] | None
    disturbances: list[Text]


class FrontierPoint(_Settings):
    """Fidelity of one setting at one displacement and start, beside its cost.

    ``displacement`` is the largest block's, mean over batches, ``displacement_low`` the smallest over
    batches, ``residual`` the largest. Cosines are medians and minima over blocks, averaged over batches,
    with Student's interval. ``invalid`` says why they are none of equilibrium propagation.
    """

    kind: Literal["frontier"]
    start: Text
    target: Measured
    batches: int
    block_cosine: list[Measured]
    median_cosine: Measured
    median_low: Measured
    median_high: Measured
    worst_cosine: Measured
    worst_low: Measured
    worst_high: Measured
    outer_cosine: Measured
    displacement: Measured
    displacement_low: Measured
    residual: Measured
    beta: Measured
    valid: bool
    invalid: list[Text]
