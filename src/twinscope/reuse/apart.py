"""Work done in a process of its own, so that its memory is not that of a scan.

Covers the call of a verb or of a module, its JSON line, and turning its failure into the error it stands for.
What holds whole tensors, a whole corpus or the library's own model is done this way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from twinscope.lab.errors import ConfigError, DataError, Stopped, TwinscopeError


def call_apart(*arguments: str, timeout: float | None = None) -> dict[str, Any]:
    """Run ``twinscope ARGUMENTS --json`` and return its JSON line, with its exit code as ``code``.

    Sentences and progress go to standard error as they come.

    Raises:
        Stopped: it did not end within ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "twinscope", *arguments, "--json"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Stopped(f"twinscope {' '.join(arguments)} did not end within {timeout:.0f} s") from None
    return _answer(done, f"twinscope {arguments[0]}")


def compute_apart(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a module of this package with ``request`` as JSON on its standard input; its answer as JSON.

    The answer is its last line on standard output, with its exit code as ``code``, as for :func:`call_apart`.
    """
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    return _answer(done, module)


def required(done: dict[str, Any]) -> dict[str, Any]:
    """What :func:`call_apart` returned, if it went well.

    Raises:
        ConfigError, DataError, Stopped, TwinscopeError: it did not, by its exit code and with its sentence.
    """
    if done["code"] == 0:
        return done
    kinds = {2: ConfigError, 65: DataError, 75: Stopped}
    raise kinds.get(done["code"], TwinscopeError)(str(done.get("error", "a part of the work failed")))


def _answer(done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = {"status": "failed", "error": f"{name} ended with code {done.returncode}"}
    return {**found, "code": done.returncode}
