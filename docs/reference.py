"""Writes records.md and commands.md from the schemas and the commands themselves.

    python docs/reference.py [--check]

With ``--check`` nothing is written; the exit code says whether the files are up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

DOCS = Path(__file__).parent


def records() -> str:
    """The record reference: every verb's summary and rows, field by field, and what they are made of."""
    from twinscope.lab.schemas import SCHEMAS
    from twinscope.lab.schemas.parts import Envelope

    lines = [
        "# Records",
        "",
        "`result.json` of every run, field by field. *Made from the schemas by `docs/reference.py`.*",
        "",
        "Every record is `{schema, status, config, provenance, summary, rows, claims}`, with `reason` where "
        "the status is not `complete`. A number that does not exist is `null` with a sentence in "
        "`<key>_reason` beside it; NaN and Infinity never appear. `twinscope.load(run)` reads one, and "
        'its `.frame("rows")` makes a pandas frame of any list in it.',
        "",
    ]
    claims = next(field.annotation for name, field in Envelope.model_fields.items() if name == "claims")
    lines += ["## Claims of every record", "", *_tables([get_args(claims)[0]], seen=set())]
    for verb, (summary, row) in SCHEMAS.items():
        lines += [f"## `{verb}`", ""]
        seen: set[type[BaseModel]] = set()
        lines += _tables([summary], seen)
        lines += _tables(_models(row), seen)
    return "\n".join(lines).rstrip() + "\n"


def commands() -> str:
    """The command reference: help, arguments and options of every verb."""
    from typer.main import get_command

    from twinscope.cli import app

    root = get_command(app)
    lines = [
        "# Commands",
        "",
        "*Made from the commands by `docs/reference.py`; `twinscope VERB --help` says the same.*",
        "",
        "Exit codes: 0 done · 2 wrong usage or configuration · 65 bad data or model files · 75 stopped by a "
        "budget or a signal, resumable · 1 a defect of twinscope.",
        "",
    ]
    shared: dict[str, str] = {}
    for name, verb in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(verb, "commands", None)
        for path, command in (
            [(name, verb)] if inner is None else [(f"{name} {n}", c) for n, c in inner.items()]
        ):
            lines += _command(path, command, shared)
    lines += ["## Options of every verb that has them", "", "| option | does |", "|---|---|"]
    lines += [f"| {option} | {_cell(text)} |" for option, text in shared.items()]
    return "\n".join(lines).rstrip() + "\n"


_SHARED = {"--set", "--runs", "--json", "--quiet", "--debug"}


def _command(path: str, command: Any, shared: dict[str, str]) -> list[str]:
    usage = " ".join(
        (item.metavar or item.name.upper()) + ("…" if item.nargs == -1 else "")
        for item in command.params
        if item.param_type_name == "argument"
    )
    body = inspect.cleandoc(command.help or "")
    example = re.search(r"^Example: (.*)$", body, re.MULTILINE)
    text = re.sub(r"\n*^Example: .*$", "", body, flags=re.MULTILINE)
    lines = [f"## `twinscope {path}{' ' + usage if usage else ''}`", "", " ".join(text.split()), ""]
    if example:
        lines += ["```", example[1], "```", ""]
    rows = []
    for item in command.params:
        if item.param_type_name == "argument":
            rows.append((f"`{item.metavar or item.name.upper()}`", item.help or ""))
            continue
        names = " ".join(f"`{name}`" for name in item.opts)
        if set(item.opts) & _SHARED:
            shared.setdefault(names, item.help or "")
            rows.append((names, ""))
        elif item.name != "help":
            rows.append((names, item.help or ""))
    own = [row for row in rows if row[1]]
    if own:
        lines += [
            "| argument or option | does |",
            "|---|---|",
            *(f"| {n} | {_cell(t)} |" for n, t in own),
            "",
        ]
    also = [names for names, text in rows if not text]
    return [*lines, *([f"Also {' '.join(also)}.", ""] if also else [])]


def _tables(models: list[type[BaseModel]], seen: set[type[BaseModel]]) -> list[str]:
    """A table for each model, and for every model inside it, each once."""
    lines: list[str] = []
    waiting = list(models)
    while waiting:
        model = waiting.pop(0)
        if model in seen:
            continue
        seen.add(model)
        lines += [f"### {model.__name__}", "", _prose(model), "", "| field | type |", "|---|---|"]
        for name, field in model.model_fields.items():
            lines.append(f"| `{field.alias or name}` | {_cell(_words(field.annotation))} |")
            waiting += _models(field.annotation)
        lines.append("")
    return lines


def _prose(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "")
    return " ".join(text.replace("``", "`").split())


def _models(kind: Any) -> list[type[BaseModel]]:
    """The models named anywhere in a type, in order."""
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in _models(part)]


def _words(kind: Any) -> str:
    """A type in words, as a table cell."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return " or ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _words(part) for part in parts)
    if origin is list:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"object, {_words(parts[0])} → {_words(parts[1])}"
    if origin is tuple:
        return "list of " + ", ".join(_words(part) for part in parts)
    names = {float: "number", int: "integer", str: "text", bool: "true or false", Any: "any"}
    return names.get(kind) or getattr(kind, "__name__", str(kind))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """File name → what it should hold."""
    return {"records.md": records(), "commands.md": commands()}


def main() -> int:
    stale = [name for name, text in pages().items() if not _same(DOCS / name, text)]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is not what docs/reference.py makes: run it")
        return int(bool(stale))
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
