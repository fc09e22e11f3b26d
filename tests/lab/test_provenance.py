"""Provenance: complete, JSON, and about this process and this checkout only."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

import pytest

from twinscope.lab import provenance as provenance_module
from twinscope.lab.provenance import close, collect, cpu_model, git_state
from twinscope.lab.record import encode


def test_everything_a_result_depends_on_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMP_NUM_THREADS": "3", "ONEDNN_VERBOSE": "1", "TORCH_X": "y", "SECRET": "s"}.items():
        monkeypatch.setenv(name, value)
    compute = {"device": "cpu", "threads": 2, "precision": "fp32"}
    found = collect(seeds=[0, 1], data={"train": "ab"}, compute=compute)
    assert json.loads(encode(found)) == found
    assert (found["seeds"], found["data"], found["compute"]) == ([0, 1], {"train": "ab"}, compute)
    assert found["versions"]["python"] == platform.python_version()
    for package in ("twinscope", "torch", "numpy", "transformers"):
        assert found["versions"][package] == metadata.version(package)
    assert found["command"] == ["twinscope", *sys.argv[1:]]
    assert {k: found["environment"][k] for k in ("OMP_NUM_THREADS", "ONEDNN_VERBOSE", "TORCH_X")} == {
        "OMP_NUM_THREADS": "3",
        "ONEDNN_VERBOSE": "1",
        "TORCH_X": "y",
    }
    assert "SECRET" not in found["environment"]
    assert found["cpu"]["logical_cores"] == os.cpu_count()
    assert found["cpu"]["affinity"] == sorted(os.sched_getaffinity(0))
    assert len(found["load_at_start"]) == 3
    datetime.strptime(found["started"], "%Y-%m-%dT%H:%M:%SZ")
    for name in ("git", "cgroup_memory_limit_mib"):
        assert found[name] is not None or found[f"{name}_reason"]


def test_closing_adds_the_end_and_changes_nothing_else() -> None:
    opened = collect(seeds=[], data={}, compute={})
    before = json.dumps(opened)
    closed = close(opened)
    assert json.dumps(opened) == before
    assert set(closed) - set(opened) == {"finished", "load_at_end"}
    assert {name: closed[name] for name in opened} == opened
    assert closed["finished"] >= opened["started"]


def test_a_system_that_tells_little_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", silent)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    found = collect(seeds=[], data={}, compute={})
    assert found["load_at_start"] is None
    assert found["load_at_start_reason"]
    assert found["cpu"]["affinity"] is None
    assert found["cpu"]["affinity_reason"]
    assert found["cpu"]["logical_cores"] == 1


def test_the_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(tmp_path) == "Some CPU @ 2 GHz"
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\n")
    assert cpu_model(tmp_path) == (platform.processor() or platform.machine())
    assert cpu_model(tmp_path / "nowhere")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "module.py").write_text("1\n")
    git(folder, "init", "--quiet")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_git_gives_the_commit_and_whether_tracked_files_changed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = checkout / "package" / "module.py"
    assert git_state(module) == (None, "the package is not in a git checkout that tracks it")
    git(checkout, "add", "package")
    assert git_state(module) == (None, "git finds no commit around the package")
    git(checkout, "commit", "--quiet", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert git_state(module) == ({"commit": commit, "dirty": False}, "")
    (checkout / "notes").write_text("untracked")
    assert git_state(module) == ({"commit": commit, "dirty": False}, "")
    module.write_text("2\n")
    assert git_state(module) == ({"commit": commit, "dirty": True}, "")
    # Inside a hook, git's own variables point elsewhere.
    monkeypatch.setenv("GIT_DIR", str(checkout / "nowhere"))
    assert git_state(module) == ({"commit": commit, "dirty": True}, "")


def test_an_installed_package_is_not_taken_for_the_checkout_around_it(checkout: Path) -> None:
    git(checkout, "add", "package")
    git(checkout, "commit", "--quiet", "-m", "first")
    installed = checkout / "venv" / "module.py"
    installed.parent.mkdir()
    installed.write_text("1\n")
    assert git_state(installed) == (None, "the package is not in a git checkout that tracks it")


def test_without_git_or_a_checkout_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path / "nowhere" / "module.py")[0] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path / "module.py") == (None, "git is not installed")
    assert collect(seeds=[], data={}, compute={})["git_reason"] == "git is not installed"


def test_a_git_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance_module, "_GIT_SECONDS", 0.2)
    assert git_state(tmp_path / "module.py") == (None, "git did not answer within 0 s")
