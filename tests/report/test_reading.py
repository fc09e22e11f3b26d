"""Reading runs in every state: complete, stopped, interrupted, running, damaged, of another verb."""

from __future__ import annotations

import fcntl
import json

import pytest

from twinscope.lab.errors import ConfigError, DataError
from twinscope.report.reading import read_run


def test_complete_run(record, build):
    run = read_run(build(record))
    assert (run.status, run.name, run.arms, run.seeds) == ("complete", "twin-sotu", ["ep", "bp"], [0, 1])
    assert run.planned_steps == run.last_step == 2000
    assert run.final("ep", "val_loss") == record["summary"]["arms"]["ep"]["val_loss"]
    assert run.final("ep", "val_loss", seed=1) == record["summary"]["arms"]["ep"]["per_seed"][1]["val_loss"]
    assert len(run.rows_of("eval", "ep", 1)) == 20
    assert [row["step"] for row in run.rows_of("gate", seed=0)] == list(range(0, 2001, 200))


def test_without_a_result_the_journal_speaks(record, build):
    record["rows"] = [row for row in record["rows"] if row["step"] <= 800]
    path = build(record, result=False)
    with (path / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write('{"key": "other/1", "kind": "checkpoint"}\n{"key": "torn')
    run = read_run(path)
    assert (run.status, run.last_step, run.summary) == ("interrupted", 800, {})
    last = [
        row["val_loss"]
        for row in record["rows"]
        if (row["arm"], row["step"], row["kind"]) == ("ep", 800, "eval")
    ]
    assert run.final("ep", "val_loss") == pytest.approx(sum(last) / 2, rel=1e-12)
    gates = [row for row in record["rows"] if row["kind"] == "gate"]
    assert run.fidelity("ep")["worst_cosine"] == min(min(row["block_cosine"]) for row in gates)
    assert run.fidelity("ep")["displacement"] == min(max(row["displacement_ratio"]) for row in gates)
    assert run.fidelity("bp") == {}


def test_a_held_lock_is_a_running_run_whose_journal_is_ahead_of_its_stop(record, build):
    path = build(record)
    stopped = record | {"status": "stopped", "reason": "SIGINT", "rows": record["rows"][:3], "summary": {}}
    (path / "result.json").write_text(json.dumps(stopped), encoding="utf-8")
    assert (read_run(path).status, read_run(path).reason, len(read_run(path).rows)) == (
        "stopped",
        "SIGINT",
        3,
    )
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = read_run(path)
    assert (run.status, run.reason, len(run.rows)) == ("running", None, len(record["rows"]))


def test_what_a_stopped_run_lacks_is_none(record, build):
    window = {"start": 1, "end": 400, "mean": 0.01, "per_seed": [{"seed": 0}]}
    record |= {"status": "stopped", "reason": "SIGTERM"}
    record["summary"] = {"difference": {"ep": {"windows": [window, {"start": 401}]}}}
    run = read_run(build(record))
    assert run.windows("ep") == [
        {
            "start": 1,
            "end": 400,
            "mean": 0.01,
            "low": None,
            "high": None,
            "n": None,
            "per_seed": [{"seed": 0, "mean": None, "low": None, "high": None}],
        }
    ]
    assert run.final("ep", "val_bits_per_byte") is None


def test_the_reference_is_the_first_arm_that_backpropagates(make_record, build):
    record = make_record(arms=("twin", "ep", "other"), seeds=(0,))
    rules = {"twin": "ep", "ep": "bp", "other": "bp"}
    for arm, rule in rules.items():
        record["summary"]["arms"][arm]["rule"] = rule
    assert read_run(build(record)).reference == "ep"
    # Without a summary the config says it, and without arms there its default does.
    tables = "".join(f'[[arms]]\nname = "{arm}"\nrule = "{rule}"\n' for arm, rule in rules.items())
    path = build(record, name="cut", result=False, config=f'name = "x"\n{tables}')
    assert read_run(path).reference == "ep"
    assert read_run(path).arms == ["twin", "ep", "other"]
    path = build(make_record(seeds=(0,)), name="default", result=False)
    assert read_run(path).reference == "bp"
    path = build(make_record(arms=("ep",)), name="alone")
    assert read_run(path).reference is None


def test_skipped_steps_are_summed_over_seeds(record, build):
    for row in record["rows"]:
        if row["kind"] == "eval" and row["arm"] == "ep":
            # A cumulative count, so the last one of each seed holds.
            row["skipped_steps"] = row["step"] // 1000 + row["seed"]
    run = read_run(build(record, result=False))
    assert (run.skipped("ep"), run.skipped("ep", 1), run.skipped("bp")) == (5, 3, 0)


def test_config_from_the_record_where_the_file_is_gone(record, build):
    path = build(record)
    (path / "config.toml").unlink()
    record["config"]["train"]["device"] = None
    (path / "result.json").write_text(json.dumps(record), encoding="utf-8")
    run = read_run(path)
    assert "steps = 2000" in run.config
    assert "device" not in run.config


def test_refusals(record, build, tmp_path):
    with pytest.raises(ConfigError, match="there is no run at"):
        read_run(tmp_path / "nowhere")
    path = build(record)
    (path / "result.json").write_text('{"schema": "twinscope.train/9"}', encoding="utf-8")
    with pytest.raises(DataError, match="version 9"):
        read_run(path)
    (path / "result.json").unlink()
    (path / "journal.jsonl").write_text('{"key": "a", "kind": "eval", "seed": "x"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="rows"):
        read_run(path)
    (path / "journal.jsonl").write_text("", encoding="utf-8")
    (path / "provenance.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"provenance\.json"):
        read_run(path)
    (path / "provenance.json").unlink()
    (path / "config.toml").write_text("a = ", encoding="utf-8")
    with pytest.raises(DataError, match=r"config\.toml"):
        read_run(path)
