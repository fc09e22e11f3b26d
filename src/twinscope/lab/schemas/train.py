"""The record of the verb ``train``; losses in nats per token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twinscope.lab.schemas.parts import Fidelity, Measured, Strict, Text


class SeedResult(Strict):
    """Held-out loss of one arm at the end of one seed, in nats per token and bits per byte."""

    seed: int
    val_loss: Measured
    val_bits_per_byte: Measured
    skipped_steps: int


class ArmSummary(Strict):
    """One arm over all seeds."""

    rule: str
    val_loss: Measured
    val_bits_per_byte: Measured
    steps: int
    skipped_steps: int
    per_seed: list[SeedResult]


class SeedDifference(Strict):
    """Paired difference of held-out loss within one seed: mean and interval over held-out batches."""

    seed: int
    mean: Measured
    low: Measured
    high: Measured


class Window(Strict):
    """Paired difference over the steps ``start`` to ``end``, nats per token, from ``n`` batches."""

    start: int
    end: int
    mean: Measured
    low: Measured
    high: Measured
    n: int
    per_seed: list[SeedDifference]


class Difference(Strict):
    """One arm minus the backpropagation arm, window by window."""

    windows: list[Window]


class GateSummary(Fidelity):
    """Fidelity over all arms, and of each."""

    per_arm: dict[str, Fidelity]


class Baselines(Strict):
    """Smoothed n-gram losses on the same held-out tokens, nats per token."""

    unigram: Measured
    bigram: Measured
    trigram: Measured


class SeedScatter(Strict):
    """Standard deviation over seeds of the final held-out loss of backpropagation."""

    bp_final_sd: Measured
    n: int
    note: str


class TrainSummary(Strict):
    """Summary of the verb ``train``; losses in nats per token."""

    arms: dict[str, ArmSummary]
    difference: dict[str, Difference]
    gate: GateSummary | None
    baselines: Baselines | None
    seed_scatter: SeedScatter
    chosen: dict[str, Any] = Field(default_factory=dict)


class TrainPoint(Strict):
    """What the rows of ``train`` share."""

    key: Text
    seed: int
    step: int
    arm: Text
    timing: dict[str, Measured] = Field(default_factory=dict)


class EvalRow(TrainPoint):
    """One arm evaluated at one step; ``val_losses`` has one entry per held-out batch."""

    kind: Literal["eval"]
    train_loss: Measured
    val_loss: Measured
    val_losses: list[Measured]
    skipped_steps: int


class GateRow(TrainPoint):
    """One arm's gradient against backpropagation on the same batch and weights; lists run over blocks.

    ``outer_cosine`` is over embedding and readout together; ``control_cosine`` is the worst block cosine
    with no rounds at all, which is backpropagation.
    """

    kind: Literal["gate"]
    block_cosine: list[Measured]
    outer_cosine: Measured
    control_cosine: Measured
    displacement_ratio: list[Measured]
    residual: Measured
    beta: Measured


class AmpGateRow(TrainPoint):
    """Median block cosine to backpropagation in fp32 before training: of EP in amp, and of EP in fp32."""

    kind: Literal["amp_gate"]
    amp_cosine: Measured
    full_cosine: Measured
    passed: bool


#: One row of a ``train`` record.
TrainRow = Annotated[EvalRow | GateRow | AmpGateRow, Field(discriminator="kind")]
