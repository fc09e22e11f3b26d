"""What a swap says in sentences: how replacing changes the loss in either direction, or over every pair.

Covers the sentences of both modes, and the names that figures and tables share; no drawing, no markup.
Losses are nats per token; a change is the loss with the replacement less the loss without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.trust import grounds, weights_label
from twinscope.report.wording import (
    arrow,
    compact,
    contended,
    count,
    interval,
    listed,
    number,
    short_site,
    unfinished,
)

#: Kind of a site -> what modules of it are called.
KINDS = {
    "attention": "attention",
    "linear_attention": "linear attention",
    "mlp": "MLP",
    "q_norm": "q norm",
    "k_norm": "k norm",
}
VERDICTS = ("equivalent", "inconclusive", "underpowered", "different")
#: Null -> (its name on a lane, its name in a sentence).
_NULLS = {"zero": ("left out", "no update at all"), "mean": ("mean", "the mean update")}
SELF = "self"


@dataclass(frozen=True)
class Entry:
    """One off-diagonal entry of a sweep's matrix: the row's site replaced by the column's."""

    replaced: str
    by: str
    delta_nll: float
    low: float
    high: float
    low_all: float
    high_all: float
    p_holm: float
    verdict: str | None
    verdict_alone: str | None
    needed: int


def is_sweep(run: RunData) -> bool:
    """Whether the run replaced every site by every other, as far as the record or its rows tell."""
    mode = run.summary.get("mode") or (run.rows[0]["mode"] if run.rows else "pair")
    return mode == "sweep"


def directions(run: RunData) -> list[Mapping[str, Any]]:
    """The directions of the pair as the summary has them."""
    return list(run.summary.get("directions") or [])


def rows_of(run: RunData, direction: str, split: str) -> list[Row]:
    """The rows of one direction and split."""
    return [row for row in run.rows if row.get("direction") == direction and row["split"] == split]


def kinds(run: RunData) -> list[Mapping[str, Any]]:
    """The matrices of a sweep, one for each kind of site."""
    return list(run.summary.get("kinds") or [])


def entries(kind: Mapping[str, Any]) -> Iterator[Entry]:
    """Every replacement of a matrix, row by row, the diagonal aside."""
    sites, keys = kind["sites"], [field.name for field in fields(Entry)][2:]
    for i, replaced in enumerate(sites):
        for j, by in enumerate(sites):
            if i != j:
                yield Entry(replaced, by, *(kind[key][i][j] for key in keys))


def kind_name(kind: str) -> str:
    """What modules of a kind are called."""
    return KINDS.get(kind) or kind


def title(direction: Mapping[str, Any], kind: str) -> str:
    """``MLP 3 ← 4``, ``norm 4 q ← k``."""
    name = "norm" if kind.endswith("_norm") else kind_name(kind)
    return f"{name[:1].upper()}{name[1:]} {arrow(direction['replaced'], direction['by'])}"


def null_name(null: str, long: bool = False) -> str:
    """A null as a lane or a sentence names it: ``left out``, ``mean``, ``itself``, ``other 7``."""
    if null == SELF:
        return "the module itself" if long else "itself"
    if null in _NULLS:
        return _NULLS[null][long]
    site = null.removeprefix("other.")
    layer, norm = short_site(site)
    return site if long else f"other {layer}{f' {norm}' if norm else ''}"


def outcome(run: RunData) -> str:
    """The verdict on each direction, or the counts of a sweep, and the level reached."""
    if is_sweep(run):
        return _swept(run)
    found = directions(run)
    if not found:
        return "No replacement has been judged."
    summary, margin = run.summary, f"±{run.summary['margin']:g}"
    parts = []
    for place, part in enumerate(found):
        change = interval(part["delta_nll"], part["low"], part["high"])
        unit = " nats per token" if place == 0 else ""
        parts.append(
            f"With {part['by']} in the place of {part['replaced']} the held-out loss changes by "
            f"{change}{unit}: {_verdict(part, margin if place == 0 else '')}"
        )
    passed = (summary.get("pair") or {}).get("passed")
    both = "Both directions keep the loss" if passed else "The pair does not pass in both directions"
    return f"{'. '.join(parts)}. {both}; it ends at {summary['level']}."


def remarks(run: RunData) -> list[str]:
    """Why this pair, parity, the seal, memory, what a replacement would save, how bytes are counted."""
    summary, found = run.summary, []
    pair = summary.get("pair")
    if pair:
        found.append(sentence(f"The pair: {pair['chosen']}"))
        if pair.get("scan_reason"):
            found.append(sentence(f"The scan of it: {pair['scan_reason']}"))
    found += grounds(summary, "Sites, texts, margin and nulls were")
    saved = [part["saved"] for part in directions(run) if part.get("saved")]
    if saved:
        sizes = list(
            dict.fromkeys(
                f"{count(part['parameters'])} parameters ({number(part['bytes'] / 2**20, 1)} MiB)"
                for part in saved
            )
        )
        found.append(f"A replacement would save {listed(sizes)}, which counts for nothing here.")
    if summary.get("texts_from"):
        found.append(sentence(f"Texts: {summary['texts_from']}; BOS: {summary['bos']}"))
    if summary.get("bytes_counted"):
        found.append(sentence(f"Bytes: {summary['bytes_counted']}"))
    return found + [sentence(note) for note in summary.get("notes") or []]


def label(run: RunData) -> str:
    """What the weights are, where training did not leave them, and that a pair was named by hand."""
    found = weights_label(run.summary)
    if found:
        return found
    if (run.summary.get("pair") or {}).get("exploratory"):
        return "Exploratory: the pair was named by hand, so nothing here can rise above parity"
    if is_sweep(run) and run.summary:
        return "Exploratory: every pair was tried, so nothing here can rise above parity"
    return ""


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the swap shows, the gravest first."""
    found = unfinished(run, "before a replacement is judged")
    summary = run.summary
    if (summary.get("parity") or {"passed": True})["passed"] is False:
        found.append("Parity was not shown, so nothing here can rise above the level before it.")
    faults = [part["direction"] for part in directions(run) if part["verdict"] is None]
    if faults:
        found.append(
            f"The instrument was at fault for {listed(faults)}: a module in its own place changes the loss, "
            "so there is no verdict."
        )
    short = [part for part in directions(run) if part["texts"] < part["needed"]]
    if short:
        most = max(part["needed"] for part in short)
        found.append(
            f"{count(short[0]['texts'])} texts are too few for a margin of {summary['margin']:g}: by "
            f"the spread on calibration text, {count(most)} are needed."
        )
    every = [entry for kind in kinds(run) for entry in entries(kind)]
    lacking = [entry.needed for entry in every if entry.verdict == "underpowered"]
    if lacking:
        found.append(
            f"For {count(len(lacking))} of {count(len(every))} replacements the texts are too few, "
            f"corrected for their number; half of these need at most {count(int(median(lacking)))}."
        )
    if any(entry.verdict is None for entry in every):
        found.append("The instrument was at fault: a module in its own place changes the loss of some sites.")
    texts = (summary.get("texts") or {}).get("heldout")
    if texts and texts < 16:
        found.append(
            f"The intervals rest on {count(texts)} texts and on differences that are close to normal: "
            "where a few texts lose far more than the rest, they are too short."
        )
    return [*found, *contended(run, "Losses")]


def facts(run: RunData) -> list[str]:
    """Model, mode and texts."""
    summary = run.summary
    if "model" not in summary:
        return []
    texts = summary.get("texts") or {}
    found = [str(summary["model"]), "sweep" if is_sweep(run) else "one pair"]
    if texts:
        splits = (("calibration", "calibration"), ("heldout", "held-out"))
        named = listed([f"{count(texts[key])} {name}" for key, name in splits if key in texts])
        found.append(f"{named} texts of {count(summary['tokens'])} tokens")
    return found


def _verdict(part: Mapping[str, Any], margin: str) -> str:
    word = part["verdict"] or "no verdict"
    if word == "underpowered":
        word += f", {count(part['texts'])} of {count(part['needed'])} texts needed"
    return f"{word} for a margin of {margin}" if margin else word


def _swept(run: RunData) -> str:
    found = kinds(run)
    if not found:
        return "No replacement has been judged."
    parts = []
    for place, kind in enumerate(found):
        every = list(entries(kind))
        counts = {word: sum(entry.verdict == word for entry in every) for word in VERDICTS}
        within, open_ = counts["equivalent"], counts["inconclusive"] + counts["underpowered"]
        mildest = min(every, key=lambda entry: abs(entry.delta_nll))
        name, worse = kind_name(kind["kind"]), better_left_out(kind)
        margin = f" within ±{run.summary['margin']:g} nats per token" if place == 0 else ""
        parts.append(
            f"{count(within) if within else 'None'} of {count(kind['pairs'])} {name} replacements "
            f"{'keep' if within > 1 else 'keeps'} the held-out loss{margin}, {count(counts['different'])} "
            f"{'change' if counts['different'] != 1 else 'changes'} it by more and {count(open_)} "
            f"{'stay' if open_ != 1 else 'stays'} open; the mildest is "
            f"{arrow(mildest.replaced, mildest.by)} ({compact(mildest.delta_nll)}). At {count(len(worse))} "
            f"of {count(len(kind['sites']))} sites leaving the module out costs less than any substitute"
        )
    return f"{'. '.join(parts)}. The sweep ends at {run.summary['level']}."


def better_left_out(kind: Mapping[str, Any]) -> list[str]:
    """Sites at which no update at all raises the loss less than the best substitute."""
    best: dict[str, float] = {}
    for entry in entries(kind):
        best[entry.replaced] = min(best.get(entry.replaced, entry.delta_nll), entry.delta_nll)
    return [part["site"] for part in kind["zero"] if part["delta_nll"] < best[part["site"]]]
