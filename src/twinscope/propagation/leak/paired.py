"""One estimator against the reference gradient on the same batch, block by block.

Covers a block's gradient vector under backpropagation and under one nudged arm, and the products of their
difference. Which arms, over which batches, is in leak.py.

Legend, per block: B the reference, G the arm, D = G - B, all (P_l,); products are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinscope.lab.errors import RunFailed
from twinscope.models.decoder import Decoder
from twinscope.propagation.estimators import bp_gradient
from twinscope.propagation.gradients import GradientSum, ParameterNames
from twinscope.propagation.leak.block_vectors import flatten, gram
from twinscope.propagation.nudged import Start, displacement_factors, nudged_phase, unit_ratios
from twinscope.propagation.phases import Displace, displaced
from twinscope.propagation.settings import EPSettings

#: Tokens and targets of one batch, each (B, T) int64.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Products:
    """Per block: ⟨D,B⟩, ‖D‖² and ‖G‖² of one arm on one batch."""

    db: list[float]
    dd: list[float]
    gg: list[float]


def reference_vectors(
    model: Decoder, names: ParameterNames, batch: Batch, precision: str
) -> tuple[float, list[Tensor]]:
    """Loss (nats per token) and the backpropagation gradient of each block, (P_l,)."""
    found = bp_gradient(model, *batch, precision=precision)
    return found.loss, [flatten(found.grads.get, group) for group in names.blocks]


def arm_vectors(
    start: Start,
    settings: EPSettings,
    gain: Sequence[float],
    sign: int,
    beta: float,
    displace: Displace = displaced,
) -> list[Tensor]:
    """The EP gradient of each block, (P_l,), at one gain per block; ``start`` serves further arms."""
    sums = GradientSum(start.problem.model)
    factors = displacement_factors(start, gain, sign, beta)
    nudged_phase(
        start, settings, factors, sums, diagnose=False, keep_start=True, outer=False, displace=displace
    )
    return [flatten(sums.found, group) for group in start.names.blocks]


def compare(found: Sequence[Tensor], reference: Sequence[Tensor]) -> Products:
    """Products of one arm's vectors with the reference; leaves ``found`` holding the differences D.

    Raises:
        RunFailed: a gradient is not finite.
    """
    gg, db, dd = [], [], []
    for block, (vector, base) in enumerate(zip(found, reference, strict=True), 1):
        gg.append(float(gram([vector], [vector])[0, 0]))
        vector -= base
        products = gram([base, vector], [vector])[:, 0]
        db.append(float(products[0]))
        dd.append(float(products[1]))
        if not math.isfinite(gg[-1] + db[-1] + dd[-1]):
            raise RunFailed(
                f"the gradient of block {block} is not finite: lower displacement (or beta), or the gains"
            )
    return Products(db, dd, gg)


def safe_displacement(precision: str) -> float:
    """The displacement ratio farthest from both mechanisms: the unit roundoff of the format to the power 3/4.

    There a displacement is about eps^(-1/4) units in the last place, and curvature is of that small order.
    """
    return torch.finfo(torch.float64 if precision == "fp64" else torch.float32).eps ** 0.75


def beta_for(start: Start, displacement: float) -> float:
    """The beta at which the largest RMS(d_l) / RMS(z_l) of ``start`` equals ``displacement`` at gain 1.

    Raises:
        RunFailed: there is no force, or it is not finite.
    """
    largest = max(unit_ratios(start))
    if not (math.isfinite(largest) and largest > 0):
        raise RunFailed("the first force sweep is zero or not finite on the first batch: check the model")
    return displacement / largest
