"""Run directories: what a kill, a full disk, a second process and a damaged file leave behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinscope.lab import durable
from twinscope.lab.durable import writing
from twinscope.lab.errors import ConfigError, DataError, Stopped, TwinscopeError
from twinscope.lab.record import load_record
from twinscope.lab.run import (
    Run,
    cache_root,
    folder_name,
    list_runs,
    run_info,
    runs_root,
    stop_signals,
    write_atomic,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "train-1.json"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path, "train", "twin", 'name = "twin"\n', {"seeds": [0]}) as opened:
        yield opened


@pytest.fixture
def result() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def reopened(run: Run) -> Run:
    run.close()
    return Run.open(run.path)


# --- the folder ---------------------------------------------------------------------------------


def test_a_fresh_run_has_its_files_and_reads_back(run: Run) -> None:
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.toml",
        "figures",
        "journal.jsonl",
        "lock",
        "provenance.json",
    ]
    run.append({"key": "a", "value": 0.1})
    run.update_provenance({"finished": "later", "seeds": [0, 1]})
    with reopened(run) as again:
        assert (again.verb, again.name, again.config_toml) == ("train", "twin", 'name = "twin"\n')
        assert again.rows == [{"key": "a", "value": 0.1}]
        assert again.provenance["finished"] == "later"
        assert again.provenance["seeds"] == [0, 1]
        assert again.path == run.path
        assert again.path.is_absolute()


def test_names_within_one_second_never_collide(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, "train", "twin", "", {}) for _ in range(5)]
    names = [run.path.name for run in runs]
    for run in runs:
        run.close()
    assert len(set(names)) == 5
    for stamp in {name[:16] for name in names}:
        count = sum(name.startswith(stamp) for name in names)
        expected = [f"{stamp}-train-twin", *(f"{stamp}-train-twin-{i}" for i in range(2, count + 1))]
        assert sorted(name for name in names if name.startswith(stamp)) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("twin-sotu", "twin-sotu"),
        ("../../etc/passwd", "etc-passwd"),
        ("a/b\\c d\n\0e", "a-b-c-d-e"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("длинное имя", "длинное-имя"),
        ("x" * 300, "x" * 48),
    ],
)
def test_a_name_becomes_one_plain_folder(tmp_path: Path, name: str, folder: str) -> None:
    assert folder_name(name) == folder
    with Run.create(tmp_path, "train", name, "", {}) as run:
        assert run.path.parent == tmp_path
        assert run.path.name.endswith(f"-train-{folder}")
        assert run.name == name


def test_a_renamed_folder_keeps_its_identity(run: Run) -> None:
    run.close()
    moved = run.path.rename(run.path.parent / "kept")
    with Run.open(moved) as again:
        assert (again.verb, again.name, again.started) == (run.verb, run.name, run.started)


def test_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TWINSCOPE_RUNS", "TWINSCOPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert runs_root(None) == tmp_path / "runs"
    assert cache_root() == tmp_path / "home" / ".cache" / "twinscope"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "twinscope"
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "r"))
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "c"))
    assert runs_root(None) == tmp_path / "r"
    assert runs_root(Path("given")) == tmp_path / "given"
    assert cache_root() == tmp_path / "c"


def test_places_that_are_no_run_are_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match="there is no run at"):
        Run.open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        Run.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Run.create(tmp_path / "file" / "runs", "train", "x", "", {})
    run.close()
    (run.path / "provenance.json").write_text("{")
    with pytest.raises(DataError, match=r"provenance\.json is damaged"):
        Run.open(run.path)
    (run.path / "provenance.json").write_text("{}")
    with pytest.raises(DataError, match="not what the run began with"):
        Run.open(run.path)


def test_an_edited_config_is_refused(run: Run) -> None:
    run.close()
    config = run.path / "config.toml"
    before = config.read_text()
    config.write_text(before + "# edited\n")
    with pytest.raises(DataError, match="start a fresh run with the changed config"):
        Run.open(run.path)
    config.write_text(before)
    with Run.open(run.path) as opened:
        opened.replace_config("steps = 3\n")
    with Run.open(run.path) as opened:
        assert opened.config_toml == "steps = 3\n"


# --- the journal --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"value": 1}, "string under 'key'"),
        ({"key": 3}, "string under 'key'"),
        ({"key": ""}, "string under 'key'"),
        ({"key": "a", "loss": float("nan")}, "row 'a' cannot be written: loss is nan"),
        ({"key": "a", "losses": [0.0, float("inf")]}, r"row 'a' cannot be written: losses\[1\] is inf"),
        ({"key": "a", "loss": 1j}, "row 'a' cannot be written: loss is of the type complex"),
        ({"key": "a", "loss": {2: 1}}, "row 'a' cannot be written: loss has the key 2"),
    ],
)
def test_rows_that_are_no_json_are_refused_with_their_key(run: Run, row: dict[str, Any], words: str) -> None:
    with pytest.raises(TwinscopeError, match=words) as caught:
        run.append(row)
    assert caught.value.exit_code == 1
    assert (run.path / "journal.jsonl").read_bytes() == b""


def test_rows_in_memory_are_what_a_resume_reads(run: Run) -> None:
    given = {"key": "a", "list": (1, 2.5), "text": "é\n\u2028", "number": 0.1 + 0.2, "null": None}
    run.append(given)
    given["number"] = 7
    first = list(run.rows)
    with reopened(run) as again:
        assert again.rows == first == [{**given, "list": [1, 2.5], "number": 0.1 + 0.2}]
        assert len((run.path / "journal.jsonl").read_bytes().splitlines()) == 1


def test_redone_work_must_give_the_same_row(run: Run) -> None:
    row = {"key": "a", "loss": 1.0, "deep": {"x": [1, 2], "y": 0.0}, "timing": {"seconds": 1.0}}
    run.append(row)
    for again in (False, True):
        with reopened(run) if again else run as opened:
            opened.append({**row, "timing": {"seconds": 2.0}})
            opened.append({"timing": {}, "deep": {"y": 0.0, "x": [1, 2]}, "loss": 1.0, "key": "a"})
            assert opened.rows == [row]
            for change, field in [
                ({"loss": 1.0000000000000002}, "'loss'"),
                ({"deep": {"x": [1, 3], "y": 0.0}}, "'deep.x'"),
                ({"deep": {"x": [1, 2], "y": -0.0}}, "'deep.y'"),
                ({"deep": {"x": [1, 2]}}, "'deep.y'"),
                ({"more": 1}, "'more'"),
            ]:
                with pytest.raises(TwinscopeError, match=f"row 'a' .*{field}") as caught:
                    opened.append({**row, **change})
                assert caught.value.exit_code == 1
            assert opened.rows == [row]


@pytest.mark.parametrize(
    "tail", [b'{"key": "c", "va', b'{"key": "c"}', b"\x80", b"\0\0\0", b'{"key"\0\0\0\n']
)
def test_a_torn_last_line_is_dropped_and_overwritten(run: Run, tail: bytes) -> None:
    run.append({"key": "a"})
    run.append({"key": "b"})
    with (run.path / "journal.jsonl").open("ab") as file:
        file.write(tail)
    with reopened(run) as again:
        assert [row["key"] for row in again.rows] == ["a", "b"]
        assert (run.path / "journal.jsonl").read_bytes() == b'{"key":"a"}\n{"key":"b"}\n'
        again.append({"key": "d"})
    assert (run.path / "journal.jsonl").read_bytes() == b'{"key":"a"}\n{"key":"b"}\n{"key":"d"}\n'


@pytest.mark.parametrize(
    "damage", [b'{"key":"b"', b"", b"\0\0", b'{"key":NaN}', b'["b"]', b'{"value":1}', b'{"key":"a"}', b"\xff"]
)
def test_a_damaged_line_before_the_last_is_refused(run: Run, damage: bytes) -> None:
    journal = run.path / "journal.jsonl"
    journal.write_bytes(b'{"key":"a"}\n' + damage + b'\n{"key":"c"}\n')
    before = journal.read_bytes()
    with pytest.raises(DataError, match=r"journal\.jsonl, line 2 ") as caught:
        reopened(run)
    assert caught.value.exit_code == 65
    assert journal.read_bytes() == before
    # The refusal released the lock.
    journal.write_bytes(b"")
    Run.open(run.path).close()


def test_a_whole_last_line_that_is_no_row_is_damage_not_a_torn_write(run: Run) -> None:
    (run.path / "journal.jsonl").write_bytes(b'{"key":"a"}\n{"key":x}\n')
    with pytest.raises(DataError, match="line 2"):
        reopened(run)


def test_a_closed_run_takes_no_rows(run: Run) -> None:
    run.close()
    run.close()
    with pytest.raises(ValueError, match="closed"):
        run.append({"key": "a"})


# --- kill ---------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from twinscope.lab.run import Run

root, trials, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
for trial in range(trials):
    run = Run.create(root / str(trial), "train", "killed", "name = 1", {"count": 0})
    path = run.path
    run.close()
    acknowledged = -1
    for _ in range(3):  # killed, resumed and killed again
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            with Run.open(path) as run:
                for index in range(len(run.rows), 10**9):
                    run.append({"key": str(index), "text": "x" * (1, 300, 20000)[index % 3]})
                    os.write(theirs, b"%d\\n" % index)
                    if index % 3 == 0:
                        run.update_provenance({"count": index, "text": "y" * 9000})
        os.close(theirs)
        time.sleep(chance.uniform(0.002, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(ours, "rb") as pipe:
            said = pipe.read().split()
        acknowledged = int(said[-1]) if said else acknowledged
    print(path, acknowledged)
"""


def test_kill_at_any_moment_keeps_every_acknowledged_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "25", "7"], capture_output=True, text=True, check=True
    )
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 25
    assert sum(int(count) >= 0 for _, count in lines) > 15, "too few rows were written to test anything"
    for folder, count in lines:
        with Run.open(folder) as run:
            keys = [row["key"] for row in run.rows]
            assert keys == [str(index) for index in range(len(keys))]
            # Beside the acknowledged rows, each kill may leave the one that was about to be.
            assert int(count) + 1 <= len(keys) <= int(count) + 1 + 3
            assert run.provenance["count"] <= max(len(keys) - 1, 0)
        assert not list(Path(folder).glob(".*.tmp"))


# --- a full or forbidden disk -------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_loses_nothing(run: Run, result: dict[str, Any]) -> None:
    rows = [{"key": str(index), "text": "x" * 300} for index in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so the write that passes the limit fails with EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for row in rows[:3]:
            run.append(row)
        with pytest.raises(Stopped, match="no space left") as caught:
            run.append(rows[3])
        assert f"`twinscope resume {run.path}`" in str(caught.value)
        assert caught.value.exit_code == 75
        assert (run.path / "journal.jsonl").stat().st_size == 1000, "the write was not cut short"
        with pytest.raises(Stopped, match="no space left"):
            run.update_provenance({"text": "x" * 2000})
        with pytest.raises(Stopped, match="no space left"):
            run.finish(result)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [row["key"] for row in run.rows] == ["0", "1", "2"]
    assert not (run.path / "result.json").exists()
    assert not list(run.path.glob(".*.tmp"))
    assert "text" not in run.provenance
    # The same process may go on once there is space, and so may another.
    for row in rows[:10]:
        run.append(row)
    with reopened(run) as again:
        assert again.rows == rows[:10]
        assert "text" not in again.provenance


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, Stopped, "no space left"),
        (errno.EDQUOT, Stopped, "no space left"),
        (errno.EFBIG, Stopped, "no space left"),
        (errno.EROFS, ConfigError, "cannot write"),
        (errno.EACCES, ConfigError, "cannot write"),
        (errno.EIO, TwinscopeError, "check the disk"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_each_refusal_of_the_system_is_a_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TwinscopeError], words: str, call: str
) -> None:
    run.append({"key": "a"})
    (run.path / "note").write_text("old")

    def refuse(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, call, refuse)
        with pytest.raises(TwinscopeError, match=words) as caught:
            run.append({"key": "b"})
        assert type(caught.value) is kind
        with pytest.raises(TwinscopeError, match=words) as caught:
            write_atomic(run.path / "note", b"new")
        assert type(caught.value) is kind
    assert (run.path / "note").read_text() == "old"
    assert not list(run.path.glob(".*.tmp"))
    run.append({"key": "c"})
    with reopened(run) as again:
        assert [row["key"] for row in again.rows] == ["a", "c"]


def test_without_a_run_around_it_a_full_disk_names_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="run the command again"), writing(tmp_path / "page.html"):
        raise OSError(errno.ENOSPC, "full")


def test_write_atomic_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"long" * 1000, b"", b"short"):
        write_atomic(path, data)
        assert path.read_bytes() == data
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    with pytest.raises(ConfigError, match="cannot write"):
        write_atomic(tmp_path / "nowhere" / "file", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_atomic(tmp_path / "folder", b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


# --- one process at a time ----------------------------------------------------------------------

SECOND = """
import sys
from twinscope.lab.errors import TwinscopeError
from twinscope.lab.run import Run
try:
    Run.open(sys.argv[1]).close()
except TwinscopeError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_second_process_is_refused_with_the_holder_named(run: Run) -> None:
    command = [sys.executable, "-c", SECOND, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == (
        f"{run.path} is in use by process {os.getpid()}: wait until it ends, or stop it, then try again\n"
    )
    with pytest.raises(ConfigError, match="in use"):
        Run.open(run.path)
    reopened(run).close()


def test_a_child_that_outlives_the_run_does_not_keep_it_locked(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        reopened(run).close()
        child.communicate(b"\n")


def test_a_reader_that_looks_at_the_lock_does_not_refuse_a_resume(run: Run) -> None:
    run.close()
    with (run.path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.08, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        Run.open(run.path).close()
        timer.join()


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_run_to_stop(run: Run, number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with stop_signals(run):
        assert run.stop_requested is None
        os.kill(os.getpid(), number)
        assert run.stop_requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_requested == number.name
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_second_interrupt_is_not_swallowed(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupted_twice() -> None:
        with stop_signals(run):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert run.stop_requested == "SIGTERM"
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work() -> None:
        with stop_signals(run):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# --- result and list ----------------------------------------------------------------------------


def test_finish_writes_a_checked_result(run: Run, result: dict[str, Any]) -> None:
    broken = {**result, "summary": {}}
    with pytest.raises(TwinscopeError, match="not a valid record") as caught:
        run.finish(broken)
    assert caught.value.exit_code == 1
    assert not (run.path / "result.json").exists()
    run.finish({**result, "status": "stopped", "reason": "SIGINT"})
    assert load_record(run.path).status == "stopped"
    run.finish(result)
    assert load_record(run.path).status == "complete"


def test_a_result_of_another_verb_is_refused(tmp_path: Path, result: dict[str, Any]) -> None:
    with Run.create(tmp_path, "leak", "x", "", {}) as run, pytest.raises(TwinscopeError, match="'leak' run"):
        run.finish(result)


def test_the_list_tells_the_five_states_apart(tmp_path: Path, result: dict[str, Any]) -> None:
    early = {"status": "stopped", "reason": "SIGINT", "summary": {}}
    endings = {
        "complete": result,
        "stopped": {**result, **early},
        "failed": {**result, **early, "status": "failed", "reason": "10 steps in a row were not finite"},
        "interrupted": None,
        "damaged": None,
    }
    for name, record in endings.items():
        with Run.create(tmp_path, "train", name, "", {}) as run:
            if record is not None:
                run.finish(record)
            if name == "damaged":
                (run.path / "result.json").write_text("{")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "20200101T000000Z-train-early").mkdir()
    with Run.create(tmp_path, "train", "live", "", {}) as live:
        infos = {info.name: info for info in list_runs(tmp_path)}
        assert {name: info.status for name, info in infos.items()} == {
            "early": "interrupted",
            "complete": "complete",
            "stopped": "stopped",
            "failed": "failed",
            "interrupted": "interrupted",
            "damaged": "failed",
            "live": "running",
        }
        assert infos["live"].path == live.path
        assert infos["early"].started == "2020-01-01T00:00:00Z"
        assert infos["complete"].headline == "held-out nats per token: ep 2.250, bp 2.125"
        assert infos["stopped"].headline == "SIGINT"
        assert infos["failed"].headline == "10 steps in a row were not finite"
        assert "not a JSON record" in str(infos["damaged"].headline)
        assert infos["interrupted"].headline is None
        with Run.open(infos["stopped"].path):
            assert run_info(infos["stopped"].path).status == "running"
        with Run.open(infos["complete"].path):
            assert run_info(infos["complete"].path).status == "complete"
    assert run_info(live.path).status == "interrupted"
    assert next(iter(list_runs(tmp_path))).name == "early"
    assert list_runs(tmp_path / "nowhere") == []
    with pytest.raises(ConfigError, match="cannot list"):
        list_runs(tmp_path / "file")


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list open descriptors")
    with Run.create(tmp_path, "train", "x", "", {}) as run:
        path = run.path
    before = opened()
    for _ in range(3):
        with Run.open(path):
            with pytest.raises(ConfigError):
                Run.open(path)
            list_runs(tmp_path)
        (path / "journal.jsonl").write_bytes(b"x\n")
        with pytest.raises(DataError):
            Run.open(path)
        (path / "journal.jsonl").write_bytes(b"")
        with pytest.raises(TwinscopeError):
            Run.create(tmp_path, "train", "x", "", {"loss": float("nan")})
    assert opened() == before
