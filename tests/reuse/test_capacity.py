"""The verb ``probe``: products against float64, memory of a process that holds NumPy alone, the record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twinscope.cli import main
from twinscope.lab.errors import RunFailed, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.reuse import bare_matmul, capacity
from twinscope.reuse.capacity import ProbeConfig

SMALL = {"inner": 64, "columns": [32, 96], "file_mib": 2}


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))


def probed(tmp_path: Path, **changes) -> Path:
    config = ProbeConfig.model_validate(SMALL | changes)
    with capacity.create_run(config, tmp_path / "runs") as run:
        capacity.probe(config, run, quiet=True)
    return run.path


def test_the_record_holds_what_the_contract_names(tmp_path):
    record = load_record(probed(tmp_path))
    summary = record.summary
    assert record.status == "complete"
    assert {"cores", "memory", "swap", "disk", "peak_rss_mib", "matmul"} <= summary.keys()
    assert summary["cores"] == len(os.sched_getaffinity(0)) or summary["processor"]["quota"] is not None
    one = [item for item in summary["matmul"] if item["threads"] == 1]
    assert [item["shape"] for item in one] == [[32, 64, 32], [32, 64, 96]]
    assert all(len(item["next_s"]) == 3 and item["first_s"] > 0 for item in summary["matmul"])
    assert all(item["finite"] and item["error"] <= item["error_bound"] for item in summary["matmul"])
    assert summary["conversion"]["million_values_per_s"] > 0
    (claim,) = record.claims
    assert (summary["level"], claim["level"]) == ("capacity", "capacity")
    assert claim["does_not_support"] == "anything about the model"
    assert "no statement about any model" in (headline(record) or "")


def test_the_products_are_those_of_the_seed_and_the_error_is_that_of_float32():
    found = bare_matmul.timed_product(4, 50, 7, 2, seed=42)
    draws = np.random.default_rng(42)
    x, w = (draws.standard_normal(shape, dtype=np.float32) for shape in ((4, 50), (50, 7)))
    row, block = x[0].astype(np.float64), w.astype(np.float64)
    expected = np.abs((x @ w)[0] - row @ block) / (np.abs(row) @ np.abs(block))
    assert found["error"] == pytest.approx(expected.max(), rel=1e-6)
    assert 0 < expected.max() < 51 * 2.0**-24
    assert (len(found["next_s"]), found["finite"]) == (2, True)


def test_the_process_that_multiplies_holds_numpy_alone():
    program = (
        "import runpy, sys; sys.argv[1:] = [sys.argv[1]]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'twinscope', 'psutil')))"
    )
    request = json.dumps({"rows": 2, "shapes": [[8, 8]], "repeats": 1, "seed": 0})
    script = f"import sys; sys.argv = [{bare_matmul.__file__!r}, {request!r}]; {program}"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    answer, modules = done.stdout.strip().splitlines()
    assert modules == "[]"
    assert 20 < json.loads(answer)["peak_rss_mib"] < 60


def test_a_product_beyond_rounding_is_refused(tmp_path, monkeypatch):
    honest = capacity._in_bare_process

    def wrong(*arguments):
        found = honest(*arguments)
        found["products"][0]["error"] = 1e-3
        return found

    monkeypatch.setattr(capacity, "_in_bare_process", wrong)
    with pytest.raises(RunFailed, match=r"departs from float64 by 1\.0e-03 where rounding allows 3\.9e-06"):
        probed(tmp_path)


def test_it_stops_at_its_limit_of_time_and_goes_on_from_there(tmp_path, monkeypatch):
    with pytest.raises(Stopped, match=r"over the budget of 0 s|did not end within the 0 s"):
        probed(tmp_path, seconds=0.001)
    (path,) = (tmp_path / "runs").iterdir()
    assert load_record(path).status == "stopped"

    calls = []
    honest = capacity._products

    def once(config, threads, budget):
        calls.append(threads)
        return honest(config, threads, budget)

    monkeypatch.setattr(capacity, "_products", once)
    config = ProbeConfig.model_validate(SMALL)
    with capacity.create_run(config, tmp_path / "runs") as run:
        run.request_stop("a test")
        with pytest.raises(Stopped, match="stopped by a test before the part 'matmul-1'"):
            capacity.probe(config, run, quiet=True)
        run.stop_requested = None
        record = capacity.resume(run, quiet=True)
    assert record["status"] == "complete"


def test_rates_of_reading_need_room_and_a_disk(tmp_path, monkeypatch):
    rates = capacity.read_rates(tmp_path, 10**9)
    assert rates["disk_mib_per_s"] is None
    assert "too little to write a file" in rates["disk_mib_per_s_reason"]
    monkeypatch.setattr(capacity, "_bytes_from_disk", lambda: 0)
    rates = capacity.read_rates(tmp_path, 1)
    assert rates["cache_mib_per_s"] > 0
    assert "stayed in memory" in rates["disk_mib_per_s_reason"]
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_cores_are_those_that_the_control_group_grants(tmp_path):
    for name, text in {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert capacity.usable_cores(tmp_path) == 1


def test_the_command_prints_one_json_line(tmp_path, capsys):
    changes = [f"--set={key}={value}" for key, value in SMALL.items()]
    with pytest.raises(SystemExit) as left:
        main(["probe", "--json", *changes])
    assert left.value.code == 0
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert answer["status"] == "complete"
    with Run.open(answer["run"]) as run:
        assert run.verb == "probe"
    with pytest.raises(SystemExit) as left:
        main(["probe", "--set", "second=3"])
    assert left.value.code == 2
    assert "unknown key 'second' (did you mean 'seconds'?)" in capsys.readouterr().err
