"""For every neuron of a layer the neuron of all layers that computes most nearly the same on its input.

Likeness is the signed, scaled, uncentred correlation ``⟨a_n, a_m⟩ / (‖a_n‖ ‖a_m‖)`` over tokens, both
functions taken at the **recipient's** normalised input; its square is the R² of the best ``a_n ≈ c a_m``.
Covers the search, in blocks of donors, and what it holds in memory. What correlation chance reaches is in
null.py, confirmation on other tokens in confirm.py, weights that say the same without any token in
analytic.py.

Shapes: N tokens, C channels, n neurons of the recipient, b donors of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinscope.reuse.neurons.activations import BLOCK, GatedLayer, activations, energies

#: What weights alone explain, so that it is not to be found: layer -> label (n,) int64 of each of its
#: neurons. Two neurons of one label ≥ 0 are no match for each other; :data:`FREE` has none, :data:`APART`
#: none with anyone.
Groups = Mapping[int, Tensor]
FREE, APART = -1, -2
#: A norm over all tokens that counts as none: its inverse would leave float32.
SILENCE = 1e-30
_MIB = 2.0**20


@dataclass(frozen=True)
class Matches:
    """The best donor of each of n recipient neurons; everything ``(n,)`` on the CPU.

    ``layer`` and ``neuron`` (int64) name the donor, −1 where a recipient is silent on these tokens or every
    donor is; ``correlation`` is signed and 0 there; ``scale`` is c = ⟨a_n, a_m⟩/⟨a_m, a_m⟩; ``energy`` is Σ
    a_n² over the tokens. The last three are float64, of float32 activations (correlations agree with float64
    to about 1e-6).
    """

    layer: Tensor
    neuron: Tensor
    correlation: Tensor
    scale: Tensor
    energy: Tensor


@dataclass(frozen=True)
class Recipient:
    """A layer's activations on its own input, each neuron's divided by its norm.

    ``unit (N, n)`` float32 on the device of the input (a silent neuron is all zeros), ``norms (n,)`` float64
    on the CPU.
    """

    layer: int
    unit: Tensor
    norms: Tensor


def search(
    x: Tensor,
    recipient: GatedLayer,
    donors: Sequence[GatedLayer],
    block: int = BLOCK,
    groups: Groups | None = None,
) -> Matches:
    """The best match of every neuron of ``recipient`` among all neurons of ``donors``, on x ``(N, C)``.

    ``x`` is the recipient's normalised input (``lm.module_input``). ``donors`` may hold the recipient's own
    layer, in which no neuron is its own match; ``groups`` (``analytic.identities``) rules out more pairs, so
    that an identity of the weights does not hide what was learned. Among equals the earlier donor wins.

    Memory: :func:`search_mib`; never neurons × neurons.

    Raises:
        ValueError: no tokens, layers of another width, or no donor.
        DataError: the weights cannot be read.
    """
    own = receive(x, recipient, block)
    best = RunningBest(recipient.neurons)
    for donor in donors_of(recipient, donors):
        for start, gate, up in donor.blocks(block):
            best.see(own, donor.layer, start, activations(x, gate, up, donor.act), groups)
    return best.matches(own)


def receive(x: Tensor, recipient: GatedLayer, block: int = BLOCK) -> Recipient:
    """The recipient's own activations on x ``(N, C)``.

    Raises:
        ValueError: no tokens, or another width.
        DataError: the weights cannot be read.
    """
    if x.ndim != 2 or not len(x) or x.shape[1] != recipient.width:
        raise ValueError(f"inputs of the shape {tuple(x.shape)} for a layer of {recipient.width} channels")
    unit = x.new_empty((len(x), recipient.neurons), dtype=torch.float32)
    norms = torch.empty(recipient.neurons, dtype=torch.float64)
    for start, gate, up in recipient.blocks(block):
        stop = start + len(gate)
        unit[:, start:stop], norms[start:stop] = normalised(activations(x, gate, up, recipient.act))
    return Recipient(recipient.layer, unit, norms)


def normalised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Activations ``(N, b)`` divided in place by their norms over tokens, and the norms ``(b,)`` float64.

    A neuron without activation (a norm below :data:`SILENCE`) becomes all zeros.
    """
    norms = energies(values).sqrt()
    values *= torch.where(norms > SILENCE, 1.0 / norms, 0.0).to(values)
    return values, norms


def donors_of(recipient: GatedLayer, donors: Iterable[GatedLayer]) -> list[GatedLayer]:
    """The donors in order, once they fit the recipient.

    Raises:
        ValueError: there is none, one has another width, or a layer stands there twice.
    """
    found = list(donors)
    if not found:
        raise ValueError("a search needs at least one donor layer")
    for donor in found:
        if donor.width != recipient.width:
            raise ValueError(
                f"layer {donor.layer} reads {donor.width} channels, layer {recipient.layer} {recipient.width}"
            )
    if len({donor.layer for donor in found}) < len(found):
        raise ValueError("a donor layer stands there twice")
    return found


class RunningBest:
    """The largest |correlation| of each recipient neuron so far, and whose it is."""

    def __init__(self, neurons: int) -> None:
        self.strength = torch.zeros(neurons, dtype=torch.float32)
        self._correlation = torch.zeros(neurons, dtype=torch.float32)
        self._norm = torch.ones(neurons, dtype=torch.float64)
        self._layer = torch.full((neurons,), -1)
        self._neuron = torch.full((neurons,), -1)

    def see(
        self, own: Recipient, layer: int, start: int, values: Tensor, groups: Groups | None = None
    ) -> None:
        """Take in the donors ``start …`` of a layer by their activations ``(N, b)``, which are used up."""
        unit, norms = normalised(values)
        table = own.unit.t() @ unit  # (n, b)
        _strike(table, own.layer, layer, start, groups or {})
        place = table.abs().argmax(dim=1)
        correlation, place = table.gather(1, place[:, None])[:, 0].cpu(), place.cpu()
        strength = correlation.abs()
        better = strength > self.strength
        self.strength = torch.where(better, strength, self.strength)
        self._correlation = torch.where(better, correlation, self._correlation)
        self._norm = torch.where(better, norms[place], self._norm)
        self._layer = torch.where(better, layer, self._layer)
        self._neuron = torch.where(better, place + start, self._neuron)

    def matches(self, own: Recipient) -> Matches:
        """What was found, with the scale of each match."""
        correlation = self._correlation.double().clamp(-1.0, 1.0)
        return Matches(
            layer=self._layer,
            neuron=self._neuron,
            correlation=correlation,
            scale=correlation * own.norms / self._norm,
            energy=own.norms.square(),
        )


def search_mib(tokens: int, width: int, neurons: int, block: int = BLOCK) -> float:
    """The planned memory of :func:`search` in MiB, input and activations of the recipient included.

    The input, the recipient's activations, three blocks of a donor's, two tables of n × b, gate and up of one
    block, and the float64 copy of some tokens of a block.
    """
    values = tokens * (width + neurons + 3 * block) + 2 * neurons * block + 4 * block * width
    return (4 * values + 8 * 2 * min(tokens, 4096) * block) / _MIB


def _strike(table: Tensor, own: int, layer: int, start: int, groups: Groups) -> None:
    """Zero the entries of ``table (n, b)`` that are no matches: a neuron beside itself, and by ``groups``."""
    stop = start + table.shape[1]
    if own == layer:
        table.diagonal(-start).zero_()
    mine, theirs = groups.get(own), groups.get(layer)
    if mine is not None and bool((mine == APART).any()):
        table[(mine == APART).to(table.device)] = 0.0
    if theirs is None or bool((theirs[start:stop] == FREE).all()):
        return
    theirs = theirs[start:stop].to(table.device)
    table[:, theirs == APART] = 0.0
    if mine is not None:
        mine = mine.to(table.device)
        table[(mine[:, None] == theirs[None]) & (mine[:, None] >= 0)] = 0.0
