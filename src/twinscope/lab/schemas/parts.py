"""What the records of every verb share, and the strict base of every part of one."""

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


class Fidelity(Strict):
    """Cosine to backpropagation with the displacement and the fixed-point residual it was read at."""

    median_cosine: Measured
    worst_cosine: Measured
    displacement: Measured
    residual: Measured
