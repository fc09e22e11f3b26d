"""The command ``twinscope``: parse, call, exit code. No science.

Every verb takes ``--json`` (the last line of standard output is then one JSON object with ``run`` and
``status``), ``--quiet`` and ``--debug``. Errors are one sentence on standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from typing import Annotated

import typer

from twinscope.cli import cost, models, ranks, reuse, runs, training
from twinscope.cli.outcome import complain, reporting
from twinscope.lab.config import suggestion
from twinscope.lab.errors import ConfigError
from twinscope.lab.launch import place

app = typer.Typer(
    name="twinscope",
    help="Paired, evidence-graded experiments on transformer language models.",
    epilog="Start with: twinscope demo. Every run is a directory; an interrupted one continues with "
    "twinscope resume RUN.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _global(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(metadata.version("twinscope"))
        raise typer.Exit
    verb = context.invoked_subcommand
    if verb is None:
        print(context.get_help())
    elif verb not in ranks.KNOW_RANKS and os.environ.get("WORLD_SIZE", "1").strip() not in ("", "1"):
        # Only here, because it prints the JSON line also of what went well.
        with reporting("--json" in sys.argv, debug=False):
            if place() is not None:
                raise ConfigError(
                    f"{verb} does not run over ranks, and WORLD_SIZE = {os.environ['WORLD_SIZE']} says that "
                    "this is one of several: start it without torchrun, or unset WORLD_SIZE"
                )


#: The verbs in the order in which the help lists them; each is named after its function.
VERBS = (
    training.demo,
    training.train,
    training.leak,
    training.collapse,
    cost.cost,
    ranks.ranks,
    reuse.probe,
    reuse.plan,
    reuse.scan,
    reuse.swap,
    reuse.neurons,
    runs.resume,
    runs.runs,
    runs.report,
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(models.app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 1, 2, 65 or 75."""
    # On a machine whose cores others use too, OpenMP threads that spin while they wait bring two threads to a
    # crawl (measured: over 25 s for what takes 3 s). A short spin costs 0 to 3 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if os.environ.get("WORLD_SIZE"):
        # Warnings of the library about a rank that is gone come with its stack, and hide our one sentence.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        code = app(arguments, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted before a run began: start it again")
        sys.exit(75)
    except typer.TyperException as error:
        sentence = _usage_sentence(error)
        complain(sentence)
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            print(json.dumps({"run": None, "status": "failed", "error": sentence}))
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _usage_sentence(error: typer.TyperException) -> str:
    """What the parser objects to, in one sentence, with the nearest verb for a mistyped one."""
    message = str(getattr(error, "format_message", error.__str__)()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    verb = ""
    # Under a verb that has verbs of its own, those are the ones that were meant.
    listed = getattr(context.command, "list_commands", None) if context is not None else None
    known = listed(context) if listed is not None else []
    while context is not None and context.parent is not None:
        verb = f" {context.info_name}{verb}"
        context = context.parent
    mistyped = re.match(r"No such command '([^']*)'", message)
    if mistyped:
        message = f"there is no verb '{mistyped[1]}'{suggestion(mistyped[1], known)}"
    return f"{message}; see twinscope{verb} --help"
