"""The record of the verb ``scan``: relative errors, divergences in bits, shares, memory in MiB."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinscope.lab.evidence import Level, Weights
from twinscope.lab.schemas.parts import Measured, Strict, Text


class Measures(Strict):
    """How far a substitute lies from the reference on one text, or over several."""

    branch_error: Measured
    branch_error_trimmed: Measured
    norm_error: Measured
    attention_js: Measured
    attention_js_worst: Measured
    attention_topk: Measured
    attention_topk_worst: Measured
    logit_js: Measured
    logit_topk_1: Measured
    logit_topk_5: Measured
    logit_topk_10: Measured


class NullMeasures(Measures):
    """The same of a null in the substitute's place; ``other.<site>`` is a module matched in depth."""

    null: Text


class ScanRow(Measures):
    """One pair on the inputs of one of its sites (``reference``) and one text, with every null.

    The two lists run over the reference's heads.
    """

    key: Text
    pair: Text
    kind: Literal["attention", "linear_attention", "mlp", "q_norm", "k_norm"]
    exploratory: bool
    split: Literal["calibration", "heldout"]
    text: Text
    reference: Text
    substitute: Text
    tokens: int
    reference_norm: float
    attention_js_heads: list[float] | None
    attention_topk_heads: list[float] | None
    nulls: list[NullMeasures]
    timing: dict[str, Measured] = Field(default_factory=dict)


class ScanLimit(Strict):
    """The most that a distance may be, as calibration set it; ``nearest`` is the nearest null there."""

    measure: Text
    most: float
    null: Text | None
    nearest: Measured


class WorstText(Strict):
    """The text on which the branch error is largest."""

    text: Text
    branch_error: float


class ScanDirection(Strict):
    """One direction of a pair over all texts: measures pooled by split, the worst text, the limits."""

    reference: Text
    substitute: Text
    calibration: Measures
    heldout: Measures
    worst: WorstText | None
    limits: list[ScanLimit]


class ScanPair(Strict):
    """One pair: its level of evidence and why; ``failed_on`` is where it failed first.

    ``strain`` is the largest distance over its limit on calibration, by which candidates are ranked.
    """

    id: Text
    kind: Text
    left: Text
    right: Text
    exploratory: bool
    level: Level
    reason: Text
    candidate: bool
    failed_on: Literal["instrument", "calibration", "heldout"] | None
    strain: Measured
    directions: list[ScanDirection]


class ScanParity(Strict):
    """Whether the streamed forward equals the library's, by a receipt or by a check of this scan."""

    passed: bool
    detail: Text


class ScanMemory(Strict):
    """The largest resident memory that checks saw, file pages (which can be dropped) apart."""

    budget_mib: float
    anonymous_mib: Measured
    file_mib: Measured


class ScanSummary(Strict):
    """Summary of the verb ``scan``; ``sealed`` is the hash of the plan, ``heldout_opened_at`` UTC.

    ``peak_rss_mib`` is the largest of all parts of the run, resumed ones included.
    """

    sealed: Text
    heldout_opened_at: Text
    model: Text
    weights: Weights
    planted: bool
    parity: ScanParity
    notes: list[Text]
    texts: dict[Literal["calibration", "heldout"], int]
    tokens: int
    pairs: list[ScanPair]
    peak_rss_mib: float
    planned_peak_mib: float
    memory: ScanMemory
