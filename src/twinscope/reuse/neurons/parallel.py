"""Which neurons of two layers, or of one, have parallel weights, found without a table of all pairs.

Two rows are parallel if, scaled to each other, they differ by no more than rounding in the type of the files
(``GatedLayer.rounding``). Two neurons are parallel if gates and ups are, the gates by a positive factor,
because ``act(−t)`` is another function than ``act(t)``. Covers the comparison of given pairs and the search
for pairs by short sketches of the rows. What a parallel pair counts as is in analytic.py.

Shapes: C channels, n neurons of a layer, P pairs, k numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.reuse.neurons.activations import BLOCK, Act, GatedLayer, column_norms, columns_of, rows_of

#: Directions in which rows are compared before they are compared whole: unrelated unit rows are about 1 apart
#: in all of space, and in so many directions still far beyond rounding.
_SKETCH = 32


@dataclass(frozen=True)
class Weights:
    """What the weights of P pairs have to do with each other; all ``(P,)`` on the CPU.

    ``parallel`` (bool): gate and up are. ``gate_scale``, ``up_scale`` and ``down_scale`` (float64) are the
    factors in ``own ≈ factor · other``, NaN where gate and up are not parallel, and of down where its columns
    are not. ``identical`` (bool): one activation is a multiple of the other whatever the input, because they
    are parallel and the gates are equal, or the act is homogeneous. ``factor`` (float64) is that multiple,
    else NaN.
    """

    parallel: Tensor
    identical: Tensor
    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor
    factor: Tensor

    def kept(self, which: Tensor) -> Weights:
        """Those of the pairs ``which`` (bool or int64)."""
        return Weights(*(getattr(self, field.name)[which] for field in fields(self)))


@dataclass(frozen=True)
class Sketch:
    """Unit rows seen from k random directions: ``raw`` and ``folded`` (gate, up), (n, k) float64 each.

    A projection shortens every difference, so rows that are parallel lie near each other in it. ``folded``
    are the rows times the gain of the layer's norm. ``dead`` maps neurons to the part of them that is zero.
    """

    raw: tuple[Tensor, Tensor]
    folded: tuple[Tensor, Tensor]
    dead: dict[int, str]


def compare_weights(
    layer: GatedLayer,
    neurons: Sequence[int] | Tensor,
    other: GatedLayer,
    others: Sequence[int] | Tensor,
    folded: bool = False,
) -> Weights:
    """How the weights of pairs compare: ``neurons[p]`` of a layer and ``others[p]`` of another, or the same.

    ``folded`` multiplies gate and up by their layer's norm gain first. Computed in float64, :data:`BLOCK`
    pairs at a time.

    Raises:
        ValueError: a neuron that a layer does not have, or lists of unequal length.
        DataError: the weights cannot be read.
    """
    mine, theirs = (torch.as_tensor(numbers, dtype=torch.int64).flatten() for numbers in (neurons, others))
    if len(mine) != len(theirs):
        raise ValueError(f"{len(mine)} neurons and {len(theirs)} others are no pairs")
    parts = [
        _compared(layer, own, other, reference, folded)
        for own, reference in zip(mine.split(BLOCK), theirs.split(BLOCK), strict=True)
    ]
    return Weights(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Weights)))


def homogeneous(act: Act) -> bool:
    """Whether ``act(s t) = s act(t)`` for s > 0, as of ReLU: a gate's length then only scales its neuron."""
    t = torch.linspace(-4.0, 4.0, 17, dtype=torch.float64)
    return bool(torch.allclose(act(3.0 * t), 3.0 * act(t), rtol=1e-6, atol=1e-9))


def sketch(layer: GatedLayer, block: int = BLOCK) -> Sketch:
    """Look at every row of gate and up once, ``block`` at a time.

    Raises:
        DataError: the weights cannot be read.
    """
    draws = generator(0, "neuron sketch").standard_normal((layer.width, min(_SKETCH, layer.width)))
    directions = torch.linalg.qr(torch.from_numpy(draws)).Q
    views = [torch.empty(layer.neurons, directions.shape[1], dtype=torch.float64) for _ in range(4)]
    zero = {part: torch.zeros(layer.neurons, dtype=torch.bool) for part in ("gate", "up", "down")}
    for start, gate, up in layer.blocks(block):
        stop = start + len(gate)
        for place, (part, rows) in enumerate((("gate", gate), ("up", up))):
            rows = rows.double()
            zero[part][start:stop] = (rows == 0).all(dim=1)
            views[place][start:stop] = _unit(rows) @ directions
            views[place + 2][start:stop] = _unit(rows * layer.gain.double()) @ directions
    zero["down"] = column_norms(layer) == 0
    dead: dict[int, str] = {}
    for part, found in zero.items():
        dead = {int(neuron): part for neuron in found.nonzero().flatten()} | dead
    return Sketch((views[0], views[1]), (views[2], views[3]), dict(sorted(dead.items())))


def parallel_pairs(
    layer: GatedLayer,
    other: GatedLayer,
    sketches: tuple[Sketch, Sketch],
    folded: bool = False,
    block: int = BLOCK,
) -> tuple[Tensor, Weights]:
    """Parallel pairs of two layers, or of one: ``(P, 2)`` neurons, ascending, and how their weights compare.

    ``sketches`` are those of the two layers. A neuron of ``layer`` has at most one partner, the nearest in
    the sketch; within one layer a pair comes once. Dead neurons have none.

    Raises:
        DataError: the weights cannot be read.
    """
    one, two = sketches
    mine, theirs = (one.folded, two.folded) if folded else (one.raw, two.raw)
    nearest = torch.full((layer.neurons,), torch.inf, dtype=torch.float64)
    partner = torch.full((layer.neurons,), -1)
    dead = torch.zeros(other.neurons, dtype=torch.bool)
    dead[torch.tensor(list(two.dead), dtype=torch.int64)] = True
    for start in range(0, other.neurons, block):
        here = slice(start, start + block)
        gate, up = (_distances(one, other[here]) for one, other in zip(mine, theirs, strict=True))
        up = torch.minimum(up, _distances(mine[1], -theirs[1][here]))
        table = torch.maximum(gate, up)
        table[:, dead[here]] = torch.inf
        if layer.layer == other.layer:
            table.diagonal(-start).fill_(torch.inf)
        distance, place = table.min(dim=1)
        partner = torch.where(distance < nearest, place + start, partner)
        nearest = torch.minimum(nearest, distance)
    # Unit vectors at an angle θ lie 2 sin(θ/2) apart, at most a little more than the sin θ compared later.
    likely = nearest <= 1.01 * max(layer.rounding, other.rounding)
    likely[torch.tensor(list(one.dead), dtype=torch.int64)] = False
    pairs = torch.stack([likely.nonzero().flatten(), partner[likely]], dim=1)
    if layer.layer == other.layer:
        pairs = pairs.sort(dim=1).values.unique(dim=0)
    weights = compare_weights(layer, pairs[:, 0], other, pairs[:, 1], folded)
    return pairs[weights.parallel], weights.kept(weights.parallel)


def _compared(layer: GatedLayer, neurons: Tensor, other: GatedLayer, others: Tensor, folded: bool) -> Weights:
    rounding = max(layer.rounding, other.rounding)
    mine = [*rows_of(layer, neurons), columns_of(layer, neurons).t()]
    theirs = [*rows_of(other, others), columns_of(other, others).t()]
    factors = []
    for part, (own, reference) in enumerate(zip(mine, theirs, strict=True)):
        own, reference = own.double(), reference.double()
        if folded and part < 2:
            own, reference = own * layer.gain.double(), reference * other.gain.double()
        factors.append(_factors(own, reference, rounding))
    gate, up, down = factors
    parallel = (gate > 0) & up.isfinite()
    nothing = torch.full_like(gate, torch.nan)
    gate, up, down = (torch.where(parallel, factor, nothing) for factor in (gate, up, down))
    # Layers of one model have one activation function.
    if homogeneous(layer.act) and homogeneous(other.act):
        identical, factor = parallel, gate * up
    else:
        identical, factor = parallel & ((gate - 1.0).abs() <= rounding), up
    return Weights(parallel, identical, gate, up, down, torch.where(identical, factor, nothing))


def _factors(own: Tensor, reference: Tensor, rounding: float) -> Tensor:
    """α ``(P,)`` of least ‖own − α reference‖, float64 rows ``(P, C)``; NaN where more than that is left."""
    length, energy = torch.linalg.vector_norm(own, dim=1), reference.square().sum(dim=1)
    alpha = (own * reference).sum(dim=1) / energy
    left = torch.linalg.vector_norm(own - alpha[:, None] * reference, dim=1)
    near = (length > 0) & (energy > 0) & (left <= rounding * length)
    return torch.where(near, alpha, torch.nan)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """‖row − other‖ of ``(n, k)`` and ``(b, k)`` float64: ``(n, b)``, good to about 1e-8."""
    squares = rows.square().sum(dim=1)[:, None] + others.square().sum(dim=1)
    return torch.addmm(squares, rows, others.t(), alpha=-2.0).clamp_(min=0.0).sqrt_()
