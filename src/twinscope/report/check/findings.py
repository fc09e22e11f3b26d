"""What a parity check says in sentences: whether the streamed forward equals the library's, and its limits.

Covers the sentences; no drawing, no markup.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.wording import count, number, small, unfinished


def rows_of(run: RunData, kind: str) -> list[Row]:
    """Rows of a kind (``text | layer``) in the order of the record."""
    return [row for row in run.rows if row["kind"] == kind]


def outcome(run: RunData) -> str:
    """Whether the two agree, by how much they differ, and where first."""
    summary = run.summary
    if "passed" not in summary:
        return "Nothing has been compared."
    texts = len(rows_of(run, "text"))
    how = "the library's" if summary["method"] == "whole" else "the library's, layer by layer,"
    verb = "equals" if summary["passed"] else "does not equal"
    text = (
        f"The streamed forward {verb} {how} on {count(texts)} {'text' if texts == 1 else 'texts'} of "
        f"{count(summary['tokens'])} tokens"
    )
    if summary["bit_equal"]:
        text += ": final states agree to the last bit"
    else:
        text += (
            f": final states differ by {small(summary['hidden_difference'])} of their size at most "
            f"(tolerance {small(summary['hidden_tolerance'])})"
        )
    text += (
        f", losses of tokens by {small(summary['nll_difference'])} nats at most (tolerance "
        f"{small(summary['nll_tolerance'])})"
    )
    if summary["first_part"] is not None:
        text += f". The first part that differs is {summary['first_part']}"
    return f"{text}."


def label(run: RunData) -> str:
    """What the weights are, where they are not those that training left."""
    return {
        "random": "Random weights: parity of the computation, nothing about a trained model",
        "planted": "Planted weights: copies of modules were put in on purpose",
    }.get(run.summary.get("weights", ""), "")


def remarks(run: RunData) -> list[str]:
    """Memory, and what the check noted."""
    found = []
    if "peak_rss_mib" in run.summary:
        found.append(
            f"The process that streamed took {number(run.summary['peak_rss_mib'], 0)} MiB at its peak."
        )
    return found + [sentence(note) for note in run.summary.get("notes") or []]


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the check shows, the gravest first."""
    found = unfinished(run, "before the two were compared")
    summary = run.summary
    if "passed" not in summary:
        return found
    if not summary["passed"]:
        found.append("Parity does not hold: nothing read through the streamed forward can be relied on.")
    if summary["method"] == "layers":
        found.append(
            "The library ran one layer at a time, each on what the streamed forward gave: an error is seen "
            "in the layer that makes it, and is not carried on."
        )
    if all(row["source"] == "random" for row in rows_of(run, "text")):
        found.append("All texts are random tokens, for the folder has no tokenizer: no real text was read.")
    if summary["weights"] == "unstated":
        found.append("Nobody has stated what these weights are; parity does not depend on it.")
    return found


def facts(run: RunData) -> list[str]:
    """Model, weights and method."""
    summary = run.summary
    if "model" not in summary:
        return []
    return [
        PurePosixPath(summary["model"].replace("\\", "/")).name or summary["model"],
        f"{summary['weights']} weights",
        "library whole" if summary["method"] == "whole" else "library layer by layer",
    ]
