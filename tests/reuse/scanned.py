"""A finished scan of a small Llama, for the verbs that stand on one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny_llama import tiny_config, write_letters, write_llama

from twinscope.lab.run import Run
from twinscope.models.store.origin import file_sha256, write_origin
from twinscope.reuse import plan_run, scan_run, swap_texts

#: The MLP of layer 3 is that of layer 2; the other pairs have nothing in common.
COPIED = "layers.2.mlp=layers.3.mlp"
PAIRS = [COPIED, "layers.0.mlp=layers.1.mlp", "layers.1.self_attn=layers.2.self_attn"]
CHECKED = SimpleNamespace(
    passed=True, hidden_difference=0.0, hidden_tolerance=1e-5, nll_difference=1e-6, nll_tolerance=1e-4
)


def write_source(folder: Path, weights: Any = None) -> Path:
    """A model with one copied MLP, told to be of ``weights`` if given, and a text; returns ``folder``."""
    write_llama(folder / "model", layers=5, copies={"layers.3.mlp": "layers.2.mlp"})
    write_letters(folder / "text.txt")
    if weights is not None:
        names = ["config.json", "model.safetensors"]
        hashes = {name: file_sha256(folder / "model" / name) for name in names}
        write_origin(folder / "model", weights, "a test", hashes)
    return folder


def scanned(source: Path, root: Path, model: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The directory of a scan of ``source`` under ``root``; ``changes`` go into ``[reuse]``."""
    config = tiny_config(source / "model", source / "text.txt", **{"pairs": PAIRS, **changes})
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    with plan_run.create_run(config, root) as run:
        plan_run.plan(run, quiet=True)
    prepared = scan_run.prepare(plan_run.plan_of_run(run.path))
    with scan_run.create_run(prepared, root) as run:
        scan_run.scan(prepared, run, quiet=True)
    return run.path


def copied_run(path: Path, to: Path) -> Path:
    """A copy of a run directory that may be edited."""
    return Path(shutil.copytree(path, to / path.name))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_journal(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the rows of a run's journal in place."""
    file = path / "journal.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def texts_here(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """What stands in for the process that chooses texts, so that a test need not start one."""
    assert module == "twinscope.reuse.swap_texts"
    return {**swap_texts.answer(json.loads(json.dumps(request))), "code": 0}


def journal_keys(path: Path) -> list[str]:
    """The keys of a run's journal, in order."""
    with Run.open(path) as run:
        return [row["key"] for row in run.rows]
