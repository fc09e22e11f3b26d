"""Whether a match holds on other tokens: the held-out R² of ``a_n ≈ c a_m`` with c from calibration alone.

Covers fitting the scale of pairs, the R² it reaches on tokens that had no part in it, and the floor. A pair
is taken in one direction, ``n`` by ``m`` on the input of n's layer; the other direction is the same call with
the two exchanged, on the input of m's layer, where c is fitted anew.

Shapes: N tokens, C channels, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from twinscope.reuse.neurons.activations import BLOCK, GatedLayer, evaluate

#: The least R² at which two neurons count as the same function: on calibration and on held-out tokens.
R2_FLOOR = 0.5


@dataclass(frozen=True)
class Moments:
    """Σ a_n², Σ a_m², Σ a_n a_m and Σ (a_n a_m)² over tokens of P pairs, ``(P,)`` float64 on the CPU.

    Those of parts of the tokens add up to those of all.
    """

    own: Tensor
    other: Tensor
    both: Tensor
    both_squared: Tensor

    def __add__(self, more: Moments) -> Moments:
        return Moments(*(getattr(self, part.name) + getattr(more, part.name) for part in fields(self)))

    @property
    def correlation(self) -> Tensor:
        """⟨a_n, a_m⟩/(‖a_n‖ ‖a_m‖), signed and uncentred; 0 where one of the two is silent."""
        norms = (self.own * self.other).sqrt()
        return torch.where(norms > 0, self.both / norms, 0.0).clamp(-1.0, 1.0)

    @property
    def scale(self) -> Tensor:
        """The c of least ``‖a_n − c a_m‖``, ⟨a_n, a_m⟩/⟨a_m, a_m⟩; 0 where a_m is silent."""
        return torch.where(self.other > 0, self.both / self.other, 0.0)

    @property
    def effective_tokens(self) -> Tensor:
        """How many tokens the correlation rests on, (Σ p)²/Σ p² of the products p = a_n a_m; 0 without any.

        N where every token adds the same, 1 where a single one, such as the first of a text, decides.
        """
        return torch.where(self.both_squared > 0, self.both.square() / self.both_squared, 0.0)

    def r2(self, scale: Tensor) -> Tensor:
        """1 − Σ (a_n − c a_m)²/Σ a_n² for given c ``(P,)``: at most 1, below 0 where zero does better.

        NaN where a_n is silent on these tokens, so that there is nothing to explain.
        """
        scale = scale.double().cpu()
        left = self.own - 2.0 * scale * self.both + scale.square() * self.other
        return torch.where(self.own > 0, 1.0 - left.clamp(min=0.0) / self.own, torch.nan)


def moments(
    x: Tensor,
    recipient: GatedLayer,
    neurons: Sequence[int] | Tensor,
    donor: GatedLayer,
    partners: Sequence[int] | Tensor,
) -> Moments:
    """The moments of pairs ``neurons[p]`` of the recipient and ``partners[p]`` of the donor on x ``(N, C)``.

    ``x`` is the recipient's normalised input. Activations are float32, their products and sums float64.

    Raises:
        ValueError: lists of unequal length, or a neuron that a layer does not have.
        DataError: the weights cannot be read.
    """
    own_numbers, other_numbers = torch.as_tensor(neurons).flatten(), torch.as_tensor(partners).flatten()
    if len(own_numbers) != len(other_numbers):
        raise ValueError(f"{len(own_numbers)} neurons and {len(other_numbers)} partners are no pairs")
    parts = [torch.empty(4, 0, dtype=torch.float64)]
    for mine, theirs in zip(own_numbers.split(BLOCK), other_numbers.split(BLOCK), strict=True):
        if not len(mine):
            continue
        a, b = evaluate(x, recipient, mine), evaluate(x, donor, theirs)
        sums = torch.zeros(4, len(mine), dtype=torch.float64, device=x.device)
        for left, right in zip(a.split(4096), b.split(4096), strict=True):
            left, right = left.double(), right.double()
            both = left * right
            products = (left.square(), right.square(), both, both.square())
            sums += torch.stack([product.sum(dim=0) for product in products])
        parts.append(sums.cpu())
    return Moments(*torch.cat(parts, dim=1))
