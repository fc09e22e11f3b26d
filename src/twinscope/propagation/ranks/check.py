"""The check of several ranks against one: the same global batch must give the same gradient.

Covers one arm on one batch in one precision, and what difference rounding can make. Which batches, and the
record, are in run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder
from twinscope.propagation.gradients import Gradient, parameter_names
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.settings import EPSettings

#: Largest relative difference of a block's gradient that another order of summation may make. A wrong weight
#: of one text in a thousand makes 1e-3. In amp each rank rounds its weight gradients to bf16 (2⁻⁹).
TOLERANCE: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5, "amp": 1e-2}
#: Roundings of a state, in units of its last place, that an energy read divides by the displacement.
_ENERGY_ULPS = 8.0

#: The gradient of the batch at hand, over ranks or by one alone.
Estimate = Callable[[Ranks | None], Gradient]


@dataclass(frozen=True)
class Comparison:
    """Several ranks against one; differences are relative to the one, per block and for the rest."""

    blocks: list[float]
    outer: float | None  # embedding and readout together; None where they have no parameter
    loss: float  # nats per token
    beta: float | None  # relative; None where none was set
    tolerance: float
    seconds: tuple[float, float]  # of one alone, of all together
    nbytes: int  # of the gradient that is summed

    @property
    def worst(self) -> float:
        return max(self.blocks if self.outer is None else [*self.blocks, self.outer])

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance and self.loss <= self.tolerance


def tolerance(precision: str, settings: EPSettings | None, displacement: list[float]) -> float:
    """What another order of summation may change of a block's gradient, relative to its norm.

    The energy read takes its response from the difference of two states, so their rounding counts by the
    smallest ``displacement`` ratio of a block.
    """
    allowed = TOLERANCE[precision]
    if settings is not None and settings.read == "energy" and displacement and min(displacement) > 0:
        dtype = torch.float64 if precision == "fp64" else torch.float32
        allowed += _ENERGY_ULPS * torch.finfo(dtype).eps / min(displacement)
    return allowed


def compare(
    model: Decoder, estimate: Estimate, ranks: Ranks, precision: str, settings: EPSettings | None
) -> tuple[Gradient, Comparison | None]:
    """The gradient over ``ranks``, and on rank 0 its comparison with that of rank 0 alone.

    ``settings`` are those of an EP arm, None for backpropagation. Gradients are on the model's device.

    Raises:
        ConfigError: the whole batch does not fit on one rank.
        RankLost: another rank is gone.
    """
    began = time.perf_counter()
    alone = ranks.together(lambda: _alone(estimate) if ranks.leads else None)
    met = time.perf_counter()
    found = estimate(ranks)
    seconds = (met - began, time.perf_counter() - met)
    if alone is None:
        return found, None
    names = parameter_names(model)
    outer = [name for name, _ in names.outer]
    beta, reference = found.diagnostics.beta, alone.diagnostics.beta
    return found, Comparison(
        blocks=[_difference(found, alone, [name for name, _ in group]) for group in names.blocks],
        outer=_difference(found, alone, outer) if outer else None,
        loss=abs(found.loss - alone.loss),
        beta=abs(beta - reference) / reference if beta is not None and reference else None,
        tolerance=tolerance(precision, settings, alone.diagnostics.displacement_ratio),
        seconds=seconds,
        nbytes=sum(grad.nbytes for grad in found.grads.values()),
    )


def _alone(estimate: Estimate) -> Gradient:
    try:
        return estimate(None)
    except torch.OutOfMemoryError:
        raise ConfigError(
            "one rank alone cannot hold the whole batch, which this check needs: lower data.batch for it"
        ) from None


def _difference(found: Gradient, reference: Gradient, names: list[str]) -> float:
    """``‖found − reference‖ / ‖reference‖`` over the named parameters, in float64."""
    if not names:
        return 0.0
    off = sum(_square(found.grads[name].double() - reference.grads[name].double()) for name in names)
    size = sum(_square(reference.grads[name].double()) for name in names)
    return (off / size) ** 0.5 if size > 0 else off**0.5


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
