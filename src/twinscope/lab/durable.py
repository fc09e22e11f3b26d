"""Writes that are on disk when they return, and the journal's read after any interruption.

Covers atomic replacement of a file, appending, the sentences for a full or forbidden disk, and reading a
journal whose last line may be torn. docs/decisions/0002-atomic-writes-and-journal.md gives the
trade-offs. What is written is the caller's business.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twinscope.lab.errors import ConfigError, DataError, Stopped, TwinscopeError
from twinscope.lab.record import decode

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BAD_PLACE = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal of a write to ``path`` into a sentence.

    Raises:
        Stopped: no space is left (disk, quota or file size); the sentence names the run to resume.
        ConfigError: the place cannot be written: read-only, no permission, no such folder.
        TwinscopeError: any other failure of the system.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            run = next(
                (folder for folder in path.absolute().parents if (folder / "journal.jsonl").is_file()), None
            )
            retry = f"run `twinscope resume {run}`" if run else "run the command again"
            raise Stopped(f"no space left to write {path}: free some and {retry}") from error
        if error.errno in _BAD_PLACE:
            raise ConfigError(
                f"cannot write {path} ({error.strerror}): make it writable or choose another folder"
            ) from error
        raise TwinscopeError(f"cannot write {path} ({error.strerror or error}): check the disk") from error


def write_atomic(path: Path | str, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds its old content or all of the new, whatever happens.

    The content and the name are on disk when the call returns.

    Raises:
        Stopped, ConfigError, TwinscopeError: as for :func:`writing`.
    """
    path = Path(path)
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    with writing(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a journal, and the length in bytes of the lines they fill; a torn last line is left out.

    Raises:
        DataError: a line before the last one is damaged, or a row has no key of its own; names the line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    *lines, torn = data.split(b"\n")
    size = len(data) - len(torn)
    # After a power loss, blocks that never reached the disk read as zeros; JSON holds none.
    if lines and not torn and b"\0" in lines[-1]:
        size -= len(lines.pop()) + 1
    rows: list[dict[str, Any]] = []
    keys: set[str] = set()
    for number, line in enumerate(lines, start=1):
        try:
            row = decode(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is damaged ({error}): restore it from a copy") from None
        key = row.get("key") if isinstance(row, dict) else None
        if not isinstance(key, str) or key in keys:
            raise DataError(f"{path}, line {number} is no row with a key of its own: restore it from a copy")
        keys.add(key)
        rows.append(row)
    return rows, size


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte: the system may take fewer at a time. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on disk; syncing a file does not. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names without being asked, and refuse the request.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
