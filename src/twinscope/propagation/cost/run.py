"""The verb ``cost``: from a configuration to a run with a record.

Covers opening data and models, the run directory, the order of the work, and resume. What is measured is in
bench.py, what it adds up to in summary.py.

A unit of work is one window of one arm, the parts of one arm's step, one observation of memory, the counts
of one shape, one comparison of gradients. Each is a row of the journal when it is done, and what stands in
the journal is never measured again: times are not reproducible, so a resumed run keeps those it has and adds
the missing ones, in the same order, after fresh warm-up. The models start afresh then; what a step costs does
not depend on how long its model was trained. ``started`` and ``resumed`` in the provenance tell whether all
windows saw one process. FLOPs, memory and cosines come out the same either way.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinscope.lab.budget import Budget
from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect, cpu_model, utc_now
from twinscope.lab.run import Run
from twinscope.models.source import Initial, open_model
from twinscope.propagation.cost.bench import (
    Bench,
    Row,
    count_units,
    fidelity_units,
    memory_units,
    overhead_units,
    part_units,
    window_units,
)
from twinscope.propagation.cost.claims import Value
from twinscope.propagation.cost.config import CostConfig
from twinscope.propagation.cost.disturbance import Bounds
from twinscope.propagation.cost.frontier import frontier_units
from twinscope.propagation.cost.pausing import Target, targets
from twinscope.propagation.cost.summary import statements, summarize
from twinscope.propagation.train import (
    base_checkpoint,
    device_name,
    require_same_data,
    resolved_data,
    resolved_model,
    set_numerics,
)
from twinscope.text.datasets import Dataset, open_dataset

Unit = tuple[str, Callable[[], Row]]


@dataclass(frozen=True)
class Prepared:
    """A configuration with nothing left to the machine, and what it opens; ``initials`` go by shape."""

    config: CostConfig
    data: Dataset
    initials: dict[str, Initial]
    pause: list[Target]


def prepare(
    config: CostConfig, quiet: bool = False, *, folder: Path | None = None, pause: Sequence[int] = ()
) -> Prepared:
    """Open data, models and published measurements, and set this process's numerics.

    ``folder`` is the configuration's, ``pause`` are the processes to hold still during windows. A
    ``[base]`` is trained for each shape, or found in the cache.

    Raises:
        ConfigError, DataError: the configuration, a file of it, the text or a process cannot be used.
    """
    held = targets(pause)
    config = _resolved(config.with_published(folder or Path()))
    assert config.cost.threads is not None
    set_numerics(config.cost.device, config.cost.threads, "cost.device")
    data = open_dataset(config.data)
    initials = {}
    for shape in config.measured_shapes():
        training = config.training(shape)
        model = training.model
        if training.base is not None:
            source = base_checkpoint(training, data, quiet)
            model = type(model)(source=f"run:{source}")
        initials[shape.name] = open_model(model, data.vocab, data.hashes)
    return Prepared(config, data, initials, held)


def create_run(prepared: Prepared, root: Path) -> Run:
    """Make the run directory with configuration and provenance."""
    cost = prepared.config.cost
    provenance = collect(
        seeds=[cost.seed],
        data={**prepared.data.hashes, "description": prepared.data.description},
        compute={
            "device": device_name(cost.device),
            "threads": cost.threads,
            "precision": cost.precision,
            "deterministic": True,
            "tf32": False,
            "start": {name: initial.origin for name, initial in prepared.initials.items()},
            "paused": [f"{target.name} ({target.pid})" for target in prepared.pause],
        },
    )
    return Run.create(root, "cost", prepared.config.name, to_toml(prepared.config), provenance)


def cost(prepared: Prepared, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Measure, or go on measuring, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: a signal or a budget ended it early; what is journaled is not measured again.
        RunFailed: an arm skipped steps, so its times are not those of steps.
    """
    config, settings = prepared.config, prepared.config.cost
    seconds = None if settings.minutes is None else 60.0 * settings.minutes
    budget = Budget(process_mib=settings.memory_mib, seconds=seconds)
    require_same_data(run, prepared.data)
    # A killed process may have left its scratch run.
    shutil.rmtree(run.path / "overhead", ignore_errors=True)

    def work() -> Findings:
        benches = _benches(prepared)
        plan = [(bench, unit) for bench in benches for unit in _units(config, bench, run)]
        done = {row["key"] for row in run.rows}
        with Progress(config.name, quiet) as progress:
            previous: Bench | None = None
            for number, (bench, (key, measured)) in enumerate(plan):
                progress.update(number, len(plan), key)
                if key in done:
                    continue
                budget.check()
                if run.stop_requested:
                    raise Stopped(f"stopped by {run.stop_requested} before {key}")
                if previous is not None and previous is not bench:
                    previous.close()
                previous = bench
                run.append({"key": key, **measured()})
        shapes = {name: initial.config for name, initial in prepared.initials.items()}
        # Rows in the order of the plan, whatever order resumes left in the journal.
        rows = {row["key"]: row for row in run.rows}
        summary = summarize(config, shapes, [rows[key] for _, (key, _) in plan], _machine(settings.device))
        return summary, statements(config, summary)

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a cost run under the configuration it was started with; no process is paused."""
    prepared = prepare(saved_config(run), quiet)
    run.update_provenance({"resumed": [*run.provenance.get("resumed", []), utc_now()]})
    return cost(prepared, run, quiet)


def saved_config(run: Run) -> CostConfig:
    """The configuration stored in a run directory.

    Raises:
        ConfigError: it is no longer valid, for example because it was edited.
    """
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    return parse_config(mapping, CostConfig, origin=str(run.path / "config.toml"))


def _benches(prepared: Prepared) -> list[Bench]:
    config = prepared.config
    bounds = Bounds(config.cost.other_cpus, config.cost.excess_load)
    return [
        Bench(
            shape.name,
            config.training(shape),
            prepared.data,
            prepared.initials[shape.name],
            prepared.pause,
            bounds,
        )
        for shape in config.measured_shapes()
    ]


def _units(config: CostConfig, bench: Bench, run: Run) -> list[Unit]:
    """The work at one shape: what needs a quiet machine first, and together."""
    settings = config.cost
    units = window_units(bench, settings.windows, settings.warmup, settings.steps)
    if settings.part_steps:
        units += part_units(bench, settings.part_steps)
    if settings.overhead:
        units += overhead_units(
            bench, settings.denominator, settings.windows, settings.warmup, settings.steps, run
        )
    if settings.fidelity_batches:
        units += fidelity_units(bench, settings.fidelity_batches)
    if settings.memory:
        units += memory_units(bench)
    if settings.count:
        units += count_units(bench)
    if config.frontier is not None:
        units += frontier_units(bench, config.frontier, settings.band, settings.count, lambda: run.rows)
    return units


def _machine(device: str) -> dict[str, Value]:
    chosen = torch.device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else cpu_model()
    return {"device": chosen.type, "device_name": name}


def _resolved(config: CostConfig) -> CostConfig:
    """Fix what would depend on the machine or folder of a later resume: threads and paths."""
    settings = config.cost
    threads = settings.threads or torch.get_num_threads()
    return config.model_copy(
        update={
            "cost": settings.model_copy(update={"threads": threads}),
            "data": resolved_data(config.data),
            "model": resolved_model(config.model),
            "ep": config.ep.model_copy(update={"precision": settings.precision}),
        }
    )
