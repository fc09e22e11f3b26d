"""Cost beside fidelity: the sweep, the displacement it is taken at, points against gradients, the record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from twinscope.lab.config import parse_config
from twinscope.lab.errors import ConfigError
from twinscope.lab.record import load_record
from twinscope.lab.run import Run
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.models.source import Initial
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.cost import frontier
from twinscope.propagation.cost import run as cost_run
from twinscope.propagation.cost.bench import Bench
from twinscope.propagation.cost.config import CostConfig
from twinscope.propagation.cost.counting import count_arms
from twinscope.propagation.cost.disturbance import Bounds
from twinscope.propagation.cost.flops import compare, ledger
from twinscope.propagation.cost.frontier import Ground, calibrated, measure_point, validity
from twinscope.propagation.cost.frontier_config import FrontierSettings
from twinscope.propagation.cost.frontier_summary import (
    cheapest,
    frontier_claims,
    frontier_summary,
    undominated,
)
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings
from twinscope.text.datasets import Dataset

WORDS = "the state of the union is strong and the people of the nation know it well"


def sweep(**changes) -> FrontierSettings:
    return FrontierSettings.model_validate(
        {"rounds": [0, 1], "nudges": ["positive", "symmetric"], "reads": ["linear"]} | changes
    )


def labels(settings: FrontierSettings, ep: EPSettings | None = None) -> list[str]:
    return [variant.label for variant in settings.variants(ep or EPSettings())]


def test_the_sweep_holds_what_is_allowed_once_and_the_control_first():
    settings = sweep(
        rounds=[1, 0], fused=[True, False], reads=["linear", "energy"], also=[{"rounds": 2, "damping": 0.5}]
    )
    assert labels(settings) == [
        "k0",
        "k1-fused-positive-linear",
        "k1-fused-symmetric-linear",
        "k1-unfused-positive-linear",
        "k1-unfused-symmetric-linear",
        "k1-unfused-positive-energy",
        "k1-unfused-symmetric-energy",
        "k2-fused-random-linear-damping0.5",
    ]
    # What the sweep does not set is the table's; an energy read allows no damping.
    damped = EPSettings(damping=0.5, displacement=0.2, gain={"profile": "top", "value": 2.0})
    only = sweep(rounds=[2], nudges=["negative"], fused=[False], reads=["linear", "energy"])
    (found,) = only.variants(damped)
    assert found.label == "k2-unfused-negative-linear-damping0.5-gain-top-value2"
    settings_at = found.at(1e-3)
    assert settings_at == EPSettings(
        rounds=2, fused=False, nudge="negative", damping=0.5, displacement=1e-3, gain=damped.gain
    )


def test_variants_that_cost_the_same_share_a_measurement():
    settings = sweep(
        rounds=[2],
        fused=[True],
        nudges=["positive", "negative", "random", "symmetric"],
        also=[{"rounds": 2, "nudge": "positive", "gain": {"profile": "uniform", "value": 2.0}}],
    )
    costs = [variant.cost.label for variant in settings.variants(EPSettings())]
    assert costs == ["k2-fused-positive-linear"] * 3 + ["k2-fused-symmetric-linear", costs[0]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"also": [{"round": 2}]}, "also, number 1: 'round' is no key of a variant (did you mean 'rounds'?)"),
        ({"also": [{"displacement": 0.1}]}, "also, number 1: 'displacement' is no key of a variant"),
        ({"also": [{"read": "energy"}]}, "also, number 1: the energy read cannot be fused"),
        ({"fused": [True], "reads": ["energy"]}, "the sweep holds no estimator but the control"),
        ({"displacements": [1e-3, 2.0]}, "displacements: 2 is no ratio between 0 and 1"),
        ({"rounds": [1, 1]}, "every value may stand once"),
        ({"starts": ["trained"]}, "'trained' needs a [base], or a model with a source"),
    ],
)
def test_a_wrong_table_is_one_sentence(change, sentence):
    table = {"starts": ["fresh"]} | change
    with pytest.raises(ConfigError) as caught:
        parse_config({"frontier": table}, CostConfig, origin="x.toml")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_displacement_asked_for_gives_the_one_aimed_at():
    def found(response, asked=1e-2):
        return calibrated(response, lambda size: size, 1e-2, asked)

    for response in (lambda ask: 0.3 * ask, lambda ask: ask + 40 * ask**2, lambda ask: ask):
        size, asked = found(response)
        assert size == response(asked) == pytest.approx(1e-2, rel=frontier.NEAR)
        assert found(response, asked) == (size, asked)
    assert found(lambda ask: 0.0) == (0.0, 1e-2)
    assert found(lambda ask: float("nan"))[1] == 1e-2
    assert found(lambda ask: 1e-9 * ask)[1] == 0.99


def test_what_counts_as_equilibrium_propagation():
    assert validity(1e-3, 0.1, 0.5) == []
    assert validity(9.99e-4, 0.2, 0.5) == [
        "the displacement 9.99e-04 is below 0.001",
        "the residual 0.200 is above 0.1",
    ]
    assert validity(1e-3, 0.1, None) == ["a gradient or a state is not finite"]


def bench() -> Bench:
    shape = {"layers": 3, "width": 16, "heads": 2, "context": 8}
    training = TrainConfig.model_validate({"model": shape, "data": {"batch": 3}, "train": {"threads": 1}})
    config = GPTConfig(vocab=11, **shape)
    ids = np.random.default_rng(0).integers(0, 11, size=400).astype(np.uint16)
    weights = {name: 4 * p.detach() for name, p in build_gpt(config, seed=7).named_parameters()}
    initial = Initial(config, weights, "made up")
    return Bench(
        "model", training, Dataset(ids, ids, 11, None, {}, "made up", None), initial, [], Bounds(9, 9)
    )


@pytest.mark.parametrize("change", [{}, {"damping": 0.5}, {"nudge": "symmetric"}, {"read": "energy"}])
def test_a_point_is_the_mean_cosine_at_its_displacement(change):
    also = [{"rounds": 2, "fused": False, "nudge": "positive"} | change]
    (_, variant) = sweep(rounds=[0], also=also).variants(EPSettings())
    target, ground = 1e-2, Ground(bench(), "trained", 2)
    row = measure_point(ground, variant, target)
    assert target <= row["displacement_low"] <= row["displacement"] <= target * 1.02

    # By itself: the same displacement found by bisection, vectors flattened in float64 by NumPy.
    model, used = ground.model, ground.bench
    table = []
    for index in range(2):
        low, high = 0.0, 0.2
        for _ in range(16):
            asked = (low + high) / 2
            ours = ep_gradient(model, *used.batch(index), variant.at(asked), 0, index)
            got = max(ours.diagnostics.displacement_ratio)
            low, high = (asked, high) if got < target * 1.01 else (low, asked)
        theirs = bp_gradient(model, *used.batch(index)).grads
        cosines = []
        for block in range(3):
            a, b = (
                np.concatenate(
                    [g.double().numpy().ravel() for n, g in grads.items() if f"blocks.{block}." in n]
                )
                for grads in (ours.grads, theirs)
            )
            cosines.append(a @ b / np.sqrt((a @ a) * (b @ b)))
        table.append(cosines)
    table = 1 - np.array(table)
    assert 1 - np.array(row["block_cosine"]) == pytest.approx(table.mean(0), rel=0.025, abs=1e-9)
    assert 1 - row["median_cosine"] == pytest.approx(np.median(table, 1).mean(), rel=0.025, abs=1e-9)
    assert 1 - row["worst_cosine"] == pytest.approx(table.max(1).mean(), rel=0.025, abs=1e-9)
    assert row["median_low"] <= row["median_cosine"] <= row["median_high"]
    # Two rounds at damping 0.5 end well before the fixed point.
    assert row["valid"] is ("damping" not in change)
    assert row["residual"] < 0.1 or row["invalid"][0].startswith("the residual")


def test_the_control_is_backpropagation_and_never_counts():
    (control,) = (v for v in sweep().variants(EPSettings()) if v.control)
    row = measure_point(Ground(bench(), "fresh", 2), control, 1e-3)
    assert row["median_cosine"] == pytest.approx(1, abs=1e-12)
    assert row["worst_cosine"] == pytest.approx(1, abs=1e-12)
    assert row["displacement"] is None
    assert row["displacement_reason"]
    assert row["invalid"] == ["K = 0 is backpropagation: the control"]


def test_the_two_starts_are_two_sets_of_weights():
    made = bench()
    fresh, trained = Ground(made, "fresh", 2).model, Ground(made, "trained", 2).model
    expected = build_gpt(made.initial.config, made.seed)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), expected.parameters(), strict=True))
    assert torch.equal(trained.tok.weight, made.initial.weights["tok.weight"])


def point(label: str, cost: float, cosine: float, **changes):
    row = {
        "kind": "frontier", "start": "fresh", "target": 1e-3, "label": label, "rounds": 1, "valid": True,
        "analytic_ratio": cost, "counted_ratio": cost, "measured_ratio": cost + 0.1, "measured_low": cost,
        "measured_high": cost + 0.2, "median_cosine": cosine, "worst_cosine": cosine - 0.01,
        "displacement": 1e-3, "residual": 0.02,
    }  # fmt: skip
    return row | changes


def test_the_frontier_is_what_nothing_betters():
    rows = [
        point("dear", 3.0, 0.999),
        point("cheap", 1.6, 0.98),
        point("worse", 2.0, 0.97),
        point("twin", 1.6, 0.98),
        point("good", 2.0, 0.995),
        point("no", 1.2, 1.0, valid=False),
        point("k0", 1.0, 1.0, valid=False, rounds=0, target=None, target_reason="free"),
        point("other", 1.7, 0.5, start="trained"),
    ]
    assert [row["label"] for row in undominated(rows[:5])] == ["cheap", "good", "dear"]
    assert [row["label"] for row in cheapest(rows[:5])] == ["good"]
    assert cheapest(rows[1:3]) == []
    reference = {"name": "it", "cost_ratio": 2.77, "median_cosine": 0.969, "conditions": "c", "source": "s"}
    settings = sweep(displacements=[1e-3], references=[reference])
    summary = frontier_summary(settings, rows)
    assert (summary["points"], summary["valid"]) == (8, 6)
    assert [row["label"] for row in summary["frontier"]] == ["other", "cheap", "good", "dear"]
    assert [row["label"] for row in summary["beyond_reference"]["it"]] == ["cheap", "good"]
    assert [row["label"] for row in summary["control"]] == ["k0"]
    (made,) = frontier_claims(summary)
    assert "is good: 2.00 times the FLOPs and 2.10 [2.00, 2.20] times the time of BP" in made["statement"]


def configured(tmp_path: Path, **changes) -> CostConfig:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    return CostConfig.model_validate(
        {
            "name": "tiny",
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 12},
            "data": {"corpus": str(text), "batch": 3},
            "base": {"steps": 2},
            "cost": {
                "windows": 2, "steps": 2, "warmup": 0, "part_steps": 0, "fidelity_batches": 0, "threads": 1,
                "memory": False, "count": False, "overhead": False, "eval_batches": 1,
            },
            "frontier": {
                "rounds": [0, 1], "fused": [True], "nudges": ["positive", "negative"], "reads": ["linear"],
                "batches": 2, "windows": 2, "steps": 2, "warmup": 0, **changes,
            },
        }
    )  # fmt: skip


@pytest.fixture
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    # The count needs no process of its own where nothing depends on the time.
    monkeypatch.setattr(frontier, "count_apart", count_arms)


@pytest.mark.usefixtures("_places")
def test_a_run_gives_every_point_its_cost_and_resumes_where_it_stopped(tmp_path, monkeypatch):
    config = configured(tmp_path)
    config = config.model_copy(update={"cost": config.cost.model_copy(update={"count": True})})
    monkeypatch.setattr(cost_run, "count_units", lambda bench: [])
    monkeypatch.setattr("twinscope.propagation.cost.summary.Measured.counted", lambda self, arm: None)
    prepared = cost_run.prepare(config, quiet=True)

    class Killed(BaseException):
        pass

    written = Run.append

    def append(run, row):
        if row["key"] == "frontier start=trained displacement=0.01 k1-fused-negative-linear":
            raise Killed
        written(run, row)

    monkeypatch.setattr(Run, "append", append)
    with pytest.raises(Killed), cost_run.create_run(prepared, tmp_path / "runs") as run:
        cost_run.cost(prepared, run, quiet=True)
    before = list(run.rows)
    assert before[-1]["key"] == "frontier start=trained displacement=0.01 k1-fused-positive-linear"
    monkeypatch.setattr(Run, "append", written)
    with Run.open(run.path) as again:
        cost_run.resume(again, quiet=True)

    record = load_record(run.path)
    assert record.status == "complete"
    assert all(row in record.rows for row in before)
    points = [row for row in record.rows if row["kind"] == "frontier"]
    assert [(row["start"], row["target"], row["label"]) for row in points] == [
        (start, target, label)
        for start in ("trained", "fresh")
        for target, label in [
            (None, "k0"),
            (1e-3, "k1-fused-positive-linear"),
            (1e-3, "k1-fused-negative-linear"),
            (1e-2, "k1-fused-positive-linear"),
            (1e-2, "k1-fused-negative-linear"),
        ]
    ]
    shape = GPTConfig(vocab=prepared.data.vocab, layers=2, width=16, heads=2, context=12)
    expected = compare(
        ledger(shape, 3, EPSettings(), config.optimizer), ledger(shape, 3, None, config.optimizer)
    ).ratio
    for row in points[1:5]:
        assert row["analytic_ratio"] == row["counted_ratio"] == pytest.approx(expected)
        assert 0 < row["measured_low"] <= row["measured_ratio"] <= row["measured_high"]
    costs = [row for row in record.rows if row["kind"] == "frontier_cost"]
    assert [row["label"] for row in costs] == ["k0", "k1-fused-positive-linear"]
    assert {name: len(times) for name, times in costs[1]["step_seconds"].items()} == {"ep": 2, "bp": 2}
    seconds = {name: np.array(times) for name, times in costs[1]["step_seconds"].items()}
    assert costs[1]["measured_ratio"] == pytest.approx(np.median(seconds["ep"] / seconds["bp"]))
    assert record.summary["frontier"]["points"] == 10


@pytest.mark.usefixtures("_places")
def test_clock_and_count_can_be_left_out(tmp_path):
    prepared = cost_run.prepare(configured(tmp_path, measure=False, starts=["fresh"]), quiet=True)
    with cost_run.create_run(prepared, tmp_path / "runs") as run:
        cost_run.cost(prepared, run, quiet=True)
    row = next(row for row in load_record(run.path).rows if row["kind"] == "frontier")
    assert row["measured_ratio"] is None
    assert row["measured_ratio_reason"] == "frontier.measure = false leaves the clock out"
    assert row["counted_ratio"] is None
    assert row["counted_ratio_reason"] == "cost.count = false leaves the count out"
