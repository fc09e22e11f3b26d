"""How every verb ends: the JSON line, the sentence of an error, the exit code, and a run's closing lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from twinscope.lab.errors import ConfigError, RankLost, TwinscopeError
from twinscope.lab.launch import Place, place
from twinscope.lab.run import Run, run_info


class Outcome:
    """What ``--json`` prints at the end, filled in while a verb runs."""

    def __init__(self) -> None:
        self.run: Path | None = None
        self.status = "failed"
        self.more: dict[str, Any] = {}

    def line(self) -> str:
        run = str(self.run) if self.run is not None else None
        return json.dumps({"run": run, "status": self.status, **self.more})


@contextmanager
def reporting(as_json: bool, debug: bool) -> Iterator[Outcome]:
    """Print the JSON line at the end and turn errors into a sentence and an exit code.

    Of several ranks, rank 0 speaks; another one prints only what rank 0 cannot know.
    """
    outcome = Outcome()
    code = 0
    where = _place()
    leads = where is None or where.rank == 0
    try:
        yield outcome
    except TwinscopeError as error:
        if debug:
            raise
        code = error.exit_code
        outcome.status = "stopped" if code == 75 else "failed"
        outcome.more["error"] = str(error)
        if leads or isinstance(error, RankLost):
            complain(str(error))
    except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        code, outcome.status = 75, "stopped"
        retry = f"continue with: twinscope resume {outcome.run}" if outcome.run else "start it again"
        outcome.more["error"] = f"interrupted; {retry}"
        if leads:
            complain(outcome.more["error"])
    except Exception as error:
        if _out_of_memory(error):
            code = 75
            outcome.more["error"] = "out of memory: choose a smaller model, batch or context"
            complain(outcome.more["error"])
        elif debug:
            raise
        else:
            code = 1
            outcome.more["error"] = f"{type(error).__name__}: {error}"
            complain(
                f"a defect of twinscope, not of your input: {type(error).__name__}: {error} "
                "(run again with --debug for the traceback)"
            )
    if as_json and leads:
        print(outcome.line(), flush=True)
    if code and where is not None:
        # Closing the connections of a failed job waits for ranks that may be waiting for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)


def close(path: Path, record: dict[str, Any], quiet: bool, outcome: Outcome) -> None:
    """Make the report of a complete run and say where everything is."""
    from twinscope.report.page import render

    outcome.status = record["status"]
    try:
        page = render([path], None)
    except TwinscopeError as error:
        # The run itself is complete and stays so.
        complain(f"the run is complete, its report is not: {error}; make it with twinscope report {path}")
        return
    outcome.more["report"] = str(page)
    if not quiet:
        say(path, record)
        print(f"report: {page}")


def say(path: Path, record: dict[str, Any]) -> None:
    """Print headline, claims and place of a complete run."""
    info = run_info(path)
    if info.headline:
        print(info.headline)
    for claim in record["claims"]:
        print(f"- {claim['statement']}")
    print(f"run:    {path}")


def _place() -> Place | None:
    """The place among several ranks; a verb that needs one says what is wrong with it."""
    try:
        return place()
    except ConfigError:
        return None


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        # torch's CPU allocator has no error type of its own.
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    )


def announce(run: Run, quiet: bool) -> None:
    """Say where the run is before it starts: the way to find, watch and resume it."""
    if not quiet:
        print(f"run:    {run.path}", file=sys.stderr)


def complain(sentence: str) -> None:
    print(f"twinscope: {sentence}", file=sys.stderr)
