"""The verb ``swap``: what it seals, the order in which text is opened, levels, refusals, and exact resume."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scanned import (
    CHECKED,
    COPIED,
    PAIRS,
    copied_run,
    edit,
    journal_keys,
    scanned,
    texts_here,
    write_source,
)
from transformers import LlamaForCausalLM

from twinscope.cli import main
from twinscope.lab import statistics
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.models.store.origin import ORIGIN, file_sha256
from twinscope.reuse import replacement, sitting, swap_run, swap_texts
from twinscope.reuse.plan import PLAN_FILE, seal
from twinscope.reuse.swap import confirm, open_heldout
from twinscope.reuse.swap_plan import SCAN_FILE, SWAP_FILE

DIFFERENT = PAIRS[1]
THERE, BACK = "layers.2.mlp <- layers.3.mlp", "layers.3.mlp <- layers.2.mlp"


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sitting, "find_parity", lambda folder: CHECKED)
    monkeypatch.setattr(swap_texts, "compute_apart", texts_here)


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> dict[str, Path]:
    """Scans of one model, told to be released and told to be random, each of a folder of its own."""
    found: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sitting, "find_parity", lambda folder: CHECKED)
        for weights in ("released", "random"):
            folder = write_source(tmp_path_factory.mktemp(weights), weights)
            found[weights] = scanned(folder, folder / "runs")
    return found


def swapped(scan: Path, root: Path, *arguments: Any, **named: Any) -> Path:
    prepared = swap_run.prepare(scan, *arguments, **named)
    with swap_run.create_run(prepared, root) as run:
        swap_run.swap(prepared, run, quiet=True)
    return run.path


@pytest.fixture(scope="module")
def different(scans, tmp_path_factory) -> Path:
    """A swap of two modules that have nothing in common, one text at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sitting, "find_parity", lambda folder: CHECKED)
        patch.setattr(swap_texts, "compute_apart", texts_here)
        patch.setattr(replacement, "GROUP_TOKENS", 12)
        return swapped(scans["released"], tmp_path_factory.mktemp("different"), DIFFERENT)


def essence(path: Path) -> tuple[Any, ...]:
    """Everything of a record but what two runs cannot share: when, how long, and how much memory."""
    record = load_record(path)
    own = {"heldout_opened_at", "sealed_at", "peak_rss_mib", "planned_peak_mib", "memory"}
    summary = {key: value for key, value in record.summary.items() if key not in own}
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in record.rows]
    return record.status, rows, summary, record.claims, record.config


def test_a_copied_module_replaces_its_original_both_ways(scans, tmp_path):
    model = scans["released"].parent.parent / "model"
    before = {path.name: file_sha256(path) for path in model.iterdir()}
    path = swapped(scans["released"], tmp_path / "runs")
    record = load_record(path)
    summary = record.summary
    assert [item["direction"] for item in summary["directions"]] == [THERE, BACK]
    for item in summary["directions"]:
        assert (item["delta_nll"], item["low"], item["high"], item["verdict"]) == (0, 0, 0, "equivalent")
        assert (item["level"], item["needed"], item["texts"]) == ("intervention", 2, 2)
        nulls = {null["null"]: null["delta_nll"] for null in item["nulls"]}
        assert nulls["self"] == 0
        assert abs(nulls["zero"]) > 1e-3 < abs(nulls["mean"])
        assert len(nulls) == 5
        # One byte for each of the 11 predicted characters of a text.
        assert item["bits_per_byte_before"] == pytest.approx(item["nll_before"] / np.log(2))
        # gate, up and down of 24 × 16, and the pre-norm's 16 gains, in float32.
        assert item["saved"] == {"parameters": 3 * 24 * 16 + 16, "bytes": 4 * (3 * 24 * 16 + 16)}
    assert (summary["level"], summary["mode"], summary["kinds"]) == ("intervention", "pair", [])
    pair = summary["pair"]
    assert (pair["id"], pair["exploratory"], pair["strain"], pair["passed"]) == (COPIED, False, 0.0, True)
    assert pair["chosen"].startswith("the candidate of least strain on calibration text, 0, of 1 in the scan")
    assert summary["scan"] == {
        "sealed": load_record(scans["released"]).summary["sealed"],
        "run": scans["released"].name,
        "candidates": [COPIED],
    }
    assert (summary["texts_from"], summary["texts"]) == ("the plan's own", {"calibration": 3, "heldout": 2})
    assert summary["peak_rss_mib"] > 0 < summary["planned_peak_mib"]
    assert [claim["level"] for claim in record.claims] == ["intervention"] * 3
    assert f"{THERE} +0.0000 [+0.0000, +0.0000] equivalent; {BACK}" in (headline(record) or "")
    assert {path.name: file_sha256(path) for path in model.iterdir()} == before


def test_held_out_text_is_opened_after_calibration_has_decided(different):
    path = different
    record, keys = load_record(path), journal_keys(path)
    decided, opened = keys.index("calibration-decided"), keys.index("heldout-opened")
    texts = {key: at for at, key in enumerate(keys) if " <- " in key}
    assert len([key for key in texts if not key.startswith("sums/")]) == 2 * 5 == len(record.rows)
    assert max(at for key, at in texts.items() if "calibration-" in key) < decided < opened
    assert min(at for key, at in texts.items() if "heldout-" in key) > opened
    assert keys.index("first-text") < min(texts.values())
    with Run.open(path) as run:
        rows = {row["key"]: row for row in run.rows}
    assert record.summary["heldout_opened_at"] == rows["heldout-opened"]["at"]
    for item in record.summary["directions"]:
        values = [
            row["delta_nll"]
            for row in record.rows
            if row["direction"] == item["direction"] and row["split"] == "calibration"
        ]
        sd = float(np.std(values, ddof=1))
        assert item["calibration_sd"] == pytest.approx(sd)
        assert item["needed"] == statistics.texts_needed(item["calibration_sd"], 0.05, 0.8)
        stored = rows["calibration-decided"]["directions"][item["direction"]]
        assert (stored["sd"], stored["needed"]) == (item["calibration_sd"], item["needed"])
    assert all(row["nulls"] == [] for row in record.rows if row["split"] == "calibration")
    assert all(len(row["nulls"]) == 5 for row in record.rows if row["split"] == "heldout")


def test_held_out_text_stays_closed_until_then():
    class Nothing:
        def find(self, key: str) -> None:
            return None

        def has(self, key: str) -> bool:
            return False

    with pytest.raises(ValueError, match="after calibration was decided"):
        open_heldout(Nothing())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="was not opened"):
        confirm(Nothing(), lambda stage, done, total: None)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def test_rows_are_the_losses_of_the_library_with_the_tensors_copied(scans, different):
    record = load_record(different)
    passages = {item["name"]: item["ids"] for item in record.config["swap"]["texts"]["passages"]}
    folder = scans["released"].parent.parent / "model"

    def losses(here: str | None, there: str | None) -> dict[str, float]:
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if here is not None and there is not None:
            target, source = (model.model.layers[int(site.split(".")[1])] for site in (here, there))
            target.mlp.load_state_dict(source.mlp.state_dict())
            target.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        found = {}
        for name, ids in passages.items():
            given = torch.tensor([ids])
            found[name] = float(model(given, labels=given).loss)
        return found

    as_it_is = losses(None, None)
    for direction in ("layers.0.mlp <- layers.1.mlp", "layers.1.mlp <- layers.0.mlp"):
        expected = losses(*direction.split(" <- "))
        for row in (row for row in record.rows if row["direction"] == direction):
            assert row["nll_before"] == pytest.approx(as_it_is[row["text"]], abs=1e-5)
            assert row["nll"] == pytest.approx(expected[row["text"]], abs=2e-5)
            change = expected[row["text"]] - as_it_is[row["text"]]
            assert row["delta_nll"] == pytest.approx(change, abs=3e-5)
            assert row["tokens"] == row["bytes"] == 11
    assert min(abs(row["delta_nll"]) for row in record.rows) > 1e-3


def test_a_named_pair_is_exploratory_whatever_it_shows(scans, tmp_path):
    # The same pair that the scan made a candidate: named by hand, it stays below one.
    path = swapped(scans["released"], tmp_path / "runs", COPIED)
    record = load_record(path)
    assert [item["verdict"] for item in record.summary["directions"]] == ["equivalent"] * 2
    assert {item["level"] for item in record.summary["directions"]} == {"parity"} == {record.summary["level"]}
    assert record.summary["pair"]["exploratory"] is True
    assert {claim["level"] for claim in record.claims} == {"parity"}
    assert "so it is exploratory" in record.summary["directions"][0]["reason"]
    assert all(row["exploratory"] for row in record.rows)
    for wrong, words in (
        ("layers.0.mlp", "is no pair: write two sites"),
        ("layers.0.mlp=layers.0.self_attn", "a pair has one kind"),
        ("layers.0.mlp=layers.9.mlp", r"the model has no site 'layers\.9\.mlp'"),
    ):
        with pytest.raises(ConfigError, match=words):
            swap_run.prepare(scans["released"], wrong)


def test_a_scan_without_a_candidate_gives_nothing_to_replace(tmp_path):
    source = write_source(tmp_path / "source")
    scan = scanned(source, tmp_path / "runs", pairs=PAIRS[1:])
    with pytest.raises(
        ConfigError, match=r"has no candidate among its 2 pairs, so .* --pair layers\.0\.mlp="
    ) as e:
        swap_run.prepare(scan)
    assert str(e.value).count(". ") == 0
    # A summary that says otherwise changes nothing.
    edit(scan / "result.json", lambda record: record["summary"]["pairs"][0].update(level="candidate"))
    with pytest.raises(ConfigError, match="has no candidate among its 2 pairs"):
        swap_run.prepare(scan)


def test_random_weights_stay_at_parity(scans, tmp_path):
    with pytest.raises(ConfigError, match=r"no candidate among its 3 pairs \(the weights are random, so"):
        swap_run.prepare(scans["random"])
    record = load_record(swapped(scans["random"], tmp_path / "runs", COPIED))
    assert [item["verdict"] for item in record.summary["directions"]] == ["equivalent"] * 2
    assert (record.summary["level"], record.summary["weights"]) == ("parity", "random")
    assert all("the weights are random" in claim["does_not_support"] for claim in record.claims)


def test_random_weights_cannot_be_told_to_be_others_afterwards(scans, tmp_path):
    whole = Path(shutil.copytree(scans["random"].parent.parent, tmp_path / "all"))
    scan = whole / "runs" / scans["random"].name

    def moved(plan: dict[str, Any]) -> None:
        plan["folder"] = str(whole / "model")

    edit(scan / PLAN_FILE, moved)
    with pytest.raises(ConfigError, match="the weights are random"):
        swap_run.prepare(scan)
    # The folder no longer says that its weights are random, and its norm gains do not either.
    (whole / "model" / ORIGIN).unlink()
    with pytest.raises(DataError, match=r"are released \(nobody; .*\), and the plan says random \(twinscope"):
        swap_run.prepare(scan, COPIED)
    # Plan and record say so, under a seal made again: the folder is asked, and the folder says random.
    shutil.copy(scans["random"].parent.parent / "model" / ORIGIN, whole / "model" / ORIGIN)

    def released(plan: dict[str, Any]) -> None:
        plan["content"]["model"]["weights"] = "released"
        plan["sealed"] = seal(plan["content"])

    edit(scan / PLAN_FILE, released)
    sealed = json.loads((scan / PLAN_FILE).read_text())

    def record(value: dict[str, Any]) -> None:
        value["summary"].update(sealed=sealed["sealed"], weights="released")
        value["config"]["plan"] = sealed["content"]

    edit(scan / "result.json", record)
    with pytest.raises(DataError, match=r"are random \(twinscope\.json\), and the plan says released"):
        swap_run.prepare(scan)


def test_without_parity_no_level_beyond_capacity(scans, tmp_path, monkeypatch):
    monkeypatch.setattr(sitting, "find_parity", lambda folder: None)
    record = load_record(swapped(scans["released"], tmp_path / "runs"))
    assert (record.summary["level"], record.summary["parity"]["passed"]) == ("capacity", False)
    assert "run `twinscope model check`" in record.summary["directions"][0]["reason"]


def test_an_instrument_at_fault_gives_no_verdict(scans, tmp_path, monkeypatch):
    honest = replacement.effects

    def off(*arguments: Any) -> Any:
        rows = honest(*arguments)
        for row in rows:
            next(null for null in row["nulls"] if null["null"] == "self")["delta_nll"] = 1e-7
        return rows

    monkeypatch.setattr("twinscope.reuse.swap.effects", off)
    record = load_record(swapped(scans["released"], tmp_path / "runs"))
    for item in record.summary["directions"]:
        assert item["verdict"] is None
        assert "in its own place gives a change of loss of 1e-07 on heldout-0" in item["verdict_reason"]
    assert record.summary["level"] == "candidate"
    assert "no verdict" in (headline(record) or "")


def test_other_texts_are_sealed_before_anything_is_read(scans, tmp_path):
    prepared = swap_run.prepare(scans["released"], None, 4, 16)
    texts = prepared.sealed.content["texts"]
    assert [len(item["ids"]) for item in texts["passages"]] == [16] * 8
    assert prepared.sealed.sealed == seal(prepared.sealed.content)
    path = swapped(scans["released"], tmp_path / "runs", None, 4, 16)
    record = load_record(path)
    assert record.summary["texts"] == {"calibration": 4, "heldout": 4}
    assert (record.summary["tokens"], len(record.rows)) == (16, 16)
    assert record.summary["texts_from"].startswith("chosen by the plan's rule")
    assert record.summary["sealed"] == prepared.sealed.sealed
    own = {tuple(item["ids"]) for item in record.config["plan"]["texts"]["passages"]}
    assert not own & {tuple(item["ids"][:12]) for item in texts["passages"]}


def test_groups_of_texts_do_not_change_what_is_found(scans, different, tmp_path):
    whole = load_record(swapped(scans["released"], tmp_path / "whole", DIFFERENT))
    single = load_record(different)
    assert (whole.config["swap"]["group"], single.config["swap"]["group"]) == (3, 1)
    assert sum(key.startswith("sums/") for key in journal_keys(different)) == 2 * 3
    for one, other in zip(whole.rows, single.rows, strict=True):
        assert one["key"] == other["key"]
        assert one["delta_nll"] == pytest.approx(other["delta_nll"], abs=1e-6)
        for here, there in zip(one["nulls"], other["nulls"], strict=True):
            assert here["delta_nll"] == pytest.approx(there["delta_nll"], abs=1e-6)


@pytest.mark.parametrize("unit", [9, 80])
def test_a_stop_between_units_is_resumed_to_the_same_record(scans, different, tmp_path, unit, monkeypatch):
    monkeypatch.setattr(replacement, "GROUP_TOKENS", 12)
    prepared = swap_run.prepare(scans["released"], DIFFERENT)
    units, honest = iter(range(10000)), sitting.Clock.check

    def check(self: Any) -> None:
        if next(units) == unit:
            run.request_stop("a test")
        honest(self)

    monkeypatch.setattr(sitting.Clock, "check", check)
    with swap_run.create_run(prepared, tmp_path / "stopped") as run:
        with pytest.raises(Stopped, match=r"stopped by a test in .* continue with: twinscope resume"):
            swap_run.swap(prepared, run, quiet=True)
        assert load_record(run.path).status == "stopped"
        run.stop_requested = None
        # What it stands on lies in the run, wherever the scan is.
        swap_run.resume(run, quiet=True)
    assert essence(run.path) == essence(different)


def test_kill_at_random_moments_changes_nothing(scans, different, tmp_path, monkeypatch):
    monkeypatch.setattr(replacement, "GROUP_TOKENS", 12)
    expected = essence(different)
    prepared = swap_run.prepare(scans["released"], DIFFERENT)
    draws, lengths = np.random.default_rng(5), set()
    for attempt in range(2):
        root = tmp_path / f"killed-{attempt}"

        def whole(root: Path = root) -> None:
            with swap_run.create_run(prepared, root) as run:
                swap_run.swap(prepared, run, quiet=True)

        process = multiprocessing.get_context("fork").Process(target=whole)
        process.start()
        # Counted in rows, not in seconds, so that a busy machine kills at as many places as an idle one.
        wanted = int(draws.integers(3, 25))
        while (
            process.is_alive()
            and sum(len(file.read_bytes().splitlines()) for file in root.glob("*/journal.jsonl")) < wanted
        ):
            time.sleep(0.002)
        process.kill()
        process.join()
        (path,) = root.iterdir()
        with Run.open(path) as run:
            lengths.add(len(run.rows))
            if not (path / "result.json").exists():
                swap_run.resume(run, quiet=True)
        assert essence(path) == expected
    assert len(lengths) > 1


def test_what_a_run_sealed_cannot_be_changed_before_it_is_resumed(scans, tmp_path, monkeypatch):
    prepared = swap_run.prepare(scans["released"])
    with swap_run.create_run(prepared, tmp_path / "runs") as run:
        run.request_stop("a test")
        with pytest.raises(Stopped):
            swap_run.swap(prepared, run, quiet=True)

    def refused(change: Any, words: str) -> None:
        path = copied_run(run.path, tmp_path / words[:8].replace(" ", "-"))
        change(path)
        with Run.open(path) as opened, pytest.raises(DataError, match=words):
            swap_run.resume(opened, quiet=True)
        assert load_record(path).status == "stopped"

    def margin(stored: dict[str, Any]) -> None:
        stored["content"]["margin"] = 9.0

    def sealed_again(stored: dict[str, Any]) -> None:
        margin(stored)
        stored["sealed"] = seal(stored["content"])

    refused(lambda path: edit(path / SWAP_FILE, margin), "swap.json is not what this run sealed")
    refused(lambda path: edit(path / SWAP_FILE, sealed_again), r"json is not what this run sealed")
    refused(lambda path: (path / SWAP_FILE).write_text("{}"), "is not what a swap seals: start the run again")
    refused(lambda path: (path / SWAP_FILE).unlink(), r"cannot read .*swap\.json")
    refused(
        lambda path: edit(path / SCAN_FILE, lambda record: record.update(claims=[])),
        "is not the record of the scan that this run began with",
    )
    refused(lambda path: (path / SCAN_FILE).unlink(), r"cannot .*scan-result\.json")
    refused(
        lambda path: edit(path / PLAN_FILE, lambda plan: plan["content"].update(margin=9.0)),
        "plan that was sealed: its margin changed",
    )


def test_files_are_held_against_their_seals_when_levels_are_given(scans, tmp_path, monkeypatch):
    prepared = swap_run.prepare(scans["released"])
    with swap_run.create_run(prepared, tmp_path / "runs") as run:
        honest = swap_run.confirm

        def tampering(*arguments: Any) -> None:
            honest(*arguments)
            edit(run.path / SCAN_FILE, lambda record: record.update(claims=[]))

        monkeypatch.setattr(swap_run, "confirm", tampering)
        with pytest.raises(DataError, match="is not the record of the scan that this run began with"):
            swap_run.swap(prepared, run, quiet=True)
    assert load_record(run.path).status == "failed"


def test_a_model_that_changed_is_refused(scans, tmp_path):
    whole = Path(shutil.copytree(scans["released"].parent.parent, tmp_path / "all"))
    scan = whole / "runs" / scans["released"].name
    edit(scan / PLAN_FILE, lambda plan: plan.update(folder=str(whole / "model")))
    file = whole / "model" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        DataError, match=r"the model changed since the plan was sealed \(model\.safetensors\)"
    ):
        swap_run.prepare(scan)


def test_time_is_that_of_the_command(scans, tmp_path):
    with pytest.raises(ConfigError, match="--minutes 0: give a positive number of minutes"):
        swap_run.prepare(scans["released"], minutes=0.0)
    prepared = swap_run.prepare(scans["released"], minutes=1e-5)
    assert prepared.sealed.budgets.minutes == 1e-5
    stops = pytest.raises(Stopped, match=r"over the budget of 0 s|over its budget of 0 s")
    with swap_run.create_run(prepared, tmp_path / "runs") as run, stops:
        swap_run.swap(prepared, run, quiet=True)
    assert load_record(run.path).status == "stopped"


def test_the_command_replaces_and_refuses(scans, tmp_path, capsys):
    def left(*arguments: str) -> tuple[Any, dict[str, Any]]:
        with pytest.raises(SystemExit) as ended:
            main(["swap", *arguments, "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    code, answer = left(str(scans["released"]), "--texts", "3")
    assert (code, answer["status"]) == (0, "complete")
    record = load_record(Path(answer["run"]))
    assert record.summary["level"] == "intervention"
    assert record.summary["texts"] == {"calibration": 3, "heldout": 3}
    code, answer = left(str(scans["random"]))
    assert (code, answer["run"]) == (2, None)
    assert "name a pair with --pair" in answer["error"]
    assert left(str(tmp_path))[0] == 2
    for options, words in (
        (("--pair", COPIED, "--sweep"), "--pair and --sweep: give one of the two"),
        (("--kind", "mlp"), "--kind and --every say what a sweep replaces"),
        (("--every", "2"), "--kind and --every say what a sweep replaces"),
    ):
        code, answer = left(str(scans["released"]), *options)
        assert code == 2
        assert words in answer["error"]
