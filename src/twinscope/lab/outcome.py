"""Carrying out a run's work so that every ending leaves a result and the right exit code.

Covers the mapping from errors to the status of ``result.json``. What the work is belongs to the verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from twinscope.lab.errors import Stopped, TwinscopeError
from twinscope.lab.provenance import close
from twinscope.lab.record import VERSION
from twinscope.lab.run import Run, stop_signals

#: What a verb's work returns: its summary and its claims.
Findings = tuple[dict[str, Any], list[dict[str, str]]]


def carry_out(
    run: Run,
    config: dict[str, Any],
    work: Callable[[], Findings],
    rows: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Do ``work`` with SIGINT and SIGTERM asking the run to stop, and write its result; returns the record.

    ``rows`` are those of the record, where they are not the journal's: a list that ``work`` fills.

    Raises:
        Stopped: a signal, a budget or a full disk ended it; the result says ``stopped``.
        TwinscopeError: it failed; the result says ``failed`` and why. Any other exception is a defect and
            leaves no result, so that the run counts as interrupted.
    """
    try:
        with stop_signals(run):
            summary, claims = work()
    except KeyboardInterrupt:
        error: TwinscopeError = Stopped("stopped at once by a second Ctrl-C")
    except TwinscopeError as raised:
        error = raised
    else:
        return _finish(run, config, summary, claims, {"status": "complete"}, rows)
    status = "stopped" if isinstance(error, Stopped) else "failed"
    # The disk may be the reason: then the sentence on the terminal is all there is.
    with suppress(TwinscopeError):
        _finish(run, config, {}, [], {"status": status, "reason": str(error)}, rows)
    if isinstance(error, Stopped) and "twinscope resume" not in str(error):
        raise Stopped(f"{error}; continue with: twinscope resume {run.path}") from error
    raise error


def _finish(
    run: Run,
    config: dict[str, Any],
    summary: dict[str, Any],
    claims: list[dict[str, str]],
    ending: dict[str, str],
    rows: Sequence[dict[str, Any]] | None,
) -> dict[str, Any]:
    provenance = close(run.provenance)
    run.update_provenance(provenance)
    record = {
        "schema": f"twinscope.{run.verb}/{VERSION}",
        **ending,
        "config": config,
        "provenance": run.provenance,
        "summary": summary,
        "rows": run.rows if rows is None else list(rows),
        "claims": claims,
    }
    run.finish(record)
    return record
