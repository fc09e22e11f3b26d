"""Parity: found where it is, refused where one value is off, and remembered for these weights alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gguf_files import weights, write_gguf
from twinscope.cli import main
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.record import load_record
from twinscope.models.parity import check as parity
from twinscope.models.parity import reference as parity_reference
from twinscope.models.parity.check import check_parity, choose_ids, find_parity
from twinscope.models.store.imports import import_model
from twinscope.models.store.synth import synthesize
from twinscope.models.streamed.model import StreamedLM, open_streamed


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(autouse=True)
def _cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(home / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(home / "runs"))


@pytest.fixture(scope="module")
def hybrid(home: Path) -> Path:
    return synthesize("qwen3.5-tiny", layout="released", out=home / "hybrid", quiet=True)


@pytest.fixture(scope="module")
def llama(home: Path) -> Path:
    return import_model(write_gguf(home / "llama.gguf", weights()), out=home / "llama", quiet=True)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the library here: a process of its own takes seconds to start, and one test has one."""

    def library(folder: Path, method: str, attention: str, given: dict[str, torch.Tensor], waiting: object):
        run = parity_reference.whole if method == "whole" else parity_reference.layer_by_layer
        with torch.no_grad():
            return run(folder, attention, given)

    monkeypatch.setattr(parity, "_library", library)


def test_a_check_is_a_run_whose_record_says_parity(
    hybrid: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["model", "check", str(hybrid), "--tokens", "12", "--texts", "2", "--threads", "1", "--json"])
    captured = capsys.readouterr()
    assert left.value.code == 0, captured.err
    line = json.loads(captured.out.splitlines()[-1])
    assert (line["status"], line["passed"], line["first_part"]) == ("complete", True, None)
    record = load_record(Path(line["run"]))
    summary = record.summary
    assert summary["weights"] == "random"
    assert summary["method"] == "whole"
    assert summary["hidden_difference"] <= 1e-6
    assert summary["nll_difference"] <= 1e-5
    assert [row["source"] for row in record.rows] == ["random", "random"]
    # The loss of random weights is about that of guessing among 512 tokens, and the same on both sides.
    for row in record.rows:
        assert row["nll_streamed"] == pytest.approx(row["nll_library"], abs=1e-5)
        assert row["nll_library"] == pytest.approx(6.24, abs=1.5)
    (claim,) = record.claims
    assert claim["level"] == "parity"
    assert "the weights are random" in claim["does_not_support"]
    receipt = find_parity(hybrid)
    assert receipt is not None
    assert (receipt.passed, receipt.hidden_difference) == (True, summary["hidden_difference"])
    with pytest.raises(SystemExit):
        main(["runs", "--json"])
    shown = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["verb"], run["status"]) for run in shown] == [("check", "complete")]
    assert shown[0]["headline"].startswith("parity: final states within")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["whole", "layers"])
@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_both_methods_find_parity(request: pytest.FixtureRequest, name: str, method: str) -> None:
    found = check_parity(request.getfixturevalue(name), texts=4, tokens=8, method=method)  # pyright: ignore
    assert (found.passed, found.method, found.first_part) == (True, method, None)
    assert found.hidden_difference <= 1e-6
    kinds = [text.kind for text in found.texts]
    # Half of the texts are real where there is a tokenizer.
    assert kinds == (["random"] * 4 if name == "hybrid" else ["real", "real", "random", "random"])
    layers = {"hybrid": 8, "llama": 2}[name]
    assert len(found.layers) == (layers if method == "layers" else 0)
    assert all(difference <= 1e-6 for difference in found.layers)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["whole", "layers"])
@pytest.mark.parametrize(
    ("site", "first"),
    [("layers.2.linear_attn", "layers.2"), ("layers.7.mlp", "layers.7 or the last norm"), ("head", "head")],
)
def test_a_forward_that_is_off_is_found_where_it_is_off(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, method: str, site: str, first: str
) -> None:
    """The streamed side gets one part wrong by a factor of 1.001: nothing that a look at the loss shows."""

    def off(folder: Path, **settings: object) -> StreamedLM:
        lm = open_streamed(folder, **settings)  # pyright: ignore[reportArgumentType]
        if site == "head":
            nll = lm.nll
            monkeypatch.setattr(lm, "nll", lambda ids: nll(ids) * 1.001)
        else:
            base = lm._built.base
            module = base.get_submodule(site)
            module.register_forward_hook(lambda _, args, out: out * 1.001)
        return lm

    monkeypatch.setattr(parity, "open_streamed", off)
    found = check_parity(hybrid, texts=1, tokens=8, method=method)  # pyright: ignore[reportArgumentType]
    assert (found.passed, found.first_part) == (False, first)
    if site == "layers.2.linear_attn":
        over = [number for number, difference in enumerate(found.layers) if difference > 1e-5]
        # Layer by layer only one differs; through the whole model all that follow do.
        assert over == ([3] if method == "layers" else [3, 4, 5, 6, 7])
    monkeypatch.undo()


@pytest.mark.usefixtures("in_process")
def test_a_receipt_is_for_these_weights_this_configuration_and_these_versions(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TWINSCOPE_CACHE", str(cache))
    assert find_parity(llama) is None
    made = check_parity(llama, texts=1, tokens=8)
    assert find_parity(llama) == made
    assert [path.suffix for path in (cache / "parity").iterdir()] == [".json"]
    # The same tensors in another place and other files are the same weights.
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((llama / "config.json").read_bytes())
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors, other / "model.safetensors", {"format": "pt", "more": "header"})
    assert find_parity(other) == made
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2}
    save_file(changed, other / "model.safetensors")
    assert find_parity(other) is None
    with monkeypatch.context() as patch:
        patch.setattr(parity, "_versions", lambda: {"torch": "0"})
        assert find_parity(llama) is None
    next((cache / "parity").iterdir()).write_text('{"passed": true}')
    assert find_parity(llama) is None


def test_without_memory_the_library_runs_layer_by_layer(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.zeros((1, 8), dtype=torch.long)
    with open_streamed(hybrid, budget_mib=None) as lm:
        assert parity._method(lm, "auto", ids) == "whole"
        monkeypatch.setattr(parity, "available_mib", lambda: 900.0)
        assert parity._method(lm, "auto", ids) == "layers"
        with pytest.raises(ConfigError, match=r"takes about 1,027 MiB in the library, 900 MiB are left"):
            parity._method(lm, "whole", ids)


def test_a_family_whose_layers_cannot_run_alone_is_named(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(DataError.__base__, match="layers of a 'gpt2' model cannot be run one at a time"):
        parity_reference.layer_by_layer(tmp_path, "sdpa", {"ids": torch.zeros((1, 4), dtype=torch.long)})


def test_texts_are_a_function_of_the_seed(hybrid: Path) -> None:
    first, _ = choose_ids(hybrid, 512, 3, 10, 0)
    again, _ = choose_ids(hybrid, 512, 2, 10, 0)
    other, _ = choose_ids(hybrid, 512, 3, 10, 1)
    assert torch.equal(first[:2], again)
    assert not torch.equal(first, other)
    assert int(first.min()) >= 0
    assert int(first.max()) < 512
    with pytest.raises(ConfigError, match="1 texts of 1 tokens show nothing"):
        choose_ids(hybrid, 512, 1, 1, 0)


@pytest.mark.usefixtures("in_process")
def test_a_stop_between_the_parts_leaves_the_weights_alone(hybrid: Path) -> None:
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in hybrid.iterdir()}

    def stop(done: int, total: int, what: str) -> None:
        if what == "streamed loss":
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        check_parity(hybrid, texts=1, tokens=8, progress=stop)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in hybrid.iterdir()} == before


def test_differences_that_are_no_numbers_count_as_different() -> None:
    good = torch.ones(3)
    assert parity._relative(good, good) == 0.0
    assert parity._relative(good * 1.5, good) == pytest.approx(0.5)
    for bad in (float("nan"), float("inf")):
        assert parity._relative(torch.tensor([1.0, bad, 1.0]), good) == sys.float_info.max
        assert parity._largest(torch.tensor([1.0, bad, 1.0]), good) == sys.float_info.max
    assert parity._relative(good, torch.zeros(3)) == sys.float_info.max


def test_a_reference_that_dies_is_a_sentence(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ids": torch.zeros((1, 4), dtype=torch.long)}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Exception, match=r"the library's forward of .*hybrid failed"):
        parity._library(hybrid, "whole", "sdpa", given, lambda: None)
    killed = hybrid.parent / "killed.sh"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(Stopped, match="was killed, as happens when memory runs out"):
        parity._library(hybrid, "whole", "sdpa", given, lambda: None)
