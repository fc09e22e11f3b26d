"""Models with a name: where they lie in the cache, and how a folder comes to be there whole or not at all.

Covers names and paths to folders, the lock of a folder, and moving a finished folder to its place. What the
folders hold is the business of ``fetch.py``, ``imports.py`` and ``synth.py``; deleting is in ``removal.py``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twinscope.lab.config import suggestion
from twinscope.lab.durable import sync_folder, writing
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.run import cache_root
from twinscope.models.store.origin import ORIGIN, read_origin

#: Models that can be fetched by name.
FETCHED = ("smollm2",)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAKING = ".making-"
#: Left free on the disk when the space for a model is checked, in bytes.
_MARGIN = 64 << 20


def models_root() -> Path:
    """The folder of the cache that holds one folder for each model."""
    return cache_root() / "models"


def known_models() -> list[str]:
    """The names of the models in the cache, finished ones only, in order."""
    try:
        return sorted(p.name for p in models_root().iterdir() if _NAME.fullmatch(p.name) and _finished(p))
    except OSError:
        return []


def model_folder(name_or_path: str | Path, quiet: bool = False) -> Path:
    """The folder of a model given by name or by path, as an absolute path.

    A name is one of :data:`FETCHED`, fetched on first use, or of a model in the cache; a name wins over a
    folder of the same name in the current directory, which ``./NAME`` means.

    Raises:
        ConfigError: neither a known name nor a folder, with the nearest name; and as for
            ``fetch.fetch_smollm2``.
        DataError: as for ``fetch.fetch_smollm2``.
    """
    text = str(name_or_path)
    if text in FETCHED:
        return fetch_model(text, quiet=quiet)
    if _NAME.fullmatch(text) and _finished(models_root() / text):
        return models_root() / text
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        return path
    if _NAME.fullmatch(text) and (models_root() / f"{_MAKING}{text}").is_dir():
        raise ConfigError(f"the model '{text}' was not finished: run the command that makes it again")
    known = sorted({*FETCHED, *known_models()})
    raise ConfigError(f"'{text}' is neither a model in the cache nor a folder{suggestion(text, known)}")


def fetch_model(name: str, out: Path | None = None, quiet: bool = False) -> Path:
    """The folder of a model that comes by name, made on the first call; ``out`` is a place of its own.

    Raises:
        ConfigError: an unknown name, with the nearest one; and as for ``fetch.fetch_smollm2``.
        DataError: as for ``fetch.fetch_smollm2``.
    """
    if name not in FETCHED:
        hint = f"; `twinscope model import {name}` takes a folder" if Path(name).is_dir() else ""
        raise ConfigError(f"there is no model '{name}' to fetch{suggestion(name, FETCHED)}{hint}")
    from twinscope.models.store.fetch import fetch_smollm2

    return fetch_smollm2(cache_root(), quiet, out)


def place_of(name: str, out: Path | None) -> Path:
    """Where a model that is to be called ``name`` is put: ``out`` if given, else its place in the cache.

    Raises:
        ConfigError: ``name`` cannot be the name of a folder, or belongs to a model that is fetched.
    """
    if out is not None:
        return Path(out).expanduser().absolute()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot name a model: use up to 64 letters, digits, '.', '_' and '-', or give --out"
        )
    if name in FETCHED:
        raise ConfigError(f"'{name}' is the name of a model that is fetched: choose another with --name")
    return models_root() / name


@contextmanager
def making(folder: Path, keep: bool = False, ours: bool = False) -> Iterator[Path]:
    """A folder to fill beside ``folder``, moved there once the block ends; others are kept out meanwhile.

    The block writes ``twinscope.json`` last. If it fails, nothing is left; with ``keep``, complete files
    stay, and the next call finds them. Files of a ``folder`` that was made here before, damaged for
    example, are replaced one by one; ``ours`` says that it was, whatever it holds.

    Raises:
        ConfigError: ``folder`` holds something that was not made here, another process makes it, or the
            place cannot be written.
    """
    with locked(folder) as work:
        if not ours:
            _refuse_foreign(folder)
        with writing(work):
            for path in work.iterdir():
                # With the lock held, a temporary file is what a killed process left.
                if not keep or path.name.startswith("."):
                    path.unlink()
        try:
            yield work
        except BaseException:
            if not keep:
                shutil.rmtree(work, ignore_errors=True)
            raise
        _publish(work, folder)


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Keep others from making or removing ``folder``, whether it exists or not; yields the lock.

    The lock is the folder ``.making-NAME`` beside it, taken away at the end if it is empty.

    Raises:
        ConfigError: another process holds it, or the place cannot be written.
    """
    work = folder.parent / f"{_MAKING}{folder.name}"
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    busy = f"another process makes or removes {folder}: wait until it ends, or stop it"
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError as error:
            raise ConfigError(
                f"cannot lock {work} ({error.strerror}): choose a file system that has locks"
            ) from error
        # Another process may have moved the folder to its place between the two calls.
        if not work.exists() or not os.path.samestat(os.stat(work), os.fstat(descriptor)):
            raise ConfigError(busy)
        yield work
    finally:
        with suppress(OSError):
            work.rmdir()
        os.close(descriptor)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Return if the disk of ``folder``, which need not exist yet, has ``needed`` bytes and some to spare.

    Raises:
        Stopped: it has not; the sentence gives both sizes.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed + _MARGIN:
        raise Stopped(
            f"{what} takes {needed / 2**20:,.0f} MiB in {folder}, where {free / 2**20:,.0f} MiB are free: "
            "free some or give another place with --out, then run the command again"
        )


def _finished(folder: Path) -> bool:
    return (folder / ORIGIN).is_file()


def _refuse_foreign(folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: choose another place with --out")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            made_here = read_origin(folder) is not None
        except DataError:
            made_here = True
        if not made_here:
            raise ConfigError(
                f"{folder} holds files that twinscope did not make: choose another place with --out"
            )


def _publish(work: Path, folder: Path) -> None:
    """Move what is finished in ``work`` to ``folder``, its ``twinscope.json`` last."""
    with writing(folder):
        if not folder.exists():
            os.rename(work, folder)
        else:
            for path in sorted(work.iterdir(), key=lambda path: path.name == ORIGIN):
                os.replace(path, folder / path.name)
            sync_folder(folder)
        sync_folder(folder.parent)
