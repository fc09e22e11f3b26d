"""The command line as its users meet it: sentences, exit codes, the JSON line, and what an import costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twinscope.cli import main
from twinscope.lab.errors import Stopped
from twinscope.lab.record import load_record

WORDS = "the state of the union is strong and the people of the nation know it well"


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), size=900)))
    path = tmp_path / "tiny.toml"
    path.write_text(
        f"""
        name = "tiny"
        [model]
        layers = 2
        width = 16
        heads = 2
        context = 12
        [data]
        corpus = "{tmp_path / "text.txt"}"
        batch = 3
        [train]
        steps = 6
        eval_every = 3
        eval_batches = 2
        gate_every = 3
        checkpoint_every = 3
        threads = 1
        """
    )
    return path


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = left.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def refused(capsys, code: int, pattern: str, *arguments: str) -> None:
    found, out, err = call(capsys, *arguments)
    assert found == code, err
    assert out == ""
    # A run that had begun says where it is before the sentence.
    sentences = [line for line in err.splitlines() if not line.startswith("run: ")]
    assert len(sentences) == 1, err
    assert sentences[0].startswith("twinscope: ")
    assert pattern in err
    assert "Traceback" not in err


def test_train_leaves_a_record_a_report_and_a_json_line(tiny, capsys):
    code, out, err = call(capsys, "train", tiny, "--json", "--set", "train.steps=4")
    assert code == 0
    assert err.startswith("run: ")
    line = json.loads(out.splitlines()[-1])
    run = Path(line["run"])
    assert line["status"] == "complete"
    assert run.is_absolute()
    record = load_record(run)
    assert record.summary["arms"]["ep"]["steps"] == 4
    assert record.config["train"]["steps"] == 4
    assert (run / "report.html").stat().st_size > 10_000
    assert {"config.toml", "provenance.json", "journal.jsonl", "result.json"} <= {
        p.name for p in run.iterdir()
    }
    code, out, _ = call(capsys, "runs", "--json")
    assert json.loads(out)["runs"][0]["status"] == "complete"
    code, out, _ = call(capsys, "runs")
    assert "tiny" in out
    refused(capsys, 2, "nothing to resume", "resume", run)
    page = tiny.parent / "page.html"
    code, out, _ = call(capsys, "report", run, run, "--out", page)
    assert code == 0
    assert page.exists()


def test_demo_runs_from_its_embedded_settings(tiny, capsys):
    code, out, err = call(capsys, "demo", "--steps", "1", "--quiet", "--json")
    assert (code, err) == (0, "")
    record = load_record(Path(json.loads(out)["run"]))
    assert record.config["data"]["corpus"] == "sotu"
    assert record.summary["arms"]["bp"]["val_loss"] < 4.8


@pytest.mark.parametrize(
    ("override", "code", "pattern"),
    [
        ("ep.beta=-1", 2, "'ep.beta' = -1"),
        ("ep.rounds=0", 2, "kept as a control only"),
        ("optimizer.leraning_rate=1", 2, "unknown key 'optimizer.leraning_rate'"),
        ("trian.steps=1", 2, "did you mean 'train'"),
        ("train.steps", 2, "key.subkey=value"),
        ("data.corpus=/nowhere/text.txt", 65, "/nowhere/text.txt"),
        ("model.context=100000", 65, "context of 100000"),
        ("model.source=run:/nowhere", 2, "no checkpoint in"),
        ("train.device=cuda:7", 2, "cannot be used here"),
        ("data.tokenizer=/nowhere.json", 65, "/nowhere.json"),
    ],
)
def test_bad_configs_are_a_sentence(tiny, capsys, override, code, pattern):
    if override.startswith("model.source"):
        tiny.write_text(tiny.read_text().replace("layers = 2\n", "").replace("width = 16\n", "")
                        .replace("heads = 2\n", "").replace("context = 12\n", ""))  # fmt: skip
    refused(capsys, code, pattern, "train", tiny, "--set", override)


def test_bad_texts_are_a_sentence(tiny, capsys):
    text = tiny.parent / "text.txt"
    text.write_text("")
    refused(capsys, 65, "text.txt", "train", tiny)
    text.write_bytes(b"\xff\xfe\x00")
    refused(capsys, 65, "text.txt", "train", tiny)
    np.array([0, 1, 2, 9] * 200, dtype=np.uint16).tofile(tiny.parent / "ids.bin")
    ids = f"data.corpus={tiny.parent / 'ids.bin'}"
    refused(capsys, 65, "9", "train", tiny, "--set", ids, "--set", "data.vocab=5")


def test_usage_errors_are_a_sentence(tiny, capsys):
    refused(capsys, 2, "no verb 'trian' (did you mean 'train'?)", "trian")
    refused(capsys, 2, "see twinscope train --help", "train")
    refused(capsys, 2, "no config file at /nowhere.toml", "train", "/nowhere.toml")
    refused(capsys, 2, "there is no run at", "resume", "/nowhere")
    refused(capsys, 2, "/nowhere", "report", "/nowhere")
    broken = tiny.parent / "broken.toml"
    broken.write_text("name = ")
    refused(capsys, 2, "not valid TOML", "train", broken)


def test_an_error_still_ends_in_the_json_line(tiny, capsys):
    code, out, err = call(capsys, "train", tiny, "--json", "--set", "data.corpus=/nowhere")
    line = json.loads(out.splitlines()[-1])
    assert code == 65
    assert line["status"] == "failed"
    assert line["error"] in err


def test_a_usage_error_ends_in_the_json_line_too(capsys):
    code, out, _ = call(capsys, "train", "--json")
    assert code == 2
    assert json.loads(out)["status"] == "failed"


@pytest.mark.parametrize(
    ("error", "code", "status", "words"),
    [
        (KeyboardInterrupt(), 75, "stopped", "interrupted; start it again"),
        (MemoryError(), 75, "failed", "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            75,
            "failed",
            "out of memory",
        ),
    ],
)
def test_interrupts_and_lack_of_memory_are_a_sentence(tiny, capsys, monkeypatch, error, code, status, words):
    def fails(*_):
        raise error

    monkeypatch.setattr("twinscope.propagation.train.prepare", fails)
    found, out, err = call(capsys, "train", tiny, "--json")
    assert found == code
    assert json.loads(out)["status"] == status
    assert words in err


def test_a_report_that_cannot_be_written_does_not_undo_the_run(tiny, capsys, monkeypatch):
    def full(*_):
        raise Stopped("no space left to write report.html")

    monkeypatch.setattr("twinscope.report.page.render", full)
    code, out, err = call(capsys, "train", tiny, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["status"] == "complete"
    assert "the run is complete, its report is not" in err


def test_an_odd_folder_does_not_break_the_list(tiny, capsys):
    (tiny.parent / "runs" / "99999999T999999Z-train-x").mkdir(parents=True)
    code, out, _ = call(capsys, "runs")
    assert code == 0
    assert "99999999T999999Z-train-x" in out


def test_a_defect_is_told_from_bad_input(tiny, capsys, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("left in")

    monkeypatch.setattr("twinscope.propagation.train.summarize", broken)
    code, _, err = call(capsys, "train", tiny)
    assert code == 1
    assert "a defect of twinscope" in err
    assert "--debug" in err


def test_import_is_light():
    program = (
        "import sys, twinscope; assert 'torch' not in sys.modules; "
        "import twinscope.cli; assert 'torch' not in sys.modules; "
        "import twinscope.report.page; assert 'torch' not in sys.modules; "
        "from twinscope import EPSettings, GPTConfig, Decoder, build_gpt, ep_gradient, bp_gradient, load"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", program], check=True)


def test_help_of_every_verb_teaches(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for verb in ("demo", "train", "resume", "runs", "report"):
        assert verb in out
        code, text, _ = call(capsys, verb, "--help")
        assert code == 0
        assert len(text.splitlines()) > 8
