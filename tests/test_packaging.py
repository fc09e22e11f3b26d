"""What is installed is whole: the wheel holds every data file, and the version stands in one place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import twinscope

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built without a download by the setuptools of this environment."""
    pytest.importorskip("setuptools")
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "src" / "twinscope").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "setuptools" in done.stderr and "BackendUnavailable" in done.stderr:
        pytest.skip("no setuptools here to build with")
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src"
    own = {
        path.relative_to(package).as_posix()
        for path in (package / "twinscope").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert own - inside == set()
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_wheel_runs_from_elsewhere(wheel, tmp_path):
    """Unpacked into another folder, with the libraries of this environment, it finds its own files."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "TWINSCOPE_RUNS": str(tmp_path)}
    where = "import twinscope.report.page as page; print(page.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "installed"))
    command = [sys.executable, "-m", "twinscope", "--version"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PROJECT["version"]


def test_the_version_stands_in_one_place():
    assert re.search(
        rf"^version: {re.escape(PROJECT['version'])}$", (ROOT / "CITATION.cff").read_text(), re.M
    )
    assert re.search(rf"^## .*{re.escape(PROJECT['version'])}", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_importing_loads_no_torch_and_is_quick_to_name_everything():
    code = (
        "import sys, twinscope; assert 'torch' not in sys.modules and 'transformers' not in sys.modules; "
        "print(*sorted(twinscope.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(twinscope.__all__)
    assert all(hasattr(twinscope, name) for name in twinscope.__all__)
