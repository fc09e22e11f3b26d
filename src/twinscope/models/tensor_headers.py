"""What safetensors files say of themselves: headers and indexes, checked before they are trusted.

Covers which files hold a model's tensors, and every check of a header that the official library makes and
some more. No value is read here (``tensor_files.py``).

Layout: 8 bytes little-endian length n of the header, n bytes of JSON ``{name: {"dtype", "shape",
"data_offsets": [begin, end]}}`` with offsets relative to byte 8 + n, then the values, row-major and
little-endian, without holes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinscope.lab.errors import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "restore it from a copy or fetch it again"

#: Bytes of one value of every type of the format.
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
_SIZES |= {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
#: A header of this many bytes names a quarter of a million tensors; parsing takes some ten times as much.
_HEADER_LIMIT = 32 << 20
_START = 8
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``dtype`` as the format names it, ``offset`` in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OpenFile:
    """An open file and what it was when it was opened: size in bytes, time of its last change."""

    path: Path
    descriptor: int
    size: int
    changed_ns: int


def choose_files(place: Path) -> dict[str, Path]:
    """Tensor name -> file for a file or a folder, as an index has it; a file alone has the empty name.

    Raises:
        DataError: as for :func:`~twinscope.models.tensor_files.open_tensors`.
    """
    try:
        mode = place.stat().st_mode
        if not stat.S_ISDIR(mode):
            return {"": place}
        found = sorted(item.name for item in place.iterdir())
    except FileNotFoundError:
        raise DataError(f"there is no {place}: give the folder of a model or a .safetensors file") from None
    except OSError as error:
        raise DataError(f"cannot read {place}: {error.strerror}") from None
    if SINGLE in found:
        return {"": place / SINGLE}
    if INDEX in found:
        return _read_index(place / INDEX)
    tensors = [name for name in found if name.endswith(".safetensors")]
    if len(tensors) == 1:
        return {"": place / tensors[0]}
    if tensors:
        raise DataError(
            f"{place} holds {len(tensors)} .safetensors files but no {INDEX}: fetch the index too"
        )
    pickles = [name for name in found if Path(name).suffix.lower() in _PICKLES]
    if pickles:
        raise DataError(
            f"{place} holds its weights as pickles ({pickles[0]}), which run code when opened: "
            "convert them to .safetensors where you trust them"
        )
    raise DataError(f"{place} holds no .safetensors file: give the folder of a model")


def _read_index(path: Path) -> dict[str, Path]:
    try:
        if path.stat().st_size > _HEADER_LIMIT:
            raise DataError(f"{path} is {path.stat().st_size} bytes long, which no index is: {AGAIN}")
        weight_map = _json(path.read_bytes())["weight_map"]
        pairs = [(str(name), file) for name, file in weight_map.items()]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no index of tensors ({_reason(error)}): {AGAIN}") from None
    chosen = {}
    for name, file in pairs:
        # A name alone: a separator or '..' would reach outside the folder.
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise DataError(f"{path} names {file!r}, a file outside its folder: {AGAIN}")
        if Path(file).suffix.lower() in _PICKLES:
            raise DataError(f"{path} names the pickle {file}, which runs code when opened: convert it first")
        chosen[name] = path.parent / file
    if not chosen:
        raise DataError(f"{path} names no tensors: {AGAIN}")
    return chosen


def open_file(path: Path) -> OpenFile:
    """Open one file for reading at any place; the caller closes the descriptor.

    Raises:
        DataError: no such file, no regular file, a pickle by its name.
    """
    if path.suffix.lower() in _PICKLES:
        raise DataError(
            f"{path} is a pickle by its name, which runs code when opened: "
            "convert it to .safetensors where you trust it"
        )
    try:
        # Not blocking, so that a named pipe is refused below instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataError(f"there is no weights file {path}: fetch the model again") from None
    except OSError as error:
        raise DataError(f"cannot read the weights file {path}: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is no regular file: give the path of a .safetensors file")
    return OpenFile(path, descriptor, status.st_size, status.st_mtime_ns)


def read_header(opened: OpenFile) -> dict[str, Entry]:
    """Every tensor of one file, once its type, shape and place have been checked against the file's size.

    Raises:
        DataError: a header that is truncated, damaged or hostile.
    """
    path = opened.path
    start = os.pread(opened.descriptor, _START, 0)
    if len(start) < _START:
        raise DataError(f"{path} is truncated ({opened.size} bytes, not even a header's length): {AGAIN}")
    (length,) = struct.unpack("<Q", start)
    if length > opened.size - _START:
        raise DataError(
            f"{path} is truncated or no safetensors file (its header would take {length} bytes, "
            f"{opened.size - _START} are there): {AGAIN}"
        )
    if length > _HEADER_LIMIT:
        raise DataError(f"{path} is no safetensors file (its header would be {length} bytes long): {AGAIN}")
    text = os.pread(opened.descriptor, length, _START)
    try:
        header = _json(text)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        header.pop("__metadata__", None)
        entries = {
            name: _entry(path, name, value, _START + length, opened.size) for name, value in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged (its header: {_reason(error)}): {AGAIN}") from None
    end = _START + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise DataError(f"{path} is damaged ('{name}' {what}): {AGAIN}")
        end += entry.nbytes
    if end != opened.size:
        what = "truncated" if end > opened.size else "damaged"
        raise DataError(
            f"{path} is {what} (its tensors end at byte {end}, the file at {opened.size}): {AGAIN}"
        )
    return entries


def _entry(path: Path, name: str, value: Any, base: int, size: int) -> Entry:
    dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _SIZES:
        raise ValueError(f"'{name}' has the unknown type {dtype!r}")
    numbers = [*shape, begin, end]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"'{name}' has a shape or offsets that are no natural numbers")
    if not begin <= end or base + end > size:
        raise ValueError(f"'{name}' lies at {begin} … {end}, outside the file")
    if math.prod(shape) * _SIZES[dtype] != end - begin:
        raise ValueError(f"'{name}' is {dtype} of the shape {shape} but takes {end - begin} bytes")
    return Entry(dtype, tuple(shape), path, base + begin, end - begin)


def _json(text: bytes) -> Any:
    """JSON in UTF-8, in which no object has a key twice."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key '{key}' occurs twice")
            found[key] = value
        return found

    return json.loads(text.decode("utf-8"), object_pairs_hook=unique)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, KeyError):
        return f"{text} is missing"
    return text.rstrip(".")[:200]
