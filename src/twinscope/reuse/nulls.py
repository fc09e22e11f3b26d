"""What a substitute must beat before closeness says anything: the nulls that stand beside every pair.

Covers which nulls there are, how each is made, and which other modules are matched in depth. A null is a
substitute for the reference branch on the same inputs, so every measure is taken of it as of the pair:

- ``zero``: no update at all; its branch error is exactly 1.
- ``mean``: the reference's own mean update over calibration tokens, the same at every token.
- ``permuted``: the pair's substitute with its residual channels permuted at the output.
- ``other.<site>``: modules of the same kind that stand as far from the reference as the substitute does.
- ``self``: the reference module evaluated again; anything but exactly 0 is a fault of the instrument.

Permuting a module's *inner* units consistently gives the same function, so it is no null (planted.py
plants it as a case to be found).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from twinscope.lab.draws import generator

#: How many other modules stand beside a pair, where the model has them.
OTHERS = 2
#: Nulls whose distance a pair has to beat; ``self`` is a check of the instrument.
ZERO, MEAN, PERMUTED, OTHER, SELF = "zero", "mean", "permuted", "other", "self"


def zero_update(reference: Tensor) -> Tensor:
    """No update: zeros like the reference's ``(B, T, C)``."""
    return torch.zeros_like(reference)


def constant_update(mean: Tensor, reference: Tensor) -> Tensor:
    """The calibration mean ``(C,)`` at every token of ``(B, T, C)``."""
    return mean.to(reference).expand_as(reference).contiguous()


def permuted_update(substitute: Tensor, seed: int) -> Tensor:
    """``(…, C)`` with its channels moved by one permutation, the same at every token; a function of the seed.

    The permutation is one cycle through all channels, so that no channel stays where it is.
    """
    return substitute[..., channel_cycle(substitute.shape[-1], seed).to(substitute.device)]


def channel_cycle(channels: int, seed: int) -> Tensor:
    """A permutation ``(C,)`` int64 without a fixed point (for C > 1), drawn from the seed alone."""
    order = generator(seed, "null permutation").permutation(channels)
    cycle = torch.empty(channels, dtype=torch.int64)
    cycle[torch.from_numpy(order)] = torch.from_numpy(order).roll(1)
    return cycle


def matched_others(
    sites: Sequence[str], reference: str, substitute: str, seed: int, count: int = OTHERS
) -> list[str]:
    """Up to ``count`` other sites whose distance in depth from the reference is nearest the substitute's.

    ``sites`` are those of the substitute's kind, in order of depth (``lm.sites(kind)``). A site k takes part
    unless it is the reference, the substitute or in either one's own layer; it ranks by
    ``||k − i| − |j − i||`` for reference layer i and substitute layer j, and among equals by a draw from the
    seed and the two names. Empty where the model has no other module.
    """
    here, there = layer_of(reference), layer_of(substitute)
    free = [site for site in sites if layer_of(site) not in (here, there)]
    draws = generator(seed, f"null others {reference} {substitute}").permutation(len(free))
    distance = abs(there - here)
    ranked = sorted(
        zip(free, draws.tolist(), strict=True),
        key=lambda pair: (abs(abs(layer_of(pair[0]) - here) - distance), pair[1]),
    )
    return [site for site, _ in ranked[:count]]


def layer_of(site: str) -> int:
    """The layer number in the name of a site such as ``layers.7.mlp``.

    Raises:
        ValueError: the name has none.
    """
    found = re.match(r"layers\.(\d+)\.", site)
    if found is None:
        raise ValueError(f"'{site}' is no site of a layer")
    return int(found[1])
