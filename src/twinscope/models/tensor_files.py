"""The tensors of safetensors files, read from disk by name, whole or some rows at a time, as float32.

Covers a single file and shards with an index, whose headers are checked first (``tensor_headers.py``).
Values are taken with ``pread`` into one small reused buffer and converted piece by piece, so that neither
mapped pages nor a second copy of a tensor stay in memory. Not covered: writing (``weights.py``), which tensor
a model needs (``streamed/build.py``), quantised values.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from twinscope.lab.errors import DataError
from twinscope.models.tensor_headers import (
    AGAIN,
    INDEX,
    Entry,
    OpenFile,
    choose_files,
    open_file,
    read_header,
)

#: How the values of a type lie in memory; of these types float32 can be read.
_READABLE: Mapping[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
#: Read and convert so much at a time: it stays in the second-level cache between the two.
PIECE_BYTES = 512 << 10


class TensorFiles:
    """Open safetensors files; :func:`open_tensors` makes one, ``close()`` or the end of a ``with`` closes it.

    Reading is safe from several threads at once. ``names`` are sorted.
    """

    def __init__(self, place: Path, files: Mapping[Path, OpenFile], entries: Mapping[str, Entry]) -> None:
        self.place = place
        self.names = tuple(sorted(entries))
        self._files = dict(files)
        self._entries = dict(entries)
        self._sound: set[tuple[str, int, int]] = set()
        self._scratch = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()

    def close(self) -> None:
        """Close the files; reading raises ``ValueError`` from then on. Twice is once."""
        files, self._files = self._files, {}
        for opened in files.values():
            os.close(opened.descriptor)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._files

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """What the header says of one tensor.

        Raises:
            DataError: there is no tensor of that name.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise DataError(
                f"{self.place} holds no tensor '{name}': the files are incomplete or belong to another model"
            ) from None

    def read(self, name: str, out: Tensor | None = None, rows: tuple[int, int] | None = None) -> Tensor:
        """One tensor, or rows ``rows[0] … rows[1] - 1`` of its first dimension, as float32 on the CPU.

        ``out`` is a contiguous float32 tensor of the result's shape to read into (it is returned); without
        it one is allocated. A part that was found finite once is not looked through again.

        Raises:
            DataError: no such tensor; it holds NaN or infinite values, or no floating-point numbers; the file
                shrank or changed since it was opened.
            ValueError: ``rows`` or ``out`` do not fit, or the files are closed.
        """
        entry = self.entry(name)
        kind = _readable(self.place, name, entry)
        shape = entry.shape
        start, stop = 0, shape[0] if shape else 1
        if rows is not None:
            if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
                raise ValueError(f"rows {rows} of {name}, which has the shape {shape}")
            (start, stop), shape = rows, (rows[1] - rows[0], *shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"{name} is read into a contiguous float32 tensor of the shape {tuple(shape)}")
        if out.numel():
            width = math.prod(entry.shape[1:])
            known = (name, start, stop)
            self._fill(name, entry, kind, out.numpy().reshape(-1), start * width, known not in self._sound)
            self._sound.add(known)
        return out

    def gather(self, name: str, rows: Sequence[int]) -> Tensor:
        """Rows of a matrix ``(R, C)`` by number, each read by itself: ``(len(rows), C)`` float32.

        Raises:
            DataError, ValueError: as for :meth:`read`.
        """
        entry = self.entry(name)
        kind = _readable(self.place, name, entry)
        if len(entry.shape) != 2:
            raise ValueError(f"{name} has no rows to gather, its shape is {entry.shape}")
        out = torch.empty((len(rows), entry.shape[1]), dtype=torch.float32)
        for target, row in zip(out.numpy(), rows, strict=True):
            if not 0 <= row < entry.shape[0]:
                raise ValueError(f"row {row} of {name}, which has the shape {entry.shape}")
            self._fill(name, entry, kind, target, row * entry.shape[1], True)
        return out

    def sha256(self) -> str:
        """SHA-256 in hex over names, types, shapes and values, in the order of the names.

        The same tensors give the same hash however they are sharded. Reads every byte.

        Raises:
            DataError: a file shrank or changed since it was opened.
        """
        digest = hashlib.sha256()
        piece = self._piece()
        for name in self.names:
            entry = self._entries[name]
            opened = self._opened(entry)
            title = json.dumps([name, entry.dtype, list(entry.shape)], separators=(",", ":"))
            digest.update(struct.pack("<Q", len(title.encode())) + title.encode())
            for done in range(0, entry.nbytes, PIECE_BYTES):
                part = piece[: min(PIECE_BYTES, entry.nbytes - done)]
                _pread(opened, part, entry.offset + done)
                digest.update(part)
            _require_unchanged(opened)
        return digest.hexdigest()

    def _fill(self, name: str, entry: Entry, kind: Any, target: np.ndarray, first: int, look: bool) -> None:
        """Values ``first …`` of a tensor into ``target`` (flat float32), piece by piece."""
        opened = self._opened(entry)
        size = np.dtype(kind).itemsize
        step = PIECE_BYTES // size
        for done in range(0, target.size, step):
            part = target[done : done + step]
            offset = entry.offset + (first + done) * size
            if kind is np.float32:
                _pread(opened, part, offset)
            else:
                raw = self._piece()[: part.size * size]
                _pread(opened, raw, offset)
                _convert(raw.view(kind), part)
            if look and not _finite(part):
                raise DataError(
                    f"{entry.file}: NaN or infinite values in {name}: fetch or convert the model again"
                )
        _require_unchanged(opened)

    def _piece(self) -> Any:
        """This thread's buffer of :data:`PIECE_BYTES` bytes."""
        if not hasattr(self._scratch, "piece"):
            self._scratch.piece = np.empty(PIECE_BYTES, dtype=np.uint8)
        return self._scratch.piece

    def _opened(self, entry: Entry) -> OpenFile:
        opened = self._files.get(entry.file)
        if opened is None:
            raise ValueError(f"{entry.file} is closed")
        return opened


def _pread(opened: OpenFile, target: Any, offset: int) -> None:
    view = memoryview(target).cast("B")
    while view.nbytes:
        try:
            count = os.preadv(opened.descriptor, [view], offset)
        except OSError as error:
            raise DataError(f"cannot read {opened.path}: {error.strerror}") from None
        if count == 0:
            raise DataError(f"{opened.path} shrank while it was open: {AGAIN}")
        view, offset = view[count:], offset + count


def _require_unchanged(opened: OpenFile) -> None:
    now = os.fstat(opened.descriptor)
    if (now.st_size, now.st_mtime_ns) != (opened.size, opened.changed_ns):
        raise DataError(f"{opened.path} changed while it was open: open the model again")


def _convert(values: Any, target: Any) -> None:
    """Values of one of the types of :data:`_READABLE` as float32."""
    if values.dtype == np.uint16:
        # numpy has no bfloat16, and its shift of the upper half into place takes half as long again.
        torch.from_numpy(target).copy_(torch.from_numpy(values).view(torch.bfloat16))
    else:
        with np.errstate(over="ignore"):  # a float64 beyond float32 is found infinite later
            np.copyto(target, values, casting="same_kind")


def _finite(values: Any) -> bool:
    """Whether every value is finite. One sum tells quickly, unless it overflows itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values)) or np.isfinite(values).all())


def open_tensors(place: Path | str) -> TensorFiles:
    """Open a safetensors file, or the folder of a model, and read nothing but the headers.

    In a folder: ``model.safetensors``, else the files that ``model.safetensors.index.json`` names, else the
    only ``.safetensors`` file there is.

    Raises:
        DataError: no such file or folder; pickled weights; a damaged, truncated or hostile header; an index
            that names a file outside the folder or a shard or tensor that is missing; one name in two shards.
    """
    place = Path(place).expanduser().absolute()
    files: dict[Path, OpenFile] = {}
    entries: dict[str, Entry] = {}
    try:
        weight_map = choose_files(place)
        for path in sorted(set(weight_map.values())):
            opened = open_file(path)
            files[path] = opened
            for name, entry in read_header(opened).items():
                if name in entries:
                    raise DataError(f"'{name}' is both in {entries[name].file.name} and in {path}: {AGAIN}")
                entries[name] = entry
        for name, path in weight_map.items():
            if name and (name not in entries or entries[name].file != path):
                raise DataError(f"{place / INDEX} says that {path.name} holds '{name}', which it does not")
    except BaseException:
        for opened in files.values():
            os.close(opened.descriptor)
        raise
    return TensorFiles(place, files, entries)


def _readable(place: Path, name: str, entry: Entry) -> Any:
    kind = _READABLE.get(entry.dtype)
    if kind is None:
        raise DataError(
            f"{place}: {name} is {entry.dtype}, not a floating-point weight in bf16, fp16 or fp32: "
            "give the model unquantised"
        )
    return kind
