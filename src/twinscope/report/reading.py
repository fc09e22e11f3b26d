"""A run directory as plain values: its record, or, without a result, what its journal holds so far.

Covers runs of every verb that the report shows. Takes no lock and changes no file, so a report can be
made of a run that is still going.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from twinscope.lab.durable import read_journal
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.record import Record, decode, load_record, validate
from twinscope.lab.run import run_info

Row = dict[str, Any]
_COST_KINDS = (
    "window",
    "parts",
    "overhead",
    "memory",
    "count",
    "fidelity",
    "frontier_count",
    "frontier_cost",
    "frontier",
)


@dataclass(frozen=True)
class RunData:
    """What the report knows about one run; the accessors are for those of the verb ``train``.

    ``status`` is ``complete | stopped | failed``, or without a result ``running | interrupted``; the
    summary of the last two is empty, as that of a stopped or failed run may be. ``config`` is TOML text,
    ``journaled`` the number of rows in the journal of a run without a result.
    """

    path: Path
    verb: str
    name: str
    status: str
    reason: str | None
    config: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: tuple[Row, ...]
    claims: tuple[Mapping[str, str], ...]
    journaled: int = 0

    def rows_of(self, kind: str, arm: str | None = None, seed: int | None = None) -> list[Row]:
        """Rows of a kind (``eval | gate | amp_gate``) by seed and step; of one arm or seed where given."""
        order = {name: index for index, name in enumerate(self.arms)}
        chosen = (
            row
            for row in self.rows
            if row["kind"] == kind and arm in (None, row["arm"]) and seed in (None, row["seed"])
        )
        return sorted(chosen, key=lambda row: (row["seed"], row["step"], order[row["arm"]]))

    @property
    def arms(self) -> list[str]:
        """Names of the arms: in the order of the summary, else of the config, then of first appearance."""
        measured = {row["arm"] for row in self.rows}
        planned = [arm for arm in self.rules if arm in measured]
        return list(
            dict.fromkeys([*self.summary.get("arms", {}), *planned, *(row["arm"] for row in self.rows)])
        )

    @property
    def seeds(self) -> list[int]:
        """Seeds that have at least one row, ascending."""
        return sorted({row["seed"] for row in self.rows})

    @property
    def reference(self) -> str | None:
        """The arm that the others are compared with: the first that backpropagates, if any does."""
        return next((arm for arm in self.arms if self.rules.get(arm) == "bp"), None)

    @property
    def rules(self) -> Mapping[str, str]:
        """The rule of each arm, from the summary, else from the config; its default arms bear their rule."""
        found = {"ep": "ep", "bp": "bp"}
        tables = self.settings.get("arms")
        if isinstance(tables, list):
            parts = [part for part in tables if isinstance(part, Mapping)]
            found = {str(part.get("name", "")): str(part.get("rule", "")) for part in parts}
        return found | {
            name: part["rule"] for name, part in self.summary.get("arms", {}).items() if "rule" in part
        }

    @property
    def planned_steps(self) -> int | None:
        """The number of steps that the config asks for."""
        train = self.settings.get("train")
        steps = train.get("steps") if isinstance(train, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int | None:
        """The last step at which anything was evaluated."""
        return max((row["step"] for row in self.rows), default=None)

    def final(self, arm: str, key: str, seed: int | None = None) -> float | None:
        """``val_loss`` or ``val_bits_per_byte`` of an arm, over seeds or of one; None where unknown.

        Without a summary the loss is that of the last evaluation, averaged over seeds.
        """
        found = self.summary.get("arms", {}).get(arm)
        if found is not None and seed is not None:
            found = next((part for part in found.get("per_seed", ()) if part.get("seed") == seed), None)
        if found is not None and key in found:
            return found[key]
        if key != "val_loss":
            return None
        seeds = self.seeds if seed is None else [seed]
        last = [rows[-1]["val_loss"] for each in seeds if (rows := self.rows_of("eval", arm, each))]
        known = [loss for loss in last if loss is not None]
        return sum(known) / len(known) if known and len(known) == len(last) else None

    def windows(self, arm: str) -> list[Row]:
        """Windows of the paired difference to the reference; what a stopped run lacks is None or empty."""
        found = self.summary.get("difference", {}).get(arm, {}).get("windows", [])
        nothing = {"mean": None, "low": None, "high": None}
        return [
            {**nothing, "n": None, **part, "per_seed": [nothing | each for each in part.get("per_seed", [])]}
            for part in found
            if "start" in part and "end" in part
        ]

    def fidelity(self, arm: str) -> Mapping[str, Any]:
        """Median and worst cosine, least displacement and largest residual of an arm's gate points.

        From the summary where there is one, else from the rows so far; ``{}`` without gate points.
        """
        found = (self.summary.get("gate") or {}).get("per_arm", {}).get(arm)
        rows = self.rows_of("gate", arm)
        if found is not None or not rows:
            return found or {}
        cosines = [value for row in rows for value in row["block_cosine"] if value is not None]
        largest = [
            max(part) for row in rows if (part := [r for r in row["displacement_ratio"] if r is not None])
        ]
        residuals = [row["residual"] for row in rows if row["residual"] is not None]
        return {
            "median_cosine": median(cosines) if cosines else None,
            "worst_cosine": min(cosines, default=None),
            "displacement": min(largest, default=None),
            "residual": max(residuals, default=None),
        }

    def skipped(self, arm: str, seed: int | None = None) -> int:
        """Steps of an arm that were skipped because a loss or gradient was not finite."""
        found = self.summary.get("arms", {}).get(arm, {})
        if seed is not None:
            found = next((part for part in found.get("per_seed", ()) if part.get("seed") == seed), {})
        if "skipped_steps" in found:
            return found["skipped_steps"]
        seeds = self.seeds if seed is None else [seed]
        return sum(
            max((row["skipped_steps"] for row in self.rows_of("eval", arm, each)), default=0)
            for each in seeds
        )


def read_run(path: Path) -> RunData:
    """Read one run directory.

    Raises:
        ConfigError: no run is there, or its verb is unknown.
        DataError: its record, config, provenance or journal is damaged.
    """
    path = Path(path).absolute()
    if not any((path / name).is_file() for name in ("result.json", "journal.jsonl", "config.toml")):
        raise ConfigError(f"there is no run at {path}: `twinscope runs` lists them")
    info = run_info(path)
    # A stopped run that is going on again has more in its journal than in the result of its stop.
    if (path / "result.json").is_file() and info.status != "running":
        record = load_record(path)
        status: str = record.status
        journaled = 0
    else:
        record, journaled = _from_journal(path, info.verb or "train")
        status = info.status
    config, settings = _config(path, record)
    return RunData(
        path=path,
        verb=record.verb,
        name=info.name,
        status=status,
        reason=record.reason if record.status == status else None,
        config=config,
        settings=settings,
        provenance=record.provenance,
        summary=record.summary,
        rows=tuple(record.rows),
        claims=tuple(record.claims),
        journaled=journaled,
    )


def _from_journal(path: Path, verb: str) -> tuple[Record, int]:
    rows, _ = read_journal(path / "journal.jsonl")
    try:
        provenance = decode((path / "provenance.json").read_bytes())
    except FileNotFoundError:
        provenance = {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path / 'provenance.json'}: {error}") from None
    # Of other verbs the journal has rows that the record has not.
    kept = {"train": ("eval", "gate", "amp_gate"), "cost": _COST_KINDS}.get(verb, ())
    shown = [row for row in rows if row.get("kind") in kept]
    # Checked as the record of a stopped run, whose summary may lack anything.
    record = validate(
        {
            "schema": f"twinscope.{verb}/1",
            "status": "stopped",
            "reason": "no result was written",
            "config": {},
            "provenance": provenance,
            "summary": {},
            "rows": shown,
            "claims": [],
        }
    )
    return record, len(rows)


def _config(path: Path, record: Record) -> tuple[str, Mapping[str, Any]]:
    try:
        text = (path / "config.toml").read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        settings = _without_nulls(record.config)
        return tomli_w.dumps(settings), settings
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path / 'config.toml'}: {error}") from None


def _without_nulls(value: Any) -> Any:
    # TOML has no null: a setting that is not set is not there.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value
