"""Why the wall clock of two steps compares otherwise than their FLOPs, part by part.

Covers the way from the ratio of FLOPs to the ratio of times, as a chain whose steps add up exactly, and the
sentence made of it. A pure function of times and counts.

Parts hold products (free, forces, rebuild, read, readout; forward, backward) or none worth a rate (data,
embedding, optimizer, whatever is unmarked). With P the time in the former, f the FLOPs there and T the time
of a step, numerator over denominator:

    F ratio → f ratio         the optimizer's products are set aside
    f ratio → P ratio         part by part: (t_s − f_s · P_d / f_d) / P_d, at the denominator's mean rate
    P ratio → T ratio         the parts without products count in both
    T ratio → measured ratio  the pass that times parts against the windows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Parts whose time is not set against FLOPs.
WITHOUT_PRODUCTS = ("data", "embedding", "optimizer", "unmarked")
#: Wall clock and FLOPs agree where their ratios differ by less than this.
AGREEMENT = 0.03
#: Steps of the chain that are named in the sentence, and the least each must move the ratio by.
_NAMED, _LEAST = 3, 0.01


@dataclass(frozen=True)
class Side:
    """One arm: FLOPs and seconds per step of each part, and its name."""

    name: str
    flops: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def products(self) -> list[str]:
        """Parts that hold products."""
        return [part for part, flops in self.flops.items() if flops > 0 and part not in WITHOUT_PRODUCTS]

    @property
    def product_flops(self) -> float:
        return sum(self.flops[part] for part in self.products)

    @property
    def product_seconds(self) -> float:
        return sum(self.seconds.get(part, 0.0) for part in self.products)

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Move:
    """One step of the chain: why, by how much it moves the ratio, and the ratio after it."""

    reason: str
    change: float
    ratio: float


def chain(numerator: Side, denominator: Side, measured: float) -> list[Move]:
    """The way from the ratio of FLOPs to the measured ratio of times; empty where a side has no times."""
    if not numerator.product_seconds or not denominator.product_seconds:
        return []
    ratio = sum(numerator.flops.values()) / sum(denominator.flops.values())
    moves: list[Move] = []

    def move(reason: str, to: float) -> None:
        nonlocal ratio
        moves.append(Move(reason, to - ratio, to))
        ratio = to

    move("the optimizer's products, set aside", numerator.product_flops / denominator.product_flops)
    per_flop = denominator.product_seconds / denominator.product_flops
    for part in numerator.products:
        seconds, flops = numerator.seconds.get(part, 0.0), numerator.flops[part]
        speed = flops * per_flop / seconds if seconds else 0.0
        excess = (seconds - flops * per_flop) / denominator.product_seconds
        move(f"'{part}' runs at {speed:.2f} of {denominator.name}'s rate", ratio + excess)
    shares = [1 - side.product_seconds / side.whole for side in (numerator, denominator)]
    move(
        f"parts without products are {shares[0]:.0%} of {numerator.name}'s step and {shares[1]:.0%} of "
        f"{denominator.name}'s",
        numerator.whole / denominator.whole,
    )
    move("the pass that times parts, against the windows", measured)
    return moves


def sentence(
    numerator: str, denominator: str, measured: float, flops: float, moves: list[Move], bounds: str = ""
) -> str:
    """What a step takes of time and FLOPs, whether the two agree, and the largest reasons if not."""
    begin = (
        f"a training step of {numerator} takes {measured:.3g}×{bounds} the time and {flops:.3g}× the FLOPs "
        f"of one of {denominator}"
    )
    gap = measured / flops - 1
    if abs(gap) < AGREEMENT:
        text = f"{begin}: wall clock follows the FLOPs within {AGREEMENT:.0%}"
    else:
        text = f"{begin}: wall clock lies {abs(gap):.0%} {'above' if gap > 0 else 'below'} the FLOPs"
    if not moves:
        return f"{text}; the parts of a step were not timed, so no reason is given"
    largest = sorted(moves, key=lambda move: abs(move.change), reverse=True)[:_NAMED]
    named = [f"{move.change:+.2f} {move.reason}" for move in largest if abs(move.change) >= _LEAST]
    return f"{text}; of the way between the two ratios, {'; '.join(named)}" if named else text
