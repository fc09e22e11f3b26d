"""The arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
