"""Gates: is an EP gradient near the BP gradient here, and is amp allowed to train here.

A gate compares gradients on one batch at one set of weights. It changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.gradients import Gradient, parameter_names
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.settings import EPSettings

#: Largest drop of the median block cosine that amp may cost before training in amp is refused.
AMP_TOLERANCE = 0.005


@dataclass(frozen=True)
class Cosines:
    """Cosine to the reference gradient per block, and of the parameters outside the blocks."""

    blocks: list[float]  # blocks 1 … L
    outer: float | None  # embedding and readout together; None where they have no parameter


def cosines(model: Decoder, found: dict[str, Tensor], reference: dict[str, Tensor]) -> Cosines:
    """Cosine between two gradients, block by block, accumulated in float64."""
    names = parameter_names(model)

    def cosine(group: list[str]) -> float:
        dot = sum(float((found[n].double() * reference[n].double()).sum()) for n in group)
        norms = [sum(float(g[n].double().square().sum()) for n in group) for g in (found, reference)]
        return dot / (norms[0] * norms[1]) ** 0.5 if min(norms) > 0 else 0.0

    outer = [name for name, _ in names.outer]
    blocks = [cosine([name for name, _ in group]) for group in names.blocks]
    return Cosines(blocks, cosine(outer) if outer else None)


@dataclass(frozen=True)
class Gate:
    """Fidelity of one EP arm on one batch, with the states' displacement and the K = 0 control beside it."""

    cosines: Cosines
    control: Cosines
    gradient: Gradient


def fidelity_gate(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    settings: EPSettings,
    seed: int,
    step: int,
    ranks: Ranks | None = None,
) -> Gate:
    """Compare EP under ``settings`` and its K = 0 control with BP; batch (B, T) int64.

    The reference is BP in full precision, also where the arm runs in amp. With ``ranks``, each computes its
    texts of the batch, and all get the same gate.
    """
    reference = bp_gradient(model, tokens, targets, ranks=ranks).grads
    found = ep_gradient(model, tokens, targets, settings, seed, step, ranks=ranks)
    still = settings.model_copy(update={"rounds": 0, "read": "linear"})
    control = ep_gradient(model, tokens, targets, still, seed, step, ranks=ranks)
    return Gate(cosines(model, found.grads, reference), cosines(model, control.grads, reference), found)


def gate_values(gate: Gate) -> dict[str, Any]:
    """What a gate adds to a row of the journal; a number that is not finite is null, with its reason."""
    diagnostics = gate.gradient.diagnostics
    values = {
        "block_cosine": gate.cosines.blocks,
        "outer_cosine": gate.cosines.outer,
        "control_cosine": min(gate.control.blocks),
        "displacement_ratio": diagnostics.displacement_ratio,
        "residual": diagnostics.residual,
        "beta": diagnostics.beta,
    }
    row: dict[str, Any] = {}
    for name, value in values.items():
        row |= _finite_or_null(name, value)
    return row


@dataclass(frozen=True)
class AmpGate:
    """Median block cosine to BP in fp32: of EP in amp, and of EP in fp32."""

    amp: float
    full: float

    @property
    def passed(self) -> bool:
        return abs(self.amp - self.full) < AMP_TOLERANCE


def amp_gate(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    settings: EPSettings,
    seed: int,
    step: int,
    ranks: Ranks | None = None,
) -> AmpGate:
    """Measure what amp costs an EP gradient on this model and batch (METHOD 1.1)."""
    reference = bp_gradient(model, tokens, targets, ranks=ranks).grads
    medians = []
    for precision in ("amp", "fp32"):
        arm = settings.model_copy(update={"precision": precision})
        found = ep_gradient(model, tokens, targets, arm, seed, step, diagnose=False, ranks=ranks)
        medians.append(median(cosines(model, found.grads, reference).blocks))
    return AmpGate(*medians)


def require(gate: AmpGate, arm: str) -> None:
    """Raise ConfigError unless amp costs less than the tolerance."""
    if not gate.passed:
        raise ConfigError(
            f"arm '{arm}' may not train in amp: its median block cosine to BP is {gate.amp:.4f} in amp and "
            f"{gate.full:.4f} in fp32, which differ by more than {AMP_TOLERANCE}; set precision = 'fp32', "
            "or another displacement"
        )


def is_finite(gradient: Gradient) -> bool:
    """Whether the loss and every gradient are finite; one synchronisation for all parameters."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradient.grads.values()])
    return bool(torch.isfinite(norms).all()) and gradient.loss - gradient.loss == 0.0


def _finite_or_null(name: str, value: float | list[float] | None) -> dict[str, Any]:
    reason = "not finite on this batch" if value is not None else "this decoder has no such parameter"
    if isinstance(value, list):
        cleaned = [item if math.isfinite(item) else None for item in value]
        return {name: cleaned} | ({f"{name}_reason": reason} if None in cleaned else {})
    if value is not None and math.isfinite(value):
        return {name: value}
    return {name: None, f"{name}_reason": reason}
