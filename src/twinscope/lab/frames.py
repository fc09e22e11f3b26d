"""Parts of a record as pandas tables, for notebooks.

Covers a list of objects as a frame with a column for every number, nested objects flattened. pandas is
imported on the first call; reading records needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinscope.lab.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


def frame_of(objects: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One line for each object, one column for each value: ``a.b`` for the value ``b`` of an object ``a``.

    Lists stay lists in their cells. A number that does not exist is NaN, with its sentence in the column
    ``<name>_reason``. Columns keep the order in which they are met.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("frames need pandas: pip install 'twinscope[frames]'") from None
    lines = [_flat(item) for item in objects]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return pd.DataFrame({name: _column(pd, [line.get(name) for line in lines]) for name in columns})


def lists_of(value: Any, place: str = "") -> dict[str, Sequence[Mapping[str, Any]]]:
    """Every list of objects inside ``value`` by its dotted place, such as ``pairs``; no empty ones."""
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        found[place] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            found |= lists_of(item, f"{place}.{key}" if place else key)
    return found


def _flat(item: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    line: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, dict) and value:
            line |= _flat(value, f"{before}{key}.")
        else:
            line[before + key] = value
    return line


def _column(pd: Any, values: list[Any]) -> Any:
    """Numbers as float64 where one is missing; anything else as it is."""
    known = [value for value in values if value is not None]
    numbers = known and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    if numbers and len(known) < len(values):
        return pd.Series(values, dtype="float64")
    return pd.Series(values, dtype=None if known else "object")
