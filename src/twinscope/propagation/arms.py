"""One arm of a twin run: a model, its optimizer, and a step that does not know which rule it follows.

Covers a step and its counts. The order of steps, evaluations and checkpoints is in twin.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinscope.models.checkpoints import ArmCounters
from twinscope.models.decoder import Decoder
from twinscope.models.gpt import GPT
from twinscope.propagation.config import ArmSettings
from twinscope.propagation.gates import is_finite
from twinscope.propagation.gradients import Gradient
from twinscope.propagation.optimizers import Optimizer
from twinscope.propagation.stages import stage

#: One signature for every rule: model, tokens and targets (B, T), seed, step.
Estimator = Callable[[Decoder, Tensor, Tensor, int, int], Gradient]


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
