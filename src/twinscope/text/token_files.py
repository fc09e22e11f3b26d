"""Token files in nanoGPT's format: 16-bit ids in ``.bin`` files, with or without a vocabulary beside them.

Covers ``train.bin``/``val.bin`` folders, single ``.bin`` files, and ``meta.pkl`` or ``meta.json``. The ids
stay on disk, memory-mapped. Files with a header (as llm.c writes them) are refused, not converted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twinscope.lab.errors import ConfigError, DataError
from twinscope.text.literal_pickle import read_literal_pickle

_SLAB = 1 << 24
# First 32-bit word of llm.c's token files, which otherwise look like ids.
_HEADER_MAGIC = 20240520


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Memory-mapped ids (uint16, one dimension) of both parts, their vocabulary and its symbols if known."""

    train: np.ndarray
    heldout: np.ndarray
    vocab: int
    symbols: tuple[str, ...] | None
    hashes: dict[str, str]
    description: str


def is_token_corpus(path: Path) -> bool:
    """Whether ``path`` is a ``.bin`` file or a folder with ``train.bin``."""
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def token_corpus(path: Path, heldout: Path | None, heldout_fraction: float, vocab: int | None) -> TokenCorpus:
    """The token files at ``path``, every id checked against the vocabulary.

    Held out are ``heldout`` if given, else ``val.bin`` of the folder, else the last ``heldout_fraction`` of
    a single file. The vocabulary size is ``vocab``, else ``vocab_size`` of ``meta.json`` or ``meta.pkl``
    beside the training file, else the largest id plus one.

    Raises:
        ConfigError: ``vocab`` is smaller than the vocabulary of the meta file.
        DataError: a file is missing, empty or odd-sized, the meta file is malformed, or an id is outside the
            vocabulary.
    """
    train_path = path / "train.bin" if path.is_dir() else path
    heldout_path = heldout or (path / "val.bin" if path.is_dir() else None)
    train = _open_ids(train_path)
    if heldout_path is None:
        cut = len(train) - round(len(train) * heldout_fraction)
        if not 0 < cut < len(train):
            raise DataError(
                f"{path} has {len(train)} tokens, too few to hold out a fraction of {heldout_fraction}: "
                "give a longer file or a heldout path"
            )
        train, held, offset = train[:cut], train[cut:], cut
        described = f"{path}, last {heldout_fraction:g} of it held out"
    else:
        held, offset = _open_ids(heldout_path), 0
        described = f"{train_path}, held out {heldout_path}"

    meta_path = _meta_path(train_path.parent)
    size, symbols = _read_meta(meta_path) if meta_path else (None, None)
    if vocab is not None and size is not None and vocab < size:
        raise ConfigError(
            f"vocab = {vocab} is smaller than the {size} symbols of {meta_path}: raise it or leave it out"
        )
    highest = max(_maximum(train), _maximum(held))
    # A vocab above the meta file's pads the model; the ids themselves still need a symbol.
    allowed = size or vocab or highest + 1
    if highest >= allowed:
        _refuse_outsider(train, allowed, train_path, 0)
        _refuse_outsider(held, allowed, heldout_path or train_path, offset)
    hashes = {"train": _ids_digest(train), "heldout": _ids_digest(held)}
    if meta_path:
        hashes["tokenizer"] = hashlib.sha256(meta_path.read_bytes()).hexdigest()
    return TokenCorpus(train, held, vocab or allowed, symbols, hashes, described)


def _open_ids(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise DataError(f"{path} has {size} bytes, which is no list of 16-bit ids: prepare it again")
        ids = np.memmap(path, dtype="<u2", mode="r")
    except FileNotFoundError:
        raise DataError(f"there is no token file at {path}: check the path, or give a heldout path") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if ids[:2].tobytes() == _HEADER_MAGIC.to_bytes(4, "little"):
        raise DataError(f"{path} begins with a header, not with ids: give a file of 16-bit ids alone")
    return ids


def _meta_path(folder: Path) -> Path | None:
    return next((path for name in ("meta.json", "meta.pkl") if (path := folder / name).is_file()), None)


def _read_meta(path: Path) -> tuple[int, tuple[str, ...] | None]:
    try:
        data = path.read_bytes()
        meta = json.loads(data) if path.suffix == ".json" else read_literal_pickle(data)
        return _vocabulary(meta)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is no vocabulary: {error}; write a meta.json with vocab_size and itos beside the ids"
        ) from None


def _vocabulary(meta: Any) -> tuple[int, tuple[str, ...] | None]:
    size = meta.get("vocab_size") if isinstance(meta, dict) else None
    if type(size) is not int or not 0 < size <= 1 << 16:
        raise ValueError("it has no vocab_size between 1 and 65536")
    itos = meta.get("itos")
    if itos is None:
        return size, None
    if isinstance(itos, dict):
        # JSON knows no whole-number keys.
        symbols = [itos.get(index, itos.get(str(index))) for index in range(size)]
    else:
        symbols = list(itos) if isinstance(itos, list | tuple) else []
    known = tuple(symbol for symbol in symbols if isinstance(symbol, str))
    if not len(symbols) == len(known) == size:
        raise ValueError(f"itos does not give a string to each id below vocab_size = {size}")
    return size, known


def _slabs(ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return [(start, ids[start : start + _SLAB]) for start in range(0, len(ids), _SLAB)]


def _maximum(ids: np.ndarray) -> int:
    return max(int(slab.max()) for _, slab in _slabs(ids))


def _refuse_outsider(ids: np.ndarray, vocab: int, path: Path, offset: int) -> None:
    for start, slab in _slabs(ids):
        outside = np.flatnonzero(slab >= vocab)
        if len(outside):
            first = int(outside[0])
            raise DataError(
                f"{path}: token {offset + start + first} has id {int(slab[first])}, outside the vocabulary "
                f"of {vocab}: correct vocab, the meta file or the token file"
            )


def _ids_digest(ids: np.ndarray) -> str:
    digest = hashlib.sha256()
    for _, slab in _slabs(ids):
        digest.update(slab.tobytes())
    return digest.hexdigest()
