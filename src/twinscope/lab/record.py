"""The versioned record of a finished run: its schema, and refusal of everything else.

Covers reading, checking and writing; the models of each verb are in schemas/. The configuration and
provenance inside a record are JSON objects of their own making and are not checked further. A number that
does not exist is ``null`` with a sentence in ``<key>_reason`` beside it; NaN and Infinity are refused
everywhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from twinscope.lab.config import suggestion
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.frames import frame_of, lists_of
from twinscope.lab.headlines import HEADLINES
from twinscope.lab.schemas import SCHEMAS
from twinscope.lab.schemas.parts import Envelope, Status

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
MAX_DEPTH = 64


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

    def frame(self, part: str = "rows") -> pd.DataFrame:
        """A list of the record as a pandas frame: ``rows``, ``claims``, or a list of the summary by place.

        ``frame("pairs")`` is that of ``summary["pairs"]``; objects inside an entry become columns such as
        ``train_step_ratio.median`` (``lab/frames.py``).

        Raises:
            ConfigError: the record has no such list, or pandas is not installed.
        """
        parts = {"rows": self.rows, "claims": self.claims} | lists_of(self.summary)
        if part not in parts:
            raise ConfigError(
                f"a {self.verb} record has no list '{part}'{suggestion(part, list(parts))}; it has "
                f"{', '.join(parts)}"
            )
        return frame_of(parts[part])


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
    line = HEADLINES.get(record.verb)
    return None if line is None else line(record.summary, record.rows)


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
