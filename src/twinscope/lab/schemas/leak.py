"""The record of the verb ``leak``."""

from __future__ import annotations

from typing import Literal

from twinscope.lab.schemas.parts import Measured, Strict, Text


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
