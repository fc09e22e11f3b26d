"""Identities that weights show without any token: filed apart, never as learned duplication.

Covers neurons that add nothing (``dead``), neurons of **one** layer with parallel gate and up (``parallel``;
they merge into one), a whole MLP that is a permuted or rescaled copy of another layer's (``module_copy``),
and neurons of two layers that are parallel only once each layer's norm gain is folded into its matrices
(``folded``). A few weight-identical neurons of **different** layers that are no copy of a module are
duplicates and stay in the search; ``parallel.compare_weights`` says that their weights are identical. The
rule and its reasons are in docs/decisions/0007-analytic-neurons.md. How parallel weights are found is in
parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twinscope.reuse.neurons.activations import BLOCK, GatedLayer, column_norms
from twinscope.reuse.neurons.parallel import Sketch, Weights, parallel_pairs, sketch
from twinscope.reuse.neurons.search import APART, FREE, Groups

Kind = Literal["dead", "parallel", "module_copy", "folded"]
#: From this share of a layer's live neurons on, parallel one to one, its MLP counts as a copy of another's.
MODULE_SHARE = 0.5
#: A neuron whose update is at most this share of its layer's median adds nothing.
SILENT = 1e-6


@dataclass(frozen=True)
class Analytic:
    """One identity of the weights: of a neuron of ``layer``, with one of ``other_layer`` unless it is dead.

    ``gate_scale``, ``up_scale`` and ``down_scale`` are the factors in ``own ≈ factor · other``, None where
    there is none. ``exact`` says whether one activation is a multiple of the other: a parallel gate of
    another length is filed too, but its neuron does not merge. ``reason`` is one sentence.
    """

    kind: Kind
    layer: int
    neuron: int
    other_layer: int | None
    other_neuron: int | None
    gate_scale: float | None
    up_scale: float | None
    down_scale: float | None
    exact: bool
    reason: str


@dataclass(frozen=True)
class ModuleCopy:
    """One MLP is a copy of another.

    ``share`` of the live neurons are parallel one to one, with the gains folded in if ``folded``.
    ``same_update`` is the share of those whose update is ``update_scale`` times the other's at the same input
    of the module, which is None if no one factor holds for most: then the neurons are copied and their output
    vectors are not.
    """

    layer: int
    other_layer: int
    folded: bool
    share: float
    same_update: float
    update_scale: float | None


@dataclass(frozen=True)
class Identities:
    """Everything that weights alone show of some layers. ``groups`` is what the search leaves out.

    ``filed`` holds every identity once: pairs of one layer, then pairs of two, then dead neurons.
    """

    filed: tuple[Analytic, ...]
    copies: tuple[ModuleCopy, ...]
    groups: Groups


def identities(layers: Sequence[GatedLayer], block: int = BLOCK) -> Identities:
    """All identities within and between ``layers``, whose order decides which of two is named first.

    Reads gate and up of every layer once, a block at a time, then the rows of what looks parallel. Memory:
    sketches of 128 float64 a neuron, tables of n × b, and the rows of the pairs.

    Raises:
        DataError: the weights cannot be read.
    """
    sketches = {layer.layer: sketch(layer, block) for layer in layers}
    filed: list[Analytic] = []
    copies: list[ModuleCopy] = []
    for layer in layers:
        own = sketches[layer.layer]
        filed += _filed("parallel", layer, layer, *parallel_pairs(layer, layer, (own, own), False, block))
    for first, layer in enumerate(layers):
        for other in layers[first + 1 :]:
            both = sketches[layer.layer], sketches[other.layer]
            found, copy = _between(layer, other, both, block)
            filed += found
            copies += [] if copy is None else [copy]
    groups = {layer.layer: torch.full((layer.neurons,), FREE) for layer in layers}
    for label, members in enumerate(_connected(filed)):
        for number, neuron in members:
            groups[number][neuron] = label
    for layer in layers:
        dead = sketches[layer.layer].dead
        groups[layer.layer][torch.tensor(list(dead), dtype=torch.int64)] = APART
        filed += [_dead(layer.layer, neuron, f"its {part} is zero") for neuron, part in dead.items()]
    return Identities(tuple(filed), tuple(copies), groups)


def silent(layer: GatedLayer, energy: Tensor) -> Tensor:
    """Which neurons add nothing on given tokens: ``(n,)`` bool.

    ``energy`` (n,) is Σ a_n² over the tokens (``Matches.energy``). The update ``√energy ‖down_n‖`` is at most
    :data:`SILENT` times the layer's median.

    Raises:
        DataError: the weights cannot be read.
    """
    update = energy.double().cpu().sqrt() * column_norms(layer)
    return update <= SILENT * update.median()


def silent_neurons(layer: GatedLayer, energy: Tensor, known: Groups) -> list[Analytic]:
    """The neurons that :func:`silent` finds and whose weights do not say so already (``Identities.groups``).

    Raises:
        DataError: the weights cannot be read.
    """
    found = silent(layer, energy) & (known[layer.layer] != APART)
    why = f"its update on calibration tokens is below {SILENT:g} of the layer's median"
    return [_dead(layer.layer, int(neuron), why) for neuron in found.nonzero().flatten()]


def _between(
    layer: GatedLayer, other: GatedLayer, sketches: tuple[Sketch, Sketch], block: int
) -> tuple[list[Analytic], ModuleCopy | None]:
    """What is analytic between two layers: a copied module, else what only folding makes parallel."""
    live = max(part.neurons - len(seen.dead) for part, seen in zip((layer, other), sketches, strict=True))
    raw = parallel_pairs(layer, other, sketches, False, block)
    fold = parallel_pairs(layer, other, sketches, True, block)
    for folded, (pairs, weights) in ((False, raw), (True, fold)):
        share = len(pairs[:, 1].unique()) / max(live, 1)
        if share >= MODULE_SHARE:
            copy = _copied(layer, other, folded, share, weights)
            return _filed("module_copy", layer, other, pairs, weights, folded), copy
    # What is parallel without folding as well is a duplicate, and the search finds it.
    known = {tuple(pair) for pair in raw[0].tolist()}
    only = torch.tensor([tuple(pair) not in known for pair in fold[0].tolist()], dtype=torch.bool)
    return _filed("folded", layer, other, fold[0][only], fold[1].kept(only), True), None


def _copied(layer: GatedLayer, other: GatedLayer, folded: bool, share: float, weights: Weights) -> ModuleCopy:
    """How far the updates of a copied module are one multiple of the other's."""
    update = weights.factor * weights.down_scale
    known = update[update.isfinite()]
    same, scale = 0.0, None
    if len(known):
        middle = float(known.median())
        # A product of two factors, each off by rounding, and the median by as much again.
        near = (known - middle).abs() <= 4 * max(layer.rounding, other.rounding) * abs(middle)
        same = float(near.sum()) / len(update)
        scale = middle if same > 0.5 else None
    return ModuleCopy(layer.layer, other.layer, folded, share, same, scale)


def _filed(
    kind: Kind, layer: GatedLayer, other: GatedLayer, pairs: Tensor, weights: Weights, folded: bool = False
) -> list[Analytic]:
    reasons = {
        "parallel": "gate and up are parallel to those of another neuron of the layer",
        "module_copy": "most neurons of the two layers are parallel one to one, so the module is a copy",
        "folded": "gate and up are parallel once each layer's norm gain is folded into them",
        "dead": "",
    }
    reason = reasons[kind] + (" after folding the norm gains" if folded and kind == "module_copy" else "")
    found = []
    for index, (neuron, partner) in enumerate(pairs.tolist()):
        exact = bool(weights.identical[index])
        scales = (float(scale[index]) for scale in (weights.gate_scale, weights.up_scale, weights.down_scale))
        gate, up, down = (scale if math.isfinite(scale) else None for scale in scales)
        why = reason if exact else f"{reason}; the gates differ in length, so the two do not merge exactly"
        found.append(Analytic(kind, layer.layer, neuron, other.layer, partner, gate, up, down, exact, why))
    return found


def _dead(layer: int, neuron: int, reason: str) -> Analytic:
    return Analytic("dead", layer, neuron, None, None, None, None, None, True, reason)


def _connected(filed: Sequence[Analytic]) -> list[list[tuple[int, int]]]:
    """The neurons that identities join, as groups of (layer, neuron), in the order in which they come up."""
    group: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in filed:
        if item.other_layer is None or item.other_neuron is None:
            continue
        one, two = (item.layer, item.neuron), (item.other_layer, item.other_neuron)
        mine, theirs = group.setdefault(one, [one]), group.setdefault(two, [two])
        if mine is not theirs:
            mine += theirs
            for member in theirs:
                group[member] = mine
    return list({id(members): members for members in group.values()}.values())
