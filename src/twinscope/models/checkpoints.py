"""Checkpoints of a training run: a folder of safetensors with a JSON manifest, written whole or not at all.

Covers layout, hashes and finding one by seed and step. What the tensors mean is the writer's business.
No pickle is ever written or read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from twinscope.lab.durable import sync_folder, write_atomic, writing
from twinscope.lab.errors import DataError
from twinscope.models.gpt import GPTConfig
from twinscope.models.weights import load_tensors, save_tensors

_NAME = re.compile(r"seed-(\d+)-step-(\d+)")


class ArmCounters(BaseModel):
    """What an arm counted: steps skipped, and the training losses since the last evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rule: str
    skipped: int
    skipped_in_a_row: int
    losses: list[float]


class Manifest(BaseModel):
    """What a checkpoint holds; ``parts`` maps a file's name to the sha256 of its bytes.

    ``journal_rows`` is how many rows the run's journal had: a shorter journal has lost some. ``digest`` is
    the sha256 of the manifest without it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_: Literal["twinscope.checkpoint/1"] = "twinscope.checkpoint/1"
    seed: int
    step: int
    shape: GPTConfig
    data: dict[str, str]
    arms: dict[str, ArmCounters]
    parts: dict[str, str]
    journal_rows: int
    digest: str = ""

    def sealed(self) -> Manifest:
        """The same with its digest."""
        content = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": hashlib.sha256(content.encode()).hexdigest()})


def folder_name(seed: int, step: int) -> str:
    """The folder's name; names of one seed sort by step."""
    return f"seed-{seed}-step-{step:07d}"


def write_checkpoint(
    folder: Path,
    *,
    seed: int,
    step: int,
    shape: GPTConfig,
    data: Mapping[str, str],
    arms: Mapping[str, ArmCounters],
    parts: Mapping[str, dict[str, Tensor]],
    journal_rows: int,
) -> Path:
    """Write one checkpoint into ``folder``; it appears under its name only when it is complete.

    ``parts`` maps a file stem to its tensors. An existing checkpoint of the same seed and step is kept:
    training is deterministic, so it holds the same bytes.
    """
    final = folder / folder_name(seed, step)
    if final.exists():
        return final
    draft = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with writing(draft):
            draft.mkdir(parents=True)
        hashes = {}
        for stem, tensors in parts.items():
            hashes[f"{stem}.safetensors"] = save_tensors(draft / f"{stem}.safetensors", tensors, {})
        manifest = Manifest(
            seed=seed,
            step=step,
            shape=shape,
            data=dict(data),
            arms=dict(arms),
            parts=hashes,
            journal_rows=journal_rows,
        ).sealed()
        write_atomic(draft / "manifest.json", manifest.model_dump_json(indent=1).encode())
        with writing(final):
            sync_folder(draft)
            draft.rename(final)
            sync_folder(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        DataError: it is missing, malformed, or of another version.
    """
    path = checkpoint / "manifest.json"
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{checkpoint} is no checkpoint: it has no manifest.json") from None
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"the checkpoint manifest {path} cannot be read: {reason}") from None
    if manifest.sealed().digest != manifest.digest:
        raise DataError(f"the checkpoint manifest {path} was changed: its digest does not match")
    if checkpoint.name != folder_name(manifest.seed, manifest.step):
        raise DataError(
            f"{checkpoint} holds seed {manifest.seed}, step {manifest.step}: it was moved from elsewhere"
        )
    return manifest


def read_part(checkpoint: Path, manifest: Manifest, stem: str) -> dict[str, Tensor]:
    """The tensors of one file, its bytes checked against the manifest.

    Raises:
        DataError: the part is unknown or missing, or its bytes changed.
    """
    name = f"{stem}.safetensors"
    if name not in manifest.parts:
        raise DataError(
            f"the checkpoint {checkpoint} has no part {name} (it has {', '.join(manifest.parts)})"
        )
    return load_tensors(checkpoint / name, manifest.parts[name])


def find_checkpoints(folder: Path, seed: int | None = None) -> list[tuple[int, int, Path]]:
    """(seed, step, path) of every complete checkpoint in ``folder``, by seed and then by step."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and seed in (None, int(match[1])):
            found.append((int(match[1]), int(match[2]), path))
    return sorted(found)


def prune(folder: Path, seed: int, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints of one seed, and drafts that a kill left behind."""
    for _, _, path in find_checkpoints(folder, seed)[:-keep]:
        # Renamed first, so that a kill in the middle leaves a draft and no damaged checkpoint.
        doomed = path.with_name(f".{path.name}.removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    for draft in folder.glob(".seed-*"):
        shutil.rmtree(draft, ignore_errors=True)
