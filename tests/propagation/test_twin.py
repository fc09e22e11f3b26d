"""The twin loop: what the arms share, exact resume after kill -9, and every ending a run can have."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from twinscope.lab.errors import ConfigError, DataError, RunFailed, Stopped
from twinscope.lab.record import load_record
from twinscope.lab.run import Run
from twinscope.models.checkpoints import find_checkpoints, read_manifest, read_part
from twinscope.propagation import twin
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.estimators import bp_gradient
from twinscope.propagation.train import create_run, prepare, resume, train

WORDS = "the state of the union is strong and the people of the nation know it well"


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))


def config(tmp_path: Path, **changes) -> TrainConfig:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    values = {
        "name": "tiny",
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 12},
        "data": {"corpus": str(text), "batch": 3},
        "train": {"steps": 14, "seeds": [0, 1], "eval_every": 4, "eval_batches": 2, "gate_every": 7,
                  "checkpoint_every": 3, "threads": 1, "windows": 2},
        "optimizer": {"kind": "muon", "lr": 0.02, "warmup": 3},
        "ep": {"nudge": "random", "displacement": 1e-3, "gain": {"profile": "random", "max": 8.0}},
    }  # fmt: skip
    for table, change in changes.items():
        values[table] = (
            {**values[table], **change} if isinstance(change, dict) and table in values else change
        )
    return TrainConfig.model_validate(values)


def completed(tmp_path: Path, settings: TrainConfig, name: str = "runs") -> Path:
    prepared = prepare(settings)
    with create_run(prepared, tmp_path / name) as run:
        train(prepared, run, quiet=True)
    return run.path


def essence(path: Path):
    """Everything of a run that must not depend on interruptions: rows, summary, and all saved bytes."""
    record = load_record(path)
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in record.rows]
    saved = {
        f"{checkpoint.name}/{file.name}": file.read_bytes()
        for _, _, checkpoint in find_checkpoints(path / "checkpoints")
        for file in sorted(checkpoint.iterdir())
    }
    return record.status, rows, record.summary, record.claims, saved


def in_child(target, *arguments) -> multiprocessing.Process:
    """A forked process, so that nothing is imported again; one torch thread makes forking safe."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def continue_run(path: Path, pauses: float = 0.0) -> None:
    with Run.open(path) as run:
        resume(run, quiet=True)


def test_kill_at_random_moments_changes_nothing(tmp_path):
    settings = config(tmp_path)
    expected = essence(completed(tmp_path, settings, "reference"))
    assert expected[0] == "complete"
    prepared = prepare(settings)
    began = time.perf_counter()
    completed(tmp_path, settings, "timed")
    duration = time.perf_counter() - began
    rng = np.random.default_rng(5)
    seen: set[int] = set()
    for attempt in range(8):
        root = tmp_path / f"killed-{attempt}"

        def whole(root=root) -> None:
            with create_run(prepared, root) as run:
                train(prepared, run, quiet=True)

        target, arguments = whole, ()
        for _ in range(3):
            child = in_child(target, *arguments)
            time.sleep(duration * rng.uniform(0.05, 0.9))
            child.kill()
            child.join()
            made = list(root.glob("*/config.toml"))
            if made:
                target, arguments = continue_run, (made[0].parent,)
                seen.update(step for _, step, _ in find_checkpoints(made[0].parent / "checkpoints"))
        if not made:
            continue
        path = made[0].parent
        if not (path / "result.json").exists():
            continue_run(path)
        assert essence(path) == expected
    assert len(seen) >= 3, "no kill left a checkpoint behind: the test would show nothing"


def test_sigterm_stops_with_a_checkpoint_and_resumes(tmp_path):
    settings = config(tmp_path, train={"steps": 60, "seeds": [0]})
    expected = essence(completed(tmp_path, settings, "reference"))
    root = tmp_path / "stopped"
    prepared = prepare(settings)

    def whole() -> None:
        with create_run(prepared, root) as run:
            try:
                train(prepared, run, quiet=True)
            except Stopped as error:
                # The exit code carries the check out of the child.
                os._exit(error.exit_code if f"twinscope resume {run.path}" in str(error) else 99)

    child = in_child(whole)
    while not list(root.glob("*/checkpoints/seed-0-*")):
        time.sleep(0.005)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)
    child.join()
    assert child.exitcode == 75
    (path,) = root.iterdir()
    stopped = load_record(path)
    assert stopped.status == "stopped"
    assert "SIGTERM" in (stopped.reason or "")
    continue_run(path)
    assert essence(path)[:4] == expected[:4]


def test_a_stop_at_any_step_changes_nothing(tmp_path, monkeypatch):
    settings = config(tmp_path, train={"seeds": [0]})
    expected = essence(completed(tmp_path, settings, "reference"))
    prepared = prepare(settings)
    draw = twin.train_batch
    for stop in range(14):
        with create_run(prepared, tmp_path / "stopped") as run:

            def asked(tokens, context, batch, seed, step, run=run, stop=stop):
                if step == stop:
                    run.request_stop("a test")
                return draw(tokens, context, batch, seed, step)

            monkeypatch.setattr(twin, "train_batch", asked)
            with pytest.raises(Stopped, match=f"at step {stop + 1} "):
                train(prepared, run, quiet=True)
        monkeypatch.setattr(twin, "train_batch", draw)
        continue_run(run.path)
        assert essence(run.path)[:4] == expected[:4]


def test_time_budget_stops_and_the_rest_can_be_had_later(tmp_path):
    prepared = prepare(config(tmp_path, train={"minutes": 1e-5}))
    with create_run(prepared, tmp_path / "runs") as run, pytest.raises(Stopped, match="budget"):
        train(prepared, run, quiet=True)
    assert load_record(run.path).status == "stopped"


def test_full_disk_is_a_resumable_stop(tmp_path):
    settings = config(tmp_path)
    expected = essence(completed(tmp_path, settings, "reference"))
    prepared, root = prepare(settings), tmp_path / "full"

    def whole() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # Enough for provenance and some journal rows, too little for a checkpoint of the weights.
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with create_run(prepared, root) as run:
            try:
                train(prepared, run, quiet=True)
            except Stopped as error:
                os._exit(error.exit_code)

    child = in_child(whole)
    child.join()
    assert child.exitcode == 75
    (path,) = root.iterdir()
    assert not list(path.glob("checkpoints/.*"))
    continue_run(path)
    assert essence(path) == expected


def test_arms_share_start_batches_and_evaluation(tmp_path, monkeypatch):
    seen: dict[str, list] = {}
    for rule in ("ep_gradient", "bp_gradient"):
        original = getattr(twin, rule)

        def watch(model, tokens, targets, *rest, original=original, rule=rule, **named):
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            seen.setdefault(rule, []).append((tokens.clone(), targets.clone(), weights))
            return original(model, tokens, targets, *rest, **named)

        monkeypatch.setattr(twin, rule, watch)
    path = completed(tmp_path, config(tmp_path))
    assert len(seen["ep_gradient"]) == len(seen["bp_gradient"]) == 28
    for ep, bp in zip(seen["ep_gradient"], seen["bp_gradient"], strict=True):
        assert torch.equal(ep[0], bp[0])
        assert torch.equal(ep[1], bp[1])
    assert torch.equal(seen["ep_gradient"][0][2], seen["bp_gradient"][0][2])
    assert not torch.equal(seen["ep_gradient"][13][2], seen["bp_gradient"][13][2])
    assert not torch.equal(seen["ep_gradient"][0][2], seen["ep_gradient"][14][2]), "seeds start alike"
    record = load_record(path)
    first = {
        row["arm"]: row["val_losses"] for row in record.rows if row["kind"] == "eval" and row["step"] == 0
    }
    assert first["ep"] == first["bp"]
    assert record.summary["arms"]["bp"]["val_loss"] < first["bp"][0]


def test_two_bp_arms_are_the_same_to_the_bit(tmp_path):
    arms = [{"name": "one", "rule": "bp"}, {"name": "two", "rule": "bp"}]
    record = load_record(completed(tmp_path, config(tmp_path, arms=arms)))
    for window in record.summary["difference"]["two"]["windows"]:
        assert (window["mean"], window["low"], window["high"]) == (0.0, 0.0, 0.0)
    assert record.summary["gate"]["median_cosine"] is None
    assert "no gate" in record.summary["gate"]["median_cosine_reason"]


def test_summary_is_what_the_rows_say(tmp_path):
    record = load_record(completed(tmp_path, config(tmp_path)))
    losses = {
        (row["seed"], row["step"], row["arm"]): np.array(row["val_losses"])
        for row in record.rows
        if row["kind"] == "eval"
    }
    last = record.summary["difference"]["ep"]["windows"][-1]
    assert (last["start"], last["end"], last["n"]) == (12, 14, 2)
    differences = np.array(
        [[losses[seed, step, "ep"] - losses[seed, step, "bp"] for step in (12, 14)] for seed in (0, 1)]
    )
    assert last["mean"] == pytest.approx(differences.mean(), abs=1e-15)
    assert last["per_seed"][1]["mean"] == pytest.approx(differences[1].mean(), abs=1e-15)
    # Student t with one degree of freedom: tan(0.475 pi) = 12.706.
    batches = differences.mean(axis=(0, 1))
    half = 12.7062047 * abs(batches[0] - batches[1]) / 2
    assert last["high"] - last["mean"] == pytest.approx(half, rel=1e-6)
    arm = record.summary["arms"]["ep"]
    finals = [losses[seed, 14, "ep"].mean() for seed in (0, 1)]
    assert arm["val_loss"] == pytest.approx(np.mean(finals), abs=1e-15)
    assert arm["val_bits_per_byte"] == pytest.approx(np.mean(finals) / np.log(2), rel=1e-12)
    scatter = record.summary["seed_scatter"]
    bp = [losses[seed, 14, "bp"].mean() for seed in (0, 1)]
    assert scatter["bp_final_sd"] == pytest.approx(abs(bp[0] - bp[1]) / np.sqrt(2), rel=1e-9)
    assert "no interval over seeds" in scatter["note"]


def test_non_finite_steps_are_skipped_counted_and_too_many_stop_the_run(tmp_path, monkeypatch):
    def poisoned(bad_steps):
        def gradient(model, tokens, targets, seed, step):
            found = bp_gradient(model, tokens, targets)
            if step in bad_steps:
                next(iter(found.grads.values())).fill_(float("nan"))
            return found

        return gradient

    real = twin.estimator
    settings = config(tmp_path, train={"max_skipped_in_a_row": 3, "seeds": [0]})
    for bad, fails in (({2, 3, 6}, False), ({4, 5, 6}, True)):
        monkeypatch.setattr(
            twin, "estimator", lambda c, a, bad=bad: poisoned(bad) if a.name == "ep" else real(c, a)
        )
        prepared = prepare(settings)
        with create_run(prepared, tmp_path / "runs") as run:
            if fails:
                with pytest.raises(RunFailed, match=r"arm 'ep'.*3 steps in a row up to step 6"):
                    train(prepared, run, quiet=True)
                failed = load_record(run.path)
                assert failed.status == "failed"
                assert "in a row" in (failed.reason or "")
            else:
                train(prepared, run, quiet=True)
                arms = load_record(run.path).summary["arms"]
                assert (arms["ep"]["skipped_steps"], arms["bp"]["skipped_steps"]) == (3, 0)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoint_is_named_and_the_run_goes_on_without_it(tmp_path):
    settings = config(tmp_path, train={"seeds": [0]})
    path = completed(tmp_path, settings)
    expected = essence(path)
    (path / "result.json").unlink()
    checkpoint = find_checkpoints(path / "checkpoints")[-1][2]
    flip_a_byte(checkpoint / "ep.weights.safetensors")
    with pytest.raises(DataError, match=f"delete {checkpoint} and resume"):
        continue_run(path)
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()
    continue_run(path)
    assert essence(path)[:4] == expected[:4]


def test_a_manifest_that_was_changed_or_moved_is_refused(tmp_path):
    path = completed(tmp_path, config(tmp_path, train={"seeds": [0], "keep_checkpoints": 9}))
    (path / "result.json").unlink()
    earlier, last = (found[2] for found in find_checkpoints(path / "checkpoints")[-2:])
    manifest = (last / "manifest.json").read_text()
    for damaged, problem in (
        (manifest.replace('"skipped": 0', '"skipped": 7'), "digest does not match"),
        (manifest.replace('"skipped": 0', '"skipped": "x"'), "cannot be read"),
        (manifest[:100], "cannot be read"),
        ((earlier / "manifest.json").read_text(), "moved from elsewhere"),
    ):
        (last / "manifest.json").write_text(damaged)
        with pytest.raises(DataError, match=f"{problem}.*delete {last}"):
            continue_run(path)


def test_a_journal_that_lost_rows_is_refused(tmp_path):
    path = completed(tmp_path, config(tmp_path, train={"seeds": [0]}))
    (path / "result.json").unlink()
    lines = (path / "journal.jsonl").read_text().splitlines(keepends=True)
    (path / "journal.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(DataError, match="rows were lost"):
        continue_run(path)


def test_a_source_without_a_step_is_pinned_to_the_step_it_has(tmp_path):
    path = completed(tmp_path, config(tmp_path, train={"seeds": [0]}))
    later = config(tmp_path).model_dump(exclude_unset=True) | {"model": {"source": f"run:{path}"}}
    model = prepare(TrainConfig.model_validate(later)).config.model
    assert (model.source, model.arm, model.seed) == (f"run:{path}@14", "ep", 0)


def test_a_run_starts_from_a_checkpoint_of_another(tmp_path):
    path = completed(tmp_path, config(tmp_path, train={"seeds": [0], "keep_checkpoints": 9}))
    arms = [{"name": "ep", "rule": "ep"}, {"name": "bp", "rule": "bp"}]
    later = config(tmp_path, arms=arms).model_dump(exclude_unset=True)

    def continued(**model) -> TrainConfig:
        return TrainConfig.model_validate(later | {"model": model})

    second = load_record(completed(tmp_path, continued(source=f"run:{path}@12", arm="bp")))
    first = load_record(path)
    at_12 = next(r for r in first.rows if r["key"] == "eval seed=0 step=12 arm=bp")
    for row in second.rows:
        if row["kind"] == "eval" and row["step"] == 0:
            assert row["val_losses"] == at_12["val_losses"]
    for model, problem in (
        ({"source": f"run:{path}@13"}, "no checkpoint of step 13"),
        ({"source": f"run:{path}", "arm": "pb"}, "no arm 'pb'"),
        ({"source": f"run:{tmp_path / 'nothing'}"}, "no checkpoint in"),
    ):
        with pytest.raises(ConfigError, match=problem):
            prepare(continued(**model))
    with pytest.raises(ValueError, match="shape comes from the source"):
        continued(source=f"run:{path}", layers=3)
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 400)
    with pytest.raises(DataError, match="tokens, but the data has"):
        prepare(TrainConfig.model_validate(
            later | {"model": {"source": f"run:{path}"}, "data": {"corpus": str(other), "batch": 3}}
        ))  # fmt: skip
    flip_a_byte(path / "checkpoints" / "seed-0-step-0000012" / "bp.weights.safetensors")
    with pytest.raises(DataError, match=r"bp\.weights\.safetensors"):
        prepare(continued(source=f"run:{path}@12", arm="bp"))


def test_base_is_trained_once_and_every_arm_starts_there(tmp_path):
    settings = config(tmp_path, base={"steps": 6, "seed": 3}, train={"seeds": [0]})
    first = load_record(completed(tmp_path, settings))
    bases = list((tmp_path / "cache" / "bases").glob("*/*/result.json"))
    assert len(bases) == 1
    made = bases[0].stat().st_mtime_ns
    second = load_record(completed(tmp_path, settings))
    assert [b.stat().st_mtime_ns for b in (tmp_path / "cache" / "bases").glob("*/*/result.json")] == [made]
    assert first.summary == second.summary
    base = load_record(bases[0])
    (final,) = [r for r in base.rows if r["kind"] == "eval" and r["step"] == 6]
    starts = [r for r in first.rows if r["kind"] == "eval" and r["step"] == 0]
    assert [row["val_losses"] for row in starts] == [final["val_losses"]] * 2


def test_changed_text_is_refused_on_resume(tmp_path):
    path = completed(tmp_path, config(tmp_path))
    (path / "result.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("strong", "string"))
    with pytest.raises(DataError, match="changed since"):
        continue_run(path)


def test_a_row_that_does_not_come_out_again_is_a_defect(tmp_path):
    path = completed(tmp_path, config(tmp_path))
    (path / "result.json").unlink()
    journal = path / "journal.jsonl"
    lines = journal.read_text().splitlines()
    row = json.loads(lines[-1])
    row["residual"] = 0.5
    journal.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    from twinscope.lab.errors import TwinscopeError

    with pytest.raises(TwinscopeError, match="another value of 'residual'") as caught:
        continue_run(path)
    assert caught.value.exit_code == 1


def test_checkpoint_holds_weights_and_optimizer_of_every_arm(tmp_path):
    path = completed(tmp_path, config(tmp_path, train={"seeds": [0]}))
    _, step, checkpoint = find_checkpoints(path / "checkpoints", 0)[-1]
    assert step == 14
    manifest = read_manifest(checkpoint)
    assert list(manifest.arms) == ["ep", "bp"]
    ep, bp = (read_part(checkpoint, manifest, f"{arm}.weights") for arm in ("ep", "bp"))
    assert ep.keys() == bp.keys()
    assert any(not torch.equal(ep[name], bp[name]) for name in ep)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ep": {"rounds": 0}}, "kept as a control only"),
        ({"ep": {"beta": -1.0, "displacement": None}}, "greater than 0"),
        ({"arms": [{"name": "a", "rule": "ep"}, {"name": "a", "rule": "bp"}]}, "may stand once"),
        ({"arms": [{"name": "a", "rule": "ep", "round": 2}]}, "did you mean 'rounds'"),
        ({"arms": [{"name": "b", "rule": "bp", "rounds": 2}]}, "means nothing"),
        ({"arms": [{"name": "e", "rule": "ep", "read": "energy"}]}, "arm 'e'.*cannot be fused"),
        ({"arms": [{"name": "e", "rule": "ep", "precision": "amp"}]}, "holds for every arm"),
        ({"train": {"seeds": [-1]}}, "greater than or equal to 0"),
        ({"train": {"steps": "2"}}, "valid integer"),
        ({"train": {"steps": True}}, "valid integer"),
        ({"optimizer": {"betas": [2.0, 0.9]}}, "less than 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, changes, problem):
    with pytest.raises(ValueError, match=problem):
        config(tmp_path, **changes)


def test_arm_overrides_replace_the_other_way_to_set_the_nudge(tmp_path):
    arms = [{"name": "fixed", "rule": "ep", "beta": 0.5, "gain": {"profile": "uniform", "value": 2.0}}]
    settings = config(tmp_path, arms=arms)
    ep = settings.ep_settings(settings.arms[0])
    assert (ep.beta, ep.displacement, ep.gain.profile, ep.nudge) == (0.5, None, "uniform", "random")


def test_context_longer_than_the_text_is_a_sentence(tmp_path):
    prepared = prepare(config(tmp_path, model={"context": 6000}))
    with create_run(prepared, tmp_path / "runs") as run, pytest.raises(DataError, match="context of 6000"):
        train(prepared, run, quiet=True)


def test_amp_trains_only_through_its_gate(tmp_path, monkeypatch):
    settings = config(tmp_path, train={"precision": "amp", "seeds": [0], "steps": 4})
    record = load_record(completed(tmp_path, settings))
    (gate,) = [row for row in record.rows if row["kind"] == "amp_gate"]
    assert gate["passed"]
    assert abs(gate["amp_cosine"] - gate["full_cosine"]) < 0.005
    assert gate["amp_cosine"] != gate["full_cosine"]
    monkeypatch.setattr("twinscope.propagation.gates.AMP_TOLERANCE", 0.0)
    prepared = prepare(settings)
    with (
        create_run(prepared, tmp_path / "runs") as run,
        pytest.raises(ConfigError, match="may not train in amp"),
    ):
        train(prepared, run, quiet=True)
    assert load_record(run.path).status == "failed"
