"""The one line that says what came out of a complete run, verb by verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Summary = dict[str, Any]
Rows = Sequence[dict[str, Any]]


def train(summary: Summary, rows: Rows) -> str:
    """Held-out loss of every arm."""
    losses = {name: arm["val_loss"] for name, arm in summary["arms"].items()}
    shown = [f"{name} {'none' if loss is None else format(loss, '.3f')}" for name, loss in losses.items()]
    return f"held-out nats per token: {', '.join(shown)}"


def leak(summary: Summary, rows: Rows) -> str | None:
    """Range of the leak at gain 1; None where no block has one."""
    at_one = [row["projection"] for row in rows if row["gain"] == row["beta_sign"] == 1]
    known = [value for value in at_one if value is not None]
    if not known:
        return None
    span = f"{min(known):+.3f} to {max(known):+.3f}"
    return f"leak at gain 1: projection {span} over {len(at_one)} blocks"


def collapse(summary: Summary, rows: Rows) -> str:
    """The slope with its interval, or why there is none."""
    if summary["slope"] is None:
        return f"no slope: {summary['slope_reason']}"
    low, high = summary["slope_low"], summary["slope_high"]
    span = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    return (
        f"slope {summary['slope']:.3f}{span} over {summary['n_points']} blocks of {summary['n_models']} "
        f"models; gain_low times ratio {summary['constant']:.2f} unit roundoffs"
    )


#: Verb -> its headline from summary and rows; a verb without one is left out.
HEADLINES: dict[str, Callable[[Summary, Rows], str | None]] = {
    "train": train,
    "leak": leak,
    "collapse": collapse,
}
