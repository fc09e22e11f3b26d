"""Verbs over several ranks, which torchrun starts: ranks, and how train and resume run there.

Rank 0 speaks for all: the others print nothing but the loss of another rank.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinscope.cli.options import AsJson, Config, Debug, Quiet, Runs, Set
from twinscope.cli.outcome import Outcome, announce, close, reporting, say
from twinscope.lab.config import read_config
from twinscope.lab.errors import ConfigError
from twinscope.lab.launch import Place, place
from twinscope.lab.run import Run, run_info, runs_root

if TYPE_CHECKING:
    from twinscope.propagation.ranks.group import Ranks
    from twinscope.propagation.ranks.training import Begin, Started

#: Verb -> where it runs over ranks: a module, and its function of ranks, preparation, run and quiet.
_OVER_RANKS = {
    "train": ("twinscope.propagation.ranks.training", "train_over"),
    "ranks": ("twinscope.propagation.ranks.run", "check_over"),
}
#: The verbs that know about ranks; any other would run once on each, in each other's way.
KNOW_RANKS = frozenset({*_OVER_RANKS, "resume"})


def ranks(
    config: Config,
    overrides: Set = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check a job: do all its ranks together give the gradient that one of them gives alone?

    CONFIG is that of a training. Its first batches go through every arm, in fp64 and in its own precision,
    over all ranks and on rank 0 alone.

    Example: torchrun --nproc-per-node 2 -m twinscope ranks experiments/twin-sotu.toml
    """
    with reporting(as_json, debug) as outcome:
        where = place()
        if where is None:
            raise ConfigError(
                "ranks compares several ranks with one, and this is one process: "
                "start it with torchrun --nproc-per-node 2 -m twinscope ranks CONFIG"
            )
        from twinscope.propagation.ranks.config import RanksConfig
        from twinscope.propagation.ranks.run import make_run
        from twinscope.propagation.ranks.training import prepare_over

        def begin(job: Ranks) -> Started:
            prepared = prepare_over(job, read_config(config, RanksConfig, overrides or []), quiet)
            return prepared, lambda: make_run(prepared, runs_root(runs), job)

        _over_ranks(where, begin, quiet, outcome)


def train_over_ranks(
    where: Place, config: Path, overrides: list[str], runs: Path | None, quiet: bool, outcome: Outcome
) -> None:
    """The verb ``train`` on one of several ranks."""
    from twinscope.propagation.config import TrainConfig
    from twinscope.propagation.ranks.training import prepare_over
    from twinscope.propagation.train import create_run

    def begin(job: Ranks) -> Started:
        prepared = prepare_over(job, read_config(config, TrainConfig, overrides), quiet)
        return prepared, lambda: create_run(prepared, runs_root(runs), ranks=job)

    _over_ranks(where, begin, quiet, outcome)


def resume_over_ranks(where: Place, path: Path, quiet: bool, outcome: Outcome) -> None:
    """The verb ``resume`` on one of several ranks; a training may go on on another number of them."""
    from twinscope.propagation.config import TrainConfig
    from twinscope.propagation.ranks.config import RanksConfig
    from twinscope.propagation.ranks.training import prepare_over
    from twinscope.propagation.train import saved_config

    def begin(job: Ranks) -> Started:
        run = Run.open(path)
        if run_info(run.path).status == "complete":
            raise ConfigError(f"{run.path} is complete: there is nothing to resume")
        if run.verb not in _OVER_RANKS:
            raise ConfigError(f"a run of the verb '{run.verb}' has one rank: resume it without torchrun")
        schema = RanksConfig if run.verb == "ranks" else TrainConfig
        return prepare_over(job, saved_config(run, schema), quiet), lambda: run

    _over_ranks(where, begin, quiet, outcome)


def _over_ranks(where: Place, begin: Begin, quiet: bool, outcome: Outcome) -> None:
    """Join the job, and carry out the verb of the run that ``begin`` makes or opens on rank 0."""
    from twinscope.propagation.config import TrainConfig
    from twinscope.propagation.ranks.config import RanksConfig
    from twinscope.propagation.ranks.group import joined
    from twinscope.propagation.ranks.training import begun

    with joined(where) as job, begun(job, begin, [TrainConfig, RanksConfig]) as (prepared, run):
        if isinstance(run, Run):
            outcome.run = run.path
            announce(run, quiet)
        module, name = _OVER_RANKS[run.verb]
        record: dict[str, Any] | None = getattr(import_module(module), name)(job, prepared, run, quiet)
    if record is None:
        outcome.status = "complete"
    elif run.verb == "ranks":
        outcome.status = record["status"]
        outcome.more["passed"] = record["summary"]["passed"]
        if not quiet:
            say(run.path, record)
    else:
        close(run.path, record, quiet, outcome)
