"""Verbs of functional reuse, in the order of evidence: probe, plan, scan."""

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
        sealed = target
        if target.suffix == ".toml" and not target.is_dir():
            from twinscope.reuse.apart import call_apart, required

            # A corpus and a tokenizer take memory that the process of the scan would not give back.
            options = [f"--set={change}" for change in overrides or []] + (["--quiet"] if quiet else [])
            done = call_apart("plan", str(target), f"--runs={runs_root(runs)}", *options)
            sealed = Path(required(done)["run"])
            outcome.more["plan"] = str(sealed)
        elif overrides:
            raise ConfigError("--set changes a TOML file, and this plan is sealed: make a new plan")
        from twinscope.reuse import scan_run
        from twinscope.reuse.plan_run import plan_of_run

        prepared = scan_run.prepare(plan_of_run(sealed), pairs or [], quiet)
        with scan_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet or as_json)
            record = scan_run.scan(prepared, run, quiet)
            _close(run.path, record, quiet or as_json, outcome)


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
