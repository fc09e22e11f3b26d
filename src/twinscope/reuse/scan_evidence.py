"""What a finished scan shows, judged again from its rows: the ground on which a replacement stands.

Covers reading a scan's record, holding it against its plan and its journal, and the verdict and level of
every sealed pair. The summary of the record is not believed: a level that was written into it changes
nothing. Pairs that were added to a scan after its plan was sealed are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinscope.lab.durable import read_journal
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.evidence import Level
from twinscope.lab.record import Record, load_record
from twinscope.reuse import nulls
from twinscope.reuse.branches import Comparison
from twinscope.reuse.decision import Verdict, judge, pair_level
from twinscope.reuse.plan import PLAN_FILE, Pair, Plan, load_plan, seal

RESULT_FILE = "result.json"
_JOURNAL = "journal.jsonl"
#: What a row's key stands for must be what its fields say.
_NAMED = ("pair", "kind", "split", "text", "reference", "substitute", "exploratory")


@dataclass(frozen=True)
class Judged:
    """One sealed pair of a scan: its verdict and level as its rows give them, with the reason."""

    pair: Pair
    verdict: Verdict
    level: Level
    reason: str


@dataclass(frozen=True)
class ScanEvidence:
    """A scan's plan, the name of its run, its number of null modules, and its sealed pairs, judged again."""

    plan: Plan
    run: str
    others: int
    judged: tuple[Judged, ...]

    @property
    def candidates(self) -> list[Judged]:
        """The pairs of the level ``candidate``, that of least strain (on calibration alone) first."""
        found = [item for item in self.judged if item.level == "candidate"]
        return sorted(found, key=lambda item: (item.verdict.strain is None, item.verdict.strain or 0.0))

    def of(self, pair_id: str) -> Judged | None:
        """The sealed pair of that id, if the scan has it."""
        return next((item for item in self.judged if item.pair.id == pair_id), None)


def evidence_of(path: Path) -> ScanEvidence:
    """Read the run directory of a finished scan.

    Raises:
        ConfigError: no scan is there, or it is not finished.
        DataError: its record, plan or journal is damaged, or they contradict each other.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no run at {path}: give the directory of a finished scan")
    record = load_record(path)
    plan = _plan_of(record, path / PLAN_FILE, path / RESULT_FILE)
    journal, _ = read_journal(path / _JOURNAL)
    witness = {row["key"]: _bare(row) for row in journal}
    for row in record.rows:
        if witness.get(row["key"]) != _bare(row):
            raise DataError(
                f"{path / RESULT_FILE} and {path / _JOURNAL} differ in the row '{row['key']}': one of them "
                "was edited, so bring it back or scan again"
            )
    return _judged(record, plan, path.name, path / RESULT_FILE)


def evidence_of_copy(plan_file: Path, result_file: Path, run: str) -> ScanEvidence:
    """The same from copies of a scan's plan and record that another run keeps; their hashes are its business.

    Raises:
        DataError: as for :func:`evidence_of`.
    """
    record = load_record(result_file)
    return _judged(record, _plan_of(record, plan_file, result_file), run, result_file)


def _plan_of(record: Record, plan_file: Path, result_file: Path) -> Plan:
    if record.verb != "scan":
        raise ConfigError(
            f"{result_file} is the record of a '{record.verb}': give the directory of a finished scan"
        )
    if record.status != "complete":
        raise ConfigError(
            f"the scan at {result_file.parent} is {record.status}: finish it with twinscope resume"
        )
    plan = load_plan(plan_file, record.summary["sealed"])
    stored = record.config.get("plan")
    if not isinstance(stored, dict) or seal(stored) != plan.sealed:
        raise DataError(f"{result_file} holds another plan than {plan_file}: bring it back or scan again")
    return plan


def _judged(record: Record, plan: Plan, run: str, origin: Path) -> ScanEvidence:
    rows = {row["key"]: row for row in record.rows}
    model = plan.content["model"]
    found: list[Judged] = []
    for pair in plan.pairs:
        mine = [
            _row(rows, pair, comparison, passage, origin)
            for comparison in pair.comparisons
            for passage in plan.texts
        ]
        split = {name: [row for row in mine if row["split"] == name] for name in ("calibration", "heldout")}
        verdict = judge(split["calibration"], split["heldout"], plan.thresholds)
        level, reason = pair_level(
            verdict,
            confirmed=True,
            parity_passed=bool(record.summary["parity"]["passed"]),
            weights=model["weights"],
            planted=model["planted"],
            seal_intact=True,
        )
        found.append(Judged(pair, verdict, level, reason))
    others = record.config.get("others")
    return ScanEvidence(plan, run, others if isinstance(others, int) else nulls.OTHERS, tuple(found))


def _row(
    rows: Mapping[str, dict[str, Any]], pair: Pair, comparison: Comparison, passage: Any, origin: Path
) -> dict[str, Any]:
    """The row of one comparison on one text, if it is that, with every null that the plan gives it."""
    key = f"{pair.id}/{comparison.reference}/{passage.name}"
    row = rows.get(key)
    if row is None:
        raise DataError(f"{origin} lacks the row '{key}' of the plan: bring it back or scan again")
    meant = {
        "pair": pair.id,
        "kind": comparison.kind,
        "split": passage.split,
        "text": passage.name,
        "reference": comparison.reference,
        "substitute": comparison.substitute,
        "exploratory": False,
    }
    beside = {nulls.ZERO, nulls.MEAN, nulls.PERMUTED, nulls.SELF}
    beside |= {f"{nulls.OTHER}.{site}" for site in comparison.others}
    if any(row[name] != meant[name] for name in _NAMED) or {item["null"] for item in row["nulls"]} != beside:
        raise DataError(
            f"{origin}: the row '{key}' is not what the plan measures there: bring it back or scan again"
        )
    return row


def _bare(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "timing"}
