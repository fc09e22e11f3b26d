"""What a table of the report is, how its cells are made, and the table of provenance.

Covers what stands in a cell and how a column sorts; no markup. The tables of a verb are in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinscope.report.reading import RunData
from twinscope.report.wording import count


@dataclass(frozen=True)
class Cell:
    """A text, the number that it sorts by (None: by its text), and why there is no number, if so."""

    text: str
    value: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``numeric[i]`` says whether column i holds numbers."""

    name: str
    caption: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def measured(
    value: float | None, form: Callable[..., str], reason: str | None = None, **options: Any
) -> Cell:
    """A number as ``form`` writes it, or a dash with its reason."""
    if value is None:
        return Cell("–", None, reason)
    return Cell(form(value, **options), value)


def given(part: Mapping[str, Any], key: str, form: Callable[..., str], **options: Any) -> Cell:
    """The number under ``key``, with the reason that stands beside a null."""
    return measured(part.get(key), form, part.get(f"{key}_reason"), **options)


def integer(value: int | None) -> Cell:
    """A count, or a dash."""
    return Cell("–") if value is None else Cell(count(value), value)


def sentence(text: str) -> str:
    """``text`` with a capital and a full stop."""
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def provenance(run: RunData) -> Table:
    """What the run depends on, flattened to dotted names."""
    rows = [(Cell("folder"), Cell(run.path.name)), (Cell("status"), Cell(run.status))]
    rows += [(Cell(key), Cell(text)) for key, text in _flattened(run.provenance)]
    return Table("provenance", "What the run depends on", ("what", "value"), (False, False), tuple(rows))


def _flattened(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            reason = value.get(f"{key}_reason")
            if item is None and reason is not None:
                yield name, f"– ({reason})"
            elif not (key.endswith("_reason") and value.get(key.removesuffix("_reason"), "") is None):
                yield from _flattened(item, name)
    elif isinstance(value, list | tuple) and all(not isinstance(item, Mapping | list) for item in value):
        yield prefix, ", ".join(_plain(item) for item in value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flattened(item, f"{prefix}.{index}")
    else:
        yield prefix, _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
