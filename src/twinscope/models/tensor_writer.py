"""One safetensors file written block by block: memory for one block, and the file is whole or absent.

Covers the layout of the file and its hash. Where the values come from is the caller's business; files that
fit into memory are written by ``weights.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from twinscope.lab.durable import sync_folder, write_all, writing

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class PlannedTensor:
    """Name, dtype and shape of a tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def header_bytes(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of the file that :func:`write_tensors` makes of ``tensors``."""
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for tensor in in_file_order(tensors):
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    return struct.pack("<Q", len(text)) + text


def in_file_order(tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """The order in which the values are written: wider types first, so that each starts at its alignment."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def write_tensors(
    path: Path,
    tensors: Sequence[PlannedTensor],
    blocks: Callable[[PlannedTensor], Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> str:
    """Write ``tensors`` to ``path`` and return the SHA-256 of the file in hex.

    ``blocks`` is called once for each tensor, in file order, and gives its values in row-major order, in
    pieces of any size, of the planned dtype, on any device. ``advance`` hears the bytes of every piece.

    Raises:
        ValueError: the pieces do not make up the tensor.
        Stopped, ConfigError, TwinscopeError: as for :func:`~twinscope.lab.durable.writing`.
    """
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    digest = hashlib.sha256()
    with writing(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                header = header_bytes(tensors, metadata)
                write_all(descriptor, header)
                digest.update(header)
                for tensor in in_file_order(tensors):
                    written = 0
                    for block in blocks(tensor):
                        if block.dtype != tensor.dtype:
                            raise ValueError(f"{tensor.name}: got {block.dtype}, planned {tensor.dtype}")
                        data = block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                        write_all(descriptor, data)  # pyright: ignore[reportArgumentType]
                        digest.update(data)
                        written += len(data)
                        advance(len(data))
                    if written != tensor.nbytes:
                        raise ValueError(f"{tensor.name}: got {written} bytes, planned {tensor.nbytes}")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    return digest.hexdigest()
