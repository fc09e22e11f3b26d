"""What a record may hold, verb by verb: strict models of summaries and rows.

A verb is added by adding its two models to :data:`SCHEMAS`. Reading, checking and writing are in record.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from twinscope.lab.evidence import ClaimLevel

Status = Literal["complete", "stopped", "failed"]
#: A number that may not exist: null then, with its reason beside it.
Measured = float | None
Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Base of every part of a record: unknown fields, coerced types and non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Claim(Strict):
    """One statement with its level of evidence and what it leaves open."""

    statement: Text
    level: ClaimLevel
    supports: Text
    does_not_support: Text


class Envelope(Strict):
    """What the records of every verb share."""

    schema_: str = Field(alias="schema")
    status: Status
    reason: Text | None = None
    config: dict[str, Any]
    provenance: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    claims: list[Claim]


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


class Fidelity(Strict):
    """Cosine to backpropagation with the displacement and the fixed-point residual it was read at."""

    median_cosine: Measured
    worst_cosine: Measured
    displacement: Measured
    residual: Measured


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


class SelfTestPart(Strict):
    """One half of the spectrometer's self-test and what it read."""

    passed: bool
    detail: Text


class LeakSelfTest(Strict):
    """Backpropagation against itself, and leaks of known size planted in the displacement step."""

    null: SelfTestPart
    planted: SelfTestPart


class LeakControl(Strict):
    """An arm that should read 0, on the same batches: projection per block with its 95 % interval."""

    description: Text
    beta: float
    displacement: float
    projection: list[Measured]
    projection_low: list[Measured]
    projection_high: list[Measured]


class LeakMemory(Strict):
    """What the group means take, as planned, in MiB; ``spilled``: those of the reference are on disk."""

    budget_mib: float
    group_means_mib: float
    spilled: bool
    arms_with_vectors: int
    vectors_mib: float


class LeakRecommendation(Strict):
    """What to train with: the displacement, the gain per block, and the same as TOML for ``train``.

    ``gain`` is relative to the beta measured with; ``config_fragment`` holds the ``[ep]`` table.
    """

    displacement: float
    gain: list[float]
    config_fragment: Text


class LeakSummary(Strict):
    """Summary of the verb ``leak``; lists run over blocks 1 … L.

    ``displacement_ratio`` is RMS(d_l) / RMS(z_l) at gain 1, mean over batches. ``gain_low`` and
    ``gain_high`` are the edges of the longest run of gains whose projection lies within ±``band``.
    """

    model: Text
    blocks: int
    parameters: list[int]
    beta: float
    displacement_ratio: list[float]
    gain_low: list[Measured]
    gain_low_low: list[Measured]
    gain_low_high: list[Measured]
    gain_high: list[Measured]
    gain_high_low: list[Measured]
    gain_high_high: list[Measured]
    odd: list[Measured]
    odd_low: list[Measured]
    odd_high: list[Measured]
    even: list[Measured]
    even_low: list[Measured]
    even_high: list[Measured]
    band: float
    batches: int
    groups: int
    instrument: Literal["fp32", "fp64"]
    study: Literal["fp32", "fp64", "amp"]
    unit_roundoff: float
    self_test: LeakSelfTest
    control: LeakControl
    recommended: LeakRecommendation | None
    memory: LeakMemory
    extended_from: list[int]
    recomputed: list[str]


class LeakRow(Strict):
    """The leak of one block under one arm: a uniform gain at +beta or -beta; fields as in the method, 1.4."""

    key: Text
    block: int
    gain: float
    beta_sign: Literal[1, -1]
    projection: Measured
    projection_low: Measured
    projection_high: Measured
    mean_projection: Measured
    mean_projection_low: Measured
    mean_projection_high: Measured
    proj_on_bp: Measured
    rel_leak: Measured
    leak_squared: Measured
    leak_squared_low: Measured
    leak_squared_high: Measured
    half_split: Measured
    cosine: Measured


class CollapseModel(Strict):
    """The law within one model: slope over its blocks, and constant in unit roundoffs."""

    model: Text
    n_points: int
    n_null: int
    slope: Measured
    slope_low: Measured
    slope_high: Measured
    constant: Measured


class CollapseControl(Strict):
    """A run at another beta: mean log distance from the law, and from the same blocks at the common beta."""

    run: Text
    model: Text
    beta: float
    n_points: int
    n_null: int
    shift: Measured
    paired_shift: Measured
    paired_largest: Measured


class CollapseControls(Strict):
    """Runs that fall on the line by a theorem; they enter no fit."""

    description: Text
    runs: list[CollapseControl]


class CollapseSummary(Strict):
    """Summary of the verb ``collapse``: log gain_low against log displacement ratio, clustered by model.

    ``constant`` is the geometric mean of gain_low times ratio in units of ``unit_roundoff``. The standard
    deviations are those of log gain_low: around the law of slope ``prediction`` and around the fitted line.
    """

    prediction: float
    slope: Measured
    slope_low: Measured
    slope_high: Measured
    slope_dof: Measured
    intercept: Measured
    constant: Measured
    constant_low: Measured
    constant_high: Measured
    n_points: int
    n_null: int
    n_models: int
    residual_sd: Measured
    fit_residual_sd: Measured
    r_squared: Measured
    beta: float
    read: Literal["linear", "energy"]
    rounds: int
    instrument: Literal["fp32", "fp64"]
    study: Literal["fp32", "fp64", "amp"]
    band: float
    unit_roundoff: float
    per_model: list[CollapseModel]
    controls: CollapseControls
    fails: list[Text]


class CollapsePoint(Strict):
    """One block of one leak run; ``residual`` is log(gain_low / predicted), ``predicted`` by the law."""

    key: Text
    run: Text
    model: Text
    width: int | None
    layers: int
    block: int
    beta: float
    role: Literal["point", "control"]
    displacement_ratio: float
    gain_low: Measured
    gain_low_low: Measured
    gain_low_high: Measured
    predicted: Measured
    residual: Measured


#: Verb -> (model of the summary, type of one row).
SCHEMAS: dict[str, tuple[type[BaseModel], Any]] = {
    "collapse": (CollapseSummary, CollapsePoint),
    "leak": (LeakSummary, LeakRow),
    "train": (TrainSummary, Annotated[EvalRow | GateRow | AmpGateRow, Field(discriminator="kind")]),
}
