"""The header of a GGUF file, walked once with every length checked against the file's size.

Covers what makes a reader loop, allocate or read past the end: counts, lengths of strings and arrays, types,
offsets. The values are then read by the ``gguf`` package (``gguf_import.py``), which trusts these.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

from twinscope.lab.errors import DataError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Bytes of a value by its type; 8 is a string, 9 an array.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: No model comes near these; a file beyond them is refused before it is read.
_MOST_KEYS, _MOST_TENSORS, _MOST_ITEMS, _LONGEST_NAME = 1 << 14, 1 << 17, 1 << 22, 1 << 12
_MOST_HEADER = 256 << 20
_DEEPEST = 4


def check_gguf(path: Path) -> None:
    """Return if the header of ``path`` is one that can be read safely, and all its tensors lie in the file.

    Raises:
        DataError: no GGUF file, another version or byte order, or a damaged, truncated or hostile header.
    """
    try:
        with path.open("rb") as file:
            _Walk(file, os.fstat(file.fileno()).st_size).all()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: give the path of a GGUF file") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is no GGUF file, or a damaged one ({error}): get it again") from None


class _Walk:
    """One pass over a header; raises ValueError with what is wrong."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0

    def all(self) -> None:
        from gguf import GGML_QUANT_SIZES

        if self._take(4, "its first bytes") != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number(4, "its version")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise ValueError("it is big-endian" if swapped else f"it has the unknown version {version}")
        tensors = self._count("tensors", _MOST_TENSORS)
        keys: set[bytes] = set()
        alignment = 32
        for _ in range(self._count("keys", _MOST_KEYS)):
            key = self._string("a key", _LONGEST_NAME)
            if key in keys:
                raise ValueError(f"the key {key!r} occurs twice")
            keys.add(key)
            kind, start = self._number(4, "a type"), self.at
            self._value(kind, key)
            if key == b"general.alignment":
                if kind != 4:
                    raise ValueError("its alignment is no 32-bit number")
                self.file.seek(start)
                alignment = int.from_bytes(self.file.read(4), "little")
                if alignment == 0 or alignment & (alignment - 1):
                    raise ValueError(f"its alignment is {alignment}")
        spans: list[tuple[int, int, bytes]] = []
        names: set[bytes] = set()
        for _ in range(tensors):
            name = self._string("the name of a tensor", _LONGEST_NAME)
            if name in names:
                raise ValueError(f"the tensor {name!r} occurs twice")
            names.add(name)
            rank = self._number(4, "a number of dimensions")
            if not 1 <= rank <= 4:
                raise ValueError(f"the tensor {name!r} has {rank} dimensions")
            shape = [self._number(8, "a dimension") for _ in range(rank)]
            kind, offset = self._number(4, "a type"), self._number(8, "an offset")
            known = {int(key): value for key, value in GGML_QUANT_SIZES.items()}
            if kind not in known:
                raise ValueError(f"the tensor {name!r} has the unknown type {kind}")
            block, width = known[kind]
            if shape[0] % block:
                raise ValueError(f"the rows of {name!r} are no whole number of blocks of {block}")
            spans.append((offset, offset + math.prod(shape) // block * width, name))
        base = -(-self.at // alignment) * alignment
        end = 0
        for start, stop, name in sorted(spans):
            if start < end:
                raise ValueError(f"the tensor {name!r} overlaps another")
            if base + stop > self.size:
                raise ValueError(f"the tensor {name!r} ends at byte {base + stop}, the file at {self.size}")
            end = stop

    def _value(self, kind: int, key: bytes, depth: int = 0) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind], f"the value of {key!r}")
        elif kind == _STRING:
            self._skip(self._number(8, "a length"), f"the value of {key!r}")
        elif kind == _ARRAY and depth < _DEEPEST:
            inner = self._number(4, "a type")
            items = self._number(8, "a length")
            if items > _MOST_ITEMS:
                raise ValueError(f"the list {key!r} has {items} items")
            if inner in _SCALARS:
                self._skip(items * _SCALARS[inner], f"the list {key!r}")
                return
            for _ in range(items):
                self._value(inner, key, depth + 1)
        else:
            raise ValueError(f"the value of {key!r} has the unknown type {kind}")

    def _count(self, what: str, most: int) -> int:
        count = self._number(8, f"the number of {what}")
        if count > most:
            raise ValueError(f"it would have {count} {what}")
        return count

    def _string(self, what: str, most: int) -> bytes:
        length = self._number(8, "a length")
        if length > most:
            raise ValueError(f"{what} would be {length} bytes long")
        return self._take(length, what)

    def _number(self, width: int, what: str) -> int:
        return struct.unpack("<I" if width == 4 else "<Q", self._take(width, what))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._within(count, what)
        return self.file.read(count)

    def _skip(self, count: int, what: str) -> None:
        self._within(count, what)
        self.file.seek(count, os.SEEK_CUR)

    def _within(self, count: int, what: str) -> None:
        if self.at + count > self.size:
            raise ValueError(f"it ends inside {what}")
        self.at += count
        if self.at > _MOST_HEADER:
            raise ValueError(f"its header is longer than {_MOST_HEADER >> 20} MiB")
