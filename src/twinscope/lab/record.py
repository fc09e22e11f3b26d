"""The versioned record of a finished run: its schema, and refusal of everything else.

Covers the envelope that every verb shares, the summary and rows of each verb, and reading, checking and
writing. A verb is added by adding its two models to :data:`SCHEMAS`. The configuration and provenance
inside a record are JSON objects of their own making and are not checked further. A number that does not
exist is ``null`` with a sentence in ``<key>_reason`` beside it; NaN and Infinity are refused everywhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from twinscope.lab.errors import DataError
from twinscope.lab.evidence import ClaimLevel

VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
MAX_DEPTH = 64

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


@dataclass(frozen=True)
class Record:
    """A checked record: plain JSON values, exactly as they were given."""

    verb: str
    version: int
    status: Status
    reason: str | None
    config: dict[str, Any]
    provenance: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    claims: list[dict[str, str]]


def validate(record: Mapping[str, Any]) -> Record:
    """Check a record held in memory.

    Raises:
        DataError: a value that is no JSON, NaN or Infinity, an unknown verb, version or field, a missing
            field of a complete record, a wrong type, a null without its reason, or a repeated row key.
    """
    try:
        content = json.loads(encode(dict(record)))
    except ValueError as error:
        raise DataError(f"the record cannot be written: {error}") from None
    return _checked(content, "the record")


def load_record(path: Path | str) -> Record:
    """Read and check a ``result.json``, given by its own path or by that of its run directory.

    Raises:
        DataError: no such file, more than 256 MiB, not JSON, or refused by :func:`validate`.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "result.json"
    try:
        # Reading one byte too many tells a file that is too large, even one that has no size of its own.
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise DataError(
            f"there is no record at {path}: give a run directory that has a result.json"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read the record {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES // 2**20} MiB, which no record is: check the path")
    try:
        return _checked(decode(data), str(path))
    except ValueError as error:
        raise DataError(f"{path} is not a JSON record: {error}") from None


def dump(record: Record) -> bytes:
    """The record as the bytes of ``result.json``; :func:`load_record` gives an equal record back."""
    stopped = {"reason": record.reason} if record.reason is not None else {}
    content = {
        "schema": f"twinscope.{record.verb}/{record.version}",
        "status": record.status,
        **stopped,
        "config": record.config,
        "provenance": record.provenance,
        "summary": record.summary,
        "rows": record.rows,
        "claims": record.claims,
    }
    return encode(content, indent=1) + b"\n"


def headline(record: Record) -> str | None:
    """One line that says what came out, or why it did not; None where a verb has no such line."""
    if record.status != "complete":
        return record.reason
    if record.verb == "train":
        losses = {name: arm["val_loss"] for name, arm in record.summary["arms"].items()}
        shown = [f"{name} {'none' if loss is None else format(loss, '.3f')}" for name, loss in losses.items()]
        return f"held-out nats per token: {', '.join(shown)}"
    if record.verb == "leak":
        at_one = [row["projection"] for row in record.rows if row["gain"] == row["beta_sign"] == 1]
        known = [value for value in at_one if value is not None]
        if known:
            span = f"{min(known):+.3f} to {max(known):+.3f}"
            return f"leak at gain 1: projection {span} over {len(at_one)} blocks"
    if record.verb == "collapse":
        found = record.summary
        if found["slope"] is None:
            return f"no slope: {found['slope_reason']}"
        low, high = found["slope_low"], found["slope_high"]
        span = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        return (
            f"slope {found['slope']:.3f}{span} over {found['n_points']} blocks of {found['n_models']} "
            f"models; gain_low times ratio {found['constant']:.2f} unit roundoffs"
        )
    return None


def encode(value: Any, indent: int | None = None) -> bytes:
    """JSON bytes in ASCII; floats keep every bit.

    Raises:
        ValueError: something in ``value`` is no JSON, not finite or too deep; the message says where.
    """
    fault = _json_fault(value)
    if fault:
        raise ValueError(fault)
    separators = (",", ":") if indent is None else None
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def decode(data: bytes) -> Any:
    """The value of JSON bytes.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or a number that is not finite.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # A literal such as 1e999 is legal JSON and parses to infinity.
    fault = _json_fault(value)
    if fault:
        raise ValueError(fault)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it contains {name}, which is not a number")


def _json_fault(value: Any, where: str = "", depth: int = 0) -> str | None:
    if depth > MAX_DEPTH:
        return "it is nested too deeply"
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return (
            None if math.isfinite(value) else f"{where or 'the value'} is {float(value)}, which is not finite"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{where or 'the value'} has the key {key!r}, which is no string"
            if fault := _json_fault(item, f"{where}.{key}" if where else key, depth + 1):
                return fault
        return None
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if fault := _json_fault(item, f"{where}[{index}]", depth + 1):
                return fault
        return None
    return f"{where or 'the value'} is of the type {type(value).__name__}, which is no JSON"


def _checked(content: Any, origin: str) -> Record:
    if not isinstance(content, dict):
        raise DataError(f"{origin} is not a record: a record is a JSON object")
    verb = _verb(content.get("schema"), origin)
    summary_model, row_type = SCHEMAS[verb]
    _validated(TypeAdapter(Envelope), content, origin, "")
    status, reason = content["status"], content.get("reason")
    if status == "complete" and "reason" in content:
        raise DataError(f"{origin}: 'reason' says why a run did not complete, but the status is 'complete'")
    if status != "complete" and not reason:
        raise DataError(f"{origin}: the status is '{status}', so 'reason' must say why")
    summary = _without_reasons(content["summary"], origin, "summary")
    _validated(TypeAdapter(summary_model), summary, origin, "summary", partial=status != "complete")
    rows = _without_reasons(content["rows"], origin, "rows")
    _validated(TypeAdapter(list[row_type]), rows, origin, "rows")  # pyright: ignore[reportInvalidTypeForm]
    seen: set[str] = set()
    for row in rows:
        if row["key"] in seen:
            raise DataError(f"{origin}: two rows have the key '{row['key']}'")
        seen.add(row["key"])
    return Record(
        verb=verb,
        version=VERSION,
        status=status,
        reason=reason,
        config=content["config"],
        provenance=content["provenance"],
        summary=content["summary"],
        rows=content["rows"],
        claims=content["claims"],
    )


def _verb(schema: Any, origin: str) -> str:
    match = re.fullmatch(r"twinscope\.([a-z]+)/([0-9]{1,6})", schema) if isinstance(schema, str) else None
    if match is None:
        raise DataError(f"{origin} is not a twinscope record: its schema is {schema!r}"[:300])
    verb, version = match[1], int(match[2])
    if verb not in SCHEMAS:
        raise DataError(f"{origin}: unknown kind of record '{verb}' (known: {', '.join(sorted(SCHEMAS))})")
    if version != VERSION:
        raise DataError(
            f"{origin}: version {version} of '{verb}' records is unknown here (known: {VERSION}): "
            "read it with the twinscope that wrote it"
        )
    return verb


def _validated(adapter: TypeAdapter[Any], value: Any, origin: str, place: str, partial: bool = False) -> None:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        faults = [
            item
            for item in error.errors(include_url=False, include_input=False)
            # What a run did not reach is missing, at any depth; what it did reach is checked all the same.
            if not (partial and item["type"] == "missing")
        ]
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise DataError(
                f"{origin}: {'; '.join(_complaint(item, place) for item in faults[:3])}{more}"
            ) from None


def _complaint(item: Any, place: str) -> str:
    where = ".".join(str(part) for part in ((place, *item["loc"]) if place else item["loc"]))
    if item["type"] == "extra_forbidden":
        return f"unknown field '{where}'"
    if item["type"] == "missing":
        return f"'{where}' is missing"
    return f"'{where}' is refused: {item['msg'][0].lower()}{item['msg'][1:]}"


def _without_reasons(value: Any, origin: str, where: str) -> Any:
    """A copy without the ``<key>_reason`` of each null, once every null is found to have one."""
    if isinstance(value, list):
        return [_without_reasons(item, origin, f"{where}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        explained = key.removesuffix("_reason")
        if explained != key and explained in value:
            if not _holds_null(value[explained]):
                raise DataError(
                    f"{origin}: '{where}.{key}' explains a null, but '{where}.{explained}' is none"
                )
            continue
        reason = value.get(f"{key}_reason")
        if _holds_null(item) and not (isinstance(reason, str) and reason.strip()):
            raise DataError(
                f"{origin}: '{where}.{key}' is null without a sentence in '{key}_reason' beside it"
            )
        result[key] = _without_reasons(item, origin, f"{where}.{key}")
    return result


def _holds_null(value: Any) -> bool:
    # The elements of a list share the reason of the list; an object's fields have their own.
    return value is None or (isinstance(value, list) and any(_holds_null(item) for item in value))
