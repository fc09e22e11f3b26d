"""The verb ``cost``: configurations, the record, resume that keeps what is measured, the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import tomli_w

from twinscope.cli import main
from twinscope.lab.config import read_config
from twinscope.lab.errors import ConfigError, RunFailed, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.models.gpt import GPTConfig
from twinscope.propagation.cost import bench as measuring
from twinscope.propagation.cost.config import CostConfig
from twinscope.propagation.cost.counting import count_arms
from twinscope.propagation.cost.disturbance import Disturbance
from twinscope.propagation.cost.flops import ledger
from twinscope.propagation.cost.peak_memory import Peak, Subject
from twinscope.propagation.cost.run import cost, create_run, prepare, resume
from twinscope.propagation.cost.summary import summarize

WORDS = "the state of the union is strong and the people of the nation know it well"
EXPERIMENTS = Path(__file__).parents[3] / "experiments"
#: Fields of rows that no run repeats.
TIMES = {
    "seconds", "evaluation_seconds", "step_seconds", "wall_seconds", "other_cpus", "stolen_cpus", "load",
    "disturbances", "journal_row_seconds", "resident_mib", "other_cpus_reason", "stolen_cpus_reason",
}  # fmt: skip


def peak(subject: Subject) -> Peak:
    """Peaks that tell shapes and arms apart; those of real steps are in test_peak_memory.py."""
    size = float(subject.shape.width * {"ep": 11, "ep3": 12, "bp": 10}[subject.arm])
    return Peak(10 * size, size, 1.0, 1.0, 2.0, 400.0)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(measuring, "peak_apart", peak)
    # In this process: a fresh one takes seconds to import what this one has.
    monkeypatch.setattr(measuring, "count_apart", count_arms)


def values(tmp_path: Path, **changes) -> dict:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    found = {
        "name": "tiny",
        "model": {"layers": 3, "width": 16, "heads": 2, "context": 12},
        "data": {"corpus": str(text), "batch": 3},
        "cost": {"windows": 2, "steps": 2, "warmup": 1, "threads": 1, "part_steps": 1, "fidelity_batches": 1},
        "arms": [
            {"name": "ep", "rule": "ep"},
            {"name": "ep3", "rule": "ep", "rounds": 3, "fused": False},
            {"name": "bp", "rule": "bp"},
        ],
    }
    for table, change in changes.items():
        found[table] = {**found.get(table, {}), **change} if isinstance(change, dict) else change
    return found


def config(tmp_path: Path, **changes) -> CostConfig:
    return CostConfig.model_validate(values(tmp_path, **changes))


def completed(tmp_path: Path, settings: CostConfig, name: str = "runs") -> Path:
    prepared = prepare(settings, quiet=True)
    with create_run(prepared, tmp_path / name) as run:
        cost(prepared, run, quiet=True)
    return run.path


def lasting(rows: list[dict]) -> list[dict]:
    """Rows without what no run repeats."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def test_the_record_says_what_the_windows_hold(tmp_path):
    shapes = [{"name": "a"}, {"name": "b", "width": 24, "batch": 2, "layers": 2}]
    path = completed(tmp_path, config(tmp_path, shapes=shapes))
    record = load_record(path)
    summary, rows = record.summary, record.rows
    assert not (path / "overhead").exists()

    windows = [row for row in rows if row["kind"] == "window" and row["shape"] == "a"]
    assert [row["arm"] for row in windows] == ["ep", "ep3", "bp", "bp", "ep3", "ep"]
    assert [row["position"] for row in windows] == list(range(6))
    for row in windows:
        assert row["step_seconds"] == pytest.approx((row["seconds"] - row["evaluation_seconds"]) / 2)
        assert row["wall_seconds"] == pytest.approx(row["step_seconds"] + row["evaluation_seconds"] / 100)

    def seconds(arm: str, shape: str) -> list[float]:
        found = [row for row in rows if row["kind"] == "window" and row["shape"] == shape]
        return [row["step_seconds"] for row in found if row["arm"] == arm]

    assert [(c["shape"], c["arm"]) for c in summary["comparisons"]] == [
        ("a", "ep"), ("a", "ep3"), ("b", "ep"), ("b", "ep3"),
    ]  # fmt: skip
    for entry in summary["comparisons"]:
        ratios = np.array(seconds(entry["arm"], entry["shape"])) / seconds("bp", entry["shape"])
        assert entry["train_step_ratio"]["median"] == pytest.approx(np.median(ratios))
        # The two counts agree at every stage.
        assert (entry["flops"]["agree"], entry["flops"]["differences"]) == (True, [])
        assert entry["flops"]["counted_ratio"] == pytest.approx(entry["flops"]["analytic_ratio"], rel=1e-12)
        assert entry["gap"][-1]["ratio"] == entry["train_step_ratio"]["median"]
        assert entry["fidelity"]["median_cosine"] > 0.99
        assert entry["fidelity"]["control_cosine"] > 0.99999
    first = summary["comparisons"][0]
    for key in ("wall_clock_ratio", "train_step_ratio", "flops", "fidelity", "peak_memory_ratio", "verdict"):
        assert summary[key] == first[key]

    memory = {(m["shape"], m["arm"]): m for m in summary["memory"]}
    assert memory["b", "ep"]["total_mib"] == 10 * 24 * 11
    assert first["peak_memory_ratio"] == first["activation_peak_ratio"] == pytest.approx(1.1)
    wide = GPTConfig(vocab=prepare(config(tmp_path)).data.vocab, layers=2, width=24, heads=2, context=12)
    training = config(tmp_path, shapes=shapes).training(config(tmp_path, shapes=shapes).shapes[1])
    expected = ledger(wide, 2, None, training.optimizer).total
    lines = [x["flops"] for x in summary["ledger"] if (x["shape"], x["arm"]) == ("b", "bp")]
    assert sum(lines) == expected
    shares = [p["share"] for p in summary["parts"] if (p["shape"], p["arm"]) == ("a", "ep3")]
    assert sum(shares) == pytest.approx(1)
    named = {p["part"] for p in summary["parts"] if (p["shape"], p["arm"]) == ("a", "ep3")}
    stages = {"data", "embedding", "free", "readout", "forces", "rebuild", "read", "optimizer"}
    assert named == stages | {"unmarked"}
    assert [(o["shape"], o["arm"], o["n"]) for o in summary["overhead"]] == [("a", "bp", 2), ("b", "bp", 2)]
    # Windows of milliseconds cannot show a quiet machine.
    assert not summary["controlled"]
    assert "not controlled" in (headline(record) or "")
    assert "not quiet" in record.claims[0]["statement"]


def test_a_resumed_run_keeps_what_is_measured_and_adds_the_rest(tmp_path):
    settings = config(tmp_path, claims=[
        {"name": "c", "quantity": "flops_ratio", "low": 3.0, "high": 3.1, "source": "s",
         "conditions": {"rounds": 3}},
    ])  # fmt: skip
    whole = completed(tmp_path, settings)
    expected = load_record(whole)
    lines = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (4, len(lines) - 1):
        path = tmp_path / f"cut-{kept}" / whole.name
        shutil.copytree(whole, path)
        (path / "result.json").unlink()
        # A torn last line and a scratch run are what kill -9 may leave.
        (path / "journal.jsonl").write_bytes(b"".join(lines[:kept]) + lines[-1][:20])
        (path / "overhead").mkdir()
        with Run.open(path) as run:
            resume(run, quiet=True)
        found = load_record(path)
        assert found.rows[:kept] == expected.rows[:kept]
        assert lasting(found.rows) == lasting(expected.rows)
        for key in ("flops", "fidelity", "ledger", "claims", "peak_memory_ratio", "published"):
            assert found.summary[key] == expected.summary[key]
        assert len(found.provenance["resumed"]) == 1
        assert not (path / "overhead").exists()


def test_a_stop_is_obeyed_between_units_and_resumed(tmp_path):
    prepared = prepare(config(tmp_path, cost={"memory": False, "count": False, "overhead": False}))
    with create_run(prepared, tmp_path / "runs") as run:
        run.request_stop("SIGTERM")
        with pytest.raises(Stopped, match="twinscope resume"):
            cost(prepared, run, quiet=True)
        assert run.rows == []
    with Run.open(run.path) as opened:
        resume(opened, quiet=True)
    summary = load_record(run.path).summary
    assert summary["peak_memory_ratio"] is None
    assert "cost.memory is false" in summary["peak_memory_ratio_reason"]
    assert summary["flops"]["counted_ratio"] is None
    assert summary["overhead"] == []


def row(arm: str, sweep: int, step: float, wall: float, disturbances=()) -> dict:
    return {"key": f"{arm}{sweep}", "kind": "window", "shape": "model", "arm": arm, "sweep": sweep,
            "position": 0, "steps": 2, "seconds": 2 * step, "evaluation_seconds": 0.0, "step_seconds": step,
            "wall_seconds": wall, "disturbances": list(disturbances)}  # fmt: skip


def summary_of(tmp_path: Path, rows: list[dict], **changes) -> dict:
    settings = config(tmp_path, arms=values(tmp_path)["arms"][1:], cost={"numerator": "ep3"}, **changes)
    shape = GPTConfig(vocab=20, layers=3, width=16, heads=2, context=12)
    return summarize(settings, {"model": shape}, rows, {"device": "cpu", "device_name": "a processor"})


def test_agreement_control_and_claims_are_read_off_the_rows(tmp_path):
    def claims(**conditions):
        return [{"name": "c", "quantity": "wall_clock_ratio", "low": 2.0, "high": 2.1, "source": "s",
                 "conditions": conditions}]  # fmt: skip

    first = [row("ep3", 0, 3.0, 3.3), row("bp", 0, 1.0, 1.1)]
    steady = [*first, row("bp", 1, 1.04, 1.1), row("ep3", 1, 3.1, 3.3)]
    found = summary_of(tmp_path, steady, claims=claims(device="cpu", rounds=3, width=16, batch=3))
    assert (found["windows_agree"], found["controlled"]) == (True, True)
    assert found["wall_clock_ratio"]["median"] == pytest.approx(3.0)
    assert found["train_step_ratio"]["median"] == pytest.approx((3.0 + 3.1 / 1.04) / 2)
    assert [entry["spread"] for entry in found["agreement"]] == pytest.approx([0.1 / 3, 0.04])
    (judged,) = found["claims"]
    assert judged["verdict"] == "understated"
    assert "quiet" not in judged["reason"]
    # One window 6 % slower than another: outside the band of 5 %.
    apart = [*steady[:2], row("bp", 1, 1.06, 1.1), steady[3]]
    assert not summary_of(tmp_path, apart)["windows_agree"]
    assert summary_of(tmp_path, apart)["controlled"]
    noisy = [*steady[:3], row("ep3", 1, 3.1, 3.3, ["other processes kept 0.90 CPUs busy"])]
    found = summary_of(tmp_path, noisy, claims=claims(device="cuda"))
    assert not found["controlled"]
    assert [d["reason"] for d in found["disturbances"]] == ["other processes kept 0.90 CPUs busy"]
    assert found["claims"][0]["verdict"] == "not comparable"


def test_steps_that_are_skipped_fail_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("twinscope.propagation.twin.is_finite", lambda found: False)
    prepared = prepare(config(tmp_path))
    with create_run(prepared, tmp_path / "runs") as run, pytest.raises(RunFailed, match="3 steps were"):
        cost(prepared, run, quiet=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cost": {"numerator": "ep33"}}, r"'ep33' is no arm \(did you mean"),
        ({"cost": {"numerator": "bp"}}, "whose ratio is 1"),
        ({"cost": {"windows": 1}}, "windows"),
        ({"cost": {"compile": True, "warmup": 0}}, "needs a warmup"),
        (
            {"arms": [{"name": "ep", "rule": "ep"}, {"name": "bp", "rule": "bp", "rounds": 1}]},
            "means nothing",
        ),
        ({"cost": {"step": 3}}, "step"),
        ({"ep": {"precision": "amp"}}, r"set \[cost\] precision"),
        ({"shapes": [{"name": "a", "widht": 32}]}, "unknown key 'widht' .did you mean 'width'"),
        ({"shapes": [{"name": "a", "width": 31}]}, "shape 'a': width 31 does not split evenly"),
        ({"shapes": [{"name": "a"}, {"name": "a"}]}, "every name may stand once"),
        ({"arms": [{"name": "ep", "rule": "ep", "rounds": 0}, {"name": "bp", "rule": "bp"}]}, "rounds = 0"),
        ({"claims": [{"name": "c", "quantity": "cost", "low": 1, "high": 2, "source": "s"}]}, "quantity"),
        (
            {"model": {"source": "run:x"}, "shapes": [{"name": "a"}]},
            "the shape comes from the source|has the shape of that source",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, changes, words):
    found = values(tmp_path, **changes)
    if "source" in found["model"]:
        found["model"] = {"source": "run:x"}
    with pytest.raises(ValueError, match=words):
        CostConfig.model_validate(found)


def test_the_named_experiments_can_be_prepared_and_hold_the_claims():
    fast = read_config(EXPERIMENTS / "cost-fast.toml", CostConfig)
    shapes = [fast.training(shape) for shape in fast.measured_shapes()]
    assert [(s.model.layers, s.model.width, s.model.context, s.data.batch) for s in shapes] == [
        (12, 256, 128, 4), (6, 512, 256, 2),
    ]  # fmt: skip
    reference = read_config(EXPERIMENTS / "cost-reference.toml", CostConfig).with_published(EXPERIMENTS)
    assert len(reference.published) == 3
    with pytest.raises(ConfigError, match="no config file"):
        reference.model_copy(update={"published": ["published/none.toml"]}).with_published(EXPERIMENTS)


def test_the_command_pauses_processes_only_while_windows_run(tmp_path, capsys, monkeypatch):
    neighbour = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"])
    seen = []
    timed = measuring.time_window

    def watched(*arguments, **named):
        seen.append(psutil.Process(neighbour.pid).status())
        return timed(*arguments, **named)

    monkeypatch.setattr(measuring, "time_window", watched)
    monkeypatch.setattr(measuring, "watch", lambda *_: lambda: Disturbance(0.01, 0.0, 1.0, []))
    (tmp_path / "published").mkdir()
    shutil.copy(EXPERIMENTS / "published/a6000-12-blocks.toml", tmp_path / "published/a.toml")
    file = tmp_path / "tiny.toml"
    claims = [{"name": "2x", "quantity": "wall_clock_ratio", "low": 1.95, "high": 2.05, "source": "s",
               "conditions": {"device": "cuda", "rounds": 3}}]  # fmt: skip
    file.write_text(tomli_w.dumps(values(tmp_path, claims=claims) | {"published": ["published/a.toml"]}))

    def call(*arguments) -> tuple[int, dict, str]:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(left.value.code or 0), json.loads(captured.out.splitlines()[-1]), captured.err

    quick = ("--set", "cost.memory=false", "--set", "cost.count=false", "--json")
    try:
        code, found, error = call("cost", file, "--pause", neighbour.pid, *quick)
        assert code == 0, error
        assert seen == [psutil.STATUS_STOPPED] * 6
        assert psutil.Process(neighbour.pid).status() != psutil.STATUS_STOPPED
        record = load_record(Path(found["run"]))
        assert record.summary["controlled"]
        assert {tuple(row["paused"]) for row in record.rows if row["kind"] == "window"} == {(neighbour.pid,)}
        assert record.summary["claims"][0]["verdict"] == "understated"
        assert record.summary["claims"][0]["measured"] == 2.70
        # Self-contained: a resume needs neither the file nor the folder.
        assert "3.451" in (Path(found["run"]) / "config.toml").read_text()
        for arguments, words in (
            ((file, "--pause", os.getpid()), "twinscope itself"),
            ((file, "--set", "cost.windows=1"), "cost.windows"),
            ((file, "--set", "published=['none.toml']"), "no config file"),
        ):
            code, found, _ = call("cost", *arguments, "--json")
            assert code == 2
            assert words in found["error"]
            assert found["run"] is None
    finally:
        neighbour.send_signal(signal.SIGCONT)
        neighbour.kill()
        neighbour.wait()
