"""The threshold law on records written by hand, its refusals, and the verb with its resume."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from twinscope.cli import main
from twinscope.lab.config import read_config, to_toml
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.record import Record, dump, headline, load_record, validate
from twinscope.lab.run import Run
from twinscope.propagation.collapse import run as collapse_run
from twinscope.propagation.collapse.config import CollapseConfig
from twinscope.propagation.collapse.law import collapse_law

UNIT = 2.0**-24
INSIDE = "inside the band at the smallest gain (1)"


def leak_record(
    width: int = 16,
    ratios=(1e-8, 3e-9, 1e-9, 4e-10),
    gains=None,
    beta: float = 1e-8,
    *,
    constant: float = 2.5,
    ep: dict | None = None,
    **changes,
) -> Record:
    """A complete leak record whose gain_low is ``constant`` unit roundoffs over the ratio, or ``gains``."""
    gains = [constant * UNIT / ratio for ratio in ratios] if gains is None else gains
    blocks, ones = len(ratios), [1.0] * len(ratios)
    summary = {
        "model": f"base, step 3, width {width}", "blocks": blocks, "parameters": [10] * blocks, "beta": beta,
        "displacement_ratio": list(ratios), "gain_low": gains,
        "gain_low_low": [g and 0.9 * g for g in gains], "gain_low_high": [g and 1.1 * g for g in gains],
        **{f"{side}{end}": ones for side in ("gain_high", "odd", "even") for end in ("", "_low", "_high")},
        "band": 0.05, "batches": 16, "groups": 8, "instrument": "fp32", "study": "fp32",
        "unit_roundoff": UNIT,
        "self_test": {part: {"passed": True, "detail": "as it should"} for part in ("null", "planted")},
        "control": {
            "description": "linear", "beta": 1.0, "displacement": 1e-5,
            "projection": ones, "projection_low": ones, "projection_high": ones,
        },
        "recommended": None, "recommended_reason": "none asked for",
        "memory": {
            "budget_mib": 0.0, "group_means_mib": 0.0, "spilled": True, "arms_with_vectors": 0,
            "vectors_mib": 0.0,
        },
        "extended_from": [], "recomputed": [],
    }  # fmt: skip
    missing = [str(i) for i, gain in enumerate(gains, 1) if gain is None]
    if missing:
        for name in ("gain_low", "gain_low_low", "gain_low_high"):
            summary[f"{name}_reason"] = f"block {', '.join(missing)}: {INSIDE}"
    config = {
        "model": {"width": width, "layers": blocks},
        "data": {"corpus": "sotu"},
        "base": {"steps": 3, "seed": 0},
        "ep": {"read": "energy", "rounds": 1, "fused": False, "damping": 1.0, "top_refresh": 1, **(ep or {})},
        "leak": {"seed": 0},
    }
    return validate(
        {
            "schema": "twinscope.leak/1", "status": "complete", "config": config, "provenance": {},
            "summary": {**summary, **changes}, "rows": [], "claims": [],
        }
    )  # fmt: skip


def checked(law) -> Record:
    """The law as a record of its own schema."""
    return validate(
        {
            "schema": "twinscope.collapse/1", "status": "complete", "config": {}, "provenance": {},
            "summary": law.summary, "rows": law.rows, "claims": law.claims,
        }
    )  # fmt: skip


def family(scatter: float = 0.0, exponent: float = -1.0, seed: int = 0) -> list[tuple[str, Record]]:
    rng, found = np.random.default_rng(seed), []
    for width in (16, 32, 48, 64, 96):
        ratios = np.exp(rng.uniform(math.log(1e-10), math.log(3e-8), size=12))
        gains = 2.5 * UNIT / 1e-9 * (ratios / 1e-9) ** exponent * np.exp(scatter * rng.normal(size=12))
        found.append((f"leak-{width}", leak_record(width, ratios.tolist(), gains.tolist())))
    return found


def test_an_exact_law_is_recovered_exactly():
    law = collapse_law(family())
    summary = checked(law).summary
    for name in ("slope", "slope_low", "slope_high"):
        assert summary[name] == pytest.approx(-1, abs=1e-12)
    for name in ("constant", "constant_low", "constant_high"):
        assert summary[name] == pytest.approx(2.5, rel=1e-12)
    assert math.exp(summary["intercept"]) == pytest.approx(2.5 * UNIT, rel=1e-10)
    assert (summary["n_points"], summary["n_null"], summary["n_models"]) == (60, 0, 5)
    assert summary["residual_sd"] < 1e-12
    assert summary["r_squared"] == pytest.approx(1)
    assert summary["fails"] == []
    assert [model["n_points"] for model in summary["per_model"]] == [12] * 5
    assert all(model["slope"] == pytest.approx(-1) for model in summary["per_model"])
    assert all(row["predicted"] == pytest.approx(row["gain_low"]) for row in law.rows)
    assert (headline(checked(law)) or "").startswith(
        "slope -1.000 [-1.000, -1.000] over 60 blocks of 5 models"
    )


def test_another_exponent_and_its_scatter_are_read_and_named():
    summary = checked(collapse_law(family(scatter=0.1, exponent=-0.5))).summary
    assert summary["slope_low"] < -0.5 < summary["slope_high"] < -0.4
    assert summary["fit_residual_sd"] == pytest.approx(0.1, rel=0.3)
    assert summary["residual_sd"] > 3 * summary["fit_residual_sd"]
    fails = " ".join(summary["fails"])
    assert "excludes the predicted −1" in fails
    assert "width 48, 12 layers alone" in fails
    assert "excludes the law's value" in fails
    # A scatter of 0.1 within intervals of ±10 %: one law, and nothing but chance to report.
    lawful = checked(collapse_law(family(scatter=0.05))).summary
    assert lawful["slope_low"] < -1 < lawful["slope_high"]
    assert lawful["residual_sd"] == pytest.approx(0.05, rel=0.3)
    assert not any("predicted −1" in fail or "law's value" in fail for fail in lawful["fails"])


def test_a_block_far_off_is_named():
    records = family(scatter=0.02)
    gains = records[1][1].summary["gain_low"]
    gains[4] *= 2
    summary = collapse_law(records).summary
    far = next(fail for fail in summary["fails"] if "standard deviations" in fail)
    assert "width 32, 12 layers block 5 (+0.6" in far


def test_blocks_without_a_gain_are_listed_with_their_reason():
    records = family()
    ratios = records[0][1].summary["displacement_ratio"]
    gains = [None if block in (0, 6) else 2.5 * UNIT / ratio for block, ratio in enumerate(ratios)]
    records[0] = ("leak-16", leak_record(16, ratios, gains))
    law = collapse_law(records)
    summary = checked(law).summary
    assert (summary["n_points"], summary["n_null"]) == (58, 2)
    assert summary["slope"] == pytest.approx(-1)
    missing = [row for row in law.rows if row["gain_low"] is None]
    assert [(row["block"], row["gain_low_reason"]) for row in missing] == [(1, INSIDE), (7, INSIDE)]
    assert missing[0]["predicted"] == pytest.approx(2.5 * UNIT / ratios[0])
    (fail,) = summary["fails"]
    assert fail.startswith(f"2 of 60 blocks have no gain_low and are in no fit ({INSIDE}: width 16")
    nothing = checked(collapse_law([("a", leak_record(gains=[None] * 4))]))
    assert (nothing.summary["slope"], nothing.summary["constant"]) == (None, None)
    assert (headline(nothing) or "").startswith("no slope")


def test_runs_at_another_beta_are_controls_and_enter_no_fit():
    records = family()
    ratios = [3 * ratio for ratio in records[0][1].summary["displacement_ratio"]]
    records.append(("other", leak_record(16, ratios, beta=3e-8, constant=2.5 * math.exp(0.5))))
    law = collapse_law(records)
    summary = checked(law).summary
    assert (summary["n_points"], summary["beta"]) == (60, 1e-8)
    assert summary["constant"] == pytest.approx(2.5, rel=1e-12)
    (control,) = summary["controls"]["runs"]
    assert (control["run"], control["beta"], control["n_points"]) == ("other", 3e-8, 12)
    for name in ("shift", "paired_shift", "paired_largest"):
        assert control[name] == pytest.approx(0.5)
    assert {row["role"] for row in law.rows if row["run"] == "other"} == {"control"}
    assert any("12 of 12 control blocks" in fail for fail in summary["fails"])


def test_one_model_has_a_slope_and_no_interval():
    # Two checkpoints of one model are one cluster.
    later = leak_record(16)
    later.config["base"]["steps"] = 9
    later.summary["model"] = "base, step 9"
    summary = checked(collapse_law([("a", leak_record(16)), ("b", later)])).summary
    assert summary["slope"] == pytest.approx(-1)
    assert summary["slope_low"] is None
    assert "at least 2" in summary["slope_low_reason"]
    assert summary["n_models"] == 1
    assert [model["model"] for model in summary["per_model"]] == [
        "width 16, 4 layers, base, step 3, width 16",
        "width 16, 4 layers, base, step 9",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ep": {"read": "linear"}}, "differ in 'read' .energy: a, b; linear: c"),
        ({"ep": {"rounds": 2}}, "differ in 'rounds'"),
        ({"instrument": "fp64", "study": "fp64"}, "differ in 'instrument'"),
        ({"study": "amp"}, "differ in 'study'"),
        ({"band": 0.02}, "differ in 'band' .0.05: a, b; 0.02: c"),
        ({"beta": 2e-8}, None),
    ],
)
def test_runs_that_measure_different_things_are_refused(change, words):
    records = [("a", leak_record(16)), ("b", leak_record(32)), ("c", leak_record(48, **change))]
    if words is None:
        assert collapse_law(records).summary["n_models"] == 2
        with pytest.raises(ConfigError, match="no beta is that of most runs"):
            collapse_law(records[1:])
        return
    with pytest.raises(ConfigError, match=words):
        collapse_law(records)


def test_only_finished_leak_runs_are_taken():
    with pytest.raises(ConfigError, match="'collapse' run"):
        collapse_law([("a", checked(collapse_law(family())))])
    unfinished = leak_record()
    stopped = Record(**{**vars(unfinished), "status": "stopped", "reason": "stopped by SIGINT"})
    with pytest.raises(ConfigError, match="twinscope resume"):
        collapse_law([("a", stopped)])


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    words = ["the", "state", "of", "union", "is", "strong", "and", "people", "nation", "know", "it", "well"]
    (tmp_path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(words, size=900)))
    path = tmp_path / "tiny.toml"
    path.write_text(
        f"""
        name = "tiny"
        control_betas = [5e-10]
        [model]
        layers = 2
        heads = 2
        context = 12
        [[models]]
        width = 16
        [[models]]
        width = 32
        [data]
        corpus = "{tmp_path / "text.txt"}"
        batch = 3
        [base]
        steps = 3
        [ep]
        beta = 1e-9
        fused = false
        read = "energy"
        [leak]
        batches = 8
        gains = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        band = 0.2
        threads = 1
        """
    )
    return path


def call(capsys, *arguments) -> tuple[int, dict, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, json.loads(captured.out.splitlines()[-1]), captured.err


def leaks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-leak-*"))


def numbers(path: Path):
    """What a collapse found, without the names of its runs."""
    record = load_record(path)
    controls = [{**run, "run": ""} for run in record.summary["controls"]["runs"]]
    summary = {**record.summary, "controls": controls}
    return record.status, summary, [{**row, "run": "", "key": ""} for row in record.rows]


def test_from_nothing_and_from_the_runs_that_it_left(tmp_path, tiny, capsys):
    code, found, err = call(capsys, "collapse", tiny, "--json")
    assert code == 0, err
    path = Path(found["run"])
    record = load_record(path)
    # In the order of the configuration: names of runs begun in one second do not sort by start.
    made = [tmp_path / "runs" / name for name in record.provenance["data"]]
    assert set(made) == set(leaks(tmp_path / "runs"))
    assert [run.name.partition("-leak-")[2] for run in made] == [
        "tiny-width16-layers2",
        "tiny-width32-layers2",
        "tiny-width16-layers2-beta5e-10",
    ]
    assert record.summary["n_points"] + record.summary["n_null"] == 4
    assert record.summary["n_points"] >= 3
    assert [row["role"] for row in record.rows] == ["point"] * 4 + ["control"] * 2
    control = record.summary["controls"]["runs"][0]
    # Half the beta at twice the gain is the same displacement, bit for bit.
    assert control["n_points"] == 2
    assert control["paired_largest"] < 1e-9
    for row in record.rows[:2]:
        leak = load_record(made[0]).summary
        assert row["gain_low"] == leak["gain_low"][row["block"] - 1]
        assert row["displacement_ratio"] == leak["displacement_ratio"][row["block"] - 1]
    # The same from the runs themselves.
    code, again, err = call(capsys, "collapse", *made, "--json")
    assert code == 0, err
    assert numbers(Path(again["run"])) == numbers(path)
    code, _, err = call(capsys, "collapse", *made, "--json", "--set", "ep.beta=1")
    assert (code, "leave it out" in err) == (2, True)
    code, _, err = call(capsys, "collapse", made[0], made[0], "--json")
    assert (code, "stands twice" in err) == (2, True)
    code, _, err = call(capsys, "collapse", made[0], tiny, "--json")
    assert (code, "one TOML file alone" in err) == (2, True)


def test_a_killed_collapse_continues(tmp_path, tiny, capsys):
    settings = collapse_run.read_targets([tiny])
    with collapse_run.create_run(settings, tmp_path / "reference") as run:
        collapse_run.collapse(settings, run, quiet=True)
    expected = numbers(run.path)
    root = tmp_path / "killed"

    def whole() -> None:
        with collapse_run.create_run(settings, root) as run:
            collapse_run.collapse(settings, run, quiet=True)

    child = multiprocessing.get_context("fork").Process(target=whole)
    child.start()
    # Killed inside the second leak run, once its journal has rows.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        made = leaks(root)
        if (
            len(made) == 2
            and (made[1] / "journal.jsonl").exists()
            and (made[1] / "journal.jsonl").read_bytes()
        ):
            break
        time.sleep(0.005)
    child.kill()
    child.join()
    (path,) = root.glob("*-collapse-*")
    first, second = leaks(root)
    assert not (path / "result.json").exists()
    assert not (second / "result.json").exists()
    before = (first / "result.json").stat().st_mtime_ns
    with Run.open(path) as run:
        collapse_run.resume(run, quiet=True)
    assert numbers(path) == expected
    assert len(leaks(root)) == 3
    assert (first / "result.json").stat().st_mtime_ns == before


def test_a_stop_inside_a_leak_run_names_the_collapse(tmp_path, tiny, monkeypatch):
    settings = collapse_run.read_targets([tiny])
    leak = collapse_run.leak_run.leak

    def stopping(prepared, run, quiet):
        run.request_stop("SIGTERM")
        return leak(prepared, run, quiet)

    monkeypatch.setattr(collapse_run.leak_run, "leak", stopping)
    with collapse_run.create_run(settings, tmp_path / "runs") as run, pytest.raises(Stopped) as stopped:
        collapse_run.collapse(settings, run, quiet=True)
    assert str(stopped.value).endswith(f"continue with: twinscope resume {run.path}")
    assert str(stopped.value).startswith("width16-layers2: stopped by SIGTERM")
    record = load_record(run.path)
    assert (record.status, record.rows) == ("stopped", [])
    monkeypatch.undo()


def test_given_runs_need_no_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    folders = []
    for name, record in family():
        with Run.create(tmp_path / "made", "leak", name, "", {}) as run:
            (run.path / "result.json").write_bytes(dump(record))
        folders.append(run.path)
    code, found, err = call(capsys, "collapse", *folders, "--json")
    assert code == 0, err
    assert load_record(Path(found["run"])).summary["slope"] == pytest.approx(-1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ep={displacement=1e-8}", "set ep.beta"),
        ("control_betas=[1e-9]", "other than ep.beta"),
        ("control_betas=[2e-9,2e-9]", "stands once"),
        ("control_model=3", "there are 2 models"),
        ("models.1.width=16", "give each a name"),
        ("models.1.widht=16", "number 2: widht"),
        ("models.1.steps=0", "number 2: steps"),
        ("models=[]", "models"),
        ("leak.batches=12", "multiple of groups"),
    ],
)
def test_what_cannot_be_compared_is_refused(tiny, override, words):
    with pytest.raises(ConfigError, match=words):
        read_config(tiny, CollapseConfig, [override])


def test_models_may_differ_in_depth_training_and_source(tmp_path, tiny):
    changes = [
        "models.0={width=16, layers=4}",
        "models.1={width=16, steps=7}",
        'models.1.name="later"',
        "control_model=2",
    ]
    settings = read_config(tiny, CollapseConfig, changes)
    first, second, control = settings.members()
    assert (first.label, first.config.model.layers) == ("width16-layers4", 4)
    assert (second.label, second.config.model.layers) == ("later", 2)
    assert [member.config.base and member.config.base.steps for member in (first, second)] == [3, 7]
    assert (control.label, control.config.ep.beta) == ("later-beta5e-10", 5e-10)
    source = read_config(
        tiny, CollapseConfig, [f'models.1={{source="run:{tmp_path}/some-run@3"}}']
    ).resolved()
    member = source.members()[1]
    assert (member.label, member.config.base) == ("some-run", None)
    assert member.config.model.source == f"run:{tmp_path}/some-run@3"


def test_the_published_experiment_asks_for_sixty_blocks_and_two_controls():
    path = Path(__file__).parents[3] / "experiments" / "collapse.toml"
    settings = read_config(path, CollapseConfig)
    members = settings.members()
    assert [member.config.model.width for member in members] == [32, 48, 64, 96, 128, 64, 64]
    assert sum(member.config.model.layers for member in members[:5]) == 60
    assert len({member.config.ep.beta for member in members}) == 3
    resolved = settings.resolved()
    again = CollapseConfig.model_validate(tomllib.loads(to_toml(resolved)))
    assert again.members() == resolved.members()
