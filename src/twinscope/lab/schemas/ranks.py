"""The record of the verb ``ranks``: several ranks against one, on the same batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinscope.lab.schemas.parts import Measured, Strict, Text


class RanksArm(Strict):
    """One arm in one precision: the largest relative difference of a block, and what rounding may make."""

    arm: Text
    rule: str
    precision: Text
    worst_difference: float
    tolerance: float
    passed: bool


class RanksSummary(Strict):
    """Summary of the verb ``ranks``; ``texts`` of a batch per rank, ``hosts`` once each."""

    ranks: int
    backend: Text
    device: Text
    hosts: list[Text]
    texts: list[int]
    batches: int
    passed: bool
    arms: list[RanksArm]


class RanksRow(Strict):
    """One arm on one batch: differences relative to one rank alone, the loss's in nats per token.

    ``block_difference`` runs over blocks, ``outer_difference`` is of embedding and readout together;
    ``summed_bytes`` is the size of the gradient that is summed over ranks.
    """

    key: Text
    kind: Literal["gradient"]
    arm: Text
    rule: str
    precision: Text
    batch: int
    block_difference: list[float]
    outer_difference: Measured
    loss_difference: float
    beta_difference: Measured
    tolerance: float
    summed_bytes: int
    passed: bool
    timing: dict[str, Measured] = Field(default_factory=dict)
