"""The spectrometer proves itself on the run's own model before it speaks.

A null (backpropagation against itself) and planted leaks of known size go through the same code as the
measurement. They are planted in the rebuild's displacement step, with one round and the energy read, in the
instrument's precision. Each block has a gain of its own that makes RMS(d_l) equal to eps^(3/4) times the
typical size of its states, so that neither the format nor curvature contributes in any of them.

The instrument passes on every healthy model but for a family-wise probability of 1e-4: the null and the
thresholds are exact constructions, and the interval of the shrink has the level 1 - 1e-4/L for L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from twinscope.lab.errors import RunFailed
from twinscope.lab.statistics import Undefined, ratio_jackknife
from twinscope.models.decoder import Decoder
from twinscope.propagation.gradients import ParameterNames
from twinscope.propagation.leak.block_vectors import gram
from twinscope.propagation.leak.paired import (
    Batch,
    Products,
    arm_vectors,
    compare,
    reference_vectors,
    safe_displacement,
)
from twinscope.propagation.leak.window import edges
from twinscope.propagation.nudged import Start, begin
from twinscope.propagation.phases import Displace, displaced
from twinscope.propagation.settings import EPSettings

#: Batches that the null and the shrink are measured on; the thresholds take the first alone.
BATCHES = 4
FAMILY_WISE = 1e-4
SHRINK = 0.10
#: The gain of the shrink over the profile of the self-test.
SHRINK_GAIN = 4.0
#: What a finite nudge may move the shrink's projection by, added to both sides of its interval.
ALLOWANCE = 2e-3
#: The estimate itself may miss by this much, so that a wide interval cannot hide a wrong reading.
TOLERANCE = 0.02
BAND = 0.02
#: The gains the larger threshold is sought with; a quarter of each for the smaller one.
GAINS = tuple(2.0**exponent for exponent in range(7))
FACTOR, SLACK = 4.0, 0.25
SCALES = (1.0 / FACTOR, 1.0)


@dataclass(frozen=True)
class Part:
    """One half of the self-test and what it read."""

    passed: bool
    detail: str


@dataclass(frozen=True)
class SelfTest:
    """Both halves."""

    null: Part
    planted: Part

    @property
    def passed(self) -> bool:
        return self.null.passed and self.planted.passed


def self_test(model: Decoder, names: ParameterNames, batches: Sequence[Batch], precision: str) -> SelfTest:
    """Null and planted leaks on the first batches; ``precision`` is the instrument's, "fp32" or "fp64"."""
    settings = EPSettings(beta=1.0, rounds=1, fused=False, read="energy").model_copy(
        update={"precision": precision}
    )
    nulls: list[Products] = []
    shrunk: list[np.ndarray] = []
    squares: list[list[float]] = []
    lows: list[list[float | None]] = []
    profile: list[float] = []
    for index, batch in enumerate(batches[:BATCHES]):
        _, reference = reference_vectors(model, names, batch, precision)
        _, again = reference_vectors(model, names, batch, precision)
        nulls.append(compare(again, reference))
        squares.append([float(gram([r], [r])[0, 0]) for r in reference])
        start = begin(model, *batch, precision)
        if index == 0:
            profile = _profile(start, safe_displacement(precision))
            lows = _planted_lows(start, settings, profile, reference, squares[0])
        # Against the sound arm, as for the thresholds; displaced more, so that rounding weighs less.
        gains = [SHRINK_GAIN * h for h in profile]
        planted_db, sound_db = (
            compare(arm_vectors(start, settings, gains, 1, 1.0, displace), reference).db
            for displace in (_shrinking, displaced)
        )
        shrunk.append(np.subtract(planted_db, sound_db))
    thresholds = _judge_thresholds(lows)
    shrink = _judge_shrink(shrunk, np.array(squares))
    planted = Part(thresholds.passed and shrink.passed, f"{thresholds.detail}; {shrink.detail}")
    return SelfTest(_judge_null(nulls), planted)


def dropping(thresholds: Sequence[float]) -> Displace:
    """A displacement step that loses every element below ``thresholds[index] * RMS(a_l)``."""

    def displace(index: int, output: Tensor, adjoint: Tensor, factor: float) -> Tensor:
        floor = thresholds[index] * adjoint.double().square().mean().sqrt()
        kept = (adjoint * factor).abs() >= floor
        return displaced(index, output, adjoint.where(kept, 0.0), factor)

    return displace


def _shrinking(index: int, output: Tensor, adjoint: Tensor, factor: float) -> Tensor:
    return displaced(index, output, adjoint, (1.0 - SHRINK) * factor)


def _profile(start: Start, displacement: float) -> list[float]:
    """The gain per block, at beta 1, that makes RMS(d_l) ``displacement`` times the states' typical size.

    Typical is the median over tokens of the RMS over channels: a few tokens of some models are so large
    that they alone would set a plain RMS.
    """
    gains = []
    for index, (adjoint, z) in enumerate(zip(start.adjoints, start.free.states[1:], strict=True), 1):
        force = start.problem.count * float(adjoint.double().square().mean().sqrt())
        size = float(z.double().square().mean(-1).sqrt().median())
        if not (math.isfinite(force) and force > 0 and math.isfinite(size) and size > 0):
            raise RunFailed(f"the force on block {index} or its state is zero or not finite: check the model")
        gains.append(displacement * size / force)
    return gains


def _half_energy(adjoint: Tensor) -> float:
    """The size, in units of RMS, below which the elements hold half of the energy of a force.

    About 1.5 for normal elements and far more for the heavy tails of pretrained models, where a fixed
    multiple of the RMS would lose nothing that matters.
    """
    energies = adjoint.double().square().flatten().sort().values
    below = energies.cumsum(0)
    return float((energies[int((below < below[-1] / 2).sum())] / energies.mean()).sqrt())


def _planted_lows(
    start: Start,
    settings: EPSettings,
    profile: Sequence[float],
    reference: Sequence[Tensor],
    squares: Sequence[float],
) -> list[list[float | None]]:
    """``gain_low`` of each block under the threshold and under 4 times it, in units of ``profile``.

    What is read is the planted arm less the sound arm at the same gain: pretrained models curve so early that
    their own leak would hide the planted one.
    """

    def read_at(gain: float, displace: Displace) -> list[float]:
        vectors = arm_vectors(start, settings, [gain * h for h in profile], 1, 1.0, displace)
        return compare(vectors, reference).db

    sound = {gain: read_at(gain, displaced) for gain in {s * g for s in SCALES for g in GAINS}}
    found = []
    for scale in SCALES:
        displace = dropping(
            [
                scale * _half_energy(adjoint) * h * start.problem.count
                for adjoint, h in zip(start.adjoints, profile, strict=True)
            ]
        )
        gains = [scale * gain for gain in GAINS]
        read = [np.subtract(read_at(gain, displace), sound[gain]) for gain in gains]
        lows: list[float | None] = []
        for block, square in enumerate(squares):
            if square > 0:
                lower, _, _ = edges(gains, [db[block] / square for db in read], BAND)
                lows.append(lower.value)
        found.append(lows)
    return found


def _judge_null(nulls: Sequence[Products]) -> Part:
    largest = max(max(abs(value) for value in (*one.db, *one.dd)) for one in nulls)
    detail = f"BP against BP on {len(nulls)} batches: largest product {largest:.3g}, must be exactly 0"
    return Part(largest == 0.0, detail)


def _judge_thresholds(lows: Sequence[Sequence[float | None]]) -> Part:
    ratios = [b / a if a and b else None for a, b in zip(*lows, strict=True)]
    passed = all(ratio is not None and abs(ratio / FACTOR - 1) <= SLACK for ratio in ratios)
    known = [ratio for ratio in ratios if ratio is not None]
    span = f"{min(known):.3f} to {max(known):.3f}" if known else "none"
    missing = f", no gain_low in {len(ratios) - len(known)} blocks" if len(known) < len(ratios) else ""
    return Part(
        passed,
        f"thresholds 1 : {FACTOR:g}: gain_low ratio {span} over {len(ratios)} blocks{missing}, "
        f"must be {FACTOR:g} within {SLACK:.0%}",
    )


def _judge_shrink(shrunk: Sequence[np.ndarray], squares: np.ndarray) -> Part:
    tops = np.array(shrunk)
    level = 1.0 - FAMILY_WISE / squares.shape[1]
    passed, estimates, widest = True, [], 0.0
    for block in range(squares.shape[1]):
        found = ratio_jackknife(tops[:, block], squares[:, block], level)
        if isinstance(found, Undefined):
            continue
        estimates.append(found.estimate)
        widest = max(widest, (found.high - found.low) / 2)
        inside = found.low - ALLOWANCE <= -SHRINK <= found.high + ALLOWANCE
        passed &= inside and abs(found.estimate + SHRINK) <= TOLERANCE
    span = f"{min(estimates):.5f} to {max(estimates):.5f}" if estimates else "none"
    return Part(
        passed,
        f"shrink of {SHRINK:.0%}: projection {span} over {len(estimates)} blocks, must hold {-SHRINK:g} "
        f"within the interval of level 1 - {FAMILY_WISE:g}/{squares.shape[1]} (at most ±{widest:.2g}) "
        f"plus {ALLOWANCE:g} for the finite nudge, and lie within {TOLERANCE:g}",
    )
