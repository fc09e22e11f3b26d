"""Verbs on runs that exist: resume, runs, report."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twinscope.cli.options import AsJson, Debug, Quiet, Runs
from twinscope.cli.outcome import close, reporting
from twinscope.cli.ranks import resume_over_ranks
from twinscope.lab.errors import ConfigError, TwinscopeError
from twinscope.lab.launch import place
from twinscope.lab.run import Run, list_runs, runs_root


def resume(
    run: Annotated[Path, typer.Argument(help="Run directory that was stopped, killed or failed.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its last checkpoint; the result equals the uninterrupted run's bit for bit.

    Example: twinscope resume runs/20261130T141530Z-train-twin-sotu
    """
    with reporting(as_json, debug) as outcome:
        where = place()
        if where is not None:
            resume_over_ranks(where, run, quiet or as_json, outcome)
            return
        with Run.open(run) as opened:
            outcome.run = opened.path
            if run_info_status(opened.path) == "complete":
                raise ConfigError(f"{opened.path} is complete: there is nothing to resume")
            verbs = _resumable()
            if opened.verb not in verbs:
                raise ConfigError(
                    f"runs of the verb '{opened.verb}' cannot be resumed (known: {', '.join(verbs)})"
                )
            record = import_module(verbs[opened.verb]).resume(opened, quiet)
            close(opened.path, record, quiet or as_json, outcome)


def runs(runs: Runs = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the runs with their status and headline.

    A run is 'running' while a process holds it, and 'interrupted' if it ended without a result.
    """
    with reporting(as_json, debug) as outcome:
        root = runs_root(runs)
        found = list_runs(root)
        outcome.run, outcome.status = root, "complete"
        outcome.more["runs"] = [
            {"run": str(info.path), "verb": info.verb, "name": info.name, "status": info.status,
             "started": info.started, "headline": info.headline}
            for info in found
        ]  # fmt: skip
        if as_json:
            return
        if not found:
            print(f"no runs in {root}: start with twinscope demo")
            return
        table = Table(box=None, pad_edge=False)
        for column, wrap in (("run", False), ("status", False), ("headline", True)):
            table.add_column(column, no_wrap=not wrap, overflow="ellipsis")
        for info in found:
            cells = (info.path.name, info.status, info.headline or "")
            table.add_row(*(escape(cell) for cell in cells))
        print(f"in {root}")
        # In a pipe a row is a line: nothing is folded to a width that nobody sees.
        Console(width=None if sys.stdout.isatty() else 400).print(table)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories to show, side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write [default: report.html in the first run].")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make one self-contained HTML page from runs, finished or not.

    Figures are also saved in each run's figures folder as SVG, PNG and CSV. Needs no network.

    Example: twinscope report runs/*-train-twin-sotu --out twins.html
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.report.page import render

        page = render(runs, out)
        outcome.run, outcome.status = runs[0].absolute(), "complete"
        outcome.more["report"] = str(page)
        if not (quiet or as_json):
            print(f"report: {page}")


def run_info_status(path: Path) -> str:
    """The status in the run's result, or ``"interrupted"`` where it has none or holds a damaged one."""
    from twinscope.lab.record import load_record

    try:
        return load_record(path).status
    except TwinscopeError:
        return "interrupted"


def _resumable() -> dict[str, str]:
    """Verb -> the module whose ``resume`` continues a run of it.

    Names, not functions: the limits on memory of one verb must not count what the others import.
    """
    return {
        "train": "twinscope.propagation.train",
        "leak": "twinscope.propagation.leak.run",
        "check": "twinscope.models.parity.run",
        "collapse": "twinscope.propagation.collapse.run",
        "cost": "twinscope.propagation.cost.run",
        "probe": "twinscope.reuse.capacity",
        "ranks": "twinscope.propagation.ranks.run",
        "plan": "twinscope.reuse.plan_run",
        "scan": "twinscope.reuse.scan_run",
        "swap": "twinscope.reuse.swap_run",
        "neurons": "twinscope.reuse.neurons.run",
    }
