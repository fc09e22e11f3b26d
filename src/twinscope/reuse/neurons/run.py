"""The verb ``neurons``: a sealed plan in, duplicated neurons of four layers with their evidence out.

Covers holding the plan and the model against the seal, stops, resume, and the record. In which order the
model is read is in stages.py, what the rows say in findings.py, budgets and parity in ``reuse/sitting.py``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.heap import give_back_freed, map_large_blocks
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run
from twinscope.models.streamed.model import open_streamed
from twinscope.reuse.neurons.activations import gated_layer
from twinscope.reuse.neurons.settings import NeuronSettings
from twinscope.reuse.neurons.sizes import planned_mib
from twinscope.reuse.neurons.stages import (
    confirm_pairs,
    decide_needed,
    decide_pairs,
    draw_null,
    open_heldout,
    replace_by_themselves,
    replace_pairs,
    search_layers,
)
from twinscope.reuse.neurons.study import Study, residuals
from twinscope.reuse.plan import PLAN_FILE, Plan, load_plan, plan_bytes
from twinscope.reuse.sitting import Clock, held_model, hold_parity, memory_of, set_numerics


class NeuronsConfig(Section):
    """What a run stores beside its copy of the plan."""

    name: str
    sealed: str


@dataclass(frozen=True)
class Prepared:
    """A plan that holds, the folder of its model, and what it fixes of neurons."""

    plan: Plan
    folder: Path
    settings: NeuronSettings


def prepare(plan: Plan, quiet: bool = False) -> Prepared:
    """Find the model of a plan and hold it against the seal; set this process's numerics.

    Raises:
        ConfigError: the plan fixes nothing of neurons, or its device cannot be used here.
        DataError: the model is gone, or changed since the plan was sealed.
    """
    try:
        settings = NeuronSettings.model_validate(plan.content["neurons"])
        layers = [int(layer) for layer in plan.content["neuron_layers"]]
    except (KeyError, TypeError, ValueError, ValidationError):
        raise ConfigError(
            f"the plan '{plan.content.get('name')}' fixes nothing of neurons: make one with twinscope plan"
        ) from None
    if not layers:
        raise ConfigError(f"the plan '{plan.content.get('name')}' names no layer whose neurons are compared")
    folder = held_model(plan, quiet)
    set_numerics(plan.content["compute"]["device"], plan.content["compute"]["threads"])
    return Prepared(plan, folder, settings)


def create_run(prepared: Prepared, root: Path) -> Run:
    """Make the run directory with provenance and a copy of the plan."""
    plan = prepared.plan
    model = plan.content["model"]
    provenance = collect(
        seeds=[plan.seed],
        data={"plan": plan.sealed, "model": model["sha256"]},
        compute={**plan.content["compute"], "deterministic": True, "tf32": False},
    )
    provenance["model"] = {
        "folder": str(prepared.folder),
        "weights": model["weights"],
        "planted": model["planted"],
        "told_by": model["told_by"],
    }
    config = NeuronsConfig(name=plan.content["name"], sealed=plan.sealed)
    run = Run.create(root, "neurons", config.name, to_toml(config), provenance)
    try:
        write_atomic(run.path / PLAN_FILE, plan_bytes(plan))
    except BaseException:
        run.close()
        raise
    return run


def neurons(prepared: Prepared, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Compare neurons, or go on comparing, into ``run`` and write its result; returns the record.

    Raises:
        ConfigError: the model's MLPs have no neurons of the form compared here, or the planned peak is beyond
            the budget.
        Stopped: a signal or a budget ended it; what is in the journal is not done again.
        DataError: the model's files changed or are damaged.
    """
    plan, settings = prepared.plan, prepared.settings
    name = plan.content["name"]
    map_large_blocks()
    clock = Clock(plan.budgets, settings.minutes.model_dump())
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        with Progress(name, quiet) as progress:

            def before(stage: str, done: int, total: int) -> None:
                progress.update(done, total, stage)
                give_back_freed()
                clock.check()
                if run.stop_requested:
                    raise Stopped(f"stopped by {run.stop_requested} in the part '{stage}', unit {done}")

            parity = hold_parity(run, plan, prepared.folder, clock, before)
            with open_streamed(prepared.folder, None, plan.content["compute"]["device"]) as lm:
                layers = {number: gated_layer(lm, number) for number in sorted(plan.content["neuron_layers"])}
                study = Study(lm, plan, settings, layers, run, clock.timing)
                planned = _planned(study)
                with clock.stage("calibration"):
                    known = residuals(study, "calibration", before)
                with clock.stage("search"):
                    matches = search_layers(study, known, before)
                with clock.stage("null"):
                    maxima = draw_null(study, known, before)
                    pairs = decide_pairs(study, known, matches, maxima, before)
                with clock.stage("replacement"):
                    replace_pairs(study, known, pairs, "calibration", before)
                del known, matches
                decide_needed(study, pairs)
                opened = open_heldout(study)
                with clock.stage("heldout"):
                    fresh = residuals(study, "heldout", before)
                    confirm_pairs(study, fresh, pairs, before)
                with clock.stage("replacement"):
                    replace_pairs(study, fresh, pairs, "heldout", before)
                    replace_by_themselves(study, fresh, pairs, before)
                del fresh
                # It takes the library of distributions, which the passes have no room for.
                from twinscope.reuse.neurons.findings import findings

                found, claims, own_rows = findings(study, pairs, parity["passed"], _sealed(run, plan))
        rows.extend(own_rows)
        model = plan.content["model"]
        peak, memory = memory_of(run, clock, plan.budgets)
        summary = {
            "sealed": plan.sealed,
            "heldout_opened_at": opened,
            "model": (
                f"{model['source']}, {model['family']}, {model['layers']} layers, width {model['width']}"
            ),
            "weights": model["weights"],
            "planted": model["planted"],
            "parity": {"passed": parity["passed"], "detail": parity["detail"]},
            "notes": list(lm.notes),
            **found,
            "peak_rss_mib": peak,
            "planned_peak_mib": planned,
            "memory": memory,
        }
        return summary, claims

    stored = {"name": name, "sealed": plan.sealed, "plan": plan.content}
    return carry_out(run, stored, work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a comparison under the plan it was started with."""
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    config = parse_config(mapping, NeuronsConfig, origin=str(run.path / "config.toml"))
    return neurons(prepare(load_plan(run.path / PLAN_FILE, config.sealed), quiet), run, quiet)


def _planned(study: Study) -> float:
    """The peak as planned by the process that began the run, before its first pass.

    Raises:
        ConfigError: it is beyond the budget of the plan.
    """
    row = study.find("planned")
    if row is None:
        peak = planned_mib(study.lm, study.layers, study.settings, study.plan.texts)
        limit = study.plan.budgets.process_mib
        if peak > limit:
            raise ConfigError(
                f"the comparison would take about {peak:.0f} MiB, over reuse.budgets.process_mib = "
                f"{limit:g}: plan with a larger one, or with fewer or shorter texts"
            )
        # Beside the timing: it counts what this process holds, which differs from sitting to sitting.
        row = {"key": "planned", "timing": {"planned_peak_mib": peak}}
        study.run.append(row)
    return row["timing"]["planned_peak_mib"]


def _sealed(run: Run, plan: Plan) -> bool:
    """Whether the run's own copy of the plan is still the one that was sealed."""
    try:
        return load_plan(run.path / PLAN_FILE, plan.sealed).content == plan.content
    except DataError:
        return False
