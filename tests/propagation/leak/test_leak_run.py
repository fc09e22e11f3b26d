"""The verb ``leak``: the record, exact resume after kill -9, more batches for a finished run, the command."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from twinscope.cli import main
from twinscope.lab.errors import ConfigError, DataError, RunFailed, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.propagation.leak import passes as leak_passes
from twinscope.propagation.leak.config import LeakConfig
from twinscope.propagation.leak.run import STALE, create_run, extend, leak, prepare, resume

WORDS = "the state of the union is strong and the people of the nation know it well"


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))


def values(tmp_path: Path, **changes) -> dict:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    found = {
        "name": "tiny",
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 12},
        "data": {"corpus": str(text), "batch": 3},
        "ep": {"displacement": 1e-7, "rounds": 1, "fused": False, "read": "energy"},
        "leak": {"batches": 8, "gains": [1, 16], "threads": 1, "budget_mib": 0},
    }
    for table, change in changes.items():
        found[table] = {**found.get(table, {}), **change}
    return found


def config(tmp_path: Path, **changes) -> LeakConfig:
    return LeakConfig.model_validate(values(tmp_path, **changes))


def completed(tmp_path: Path, settings: LeakConfig, name: str = "runs") -> Path:
    prepared = prepare(settings, quiet=True)
    with create_run(prepared, tmp_path / name) as run:
        leak(prepared, run, quiet=True)
    return run.path


def essence(path: Path):
    record = load_record(path)
    assert [p.name for p in (path / "checkpoints").iterdir()] == []
    return record.status, record.rows, record.summary, record.claims


def continue_run(path: Path) -> None:
    with Run.open(path) as run:
        resume(run, quiet=True)


@pytest.mark.parametrize("budget", [0, 1024])
def test_kill_at_random_moments_changes_nothing(tmp_path, budget):
    settings = config(tmp_path, leak={"batches": 16, "budget_mib": budget})
    began = time.perf_counter()
    expected = essence(completed(tmp_path, settings, "reference"))
    duration = time.perf_counter() - began
    prepared = prepare(settings)
    rng, lengths = np.random.default_rng(5), set()
    for attempt in range(4):
        root = tmp_path / f"killed-{attempt}"

        def whole(root=root) -> None:
            with create_run(prepared, root) as run:
                leak(prepared, run, quiet=True)

        child = multiprocessing.get_context("fork").Process(target=whole)
        child.start()
        time.sleep(duration * rng.uniform(0.2, 0.9))
        child.kill()
        child.join()
        if not list(root.glob("*/config.toml")):
            continue
        (path,) = root.iterdir()
        lengths.add(len((path / "journal.jsonl").read_bytes().splitlines()))
        if not (path / "result.json").exists():
            continue_run(path)
        assert essence(path) == expected
    assert len(lengths) > 1, "every kill came at the same moment: the test would show little"


def test_more_batches_give_the_result_of_a_run_with_all_of_them(tmp_path):
    path = completed(tmp_path, config(tmp_path))
    former = load_record(path)
    assert (former.summary["extended_from"], former.summary["recomputed"]) == ([], [])
    more = config(tmp_path, leak={"batches": 16})
    whole = load_record(completed(tmp_path, more, "whole"))
    with Run.open(path) as run:
        extend(more, run, quiet=True)
    found = load_record(path)
    assert found.rows == whole.rows
    assert found.rows != former.rows
    assert found.summary == {**whole.summary, "extended_from": [8], "recomputed": STALE}
    assert load_record(path / "result-of-8-batches.json") == former
    for change, words in (
        ({"leak": {"batches": 16}}, "16 batches already"),
        ({"leak": {"batches": 24, "gains": [1, 8]}}, r"\[leak\] differ"),
        ({"leak": {"batches": 24}, "ep": {"displacement": 1e-6}}, r"\[ep\] differ"),
    ):
        with Run.open(path) as run, pytest.raises(ConfigError, match=words):
            extend(config(tmp_path, **change), run, quiet=True)
    assert load_record(path) == found


def test_a_stopped_extension_is_resumed(tmp_path):
    path, more = completed(tmp_path, config(tmp_path)), config(tmp_path, leak={"batches": 16})
    with Run.open(path) as run:
        run.request_stop("SIGTERM")
        with pytest.raises(Stopped, match="twinscope resume"):
            extend(more, run, quiet=True)
    continue_run(path)
    found = load_record(path)
    assert (found.status, found.summary["batches"], found.summary["extended_from"]) == ("complete", 16, [8])
    assert found.rows == load_record(completed(tmp_path, more, "whole")).rows


def test_a_failed_self_test_stops_the_run_with_its_reason(tmp_path, monkeypatch):
    part = leak_passes.self_test

    def failing(*arguments):
        found = part(*arguments)
        return type(found)(found.null, type(found.planted)(False, "planted 4, read 2"))

    monkeypatch.setattr(leak_passes, "self_test", failing)
    prepared = prepare(config(tmp_path))
    with create_run(prepared, tmp_path / "runs") as run, pytest.raises(RunFailed, match="read 2"):
        leak(prepared, run, quiet=True)
    record = load_record(run.path)
    assert record.status == "failed"
    assert "self-test failed" in (record.reason or "")
    assert record.rows == []


def test_base_precision_and_changed_text(tmp_path):
    settings = config(tmp_path, base={"steps": 3}, leak={"precision": "fp64"})
    path = completed(tmp_path, settings)
    record = load_record(path)
    assert (record.summary["instrument"], record.summary["study"]) == ("fp64", "fp64")
    assert "step 3" in record.summary["model"]
    # Nothing is absorbed at 1e-7 in fp64.
    assert all(abs(row["projection"]) < 1e-4 for row in record.rows)
    (path / "result.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("strong", "string"))
    with pytest.raises(DataError):
        continue_run(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ep": {"rounds": 0, "read": "linear"}}, "leak is zero"),
        ({"ep": {"gain": {"profile": "top"}}}, "the arms set the gain"),
        ({"ep": {"precision": "amp"}}, "study = 'amp'"),
        ({"leak": {"batches": 12}}, "multiple of groups"),
        ({"leak": {"precision": "amp"}}, "'fp32' or 'fp64'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **changes)


def test_the_command_writes_a_record_and_extends_it(tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    settings = values(tmp_path)
    lines = [f"name = {settings.pop('name')!r}"]
    for table, keys in settings.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    file.write_text("\n".join(lines))

    def call(*arguments) -> dict:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert left.value.code == 0, captured.err
        return json.loads(captured.out.splitlines()[-1])

    first = call("leak", file, "--json", "--set", "leak.study=amp")
    record = load_record(Path(first["run"]))
    assert (record.verb, record.status, record.summary["study"]) == ("leak", "complete", "amp")
    assert len(record.rows) == 2 * 3
    assert (headline(record) or "").startswith("leak at gain 1: projection")
    change = ("--set", "leak.study=amp", "--set", "leak.batches=16")
    second = call("leak", file, "--extend", first["run"], "--json", *change)
    assert second["run"] == first["run"]
    assert load_record(Path(first["run"])).summary["extended_from"] == [8]
