"""Verbs of the command run in a process of their own, so that their memory is not that of a scan.

Covers the call, its JSON line, and turning its failure into the error it stands for. What holds whole
tensors, a whole corpus or the library's own model is done this way.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = {"status": "failed", "error": f"twinscope {arguments[0]} ended with code {done.returncode}"}
    return {**found, "code": done.returncode}


def required(done: dict[str, Any]) -> dict[str, Any]:
    """What :func:`call_apart` returned, if it went well.

    Raises:
        ConfigError, DataError, Stopped, TwinscopeError: it did not, by its exit code and with its sentence.
    """
    if done["code"] == 0:
        return done
    kinds = {2: ConfigError, 65: DataError, 75: Stopped}
    raise kinds.get(done["code"], TwinscopeError)(str(done.get("error", "a part of the work failed")))
