"""What correlation the best of all donors reaches by chance, on the same inputs.

Neurons of one layer share their inputs, so tokens cannot be exchanged between them: with tokens permuted, two
unrelated neurons on a common dominant direction would look significant. The null keeps inputs, recipients and
the whole search, and draws the donors' weights anew. Covers the draws, the largest correlation of each, and
the judgement of observed correlations against them. What a match must show besides is in confirm.py.

Two ways of drawing a donor ``(gate, up)`` of a layer for a recipient's input x with the uncentred second
moment ``S = xᵀx/N = V diag(λ) Vᵀ``:

- ``signs``: in the basis V every coordinate gets a random sign, the same for gate and up of a neuron. Norms,
  the angle between the two, and with them the response energies ``wᵀSw`` and ``gateᵀS up`` stay what they
  are: a neuron driven by one dominant direction of the inputs is driven by it in the null.
- ``isotropic``: the pair is turned by a random rotation. Norms and angle stay, response energies do not.

The threshold is exact for exchangeable draws: of B draws the k-th largest maximum, k = ⌊α (B + 1)⌋, is
exceeded by an equal observed maximum with a probability of at most α (Barnard 1963; Dwass 1957).

Shapes: N tokens, C channels, n neurons, D draws of one call, B draws in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.reuse.neurons.activations import BLOCK, GatedLayer, activations
from twinscope.reuse.neurons.search import Groups, RunningBest, donors_of, receive, search_mib

Method = Literal["signs", "isotropic"]
#: The fewest draws that give a family-wise level of 5 %.
DRAWS = 19
ALPHA = 0.05
#: Correlations beyond this are rounding of 1.
_NEARLY_1 = 1.0 - 2.0**-24


@dataclass(frozen=True)
class Judgement:
    """Observed best correlations against the null of the maximum.

    ``max_correlation`` is the threshold (the record's ``null_max_correlation``): a match passes if its
    |correlation| is larger. ``maxima`` are the B largest null correlations over all recipients, in the order
    of the draws; ``passed[layer]`` (n,) bool and ``p_values[layer]`` (n,) float64, family-wise
    (1 + #{maxima ≥ |correlation|})/(B + 1), per recipient layer.
    """

    alpha: float
    max_correlation: float
    maxima: tuple[float, ...]
    passed: dict[int, Tensor]
    p_values: dict[int, Tensor]


@dataclass(frozen=True)
class JudgementOfEach:
    """The same, each recipient neuron against its own null (:func:`judge_each`).

    ``thresholds[layer]`` (n,) float64 is what its |correlation| has to exceed; ``max_excess`` the threshold
    in units of the spread of its null. ``passed`` and ``p_values`` as in :class:`Judgement`.
    """

    alpha: float
    max_excess: float
    thresholds: dict[int, Tensor]
    passed: dict[int, Tensor]
    p_values: dict[int, Tensor]


def null_search(
    x: Tensor,
    recipient: GatedLayer,
    donors: Sequence[GatedLayer],
    draws: Sequence[int],
    seed: int,
    method: Method = "signs",
    block: int = BLOCK,
    groups: Groups | None = None,
) -> Tensor:
    """The largest |correlation| of every recipient neuron with redrawn donors, ``(len(draws), n)`` float64.

    Arguments as for :func:`~twinscope.reuse.neurons.search.search`, whose search this is. ``draws`` are
    numbers of draws: number d gives the same in any call, with any others and any block, so that a run may
    take them in parts. The matrices are read once for all draws of a call.

    Memory: :func:`null_mib`.

    Raises:
        ValueError: as :func:`~twinscope.reuse.neurons.search.search`, no draw, or a method that is none.
        DataError: the weights cannot be read.
    """
    if method not in ("signs", "isotropic") or not draws:
        raise ValueError(f"draws {list(draws)} by '{method}': give at least one, by 'signs' or 'isotropic'")
    own = receive(x, recipient, block)
    basis = eigenbasis(x) if method == "signs" else None
    inputs = x.float() if basis is None else x.float() @ basis
    best = [RunningBest(recipient.neurons) for _ in draws]
    for donor in donors_of(recipient, donors):
        stream = f"neurons null {method} {recipient.layer} {donor.layer}"
        # One generator per draw runs through the neurons in order, so that the block has no part in it.
        sources = [generator(seed, stream, draw) for draw in draws]
        for start, gate, up in donor.blocks(block):
            gate, up = gate.to(inputs), up.to(inputs)
            if basis is not None:
                gate, up = gate @ basis, up @ basis
            for source, running in zip(sources, best, strict=True):
                if basis is None:
                    pair = turned(gate, up, source)
                else:
                    flips = signs(gate.shape, source).to(inputs)
                    pair = gate * flips, up * flips
                running.see(own, donor.layer, start, activations(inputs, *pair, donor.act), groups)
    return torch.stack([running.strength.double().clamp(max=1.0) for running in best])


def judge(observed: Mapping[int, Tensor], nulls: Mapping[int, Tensor], alpha: float = ALPHA) -> Judgement:
    """Hold the best correlations of all recipient layers against the null, family-wise over all of them.

    ``observed[layer]`` (n,) are ``Matches.correlation``, ``nulls[layer]`` (B, n) from :func:`null_search`
    with the same draws in every layer (a (B, 1) of each draw's maximum serves as well): draw b's maximum is
    that over all layers and neurons.

    Raises:
        ValueError: other layers in one than in the other, unequal numbers of draws, or too few for alpha.
    """
    _require_alike(observed, nulls)
    maxima = torch.stack([part.double().amax(dim=1).cpu() for part in nulls.values()]).amax(dim=0)
    limit = threshold(maxima.tolist(), alpha)
    strengths = {layer: part.double().abs().cpu() for layer, part in observed.items()}
    return Judgement(
        alpha=alpha,
        max_correlation=limit,
        maxima=tuple(maxima.tolist()),
        passed={layer: part > limit for layer, part in strengths.items()},
        p_values={layer: _p_values(part, maxima) for layer, part in strengths.items()},
    )


def judge_each(
    observed: Mapping[int, Tensor], nulls: Mapping[int, Tensor], alpha: float = ALPHA
) -> JudgementOfEach:
    """Hold each recipient's best correlation against what its own null draws reach, family-wise over all.

    One threshold for all neurons is that of the neuron with the strongest null: a few that respond to the
    first token of a text alone push it near 1, and what dense neurons share stays below. Here a correlation r
    counts as ``t = (artanh r − m)/s``, with the median m and the median absolute deviation s of the
    recipient's own values, observed and drawn alike, s at least the layer's median of it; the threshold is
    that of the null maxima of t. Observed and drawn enter alike, so the family-wise level is as exact as that
    of :func:`judge`.

    ``observed[layer]`` (n,), ``nulls[layer]`` (B, n) as for :func:`judge`, every neuron of every draw.

    Raises:
        ValueError: as :func:`judge`, or nulls of another number of neurons.
    """
    _require_alike(observed, nulls)
    excess: dict[int, Tensor] = {}
    limits: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, part in observed.items():
        if nulls[layer].shape[1:] != part.shape:
            raise ValueError(
                f"layer {layer}: draws of {tuple(nulls[layer].shape[1:])} neurons for {tuple(part.shape)}"
            )
        values = torch.cat([part.double().abs().cpu()[None], nulls[layer].double().cpu()])
        values = values.clamp(max=_NEARLY_1).atanh()
        middle = values.median(dim=0).values
        spread = (values - middle).abs().median(dim=0).values
        spread = spread.clamp(min=max(float(spread.median()), 1e-6))
        excess[layer], limits[layer] = (values - middle) / spread, (middle, spread)
    maxima = torch.stack([part[1:].amax(dim=1) for part in excess.values()]).amax(dim=0)
    limit = threshold(maxima.tolist(), alpha)
    return JudgementOfEach(
        alpha=alpha,
        max_excess=limit,
        thresholds={layer: (middle + limit * spread).tanh() for layer, (middle, spread) in limits.items()},
        passed={layer: part[0] > limit for layer, part in excess.items()},
        p_values={layer: _p_values(part[0], maxima) for layer, part in excess.items()},
    )


def threshold(maxima: Sequence[float], alpha: float = ALPHA) -> float:
    """The k-th largest of B maxima, k = ⌊α (B + 1)⌋: the largest of 19 at 5 %, the fifth largest of 99.

    Raises:
        ValueError: fewer than 1/α − 1 draws.
    """
    # 0.05 · 20 is a hair below 1 in some orders of rounding.
    rank = int(alpha * (len(maxima) + 1) + 1e-9)
    if rank < 1:
        raise ValueError(f"{len(maxima)} draws give no threshold at a level of {alpha:g}: take more")
    return sorted(maxima, reverse=True)[rank - 1]


def eigenbasis(x: Tensor) -> Tensor:
    """The eigenvectors of xᵀx/N of x ``(N, C)`` as columns, ``(C, C)`` float32; summed in float64."""
    moment = x.new_zeros((x.shape[1], x.shape[1]), dtype=torch.float64)
    for part in x.split(1024):
        part = part.double()
        moment += part.t() @ part
    return torch.linalg.eigh(moment / len(x)).eigenvectors.float().contiguous()


def signs(shape: Sequence[int], source: np.random.Generator) -> Tensor:
    """Random signs ±1 of the shape ``(b, C)``, float32 on the CPU; each row takes whole words of 64 bits."""
    rows, width = shape
    words = source.integers(0, 2**64, size=(rows, -(-width // 64)), dtype=np.uint64, endpoint=False)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1)[:, :width]
    return torch.from_numpy(bits).float().mul_(2.0).sub_(1.0)


def turned(gate: Tensor, up: Tensor, source: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each pair of rows of gate and up ``(b, C)`` after a rotation drawn for it uniformly from all.

    The first row goes to a random direction, the part of the second across it to a random direction across
    that. One channel has no across, and keeps the product of the two rows.
    """
    rows, width = gate.shape
    draws = torch.from_numpy(source.standard_normal((rows, 2, width))).to(gate.device)
    length = torch.linalg.vector_norm(gate.double(), dim=1, keepdim=True)
    along = torch.where(length > 0, (gate.double() * up.double()).sum(dim=1, keepdim=True) / length, 0.0)
    across = (up.double().square().sum(dim=1, keepdim=True) - along.square()).clamp(min=0.0).sqrt()
    first = torch.nn.functional.normalize(draws[:, 0], dim=1)
    second = draws[:, 1] - (draws[:, 1] * first).sum(dim=1, keepdim=True) * first
    second = torch.nn.functional.normalize(second, dim=1)
    return (length * first).float(), (along * first + across * second).float()


def null_mib(tokens: int, width: int, neurons: int, draws: int, block: int = BLOCK) -> float:
    """The planned memory of :func:`null_search` in MiB, input and activations of the recipient included.

    That of the search, the turned input, the second moment and its eigenvectors with the solver's workspace,
    a block's weights as turned and as drawn, and what each draw has found.
    """
    values = 4 * (tokens * width + 6 * block * width) + 8 * 5 * width**2 + 32 * draws * neurons
    return search_mib(tokens, width, neurons, block) + values / 2.0**20


def _require_alike(observed: Mapping[int, Tensor], nulls: Mapping[int, Tensor]) -> None:
    counts = {len(part) for part in nulls.values()}
    if set(observed) != set(nulls) or len(counts) != 1:
        raise ValueError(
            f"layers {sorted(observed)} against nulls of layers {sorted(nulls)} with {sorted(counts)} draws"
        )


def _p_values(values: Tensor, maxima: Tensor) -> Tensor:
    """(1 + #{maxima ≥ value})/(B + 1) of ``(n,)`` values."""
    return (1.0 + (maxima[:, None] >= values[None]).sum(dim=0)).double() / (1 + len(maxima))
