"""Deleting the weights of a model in the cache: the only code that does, and it is logged for good.

Covers one model at a time, after an explicit confirmation. The log ``removed.jsonl`` in the cache is only
ever appended to; its line is on disk before the first byte goes. Folders outside the cache are never touched,
and neither are packages that were downloaded.

An interrupted removal leaves one of two states: the model is whole under its name, or it is gone from there
and the rest of it lies in ``.removing-NAME``, which the next removal of that name clears away.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinscope.lab.config import suggestion
from twinscope.lab.durable import sync_folder, write_all, writing
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import utc_now
from twinscope.lab.run import cache_root
from twinscope.models.store.library import known_models, locked, models_root
from twinscope.models.store.origin import content_sha256, file_sha256, read_origin

_REMOVING = ".removing-"


@dataclass(frozen=True)
class Removal:
    """What was deleted: the folder, its files' total size, and one hash over their contents."""

    folder: Path
    nbytes: int
    sha256: str


def removal_log() -> Path:
    """The log of every deletion, a JSON object to a line: ``event`` is ``removing``, then ``removed``."""
    return cache_root() / "removed.jsonl"


def remove_model(name_or_path: str | Path, confirmed: bool, quiet: bool = False) -> Removal:
    """Delete one model in the cache, given by its name or its path there, finished or not.

    Raises:
        ConfigError: not ``confirmed``; no such model; a folder outside the cache's models, or a link; one
            that another process makes; or the log or folder cannot be written.
        DataError: a file of it cannot be read, so that the log could not say what it was.
    """
    folder = _inside(name_or_path)
    trash = folder.parent / f"{_REMOVING}{folder.name}"
    unfinished = folder.parent / f".making-{folder.name}"
    if not folder.is_dir() and not trash.is_dir() and not (unfinished.is_dir() and any(unfinished.iterdir())):
        raise ConfigError(f"there is no model '{folder.name}'{suggestion(folder.name, known_models())}")
    if not confirmed:
        size = sum(path.stat().st_size for path in _files(folder)) if folder.is_dir() else 0
        raise ConfigError(
            f"{folder} ({size / 2**20:,.0f} MiB) was not removed: to delete its weights for good, add "
            f"--yes-delete-weights to `twinscope model remove {folder.name}`"
        )
    with locked(folder) as work:
        hashes: dict[str, str] = {}
        sizes: dict[str, int] = {}
        places = [place for place in (folder, trash, work) if place.is_dir()]
        with Progress(f"removing {folder.name}", quiet) as progress:
            for place in places:
                found = _files(place)
                for done, path in enumerate(found):
                    name = os.path.relpath(path, folder.parent)
                    progress.update(done, len(found), name)
                    try:
                        sizes[name], hashes[name] = path.stat().st_size, file_sha256(path)
                    except OSError as error:
                        raise DataError(
                            f"cannot read {path} ({error.strerror}), so nothing was removed: the log must "
                            "say what was deleted"
                        ) from None
        removal = Removal(folder, sum(sizes.values()), content_sha256(hashes))
        entry = {
            "what": folder.name,
            "folder": str(folder),
            **_what_it_was(folder),
            "bytes": removal.nbytes,
            "sha256": removal.sha256,
            "files": {name: {"bytes": sizes[name], "sha256": hashes[name]} for name in sorted(hashes)},
        }
        _log({"event": "removing", "when": utc_now(), **entry})
        with writing(folder):
            if trash.is_dir():
                shutil.rmtree(trash)
            if folder.is_dir():
                # In one step, so that no half of a model keeps the name.
                os.rename(folder, trash)
                sync_folder(folder.parent)
                shutil.rmtree(trash)
            for path in work.iterdir():
                path.unlink()
            sync_folder(folder.parent)
        _log({"event": "removed", "when": utc_now(), "what": folder.name, "sha256": removal.sha256})
    return removal


def _inside(name_or_path: str | Path) -> Path:
    """The folder of a model, once it is certain that it is a folder of the cache's models and no link."""
    root = models_root()
    text = str(name_or_path)
    folder = root / text if os.sep not in text else Path(text).expanduser().absolute()
    real_root = Path(os.path.realpath(root))
    if (
        text in ("", ".", "..")
        or folder.name.startswith(".")
        or Path(os.path.realpath(folder.parent)) != real_root
    ):
        raise ConfigError(
            f"'{text}' is no model in {root}: only models there are removed, other folders are left to you"
        )
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link, not a model: remove the link yourself")
    return folder


def _files(folder: Path) -> list[Path]:
    """Every file under ``folder``, links not followed, in order."""
    return sorted(
        Path(place) / name
        for place, _, names in os.walk(folder)
        for name in names
        if not os.path.islink(os.path.join(place, name))
    )


def _what_it_was(folder: Path) -> dict[str, Any]:
    try:
        origin = read_origin(folder)
    except DataError:
        origin = None
    if origin is None:
        return {"weights": None, "source": None, "reason": "it had no twinscope.json that could be read"}
    return {"weights": origin.weights, "source": origin.source}


def _log(entry: dict[str, Any]) -> None:
    """Append one line to the log; it is on disk when the call returns."""
    path = removal_log()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            write_all(descriptor, json.dumps(entry).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
