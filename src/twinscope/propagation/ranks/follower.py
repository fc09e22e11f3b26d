"""What every rank but 0 has in place of a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Follower:
    """The run of rank 0 as the other ranks know it: they can be asked to stop, and write nothing."""

    def __init__(self, path: Path, verb: str) -> None:
        self.path = path  # on the machine of rank 0
        self.verb = verb
        self.stop_requested: str | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """The row is in the journal of rank 0, which measured the same."""

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop at their next safe point; the first reason is kept."""
        if self.stop_requested is None:
            self.stop_requested = reason
