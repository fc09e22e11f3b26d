"""TOML in, frozen section out: reading, overriding and refusing configurations.

Covers files, ``--set a.b=v`` overrides and the sentences for wrong keys and values. The sections
themselves live with the code that uses them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from twinscope.lab.errors import ConfigError


class Section(BaseModel):
    """Base of every configuration table: immutable; unknown keys and values of another type are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


S = TypeVar("S", bound=Section)


def read_config(path: str | Path, schema: type[S], overrides: Sequence[str] = ()) -> S:
    """Read a TOML file, apply ``a.b=value`` overrides, and validate it as ``schema``.

    Raises:
        ConfigError: the file is missing or not TOML, an override is malformed, or a key or value is
            refused; the sentence names the key and, for an unknown one, the nearest known key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no config file at {path}: give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from None
    try:
        mapping = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError covers bad syntax and numbers of thousands of digits.
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return parse_config(with_overrides(mapping, overrides), schema, origin=str(path))


def parse_config(mapping: Mapping[str, Any], schema: type[S], origin: str) -> S:
    """Validate an already parsed mapping as ``schema``; ``origin`` names it in error sentences.

    Raises:
        ConfigError: as for :func:`read_config`; every refused key is listed in one sentence.
    """
    try:
        return schema.model_validate(mapping)
    except ValidationError as error:
        complaints = [_complaint(item, schema) for item in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: {'; '.join(complaints)}") from None


def with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A deep copy of ``mapping`` with each ``a.b=value`` applied; values are read as TOML.

    A value that is no TOML is taken as a string, so ``--set optimizer.kind=adamw`` needs no quotes.
    ``arms.0.rule=bp`` reaches into a list by position.

    Raises:
        ConfigError: an override without ``=``, or a path through something that is no table.
    """
    result = _copied(mapping)
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted.strip():
            raise ConfigError(f"--set {override!r} is not of the form key.subkey=value")
        value = _override_value(text)
        *parents, last = dotted.strip().split(".")
        table: Any = result
        for parent in parents:
            if isinstance(table, dict):
                table = table.setdefault(parent, {})
            else:
                table = _item(table, parent, override)
        if isinstance(table, dict):
            table[last] = value
        else:
            _item(table, last, override)
            table[int(last)] = value
    return result


def to_toml(section: Section) -> str:
    """The section as TOML text that :func:`read_config` reads back to an equal section.

    Raises:
        ValueError: no TOML text does: a value is None where the default is another (TOML has no null),
            or the section refuses its own defaults when they are written out.
    """
    values = section.model_dump(mode="json", exclude_none=True)
    try:
        text = tomli_w.dumps(values)
        faithful = type(section).model_validate(tomllib.loads(text)) == section
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(section).__name__} cannot be read back from TOML: {error}") from error
    if not faithful:
        raise ValueError(f"{type(section).__name__} holds None where TOML would read its default")
    return text


def suggestion(word: str, known: Sequence[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest known word, or the list of known words, or ``""``."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean '{near[0]}'?)"
    return f" (known: {', '.join(sorted(known))})" if known else ""


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break inside the text would begin further keys, which must not vanish.
    return parsed["value"] if len(parsed) == 1 else text


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def _item(table: Any, position: str, override: str) -> Any:
    if isinstance(table, list) and position.isdecimal() and int(position) < len(table):
        return table[int(position)]
    raise ConfigError(f"--set {override!r}: there is nothing at '{position}' to set")


def _complaint(item: Any, schema: type[BaseModel]) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        parent = _schema_at(schema, item["loc"][:-1])
        known = list(parent.model_fields) if parent is not None else []
        return f"unknown key '{location}'{suggestion(str(item['loc'][-1]), known)}"
    if item["type"] == "missing":
        return f"'{location}' is missing"
    # pydantic prefixes messages of our own validators; the sentence is ours from there on.
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{location}: {message}" if location else message
    return f"'{location}' = {_shown(item['input'])} is refused: {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _schema_at(schema: type[BaseModel] | None, location: tuple[Any, ...]) -> type[BaseModel] | None:
    for part in location:
        if isinstance(part, int):
            continue
        field = schema.model_fields.get(str(part)) if schema is not None else None
        schema = _model_in(field.annotation) if field is not None else None
    return schema


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
