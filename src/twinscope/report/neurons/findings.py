"""What a search for duplicated neurons says in sentences: how many, beyond which null, at what cost.

Covers the sentences, and how figures and tables name neurons and layers; no drawing, no markup. Losses are
nats per token; correlations are uncentred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.trust import grounds, weights_label
from twinscope.report.wording import (
    compact,
    contended,
    count,
    interval,
    listed,
    number,
    signed,
    small,
    unfinished,
)

#: What stands in a neuron's place -> how it is named.
STANDS = {"best": "matched", "random": "random", "zeroed": "zeroed"}
WAYS = {"forward": "Forward: a neuron by its match", "backward": "Backward: the match by the neuron"}


def rows_of(run: RunData, kind: str) -> list[Row]:
    """The rows of one kind: ``match | search | null | replacement``."""
    return [row for row in run.rows if row.get("kind") == kind]


def matches(run: RunData) -> list[Mapping[str, Any]]:
    """Every match that has a row, else the duplicates of the summary."""
    found: list[Mapping[str, Any]] = [*rows_of(run, "match")]
    return found or duplicates(run)


def fate(match: Mapping[str, Any]) -> str:
    """What became of a match: ``confirmed | not confirmed | within the null``."""
    if match["confirmed"]:
        return "confirmed"
    return "not confirmed" if match["beyond_null"] else "within the null"


def duplicates(run: RunData) -> list[Mapping[str, Any]]:
    """The matches that the summary counts as duplicates, best first."""
    return list(run.summary.get("duplicates") or [])


def closest(match: Mapping[str, Any]) -> Mapping[str, Any]:
    """The direction of a match whose neuron is the closer."""
    return max(match["directions"], key=lambda part: abs(part["correlation"]))


def replaced(run: RunData, pairs: int, stand: str) -> list[Mapping[str, Any]]:
    """Held-out changes with so many neurons replaced, forward before backward."""
    found = [
        part
        for part in run.summary.get("replaced") or []
        if part["pairs"] == pairs and part["stand"] == stand
    ]
    return sorted(found, key=lambda part: part["way"] != "forward")


def outcome(run: RunData) -> str:
    """How many neurons have a duplicate, what replacing the most of them costs, and the level."""
    summary = run.summary
    if "null" not in summary:
        return "No neuron has been judged."
    found, layers = duplicates(run), summary["layers"]
    total = sum(layer["neurons"] for layer in layers)
    where = f"{count(total)} neurons of {count(len(layers))} layers"
    if found:
        best = max(found, key=lambda match: abs(closest(match)["correlation"]))
        part = closest(best)
        text = (
            f"{count(len(found))} {'pair' if len(found) == 1 else 'pairs'} among {where} "
            f"{'responds' if len(found) == 1 else 'respond'} alike beyond every null, on calibration and "
            f"held-out text and in both directions; the closest is {part['direction'].replace('<-', '←')} "
            f"with a correlation of {signed(part['correlation'])} and a held-out R² of "
            f"{number(part['r2_heldout'])}"
        )
    else:
        beyond = sum(layer["beyond_null"] for layer in layers)
        largest = max(layer["largest_correlation"] for layer in layers)
        text = f"None of {where} has a duplicate in another place"
        if beyond:
            text += f": {count(beyond)} exceed the null on calibration, and none is confirmed both ways"
        else:
            text += (
                f": the largest correlation is {number(largest)}, where redrawn weights reach "
                f"{number(summary['null_max_correlation'])}"
            )
    return f"{text}.{_cost(run)} It ends at {summary['level']}."


def remarks(run: RunData) -> list[str]:
    """The null, the floor, parity, the instrument, the seal, memory, and what replacing would save."""
    summary, found = run.summary, []
    null = summary.get("null")
    if null:
        found.append(
            f"Null: {null['method'].rstrip('.')}; over {count(null['draws'])} draws the largest "
            f"correlation of the whole search is {number(summary['null_max_correlation'])}, so "
            f"{number(null['threshold'])} is exceeded by chance in {number(100 * null['family_wise'], 0)} "
            f"% of searches. R² must be at least {number(null['r2_floor'], 2)} as well."
        )
    instrument = summary.get("instrument")
    if instrument:
        found.append(
            "Neurons replaced by themselves change the loss of a text by at most "
            f"{small(instrument['largest_change'])} nats per token."
        )
    found += grounds(summary)
    sets = summary.get("sets") or []
    if sets:
        most = max(sets, key=lambda part: part["pairs"])
        found.append(
            f"The {count(most['pairs'])} best pairs would save {count(most['parameters'])} parameters "
            f"({number(most['bytes'] / 2**20, 2)} MiB), which counts for nothing here."
        )
    return found + [sentence(note) for note in summary.get("notes") or []]


def label(run: RunData) -> str:
    """What the weights are, where they are not those that training left."""
    return weights_label(run.summary)


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the search shows, the gravest first."""
    found = unfinished(run, "before neurons are judged")
    summary = run.summary
    if (summary.get("parity") or {"passed": True})["passed"] is False:
        found.append("Parity was not shown, so no match can be a candidate.")
    found += [sentence(text) for text in summary.get("warnings") or []]
    alike = [part["pairs"] for part in summary.get("sets") or [] if part["zeroed_alike"]]
    if alike:
        found.append(
            f"With the {listed([count(pairs) for pairs in alike])} best "
            f"{'pair' if alike == [1] else 'pairs'}, setting the neurons to zero keeps the loss as well: "
            "that replacing keeps it says little."
        )
    return [*found, *contended(run, "Correlations and losses")]


def facts(run: RunData) -> list[str]:
    """Model, layers and tokens."""
    summary = run.summary
    if "model" not in summary:
        return []
    layers = [str(layer["layer"]) for layer in summary["layers"]]
    tokens = summary["tokens"]
    return [
        str(summary["model"]),
        f"layers {listed(layers)}",
        f"{count(tokens['calibration'])} tokens of calibration, {count(tokens['heldout'])} held-out",
    ]


def _cost(run: RunData) -> str:
    """What replacing the most pairs changes of the loss, against zeroing the same neurons."""
    pairs = max((part["pairs"] for part in run.summary.get("replaced") or []), default=0)
    best, zeroed = (replaced(run, pairs, stand) for stand in ("best", "zeroed"))
    if not best:
        return ""
    many = f"the {count(pairs)} best pairs" if pairs > 1 else "the best pair"
    changes = [
        f"{interval(part['delta_nll'], part['low'], part['high'])} {part['way']}, {part['verdict']}"
        for part in best
    ]
    text = f" Replacing one side of {many} by the other changes held-out loss by {listed(changes)}"
    if zeroed:
        text += f"; zeroing those neurons by {listed([compact(part['delta_nll']) for part in zeroed])}"
    return f"{text} nats per token."
