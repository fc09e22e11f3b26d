"""The mode ``sweep`` of the verb ``swap``: record, levels, seals, stops, exact resume, and the command."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scanned import CHECKED, COPIED, scanned, texts_here, write_source

from twinscope.cli import main
from twinscope.lab.config import parse_config
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.reuse import sitting, swap_run, swap_texts, sweep_run
from twinscope.reuse.swap import DECIDED, HELDOUT_OPENED
from twinscope.reuse.swap_plan import SCAN_FILE, SWAP_FILE
from twinscope.reuse.sweep_run import SweepConfig

LAYERS = 5


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sitting, "find_parity", lambda folder: CHECKED)
    monkeypatch.setattr(swap_texts, "compute_apart", texts_here)


@pytest.fixture(scope="module")
def scan(tmp_path_factory) -> Path:
    """A finished scan of a model whose third MLP is written over its fourth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sitting, "find_parity", lambda folder: CHECKED)
        folder = write_source(tmp_path_factory.mktemp("scan"))
        return scanned(folder, folder / "runs")


def swept(scan: Path, root: Path, **options: Any) -> Path:
    prepared = sweep_run.prepare(scan, **options)
    with sweep_run.create_run(prepared, root) as run:
        sweep_run.sweep(prepared, run, quiet=True)
    return run.path


@pytest.fixture(scope="module")
def whole(scan, tmp_path_factory) -> Path:
    """A sweep of both kinds that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sitting, "find_parity", lambda folder: CHECKED)
        patch.setattr(swap_texts, "compute_apart", texts_here)
        return swept(scan, tmp_path_factory.mktemp("whole"))


def essence(path: Path) -> tuple[Any, ...]:
    """Everything of a record but what two runs cannot share: when, how long, and how much memory."""
    record = load_record(path)
    own = {"heldout_opened_at", "peak_rss_mib", "planned_peak_mib", "memory", "sealed_at"}
    summary = {key: value for key, value in record.summary.items() if key not in own}
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in record.rows]
    return record.status, rows, summary, record.claims, record.config


def test_the_record_holds_the_matrices_and_stays_at_parity(scan, whole):
    record = load_record(whole)
    summary = record.summary
    assert (record.status, summary["mode"], summary["level"]) == ("complete", "sweep", "parity")
    assert (summary["pair"], summary["directions"]) == (None, [])
    assert summary["scan"]["run"] == scan.name
    assert summary["margin"] == 0.05
    assert summary["texts"] == {"calibration": 3, "heldout": 2}
    assert [(kind["kind"], kind["pairs"]) for kind in summary["kinds"]] == [("attention", 20), ("mlp", 20)]
    mlp = summary["kinds"][1]
    assert mlp["sites"] == [f"layers.{n}.mlp" for n in range(LAYERS)]
    # One MLP is a copy of the other, pre-norm included: either way nothing changes beyond rounding.
    for i, j in ((2, 3), (3, 2)):
        assert abs(mlp["delta_nll"][i][j]) < 1e-6
        assert mlp["verdict"][i][j] == "equivalent"
        assert mlp["needed"][i][j] == 2
    # In the place of any other both are the same function.
    for i in (0, 1, 4):
        assert mlp["delta_nll"][i][2] == pytest.approx(mlp["delta_nll"][i][3], abs=1e-6)
    others = [
        abs(mlp["delta_nll"][i][j])
        for i in range(LAYERS)
        for j in range(LAYERS)
        if i != j and {i, j} != {2, 3}
    ]
    assert min(others) > 1e-3
    assert [mlp["delta_nll"][i][i] for i in range(LAYERS)] == [0.0] * LAYERS
    assert [item["site"] for item in mlp["zero"]] == mlp["sites"]
    # Every entry is the mean over the rows, which are there once for every site and split.
    assert len(record.rows) == 2 * LAYERS * 2
    for kind in summary["kinds"]:
        for name, split in (("delta_nll", "heldout"), ("calibration_delta_nll", "calibration")):
            for i, site in enumerate(kind["sites"]):
                (row,) = [r for r in record.rows if (r["replaced"], r["split"]) == (site, split)]
                assert row["itself"] == [0.0] * summary["texts"][split]
                for other, values in zip(row["by"], row["delta_nll"], strict=True):
                    assert kind[name][i][kind["sites"].index(other)] == pytest.approx(np.mean(values))
                if split == "heldout":
                    assert kind["zero"][i]["delta_nll"] == pytest.approx(np.mean(row["zero"]))
    assert "2 of 20 mlp replacements (released weights, exploratory)" in (headline(record) or "")
    (claim,) = record.claims
    assert claim["level"] == "parity"
    assert "20 of kind attention and 20 of kind mlp" in claim["statement"]
    assert summary["peak_rss_mib"] > 0 < summary["planned_peak_mib"]
    with Run.open(whole) as run:
        keys = [row["key"] for row in run.rows]
        opened = run.rows[keys.index(HELDOUT_OPENED)]
        decided = run.rows[keys.index(DECIDED)]
    assert summary["heldout_opened_at"] == opened["at"]
    assert decided["needed"] == [kind["needed"] for kind in summary["kinds"]]
    order = [("heldout" in key, key) for key in keys if key.startswith("layers.")]
    assert [late for late, _ in order] == [False] * 10 + [True] * 10
    assert max(keys.index(key) for late, key in order if not late) < keys.index(DECIDED)
    assert keys.index(DECIDED) < keys.index(HELDOUT_OPENED) < min(keys.index(k) for late, k in order if late)


def test_a_subset_is_swept_on_other_texts(scan, tmp_path):
    path = swept(scan, tmp_path / "runs", kinds=["mlp"], every=2, texts=4, tokens=9)
    record = load_record(path)
    (kind,) = record.summary["kinds"]
    assert kind["sites"] == ["layers.0.mlp", "layers.2.mlp", "layers.4.mlp"]
    assert record.summary["texts"] == {"calibration": 4, "heldout": 4}
    assert record.summary["tokens"] == 9
    assert record.summary["notes"] == ["of each kind one site in 2 was swept, from the first"]
    assert [row["split"] for row in record.rows] == ["calibration"] * 3 + ["heldout"] * 3
    own = {tuple(item["ids"]) for item in record.config["plan"]["texts"]["passages"]}
    assert not own & {tuple(item["ids"]) for item in record.config["swap"]["texts"]["passages"]}


def test_weights_and_parity_hold_the_level_down(scan, tmp_path, monkeypatch):
    folder = write_source(tmp_path / "random", "random")
    random = load_record(swept(scanned(folder, folder / "runs"), tmp_path / "runs", every=2))
    assert random.summary["level"] == "parity"
    assert "the weights are random" in random.claims[0]["does_not_support"]
    monkeypatch.setattr(sitting, "find_parity", lambda folder: None)
    unchecked = load_record(swept(scan, tmp_path / "runs", every=2))
    assert (unchecked.summary["level"], unchecked.claims[0]["level"]) == ("capacity", "capacity")


@pytest.mark.parametrize("unit", [0, 33])
def test_a_stop_between_units_is_resumed_to_the_same_record(scan, whole, tmp_path, unit, monkeypatch):
    prepared = sweep_run.prepare(scan)
    units = iter(range(10_000))
    honest = sitting.Clock.check

    def check(self: Any) -> None:
        if next(units) == unit:
            run.request_stop("a test")
        honest(self)

    monkeypatch.setattr(sitting.Clock, "check", check)
    with sweep_run.create_run(prepared, tmp_path / "stopped") as run:
        with pytest.raises(Stopped, match=r"stopped by a test in .* continue with: twinscope resume"):
            sweep_run.sweep(prepared, run, quiet=True)
        assert load_record(run.path).status == "stopped"
        known = [row["key"] for row in run.rows]
        run.stop_requested = None
        # The verb's own resume finds out which mode it is.
        swap_run.resume(run, quiet=True)
        assert [row["key"] for row in run.rows][: len(known)] == known
    assert essence(run.path) == essence(whole)


def test_a_kill_changes_nothing(scan, whole, tmp_path):
    duration = sum(row["timing"]["seconds"] for row in load_record(whole).rows)
    prepared = sweep_run.prepare(scan)

    def work() -> None:
        with sweep_run.create_run(prepared, tmp_path / "killed") as run:
            sweep_run.sweep(prepared, run, quiet=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    while next(tmp_path.glob("killed/*/journal.jsonl"), None) is None and process.is_alive():
        time.sleep(0.005)
    process.join(duration / 2)
    process.kill()
    process.join()
    (path,) = (tmp_path / "killed").iterdir()
    with Run.open(path) as run:
        if not (path / "result.json").exists():
            sweep_run.resume(run, quiet=True)
    assert essence(path) == essence(whole)


def stopped(scan: Path, root: Path) -> Path:
    """A sweep that its budget of time stopped."""
    with pytest.raises(Stopped, match="0 s have passed, over the budget of 0 s"):
        swept(scan, root, minutes=1e-6)
    (path,) = root.iterdir()
    assert load_record(path).status == "stopped"
    return path


def test_what_changed_since_the_seal_is_refused(scan, tmp_path):
    path = stopped(scan, tmp_path / "stopped")

    def refused(file: str, old: str, new: str, sentence: str) -> None:
        kept = (path / file).read_text()
        assert old in kept
        (path / file).write_text(kept.replace(old, new))
        with Run.open(path) as run, pytest.raises(DataError, match=sentence):
            swap_run.resume(run, quiet=True)
        (path / file).write_text(kept)

    refused(SWAP_FILE, '"margin": 0.05', '"margin": 0.5', "is not what this run sealed before it began")
    refused(SCAN_FILE, '"level": "parity"', '"level": "candidate"', "is not the record of the scan")
    refused("plan.json", '"margin": 0.05', '"margin": 0.5', "its margin changed since")
    with pytest.raises(ConfigError, match="mode"):
        parse_config({"mode": "pair"}, SweepConfig, origin="config.toml")
    model = Path(json.loads((path / "plan.json").read_text())["folder"])
    shutil.copytree(model, tmp_path / "kept")
    try:
        weights = model / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with (
            Run.open(path) as run,
            pytest.raises(DataError, match="the model changed since the plan was sealed"),
        ):
            swap_run.resume(run, quiet=True)
    finally:
        shutil.copytree(tmp_path / "kept", model, dirs_exist_ok=True)


def test_what_cannot_be_swept_is_refused_before_a_run_is_made(scan, tmp_path, monkeypatch):
    refused: list[tuple[dict[str, Any], str]] = [
        ({"every": 5}, "there is nothing to sweep: the model has no two sites of the kind 'attention'"),
        ({"kinds": ["q_norm"]}, "--kind q_norm: the model has no two sites"),
        ({"kinds": ["mpl"]}, "no kind of site 'mpl': use one of"),
        ({"every": 0}, "--every 0: give 1 for every site"),
        ({"minutes": 0.0}, "--minutes 0: give a positive number"),
    ]
    for options, sentence in refused:
        with pytest.raises(ConfigError, match=sentence):
            sweep_run.prepare(scan, **options)
    monkeypatch.setattr(sweep_run, "planned_mib", lambda *_: 1e6)
    with pytest.raises(
        ConfigError, match=r"would take about 1000000 MiB, over the plan's reuse\.budgets\.pro"
    ):
        sweep_run.prepare(scan)


def test_the_command_sweeps(scan, tmp_path, capsys):
    def called(*arguments: str) -> tuple[Any, Any]:
        with pytest.raises(SystemExit) as left:
            main(["swap", *arguments])
        return left.value.code, capsys.readouterr()

    code, said = called(str(scan), "--sweep", "--kind", "mlp", "--every", "2", "--json")
    answer = json.loads(said.out.strip().splitlines()[-1])
    assert (code, answer["status"]) == (0, "complete")
    assert load_record(Path(answer["run"])).summary["kinds"][0]["pairs"] == 6
    code, said = called(str(scan), "--sweep", "--pair", COPIED)
    assert code == 2
    assert "--pair and --sweep: give one of the two" in said.err
    code, said = called(str(scan), "--every", "2")
    assert code == 2
    assert "give --sweep with them" in said.err
    code, said = called(str(scan), "--sweep", "--kind", "norm")
    assert code == 2
    assert "no kind of site 'norm'" in said.err
    (plan,) = scan.parent.glob("*-plan-*")
    code, said = called(str(plan), "--sweep")
    assert code == 2
    assert "give the directory of a finished scan" in said.err
