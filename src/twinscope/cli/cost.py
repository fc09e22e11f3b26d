"""The verb that measures what a step costs: cost."""

from __future__ import annotations

from typing import Annotated

import typer

from twinscope.cli.options import AsJson, Config, Debug, Quiet, Runs, Set
from twinscope.cli.outcome import announce, close, reporting
from twinscope.lab.config import read_config
from twinscope.lab.run import runs_root


def cost(
    config: Config,
    overrides: Set = None,
    pause: Annotated[
        list[int] | None,
        typer.Option(metavar="PID", help="Hold this process of yours still during windows; repeatable."),
    ] = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure what a training step of one arm costs against another: wall clock, FLOPs, memory.

    Arms run in alternating windows of one process. The result says whether the windows agree and the
    machine was quiet, why wall clock and FLOPs differ, and how claims compare. Paused processes are
    continued in any case, also if twinscope is killed.

    Example: twinscope cost experiments/cost-fast.toml --pause 4711
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.propagation.cost import run as cost_run
        from twinscope.propagation.cost.config import CostConfig

        settings = read_config(config, CostConfig, overrides or [])
        prepared = cost_run.prepare(settings, quiet, folder=config.parent, pause=pause or [])
        with cost_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet)
            record = cost_run.cost(prepared, run, quiet)
            close(run.path, record, quiet, outcome)
