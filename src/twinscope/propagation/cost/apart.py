"""A part of a cost run in a process of its own, so that it neither warms nor fills the one that times.

Covers starting a module of this package with a JSON subject on its standard input, and reading the JSON line
it ends with. What a failure means to the user is said by the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from twinscope.lab.errors import TwinscopeError


def run_apart(
    module: str, subject: BaseModel, timeout: float | None, late: Callable[[float], str], failed: str
) -> Any:
    """Run ``python -m module`` on ``subject`` and return the value of its last line; ``timeout`` in seconds.

    Raises:
        TwinscopeError: it took longer (``late`` makes the sentence), or it failed (``failed`` begins one).
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=subject.model_dump_json(exclude_unset=True),
            capture_output=True,
            text=True,
            timeout=timeout,
            process_group=0,  # a Ctrl-C stops the run at its next unit, not this in the middle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired as error:
        raise TwinscopeError(late(error.timeout)) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TwinscopeError(f"{failed} failed in its own process (exit {done.returncode}): {last}")
    return json.loads(done.stdout.splitlines()[-1])
