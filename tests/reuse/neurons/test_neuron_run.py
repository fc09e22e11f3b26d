"""The verb ``neurons``: planted duplicates with scale and sign, order of parts, stops, resume, seals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gated_models import exact, write_gated

from twinscope import open_streamed
from twinscope.cli import main
from twinscope.lab.config import to_toml
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.record import headline, load_record
from twinscope.lab.run import Run
from twinscope.models.store.origin import file_sha256
from twinscope.reuse import plan_run, scan_run, sitting
from twinscope.reuse.neurons import run as neurons_run
from twinscope.reuse.neurons import stages
from twinscope.reuse.neurons.activations import gated_layer
from twinscope.reuse.neurons.replaced import Replacement
from twinscope.reuse.neurons.settings import NeuronSettings
from twinscope.reuse.neurons.study import Study
from twinscope.reuse.plan import PLAN_FILE
from twinscope.reuse.planted_neurons import NeuronPlanting, plant_neurons
from twinscope.reuse.reuse_config import ReuseConfig

LAYERS = [0, 1, 3, 4]
#: Neurons 2 and 5 of layer 1 become those of layer 3, times -0.5; 7 of layer 4 nearly twice 9 of the same.
PLANTINGS = [
    NeuronPlanting(source=3, target=1, neurons=((8, 2), (11, 5)), up_scale=-0.5),
    NeuronPlanting(source=4, target=4, neurons=((9, 7),), up_scale=2.0, noise=0.01),
    NeuronPlanting(source=0, target=0, neurons=((3, 3),), zero="down"),
]
FOUND = {
    ("layers.1.mlp.2", "layers.3.mlp.8"),
    ("layers.1.mlp.5", "layers.3.mlp.11"),
    ("layers.4.mlp.7", "layers.4.mlp.9"),
}
CHECKED = SimpleNamespace(
    passed=True, hidden_difference=0.0, hidden_tolerance=1e-5, nll_difference=1e-6, nll_tolerance=1e-4
)
WORDS = (
    "the state of union is strong and people nation know it well congress shall work with every citizen "
    "peace trade river iron school law winter harvest road ship letter treaty army debt silver bank canal"
)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sitting, "find_parity", lambda folder: CHECKED)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with planted neurons, the same with random weights, and a text."""
    folder = tmp_path_factory.mktemp("source")
    for name, weights in (("trained", "trained"), ("random", "random")):
        write_gated(folder / f"{name}-plain", weights=weights, num_hidden_layers=5, vocab_size=48)
        plant_neurons(folder / f"{name}-plain", folder / name, PLANTINGS)
    draws = np.random.default_rng(0)
    (folder / "text.txt").write_text(
        "\n\n".join(" ".join(draws.choice(WORDS.split(), size=60)) for _ in range(50)), encoding="utf-8"
    )
    return folder


def config_of(model: Path, text: Path, **changes: Any) -> ReuseConfig:
    reuse: dict[str, Any] = {
        "texts": {
            "corpus": str(text),
            "tokenizer": "char",
            "tokens": 32,
            "calibration": 6,
            "heldout": 5,
            "max_overlap": 0.95,
        },
        "budgets": {"process_mib": 65536.0, "available_mib": 1.0},
        "rule": {"attention": 0, "mlp": 0, "norms": 0},
        "layers": LAYERS,
        "neurons": {"replaced": [1, 3, 500]},
        "threads": 1,
        "parity": "receipt",
    }
    return ReuseConfig.model_validate(
        {"name": "tiny", "model": {"source": str(model)}, "reuse": reuse | changes}
    )


def planned(tmp_path: Path, source: Path, weights: str = "trained", **changes: Any) -> Path:
    """The directory of a plan run on a copy of the model."""
    if not (tmp_path / weights).exists():
        shutil.copytree(source / weights, tmp_path / weights)
    config = config_of(tmp_path / weights, source / "text.txt", **changes)
    with plan_run.create_run(config, tmp_path / "runs") as run:
        plan_run.plan(run, quiet=True)
    return run.path


def compared(plan: Path, root: Path) -> Path:
    prepared = neurons_run.prepare(plan_run.plan_of_run(plan))
    with neurons_run.create_run(prepared, root) as run:
        neurons_run.neurons(prepared, run, quiet=True)
    return run.path


def essence(path: Path) -> tuple[Any, ...]:
    """Everything of a record but what two runs cannot share: when, how long, and how much memory."""
    record = load_record(path)
    own = {"heldout_opened_at", "peak_rss_mib", "planned_peak_mib", "memory"}
    summary = {key: value for key, value in record.summary.items() if key not in own}
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in record.rows]
    return record.status, rows, summary, record.claims, record.config


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in load_record(path).rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def done(source, tmp_path_factory) -> tuple[Path, Path]:
    """A plan and a comparison under it, for tests that only read."""
    root = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINSCOPE_CACHE", str(root / "cache"))
        patch.setattr(sitting, "find_parity", lambda folder: CHECKED)
        plan = planned(root, source)
        return plan, compared(plan, root / "runs")


def test_planted_neurons_are_found_with_scale_and_sign_and_nothing_else(done):
    _, path = done
    record = load_record(path)
    summary = record.summary
    duplicates = {(entry["left"], entry["right"]): entry for entry in summary["duplicates"]}
    assert {tuple(sorted(ends)) for ends in duplicates} == FOUND
    for ends, entry in duplicates.items():
        by = {item["direction"]: item for item in entry["directions"]}
        assert by.keys() == {f"{ends[0]} <- {ends[1]}", f"{ends[1]} <- {ends[0]}"}
        within = ends[0].startswith("layers.4")
        one, other = sorted(ends)
        expected = (2.0, 0.5) if within else (-0.5, -2.0)
        for name, scale in zip((f"{one} <- {other}", f"{other} <- {one}"), expected, strict=True):
            assert by[name]["scale"] == pytest.approx(scale, rel=0.05 if within else 1e-5)
            assert by[name]["correlation"] == pytest.approx(np.sign(scale), abs=0.01 if within else 1e-6)
            assert by[name]["r2_heldout"] == pytest.approx(1, abs=0.02 if within else 1e-6)
        assert entry["identical_weights"] == (not within)
        assert entry["rank"] in (1, 2, 3)
    assert summary["null_max_correlation"] == summary["null"]["threshold"] < 0.999
    assert (summary["weights"], summary["planted"]) == ("trained", True)
    dead = [entry for entry in summary["analytic"] if entry["kind"] == "dead"]
    assert [(entry["layers"], entry["neurons"], entry["examples"]) for entry in dead] == [
        ([0], 1, ["layers.0.mlp.3"])
    ]
    assert summary["instrument"] == {"passed": True, "largest_change": 0.0}
    assert summary["tokens"] == {"calibration": 6 * 31, "heldout": 5 * 31}
    assert [text.partition(",")[0] for text in summary["warnings"][:2]] == [
        "186 calibration tokens",
        "155 heldout tokens",
    ]
    assert "3 duplicated pairs among 160 neurons of 4 layers (trained weights, copies planted)" in (
        headline(record) or ""
    )
    assert all("copies were planted" in claim["does_not_support"] for claim in record.claims)


def test_rows_are_the_activations_of_the_formula(done):
    plan, path = done
    passages = plan_run.plan_of_run(plan)
    with open_streamed(passages.folder, budget_mib=None) as lm:
        layers = {number: gated_layer(lm, number) for number in LAYERS}
        sites = [layer.site for layer in layers.values()]
        x: dict[tuple[str, int], torch.Tensor] = {}
        for split in ("calibration", "heldout"):
            for point in lm.walk(passages.ids(split), sites):
                number = int(point.site.split(".")[1])
                # The first token of each text takes no part.
                x[split, number] = lm.module_input(point.site, point.z)[:, 1:].reshape(-1, lm.width)
        downs = {number: layer.down(0, lm.width).double().numpy() for number, layer in layers.items()}
        values = {
            (split, recipient, donor): exact(x[split, recipient], layers[donor])
            for split in ("calibration", "heldout")
            for recipient in LAYERS
            for donor in LAYERS
        }
    searched = rows_of(path, "search")
    assert [row["layer"] for row in searched] == LAYERS
    for row in searched:
        own = values["calibration", row["layer"], row["layer"]]
        units = own / np.maximum(np.linalg.norm(own, axis=0), 1e-300)
        best = np.zeros(own.shape[1])
        for donor in LAYERS:
            others = values["calibration", row["layer"], donor]
            table = np.abs(units.T @ (others / np.maximum(np.linalg.norm(others, axis=0), 1e-300)))
            if donor == row["layer"]:
                np.fill_diagonal(table, 0)
            # Dead by its weights: neither a recipient nor a donor.
            if donor == 0:
                table[:, 3] = 0
            if row["layer"] == 0:
                table[3] = 0
            best = np.maximum(best, table.max(axis=1))
        assert np.abs(row["correlation"]) == pytest.approx(best, abs=2e-6)
        assert 3 in row["silent"] or row["layer"] != 0
    matches = rows_of(path, "match")
    assert [row["rank"] for row in matches if row["rank"] is not None] == sorted(
        row["rank"] for row in matches if row["rank"] is not None
    )
    for row in matches:
        for item in row["directions"]:
            (_, layer, _, neuron), (_, of, _, by) = (
                end.split(".") for end in item["direction"].split(" <- ")
            )
            layer, neuron, of, by = int(layer), int(neuron), int(of), int(by)
            one = {split: values[split, layer, layer][:, neuron] for split in ("calibration", "heldout")}
            other = {split: values[split, layer, of][:, by] for split in ("calibration", "heldout")}
            known = other["calibration"]
            scale = (one["calibration"] @ known) / (known @ known)
            left = one["heldout"] - scale * other["heldout"]
            r2 = 1 - (left @ left) / (one["heldout"] @ one["heldout"])
            assert item["scale"] == pytest.approx(scale, rel=1e-4)
            assert item["r2_heldout"] == pytest.approx(r2, rel=1e-4, abs=1e-5)
            whole = np.linalg.norm(values["heldout", layer, layer] @ downs[layer].T)
            error = np.linalg.norm(left) * np.linalg.norm(downs[layer][:, neuron]) / whole
            assert item["branch_error"] == pytest.approx(error, rel=1e-3, abs=1e-5)


def test_everything_is_decided_before_held_out_text_is_opened(done):
    plan, path = done
    with Run.open(path) as run:
        keys = [row["key"] for row in run.rows]
        opened = run.rows[keys.index("heldout-opened")]
    summary = load_record(path).summary
    assert summary["heldout_opened_at"] == opened["at"]
    assert summary["sealed"] == load_record(plan).summary["sealed"]
    parts = ["parity", "residuals/calibration", "analytic", "search/0", "search/4", "null/0/0", "null/4/15"]
    parts += ["pairs-decided", "replacement/calibration/forward/1/best", "calibration-decided"]
    parts += ["heldout-opened", "residuals/heldout", "confirmed", "replacement/heldout/forward/1/best"]
    parts += ["self"]
    at = [keys.index(part) for part in parts]
    assert at == sorted(at)
    opening = keys.index("heldout-opened")
    assert max(index for index, key in enumerate(keys) if "/calibration" in key) < opening
    assert min(index for index, key in enumerate(keys) if "/heldout" in key) > opening
    study: Any = Study.__new__(Study)
    study.__dict__["run"] = SimpleNamespace(rows=[])
    with pytest.raises(ValueError, match="the part 'calibration-decided' comes before"):
        stages.open_heldout(study)


def test_replacements_are_paired_text_by_text_and_a_zeroed_neuron_costs_more_than_its_duplicate(done):
    _, path = done
    rows = {row["key"]: row for row in rows_of(path, "replacement")}
    summary = load_record(path).summary
    counted = sorted({row["pairs"] for row in rows.values()})
    assert counted[:2] == [1, 3]
    assert counted[2] == max(row["rank"] or 0 for row in rows_of(path, "match"))
    assert f"there are {counted[2]} pairs to replace, 500 were asked for" in summary["warnings"]
    assert len(rows) == 2 * 2 * 3 * 3 == 2 * len(summary["replaced"])
    with Run.open(path) as run:
        baseline = {row["key"]: row.get("nll") for row in run.rows}
    for row in rows.values():
        plain = baseline[f"residuals/{row['split']}"]
        assert row["delta_nll"] == [new - old for new, old in zip(row["nll"], plain, strict=True)]
    for way in ("forward", "backward"):
        best, zero, random = (
            np.abs(rows[f"replacement/heldout/{way}/3/{stand}"]["delta_nll"]).max()
            for stand in ("best", "zeroed", "random")
        )
        assert best < 0.1 * min(zero, random)
        few, much = (
            rows[f"replacement/heldout/{way}/3/{stand}"]["branch_error"] for stand in ("best", "zeroed")
        )
        assert max(few) < 0.1 * min(much)


def test_weights_and_parity_hold_a_level_down(tmp_path, source, monkeypatch):
    path = compared(planned(tmp_path, source, "random", neurons={"replaced": [1]}), tmp_path / "random-runs")
    summary = load_record(path).summary
    assert len(summary["duplicates"]) == 3
    assert {entry["level"] for entry in [*summary["duplicates"], *summary["sets"]]} == {"parity"}
    monkeypatch.setattr(sitting, "find_parity", lambda folder: None)
    path = compared(planned(tmp_path, source, neurons={"replaced": [1]}), tmp_path / "unchecked")
    summary = load_record(path).summary
    assert {entry["level"] for entry in [*summary["duplicates"], *summary["sets"]]} == {"capacity"}
    assert "run twinscope model check" in summary["parity"]["detail"]


def test_an_instrument_at_fault_gives_no_intervention(tmp_path, source, monkeypatch):
    def nearly(items: Any) -> list[Replacement]:
        return [Replacement(item.neuron, item.neuron, 1.001) for item in items]

    monkeypatch.setattr(stages, "themselves", nearly)
    summary = load_record(
        compared(planned(tmp_path, source, neurons={"replaced": [1]}), tmp_path / "runs")
    ).summary
    assert summary["instrument"]["passed"] is False
    assert summary["instrument"]["largest_change"] > 0
    assert summary["level"] == "candidate"


def test_a_plan_edited_during_the_run_leaves_no_level_beyond_parity(tmp_path, source, monkeypatch):
    plan = planned(tmp_path, source, neurons={"replaced": [1]})
    honest = stages.replace_by_themselves

    def edit(study: Any, *others: Any) -> None:
        file = study.run.path / PLAN_FILE
        file.write_text(file.read_text().replace('"margin": 0.05', '"margin": 0.5'))
        honest(study, *others)

    monkeypatch.setattr(neurons_run, "replace_by_themselves", edit)
    summary = load_record(compared(plan, tmp_path / "runs")).summary
    assert summary["level"] == "parity"
    assert all("the seal of the plan is broken" in entry["reason"] for entry in summary["duplicates"])


@pytest.mark.parametrize("unit", [9, 45, 62])
def test_a_stop_between_units_is_resumed_to_the_same_record(tmp_path, source, done, unit, monkeypatch):
    plan, reference = done
    prepared = neurons_run.prepare(plan_run.plan_of_run(plan))
    units = iter(range(10_000))
    honest = sitting.Clock.check

    def check(self: Any) -> None:
        if next(units) == unit:
            run.request_stop("a test")
        honest(self)

    monkeypatch.setattr(sitting.Clock, "check", check)
    with neurons_run.create_run(prepared, tmp_path / "stopped") as run:
        with pytest.raises(Stopped, match=r"stopped by a test in .* continue with: twinscope resume"):
            neurons_run.neurons(prepared, run, quiet=True)
        assert load_record(run.path).status == "stopped"
        run.stop_requested = None
        # A kept residual that is damaged is read from the model again.
        for file in run.checkpoints.iterdir():
            file.write_bytes(file.read_bytes()[:-1])
        neurons_run.resume(run, quiet=True)
    assert essence(run.path) == essence(reference)


@pytest.mark.parametrize("stage", ["search", "null", "replacement"])
def test_a_part_beyond_its_budget_stops_the_run(tmp_path, source, stage):
    plan = planned(tmp_path, source, neurons={"replaced": [1], "minutes": {stage: 1e-6}})
    with pytest.raises(Stopped, match=rf"the stage '{stage}' has taken \d+ s, over its budget of 0 s"):
        compared(plan, tmp_path / "slow")
    (path,) = (tmp_path / "slow").iterdir()
    assert load_record(path).status == "stopped"


def test_what_changed_since_the_seal_is_refused(tmp_path, source, capsys):
    plan = planned(tmp_path, source)

    def refused(code: int, *arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["neurons", *arguments])
        assert left.value.code == code
        return capsys.readouterr().err

    assert "this plan is sealed" in refused(2, str(plan), "--set", "reuse.seed=1")
    file = tmp_path / "trained" / "model.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert "the model changed since the plan was sealed (model.safetensors)" in refused(65, str(plan))
    file.write_bytes(kept)
    stored = json.loads((plan / PLAN_FILE).read_text())
    stored["content"]["neurons"]["r2_floor"] = 0.1
    (plan / PLAN_FILE).write_text(json.dumps(stored))
    assert "is not the plan that was sealed: its neurons changed since" in refused(65, str(plan))
    assert not list((tmp_path / "runs").glob("*-neurons-*"))


def test_a_run_holds_its_own_copy_of_the_plan(tmp_path, source):
    plan = planned(tmp_path, source, budgets={"process_mib": 65536.0, "available_mib": 1e9})
    with pytest.raises(Stopped, match="under the floor of 1000000000 MiB"):
        compared(plan, tmp_path / "stopped")
    (path,) = (tmp_path / "stopped").iterdir()
    other = planned(tmp_path, source, seed=1)
    shutil.copy(other / PLAN_FILE, path / PLAN_FILE)
    with Run.open(path) as run, pytest.raises(DataError, match="another content was put in since"):
        neurons_run.resume(run, quiet=True)
    before = {file.name: file_sha256(file) for file in (source / "trained").iterdir()}
    assert {file.name: file_sha256(file) for file in (tmp_path / "trained").iterdir()} == before


def test_the_command_plans_seals_and_compares_in_one_go(tmp_path, source, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(to_toml(config_of(source / "trained", source / "text.txt")))
    changes = ["--set", "reuse.seed=3", "--set", "reuse.neurons.replaced=[1]"]
    with pytest.raises(SystemExit) as left:
        main(["neurons", str(config), "--json", *changes])
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (left.value.code, answer["status"]) == (0, "complete")
    record = load_record(Path(answer["run"]))
    assert record.summary["sealed"] == load_record(Path(answer["plan"])).summary["sealed"]
    assert record.config["plan"]["seed"] == 3
    assert load_record(Path(answer["plan"])).summary["pairs"] == []
    # A plan without pairs is none for a scan.
    with pytest.raises(ConfigError, match="names no pairs of modules"):
        scan_run.prepare(plan_run.plan_of_run(Path(answer["plan"])))


def test_a_plan_that_fixes_nothing_of_neurons_is_refused():
    few = {"neurons": {"draws": 3}, "neuron_layers": [0]}
    for content in ({}, few, {"neurons": {}, "neuron_layers": []}):
        plan: Any = SimpleNamespace(content={"name": "x", **content})
        with pytest.raises(ConfigError, match=r"fixes nothing of neurons|names no layer"):
            neurons_run.prepare(plan)


def test_a_planned_peak_beyond_the_budget_is_refused_before_the_first_pass(tmp_path, source, monkeypatch):
    plan = planned(tmp_path, source)
    monkeypatch.setattr(neurons_run, "planned_mib", lambda *_: 70000.0)
    with pytest.raises(ConfigError, match=r"would take about 70000 MiB, over reuse\.budgets\.process_mib"):
        compared(plan, tmp_path / "large")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"draws": 18}, "needs 19 draws or more"),
        ({"replaced": [10, 1]}, "give rising numbers of pairs"),
        ({"replaced": [0, 1]}, "give rising numbers of pairs"),
        ({"null": "permuted"}, "signs"),
        ({"r2_floor": 1.0}, "less than 1"),
        ({"skip": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_judge_are_refused(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        NeuronSettings.model_validate(values)


def test_texts_keep_a_token_to_compare(tmp_path):
    with pytest.raises(ValueError, match=r"neurons.skip = 32: texts of 32 tokens have none left"):
        config_of(tmp_path, tmp_path / "text.txt", neurons={"skip": 32})


def test_an_analysis_of_all_tokens_differs_from_one_without_the_first(tmp_path, source, done):
    plan = planned(tmp_path, source, neurons={"replaced": [1], "skip": 0})
    whole = rows_of(compared(plan, tmp_path), "search")
    without = rows_of(done[1], "search")
    assert [row["tokens"] for row in whole] == [192] * 4
    assert [row["tokens"] for row in without] == [186] * 4
    assert whole[0]["correlation"] != without[0]["correlation"]
