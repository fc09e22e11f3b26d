"""Matches made into pairs of neurons: both directions of each, which of them count, and which are the best.

Covers what calibration decides, from numbers alone. The search is in search.py, the null in null.py, held-out
confirmation in confirm.py, what is done with the best pairs in replaced.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinscope.reuse.neurons.activations import GatedLayer
from twinscope.reuse.neurons.confirm import moments
from twinscope.reuse.neurons.replaced import Inputs, Neuron, Replacement
from twinscope.reuse.neurons.search import Matches

#: A neuron and the one that stands in for it.
Way = tuple[Neuron, Neuron]


@dataclass(frozen=True)
class Direction:
    """``neuron`` as ``scale`` times ``by``, and their signed correlation, on the first one's input."""

    neuron: Neuron
    by: Neuron
    correlation: float
    scale: float

    @property
    def name(self) -> str:
        """For example ``"layers.3.mlp.17 <- layers.11.mlp.4"``."""
        return f"{named(self.neuron)} <- {named(self.by)}"

    @property
    def replacement(self) -> Replacement:
        """The same as a replacement."""
        return Replacement(self.neuron, self.by, self.scale)


@dataclass(frozen=True)
class Pair:
    """Two neurons, the direction that the search found first.

    ``rank`` counts the best pairs from 1, by the weaker of both correlations; None where a better pair has
    one of the two neurons.
    """

    forward: Direction
    backward: Direction
    beyond_null: bool
    rank: int | None = None

    @property
    def id(self) -> str:
        """For example ``"layers.3.mlp.17=layers.11.mlp.4"``."""
        return f"{named(self.forward.neuron)}={named(self.backward.neuron)}"

    @property
    def strength(self) -> float:
        """The smaller of both absolute correlations."""
        return min(abs(self.forward.correlation), abs(self.backward.correlation))

    @property
    def directions(self) -> tuple[Direction, Direction]:
        """Forward and backward."""
        return self.forward, self.backward


def named(neuron: Neuron) -> str:
    """The name of a neuron, ``layers.3.mlp.17``."""
    return f"layers.{neuron[0]}.mlp.{neuron[1]}"


def found_partners(matches: Mapping[int, Matches], silent: Collection[Neuron]) -> list[Way]:
    """(neuron, its best match) over all layers, each pair once; pairs with a silent neuron are left out."""
    found: dict[frozenset[Neuron], Way] = {}
    for layer, best in sorted(matches.items()):
        for number, (of, by) in enumerate(zip(best.layer.tolist(), best.neuron.tolist(), strict=True)):
            neuron, other = (layer, number), (of, by)
            if of >= 0 and neuron not in silent and other not in silent:
                found.setdefault(frozenset((neuron, other)), (neuron, other))
    return list(found.values())


def measured(layers: Mapping[int, GatedLayer], inputs: Inputs, ways: Sequence[Way]) -> list[Direction]:
    """Correlation and scale of ``neuron`` by ``other``, in the order of ``ways``.

    Both are evaluated on the input of the first one's layer.

    Raises:
        DataError: the weights cannot be read.
    """
    found: dict[Way, Direction] = {}
    for (recipient, donor), members in between_layers(ways).items():
        own, other = [one[1] for one, _ in members], [two[1] for _, two in members]
        sums = moments(inputs(recipient), layers[recipient], own, layers[donor], other)
        values = zip(members, sums.correlation.tolist(), sums.scale.tolist(), strict=True)
        found |= {way: Direction(*way, correlation, scale) for way, correlation, scale in values}
    return [found[way] for way in ways]


def between_layers(ways: Sequence[Way]) -> dict[tuple[int, int], list[Way]]:
    """(recipient layer, donor layer) -> the pairs between them, in the order given."""
    found: dict[tuple[int, int], list[Way]] = {}
    for way in ways:
        found.setdefault((way[0][0], way[1][0]), []).append(way)
    return dict(sorted(found.items()))


def ranked(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs from the strongest on, with ranks; of two that share a neuron the stronger has one."""
    taken: set[Neuron] = set()
    found: list[Pair] = []
    rank = 0
    for pair in sorted(pairs, key=lambda pair: (-pair.strength, pair.forward.neuron, pair.forward.by)):
        ends = {pair.forward.neuron, pair.forward.by}
        if ends & taken:
            found.append(replace(pair, rank=None))
            continue
        taken |= ends
        rank += 1
        found.append(replace(pair, rank=rank))
    return found


def decided(
    forward: Sequence[Direction], backward: Sequence[Direction], threshold: float, floor: float, most: int
) -> list[Pair]:
    """The pairs that calibration puts forward, the strongest first: all that count, and the ``most`` best.

    A pair counts if in both directions the correlation is larger than ``threshold``, the null's, and its
    square, which is the R², at least ``floor``.
    """
    pairs = []
    for one, other in zip(forward, backward, strict=True):
        strength = min(abs(one.correlation), abs(other.correlation))
        pairs.append(Pair(one, other, strength > threshold and strength**2 >= floor))
    return [pair for pair in ranked(pairs) if pair.beyond_null or (pair.rank or most + 1) <= most]


def to_json(pair: Pair) -> dict[str, Any]:
    """A pair as a journal row holds it."""
    return {
        "directions": [[*item.neuron, *item.by, item.correlation, item.scale] for item in pair.directions],
        "beyond_null": pair.beyond_null,
        "rank": pair.rank,
    }


def from_json(stored: Mapping[str, Any]) -> Pair:
    """What :func:`to_json` gave."""
    forward, backward = (
        Direction((item[0], item[1]), (item[2], item[3]), item[4], item[5]) for item in stored["directions"]
    )
    return Pair(forward, backward, stored["beyond_null"], stored["rank"])
