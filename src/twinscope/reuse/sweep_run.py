"""The mode ``sweep`` of the verb ``swap``: a finished scan in, every site of a kind replaced by every other.

Covers choosing what is swept, sealing it before any activation is read, budgets and stops, resume, and the
record. Which passes are made is in sweep.py, what the rows say in sweep_findings.py, and what both modes
share in swap_run.py. A sweep needs no candidate: it tries every pair, and is exploratory for that reason.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from twinscope.lab.config import Section, parse_config
from twinscope.lab.errors import ConfigError
from twinscope.lab.heap import map_large_blocks
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.run import Run
from twinscope.models.streamed.model import open_streamed
from twinscope.reuse.scan_evidence import ScanEvidence, evidence_of
from twinscope.reuse.sitting import Clock, held_model, hold_parity, memory_of, set_numerics
from twinscope.reuse.swap import DECIDED, Swap, open_heldout
from twinscope.reuse.swap_plan import SCAN_FILE, SWAP_FILE, SwapPlan, base_content, load_swap, sealed_plan
from twinscope.reuse.swap_run import (
    MINUTES,
    before_each,
    new_run,
    scan_bytes,
    sealed_files,
    shared_summary,
    stage_minutes,
)
from twinscope.reuse.swap_texts import fixed_texts
from twinscope.reuse.sweep import (
    Stacks,
    choose_sites,
    choose_stacks,
    matrices_of,
    planned_mib,
    site_rows,
    sweep_part,
    sweep_split,
)
from twinscope.reuse.sweep_findings import changes, kinds_findings, needed_texts, sweep_claim, sweep_level
from twinscope.reuse.texts import SPLITS, Split

_NO_PAIR = "a sweep replaces every site by every other and judges no pair"


class SweepConfig(Section):
    """What a sweep stores beside its copies of the scan: the seals, and that it is one."""

    name: str
    mode: Literal["sweep"] = "sweep"
    sealed: str
    scan_run: str = Field(min_length=1)
    scan_sealed: str


@dataclass(frozen=True)
class PreparedSweep:
    """A scan whose files hold, its model's folder, what is sealed for this run, and the scan's record."""

    evidence: ScanEvidence
    folder: Path
    swap: SwapPlan
    config: SweepConfig
    scan_record: bytes


def prepare(
    path: Path,
    kinds: Sequence[str] | None = None,
    every: int = 1,
    texts: int | None = None,
    tokens: int | None = None,
    minutes: float = MINUTES,
    quiet: bool = False,
) -> PreparedSweep:
    """Choose what is swept and on which texts, and seal it with everything else that this run fixes.

    ``path`` is the directory of a finished scan; its candidates play no part. Of each of ``kinds`` (attention
    and MLPs if none are named) every ``every``-th site is swept. ``texts`` and ``tokens`` as for a swap. No
    activation is read.

    Raises:
        ConfigError: the scan is not finished, there is nothing to sweep, texts cannot be had, or the planned
            peak is beyond the budget.
        DataError: scan, plan or model changed, or contradict each other.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes {minutes:g}: give a positive number of minutes")
    if every < 1:
        raise ConfigError(f"--every {every}: give 1 for every site, 2 for every other one, and so on")
    record = scan_bytes(path)
    evidence = evidence_of(path)
    plan = evidence.plan
    folder = held_model(plan, quiet)
    compute = plan.content["compute"]
    set_numerics(compute["device"], compute["threads"])
    fixed = fixed_texts(plan, folder, texts, tokens)
    budgets = plan.budgets.model_copy(update={"minutes": minutes})
    length = len(fixed.passages[0].ids)
    most = max(sum(passage.split == split for passage in fixed.passages) for split in SPLITS)
    with open_streamed(folder, None, compute["device"]) as lm:
        matrices, notes = choose_sites(lm, kinds, every)
        # Beside every other site, no update at all stands in the place.
        stacks = choose_stacks(lm, most, length, max(len(matrix.sites) for matrix in matrices))
        peak = planned_mib(lm, stacks, length)
        if peak > budgets.process_mib:
            raise ConfigError(
                f"the sweep would take about {peak:.0f} MiB, over the plan's reuse.budgets.process_mib = "
                f"{budgets.process_mib:g}: choose shorter texts with --tokens, or raise the budget in the "
                "plan"
            )
    named = {
        "run": evidence.run,
        "sealed": plan.sealed,
        "result_sha256": hashlib.sha256(record).hexdigest(),
    }
    content = base_content(plan, named, fixed, budgets, stage_minutes(plan, minutes), stacks.texts)
    swap = sealed_plan(content | sweep_part(matrices, stacks, every, notes))
    config = SweepConfig(
        name=plan.content["name"], sealed=swap.sealed, scan_run=evidence.run, scan_sealed=plan.sealed
    )
    return PreparedSweep(evidence, folder, swap, config, record)


def create_run(prepared: PreparedSweep, root: Path) -> Run:
    """Make the run directory: what is sealed, the scan's plan and its record, settings and provenance."""
    return new_run(
        root,
        prepared.config,
        prepared.swap,
        prepared.evidence.plan,
        prepared.folder,
        prepared.scan_record,
    )


def sweep(prepared: PreparedSweep, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Sweep, or go on sweeping, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: a signal or a budget ended it; what is in the journal is not done again.
        DataError: the model's files, or what this run sealed, changed or are damaged.
    """
    sealed, plan = prepared.swap, prepared.evidence.plan
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
                with clock.stage("calibration"):
                    sweep_split(doing, "calibration", before)
                    needed = _decided(doing)
                opened = open_heldout(doing)
                with clock.stage("heldout"):
                    sweep_split(doing, "heldout", before)
        # What the record says rests on what was sealed, so the files are held against their seals once more.
        evidence = sealed_files(run, sealed, prepared.config.scan_sealed)
        matrices, model = matrices_of(sealed), sealed.content["model"]
        calibration, heldout = (_changes(doing, split) for split in SPLITS)
        kinds = kinds_findings(matrices, calibration, heldout, needed, sealed.margin)
        for matrix in matrices:
            for split in SPLITS:
                rows.extend(site_rows(doing, matrix, split))
        ground = parity["passed"], model["weights"], model["planted"]
        shared = shared_summary(sealed, evidence, parity)
        peak, memory = memory_of(run, clock, sealed.budgets)
        summary = {
            "mode": "sweep",
            **shared,
            "level": sweep_level(*ground),
            "pair": None,
            "pair_reason": _NO_PAIR,
            "directions": [],
            "kinds": kinds,
            "notes": _notes(sealed),
            "heldout_opened_at": opened,
            "peak_rss_mib": peak,
            "planned_peak_mib": planned,
            "memory": memory,
        }
        return summary, [sweep_claim(kinds, shared["texts"]["heldout"], sealed.margin, *ground)]

    stored = {**prepared.config.model_dump(mode="json"), "swap": sealed.content, "plan": plan.content}
    return carry_out(run, stored, work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a sweep under what it sealed."""
    origin = str(run.path / "config.toml")
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not valid TOML: {error}") from None
    config = parse_config(mapping, SweepConfig, origin=origin)
    sealed = load_swap(run.path / SWAP_FILE, config.sealed)
    evidence = sealed_files(run, sealed, config.scan_sealed)
    folder = held_model(evidence.plan, quiet)
    compute = evidence.plan.content["compute"]
    set_numerics(compute["device"], compute["threads"])
    record = scan_bytes(run.path, SCAN_FILE)
    return sweep(PreparedSweep(evidence, folder, sealed, config, record), run, quiet)


def _changes(doing: Swap, split: Split) -> list[Any]:
    return [changes(matrix, site_rows(doing, matrix, split)) for matrix in matrices_of(doing.plan)]


def _decided(doing: Swap) -> list[list[list[int]]]:
    """The texts that each replacement needs, from calibration, written down before held-out text opens."""
    needed = needed_texts(_changes(doing, "calibration"), doing.plan.margin)
    # A row that is there already has to be this one.
    doing.keep({"key": DECIDED, "needed": needed})
    return needed


def _planned(doing: Swap) -> float:
    """The peak as planned by the process that began the run, before its first pass."""
    row = doing.find("planned")
    if row is None:
        content = doing.plan.content
        stacks = Stacks(content["group"], content["stack"])
        peak = planned_mib(doing.lm, stacks, content["texts"]["tokens"])
        # Beside the timing: it counts what this process holds, which differs from sitting to sitting.
        doing.run.append({"key": "planned", "timing": {"planned_peak_mib": peak}})
        return peak
    return row["timing"]["planned_peak_mib"]


def _notes(sealed: SwapPlan) -> list[str]:
    content = sealed.content
    notes = list(content["notes"])
    if content["every"] > 1:
        notes.append(f"of each kind one site in {content['every']} was swept, from the first")
    return notes
