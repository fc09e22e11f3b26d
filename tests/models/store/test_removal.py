"""Removing a model: only what was meant, only when confirmed, and never without a line in the log."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from twinscope.lab.errors import ConfigError, TwinscopeError
from twinscope.models.store import removal
from twinscope.models.store.library import known_models, locked
from twinscope.models.store.origin import content_sha256, file_sha256, write_origin
from twinscope.models.store.removal import removal_log, remove_model

CONTENT = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    write_origin(folder, "random", "a test", {name: file_sha256(folder / name) for name in CONTENT})
    return folder


def log() -> list[dict]:
    return [json.loads(line) for line in removal_log().read_text().splitlines()]


def test_nothing_goes_without_the_confirmation(model: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(
        ConfigError, match=r"was not removed: .* add --yes-delete-weights to `twinscope model"
    ):
        remove_model("tiny", confirmed=False, quiet=True)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert not removal_log().exists()


def test_a_removal_is_logged_for_good(model: Path) -> None:
    shutil.copytree(model, model.parent / "other")
    digests = {f"tiny/{path.name}": file_sha256(path) for path in model.iterdir()}
    size = sum(path.stat().st_size for path in model.iterdir())
    gone = remove_model("tiny", confirmed=True, quiet=True)
    assert (gone.folder, gone.nbytes, gone.sha256) == (model, size, content_sha256(digests))
    assert [path.name for path in model.parent.iterdir()] == ["other"]
    first, second = log()
    assert (first["event"], second["event"]) == ("removing", "removed")
    assert (first["what"], first["weights"], first["source"]) == ("tiny", "random", "a test")
    assert (first["bytes"], first["sha256"]) == (size, gone.sha256)
    assert {name: file["sha256"] for name, file in first["files"].items()} == digests
    data = CONTENT["model.safetensors"]
    assert first["files"]["tiny/model.safetensors"] == {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert first["when"].endswith("Z")
    remove_model(model.parent / "other", confirmed=True, quiet=True)
    assert log()[:2] == [first, second]
    assert len(log()) == 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tinny", r"no model 'tinny' \(did you mean 'tiny'\?\)"),
        ("..", "is no model in"),
        ("", "is no model in"),
        (".making-tiny", "is no model in"),
        # Nothing here names a place outside the test's own folder: were the guard broken, it would be gone.
        ("../../outside", "is no model in"),
        ("tiny/../../models", "is no model in"),
        ("OUTSIDE", "is no model in"),
        ("linked", "is a link"),
    ],
)
def test_only_models_of_the_cache_can_go(model: Path, tmp_path: Path, what: str, words: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.safetensors").write_bytes(b"mine")
    (model.parent / "linked").symlink_to(outside)
    with pytest.raises(ConfigError, match=words):
        remove_model(str(outside) if what == "OUTSIDE" else what, confirmed=True, quiet=True)
    assert (outside / "model.safetensors").read_bytes() == b"mine"
    assert (model / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
    assert not removal_log().exists()


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_a_killed_removal_leaves_all_or_nothing_under_the_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(removal.os if at == "rename" else removal.shutil, at, killed)
    with pytest.raises(KeyboardInterrupt):
        remove_model("tiny", confirmed=True, quiet=True)
    monkeypatch.undo()
    monkeypatch.setenv("TWINSCOPE_CACHE", str(model.parent.parent))
    assert [entry["event"] for entry in log()] == ["removing"]
    if at == "rename":
        assert known_models() == ["tiny"]
        assert (model / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
    else:
        assert known_models() == []
        assert not model.exists()
    remove_model("tiny", confirmed=True, quiet=True)
    assert list(model.parent.iterdir()) == []
    assert [entry["event"] for entry in log()] == ["removing", "removing", "removed"]


def test_what_an_unfinished_model_left_can_go(model: Path) -> None:
    left = model.parent / ".making-half"
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"shard")
    remove_model("half", confirmed=True, quiet=True)
    assert [path.name for path in model.parent.iterdir()] == ["tiny"]
    assert list(log()[0]["files"]) == [".making-half/model-00001-of-00002.safetensors"]


def test_a_model_that_is_being_made_stays(model: Path) -> None:
    with locked(model), pytest.raises(ConfigError, match="another process makes or removes"):
        remove_model("tiny", confirmed=True, quiet=True)
    assert known_models() == ["tiny"]
    assert not removal_log().exists()


def test_a_log_that_cannot_be_written_keeps_the_model(model: Path) -> None:
    removal_log().mkdir()
    with pytest.raises(TwinscopeError, match=r"removed\.jsonl"):
        remove_model("tiny", confirmed=True, quiet=True)
    assert (model / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
