"""Progress with the time left on a terminal; silent in a pipe and when asked to be quiet.

Covers display only: nothing is computed from it and nothing is written to standard output.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar


class Progress:
    """One bar on standard error, from :meth:`update` to the end of the ``with`` block."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", style="dim"),
        )
        shown = sys.stderr.isatty() and not quiet
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not shown, transient=True)
        self._task = self._bar.add_task(title, total=None, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, status: str = "") -> None:
        """``done`` of ``total`` units are finished; ``status`` is a short text beside the bar."""
        self._bar.update(self._task, completed=done, total=total, status=status)
