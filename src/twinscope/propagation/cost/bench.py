"""What one training step of every arm costs: windows, parts, memory, counts, fidelity, overhead.

Covers the measurements of one shape, each a unit of work with a row of its own. What the rows add up to is
in summary.py; the run they belong to is in run.py.

What is timed is the trainer's own step: the batch is drawn and moved to the device, and ``Arm.advance``
does the rest. Every arm trains a model of its own from one start, in one process, so windows of one sweep
see the same machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from twinscope.lab.errors import RunFailed
from twinscope.lab.progress import Progress
from twinscope.lab.run import Run
from twinscope.models.source import Initial
from twinscope.propagation.compiling import compile_blocks
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.cost.counting import Counting, count_apart
from twinscope.propagation.cost.disturbance import Bounds, Disturbance, watch
from twinscope.propagation.cost.pausing import Target, paused
from twinscope.propagation.cost.peak_memory import Subject, as_row, peak_apart
from twinscope.propagation.cost.timing import (
    Contender,
    Span,
    sweep_order,
    synchronizer,
    time_parts,
    time_window,
)
from twinscope.propagation.evaluation import evaluate
from twinscope.propagation.gates import fidelity_gate
from twinscope.propagation.optimizers import build_optimizer
from twinscope.propagation.stages import stage
from twinscope.propagation.twin import Arm, estimator, train_arms
from twinscope.text.batches import Batch, heldout_batches, train_batch
from twinscope.text.datasets import Dataset

Row = dict[str, Any]
#: Names of the two contenders of the overhead.
BARE, TRAINER = "bare", "trainer"
#: Journal rows written to find what one costs.
_JOURNAL_ROWS = 20


@dataclass
class Bench:
    """Everything one shape is measured with; models are made when a window first asks for them."""

    name: str
    training: TrainConfig
    data: Dataset
    initial: Initial
    pause: Sequence[Target]
    bounds: Bounds
    _arms: dict[str, Arm] = field(default_factory=dict)
    _steps: dict[str, Any] = field(default_factory=dict)
    _heldout: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device(self.training.train.device)

    @property
    def seed(self) -> int:
        return self.training.train.seeds[0]

    def contender(self, name: str) -> Contender:
        """An arm under the clock: a step of the trainer, and the evaluation the trainer makes."""
        arm, steps = self._arm(name), self._steps[name]

        def step() -> None:
            index = next(steps)
            tokens, targets = self.batch(index)
            arm.advance(tokens, targets, self.seed, index)

        return Contender(name, step, lambda: [evaluate(arm.model, *batch) for batch in self.heldout()])

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """The training batch of a step, on the device: what the trainer draws for it."""
        with stage("data"):
            context, size = self.initial.config.context, self.training.data.batch
            return self._moved(train_batch(self.data.train, context, size, self.seed, index))

    def heldout(self) -> list[tuple[Tensor, Tensor]]:
        """The batches of one evaluation, on the device as the trainer keeps them."""
        if not self._heldout:
            context, size = self.initial.config.context, self.training.data.batch
            batches = heldout_batches(self.data.heldout, context, size, self.training.train.eval_batches)
            self._heldout.extend(self._moved(batch) for batch in batches)
        return self._heldout

    def fresh(self, name: str) -> Arm:
        """An arm at the start of its training."""
        chosen = next(arm for arm in self.training.arms if arm.name == name)
        dtype = torch.float64 if self.training.train.precision == "fp64" else torch.float32
        model = self.initial.build(self.seed, dtype, self.device)
        if self.training.train.compile:
            compile_blocks(model)
        optimizer = build_optimizer(model, self.training.optimizer, self.training.train.steps)
        return Arm(chosen, estimator(self.training, chosen), model, optimizer)

    def require_finite(self) -> None:
        """Raise RunFailed if an arm skipped a step: a step that is not taken costs less."""
        for arm in self._arms.values():
            if arm.skipped:
                raise RunFailed(
                    f"shape '{self.name}', arm '{arm.name}': {arm.skipped} steps were skipped because the "
                    "gradient was not finite, so the times are not those of a step; lower [optimizer] lr"
                )

    def close(self) -> None:
        """Let the models go."""
        self._arms.clear()
        self._steps.clear()
        self._heldout.clear()

    def _arm(self, name: str) -> Arm:
        if name not in self._arms:
            self._arms[name], self._steps[name] = self.fresh(name), count()
        return self._arms[name]

    def _moved(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, targets = (torch.from_numpy(part).to(self.device) for part in batch)
        return tokens, targets


def window_units(bench: Bench, windows: int, warmup: int, steps: int) -> list[tuple[str, Callable[[], Row]]]:
    """One unit for each window of each arm, in palindromic order; a row holds seconds per step."""

    def unit(sweep: int, position: int, name: str) -> tuple[str, Callable[[], Row]]:
        key = f"window shape={bench.name} sweep={sweep} arm={name}"

        def work() -> Row:
            span, seen, held = _watched(bench, bench.contender(name), warmup, steps)
            bench.require_finite()
            return {
                "kind": "window",
                "shape": bench.name,
                "arm": name,
                "sweep": sweep,
                "position": position,
                **_span_fields(span, bench.training.train.eval_every),
                **_seen_fields(seen),
                "paused": held,
            }

        return key, work

    order = sweep_order([arm.name for arm in bench.training.arms], windows)
    return [unit(sweep, position, name) for position, (sweep, name) in enumerate(order)]


def part_units(bench: Bench, steps: int) -> list[tuple[str, Callable[[], Row]]]:
    """One unit for each arm: seconds of each marked part of a step."""

    def unit(name: str) -> tuple[str, Callable[[], Row]]:
        def work() -> Row:
            with paused(bench.pause):
                times = time_parts(bench.contender(name).step, steps, synchronizer(bench.device))
            return {
                "kind": "parts",
                "shape": bench.name,
                "arm": name,
                "steps": steps,
                "seconds": {**times.parts, "unmarked": max(0.0, times.unmarked)},
                "step_seconds": times.whole,
            }

        return f"parts shape={bench.name} arm={name}", work

    return [unit(arm.name) for arm in bench.training.arms]


def overhead_units(
    bench: Bench, name: str, windows: int, warmup: int, steps: int, run: Run
) -> list[tuple[str, Callable[[], Row]]]:
    """The trainer's whole loop against the bare gradient and optimizer of one arm, in turn.

    The loop is ``train_arms`` itself: budget, stop request, batch, step, progress; no gate and no evaluation
    fall between its two readings of the clock. A journal row is timed apart and shared out over the steps
    between two evaluations.
    """

    def unit(sweep: int, contender: str) -> tuple[str, Callable[[], Row]]:
        def work() -> Row:
            with paused(bench.pause):
                if contender == BARE:
                    seconds, journal = _bare_seconds(bench, name, warmup, steps), 0.0
                else:
                    seconds, journal = _trainer_seconds(bench, name, warmup, steps, run)
            return {
                "kind": "overhead",
                "shape": bench.name,
                "arm": name,
                "sweep": sweep,
                "contender": contender,
                "steps": steps,
                "step_seconds": seconds,
                "journal_row_seconds": journal,
            }

        return f"overhead shape={bench.name} arm={name} sweep={sweep} contender={contender}", work

    return [unit(sweep, contender) for sweep, contender in sweep_order([BARE, TRAINER], windows)]


def memory_units(bench: Bench) -> list[tuple[str, Callable[[], Row]]]:
    """One unit for each arm: peaks of memory, found in a process of its own."""

    def unit(name: str) -> tuple[str, Callable[[], Row]]:
        def work() -> Row:
            subject = Subject(training=bench.training, shape=bench.initial.config, arm=name)
            found = peak_apart(subject)
            return {"kind": "memory", "shape": bench.name, "arm": name, **as_row(found)}

        return f"memory shape={bench.name} arm={name}", work

    return [unit(arm.name) for arm in bench.training.arms]


def count_units(bench: Bench) -> list[tuple[str, Callable[[], Row]]]:
    """One unit for the shape: FLOPs of every arm as the dispatcher counts them, in a process of its own."""

    def work() -> Row:
        training = bench.training
        settings = {
            arm.name: training.ep_settings(arm) if arm.rule == "ep" else None for arm in training.arms
        }
        counting = Counting(
            shape=bench.initial.config,
            batch=training.data.batch,
            arms=settings,
            checkpointed=[arm.name for arm in training.arms if arm.checkpointed],
            optimizer=training.optimizer,
            precision=training.train.precision,
            device=training.train.device,
            threads=training.train.threads or 1,
        )
        found = count_apart(counting)
        return {
            "kind": "count",
            "shape": bench.name,
            "flops": {name: arm.by_stage() for name, arm in found.items()},
        }

    return [(f"count shape={bench.name}", work)]


def fidelity_units(bench: Bench, batches: int) -> list[tuple[str, Callable[[], Row]]]:
    """One unit for each EP arm and batch: cosines to backpropagation in fp32, at the arms' common start."""

    def unit(name: str, index: int) -> tuple[str, Callable[[], Row]]:
        def work() -> Row:
            arm = next(arm for arm in bench.training.arms if arm.name == name)
            settings = bench.training.ep_settings(arm)
            if settings.precision == "amp":
                settings = settings.model_copy(update={"precision": "fp32"})
            dtype = torch.float64 if settings.precision == "fp64" else torch.float32
            model = bench.initial.build(bench.seed, dtype, bench.device)
            tokens, targets = bench.batch(index)
            gate = fidelity_gate(model, tokens, targets, settings, bench.seed, index)
            diagnostics = gate.gradient.diagnostics
            return {
                "kind": "fidelity",
                "shape": bench.name,
                "arm": name,
                "batch": index,
                "block_cosine": gate.cosines.blocks,
                "control_cosine": min(gate.control.blocks),
                "displacement_ratio": diagnostics.displacement_ratio,
                "residual": diagnostics.residual,
                "beta": diagnostics.beta,
            }

        return f"fidelity shape={bench.name} arm={name} batch={index}", work

    names = [arm.name for arm in bench.training.arms if arm.rule == "ep"]
    return [unit(name, index) for name in names for index in range(batches)]


def _watched(
    bench: Bench, contender: Contender, warmup: int, steps: int
) -> tuple[Span, Disturbance, list[int]]:
    threads = bench.training.train.threads or torch.get_num_threads()
    with paused(bench.pause) as held:
        end = watch(bench.bounds, threads, bench.training.train.device)
        span = time_window(contender, warmup=warmup, steps=steps, synchronize=synchronizer(bench.device))
        seen = end()
    return span, seen, [target.pid for target in held]


def _bare_seconds(bench: Bench, name: str, warmup: int, steps: int) -> float:
    """Seconds per step of gradient and optimizer alone, on one batch that is there already."""
    arm = bench.fresh(name)
    tokens, targets = bench.batch(0)

    def step(index: int) -> None:
        found = arm.gradient(arm.model, tokens, targets, bench.seed, index)
        arm.optimizer.step(found.grads, index)

    synchronize = synchronizer(bench.device)
    for index in range(warmup):
        step(index)
    synchronize()
    began = time.perf_counter()
    for index in range(warmup, warmup + steps):
        step(index)
    synchronize()
    return (time.perf_counter() - began) / steps


class _Enough(Exception):
    """The trainer took the steps that were to be timed."""


class _Stopwatch:
    """Stands in for the progress bar, which the trainer updates once before every step."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._began = self.seconds = 0.0

    def update(self, done: int, total: int, status: str = "") -> None:
        if done == self._first:
            self._began = time.perf_counter()
        elif done == self._last:
            self.seconds = time.perf_counter() - self._began
            raise _Enough


def _trainer_seconds(bench: Bench, name: str, warmup: int, steps: int, run: Run) -> tuple[float, float]:
    """Seconds per step of the trainer's loop, and of one journal row."""
    never = warmup + steps + 2
    # The evaluation before the first step lies before the first reading, so one batch of it is enough.
    settings = bench.training.train.model_copy(
        update={"steps": never, "eval_every": never, "gate_every": never, "eval_batches": 1,
                "checkpoint_every": never}
    )  # fmt: skip
    arms = [arm for arm in bench.training.arms if arm.name == name]
    config = bench.training.model_copy(update={"train": settings, "arms": arms})
    stopwatch = _Stopwatch(warmup + 1, warmup + 1 + steps)
    place = run.path / "overhead"
    try:
        with Run.create(place, "train", "overhead", "", {}) as scratch:
            with suppress(_Enough):
                train_arms(config, scratch, bench.data, bench.initial, cast(Progress, stopwatch))
            row = next(row for row in scratch.rows if row["kind"] == "eval")
            took = []
            for number in range(_JOURNAL_ROWS):
                began = time.perf_counter()
                scratch.append({**row, "key": f"again {number}"})
                took.append(time.perf_counter() - began)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return stopwatch.seconds / steps, median(took)


def _span_fields(span: Span, eval_every: int) -> Row:
    return {
        "steps": span.steps,
        "seconds": span.seconds,
        "evaluation_seconds": span.evaluation_seconds,
        "step_seconds": span.step_seconds,
        "wall_seconds": span.wall_seconds(eval_every),
    }


def _seen_fields(seen: Disturbance) -> Row:
    fields: Row = {"disturbances": seen.reasons}
    for name in ("other_cpus", "stolen_cpus", "load"):
        value = getattr(seen, name)
        fields[name] = value
        if value is None:
            fields[f"{name}_reason"] = "this system, or so short a window, does not tell"
    return fields
