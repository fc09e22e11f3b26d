"""Verbs that train and measure: demo, train, leak, collapse."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from twinscope.cli.options import AsJson, Config, Debug, Quiet, Runs, Set
from twinscope.cli.outcome import Outcome, announce, close, reporting
from twinscope.cli.ranks import train_over_ranks
from twinscope.lab.config import parse_config, read_config, with_overrides
from twinscope.lab.launch import place
from twinscope.lab.run import Run, runs_root


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
    with reporting(as_json, debug) as outcome:
        import tomllib

        from twinscope.propagation.config import TrainConfig

        text = resources.files("twinscope").joinpath("demo.toml").read_text(encoding="utf-8")
        changes = [f"train.steps={steps}"] if steps is not None else []
        config = parse_config(with_overrides(tomllib.loads(text), changes), TrainConfig, origin="demo.toml")
        _train_and_report(config, runs, quiet, outcome)


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
    The result compares every arm with backpropagation, window by window of steps. Started by torchrun, the
    batch is split over all ranks.

    Example: twinscope train experiments/twin-sotu.toml --set train.seeds=[0]
    """
    with reporting(as_json, debug) as outcome:
        where = place()
        if where is not None:
            train_over_ranks(where, config, overrides or [], runs, quiet, outcome)
            return
        from twinscope.propagation.config import TrainConfig

        _train_and_report(read_config(config, TrainConfig, overrides or []), runs, quiet, outcome)


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
    with reporting(as_json, debug) as outcome:
        from twinscope.propagation.leak import run as leak_run
        from twinscope.propagation.leak.config import LeakConfig

        settings = read_config(config, LeakConfig, overrides or [])
        if extend is not None:
            with Run.open(extend) as run:
                outcome.run = run.path
                record = leak_run.extend(settings, run, quiet)
                close(run.path, record, quiet, outcome)
            return
        prepared = leak_run.prepare(settings, quiet)
        with leak_run.create_run(prepared, runs_root(runs)) as run:
            outcome.run = run.path
            record = leak_run.leak(prepared, run, quiet)
            close(run.path, record, quiet, outcome)


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
    with reporting(as_json, debug) as outcome:
        from twinscope.propagation.collapse import run as collapse_run

        settings = collapse_run.read_targets(targets, overrides or [])
        with collapse_run.create_run(settings, runs_root(runs)) as run:
            outcome.run = run.path
            record = collapse_run.collapse(settings, run, quiet)
            close(run.path, record, quiet, outcome)


def _train_and_report(config: Any, runs: Path | None, quiet: bool, outcome: Outcome) -> None:
    from twinscope.propagation.train import create_run, prepare
    from twinscope.propagation.train import train as carry_out_training

    prepared = prepare(config, quiet)
    with create_run(prepared, runs_root(runs)) as run:
        outcome.run = run.path
        announce(run, quiet)
        record = carry_out_training(prepared, run, quiet)
        close(run.path, record, quiet, outcome)
