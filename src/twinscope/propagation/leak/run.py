"""The verb ``leak``: from a configuration to a run with a record, and more batches for a finished one.

Covers opening data and model, the run directory, resume and extension. What is measured is in leak.py.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinscope.lab.budget import Budget
from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.durable import sync_folder, writing
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.evidence import claim
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.record import load_record
from twinscope.lab.run import Run
from twinscope.models.source import Opened, open_decoder, source_tokenizer
from twinscope.propagation.config import TrainConfig, TrainSettings
from twinscope.propagation.leak.config import LeakConfig
from twinscope.propagation.leak.paired import Batch
from twinscope.propagation.leak.passes import Ledger
from twinscope.propagation.leak.spectrometer import LeakSpectrum, measure
from twinscope.propagation.train import (
    base_checkpoint,
    device_name,
    require_same_data,
    resolved_data,
    resolved_model,
    set_numerics,
)
from twinscope.text.batches import train_batch
from twinscope.text.datasets import Dataset, open_dataset

#: What more batches change besides the sums over them: whatever holds the group means.
STALE = ["group means of B", "mean_projection", "proj_on_bp", "leak_squared", "rel_leak", "half_split"]


@dataclass(frozen=True)
class Prepared:
    """A configuration with nothing left to the machine, and what it opens."""

    config: LeakConfig
    data: Dataset
    opened: Opened


def prepare(config: LeakConfig, quiet: bool = False) -> Prepared:
    """Open data and model and set this process's numerics; a ``[base]`` is trained, or found in the cache.

    Raises:
        ConfigError, DataError: the configuration, the text or the model cannot be used.
    """
    config = _resolved(config, quiet)
    leak = config.leak
    assert leak.threads is not None
    set_numerics(leak.device, leak.threads, "leak.device")
    data = open_dataset(config.data)
    model = config.model
    if config.base is not None:
        numerics = TrainSettings(device=leak.device, threads=leak.threads)
        training = TrainConfig(model=model, data=config.data, train=numerics, base=config.base)
        source = base_checkpoint(training, data, quiet)
        model = type(model)(source=f"run:{source}")
    dtype = torch.float64 if leak.precision == "fp64" else torch.float32
    opened = open_decoder(
        model, data.vocab, data.hashes, seed=leak.seed, dtype=dtype, device=leak.device, quiet=quiet
    )
    return Prepared(config, data, opened)


def create_run(prepared: Prepared, root: Path) -> Run:
    """Make the run directory with configuration and provenance."""
    leak = prepared.config.leak
    provenance = collect(
        seeds=[leak.seed],
        data={**prepared.data.hashes, "description": prepared.data.description},
        compute={
            "device": device_name(leak.device),
            "threads": leak.threads,
            "precision": leak.precision,
            "deterministic": True,
            "tf32": False,
            "start": prepared.opened.description,
        },
    )
    return Run.create(root, "leak", prepared.config.name, to_toml(prepared.config), provenance)


def leak(prepared: Prepared, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Measure, or go on measuring, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: a signal or a budget ended it early; what is journaled is not measured again.
        RunFailed: the self-test failed, or a gradient is not finite.
    """
    config, settings = prepared.config, prepared.config.leak
    rows: list[dict[str, Any]] = []
    seconds = None if settings.minutes is None else 60.0 * settings.minutes
    budget = Budget(process_mib=settings.memory_mib, seconds=seconds)

    require_same_data(run, prepared.data)

    def work() -> Findings:
        ledger = Ledger(run.rows, run.append)
        with Progress(config.name, quiet) as progress:

            def before(done: int, total: int, stage: str) -> None:
                progress.update(done, total, stage)
                budget.check()
                if run.stop_requested:
                    raise Stopped(
                        f"stopped by {run.stop_requested} in {stage}, after {done} of {total} units"
                    )

            found = measure(
                prepared.opened.decoder, _batches(prepared), config.studied(), settings, ledger,
                run.checkpoints, before,
            )  # fmt: skip
        rows.extend(found.rows)
        extended = run.provenance.get("extended_from", [])
        summary = {
            "model": prepared.opened.description,
            **found.summary,
            "extended_from": extended,
            "recomputed": STALE if extended else [],
        }
        return summary, _claims(found, prepared)

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a leak run under the configuration it was started, or last extended, with."""
    return leak(prepare(saved_config(run), quiet), run, quiet)


def extend(config: LeakConfig, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Add batches to a finished run, in place: ``config`` is the run's own but for a larger ``leak.batches``.

    Rows of single batches stay and are checked against what is measured again; what the group means enter
    is recomputed (:data:`STALE`). The former result is kept beside the new one. A killed extension is
    continued by ``resume``.

    Raises:
        ConfigError: the run is of another verb, unfinished or of another configuration, or has no fewer
            batches. Else as :func:`leak`.
    """
    if run.verb != "leak":
        raise ConfigError(f"{run.path} is a '{run.verb}' run: only leak runs take more batches")
    result = run.path / "result.json"
    if not result.exists() or load_record(run.path).status != "complete":
        raise ConfigError(f"{run.path} is not finished: continue it first with twinscope resume {run.path}")
    before = saved_config(run)
    kept = {"threads": before.leak.threads, "minutes": config.leak.minutes}
    config = _resolved(config.model_copy(update={"leak": config.leak.model_copy(update=kept)}), quiet)
    count, more = before.leak.batches, config.leak.batches
    loose = {"leak": {"batches", "minutes", "memory_mib"}}
    then, now = before.model_dump(exclude=loose), config.model_dump(exclude=loose)
    different = [f"[{table}]" for table in then if then[table] != now[table]]
    if different:
        raise ConfigError(
            f"{' and '.join(different)} differ from {run.path / 'config.toml'}: only leak.batches may change"
        )
    if more <= count:
        raise ConfigError(f"{run.path} has {count} batches already: set leak.batches to more than that")
    prepared = prepare(config, quiet)
    with writing(result):
        result.rename(run.path / f"result-of-{count}-batches.json")
        sync_folder(run.path)
    run.update_provenance({"extended_from": [*run.provenance.get("extended_from", []), count]})
    run.replace_config(to_toml(prepared.config))
    return leak(prepared, run, quiet)


def saved_config(run: Run) -> LeakConfig:
    """The configuration stored in a run directory.

    Raises:
        ConfigError: it is no longer valid, for example because it was edited.
    """
    try:
        mapping = tomllib.loads(run.config_toml)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    return parse_config(mapping, LeakConfig, origin=str(run.path / "config.toml"))


def _resolved(config: LeakConfig, quiet: bool) -> LeakConfig:
    """Fix what would depend on the machine or folder of a later resume: threads, paths, the tokenizer."""
    model, data = resolved_model(config.model), config.data
    tokenizer = source_tokenizer(model, quiet)
    if tokenizer is not None and "tokenizer" not in data.model_fields_set:
        data = type(data).model_validate(data.model_dump(exclude_unset=True) | {"tokenizer": str(tokenizer)})
    threads = config.leak.threads or torch.get_num_threads()
    return config.model_copy(
        update={
            "model": model,
            "data": resolved_data(data),
            "leak": config.leak.model_copy(update={"threads": threads}),
            "ep": config.ep.model_copy(update={"precision": config.leak.precision}),
        }
    )


def _batches(prepared: Prepared) -> list[Batch]:
    """Batches of the training text by index, a function of the seed alone."""
    config, device = prepared.config, torch.device(prepared.config.leak.device)
    tokens, context = prepared.data.train, prepared.opened.context
    found = []
    for index in range(config.leak.batches):
        inputs, targets = train_batch(tokens, context, config.data.batch, config.leak.seed, index)
        found.append((torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)))
    return found


def _claims(found: LeakSpectrum, prepared: Prepared) -> list[dict[str, str]]:
    """What the run shows and leaves open."""
    summary, ep = found.summary, prepared.config.ep
    at_one = [row["projection"] for row in found.rows if row["gain"] == row["beta_sign"] == 1]
    known = [value for value in at_one if value is not None]
    if not known:
        return []
    ratios = summary["displacement_ratio"]
    return [
        claim(
            f"at gain 1 and a displacement ratio of {min(ratios):.1e} to {max(ratios):.1e}, EP with the "
            f"{ep.read} read in {summary['study']} departs from backpropagation by a projection of "
            f"{min(known):+.3f} to {max(known):+.3f} over {len(at_one)} blocks",
            "measured",
            "that this model, on these batches and with these settings, has this leak in each block",
            "other models, checkpoints or texts; what the leak does to training",
        )
    ]
