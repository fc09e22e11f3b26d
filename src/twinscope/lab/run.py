"""Run directories: one folder per run that survives kill, full disk and a second process.

Covers the folder's name and files, appending to the journal, the lock, stopping on a signal, and the
list of runs. What a row or a result means lives with the verb that makes it; the schema of a result is
in ``record.py``, writing that lasts in ``durable.py``.

Files of a run: ``config.toml``, ``provenance.json``, ``journal.jsonl`` (one row per unit of work),
``result.json`` (written last), ``figures/``, ``checkpoints/``, ``lock``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from twinscope.lab.durable import read_journal, sync_folder, write_all, write_atomic, writing
from twinscope.lab.errors import ConfigError, DataError, TwinscopeError
from twinscope.lab.record import decode, dump, encode, headline, load_record, validate

RunStatus = Literal["complete", "stopped", "failed", "running", "interrupted"]

_FOLDER = re.compile(r"(\d{8}T\d{6}Z)-([a-z]+)-(.+)")
_NAME_LENGTH = 48
#: Listing runs takes the lock for an instant; waiting this long tells that from a live run.
_LOCK_TRIES, _LOCK_PAUSE = 5, 0.05


def runs_root(option: Path | None) -> Path:
    """Absolute folder of the runs: the option, else ``$TWINSCOPE_RUNS``, else ``./runs``."""
    return Path(option or os.environ.get("TWINSCOPE_RUNS") or "runs").expanduser().absolute()


def cache_root() -> Path:
    """Absolute folder of what can be fetched or made again: ``$TWINSCOPE_CACHE``, else the user's cache."""
    chosen = os.environ.get("TWINSCOPE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").absolute() / "twinscope"


class Run:
    """An open run directory, locked for this process until :meth:`close`; use it as a context manager.

    ``rows`` are the journal's rows as JSON gives them back, in order: read them, never change them.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.figures = path / "figures"
        self.checkpoints = path / "checkpoints"
        self.stop_requested: str | None = None
        self._lock = lock
        self.config_toml = _text(path / "config.toml")
        self._provenance = _object(path / "provenance.json")
        self.started, self.verb, self.name = _identity(path, self._provenance)
        known = [self._provenance.get(key) for key in ("config_sha256", "config_sha256_before")]
        if hashlib.sha256(self.config_toml.encode()).hexdigest() not in known:
            raise DataError(
                f"{path / 'config.toml'} is not what the run began with (or provenance.json was edited): "
                "bring it back, or start a fresh run with the changed config"
            )
        self.rows, self._size = read_journal(path / "journal.jsonl")
        self._by_key = {row["key"]: row for row in self.rows}
        with writing(path / "journal.jsonl"):
            self.figures.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._journal = os.open(path / "journal.jsonl", flags, 0o666)
        try:
            self._drop_tail()
            with writing(path):
                sync_folder(path)
        except BaseException:
            os.close(self._journal)
            raise

    @classmethod
    def create(cls, root: Path, verb: str, name: str, config_toml: str, provenance: Mapping[str, Any]) -> Run:
        """Make a run directory under ``root`` that no other process shares, and open it.

        The provenance is stored with ``verb``, ``name`` and ``started`` added where they are missing.

        Raises:
            ConfigError, Stopped: the directory cannot be written.
        """
        if not re.fullmatch(r"[a-z]+", verb):
            raise ValueError(f"a verb is lower-case letters, got '{verb}'")
        now = datetime.now(UTC)
        identity = {
            "verb": verb,
            "name": name,
            "started": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "config_sha256": hashlib.sha256(config_toml.encode()).hexdigest(),
        }
        stored = _encoded({**identity, **provenance}, "the provenance", indent=1)
        stem = f"{now:%Y%m%dT%H%M%SZ}-{verb}-{folder_name(name)}"
        root = Path(root).absolute()
        with writing(root / stem):
            root.mkdir(parents=True, exist_ok=True)
            path = _fresh_folder(root, stem)
        lock = _locked(path)
        try:
            write_atomic(path / "provenance.json", stored + b"\n")
            # Last, so that a directory with a config has everything a resume needs.
            write_atomic(path / "config.toml", config_toml.encode())
            with writing(path):
                sync_folder(root)
            return cls(path, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Lock and read an existing run; a torn last line of its journal is dropped.

        Raises:
            ConfigError: no run is there, it ended before its config was written, another process holds
                it, or it cannot be written.
            DataError: its config, provenance or journal is damaged; the sentence names file and line.
        """
        path = Path(path).absolute()
        if not path.is_dir():
            raise ConfigError(f"there is no run at {path}: `twinscope runs` lists them")
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path} has no config.toml, so it is not a run that can be resumed: start it again"
            )
        lock = _locked(path)
        try:
            for folder in (path, path / "checkpoints"):
                # What a killed process left: with the lock held, nobody is writing it.
                for leftover in folder.glob(".*.tmp"):
                    with writing(leftover):
                        leftover.unlink(missing_ok=True)
            return cls(path, lock)
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        journal, lock, self._journal, self._lock = self._journal, self._lock, -1, -1
        for descriptor in (journal, lock):
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def provenance(self) -> dict[str, Any]:
        """A copy of the provenance as stored."""
        return dict(self._provenance)

    def update_provenance(self, changes: Mapping[str, Any]) -> None:
        """Replace or add top-level entries of the stored provenance, atomically.

        Raises:
            TwinscopeError: an entry is no JSON; Stopped or ConfigError: it cannot be written.
        """
        data = _encoded({**self._provenance, **changes}, "the provenance", indent=1)
        write_atomic(self.path / "provenance.json", data + b"\n")
        self._provenance = decode(data)

    def replace_config(self, config_toml: str) -> None:
        """Write another configuration for a run that is extended; a kill in between leaves either one.

        Raises:
            Stopped, ConfigError: it cannot be written.
        """
        before, after = (
            hashlib.sha256(text.encode()).hexdigest() for text in (self.config_toml, config_toml)
        )
        self.update_provenance({"config_sha256": after, "config_sha256_before": before})
        write_atomic(self.path / "config.toml", config_toml.encode())
        self.config_toml = config_toml

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to the journal; it is on disk when the call returns.

        ``row["key"]`` is a string that names the unit of work. A row whose key is there already must be
        equal to it, its ``timing`` aside, and is not written again: so a resumed run may redo work.

        Raises:
            TwinscopeError: no key, a value that is no JSON or not finite, or a row that differs from
                the one already there; the sentence names the key and the field.
            Stopped, ConfigError: the row cannot be written; the journal keeps every earlier row.
        """
        if self._journal < 0:
            raise ValueError(f"the run {self.path} is closed")
        key = row.get("key")
        if not isinstance(key, str) or not key:
            raise TwinscopeError(f"a journal row needs a string under 'key', got {key!r}")
        line = _encoded(dict(row), f"row '{key}'") + b"\n"
        stored = decode(line)
        known = self._by_key.get(key)
        if known is not None:
            field = _difference({**known, "timing": None}, {**stored, "timing": None})
            if field is not None:
                raise TwinscopeError(
                    f"row '{key}' stands in {self.path / 'journal.jsonl'} with another value of '{field}': "
                    "the work is not reproducible, so start a fresh run"
                )
            return
        with writing(self.path / "journal.jsonl"):
            self._drop_tail()
            write_all(self._journal, line)
            os.fsync(self._journal)
        self._size += len(line)
        self._by_key[key] = stored
        self.rows.append(stored)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Check ``record`` and write it as ``result.json``; its ``status`` becomes the run's.

        Raises:
            TwinscopeError: the record is not valid, or belongs to another verb.
            Stopped, ConfigError: it cannot be written.
        """
        try:
            checked = validate(record)
        except DataError as error:
            # Not a file that somebody gave us: a record made here that breaks its own schema is our defect.
            raise TwinscopeError(f"the result of {self.path} is not a valid record: {error}") from error
        if checked.verb != self.verb:
            raise TwinscopeError(f"{self.path} is a '{self.verb}' run, but its result is of '{checked.verb}'")
        write_atomic(self.path / "result.json", dump(checked))

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop at its next safe point; the first reason is kept."""
        if self.stop_requested is None:
            self.stop_requested = reason

    def _drop_tail(self) -> None:
        """Cut off what follows the last acknowledged row: the rest of a write that was cut short."""
        with writing(self.path / "journal.jsonl"):
            if os.fstat(self._journal).st_size != self._size:
                os.ftruncate(self._journal, self._size)
                os.fsync(self._journal)


class Stoppable(Protocol):
    """What a signal can ask to stop."""

    def request_stop(self, reason: str) -> None:
        """Ask it to stop at its next safe point."""
        ...


@contextmanager
def stop_signals(run: Stoppable) -> Iterator[None]:
    """Let SIGINT and SIGTERM ask ``run`` to stop; a second SIGINT raises KeyboardInterrupt.

    Handlers of before are put back at the end. Outside the main thread, where Python allows no
    handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        run.request_stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None: a handler that was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass(frozen=True)
class RunInfo:
    """One line of the list of runs.

    ``complete``, ``stopped`` and ``failed`` come from the result; without a result a run is
    ``running`` while a process holds it and ``interrupted`` otherwise.
    """

    path: Path
    verb: str
    name: str
    status: RunStatus
    started: str
    headline: str | None


def list_runs(root: Path) -> list[RunInfo]:
    """Every run under ``root`` in order of its start; a folder that is no run is left out.

    Raises:
        ConfigError: ``root`` exists but cannot be listed.
    """
    root = Path(root).absolute()
    try:
        folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot list the runs in {root}: {error.strerror}") from None
    return sorted((run_info(path) for path in folders), key=lambda info: (info.started, info.path.name))


def run_info(path: Path) -> RunInfo:
    """Status and headline of one run directory, read without opening it; a damaged result is ``failed``."""
    path = Path(path).absolute()
    try:
        provenance = _object(path / "provenance.json")
    except DataError:
        provenance = {}
    started, verb, name = _identity(path, provenance)
    status: RunStatus = "interrupted"
    line: str | None = None
    if (path / "result.json").exists():
        try:
            record = load_record(path)
            status, line = record.status, headline(record)
        except DataError as error:
            status, line = "failed", str(error)
    # A complete result is final; a stopped run that somebody resumes is running again.
    if status != "complete" and _held(path):
        status, line = "running", None
    return RunInfo(path=path, verb=verb, name=name, status=status, started=started, headline=line)


def folder_name(name: str) -> str:
    """``name`` as part of a folder's name: letters, digits, ``.``, ``_`` and ``-``, at most 48 of them."""
    return re.sub(r"[^\w.-]+", "-", name)[:_NAME_LENGTH].strip("-.") or "unnamed"


def _fresh_folder(root: Path, stem: str) -> Path:
    count = 1
    while True:
        path = root / (stem if count == 1 else f"{stem}-{count}")
        try:
            # mkdir either makes the folder or fails: two processes never both get it.
            path.mkdir()
            return path
        except FileExistsError:
            count += 1


def _identity(path: Path, provenance: Mapping[str, Any]) -> tuple[str, str, str]:
    """Start, verb and name from the provenance, which outlives a renamed folder, else from the folder."""
    match = _FOLDER.fullmatch(path.name)
    stamp, verb, name = match.groups() if match else ("", "", path.name)
    try:
        started = f"{datetime.strptime(stamp, '%Y%m%dT%H%M%SZ'):%Y-%m-%dT%H:%M:%SZ}"
    except ValueError:
        started = ""
    stored = {"started": started, "verb": verb, "name": name, **provenance}
    return str(stored["started"]), str(stored["verb"]), str(stored["name"])


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of the run directory."""
    with writing(path / "lock"):
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 == _LOCK_TRIES:
                    owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                    who = f"process {owner}" if owner.isdecimal() else "another process"
                    raise ConfigError(
                        f"{path} is in use by {who}: wait until it ends, or stop it, then try again"
                    ) from None
                time.sleep(_LOCK_PAUSE)
            except OSError as error:
                raise ConfigError(
                    f"cannot lock {path} ({error.strerror}): put the runs on a file system that has locks"
                ) from error
        with suppress(OSError):  # only the sentence above needs it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _held(path: Path) -> bool:
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} of the run: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): restore it from a copy") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged (it is no JSON object): restore it from a copy")
    return value


def _encoded(value: Any, what: str, indent: int | None = None) -> bytes:
    try:
        return encode(value, indent)
    except ValueError as error:
        raise TwinscopeError(f"{what} cannot be written: {error}") from None


def _difference(known: Any, given: Any, where: str = "") -> str | None:
    """The path of the first value that differs, or None; 1 and 1.0, or 0.0 and -0.0, differ."""
    if encode(known) == encode(given):
        return None
    if isinstance(known, dict) and isinstance(given, dict):
        for key in [*known, *(key for key in given if key not in known)]:
            if key not in known or key not in given:
                return f"{where}{key}"
            if found := _difference(known[key], given[key], f"{where}{key}."):
                return found
        return None  # the same fields in another order
    return where.rstrip(".")
