"""The verb ``swap``: a finished scan in, a run that replaces its candidate, or a named pair, both ways.

Covers choosing the pair, sealing what is fixed before any activation is read, holding scan, plan, model and
that seal together, budgets and stops, resume, and the record. In which order the model is read is in swap.py,
what the rows say in swap_findings.py; replacing every pair of a kind is in sweep_run.py.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.heap import give_back_freed, map_large_blocks
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run
from twinscope.models.store.origin import file_sha256
from twinscope.models.streamed.model import StreamedLM, open_streamed
from twinscope.reuse.plan import PLAN_FILE, Pair, Plan, pair_of, plan_bytes
from twinscope.reuse.replacement import group_size, planned_mib
from twinscope.reuse.reuse_config import split_pair
from twinscope.reuse.scan_evidence import RESULT_FILE, ScanEvidence, evidence_of, evidence_of_copy
from twinscope.reuse.sitting import Before, Clock, held_model, hold_parity, memory_of, set_numerics
from twinscope.reuse.swap import Swap, calibrate, confirm, decided_of, first_text, open_heldout, rows_of
from twinscope.reuse.swap_findings import Ground, swap_findings
from twinscope.reuse.swap_plan import (
    SCAN_FILE,
    SWAP_FILE,
    SwapPlan,
    base_content,
    direction_of,
    load_swap,
    pair_part,
    sealed_plan,
    swap_bytes,
    variants_of,
)
from twinscope.reuse.swap_texts import fixed_texts
from twinscope.reuse.texts import SPLITS

#: Minutes of the whole run where none are given (method, 2.6), and the most that the first text may take.
MINUTES = 120.0
_FIRST_TEXT_MINUTES = 10.0


class SwapConfig(Section):
    """What a swap run stores beside its copies of the scan: the seals, and which mode resumes it."""

    name: str
    mode: Literal["pair"] = "pair"
    sealed: str
    scan_run: str = Field(min_length=1)
    scan_sealed: str


@dataclass(frozen=True)
class Prepared:
    """A scan whose files hold, its model's folder, what this run seals, and the scan's record as read."""

    evidence: ScanEvidence
    folder: Path
    sealed: SwapPlan
    config: SwapConfig
    scan_record: bytes


def prepare(
    path: Path,
    pair: str | None = None,
    texts: int | None = None,
    tokens: int | None = None,
    minutes: float = MINUTES,
    quiet: bool = False,
) -> Prepared:
    """Choose the pair and the texts, and seal them with everything else that this run fixes.

    ``path`` is the directory of a finished scan. The pair is its candidate of least strain, or the one named
    by ``pair``. ``texts`` and ``tokens`` ask for texts other than the plan's. No activation is read.

    Raises:
        ConfigError: the scan is not finished or has no candidate, the pair is none, or texts cannot be had.
        DataError: scan, plan or model changed, or contradict each other.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes {minutes:g}: give a positive number of minutes")
    record = scan_bytes(path)
    evidence = evidence_of(path)
    plan = evidence.plan
    if pair is None and not evidence.candidates:
        raise ConfigError(no_candidate(evidence))
    folder = held_model(plan, quiet)
    compute = plan.content["compute"]
    set_numerics(compute["device"], compute["threads"])
    fixed = fixed_texts(plan, folder, texts, tokens)
    budgets = plan.budgets.model_copy(update={"minutes": minutes})
    length = len(fixed.passages[0].ids)
    most = max(sum(passage.split == split for passage in fixed.passages) for split in SPLITS)
    with open_streamed(folder, None, compute["device"]) as lm:
        chosen, why = choose_pair(lm, evidence, pair)
        group, _ = group_size(lm, most, length, variants_of(chosen), budgets.process_mib)
        named = {
            "run": evidence.run,
            "sealed": plan.sealed,
            "result_sha256": hashlib.sha256(record).hexdigest(),
        }
        content = base_content(plan, named, fixed, budgets, stage_minutes(plan, minutes), group)
        sealed = sealed_plan(content | pair_part(lm, chosen, why))
    config = SwapConfig(
        name=plan.content["name"],
        sealed=sealed.sealed,
        scan_run=evidence.run,
        scan_sealed=plan.sealed,
    )
    return Prepared(evidence, folder, sealed, config, record)


def create_run(prepared: Prepared, root: Path) -> Run:
    """Make the run directory: what is sealed, the scan's plan and its record, settings and provenance."""
    plan, folder = prepared.evidence.plan, prepared.folder
    return new_run(root, prepared.config, prepared.sealed, plan, folder, prepared.scan_record)


def swap(prepared: Prepared, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Replace, or go on replacing, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: a signal or a budget ended it; what is in the journal is not done again.
        DataError: the model's files, or what this run sealed, changed or are damaged.
    """
    sealed, plan = prepared.sealed, prepared.evidence.plan
    map_large_blocks()
    clock = Clock(sealed.budgets, sealed.minutes)
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        with Progress(prepared.config.name, quiet) as progress:
            before = before_each(run, clock, progress)
            parity = hold_parity(run, plan, prepared.folder, clock, before)
            with open_streamed(prepared.folder, None, plan.content["compute"]["device"]) as lm:
                doing = Swap(lm, sealed, run, clock.timing)
                planned = _planned(doing)
                with clock.stage("first-text"):
                    first_text(doing, before)
                with clock.stage("calibration"):
                    calibrate(doing, before)
                opened = open_heldout(doing)
                with clock.stage("heldout"):
                    confirm(doing, before)
        # Levels are given to what was sealed, so the files are held against their seals once more.
        evidence = sealed_files(run, sealed, prepared.config.scan_sealed)
        ground = Ground(
            parity["passed"],
            plan.content["model"]["weights"],
            plan.content["model"]["planted"],
            evidence.of(sealed.pair.id),
        )
        comparisons = {direction_of(comparison): comparison for comparison in doing.comparisons}
        found, claims = swap_findings(
            sealed,
            {name: rows_of(doing, comparison, "heldout") for name, comparison in comparisons.items()},
            {name: decided_of(doing, comparison) for name, comparison in comparisons.items()},
            ground,
        )
        for comparison in comparisons.values():
            rows.extend(rows_of(doing, comparison))
        peak, memory = memory_of(run, clock, sealed.budgets)
        summary = {
            "mode": "pair",
            **found,
            "kinds": [],
            **shared_summary(sealed, evidence, parity),
            "heldout_opened_at": opened,
            "peak_rss_mib": peak,
            "planned_peak_mib": planned,
            "memory": memory,
        }
        return summary, claims

    stored = {**prepared.config.model_dump(mode="json"), "swap": sealed.content, "plan": plan.content}
    return carry_out(run, stored, work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a swap, in whichever mode it was begun, under what it sealed."""
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    if mapping.get("mode") == "sweep":
        from twinscope.reuse import sweep_run

        return sweep_run.resume(run, quiet)
    config = parse_config(mapping, SwapConfig, origin=str(run.path / "config.toml"))
    sealed = load_swap(run.path / SWAP_FILE, config.sealed)
    evidence = sealed_files(run, sealed, config.scan_sealed)
    plan = evidence.plan
    folder = held_model(plan, quiet)
    set_numerics(plan.content["compute"]["device"], plan.content["compute"]["threads"])
    record = scan_bytes(run.path, SCAN_FILE)
    return swap(Prepared(evidence, folder, sealed, config, record), run, quiet)


def choose_pair(lm: StreamedLM, evidence: ScanEvidence, named: str | None) -> tuple[Pair, str]:
    """The pair to replace, and why it is this one: named by the user, or the candidate of least strain.

    Raises:
        ConfigError: the named pair is none of this model, or nothing is named and there is no candidate.
    """
    if named is not None:
        try:
            split_pair(named)
        except ValueError as error:
            raise ConfigError(f"--pair {error}") from None
        pair = pair_of(lm, named, evidence.plan.seed, evidence.others, exploratory=True)
        return pair, "named by the user, so it is exploratory"
    candidates = evidence.candidates
    if not candidates:
        raise ConfigError(no_candidate(evidence))
    first = candidates[0]
    strain = first.verdict.strain
    return first.pair, (
        f"the candidate of least strain on calibration text, {strain if strain is not None else 0:.3g}, of "
        f"{len(candidates)} in the scan"
    )


def no_candidate(evidence: ScanEvidence) -> str:
    """The sentence of a scan that gives nothing to replace."""
    named = evidence.judged[0].pair.id if evidence.judged else "SITE=SITE"
    held = [item for item in evidence.judged if item.verdict.candidate]
    why = f" ({held[0].reason})" if held else ""
    return (
        f"the scan {evidence.run} has no candidate among its {len(evidence.judged)} pairs{why}, so there is "
        f"nothing to replace: name a pair with --pair {named}, which is then exploratory"
    )


def new_run(
    root: Path, config: Section, sealed: SwapPlan, plan: Plan, folder: Path, scan_record: bytes
) -> Run:
    """A run directory with everything that it seals and rests on; ``config`` are its settings."""
    model = plan.content["model"]
    provenance = collect(
        seeds=[plan.seed],
        data={"swap": sealed.sealed, "plan": plan.sealed, "model": model["sha256"]},
        compute={**plan.content["compute"], "deterministic": True, "tf32": False},
    )
    provenance["model"] = {
        "folder": str(folder),
        "weights": model["weights"],
        "planted": model["planted"],
        "told_by": model["told_by"],
    }
    run = Run.create(root, "swap", plan.content["name"], to_toml(config), provenance)
    try:
        write_atomic(run.path / SWAP_FILE, swap_bytes(sealed))
        write_atomic(run.path / PLAN_FILE, plan_bytes(plan))
        write_atomic(run.path / SCAN_FILE, scan_record)
    except BaseException:
        run.close()
        raise
    return run


def sealed_files(run: Run, sealed: SwapPlan, scan_sealed: str) -> ScanEvidence:
    """What the scan shows, from the copies in the run, once each is what was sealed.

    ``scan_sealed`` is the seal of the scan's plan as the run's settings have it.

    Raises:
        DataError: one of the files changed since the run began.
    """
    load_swap(run.path / SWAP_FILE, sealed.sealed)
    named = sealed.content["scan"]
    copy = run.path / SCAN_FILE
    try:
        digest = file_sha256(copy)
    except OSError as error:
        raise DataError(f"cannot read {copy}: {error.strerror}") from None
    if digest != named["result_sha256"] or named["sealed"] != scan_sealed:
        raise DataError(
            f"{copy} is not the record of the scan that this run began with: bring it back, or start the run "
            "again from its scan"
        )
    evidence = evidence_of_copy(run.path / PLAN_FILE, copy, named["run"])
    if evidence.plan.sealed != named["sealed"]:
        raise DataError(f"{run.path / PLAN_FILE} is not the plan of the scan {named['run']}: bring it back")
    return evidence


def scan_bytes(folder: Path, name: str = RESULT_FILE) -> bytes:
    """The record of a scan as it lies in a run directory.

    Raises:
        ConfigError: there is none.
    """
    try:
        return (folder / name).read_bytes()
    except OSError:
        raise ConfigError(f"{folder} holds no {name}: give the directory of a finished scan") from None


def stage_minutes(plan: Plan, minutes: float) -> dict[str, float]:
    """Minutes of each part: parity as the plan has it, half of the whole for calibration."""
    return {
        "parity": plan.budgets.stage_minutes.parity,
        "first-text": min(minutes, _FIRST_TEXT_MINUTES),
        "calibration": minutes / 2,
        "heldout": minutes,
    }


def before_each(run: Run, clock: Clock, progress: Progress) -> Before:
    """What happens before each unit of work: progress, freed memory, every limit, and a stop asked for."""

    def before(stage: str, done: int, total: int) -> None:
        progress.update(done, total, stage)
        give_back_freed()
        clock.check()
        if run.stop_requested:
            raise Stopped(f"stopped by {run.stop_requested} in the part '{stage}', unit {done}")

    return before


def shared_summary(sealed: SwapPlan, evidence: ScanEvidence, parity: Mapping[str, Any]) -> dict[str, Any]:
    """What the summaries of both modes say alike: seals, scan, model, parity, margin, texts."""
    content, model, texts = sealed.content, sealed.content["model"], sealed.content["texts"]
    return {
        "sealed": sealed.sealed,
        "sealed_at": sealed.sealed_at,
        "scan": {
            "sealed": evidence.plan.sealed,
            "run": evidence.run,
            "candidates": [item.pair.id for item in evidence.candidates],
        },
        "model": f"{model['source']}, {model['family']}, {model['layers']} layers, width {model['width']}",
        "weights": model["weights"],
        "planted": model["planted"],
        "parity": {"passed": parity["passed"], "detail": parity["detail"]},
        "margin": content["margin"],
        "power": content["power"],
        "texts": {split: sum(item["split"] == split for item in texts["passages"]) for split in SPLITS},
        "texts_from": texts["from"],
        "tokens": texts["tokens"],
        "bos": texts["bos"]["policy"],
        "bytes_counted": texts["bytes_counted"],
    }


def _planned(doing: Swap) -> float:
    """The peak as planned by the process that began the run, before its first pass."""
    row = doing.find("planned")
    if row is None:
        tokens, group = doing.plan.content["texts"]["tokens"], doing.plan.content["group"]
        peak = planned_mib(doing.lm, group, tokens, variants_of(doing.plan.pair))
        # Beside the timing: it counts what this process holds, which differs from sitting to sitting.
        doing.run.append({"key": "planned", "timing": {"planned_peak_mib": peak}})
        row = doing.find("planned")
    assert row is not None
    return row["timing"]["planned_peak_mib"]
