"""What a result depends on besides its configuration: software, machine, load, code, seeds, data.

Covers collecting it at the start of a run and closing it at the end. It names no framework: device,
threads and precision come from the caller, versions from the installed metadata.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from twinscope.lab.budget import cgroup_limit_mib

_PACKAGES = (
    "twinscope",
    "torch",
    "numpy",
    "scipy",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "pydantic",
)
#: Environment variables that change results or their rounding: threads, dispatch, kernels.
_NUMERIC_VARIABLES = re.compile(
    r"OMP_.*|MKL_.*|KMP_.*|OPENBLAS_.*|ATEN_CPU_CAPABILITY|ONEDNN_.*|DNNL_.*|TORCH_.*|PYTORCH_.*|"
    r"CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|CUDA_VISIBLE_DEVICES"
)
_GIT_SECONDS = 5.0


def collect(*, seeds: Sequence[int], data: Mapping[str, str], compute: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance at the start of a run, as JSON values.

    ``data`` maps names to hashes; ``compute`` is the caller's account of device, threads and precision.
    Times are UTC, memory is in MiB, the load average is over 1, 5 and 15 minutes. A value that the
    machine does not give is null, with a reason beside it.
    """
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "started": utc_now(),
        "command": ["twinscope", *sys.argv[1:]],
        "versions": _versions(),
        "platform": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "logical_cores": os.cpu_count() or 1,
            **_known("affinity", affinity, "this system does not tell"),
        },
        **_known("cgroup_memory_limit_mib", cgroup_limit_mib(), "no control group limits this process"),
        "compute": dict(compute),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _NUMERIC_VARIABLES.fullmatch(k)},
        **_git(),
        "seeds": list(seeds),
        "data": dict(data),
        **_load("load_at_start"),
    }


def close(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``provenance`` with the finish time and the load average at the end."""
    return {**provenance, "finished": utc_now(), **_load("load_at_end")}


def utc_now() -> str:
    """The time in UTC to the second, such as ``2026-11-30T14:15:30Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's model name, or the architecture where no name is given."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def git_state(file: Path) -> tuple[dict[str, Any] | None, str]:
    """``({"commit", "dirty"}, "")`` of the checkout that tracks ``file``, or None and the reason.

    A file that merely lies inside somebody's checkout, as an installed package may, is not tracked
    there, and that checkout's commit would say nothing about it. Never raises.
    """
    try:
        if not _git_output(file.parent, "ls-files", "--", file.name):
            return None, "the package is not in a git checkout that tracks it"
        commit = _git_output(file.parent, "rev-parse", "--verify", "HEAD").strip()
        changes = _git_output(file.parent, "status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        return None, "git is not installed"
    except subprocess.TimeoutExpired:
        return None, f"git did not answer within {_GIT_SECONDS:.0f} s"
    except (OSError, subprocess.CalledProcessError):
        return None, "git finds no commit around the package"
    return {"commit": commit, "dirty": bool(changes.strip())}, ""


def _git_output(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_SECONDS,
        stdin=subprocess.DEVNULL,
        # Variables such as GIT_DIR, set inside hooks, would answer for another checkout; and a status
        # query must not take the index lock away from the user's own git.
        env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_OPTIONAL_LOCKS": "0"},
    ).stdout


def _git() -> dict[str, Any]:
    state, reason = git_state(Path(__file__).resolve())
    return _known("git", state, reason)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _load(name: str) -> dict[str, Any]:
    try:
        load: list[float] | None = [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        load = None
    return _known(name, load, "this system gives no load average")


def _known(name: str, value: Any, reason: str) -> dict[str, Any]:
    return {name: value} if value is not None else {name: None, f"{name}_reason": reason}
