"""The record of the verb ``plan``; memory in MiB."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinscope.lab.evidence import Weights
from twinscope.lab.schemas.parts import Strict, Text


class PlannedModel(Strict):
    """The model that is sealed: one hash over its files, and what its weights are, told by whom."""

    family: Text
    layers: int
    width: int
    vocab: int
    sha256: Text
    weights: Weights
    planted: bool
    told_by: Text


class PlanSummary(Strict):
    """Summary of the verb ``plan``; ``sealed`` is the SHA-256 of the content of ``file``."""

    sealed: Text
    sealed_at: Text
    file: Text
    model: PlannedModel
    rule: Text
    notes: list[Text]
    pairs: list[Text]
    texts: int
    tokens: int
    bos: Text
    largest_overlap: float
    planned_peak_mib: float


class TextRow(Strict):
    """One text; ``overlap`` is the most that it shares with another text of the plan."""

    kind: Literal["text"]
    key: Text
    split: Literal["calibration", "heldout"]
    origin: Text
    text: str
    tokens: int
    sha256: Text
    overlap: float


class PairRow(Strict):
    """One pair; the null modules beside it when the left, and the right, site gives the inputs."""

    kind: Literal["pair"]
    key: Text
    of: Text
    left: Text
    right: Text
    others_left: list[Text]
    others_right: list[Text]


#: One row of a ``plan`` record.
PlanRow = Annotated[TextRow | PairRow, Field(discriminator="kind")]
