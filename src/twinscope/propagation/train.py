"""The verb ``train``: from a configuration to a run with a record.

Covers opening data and model, the cached base checkpoint, process-wide numerics, and the summary. The loop
is in twin.py.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run, cache_root, list_runs
from twinscope.models.source import Initial, ModelSettings, find_source, open_model
from twinscope.propagation.comparison import claims, summarize
from twinscope.propagation.config import ArmSettings, TrainConfig
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.twin import train_arms
from twinscope.text.batches import heldout_positions, target_positions
from twinscope.text.datasets import Dataset, DataSettings, open_dataset
from twinscope.text.ngrams import ngram_losses


@dataclass(frozen=True)
class Prepared:
    """A configuration with nothing left to the machine, and what it opens."""

    config: TrainConfig
    data: Dataset
    initial: Initial


def prepare(config: TrainConfig, quiet: bool = False) -> Prepared:
    """Open data and model and set this process's numerics, before any run directory exists.

    A ``[base]`` table is trained here, or found in the cache.

    Raises:
        ConfigError, DataError: the configuration, the text or the checkpoint cannot be used.
    """
    config = _resolved(config)
    assert config.train.threads is not None
    set_numerics(config.train.device, config.train.threads, "train.device")
    data = open_dataset(config.data)
    if config.base is not None:
        source = base_checkpoint(config, data, quiet)
        started = config.model.model_construct(source=f"run:{source}", _fields_set={"source"})
        return Prepared(config, data, open_model(started, data.vocab, data.hashes))
    return Prepared(config, data, open_model(config.model, data.vocab, data.hashes))


def create_run(prepared: Prepared, root: Path, verb: str = "train", ranks: Ranks | None = None) -> Run:
    """Make the run directory with configuration and provenance."""
    settings = prepared.config.train
    provenance = collect(
        seeds=settings.seeds,
        data={**prepared.data.hashes, "description": prepared.data.description},
        compute={
            "device": device_name(settings.device),
            "threads": settings.threads,
            "precision": settings.precision,
            "deterministic": True,
            "start": prepared.initial.origin,
        },
    )
    if ranks is not None:
        provenance |= {"ranks": [ranks.size], "backend": ranks.backend}
    return Run.create(root, verb, prepared.config.name, to_toml(prepared.config), provenance)


def train(prepared: Prepared, run: Run, quiet: bool = False, ranks: Ranks | None = None) -> dict[str, object]:
    """Train, or continue, ``run`` to its end and write its result; returns the record.

    With ``ranks``, this is rank 0, and the others call ``train_arms``.

    Raises:
        Stopped, RunFailed, ConfigError, DataError: see ``carry_out`` and ``train_arms``.
    """
    config, data = prepared.config, prepared.data

    require_same_data(run, data)
    kept = _kept_rows(run, 1 if ranks is None else ranks.size)

    def work() -> Findings:
        context = prepared.initial.config.context
        with Progress(config.name, quiet) as progress:
            train_arms(config, run, data, prepared.initial, progress, ranks, kept)
        starts = heldout_positions(len(data.heldout), context, config.data.batch, config.train.eval_batches)
        baselines = ngram_losses(data, target_positions(starts, context))
        summary = summarize(config, run.rows, data.bytes_per_token, baselines)
        return summary, claims(config, summary)

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work)


def resume(run: Run, quiet: bool = False) -> dict[str, object]:
    """Continue a train run from its last checkpoint, under the configuration it was started with."""
    return train(prepare(saved_config(run), quiet), run, quiet)


def saved_config(run: Run, schema: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """The configuration stored in a run directory, read as ``schema``.

    Raises:
        ConfigError: it is no longer valid, for example because it was edited.
    """
    import tomllib

    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    return parse_config(mapping, schema, origin=str(run.path / "config.toml"))


def base_checkpoint(config: TrainConfig, data: Dataset, quiet: bool) -> Path:
    """The run that trains ``[base]`` by backpropagation, made once and kept in the cache.

    The cache's key covers shape, text, optimizer, seed, steps, batch, threads, device and torch's version:
    whatever the weights depend on.
    """
    assert config.base is not None
    settings = config.train.model_copy(
        update={
            "steps": config.base.steps,
            "seeds": [config.base.seed],
            "precision": "fp32",
            "eval_every": config.base.steps,
            "gate_every": config.base.steps,
        }
    )
    base = config.model_copy(
        update={
            "name": "base",
            "train": settings,
            "optimizer": config.base.optimizer or config.optimizer,
            "ep": config.ep.model_copy(update={"precision": settings.precision}),
            "arms": [ArmSettings(name="bp", rule="bp")],
            "base": None,
        }
    )
    decisive = base.model_dump_json(include={"model", "data", "optimizer"})
    numerics = f"{torch.__version__} {config.train.device} {config.train.threads}"
    identity = f"{decisive} {data.hashes} {config.base.seed} {config.base.steps} {numerics}"
    root = cache_root() / "bases" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    for info in list_runs(root):
        if info.status == "complete":
            return info.path
        if info.status in ("stopped", "interrupted"):
            with Run.open(info.path) as run:
                train(Prepared(base, data, open_model(base.model, data.vocab, data.hashes)), run, quiet)
            return info.path
    prepared = Prepared(base, data, open_model(base.model, data.vocab, data.hashes))
    with create_run(prepared, root) as run:
        train(prepared, run, quiet)
    return run.path


def resolved_data(settings: DataSettings) -> DataSettings:
    """The table with absolute paths, so that a resume from another folder reads the same files."""
    data = settings.model_dump(exclude_unset=True)
    for key, words in (("corpus", {"sotu"}), ("tokenizer", {"char"}), ("heldout", set())):
        value = data.get(key)
        if value is not None and value not in words and not value.startswith("bpe:"):
            data[key] = str(Path(value).expanduser().absolute())
    return DataSettings.model_validate(data)


def resolved_model(settings: ModelSettings) -> ModelSettings:
    """The table with an absolute path where its source is one, and a run's checkpoint named in full."""
    source = settings.source
    if source is None or source == "smollm2":
        return settings
    if not settings.of_a_run:
        return settings.model_copy(update={"source": str(Path(source).expanduser().absolute())})
    if re.search(r"@\d+$", source):
        place = Path(source.removeprefix("run:")).expanduser().absolute()
        return settings.model_copy(update={"source": f"run:{place}"})
    # The last checkpoint of a run that goes on is another one tomorrow: name the one that is meant.
    checkpoint, manifest, arm = find_source(settings)
    pinned = f"run:{checkpoint.parent.parent.absolute()}@{manifest.step}"
    return type(settings)(source=pinned, arm=arm, seed=manifest.seed)


def set_numerics(device: str, threads: int, key: str) -> None:
    """What holds for the whole process: threads, deterministic kernels, no TF32.

    Raises:
        ConfigError: the device cannot be used here; ``key`` is the configuration's name for it.
    """
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("give cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key} = '{device}' cannot be used here: {reason}") from None
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def device_name(device: str) -> str:
    """The device with the name of its model."""
    chosen = torch.device(device)
    return f"{device} ({torch.cuda.get_device_name(chosen)})" if chosen.type == "cuda" else device


def require_same_data(run: Run, data: Dataset) -> None:
    """Raise DataError if the text or tokenizer is not the one that ``run`` began with."""
    then = run.provenance.get("data", {})
    changed = [name for name, digest in data.hashes.items() if then.get(name, digest) != digest]
    if changed:
        raise DataError(
            f"the {' and '.join(changed)} data changed since {run.path.name} began: "
            "bring the old files back, or start a fresh run"
        )


def _kept_rows(run: Run, size: int) -> frozenset[str]:
    """Keys of the rows that a continued run must not compare with what comes out again.

    None, unless several numbers of ranks had a part in the run: sums over ranks round as their number has
    it, so work that is done again on another number agrees to rounding only.
    """
    sizes: list[int] = run.provenance.get("ranks", [1])
    if sizes[-1] != size:
        sizes = [*sizes, size]
        run.update_provenance({"ranks": sizes})
    return frozenset(row["key"] for row in run.rows) if len(set(sizes)) > 1 else frozenset()


def _resolved(config: TrainConfig) -> TrainConfig:
    """Fix what would depend on the machine or folder of a later resume: threads and relative paths."""
    threads = config.train.threads or torch.get_num_threads()
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"threads": threads}),
            "data": resolved_data(config.data),
            "model": resolved_model(config.model),
            "ep": config.ep.model_copy(update={"precision": config.train.precision}),
        }
    )
