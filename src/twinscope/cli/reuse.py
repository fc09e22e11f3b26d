"""Verbs of functional reuse, in the order of evidence: probe, plan, scan, swap; and neurons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from twinscope.cli.options import AsJson, Config, Debug, Quiet, Runs, Set
from twinscope.cli.outcome import Outcome, announce, close, reporting
from twinscope.lab.config import parse_config, read_config, with_overrides
from twinscope.lab.errors import ConfigError
from twinscope.lab.run import run_info, runs_root


def probe(
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure what this machine can hold, and how fast it reads, converts and multiplies.

    Takes seconds, at most 60. It opens no model and supports no statement about any.

    Example: twinscope probe --set seconds=120
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.reuse import capacity

        config = parse_config(with_overrides({}, overrides or []), capacity.ProbeConfig, origin="probe")
        with capacity.create_run(config, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = capacity.probe(config, run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


def plan(
    config: Config,
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fix texts, pairs, thresholds and budgets of a scan, and seal them before any activation is read.

    The plan is a file plan.json in the run directory; twinscope scan takes the directory.

    Example: twinscope plan experiments/reuse-smollm2.toml
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.reuse import plan_run
        from twinscope.reuse.reuse_config import ReuseConfig

        settings = read_config(config, ReuseConfig, overrides or [])
        with plan_run.create_run(settings, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = plan_run.plan(run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


def scan(
    target: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="Directory of a plan run, its plan.json, or a TOML file."),
    ],
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--pair", metavar="SITE=SITE", help="Pair added to the sealed plan; exploratory; repeatable."
        ),
    ] = None,
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare the pairs of a sealed plan inside a pretrained model, within a fixed memory budget.

    Calibration text first, then held-out text, opened once; every measure beside its nulls. A TOML file is
    planned, sealed and scanned in one go, and a model that it names is fetched.

    Example: twinscope scan experiments/reuse-smollm2.toml
    """
    with reporting(as_json, debug) as outcome:
        sealed = _sealed(target, overrides or [], runs, quiet, outcome)
        from twinscope.reuse import scan_run
        from twinscope.reuse.plan_run import plan_of_run

        prepared = scan_run.prepare(plan_of_run(sealed), pairs or [], quiet)
        with scan_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = scan_run.scan(prepared, run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


def swap(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished scan.")],
    pair: Annotated[
        str | None,
        typer.Option(
            "--pair", metavar="SITE=SITE", help="Pair instead of the scan's candidate; exploratory."
        ),
    ] = None,
    texts: Annotated[
        int | None, typer.Option(min=2, help="So many other texts of each split [default: the plan's own].")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=8, help="Other texts of so many tokens [default: the plan's own].")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Stop softly after so many minutes; resumable.")] = 120.0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Replace every site by every other of its kind; exploratory.")
    ] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Kind to sweep [default: attention, mlp]; repeatable."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Sweep every N-th site of a kind only.")] = 1,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Replace each of two modules by the other, and measure what the whole model's loss says.

    Takes the scan's candidate of least strain. Calibration text first, from which the number of texts that
    the margin needs is computed; then held-out text, opened once, with every null in the same place.

    Example: twinscope swap runs/20261130T141530Z-scan-reuse-smollm2 --texts 64 --tokens 256
    """
    with reporting(as_json, debug) as outcome:
        if sweep and pair is not None:
            raise ConfigError("--pair and --sweep: give one of the two, a sweep replaces every pair")
        if not sweep and (kinds or every != 1):
            raise ConfigError("--kind and --every say what a sweep replaces: give --sweep with them")
        if sweep:
            from twinscope.reuse import sweep_run

            swept = sweep_run.prepare(target, kinds, every, texts, tokens, minutes, quiet)
            with sweep_run.create_run(swept, runs_root(runs)) as run:
                outcome.run = run.path
                announce(run, quiet or as_json)
                record = sweep_run.sweep(swept, run, quiet)
                _close(run.path, record, quiet or as_json, outcome)
            return
        from twinscope.reuse import swap_run

        prepared = swap_run.prepare(target, pair, texts, tokens, minutes, quiet)
        with swap_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = swap_run.swap(prepared, run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


def neurons(
    target: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="Directory of a plan run, its plan.json, or a TOML file."),
    ],
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look for neurons that compute the same function in four layers, and replace them by each other.

    All neurons of the layers that the plan fixed: search and null on calibration text, confirmation and
    replacement on held-out text, opened once. A TOML file is planned and sealed first.

    Example: twinscope neurons experiments/neurons-smollm2.toml
    """
    with reporting(as_json, debug) as outcome:
        sealed = _sealed(target, overrides or [], runs, quiet, outcome)
        from twinscope.reuse.neurons import run as neurons_run
        from twinscope.reuse.plan_run import plan_of_run

        prepared = neurons_run.prepare(plan_of_run(sealed), quiet)
        with neurons_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = neurons_run.neurons(prepared, run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


def _sealed(target: Path, overrides: list[str], runs: Path | None, quiet: bool, outcome: Outcome) -> Path:
    """The sealed plan that an argument names; a TOML file is planned and sealed now.

    Raises:
        ConfigError: a plan that is sealed already is to be changed; and what planning raises.
    """
    if target.suffix == ".toml" and not target.is_dir():
        from twinscope.reuse.apart import call_apart, required

        # A corpus and a tokenizer take memory that the process of the scan would not give back.
        options = [f"--set={change}" for change in overrides] + (["--quiet"] if quiet else [])
        done = call_apart("plan", str(target), f"--runs={runs_root(runs)}", *options)
        sealed = Path(required(done)["run"])
        outcome.more["plan"] = str(sealed)
        return sealed
    if overrides:
        raise ConfigError("--set changes a TOML file, and this plan is sealed: make a new plan")
    return target


def _close(path: Path, record: dict[str, Any], quiet: bool, outcome: Outcome) -> None:
    """As every verb closes, without a page for a verb that the report does not show."""
    from twinscope.report.page import CONTENT

    if record["schema"].removeprefix("twinscope.").partition("/")[0] in CONTENT:
        close(path, record, quiet, outcome)
        return
    outcome.status = record["status"]
    if not quiet:
        print(run_info(path).headline or "")
        for claim in record["claims"]:
            print(f"- {claim['statement']}; it does not support {claim['does_not_support']}")
        print(f"run:    {path}")
