"""A model from outside into the cache: a Hugging Face folder copied, or a GGUF file converted.

Covers checking the source before anything is written, and the copy. The folder it makes can be opened by
``open_streamed`` and by the library; what it holds is said in its ``twinscope.json``. Not covered: downloads
(``fetch.py``), code that comes with a model (never run), quantised folders, adapters.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from twinscope.lab.durable import writing
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.progress import Progress
from twinscope.models.store.library import making, place_of, require_space
from twinscope.models.store.origin import Kind, Origin, file_sha256, is_whole, read_origin, write_origin
from twinscope.models.tensor_files import TensorFiles, open_tensors

_INDEX = "model.safetensors.index.json"
#: Files that are copied beside the weights where they are there.
_TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "LICENSE",
)
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_PIECE = 1 << 20
_ROWS = 1 << 22  # values looked through at a time


def import_model(
    path: Path | str,
    *,
    name: str | None = None,
    out: Path | None = None,
    weights: Kind | None = None,
    tokenizer: Path | None = None,
    quiet: bool = False,
) -> Path:
    """Bring the model at ``path``, a Hugging Face folder or a GGUF file, into the cache; returns its folder.

    ``name`` is the file's or folder's own unless given; ``out`` is a place of its own instead. ``weights``
    says what they are, ``"released"`` unless the source has a ``twinscope.json`` that says otherwise.
    ``tokenizer`` is a ``tokenizer.json`` for a source without one that can be used. What is there already
    is found, not made again.

    Raises:
        DataError: the source is missing, damaged, hostile or incomplete, brings code of its own, holds
            pickles, quantised weights, or values that are not finite; the sentence names the file and tensor.
        ConfigError: an architecture that the installed library lacks, a name that is taken, or a place that
            cannot be written.
        Stopped: the disk has too little space.
    """
    path = Path(path).expanduser().absolute()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if is_file and path.suffix.lower() in _PICKLES:
        raise DataError(
            f"{path} is a pickle by its name, which runs code when opened: "
            "convert it to .safetensors where you trust it"
        )
    if not is_folder and not is_file:
        raise DataError(f"there is no {path}: give a Hugging Face folder or a GGUF file")
    if is_file and path.suffix == ".safetensors":
        raise ConfigError(f"{path} are weights alone: give the folder, which has a config.json too")
    stem = path.name if is_folder else path.stem
    folder = place_of(name or re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._").lower(), out)
    if folder == path:
        raise ConfigError(f"{path} is in its place already: there is nothing to import")
    if is_folder:
        return _import_folder(path, folder, weights, tokenizer, quiet)
    return _import_gguf(path, folder, weights or "released", tokenizer, quiet)


def _import_folder(
    path: Path, folder: Path, weights: Kind | None, tokenizer: Path | None, quiet: bool
) -> Path:
    from twinscope.models.store.gguf_import import read_tokenizer

    if not (path / "config.json").is_file() and any(path.glob("*.gguf")):
        raise ConfigError(f"{path} holds GGUF files: give the path of one of them")
    _openable(path)
    origin = read_origin(path)
    if origin is not None and not is_whole(path):
        raise DataError(f"{path} is not what its twinscope.json says: make the model again")
    with open_tensors(path) as files:
        shards = sorted({files.entry(tensor).file.name for tensor in files.names})
        names = ["config.json", *shards, *(text for text in _TEXTS if (path / text).is_file())]
        if (path / _INDEX).is_file() and "model.safetensors" not in shards:
            names.append(_INDEX)
        size = sum((path / each).stat().st_size for each in names)
        found = read_origin(folder)
        if found is not None and is_whole(folder):
            same = all(found.files.get(each) == file_sha256(path / each) for each in names)
            return _there(folder, found, same)
        with making(folder) as work:
            require_space(work, size, f"a copy of {path}")
            hashes = {}
            with Progress(f"{path.name}, MiB", quiet) as progress:
                done = 0

                def advance(count: int, what: str) -> None:
                    nonlocal done
                    done += count
                    progress.update(done >> 20, 2 * size >> 20, what)

                for tensor in files.names:
                    _look_through(files, tensor, advance)
                done = size
                for each in names:
                    hashes[each] = _copy(path / each, work / each, lambda n, each=each: advance(n, each))
            if tokenizer is not None:
                (work / "tokenizer.json").write_text(read_tokenizer(tokenizer), encoding="utf-8")
                hashes["tokenizer.json"] = file_sha256(work / "tokenizer.json")
            kind: Kind = weights or (origin.weights if origin is not None else "released")
            details = {**(origin.details if origin is not None else {}), "imported_from": str(path)}
            source = origin.source if origin is not None else f"imported from {path}"
            write_origin(work, kind, source, hashes, details)
    return folder


def _import_gguf(path: Path, folder: Path, weights: Kind, tokenizer: Path | None, quiet: bool) -> Path:
    from twinscope.models.store.gguf_import import convert_gguf

    source_sha256 = file_sha256(path)
    found = read_origin(folder)
    if found is not None and is_whole(folder):
        return _there(folder, found, found.details.get("source_sha256") == source_sha256)
    with making(folder) as work:
        converted = convert_gguf(path, work, tokenizer, quiet)
        _openable(work)
        details = {
            "architecture": converted.architecture,
            "source_sha256": source_sha256,
            "imported_from": str(path),
        }
        if converted.tokenizer_reason is not None:
            details["no_tokenizer"] = converted.tokenizer_reason
        write_origin(work, weights, f"converted from {path}", converted.files, details)
    return folder


def _openable(folder: Path) -> None:
    """Refuse what cannot be opened: configuration, headers and names are all read, no large matrix is."""
    from twinscope.models.streamed.model import open_streamed

    with open_streamed(folder, budget_mib=None):
        pass


def _there(folder: Path, found: Origin, same: bool) -> Path:
    if same:
        return folder
    raise ConfigError(
        f"{folder} holds another model ({found.source}): choose another with --name or --out, or remove it"
    )


def _look_through(files: TensorFiles, name: str, advance: Callable[[int, str], None]) -> None:
    """Read every value of a tensor, so that NaN and infinity are found before they are copied."""
    entry = files.entry(name)
    if entry.dtype not in _FLOATS or not entry.nbytes:
        advance(entry.nbytes, name)
        return
    if not entry.shape:
        files.read(name)
    else:
        step = max(1, _ROWS // max(1, math.prod(entry.shape[1:])))
        for start in range(0, entry.shape[0], step):
            files.read(name, rows=(start, min(entry.shape[0], start + step)))
    advance(entry.nbytes, name)


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> str:
    """Copy one file in pieces, to disk; returns its SHA-256."""
    digest = hashlib.sha256()
    with writing(target), target.open("wb") as sink:
        try:
            file = source.open("rb")
        except OSError as error:
            raise DataError(f"cannot read {source}: {error.strerror}") from None
        with file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                sink.write(piece)
                advance(len(piece))
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()
