"""Sentences on how far a reuse run can be trusted: parity, seal, memory, and what its weights are.

Covers what the verbs scan, swap and neurons share; what each found is in its own findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.wording import number


def grounds(summary: Mapping[str, Any], sealed: str = "The plan was") -> list[str]:
    """Parity, when held-out text was opened, and memory as planned and as it was.

    ``sealed`` says what was sealed, with its verb.
    """
    found = []
    parity = summary.get("parity")
    if parity:
        verb = "equals" if parity["passed"] else "was not shown to equal"
        detail = parity["detail"].rstrip(".")
        found.append(f"The streamed forward {verb} the library's ({detail}).")
    if summary.get("sealed") and summary.get("heldout_opened_at"):
        found.append(
            f"{sealed} sealed as {summary['sealed'][:12]} before any activation was read; held-out "
            f"text was opened once, at {summary['heldout_opened_at']}."
        )
    if summary.get("peak_rss_mib") is not None and summary.get("planned_peak_mib") is not None:
        budget = (summary.get("memory") or {}).get("budget_mib")
        within = f", budget {number(budget, 0)}" if budget is not None else ""
        found.append(
            f"Peak memory {number(summary['peak_rss_mib'], 0)} MiB, planned "
            f"{number(summary['planned_peak_mib'], 0)}{within}."
        )
    return found


def weights_label(summary: Mapping[str, Any]) -> str:
    """What the weights are, where they are not those that training left."""
    if summary.get("planted"):
        return "Planted weights: copies of modules were put in on purpose"
    if summary.get("weights") == "random":
        return "Random weights: nothing here can rise above parity"
    return ""


def weights_cell(summary: Mapping[str, Any]) -> str:
    """The weights in one word, for a table."""
    return "planted" if summary.get("planted") else str(summary.get("weights", "–"))
