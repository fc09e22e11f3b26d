"""The verb ``collapse``: leak runs, made or given, put together into one record.

Covers the run directory, the leak runs a configuration asks for, and resume. The law is in collapse.py.

Each leak run is an ordinary run beside the collapse; the journal says which one measures what. A process
killed between making a leak run and noting it leaves an empty one behind, and another is made.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinscope.lab.config import parse_config, read_config, to_toml
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.record import load_record
from twinscope.lab.run import Run, run_info
from twinscope.propagation.collapse.config import CollapseConfig, GivenRuns, Member
from twinscope.propagation.collapse.law import collapse_law
from twinscope.propagation.leak import run as leak_run
from twinscope.propagation.train import device_name

Config = CollapseConfig | GivenRuns

_SUGGESTION = "; continue with: twinscope resume"


def read_targets(targets: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration of one TOML file with its overrides, or of leak run directories.

    Raises:
        ConfigError: a file among directories, overrides without a file, or what the file says is refused.
    """
    files = [target for target in targets if not target.is_dir()]
    if len(targets) == 1 and files:
        return read_config(files[0], CollapseConfig, overrides).resolved()
    if files:
        raise ConfigError(f"{files[0]} is no run directory: give leak runs only, or one TOML file alone")
    if overrides:
        raise ConfigError("--set changes a configuration, and leak runs have theirs: leave it out")
    runs = [str(target.expanduser().resolve()) for target in targets]
    return parse_config({"runs": runs}, GivenRuns, origin="collapse")


def create_run(config: Config, root: Path) -> Run:
    """Make the run directory with configuration and provenance."""
    compute: dict[str, Any] = {"device": "none: records are read"}
    if isinstance(config, CollapseConfig):
        leak = config.leak
        compute = {
            "device": device_name(leak.device),
            "threads": leak.threads,
            "precision": leak.precision,
            "deterministic": True,
        }
    seeds = [config.leak.seed] if isinstance(config, CollapseConfig) else []
    provenance = collect(seeds=seeds, data={}, compute=compute)
    return Run.create(root, "collapse", config.name, to_toml(config), provenance)


def collapse(config: Config, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Measure what is not measured yet, fit the law, and write the result of ``run``; returns the record.

    Raises:
        Stopped: a signal or a budget ended it early; finished leak runs are not measured again.
        RunFailed: a leak run failed. ConfigError, DataError: the leak runs cannot be put together.
    """
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        if isinstance(config, GivenRuns):
            paths = [Path(path) for path in config.runs]
        else:
            paths = _measured(config, run, quiet)
        records = [(path.name, load_record(path)) for path in paths]
        hashes = {
            path.name: hashlib.sha256((path / "result.json").read_bytes()).hexdigest() for path in paths
        }
        run.update_provenance({"data": hashes})
        law = collapse_law(records)
        rows.extend(law.rows)
        return law.summary, law.claims

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Continue a collapse under the configuration it was started with."""
    path = run.path / "config.toml"
    try:
        values = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    schema = GivenRuns if "runs" in values else CollapseConfig
    return collapse(parse_config(values, schema, origin=str(path)), run, quiet)


def _measured(config: CollapseConfig, run: Run, quiet: bool) -> list[Path]:
    """The finished leak runs of a configuration, in its order."""
    found, members = [], config.members()
    with Progress(config.name, quiet) as progress:
        for index, member in enumerate(members):
            progress.update(index, len(members), member.label)
            if run.stop_requested:
                raise Stopped(f"stopped by {run.stop_requested} before {member.label}")
            try:
                # Two bars cannot share a terminal, so the leak run keeps silent.
                found.append(_leak(member, run))
            except Stopped as error:
                # The sentence names the leak run as the one to resume; it is the collapse.
                reason = str(error).partition(_SUGGESTION)[0]
                raise Stopped(f"{member.label}: {reason}") from error
    return found


def _leak(member: Member, run: Run) -> Path:
    """The leak run of one member: found finished, continued, or made."""
    key = f"leak {member.label}"
    noted = next((row["run"] for row in run.rows if row["key"] == key), None)
    if noted is None:
        prepared = leak_run.prepare(member.config, quiet=True)
        with leak_run.create_run(prepared, run.path.parent) as made:
            run.append({"key": key, "run": made.path.name})
            leak_run.leak(prepared, made, quiet=True)
        return made.path
    path = run.path.parent / noted
    if run_info(path).status != "complete":
        with Run.open(path) as made:
            leak_run.resume(made, quiet=True)
    return path
