"""The clock of the cost experiment: windows of several contenders in turn, and the parts of a step.

Covers the order of windows, the rate within one, whether windows agree, the ratio of two contenders with
its interval, and a pass that times the marked parts of a step. What the contenders do, and what else ran on
the machine meanwhile, is the business of bench.py and disturbance.py.

A window: warm-up steps, which are dropped; the device synchronised and the clock read; half of the steps,
one evaluation between synchronised edges, the other half; the device synchronised and the clock read. The
steady rate is that between the two readings, less the evaluation's own time. Neither reading nor
synchronisation lies inside the steps, so what is launched ahead of the device stays so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from twinscope.lab.statistics import mean_interval
from twinscope.propagation.stages import observed

#: Seconds from an arbitrary origin.
Clock = Callable[[], float]


@dataclass(frozen=True)
class Contender:
    """What is timed: one optimizer step per call, and one evaluation per call."""

    name: str
    step: Callable[[], object]
    evaluate: Callable[[], object]


@dataclass(frozen=True)
class Span:
    """One window: seconds between the two readings of the clock, the evaluation among them, and steps."""

    steps: int
    seconds: float
    evaluation_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds per training step, evaluation subtracted."""
        return (self.seconds - self.evaluation_seconds) / self.steps

    def wall_seconds(self, eval_every: int) -> float:
        """Seconds per training step of a run that evaluates once in ``eval_every`` steps."""
        return self.step_seconds + self.evaluation_seconds / eval_every


@dataclass(frozen=True)
class Ratio:
    """Median over pairs of windows, with the interval of :func:`ratio_of_pairs`; ``n`` pairs."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PartTimes:
    """Seconds per step of each marked part, and of the whole step while the parts are timed."""

    parts: dict[str, float]
    whole: float

    @property
    def unmarked(self) -> float:
        """Seconds per step outside every mark."""
        return self.whole - sum(self.parts.values())


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """What waits until the device has done all that was launched; nothing on a CPU."""
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(chosen)


def sweep_order(names: Sequence[str], sweeps: int) -> list[tuple[int, str]]:
    """Sweeps over the names, each the reverse of the one before: A B, B A, A B, …

    A drift that is linear in time then weighs alike on every name over two sweeps.
    """
    return [(sweep, name) for sweep in range(sweeps) for name in (names if sweep % 2 == 0 else names[::-1])]


def time_window(
    contender: Contender,
    *,
    warmup: int,
    steps: int,
    synchronize: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> Span:
    """One window of ``steps`` steps and one evaluation after ``warmup`` steps that do not count."""
    for _ in range(warmup):
        contender.step()
    synchronize()
    first = clock()
    for _ in range(steps // 2):
        contender.step()
    synchronize()
    paused = clock()
    contender.evaluate()
    synchronize()
    evaluation = clock() - paused
    for _ in range(steps - steps // 2):
        contender.step()
    synchronize()
    return Span(steps, clock() - first, evaluation)


def ratio_of_pairs(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Ratio:
    """Ratio of two positive times over (n,) pairs of windows, those of one sweep.

    The interval is Student's for the mean of ``ln(a_i / b_i)``, t_{n−1} s/√n to either side, carried back
    by exp: with few windows a bootstrap covers too little. A median outside it widens it.

    Raises:
        ValueError: fewer than two pairs, unequal lengths, or a time that is not positive.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} windows do not pair")
    if min([*numerators, *denominators], default=0.0) <= 0:
        raise ValueError("a time is not positive")
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    interval = mean_interval([math.log(ratio) for ratio in ratios], level)
    middle = median(ratios)
    low, high = math.exp(interval.low), math.exp(interval.high)
    return Ratio(middle, min(low, middle), max(high, middle), len(ratios))


def spread(seconds: Sequence[float]) -> float:
    """The slowest window over the fastest, less 1: what is held against the band in which windows agree."""
    return max(seconds) / min(seconds) - 1.0


def time_parts(
    step: Callable[[], object],
    steps: int,
    synchronize: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> PartTimes:
    """Seconds of each marked part over ``steps`` steps, after one that does not count.

    Edges are synchronised, so on a GPU the parts do not overlap and their sum may exceed a plain step.
    """
    found: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        synchronize()
        began = clock()
        try:
            yield
        finally:
            synchronize()
            found[name] = found.get(name, 0.0) + clock() - began

    def observer(name: str) -> AbstractContextManager[object]:
        return timed(name)

    step()
    synchronize()
    began = clock()
    with observed(observer):
        for _ in range(steps):
            step()
    synchronize()
    whole = clock() - began
    return PartTimes({name: seconds / steps for name, seconds in found.items()}, whole / steps)
