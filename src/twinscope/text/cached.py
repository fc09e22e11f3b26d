"""Bytes that are expensive to make and a pure function of a key, kept in the cache and checked on reading.

Each file's name carries the SHA-256 of its content, so a damaged file is made again instead of used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from twinscope.lab.run import cache_root, write_atomic, writing


def cached_bytes(key: str, suffix: str, make: Callable[[], bytes]) -> bytes:
    """The bytes kept under ``key`` (any text) in ``cache_root()/tokenizers``, made on the first call.

    Raises:
        TwinscopeError: the cache cannot be written; and whatever ``make`` raises.
    """
    folder = cache_root() / "tokenizers"
    stem = hashlib.sha256(key.encode()).hexdigest()
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        data = path.read_bytes()
        if path.name == f"{stem}-{hashlib.sha256(data).hexdigest()}{suffix}":
            return data
    data = make()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{stem}-{hashlib.sha256(data).hexdigest()}{suffix}", data)
    return data
