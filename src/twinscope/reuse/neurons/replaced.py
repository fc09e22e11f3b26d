"""What the loss does when neurons of a model are replaced by others times a scale, all of them at once.

A neuron ``n`` of layer r is replaced by ``c`` times neuron ``m`` of layer d in that ``c·a_m − a_n``, both on
what enters layer r, times ``down_r[:, n]`` joins what the MLP of layer r gives, before a post-norm. Layers
behind it go on from there, so the neurons of a later layer see a residual that is no longer the model's own.
Covers replacements, the scale of one, the controls beside a set of pairs, and the pass. Which pairs are the
best is in pairs.py, what the change of the loss means in findings.py.

Shapes: B texts, T positions, C channels, N = B·T tokens, k neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.reuse.neurons.activations import GatedLayer, columns_of, evaluate
from twinscope.reuse.neurons.confirm import moments

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

#: Tokens that go through the head at once.
HEAD_ROWS = 512
#: A neuron: its layer and its number there.
Neuron = tuple[int, int]
Layers = Mapping[int, GatedLayer]
#: The normalised input ``(N, C)`` of a layer, on some tokens.
Inputs = Callable[[int], Tensor]


@dataclass(frozen=True)
class Replacement:
    """``neuron`` becomes ``scale`` times ``by``; a scale of 0 is no neuron at all."""

    neuron: Neuron
    by: Neuron
    scale: float


@dataclass(frozen=True)
class Replaced:
    """Text by text: nats per predicted token ``nll (B,)``, and ``branch_error (B,)``, both float64.

    The branch error is ‖change of the update‖/‖update‖ over the MLPs in which something is replaced, pooled,
    each at the residual that enters it in this pass.
    """

    nll: Tensor
    branch_error: Tensor


@torch.no_grad()
def replaced(
    lm: StreamedLM, layers: Layers, replacements: Sequence[Replacement], z: Mapping[str, Tensor], ids: Tensor
) -> Replaced:
    """One pass over ids ``(B, T)`` with ``replacements``, from the first layer that has one.

    ``z`` holds, on the device of the model, the residual ``(B, T, C)`` that enters the MLP of that layer in
    the model as it is. Neurons replaced by themselves at a scale of 1 change no bit.

    Raises:
        ValueError: nothing is replaced, a neuron twice, or one that its layer does not have.
        DataError, BudgetExceeded: as for ``StreamedLM.hidden``.
    """
    if not replacements or len({item.neuron for item in replacements}) < len(replacements):
        raise ValueError("name neurons to replace, each of them once")
    sites = {layers[number].site: number for number in sorted({item.neuron[0] for item in replacements})}
    order = [site for site in lm.branches() if site in sites]
    here = z[order[0]]
    change, whole = (torch.zeros(len(ids), dtype=torch.float64) for _ in range(2))
    for site, following in zip(order, [*order[1:], "head"], strict=True):
        own = [item for item in replacements if item.neuron[0] == sites[site]]
        plain = lm.branch(site, here).update
        update = lm.branch(site, here, added=_contribution(lm, layers, own, site, here)).update
        change += _energy(update - plain)
        whole += _energy(plain)
        del plain
        here = lm.onward(here + update, site, following)
    return Replaced(losses(lm, here, ids), (change / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt())


def losses(lm: StreamedLM, z: Tensor, ids: Tensor) -> Tensor:
    """Nats per predicted token of each text ``(B,)`` float64, from the residual ``z (B, T, C)`` at the head.

    So many texts at a time as :data:`HEAD_ROWS` allows: each keeps a block of logits per thread.
    """
    step = max(1, HEAD_ROWS // ids.shape[1])
    parts = zip(z.split(step), ids.split(step), strict=True)
    return torch.cat([lm.nll_at(some, those).double().mean(dim=1).cpu() for some, those in parts])


def fitted(layers: Layers, replacements: Sequence[Replacement], inputs: Inputs) -> list[Replacement]:
    """The same with the scales that fit best on given inputs, 0 where the one that stands in is silent."""
    found: dict[Neuron, Replacement] = {}
    for recipient, donor, own in _by_layers(replacements):
        neurons, others = [item.neuron[1] for item in own], [item.by[1] for item in own]
        sums = moments(inputs(recipient), layers[recipient], neurons, layers[donor], others)
        for item, scale in zip(own, sums.scale.tolist(), strict=True):
            found[item.neuron] = replace(item, scale=scale)
    return [found[item.neuron] for item in replacements]


def zeroed(replacements: Sequence[Replacement]) -> list[Replacement]:
    """The same neurons, each set to zero."""
    return [Replacement(item.neuron, item.neuron, 0.0) for item in replacements]


def themselves(replacements: Sequence[Replacement]) -> list[Replacement]:
    """The same neurons, each replaced by itself: nothing may change."""
    return [Replacement(item.neuron, item.neuron, 1.0) for item in replacements]


def at_random(layers: Layers, replacements: Sequence[Replacement], seed: int, way: str) -> list[Replacement]:
    """The same neurons, each replaced by one drawn evenly from all layers, itself excepted, at a scale of 0.

    The same neurons are replaced, so that what differs from the pairs is the one that stands in; the scale is
    to be fitted. The i-th draw is the same whatever the number of replacements.
    """
    every = [(number, layer.neurons) for number, layer in sorted(layers.items())]
    total = sum(count for _, count in every)
    offsets = {number: sum(count for other, count in every if other < number) for number, _ in every}
    found = []
    for index, item in enumerate(replacements):
        draw = int(generator(seed, f"neurons at random, {way}", index).integers(total - 1))
        # One place is taken out, that of the neuron itself.
        draw += draw >= offsets[item.neuron[0]] + item.neuron[1]
        number = max(number for number, _ in every if offsets[number] <= draw)
        found.append(Replacement(item.neuron, (number, draw - offsets[number]), 0.0))
    return found


def replaced_mib(texts: int, tokens: int, width: int, neurons: int, most: int) -> float:
    """What a pass with up to ``most`` replacements in a layer holds beside a plain pass, in MiB.

    Two updates and what is added ``(N, C)``, and of the neurons both activations, gate and up rows and output
    vectors, of one layer the blocks that they are read from.
    """
    rows = texts * tokens
    values = 4 * rows * width + 3 * rows * most + 5 * most * width + 2 * min(256, neurons) * width
    return 4 * values / 2**20


def _contribution(
    lm: StreamedLM, layers: Layers, replacements: Sequence[Replacement], site: str, z: Tensor
) -> Tensor:
    """What joins the output of one MLP at the residual ``z (B, T, C)``: Σ (c·a_m − a_n) down[:, n]."""
    x = lm.module_input(site, z).reshape(-1, z.shape[-1])
    total = torch.zeros_like(x)
    for recipient, donor, own in _by_layers(replacements):
        one, other = _both(layers, recipient, donor, own, x)
        other *= other.new_tensor([item.scale for item in own])
        other -= one
        total += other @ columns_of(layers[recipient], [item.neuron[1] for item in own]).to(x).t()
    return total.view_as(z)


def _both(
    layers: Layers, recipient: int, donor: int, own: Sequence[Replacement], x: Tensor
) -> tuple[Tensor, Tensor]:
    """Activations ``(N, k)`` of the neurons that are replaced and of those that stand in, on the same x."""
    one = evaluate(x, layers[recipient], [item.neuron[1] for item in own])
    return one, evaluate(x, layers[donor], [item.by[1] for item in own])


def _by_layers(replacements: Sequence[Replacement]) -> list[tuple[int, int, list[Replacement]]]:
    """(recipient layer, donor layer, replacements between them), in order."""
    found: dict[tuple[int, int], list[Replacement]] = {}
    for item in replacements:
        found.setdefault((item.neuron[0], item.by[0]), []).append(item)
    return [(recipient, donor, own) for (recipient, donor), own in sorted(found.items())]


def _energy(update: Tensor) -> Tensor:
    """Σ over a text of squares: ``(B, T, C)`` to ``(B,)`` float64 on the CPU."""
    return torch.stack([text.double().square().sum() for text in update]).cpu()
