"""What a scan says in sentences: how far pairs came, what they had to beat, and what limits the answer.

Covers the sentences, and the comparisons that figures and tables are made of; no drawing, no markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.trust import grounds, weights_label
from twinscope.report.wording import arrow, contended, count, listed, small, unfinished

#: Kind of a comparison -> the group it is shown in, and what its pairs are called.
GROUPS = {
    "attention": "attention",
    "linear_attention": "linear attention",
    "mlp": "MLP",
    "q_norm": "q and k norm",
    "k_norm": "q and k norm",
}
SELF = "self"


@dataclass(frozen=True)
class Direction:
    """One comparison of a pair: rows of all its texts, and the most that each distance may be."""

    pair: str
    group: str
    reference: str
    substitute: str
    rows: tuple[Row, ...]
    limits: Mapping[str, float]

    @property
    def label(self) -> str:
        """``3 ← 7``: module 7 in the place of module 3, on the inputs of 3; ``4 q ← k`` within a layer."""
        return arrow(self.reference, self.substitute)

    def values(self, measure: str, split: str | None = None) -> list[float]:
        """The measure on every text that has it."""
        return [
            row[measure] for row in self.rows if split in (None, row["split"]) and row[measure] is not None
        ]

    def nulls(self, measure: str) -> list[float]:
        """The measure of every null on every text, the module itself aside."""
        return [
            null[measure]
            for row in self.rows
            for null in row["nulls"]
            if null["null"] != SELF and null[measure] is not None
        ]


def directions(run: RunData) -> list[Direction]:
    """Every comparison that has rows, in the order of the record."""
    limits: dict[tuple[str, str], dict[str, float]] = {}
    for pair in run.summary.get("pairs") or []:
        for part in pair.get("directions") or []:
            found = {item["measure"]: item["most"] for item in part.get("limits") or []}
            limits[pair["id"], part["reference"]] = found
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        grouped.setdefault((row["pair"], row["reference"]), []).append(row)
    return [
        Direction(
            pair,
            GROUPS[rows[0]["kind"]],
            reference,
            rows[0]["substitute"],
            tuple(rows),
            limits.get((pair, reference), {}),
        )
        for (pair, reference), rows in grouped.items()
    ]


def outcome(run: RunData) -> str:
    """How many pairs are candidates, and how far the closest is from one."""
    pairs = run.summary.get("pairs") or []
    if not pairs:
        return "No pair has been judged."
    levels = [pair["level"] for pair in pairs]
    candidates = [pair for pair in pairs if pair["level"] == "candidate"]
    names = [f"{pair['left']} with {pair['right']}" for pair in candidates[:4]]
    more = f" and {count(len(candidates) - 4)} more" if len(candidates) > 4 else ""
    text = (
        f"{_of(len(candidates), len(pairs))} computed the same function on all texts, both inputs and "
        f"beyond every null{f': {listed(names)}{more}' if names else ''}"
    )
    others = [level for level in levels if level != "candidate"]
    if len(set(others)) == 1:
        rest = "It" if len(pairs) == 1 else f"The other {count(len(others))}" if candidates else "They"
        text += f". {rest} {'ends' if len(others) == 1 else 'end'} at {others[0]}"
    elif others:
        counts = [f"{count(others.count(level))} at {level}" for level in dict.fromkeys(others)]
        text += f". {'The others end' if candidates else 'They end'}: {listed(counts)}"
    if not candidates:
        closest = _closest(directions(run))
        if closest is not None:
            text += f". {closest}"
    return f"{text}."


def remarks(run: RunData) -> list[str]:
    """Parity, when held-out text was opened, memory as planned and as it was, and what the plan noted."""
    summary = run.summary
    return grounds(summary) + [sentence(note) for note in summary.get("notes") or []]


def label(run: RunData) -> str:
    """What the weights are, where they are not those that training left."""
    return weights_label(run.summary)


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the scan shows, the gravest first."""
    found = unfinished(run, "before pairs are judged")
    summary = run.summary
    parity = summary.get("parity")
    if parity and not parity["passed"]:
        found.append("Parity was not shown, so no pair can be a candidate.")
    faults = [pair["id"] for pair in summary.get("pairs") or [] if pair.get("failed_on") == "instrument"]
    if faults:
        found.append(f"The instrument was at fault for {listed(faults[:4])}: a module differs from itself.")
    added = [pair["id"] for pair in summary.get("pairs") or [] if pair.get("exploratory")]
    if added:
        found.append(
            f"Added after the plan was sealed, and exploratory: {listed(added[:6])}"
            f"{f' and {count(len(added) - 6)} more' if len(added) > 6 else ''}."
        )
    texts = summary.get("texts")
    if texts:
        found.append(
            f"{count(sum(texts.values()))} texts of {count(summary['tokens'])} tokens: what holds on all of "
            "them is an effect size against nulls, not a probability; no p-value over so few is small."
        )
    return [*found, *contended(run, "Distances")]


def facts(run: RunData) -> list[str]:
    """Model, pairs and texts."""
    summary = run.summary
    if "model" not in summary:
        return []
    texts = summary.get("texts") or {}
    return [
        str(summary["model"]),
        f"{count(len(summary.get('pairs') or []))} pairs",
        f"{count(texts.get('calibration', 0))} + {count(texts.get('heldout', 0))} texts",
    ]


def _closest(found: Sequence[Direction]) -> str | None:
    """The comparison with the smallest largest error: what it is, and what would have counted."""
    known = [part for part in found if part.values("branch_error") and part.nulls("branch_error")]
    if not known:
        return None
    best = min(known, key=lambda part: max(part.values("branch_error")))
    low, high = min(best.values("branch_error")), max(best.values("branch_error"))
    limit = best.limits.get("branch_error")
    most = f"; at most {small(limit)} would count" if limit is not None else ""
    return (
        f"The closest, {best.substitute} in the place of {best.reference}, has a branch error of "
        f"{small(low)} to {small(high)} over its texts, where no update at all gives 1 and the nearest null "
        f"{small(min(best.nulls('branch_error')))}{most}"
    )


def _of(part: int, whole: int) -> str:
    if part == 0:
        return f"None of {count(whole)} pairs"
    if part == whole:
        return f"All {count(whole)} pairs" if whole > 1 else "The one pair"
    return f"{count(part)} of {count(whole)} pairs"
