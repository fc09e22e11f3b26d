"""The twin loop: arms trained side by side from one start, on the same batches, with the same optimizer.

The loop does not know which rule an arm follows. Covers stepping, evaluation, gates, checkpoints and exact
resume; the summary is made in comparison.py, the configuration is in config.py. Over several ranks all run
this loop on the same batches, each with its texts of them; rank 0 alone writes and reads the run directory.

Order within a step index, which resume relies on: stop or checkpoint, evaluation, gate, then the step
itself. So a checkpoint always holds the state before the evaluation of its step; a resumed run repeats that
evaluation, and the journal refuses a row that differs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinscope.lab.budget import Budget
from twinscope.lab.errors import DataError, RunFailed, Stopped
from twinscope.lab.progress import Progress
from twinscope.lab.run import Run
from twinscope.models.checkpoints import (
    ArmCounters,
    find_checkpoints,
    prune,
    read_manifest,
    read_part,
    write_checkpoint,
)
from twinscope.models.decoder import Decoder
from twinscope.models.gpt import GPT
from twinscope.models.source import Initial
from twinscope.models.weights import load_into, model_tensors
from twinscope.propagation.compiling import compile_blocks
from twinscope.propagation.config import ArmSettings, TrainConfig
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.evaluation import heldout_losses
from twinscope.propagation.gates import amp_gate, fidelity_gate, gate_values, is_finite, require
from twinscope.propagation.gradients import Gradient
from twinscope.propagation.optimizers import Optimizer, build_optimizer
from twinscope.propagation.ranks.follower import Follower
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.stages import stage
from twinscope.text.batches import Batch, heldout_batches, train_batch
from twinscope.text.datasets import Dataset

#: One signature for every rule: model, tokens and targets (B, T), seed, step.
Estimator = Callable[[Decoder, Tensor, Tensor, int, int], Gradient]


def estimator(config: TrainConfig, arm: ArmSettings, ranks: Ranks | None = None) -> Estimator:
    """The gradient function of one arm; with ``ranks``, each takes its texts of the batch it is given."""
    if arm.rule == "bp":
        return lambda model, tokens, targets, seed, step: bp_gradient(
            model, tokens, targets, precision=config.train.precision, recompute=arm.checkpointed, ranks=ranks
        )
    settings = config.ep_settings(arm)
    return lambda model, tokens, targets, seed, step: ep_gradient(
        model, tokens, targets, settings, seed, step, diagnose=False, ranks=ranks
    )


@dataclass
class Arm:
    """One arm of one seed: its model, its optimizer, and what it counted since the last evaluation."""

    settings: ArmSettings
    gradient: Estimator
    model: GPT
    optimizer: Optimizer
    skipped: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.settings.name

    def advance(self, tokens: Tensor, targets: Tensor, seed: int, step: int) -> None:
        """One optimizer step; a loss or gradient that is not finite changes nothing and is counted."""
        began = time.perf_counter()
        found = self.gradient(self.model, tokens, targets, seed, step)
        if is_finite(found):
            with stage("optimizer"):
                self.optimizer.step(found.grads, step)
            self.losses.append(found.loss)
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        self.seconds += time.perf_counter() - began

    def counters(self) -> ArmCounters:
        return ArmCounters(
            rule=self.settings.rule,
            skipped=self.skipped,
            skipped_in_a_row=self.skipped_in_a_row,
            losses=self.losses,
        )

    def count_from(self, counters: ArmCounters) -> None:
        """Go on from what an arm counted when it was saved."""
        self.skipped, self.skipped_in_a_row = counters.skipped, counters.skipped_in_a_row
        self.losses = list(counters.losses)


def train_arms(
    config: TrainConfig,
    run: Run | Follower,
    data: Dataset,
    initial: Initial,
    progress: Progress,
    ranks: Ranks | None = None,
    kept: frozenset[str] = frozenset(),
) -> None:
    """Train every arm for every seed, journaling evaluations and gates; continues from checkpoints.

    With ``ranks``, all call this, rank 0 with the run and the weights of ``initial``. ``kept`` are keys of
    rows that stay as they are though the work behind them is done again.

    Raises:
        RankLost: another rank is gone.
        Stopped: a signal or a budget ended the run early; the state is saved and the run can be resumed.
        RunFailed: an arm skipped too many steps in a row.
        ConfigError: amp may not train this model (see gates.py).
        DataError: a checkpoint is damaged, or the text does not fit the context.
    """
    settings = config.train
    seconds = None if settings.minutes is None else 60.0 * settings.minutes
    budget = Budget(process_mib=settings.memory_mib, seconds=seconds)
    context, device = initial.config.context, torch.device(settings.device)
    heldout = heldout_batches(data.heldout, context, config.data.batch, settings.eval_batches)
    held = [_to_device(batch, device) for batch in heldout]
    for position, seed in enumerate(settings.seeds):
        arms = _Seed(config, run, data, initial, device, held, seed, ranks, kept)
        arms.train(budget, progress, position)


class _Seed:
    """The arms of one seed, from their last checkpoint to the last step."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run | Follower,
        data: Dataset,
        initial: Initial,
        device: torch.device,
        heldout: list[tuple[Tensor, Tensor]],
        seed: int,
        ranks: Ranks | None,
        kept: frozenset[str],
    ) -> None:
        self.config, self.run, self.data, self.initial = config, run, data, initial
        self.device, self.heldout, self.seed = device, heldout, seed
        self.ranks, self.kept = ranks, kept
        self.arms = [self._arm(arm) for arm in config.arms]
        self.start = self._restore() if ranks is None else self._restore_all(ranks)

    def train(self, budget: Budget, progress: Progress, position: int) -> None:
        settings = self.config.train
        total = settings.steps * len(settings.seeds)
        if self.start == 0 and settings.precision == "amp":
            self._require_amp()
        for step in range(self.start, settings.steps + 1):
            last = step == settings.steps
            self._stop_if_asked(step, budget)
            if step > self.start and (last or step % settings.checkpoint_every == 0):
                self._save(step)
            if last or step % settings.eval_every == 0:
                self._evaluate(step)
            if last or step % settings.gate_every == 0:
                self._gate(step)
            progress.update(position * settings.steps + step, total, self._status(step))
            if last:
                break
            tokens, targets = self._batch(step)
            for arm in self.arms:
                arm.advance(tokens, targets, self.seed, step)
                if arm.skipped_in_a_row >= settings.max_skipped_in_a_row:
                    raise RunFailed(
                        f"arm '{arm.name}', seed {self.seed}: the gradient was not finite in "
                        f"{arm.skipped_in_a_row} steps in a row up to step {step}; lower [optimizer] lr, "
                        "or the displacement or gain of this arm"
                    )
        if not isinstance(self.run, Follower):
            prune(self.run.checkpoints, self.seed, settings.keep_checkpoints)

    def _arm(self, settings: ArmSettings) -> Arm:
        dtype = torch.float64 if self.config.train.precision == "fp64" else torch.float32
        model = self.initial.build(self.seed, dtype, self.device)
        if self.config.train.compile:
            compile_blocks(model)
        optimizer = build_optimizer(model, self.config.optimizer, self.config.train.steps)
        make = estimator if self.ranks is None else partial(estimator, ranks=self.ranks)
        return Arm(settings, make(self.config, settings), model, optimizer)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        context, batch = self.initial.config.context, self.config.data.batch
        return _to_device(train_batch(self.data.train, context, batch, self.seed, step), self.device)

    def _evaluate(self, step: int) -> None:
        for arm in self.arms:
            losses = heldout_losses(arm.model, self.heldout, self.ranks)
            finite = all(math.isfinite(loss) for loss in losses)
            row: dict[str, Any] = {
                "key": f"eval seed={self.seed} step={step} arm={arm.name}",
                "kind": "eval",
                "seed": self.seed,
                "step": step,
                "arm": arm.name,
                "val_losses": [loss if math.isfinite(loss) else None for loss in losses],
                "skipped_steps": arm.skipped,
                "timing": {},
            }
            if finite:
                row["val_loss"] = float(np.mean(losses))
            else:
                row |= {"val_loss": None, "val_loss_reason": "a held-out loss is not finite"}
                row["val_losses_reason"] = row["val_loss_reason"]
            if arm.losses:
                row["train_loss"] = float(np.mean(arm.losses))
                row["timing"] = {"seconds_per_step": arm.seconds / len(arm.losses)}
            else:
                row |= {
                    "train_loss": None,
                    "train_loss_reason": "no step was taken since the last evaluation",
                }
            self._append(row)
            arm.losses, arm.seconds = [], 0.0

    def _gate(self, step: int) -> None:
        tokens, targets = self._batch(step)
        for arm in self.arms:
            if arm.settings.rule != "ep":
                continue
            settings = self.config.ep_settings(arm.settings)
            gate = fidelity_gate(arm.model, tokens, targets, settings, self.seed, step, self.ranks)
            row = {
                "key": f"gate seed={self.seed} step={step} arm={arm.name}",
                "kind": "gate",
                "seed": self.seed,
                "step": step,
                "arm": arm.name,
            }
            self._append(row | gate_values(gate))

    def _require_amp(self) -> None:
        tokens, targets = self._batch(0)
        for arm in self.arms:
            if arm.settings.rule == "ep":
                settings = self.config.ep_settings(arm.settings)
                gate = amp_gate(arm.model, tokens, targets, settings, self.seed, 0, self.ranks)
                self._append(
                    {
                        "key": f"amp_gate seed={self.seed} arm={arm.name}",
                        "kind": "amp_gate",
                        "seed": self.seed,
                        "step": 0,
                        "arm": arm.name,
                        "amp_cosine": gate.amp,
                        "full_cosine": gate.full,
                        "passed": gate.passed,
                    }
                )
                require(gate, arm.name)

    def _append(self, row: dict[str, Any]) -> None:
        if row["key"] not in self.kept:
            self.run.append(row)

    def _stop_if_asked(self, step: int, budget: Budget) -> None:
        stop: Stopped | None = None
        try:
            budget.check()
            if self.run.stop_requested:
                stop = Stopped(f"stopped by {self.run.stop_requested} at step {step} of seed {self.seed}")
        except Stopped as error:
            stop = error
        if self.ranks is not None:
            stop = self.ranks.agree_to_stop(stop)
        if stop is not None:
            if step > self.start:
                self._save(step)
            raise stop

    def _save(self, step: int) -> None:
        if self.ranks is not None:
            for arm in self.arms:
                what = f"weights of arm '{arm.name}' at step {step} of seed {self.seed}"
                self.ranks.require_same(arm.model.parameters(), what)
        if isinstance(self.run, Follower):
            return
        write_checkpoint(
            self.run.checkpoints,
            seed=self.seed,
            step=step,
            shape=self.initial.config,
            data=self.data.hashes,
            arms={arm.name: arm.counters() for arm in self.arms},
            parts={
                f"{arm.name}.{part}": tensors
                for arm in self.arms
                for part, tensors in (
                    ("weights", model_tensors(arm.model)),
                    ("optimizer", arm.optimizer.state()),
                )
            },
            journal_rows=len(self.run.rows),
        )
        prune(self.run.checkpoints, self.seed, self.config.train.keep_checkpoints)

    def _restore_all(self, ranks: Ranks) -> int:
        """:meth:`_restore` on rank 0, and what it gives, down to the weights, on all."""

        def restored() -> str:
            step = self._restore()
            return json.dumps([step, [arm.counters().model_dump() for arm in self.arms]])

        step, counted = json.loads(ranks.lead(restored))
        for arm, counters in zip(self.arms, counted, strict=True):
            ranks.spread(model_tensors(arm.model).values())
            state = arm.optimizer.state()
            ranks.spread(state.values())
            if not ranks.leads:
                arm.optimizer.load_state(state)
                arm.count_from(ArmCounters.model_validate(counters))
        return step

    def _restore(self) -> int:
        """Load the last checkpoint of this seed, if there is one, and return its step."""
        assert isinstance(self.run, Run)
        found = find_checkpoints(self.run.checkpoints, self.seed)
        if not found:
            return 0
        _, step, path = found[-1]
        try:
            manifest = read_manifest(path)
            if len(self.run.rows) < manifest.journal_rows:
                raise DataError(
                    f"{self.run.path / 'journal.jsonl'} has {len(self.run.rows)} rows where {path.name} was "
                    f"saved after {manifest.journal_rows}: rows were lost"
                )
            for arm in self.arms:
                if arm.name not in manifest.arms or manifest.shape != self.initial.config:
                    raise DataError(f"the checkpoint {path} is of other arms or another shape")
                load_into(arm.model, read_part(path, manifest, f"{arm.name}.weights"))
                arm.optimizer.load_state(read_part(path, manifest, f"{arm.name}.optimizer"))
                arm.count_from(manifest.arms[arm.name])
        except DataError as error:
            raise DataError(
                f"{error}; delete {path} and resume again: training repeats what that checkpoint held"
            ) from None
        return step

    def _status(self, step: int) -> str:
        done = [arm.losses[-1] for arm in self.arms if arm.losses]
        shown = (
            "  ".join(f"{arm.name} {arm.losses[-1]:.3f}" for arm in self.arms if arm.losses) if done else ""
        )
        return f"seed {self.seed}  step {step}  {shown}"


def _to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, targets = (torch.from_numpy(part).to(device) for part in batch)
    return tokens, targets
