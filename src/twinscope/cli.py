"""The command ``twinscope``: parse, call, exit code. No science.

Every verb takes ``--json`` (the last line of standard output is then one JSON object with ``run`` and
``status``), ``--quiet`` and ``--debug``. Errors are one sentence on standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twinscope.lab.config import parse_config, read_config, suggestion, with_overrides
from twinscope.lab.errors import ConfigError, TwinscopeError
from twinscope.lab.run import Run, list_runs, run_info, runs_root

app = typer.Typer(
    name="twinscope",
    help="Paired, evidence-graded experiments on transformer language models.",
    epilog="Start with: twinscope demo. Every run is a directory; an interrupted one continues with "
    "twinscope resume RUN.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(help="TOML file, for example experiments/twin-sotu.toml.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, for example train.steps=200; repeatable."
    ),
]
Runs = Annotated[
    Path | None, typer.Option("--runs", help="Folder of the runs [default: $TWINSCOPE_RUNS or ./runs].")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no closing lines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def _global(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(metadata.version("twinscope"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps per arm; fewer is faster.", min=1)
    ] = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a small EP transformer beside its backprop twin on real text, and make a report.

    Takes minutes on 2 cores. The text is State of the Union addresses; those since 2000 are held out.
    Both arms start from the same weights and see the same batches.

    Example: twinscope demo --steps 200
    """
    with _reporting(as_json, debug) as outcome:
        import tomllib

        from twinscope.propagation.config import TrainConfig

        text = resources.files("twinscope").joinpath("demo.toml").read_text(encoding="utf-8")
        changes = [f"train.steps={steps}"] if steps is not None else []
        config = parse_config(with_overrides(tomllib.loads(text), changes), TrainConfig, origin="demo.toml")
        _train_and_report(config, runs, quiet, outcome)


@app.command()
def train(
    config: Config,
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train arms side by side from one start: by default 'ep' and its twin 'bp'.

    Same initial weights, same batch at each step, same optimizer; evaluated on the same held-out batches.
    The result compares every arm with backpropagation, window by window of steps.

    Example: twinscope train experiments/twin-sotu.toml --set train.seeds=[0]
    """
    with _reporting(as_json, debug) as outcome:
        from twinscope.propagation.config import TrainConfig

        _train_and_report(read_config(config, TrainConfig, overrides or []), runs, quiet, outcome)


@app.command()
def leak(
    config: Config,
    overrides: Set = None,
    extend: Annotated[
        Path | None, typer.Option(help="Finished leak run to add batches to; CONFIG then says how many.")
    ] = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure, block by block, how the EP gradient departs from BP as the displacement gain grows.

    Every gain on the same batches, after a self-test on the same model. The result says at which gains each
    block is usable, and which displacement and gains to train with.

    Example: twinscope leak experiments/leak.toml --set leak.batches=32
    """
    with _reporting(as_json, debug) as outcome:
        from twinscope.propagation import leak_run
        from twinscope.propagation.leak_config import LeakConfig

        settings = read_config(config, LeakConfig, overrides or [])
        if extend is not None:
            with Run.open(extend) as run:
                outcome.run = run.path
                record = leak_run.extend(settings, run, quiet)
                _close(run.path, record, quiet, outcome)
            return
        prepared = leak_run.prepare(settings, quiet)
        with leak_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            record = leak_run.leak(prepared, run, quiet)
            _close(run.path, record, quiet, outcome)


@app.command()
def collapse(
    targets: Annotated[
        list[Path], typer.Argument(metavar="TARGET...", help="Leak run directories, or one TOML file.")
    ],
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Test the threshold law over leak runs: is gain_low times displacement ratio a constant of the format?

    A TOML file makes the leak runs first, each an ordinary run that a resume continues. Runs at another
    beta than most are controls.

    Example: twinscope collapse experiments/collapse.toml
    """
    with _reporting(as_json, debug) as outcome:
        from twinscope.propagation import collapse_run

        settings = collapse_run.read_targets(targets, overrides or [])
        with collapse_run.create_run(settings, runs_root(runs)) as run:
            outcome.run = run.path
            record = collapse_run.collapse(settings, run, quiet)
            _close(run.path, record, quiet, outcome)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory that was stopped, killed or failed.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its last checkpoint; the result equals the uninterrupted run's bit for bit.

    Example: twinscope resume runs/20261130T141530Z-train-twin-sotu
    """
    with _reporting(as_json, debug) as outcome, Run.open(run) as opened:
        outcome.run = opened.path
        if run_info_status(opened.path) == "complete":
            raise ConfigError(f"{opened.path} is complete: there is nothing to resume")
        verbs = _resumable()
        if opened.verb not in verbs:
            raise ConfigError(
                f"runs of the verb '{opened.verb}' cannot be resumed (known: {', '.join(verbs)})"
            )
        record = verbs[opened.verb](opened, quiet)
        _close(opened.path, record, quiet or as_json, outcome)


@app.command(name="runs")
def runs_table(runs: Runs = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the runs with their status and headline.

    A run is 'running' while a process holds it, and 'interrupted' if it ended without a result.
    """
    with _reporting(as_json, debug) as outcome:
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


@app.command()
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
    with _reporting(as_json, debug) as outcome:
        from twinscope.report.page import render

        page = render(runs, out)
        outcome.run, outcome.status = runs[0].absolute(), "complete"
        outcome.more["report"] = str(page)
        if not (quiet or as_json):
            print(f"report: {page}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 1, 2, 65 or 75."""
    # On a machine whose cores others use too, OpenMP threads that spin while they wait bring two threads to a
    # crawl (measured: over 25 s for what takes 3 s). A short spin costs 0 to 3 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        code = app(arguments, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted before a run began: start it again")
        sys.exit(75)
    except typer.TyperException as error:
        sentence = _usage_sentence(error)
        _complain(sentence)
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            print(json.dumps({"run": None, "status": "failed", "error": sentence}))
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


class _Outcome:
    """What ``--json`` prints at the end, filled in while a verb runs."""

    def __init__(self) -> None:
        self.run: Path | None = None
        self.status = "failed"
        self.more: dict[str, Any] = {}

    def line(self) -> str:
        run = str(self.run) if self.run is not None else None
        return json.dumps({"run": run, "status": self.status, **self.more})


@contextmanager
def _reporting(as_json: bool, debug: bool) -> Iterator[_Outcome]:
    """Print the JSON line at the end and turn errors into a sentence and an exit code."""
    outcome = _Outcome()
    code = 0
    try:
        yield outcome
    except TwinscopeError as error:
        if debug:
            raise
        code = error.exit_code
        outcome.status = "stopped" if code == 75 else "failed"
        outcome.more["error"] = str(error)
        _complain(str(error))
    except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        code, outcome.status = 75, "stopped"
        retry = f"continue with: twinscope resume {outcome.run}" if outcome.run else "start it again"
        outcome.more["error"] = f"interrupted; {retry}"
        _complain(outcome.more["error"])
    except Exception as error:
        if _out_of_memory(error):
            code = 75
            outcome.more["error"] = "out of memory: choose a smaller model, batch or context"
            _complain(outcome.more["error"])
        elif debug:
            raise
        else:
            code = 1
            outcome.more["error"] = f"{type(error).__name__}: {error}"
            _complain(
                f"a defect of twinscope, not of your input: {type(error).__name__}: {error} "
                "(run again with --debug for the traceback)"
            )
    if as_json:
        print(outcome.line(), flush=True)
    if code:
        raise typer.Exit(code)


def _train_and_report(config: Any, runs: Path | None, quiet: bool, outcome: _Outcome) -> None:
    from twinscope.propagation.train import create_run, prepare
    from twinscope.propagation.train import train as carry_out_training

    prepared = prepare(config, quiet)
    with create_run(prepared, runs_root(runs)) as run:
        outcome.run = run.path
        _announce(run, quiet)
        record = carry_out_training(prepared, run, quiet)
        _close(run.path, record, quiet, outcome)


def _close(path: Path, record: dict[str, Any], quiet: bool, outcome: _Outcome) -> None:
    """Make the report of a complete run and say where everything is."""
    from twinscope.report.page import render

    outcome.status = record["status"]
    try:
        page = render([path], None)
    except TwinscopeError as error:
        # The run itself is complete and stays so.
        _complain(f"the run is complete, its report is not: {error}; make it with twinscope report {path}")
        return
    outcome.more["report"] = str(page)
    if not quiet:
        info = run_info(path)
        if info.headline:
            print(info.headline)
        for claim in record["claims"]:
            print(f"- {claim['statement']}")
        print(f"run:    {path}")
        print(f"report: {page}")


def run_info_status(path: Path) -> str:
    """The status in the run's result, or ``"interrupted"`` where it has none or holds a damaged one."""
    from twinscope.lab.record import load_record

    try:
        return load_record(path).status
    except TwinscopeError:
        return "interrupted"


def _resumable() -> dict[str, Callable[[Run, bool], dict[str, Any]]]:
    """Verb -> what continues a run of it."""
    from twinscope.propagation.collapse_run import resume as resume_collapse
    from twinscope.propagation.leak_run import resume as resume_leak
    from twinscope.propagation.train import resume as resume_training

    return {"train": resume_training, "leak": resume_leak, "collapse": resume_collapse}


def _usage_sentence(error: typer.TyperException) -> str:
    """What the parser objects to, in one sentence, with the nearest verb for a mistyped one."""
    message = str(getattr(error, "format_message", error.__str__)()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    verb = f" {context.info_name}" if context is not None and context.parent is not None else ""
    mistyped = re.match(r"No such command '([^']*)'", message)
    if mistyped:
        known = [
            command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands
        ]
        message = f"there is no verb '{mistyped[1]}'{suggestion(mistyped[1], known)}"
    return f"{message}; see twinscope{verb} --help"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        # torch's CPU allocator has no error type of its own.
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    )


def _announce(run: Run, quiet: bool) -> None:
    """Say where the run is before it starts: the way to find, watch and resume it."""
    if not quiet:
        print(f"run:    {run.path}", file=sys.stderr)


def _complain(sentence: str) -> None:
    print(f"twinscope: {sentence}", file=sys.stderr)
