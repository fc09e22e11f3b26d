"""The verb ``scan``: a sealed plan in, a run with a level of evidence for every pair out.

Covers holding the plan and the model against the seal, stops, resume, and the record. In which order the
model is read is in scan.py, what the rows say in scan_findings.py, budgets and parity in sitting.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.heap import give_back_freed, map_large_blocks
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run
from twinscope.models.streamed.model import StreamedLM, open_streamed
from twinscope.reuse.plan import (
    PLAN_FILE,
    Pair,
    Plan,
    load_plan,
    pair_of,
    plan_bytes,
)
from twinscope.reuse.reuse_config import split_pair
from twinscope.reuse.scan import (
    Scan,
    calibrate_pairs,
    confirm_pairs,
    first_text,
    open_heldout,
    planned_mib,
    rows_of,
)
from twinscope.reuse.scan_findings import pair_findings
from twinscope.reuse.sitting import Clock, held_model, hold_parity, memory_of, set_numerics
from twinscope.reuse.texts import SPLITS


class ScanConfig(Section):
    """What a scan run stores beside its copy of the plan: the seal, and the pairs added after it."""

    name: str
    sealed: str
    exploratory: list[str] = Field(default_factory=list)
    others: int = 2


@dataclass(frozen=True)
class Prepared:
    """A plan that holds, the folder of its model, and the scan's own settings."""

    plan: Plan
    folder: Path
    config: ScanConfig


def prepare(plan: Plan, exploratory: Sequence[str] = (), quiet: bool = False) -> Prepared:
    """Find the model of a plan and hold it against the seal; set this process's numerics.

    Raises:
        ConfigError: there is no pair, or an exploratory one is none, or is in the plan already.
        DataError: the model is gone, or changed since the plan was sealed.
    """
    content = plan.content
    sealed_pairs = {frozenset((pair.left, pair.right)) for pair in plan.pairs}
    for text in exploratory:
        try:
            sites = split_pair(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if frozenset(sites) in sealed_pairs:
            raise ConfigError(f"--pair {text}: the plan holds this pair already")
    if not plan.pairs and not exploratory:
        raise ConfigError(
            f"the plan '{content['name']}' names no pairs of modules (it is for twinscope neurons): plan "
            "with pairs, or give --pair"
        )
    folder = held_model(plan, quiet)
    set_numerics(content["compute"]["device"], content["compute"]["threads"])
    others = max((len(c.others) for pair in plan.pairs for c in pair.comparisons), default=2)
    config = ScanConfig(
        name=content["name"], sealed=plan.sealed, exploratory=list(exploratory), others=max(1, others)
    )
    return Prepared(plan, folder, config)


def create_run(prepared: Prepared, root: Path) -> Run:
    """Make the run directory with the scan's settings, provenance and a copy of the plan."""
    content = prepared.plan.content
    model = content["model"]
    provenance = collect(
        seeds=[prepared.plan.seed],
        data={"plan": prepared.plan.sealed, "model": model["sha256"]},
        compute={**content["compute"], "deterministic": True, "tf32": False},
    )
    provenance["model"] = {
        "folder": str(prepared.folder),
        "weights": model["weights"],
        "planted": model["planted"],
        "told_by": model["told_by"],
    }
    run = Run.create(root, "scan", prepared.config.name, to_toml(prepared.config), provenance)
    try:
        write_atomic(run.path / PLAN_FILE, plan_bytes(prepared.plan))
    except BaseException:
        run.close()
        raise
    return run


def scan(prepared: Prepared, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Scan, or go on scanning, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: a signal or a budget ended it; what is in the journal is not done again.
        DataError: the model's files changed or are damaged.
    """
    plan = prepared.plan
    map_large_blocks()
    clock = Clock(plan.budgets)
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        with Progress(prepared.config.name, quiet) as progress:

            def before(stage: str, done: int, total: int) -> None:
                progress.update(done, total, stage)
                give_back_freed()
                clock.check()
                if run.stop_requested:
                    raise Stopped(f"stopped by {run.stop_requested} in the part '{stage}', unit {done}")

            parity = hold_parity(run, plan, prepared.folder, clock, before)
            with open_streamed(prepared.folder, None, plan.content["compute"]["device"]) as lm:
                pairs = [*plan.pairs, *_exploratory(lm, prepared)]
                doing = Scan(lm, plan, pairs, run, clock.timing)
                planned = _planned(doing)
                with clock.stage("first-text"):
                    first_text(doing, before)
                with clock.stage("calibration"):
                    calibrations = calibrate_pairs(doing, before)
                opened = open_heldout(doing)
                with clock.stage("heldout"):
                    confirm_pairs(doing, calibrations, before)
        found = [pair_findings(plan, pair, rows_of(doing, pair), parity["passed"]) for pair in pairs]
        for pair in pairs:
            rows.extend(rows_of(doing, pair))
        summary = _summary(prepared, run, clock, parity, [item for item, _ in found])
        summary |= {"heldout_opened_at": opened, "planned_peak_mib": planned}
        return summary, [text for _, text in found]

    stored = {**prepared.config.model_dump(mode="json"), "plan": plan.content}
    return carry_out(run, stored, work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a scan under the plan it was started with."""
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    config = parse_config(mapping, ScanConfig, origin=str(run.path / "config.toml"))
    plan = load_plan(run.path / PLAN_FILE, config.sealed)
    return scan(prepare(plan, config.exploratory, quiet), run, quiet)


def _planned(scan: Scan) -> float:
    """The peak as planned by the process that began the scan, before its first pass."""
    if not scan.has("planned"):
        peak = planned_mib(scan.lm, scan.pairs, scan.plan.texts)
        # Beside the timing: it counts what this process holds, which differs from sitting to sitting.
        scan.run.append({"key": "planned", "timing": {"planned_peak_mib": peak}})
    row = scan.find("planned")
    assert row is not None
    return row["timing"]["planned_peak_mib"]


def _exploratory(lm: StreamedLM, prepared: Prepared) -> list[Pair]:
    seed, others = prepared.plan.seed, prepared.config.others
    return [pair_of(lm, text, seed, others, exploratory=True) for text in prepared.config.exploratory]


def _summary(
    prepared: Prepared,
    run: Run,
    clock: Clock,
    parity: dict[str, Any],
    pairs: list[dict[str, Any]],
) -> dict[str, Any]:
    plan = prepared.plan
    model, texts = plan.content["model"], plan.texts
    peak, memory = memory_of(run, clock, plan.budgets)
    return {
        "sealed": plan.sealed,
        "model": f"{model['source']}, {model['family']}, {model['layers']} layers, width {model['width']}",
        "weights": model["weights"],
        "planted": model["planted"],
        "parity": {"passed": parity["passed"], "detail": parity["detail"]},
        "notes": plan.content["pairs"]["notes"],
        "texts": {split: sum(text.split == split for text in texts) for split in SPLITS},
        "tokens": plan.content["texts"]["tokens"],
        "pairs": pairs,
        "peak_rss_mib": peak,
        "memory": memory,
    }
