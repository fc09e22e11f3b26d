"""Named tensors on disk, and into a model: safetensors files that are checked before they are trusted.

Covers writing one file whole or not at all, its hash, reading it back, and copying it into a module
without guessing. Pickled files are never opened: unpickling runs code from the file. Streaming a file
that does not fit in memory is not covered.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Mapping
from operator import index
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import DataError

_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
#: A zip archive (torch.save) and a bare pickle of protocol 2 to 5.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PICKLE_REASON = "pickles run code when opened, so convert it to .safetensors where you trust it"
#: Where the header starts: after its length, a little-endian 64-bit number.
_START = 8
#: The format's own limit on its JSON header, in bytes.
_HEADER_LIMIT = 100_000_000


def save_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write ``tensors`` as one safetensors file and return the SHA-256 of its bytes in hex.

    Equal tensors and metadata give equal bytes, in whatever order they come. Values are written as they
    are, NaN included, from any device. Memory: about twice the size of the tensors.

    Raises:
        ValueError: two names hold the same memory, as tied parameters do in ``state_dict()``; pass each
            once (:func:`model_tensors`).
        DataError: the path names a pickle file.
        Stopped, ConfigError, TwinscopeError: as for :func:`~twinscope.lab.durable.write_atomic`.
    """
    path = Path(path)
    _refuse_pickle_name(path)
    seen: dict[tuple[torch.device, int, int], str] = {}
    ready = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.nbytes)
        if tensor.numel() and memory in seen:
            raise ValueError(f"{seen[memory]} and {name} are one tensor: save it under one name")
        seen[memory] = name
        packed = tensor.detach().cpu().contiguous()
        # A view of something larger is copied out: the library refuses storage that is shared.
        ready[name] = packed if packed.untyped_storage().nbytes() == packed.nbytes else packed.clone()
    data = _with_metadata(save(ready), metadata or {})
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def load_tensors(path: Path | str, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on the CPU, in memory of their own.

    ``sha256`` is what :func:`save_tensors` returned; with it, any changed byte is found. Without it only
    damage to the file's structure is.

    Raises:
        DataError: the file is missing, truncated, malformed, a pickle, or does not match ``sha256``.
    """
    path = Path(path)
    data = _read(path)
    _read_header(path, data, sha256)
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is damaged ({reason}): restore it from a copy or make it again") from None


def read_metadata(path: Path | str) -> dict[str, str]:
    """The metadata that :func:`save_tensors` put into a file; empty if there is none.

    Raises:
        DataError: as for :func:`load_tensors`.
    """
    path = Path(path)
    return _read_header(path, _read(path), None)["__metadata__"]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a file of ``model`` holds: every parameter and persistent buffer once, under its first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], origin: str = "the weights") -> None:
    """Copy ``tensors`` into ``model``, all of them or, on any doubt, none; ``origin`` names them in errors.

    Names, shapes and dtypes must be exactly those of :func:`model_tensors`; no value may be NaN or
    infinite. Nothing is cast, so a checkpoint cannot lose precision on its way.

    Raises:
        DataError: a tensor is missing, unexpected, of another shape or dtype, or not finite; names it.
    """
    own = model_tensors(model)
    missing = [name for name in own if name not in tensors]
    if missing:
        raise DataError(f"{origin} lack {_some(missing)}: they belong to a model of another architecture")
    unexpected = [name for name in tensors if name not in own]
    if unexpected:
        raise DataError(
            f"{origin} hold {_some(unexpected)}, which this model does not have: "
            "they belong to a model of another architecture"
        )
    for name, target in own.items():
        source = tensors[name]
        if source.shape != target.shape:
            raise DataError(
                f"{origin}: {name} has shape {_shape(source)} but this model needs {_shape(target)}: "
                "give the model the shape it was saved with"
            )
        if source.dtype != target.dtype:
            raise DataError(
                f"{origin}: {name} is {_dtype(source)} but this model is {_dtype(target)}: "
                "build the model in that dtype, or cast the weights on purpose"
            )
    damaged = [name for name in own if not bool(torch.isfinite(tensors[name]).all())]
    if damaged:
        raise DataError(
            f"{origin}: NaN or infinite values in {_some(damaged)}: use a checkpoint from before it diverged"
        )
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(tensors[name])


def _with_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    # The library writes metadata in hash-map order, which differs from call to call; equal content must
    # give an equal hash, so the header is put together here.
    size = _header_size(data)
    header = json.loads(data[_START : _START + size])
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    return b"".join((struct.pack("<Q", len(text)), text, memoryview(data)[_START + size :]))


def _read(path: Path) -> bytes:
    _refuse_pickle_name(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no weights file {path}: give the path of a .safetensors file") from None
    except OSError as error:
        raise DataError(f"cannot read the weights file {path}: {error.strerror}") from None


def _read_header(path: Path, data: bytes, sha256: str | None) -> dict[str, Any]:
    """The JSON header of safetensors ``data``, once lengths, pickle marks and hash have been checked."""
    # A header 640 bytes long starts like a pickle; only its opening brace tells them apart.
    if data.startswith(_PICKLE_STARTS) and data[_START : _START + 1] != b"{":
        raise DataError(f"{path} is a pickle under another name: {_PICKLE_REASON}")
    again = "restore it from a copy or make it again"
    if len(data) < _START:
        raise DataError(f"{path} is truncated ({len(data)} bytes, not even a header's length): {again}")
    size = _header_size(data)
    if size > _HEADER_LIMIT:
        raise DataError(f"{path} is no safetensors file (its header would be {size} bytes long): {again}")
    if size > len(data) - _START:
        raise DataError(
            f"{path} is truncated (its header takes {size} bytes, {len(data) - _START} are there): {again}"
        )
    try:
        header = json.loads(data[_START : _START + size])
        ends = [index(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        header["__metadata__"] = dict(header.get("__metadata__", {}))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise DataError(f"{path} is damaged (its header is no list of tensors): {again}") from None
    promised, held = max(ends, default=0), len(data) - _START - size
    if held != promised:
        what = "truncated" if held < promised else "damaged"
        raise DataError(
            f"{path} is {what} (its tensors take {promised} bytes, but {held} follow the header): {again}"
        )
    if sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise DataError(f"{path} changed since it was written (sha256 {found}, not {sha256}): {again}")
    return header


def _header_size(data: bytes) -> int:
    return struct.unpack_from("<Q", data)[0]


def _refuse_pickle_name(path: Path) -> None:
    if path.suffix.lower() in _PICKLES:
        raise DataError(f"{path} is a pickle by its name ({path.suffix}): {_PICKLE_REASON}")


def _some(names: Collection[str], limit: int = 4) -> str:
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
