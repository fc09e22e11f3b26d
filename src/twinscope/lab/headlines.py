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


def probe(summary: Summary, rows: Rows) -> str:
    """Cores, memory and the fastest product; it says nothing about a model."""
    fastest = max(item["gflop_per_s"] for item in summary["matmul"])
    memory = min(summary["memory"]["total_mib"], summary["memory"]["limit_mib"] or float("inf"))
    return (
        f"{summary['cores']} cores, {memory:,.0f} MiB of memory, {fastest:.0f} GFLOP/s in fp32: "
        "capacity of this machine, no statement about any model"
    )


def cost(summary: Summary, rows: Rows) -> str:
    """Times and FLOPs of the numerator over the denominator, and whether the machine was quiet."""
    step, flops = summary["train_step_ratio"], summary["flops"]["analytic_ratio"]
    doubts = []
    if not summary["windows_agree"]:
        doubts.append("windows do not agree")
    if not summary["controlled"]:
        doubts.append("not controlled")
    return (
        f"{summary['numerator']}/{summary['denominator']}: training step {step['median']:.2f}× "
        f"[{step['low']:.2f}, {step['high']:.2f}], FLOPs {flops:.2f}×"
        f"{' (' + ', '.join(doubts) + ')' if doubts else ''}"
    )


def ranks(summary: Summary, rows: Rows) -> str:
    """Whether all ranks give what one gives, and how near, in each precision."""
    worst = {
        precision: max(arm["worst_difference"] for arm in summary["arms"] if arm["precision"] == precision)
        for precision in dict.fromkeys(arm["precision"] for arm in summary["arms"])
    }
    differs = ", ".join(f"{value:.1e} in {precision}" for precision, value in worst.items())
    verdict = "the gradient of one" if summary["passed"] else "not the gradient of one"
    return f"{summary['ranks']} ranks over {summary['backend']} give {verdict}: blocks differ by {differs}"


def plan(summary: Summary, rows: Rows) -> str:
    """What is fixed, under which seal."""
    return (
        f"{len(summary['pairs'])} pairs and {summary['texts']} texts of {summary['tokens']} tokens sealed as "
        f"{summary['sealed'][:12]}, planned peak {summary['planned_peak_mib']:.0f} MiB"
    )


def scan(summary: Summary, rows: Rows) -> str:
    """How many pairs reached which level, and the memory it took."""
    levels = [pair["level"] for pair in summary["pairs"]]
    counts = [f"{levels.count(level)} {level}" for level in dict.fromkeys(levels)]
    planted = ", copies planted" if summary["planted"] else ""
    return (
        f"{len(levels)} pairs ({summary['weights']} weights{planted}): {', '.join(counts)}; peak "
        f"{summary['peak_rss_mib']:.0f} MiB, planned {summary['planned_peak_mib']:.0f}"
    )


def neurons(summary: Summary, rows: Rows) -> str:
    """How many neurons have a duplicate, beyond which null, and the highest level of any."""
    planted = ", copies planted" if summary["planted"] else ""
    searched = sum(layer["neurons"] for layer in summary["layers"])
    return (
        f"{len(summary['duplicates'])} duplicated pairs among {searched} neurons of {len(summary['layers'])} "
        f"layers ({summary['weights']} weights{planted}): {summary['level']}; the null reaches a correlation "
        f"of {summary['null_max_correlation']:.2f}; peak {summary['peak_rss_mib']:.0f} MiB"
    )


def check(summary: Summary, rows: Rows) -> str:
    """Whether the streamed forward equals the library's, and by how much it differs."""
    where = "parity" if summary["passed"] else f"no parity, first in {summary['first_part']}"
    return (
        f"{where}: final states within {summary['hidden_difference']:.1e}, losses within "
        f"{summary['nll_difference']:.1e} nats ({summary['weights']} weights)"
    )


def swap(summary: Summary, rows: Rows) -> str:
    """What replacing does in either direction, or over every pair, and the level that it reaches."""
    planted = ", copies planted" if summary["planted"] else ""
    weights = f"{summary['weights']} weights{planted}"
    if summary["mode"] == "sweep":
        counts = [
            f"{sum(row.count('equivalent') for row in _off_diagonal(kind['verdict']))} of "
            f"{kind['pairs']} {kind['kind']} replacements"
            for kind in summary["kinds"]
        ]
        return f"within ±{summary['margin']:g} nats: {', '.join(counts)} ({weights}, exploratory)"
    found = [
        f"{item['direction']} {item['delta_nll']:+.4f} [{item['low']:+.4f}, {item['high']:+.4f}] "
        f"{item['verdict'] or 'no verdict'}"
        for item in summary["directions"]
    ]
    added = ", exploratory" if summary["pair"]["exploratory"] else ""
    return f"{'; '.join(found)}: {summary['level']} ({weights}{added})"


def _off_diagonal(matrix: list[list[Any]]) -> list[list[Any]]:
    return [[*row[:place], *row[place + 1 :]] for place, row in enumerate(matrix)]


#: Verb -> its headline from summary and rows; a verb without one is left out.
HEADLINES: dict[str, Callable[[Summary, Rows], str | None]] = {
    "train": train,
    "leak": leak,
    "check": check,
    "collapse": collapse,
    "cost": cost,
    "neurons": neurons,
    "plan": plan,
    "probe": probe,
    "ranks": ranks,
    "scan": scan,
    "swap": swap,
}
