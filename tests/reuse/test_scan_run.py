"""The verb ``scan``: numbers against the library's own layers, levels, the seal, stops, and exact resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import tiny_config, write_llama, write_text
from transformers import LlamaForCausalLM

from twinscope.cli import main
from twinscope.lab.config import to_toml
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.models.store.origin import file_sha256
from twinscope.reuse import plan_run, scan_run, sitting
from twinscope.reuse.plan import PLAN_FILE
from twinscope.reuse.scan import open_heldout

COPIED = "layers.2.mlp=layers.3.mlp"
PAIRS = [COPIED, "layers.0.mlp=layers.1.mlp", "layers.1.self_attn=layers.2.self_attn"]
CHECKED = SimpleNamespace(
    passed=True, hidden_difference=0.0, hidden_tolerance=1e-5, nll_difference=1e-6, nll_tolerance=1e-4
)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sitting, "find_parity", lambda folder: CHECKED)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model whose third MLP is written over its fourth, and a text."""
    folder = tmp_path_factory.mktemp("source")
    write_llama(folder / "model", layers=5, copies={"layers.3.mlp": "layers.2.mlp"})
    write_text(folder / "text.txt")
    return folder


def planned(tmp_path: Path, source: Path, model: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The directory of a plan run; ``changes`` go into ``[reuse]``."""
    if not (tmp_path / "model").exists():
        shutil.copytree(source / "model", tmp_path / "model")
    config = tiny_config(tmp_path / "model", source / "text.txt", **{"pairs": PAIRS, **changes})
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    with plan_run.create_run(config, tmp_path / "runs") as run:
        plan_run.plan(run, quiet=True)
    return run.path


def scanned(plan: Path, root: Path, exploratory: tuple[str, ...] = ()) -> Path:
    prepared = scan_run.prepare(plan_run.plan_of_run(plan), exploratory)
    with scan_run.create_run(prepared, root) as run:
        scan_run.scan(prepared, run, quiet=True)
    return run.path


def essence(path: Path) -> tuple[Any, ...]:
    """Everything of a record but what two runs cannot share: when, how long, and how much memory."""
    record = load_record(path)
    own = {"heldout_opened_at", "peak_rss_mib", "planned_peak_mib", "memory"}
    summary = {key: value for key, value in record.summary.items() if key not in own}
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in record.rows]
    return record.status, rows, summary, record.claims, record.config


def levels(path: Path) -> dict[str, str]:
    return {pair["id"]: pair["level"] for pair in load_record(path).summary["pairs"]}


def library_rows(folder: Path, passages: list[Any]) -> dict[tuple[str, str, str], torch.Tensor]:
    """(text, site, other) -> the MLP branch of the other site on what enters the site, by the library."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = list(model.model.layers)
    entering: dict[int, torch.Tensor] = {}

    def keep(number: int, inputs: tuple[torch.Tensor, ...]) -> None:
        entering.setdefault(number, inputs[0].clone())

    for number, layer in enumerate(layers):
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda module, inputs, number=number: keep(number, inputs)
        )
    found = {}
    with torch.no_grad():
        for passage in passages:
            entering.clear()
            model(torch.tensor([passage.ids]))
            for here, z in list(entering.items()):
                for there, layer in enumerate(layers):
                    names = (passage.name, f"layers.{here}.mlp", f"layers.{there}.mlp")
                    found[names] = layer.mlp(layer.post_attention_layernorm(z))[0]
    return found


def test_rows_are_the_branches_of_the_library(tmp_path, source):
    plan = planned(tmp_path, source)
    rows = load_record(scanned(plan, tmp_path / "runs")).rows
    passages = plan_run.plan_of_run(plan).texts
    expected = library_rows(tmp_path / "model", passages)
    calibration = [passage.name for passage in passages if passage.split == "calibration"]
    assert len(rows) == 3 * 2 * 5
    mlp = [row for row in rows if row["kind"] == "mlp"]
    assert len(mlp) == 2 * 2 * 5

    def error(substitute: torch.Tensor, reference: torch.Tensor) -> Any:
        return pytest.approx(((substitute - reference).norm() / reference.norm()).item(), rel=1e-4, abs=1e-6)

    for row in mlp:
        text, here, there = row["text"], row["reference"], row["substitute"]
        reference = expected[text, here, here]
        assert row["branch_error"] == error(expected[text, here, there], reference)
        assert row["reference_norm"] == pytest.approx(reference.norm().item(), rel=1e-5)
        beside = {null["null"]: null["branch_error"] for null in row["nulls"]}
        # The mean of calibration tokens also where the text is held out.
        mean = torch.cat([expected[name, here, here] for name in calibration]).mean(dim=0)
        assert beside["mean"] == error(mean.expand_as(reference), reference)
        others = {name.removeprefix("other.") for name in beside if name.startswith("other.")}
        assert len(others - {here, there}) == 2
        for site in others:
            assert beside[f"other.{site}"] == error(expected[text, here, site], reference)


def test_the_record_says_what_was_found_and_when_held_out_text_was_opened(tmp_path, source):
    before = {path.name: file_sha256(path) for path in (source / "model").iterdir()}
    plan = planned(tmp_path, source)
    path = scanned(plan, tmp_path / "runs")
    record = load_record(path)
    assert levels(path) == {COPIED: "candidate", PAIRS[1]: "parity", PAIRS[2]: "parity"}
    summary = record.summary
    assert "branch error is at most exactly 0" in summary["pairs"][0]["reason"]
    assert summary["sealed"] == load_record(plan).summary["sealed"] == record.config["sealed"]
    assert summary["texts"] == {"calibration": 3, "heldout": 2}
    assert summary["parity"]["detail"].startswith("final states differ by 0.0e+00 (at most 1e-05)")
    assert summary["peak_rss_mib"] > 0 < summary["planned_peak_mib"]
    assert "3 pairs (released weights): 1 candidate, 2 parity; peak" in (headline(record) or "")
    copied = summary["pairs"][0]["directions"][0]
    assert (copied["reference"], copied["heldout"]["branch_error"]) == ("layers.2.mlp", 0.0)
    for row in record.rows:
        names = [null["null"] for null in row["nulls"]]
        assert names[:4] == ["zero", "mean", "permuted", "self"]
        assert len(names) == 6
        assert all(name.startswith("other.layers.") for name in names[4:])
        by_name = {null["null"]: null for null in row["nulls"]}
        assert by_name["self"]["branch_error"] == 0
        assert by_name["zero"]["branch_error"] == pytest.approx(1, rel=1e-12)
    with Run.open(path) as run:
        keys = [row["key"] for row in run.rows]
        opened = next(row for row in run.rows if row["key"] == "heldout-opened")
    assert summary["heldout_opened_at"] == opened["at"]
    decided, opening = keys.index("calibration-decided"), keys.index("heldout-opened")
    texts = {key: at for at, key in enumerate(keys) if "/layers" in key}
    assert max(at for key, at in texts.items() if "/calibration-" in key) < decided < opening
    assert min(at for key, at in texts.items() if "/heldout-" in key) > opening
    assert keys.index("residuals/heldout") > opening
    assert keys.index("first-text") < min(texts.values())
    # Neither a plan nor a scan touches a file of the model.
    assert {path.name: file_sha256(path) for path in (tmp_path / "model").iterdir()} == before


def test_held_out_text_is_not_opened_before_calibration_is_decided():
    scan = SimpleNamespace(find=lambda key: None, has=lambda key: False)
    with pytest.raises(ValueError, match="after calibration was decided"):
        open_heldout(scan)  # pyright: ignore[reportArgumentType]


def test_weights_parity_and_the_seal_hold_a_level_down(tmp_path, source, monkeypatch):
    random = planned(tmp_path, source, model={"weights": "random"})
    path = scanned(random, tmp_path / "runs")
    assert set(levels(path).values()) == {"parity"}
    reason = load_record(path).summary["pairs"][0]["reason"]
    assert "the weights are random, so the pair stays below a candidate although on all 5 texts" in reason

    plan = planned(tmp_path, source, pairs=PAIRS[1:])
    path = scanned(plan, tmp_path / "runs", (COPIED,))
    record = load_record(path)
    added = record.summary["pairs"][-1]
    assert (added["id"], added["exploratory"], added["level"]) == (COPIED, True, "parity")
    assert added["reason"].startswith("the pair was added after the plan was sealed, so it is exploratory")
    assert record.claims[-1]["does_not_support"].endswith("a pair that the sealed plan did not name")
    assert [row["exploratory"] for row in record.rows].count(True) == 10
    with pytest.raises(ConfigError, match="the plan holds this pair already"):
        scan_run.prepare(plan_run.plan_of_run(plan), ["layers.1.mlp=layers.0.mlp"])
    with pytest.raises(ConfigError, match="is no pair: write two sites"):
        scan_run.prepare(plan_run.plan_of_run(plan), ["layers.1.mlp"])

    monkeypatch.setattr(sitting, "find_parity", lambda folder: None)
    path = scanned(planned(tmp_path, source), tmp_path / "runs")
    assert set(levels(path).values()) == {"capacity"}
    assert "run twinscope model check" in load_record(path).summary["parity"]["detail"]


def test_parity_is_checked_in_a_process_of_its_own(tmp_path, source, monkeypatch):
    asked = []

    def check(code: int):
        def call(*arguments, timeout=None):
            asked.append((arguments[:3], timeout))
            return {"code": code, "error": "out of time"}

        monkeypatch.setattr(sitting, "call_apart", call)

    monkeypatch.setattr(sitting, "find_parity", lambda folder: CHECKED if len(asked) == 2 else None)
    plan = planned(tmp_path, source, parity="check")
    check(75)
    with pytest.raises(Stopped, match=r"check of parity stopped \(out of time\); plan with reuse\.parity"):
        scanned(plan, tmp_path / "stopped")
    (path,) = (tmp_path / "stopped").iterdir()
    assert (load_record(path).status, load_record(path).rows) == ("stopped", [])
    check(0)
    with Run.open(path) as run:
        scan_run.resume(run, quiet=True)
    assert asked == [(("model", "check", str(tmp_path / "model")), 1800.0)] * 2
    assert levels(path)[COPIED] == "candidate"
    check(65)
    monkeypatch.setattr(sitting, "find_parity", lambda folder: None)
    path = scanned(plan, tmp_path / "failed")
    assert load_record(path).summary["parity"]["detail"] == "the check gave no receipt: out of time"
    assert levels(path)[COPIED] == "capacity"


def test_kill_at_random_moments_changes_nothing(tmp_path, source):
    plan = planned(tmp_path, source)
    began = time.perf_counter()
    expected = essence(scanned(plan, tmp_path / "reference"))
    duration = time.perf_counter() - began
    prepared = scan_run.prepare(plan_run.plan_of_run(plan))
    draws, lengths = np.random.default_rng(3), set()
    for attempt in range(4):
        root = tmp_path / f"killed-{attempt}"

        def whole(root=root) -> None:
            with scan_run.create_run(prepared, root) as run:
                scan_run.scan(prepared, run, quiet=True)

        process = multiprocessing.get_context("fork").Process(target=whole)
        process.start()
        journal = None
        while journal is None and process.is_alive():
            journal = next(root.glob("*/journal.jsonl"), None)
            time.sleep(0.005)
        process.join(duration * draws.uniform(0.1, 0.9))
        process.kill()
        process.join()
        (path,) = root.iterdir()
        with Run.open(path) as run:
            lengths.add(len(run.rows))
            at = next((row["at"] for row in run.rows if row["key"] == "heldout-opened"), None)
            if not (path / "result.json").exists():
                scan_run.resume(run, quiet=True)
        assert essence(path) == expected
        if at is not None:
            assert load_record(path).summary["heldout_opened_at"] == at
    assert len(lengths) > 1


@pytest.mark.parametrize("unit", [0, 7, 20])
def test_a_stop_between_units_is_resumed_to_the_same_record(tmp_path, source, unit, monkeypatch):
    plan = planned(tmp_path, source)
    expected = essence(scanned(plan, tmp_path / "reference"))
    prepared = scan_run.prepare(plan_run.plan_of_run(plan))
    units = iter(range(1000))
    honest = sitting.Clock.check

    def check(self: Any) -> None:
        if next(units) == unit:
            run.request_stop("a test")
        honest(self)

    monkeypatch.setattr(sitting.Clock, "check", check)
    with scan_run.create_run(prepared, tmp_path / "stopped") as run:
        with pytest.raises(Stopped, match=r"stopped by a test in .* continue with: twinscope resume"):
            scan_run.scan(prepared, run, quiet=True)
        assert load_record(run.path).status == "stopped"
        run.stop_requested = None
        # A kept residual that is damaged is read from the model again.
        for file in run.checkpoints.iterdir():
            file.write_bytes(file.read_bytes()[:-1])
        scan_run.resume(run, quiet=True)
    assert essence(run.path) == expected


@pytest.mark.parametrize("stage", ["first-text", "calibration", "heldout"])
def test_a_part_beyond_its_budget_stops_the_scan(tmp_path, source, stage):
    minutes = {"first_text": 30.0, "calibration": 30.0, "heldout": 30.0, stage.replace("-", "_"): 1e-5}
    budgets = {"process_mib": 65536.0, "available_mib": 1.0, "stage_minutes": minutes}
    plan = planned(tmp_path, source, budgets=budgets)
    with pytest.raises(Stopped, match=rf"the stage '{stage}' has taken \d+ s, over its budget of 0 s"):
        scanned(plan, tmp_path / "slow")
    (path,) = (tmp_path / "slow").iterdir()
    record = load_record(path)
    assert (record.status, record.summary) == ("stopped", {})
    with Run.open(path) as run:
        parts = [
            row["key"].rpartition("/")[2].partition("-")[0] for row in run.rows if "/layers" in row["key"]
        ]
    reached = {"first-text": set(), "calibration": set(), "heldout": {"calibration"}}
    assert set(parts) == reached[stage]


def test_too_little_memory_left_stops_the_scan(tmp_path, source):
    plan = planned(tmp_path, source, budgets={"process_mib": 65536.0, "available_mib": 1e9})
    with pytest.raises(Stopped, match="MiB of memory are left, under the floor of 1000000000 MiB"):
        scanned(plan, tmp_path / "full")


def test_what_changed_since_the_seal_is_refused(tmp_path, source, capsys):
    plan = planned(tmp_path, source)

    def refused(code: int, *arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["scan", *arguments])
        assert left.value.code == code
        return capsys.readouterr().err

    err = refused(2, str(plan), "--set", "reuse.seed=1")
    assert "--set changes a TOML file, and this plan is sealed" in err
    assert "holds no plan.json" in refused(2, str(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert "the model changed since the plan was sealed (model.safetensors)" in refused(65, str(plan))
    file.write_bytes(kept)
    stored = json.loads((plan / PLAN_FILE).read_text())
    stored["content"]["thresholds"]["error"] = 0.9
    (plan / PLAN_FILE).write_text(json.dumps(stored))
    assert "is not the plan that was sealed: its thresholds changed since" in refused(65, str(plan))
    assert "its thresholds changed" in refused(65, str(plan / PLAN_FILE))
    shutil.rmtree(tmp_path / "model")
    assert len(list((tmp_path / "runs").glob("*-scan-*"))) == 0


def test_a_run_holds_its_own_copy_of_the_plan(tmp_path, source):
    plan = planned(tmp_path, source, budgets={"process_mib": 65536.0, "available_mib": 1e9})
    with pytest.raises(Stopped):
        scanned(plan, tmp_path / "stopped")
    (path,) = (tmp_path / "stopped").iterdir()
    other = planned(tmp_path, source, seed=1)
    shutil.copy(other / PLAN_FILE, path / PLAN_FILE)
    with Run.open(path) as run, pytest.raises(DataError, match="another content was put in since"):
        scan_run.resume(run, quiet=True)
    shutil.copy(plan / PLAN_FILE, path / PLAN_FILE)
    shutil.rmtree(tmp_path / "model")
    with Run.open(path) as run, pytest.raises(DataError, match="the model of the plan is not at"):
        scan_run.resume(run, quiet=True)


def test_the_command_plans_seals_and_scans_in_one_go(tmp_path, source, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(to_toml(tiny_config(source / "model", source / "text.txt", pairs=[PAIRS[1]])))
    with pytest.raises(SystemExit) as left:
        main(["scan", str(config), "--json", "--pair", COPIED, "--set", "reuse.seed=3"])
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (left.value.code, answer["status"]) == (0, "complete")
    record = load_record(Path(answer["run"]))
    assert [pair["id"] for pair in record.summary["pairs"]] == [PAIRS[1], COPIED]
    assert record.summary["sealed"] == load_record(Path(answer["plan"])).summary["sealed"]
    assert record.config["plan"]["seed"] == 3
    assert os.path.isabs(answer["plan"])
