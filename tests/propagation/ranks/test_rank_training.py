"""Training over ranks: the records of one rank, one run directory, exact resume, and every way to end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from forked import codes, command_on_ranks

from twinscope.lab.errors import Stopped
from twinscope.lab.record import load_record
from twinscope.lab.run import Run, run_info
from twinscope.models.checkpoints import find_checkpoints, read_manifest, read_part
from twinscope.propagation import train as one_rank
from twinscope.propagation import twin
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.ranks import group, training

WORDS = "the state of the union is strong and the people of the nation know it well"
OURS = re.compile("twinscope: |run: ")
#: Relative difference of losses after all steps in float64, where rounding has grown with training.
AFTER_TRAINING = 1e-8


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    # Drawing takes longer than training; test_torchrun.py draws.
    monkeypatch.setattr("twinscope.report.page.render", lambda runs, out: runs[0] / "report.html")


def write_config(tmp_path: Path, more: str = "", steps: int = 6, batch: int = 5) -> Path:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    path = tmp_path / f"tiny-{steps}-{batch}-{len(more)}.toml"
    path.write_text(
        f"""
        name = "tiny"
        [model]
        layers = 2
        width = 16
        heads = 2
        context = 12
        [data]
        corpus = "{text}"
        batch = {batch}
        [train]
        steps = {steps}
        eval_every = 2
        eval_batches = 2
        gate_every = 3
        checkpoint_every = 3
        keep_checkpoints = 9
        precision = "fp64"
        threads = 1
        windows = 1
        [optimizer]
        kind = "muon"
        lr = 0.02
        warmup = 3
        [ep]
        nudge = "random"
        {more}
        """
    )
    return path


def train_on(size: int, config: Path, root: Path, *more: str) -> list[int | None]:
    """Exit codes of ``twinscope train`` on ``size`` ranks, which write beside ``root``."""
    arguments = ["train", str(config), "--runs", str(root), "--json", *more]
    return codes(command_on_ranks(size, arguments, said_of(root)))


def resume_on(size: int, run: Path) -> list[int | None]:
    return codes(command_on_ranks(size, ["resume", str(run), "--json"], said_of(run.parent)))


def said_of(root: Path) -> Path:
    return root.with_name(f"{root.name}-said")


def said(root: Path, rank: int, stream: str = "err") -> str:
    """What a rank printed, without what the library's C++ logs of connections."""
    text = (said_of(root) / f"{rank}.{stream}").read_text()
    assert "Traceback" not in text
    return "".join(f"{line}\n" for line in text.splitlines() if stream == "out" or OURS.match(line))


def alone(config: Path, root: Path) -> Path:
    settings = TrainConfig.model_validate(tomllib.loads(config.read_text()))
    prepared = one_rank.prepare(settings)
    with one_rank.create_run(prepared, root) as run:
        one_rank.train(prepared, run, quiet=True)
    return run.path


def only_run(root: Path) -> Path:
    (path,) = root.iterdir()
    return path


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


def assert_near(found: Path, expected: Path) -> None:
    """Same rows in the same order, numbers equal but for what rounding becomes by training."""
    records = load_record(found), load_record(expected)
    assert [row["key"] for row in records[0].rows] == [row["key"] for row in records[1].rows]
    for one, other in zip(records[0].rows, records[1].rows, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if name != "timing":
                assert one[name] == approx(value), (other["key"], name)
    weights = [
        read_part(checkpoint, read_manifest(checkpoint), "ep.weights")
        for _, _, checkpoint in (find_checkpoints(path / "checkpoints")[-1] for path in (found, expected))
    ]
    for name, tensor in weights[1].items():
        np.testing.assert_allclose(weights[0][name].numpy(), tensor.numpy(), rtol=1e-6, atol=1e-9)


def approx(value):
    if isinstance(value, list) or (isinstance(value, float) and not isinstance(value, bool)):
        return pytest.approx(value, rel=AFTER_TRAINING, abs=1e-12)
    return value


def test_three_ranks_train_what_one_trains(tmp_path):
    config = write_config(tmp_path)
    expected = alone(config, tmp_path / "one")
    assert train_on(3, config, tmp_path / "three") == [0, 0, 0]
    path = only_run(tmp_path / "three")
    assert_near(path, expected)
    record = load_record(path)
    assert (record.provenance["ranks"], record.provenance["backend"]) == ([3], "gloo")
    assert "ranks" not in load_record(expected).provenance
    line = json.loads(said(tmp_path / "three", 0, "out").splitlines()[-1])
    assert line["run"] == str(path)
    assert line["status"] == "complete"
    assert line["report"] == str(path / "report.html")
    for other in (1, 2):
        assert said(tmp_path / "three", other, "out") == said(tmp_path / "three", other) == ""


def test_a_stopped_run_goes_on_bit_for_bit_on_as_many_ranks(tmp_path):
    config = write_config(tmp_path, steps=30)
    assert train_on(2, config, tmp_path / "whole") == [0, 0]
    root = tmp_path / "stopped"
    processes = command_on_ranks(2, ["train", str(config), "--runs", str(root)], said_of(root))
    wait_for(root, "*/checkpoints/seed-0-*")
    # One rank is asked, and not the one that owns the run.
    os.kill(processes[1].pid, signal.SIGTERM)
    assert codes(processes) == [75, 75]
    assert "rank 1: stopped by SIGTERM at step" in said(root, 0)
    assert said(root, 1) == ""
    path = only_run(root)
    assert load_record(path).status == "stopped"
    assert resume_on(2, path) == [0, 0]
    assert essence(path)[:4] == essence(only_run(tmp_path / "whole"))[:4]


def wait_for(root: Path, pattern: str) -> None:
    limit = time.monotonic() + 60
    while not list(root.glob(pattern)):
        assert time.monotonic() < limit
        time.sleep(0.005)


def assert_killed(ended: list[int | None]) -> None:
    """A rank may see another one die before it comes to its own end."""
    assert -9 in ended
    assert set(ended) <= {-9, 75}


def stopped_at(monkeypatch, step: int, ranks: int) -> None:
    """Kill the job without a word after the rows of ``step``, as a machine that loses its power does."""
    draw = twin.train_batch

    def asked(tokens, context, batch, seed, at):
        if at == step and os.environ.get("WORLD_SIZE") == str(ranks):
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(tokens, context, batch, seed, at)

    monkeypatch.setattr(twin, "train_batch", asked)


def test_a_killed_run_goes_on_with_another_number_of_ranks(tmp_path, monkeypatch):
    config = write_config(tmp_path, steps=8)
    expected = alone(config, tmp_path / "one")
    root = tmp_path / "moved"
    # Killed at 5 on three ranks, after the checkpoint of step 3 and the rows of step 4.
    stopped_at(monkeypatch, 5, ranks=3)
    assert_killed(train_on(3, config, root))
    path = only_run(root)
    before = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    assert {row["step"] for row in before} == {0, 2, 3, 4}
    # Then at 7 on two, after that of step 6; then to the end on one.
    stopped_at(monkeypatch, 7, ranks=2)
    assert_killed(resume_on(2, path))
    with Run.open(path) as run:
        one_rank.resume(run, quiet=True)
    assert_near(path, expected)
    record = load_record(path)
    assert record.provenance["ranks"] == [3, 2, 1]
    assert record.rows[: len(before)] == before, "a row that was on disk was changed"


def test_a_run_of_one_rank_goes_on_on_four(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    expected = alone(config, tmp_path / "one")
    root = tmp_path / "grown"
    draw = twin.train_batch

    def asked(tokens, context, batch, seed, step):
        if step == 4:
            raise KeyboardInterrupt
        return draw(tokens, context, batch, seed, step)

    with monkeypatch.context() as patch:
        patch.setattr(twin, "train_batch", asked)
        with pytest.raises(Stopped, match="Ctrl-C"):
            alone(config, root)
    assert resume_on(4, only_run(root)) == [0] * 4
    assert_near(only_run(root), expected)
    assert load_record(only_run(root)).provenance["ranks"] == [1, 4]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_can_be_resumed(tmp_path, monkeypatch, victim):
    config = write_config(tmp_path)
    assert train_on(2, config, tmp_path / "whole") == [0, 0]
    draw = twin.train_batch

    def asked(tokens, context, batch, seed, step):
        if step == 4 and os.environ.get("RANK") == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(tokens, context, batch, seed, step)

    root = tmp_path / "bereft"
    with monkeypatch.context() as patch:
        patch.setattr(twin, "train_batch", asked)
        ended = train_on(2, config, root)
    other = 1 - victim
    assert ended[victim] == -9
    assert ended[other] == 75
    lines = [line for line in said(root, other).splitlines() if not line.startswith("run: ")]
    assert len(lines) == 1, lines
    assert f"rank {other} of 2 lost another rank" in lines[0]
    path = only_run(root)
    if other == 0:
        assert f"twinscope resume {path}" in lines[0]
        assert load_record(path).status == "stopped"
    else:
        assert run_info(path).status == "interrupted"
    assert resume_on(2, path) == [0, 0]
    assert essence(path)[:4] == essence(only_run(tmp_path / "whole"))[:4]


def test_an_error_of_one_rank_is_told_by_rank_0(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    draw = twin.train_batch

    def asked(tokens, context, batch, seed, step):
        if step == 2 and os.environ.get("RANK") == "1":
            raise RuntimeError("a surprise")
        return draw(tokens, context, batch, seed, step)

    monkeypatch.setattr(twin, "train_batch", asked)
    assert train_on(2, config, tmp_path / "runs") == [1, 1]
    assert "rank 1: RuntimeError: a surprise" in said(tmp_path / "runs", 0)
    assert load_record(only_run(tmp_path / "runs")).status == "failed"


def test_weights_that_drift_apart_are_found_before_they_are_saved(tmp_path, monkeypatch):
    advance = twin.Arm.advance

    def astray(self, tokens, targets, seed, step):
        advance(self, tokens, targets, seed, step)
        if step == 1 and os.environ.get("RANK") == "1":
            next(self.model.parameters()).data.mul_(1 + 1e-15)

    monkeypatch.setattr(twin.Arm, "advance", astray)
    assert train_on(2, write_config(tmp_path), tmp_path / "runs") == [1, 1]
    assert "hold different weights of arm 'ep' at step 3 of seed 0" in said(tmp_path / "runs", 0)
    assert not find_checkpoints(only_run(tmp_path / "runs") / "checkpoints")


def test_too_many_ranks_another_text_and_a_bad_config_are_refused_before_a_run_begins(tmp_path, monkeypatch):
    def refused(size: int, code: int, sentence: str, config: Path, *more: str) -> None:
        root = tmp_path / "refused"
        assert train_on(size, config, root, *more) == [code] * size
        assert sentence in said(root, 0)
        assert len(said(root, 0).splitlines()) == 1
        assert json.loads(said(root, 0, "out"))["status"] == "failed"
        for other in range(1, size):
            assert said(root, other, "out") == said(root, other) == ""
        assert not root.exists()

    refused(4, 2, "a batch of 3 cannot be split over 4 ranks", write_config(tmp_path, batch=3))
    config = write_config(tmp_path)
    refused(2, 2, "unknown key 'train.stesp'", config, "--set", "train.stesp=1")
    refused(2, 2, "puts 2 ranks on one GPU", config, "--set", "train.device=cuda:0")
    read = training.open_dataset

    def other_text(settings):
        data = read(settings)
        data.hashes["train"] = "0" * 64
        return data

    # Rank 0 reads its text elsewhere.
    monkeypatch.setattr(training, "open_dataset", other_text)
    refused(2, 65, "rank 1: the train data of this rank are not those of rank 0", config)


def test_the_base_is_trained_by_rank_0_alone_and_reaches_all(tmp_path):
    config = write_config(tmp_path, more='[base]\nsteps = 3\n[[arms]]\nname = "bp"\nrule = "bp"')
    assert train_on(2, config, tmp_path / "two") == [0, 0]
    assert len(list((tmp_path / "cache" / "bases").glob("*/*/result.json"))) == 1
    assert_starts_alike(only_run(tmp_path / "two"), alone(config, tmp_path / "one"))


def assert_starts_alike(found: Path, expected: Path) -> None:
    rows = [
        next(row for row in load_record(path).rows if row["key"] == "eval seed=0 step=0 arm=bp")
        for path in (found, expected)
    ]
    assert rows[0]["val_losses"] == pytest.approx(rows[1]["val_losses"], rel=1e-13)


def test_other_verbs_do_not_run_on_ranks(tmp_path):
    ended = codes(command_on_ranks(2, ["probe", "--json"], said_of(tmp_path / "verbs")))
    assert ended == [2, 2]
    assert "probe does not run over ranks" in said(tmp_path / "verbs", 0)
    assert said(tmp_path / "verbs", 1) == ""


def test_the_check_passes_and_a_wrong_weight_fails_it(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    root = tmp_path / "checks"

    def check() -> dict:
        both = "ranks.precisions=['fp64', 'fp32']"
        arguments = ["ranks", str(config), "--runs", str(root), "--json", "--set", both]
        assert codes(command_on_ranks(2, arguments, said_of(root))) == [0, 0]
        line = json.loads(said(root, 0, "out").splitlines()[-1])
        record = load_record(line["run"])
        assert line["passed"] == record.summary["passed"]
        return record.summary

    summary = check()
    assert summary["passed"]
    assert (summary["ranks"], summary["texts"], summary["batches"]) == (2, [2, 3], 2)
    arms = {(arm["arm"], arm["precision"]): arm for arm in summary["arms"]}
    assert set(arms) == {(arm, precision) for arm in ("ep", "bp") for precision in ("fp64", "fp32")}
    assert all(arm["worst_difference"] < 1e-13 for key, arm in arms.items() if key[1] == "fp64")
    assert all(1e-9 < arm["worst_difference"] < 1e-5 for key, arm in arms.items() if key[1] == "fp32")

    # The text in the middle is counted by both ranks.
    monkeypatch.setattr(
        group.Ranks, "rows", lambda self, batch: slice(0, 3) if self.rank == 0 else slice(2, batch)
    )
    summary = check()
    assert not summary["passed"]
    assert all(arm["worst_difference"] > 1e-2 for arm in summary["arms"])


def test_the_check_needs_ranks(tmp_path, capsys):
    from twinscope.cli import main

    with pytest.raises(SystemExit) as left:
        main(["ranks", str(write_config(tmp_path))])
    assert left.value.code == 2
    assert "start it with torchrun" in capsys.readouterr().err
