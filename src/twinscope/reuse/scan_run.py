"""The verb ``scan``: a sealed plan in, a run with a level of evidence for every pair out.

Covers holding the plan and the model against the seal, parity, budgets and stops, resume, and the record. In
which order the model is read is in scan.py, what the rows say in scan_findings.py.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from twinscope.lab.budget import Budget, peak_rss_mib, rss_parts_mib
from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.heap import give_back_freed, map_large_blocks
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run
from twinscope.models.parity.check import find_parity
from twinscope.models.streamed.model import StreamedLM, open_streamed
from twinscope.reuse.apart import call_apart
from twinscope.reuse.identity import identify
from twinscope.reuse.plan import (
    PLAN_FILE,
    Pair,
    Plan,
    load_plan,
    pair_of,
    plan_bytes,
    require_same_model,
)
from twinscope.reuse.plan_run import folder_of
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
        ConfigError: an exploratory pair is none, or is in the plan already.
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
    folder = plan.folder
    if not folder.is_dir():
        source = content["model"]["source"]
        try:
            folder = folder_of(source, quiet)
        except ConfigError:
            raise DataError(f"the model of the plan is not at {folder} any more: bring it back") from None
    require_same_model(plan, identify(folder, _stated(plan)))
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
    clock = _Clock(plan)
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        with Progress(prepared.config.name, quiet) as progress:

            def before(stage: str, done: int, total: int) -> None:
                progress.update(done, total, stage)
                give_back_freed()
                clock.check()
                if run.stop_requested:
                    raise Stopped(f"stopped by {run.stop_requested} in the part '{stage}', unit {done}")

            parity = _parity(prepared, run, clock, before)
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


def set_numerics(device: str, threads: int) -> None:
    """What holds for the whole process: threads, deterministic kernels, no TF32.

    Raises:
        ConfigError: the device cannot be used here.
    """
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("give cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"reuse.device = '{device}' cannot be used here: {reason}") from None
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # It would fill every buffer with NaN before a matrix is read into it, at the price of the read itself.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


class _Clock:
    """Budgets of a scan, and the largest memory that its checks saw; it lives as long as one sitting."""

    def __init__(self, plan: Plan) -> None:
        limits = plan.budgets
        self._minutes = limits.stage_minutes
        self._budget = Budget(
            process_mib=limits.process_mib,
            available_mib=limits.available_mib,
            seconds=60.0 * limits.minutes,
            swap_mib_per_s=limits.swap_mib_per_s,
        )
        self._seen: dict[str, float] = {}
        self._last = time.monotonic()

    def stage(self, name: str) -> Any:
        """The part of the work with a budget of its own."""
        return self._budget.stage(name, self._minutes.seconds(name))

    def check(self) -> None:
        """Note the memory and hold every limit. Raises BudgetExceeded."""
        for part, size in rss_parts_mib().items():
            self._seen[part] = max(size, self._seen.get(part, 0.0))
        self._budget.check()

    def timing(self) -> dict[str, float]:
        """Seconds since the last row, and the memory so far; what a row keeps beside its values."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        parts = {f"{name}_mib": size for name, size in self._seen.items() if name != "total"}
        return {"seconds": seconds, "peak_rss_mib": peak_rss_mib(), **parts}


def _parity(prepared: Prepared, run: Run, clock: _Clock, before: Any) -> dict[str, Any]:
    """Whether the streamed forward equals the library's: by a receipt, or by a check in another process."""
    known = next((row for row in run.rows if row["key"] == "parity"), None)
    if known is not None:
        return known
    with clock.stage("parity"):
        before("parity", 0, 1)
        found = find_parity(prepared.folder)
        detail = "there is no receipt of a check, and the plan asks for none: run twinscope model check"
        if found is None and prepared.plan.content["compute"]["parity"] == "check":
            budgets = prepared.plan.budgets
            options = ("--budget-mib", str(budgets.process_mib), "--runs", str(run.path.parent), "--quiet")
            limit = budgets.stage_minutes.seconds("parity")
            done = call_apart("model", "check", str(prepared.folder), *options, timeout=limit)
            if done["code"] == Stopped.exit_code:
                raise Stopped(
                    f"the check of parity stopped ({done.get('error')}); plan with reuse.parity = 'receipt' "
                    "to scan without one, at the level capacity"
                )
            found = find_parity(prepared.folder)
            detail = f"the check gave no receipt: {done.get('error', 'it said nothing')}"
        if found is not None:
            detail = (
                f"final states differ by {found.hidden_difference:.1e} (at most "
                f"{found.hidden_tolerance:.0e}) and the loss by {found.nll_difference:.1e} nats (at most "
                f"{found.nll_tolerance:.0e})"
            )
        row = {"key": "parity", "passed": found is not None and found.passed, "detail": detail}
        run.append(row | {"timing": clock.timing()})
        before("parity", 1, 1)
    return row


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


def _stated(plan: Plan) -> Any:
    """What the configuration said of the weights, where the plan took its word."""
    model = plan.content["model"]
    return model["weights"] if model["told_by"] == "the configuration" else None


def _summary(
    prepared: Prepared,
    run: Run,
    clock: _Clock,
    parity: dict[str, Any],
    pairs: list[dict[str, Any]],
) -> dict[str, Any]:
    plan = prepared.plan
    model, texts = plan.content["model"], plan.texts
    timings = [row["timing"] for row in run.rows if "timing" in row] + [clock.timing()]
    largest = {
        name: max((timing[name] for timing in timings if name in timing), default=None)
        for name in ("peak_rss_mib", "anonymous_mib", "file_mib")
    }
    memory: dict[str, Any] = {"budget_mib": plan.budgets.process_mib}
    for name in ("anonymous_mib", "file_mib"):
        memory[name] = largest[name]
        if largest[name] is None:
            memory[f"{name}_reason"] = "this system does not tell the two apart"
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
        "peak_rss_mib": largest["peak_rss_mib"],
        "memory": memory,
    }
