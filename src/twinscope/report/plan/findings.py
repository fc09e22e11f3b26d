"""What a plan says in sentences: what is fixed under which seal, and what a reader must know.

Covers the sentences; no drawing, no markup.
"""

from __future__ import annotations

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.wording import count, number, small, unfinished

#: Texts that share more than this are called alike in a warning.
_ALIKE = 0.1


def rows_of(run: RunData, kind: str) -> list[Row]:
    """Rows of a kind (``text | pair``) in the order of the record."""
    return [row for row in run.rows if row["kind"] == kind]


def outcome(run: RunData) -> str:
    """How much is fixed, under which seal, since when."""
    summary = run.summary
    if "sealed" not in summary:
        return "Nothing has been sealed."
    return (
        f"{count(len(summary['pairs']))} pairs, {count(summary['texts'])} texts of "
        f"{count(summary['tokens'])} tokens and every threshold are fixed under the seal "
        f"{summary['sealed'][:12]} since {summary['sealed_at']}, before any activation was read."
    )


def label(run: RunData) -> str:
    """What the weights are, where they are not those that training left."""
    model = run.summary.get("model") or {}
    if model.get("planted"):
        return "Planted weights: copies of modules were put in on purpose"
    return "Random weights: no scan of them can rise above parity" if model.get("weights") == "random" else ""


def remarks(run: RunData) -> list[str]:
    """How pairs were chosen, the texts, memory, and what was noted."""
    summary = run.summary
    if "sealed" not in summary:
        return []
    splits = [row["split"] for row in rows_of(run, "text")]
    return [
        f"Pairs: {sentence(summary['rule'])}",
        f"Texts: {count(splits.count('calibration'))} for calibration, {count(splits.count('heldout'))} held "
        f"out; BOS: {sentence(summary['bos'])} No two share more than {small(summary['largest_overlap'])} of "
        "the shorter one's runs of words.",
        f"Planned peak of memory: {number(summary['planned_peak_mib'], 0)} MiB.",
        *(sentence(note) for note in summary["notes"]),
    ]


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the plan can show."""
    found = unfinished(run, "before the plan was sealed")
    summary = run.summary
    if summary.get("largest_overlap", 0) > _ALIKE:
        found.append(
            f"Two texts share {small(summary['largest_overlap'])} of the shorter one's runs of words: "
            "held-out text that repeats calibration text is no test."
        )
    return found


def facts(run: RunData) -> list[str]:
    """Model, pairs and texts."""
    summary = run.summary
    model = summary.get("model")
    if not model:
        return []
    return [
        f"{model['family']}, {count(model['layers'])} layers of {count(model['width'])}",
        f"{model['weights']} weights",
        f"{count(len(summary['pairs']))} pairs",
        f"{count(summary['texts'])} texts",
    ]
