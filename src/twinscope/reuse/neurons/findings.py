"""What the rows of a comparison of neurons say: verdicts, levels, the summary and its claims.

Covers turning rows into the record; it touches no model. Levels are assigned by ``lab/evidence.py``. A pair
of neurons is a candidate if both directions beat the null and the R² floor on calibration and keep the floor
on held-out text. A set of best pairs that are all candidates reaches intervention if replacing them keeps the
loss within the margin in both directions. A duplicate has the level of the best set that it belongs to.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinscope.lab.evidence import LEVELS, Facts, Level, assign_level, reuse_claim
from twinscope.lab.statistics import equivalence_verdict, mean_interval, paired_interval
from twinscope.reuse.neurons.pairs import Pair, named
from twinscope.reuse.neurons.settings import ENOUGH_TOKENS, FAMILY_WISE
from twinscope.reuse.neurons.stages import (
    CONFIRMED,
    DECIDED,
    NEEDED,
    SELF,
    STANDS,
    WAYS,
    counts,
    place_of,
    replacement_rows,
)
from twinscope.reuse.neurons.study import Study
from twinscope.reuse.texts import SPLITS

Row = dict[str, Any]
_METHODS = {
    "signs": "donors redrawn with random signs in the eigenbasis of the recipient's inputs",
    "isotropic": "donors turned by random rotations",
}
_ZEROED = "that the loss depends on these neurons: setting them to zero keeps it within the margin as well"


@dataclass(frozen=True)
class Ground:
    """What every level rests on besides the pairs: parity, weights, the seal, and the instrument."""

    parity_passed: bool
    weights: Any
    planted: bool
    seal_intact: bool
    instrument_passed: bool

    def facts(self, candidate: bool, passed: Mapping[str, bool]) -> Facts:
        """Facts of a pair or a set; what the instrument cannot measure did not pass."""
        return Facts(
            ran=True,
            parity_passed=self.parity_passed,
            candidate_passed=candidate,
            weights=self.weights,
            planted=self.planted,
            seal_intact=self.seal_intact,
            intervention_passed=passed if self.instrument_passed else {},
        )


def findings(
    study: Study, pairs: Sequence[Pair], parity_passed: bool, seal_intact: bool
) -> tuple[dict[str, Any], list[dict[str, str]], list[Row]]:
    """The part of the summary that rows decide, the claims, and the rows of the record."""
    model = study.plan.content["model"]
    own = study.row(SELF)
    ground = Ground(
        parity_passed,
        model["weights"],
        model["planted"],
        seal_intact,
        own["largest_change"] == 0 and own["branch_error"] == 0,
    )
    confirmed = _confirmed(study, pairs)
    replaced = [_replaced(study, row) for row in replacement_rows(study, pairs, "heldout")]
    sets = [
        _set(study, ground, pairs, confirmed, replaced, count)
        for count in counts(pairs, study.settings.replaced)
    ]
    matches = _match_entries(study, pairs, ground, sets)
    duplicates = [entry for entry in matches if entry["confirmed"]]
    level = max(
        (entry["level"] for entry in duplicates),
        key=LEVELS.index,
        default=assign_level(ground.facts(False, {})),
    )
    nll = study.row("residuals/heldout")["nll"]
    mean = sum(nll) / len(nll)
    texts = {split: sum(text.split == split for text in study.plan.texts) for split in SPLITS}
    compared = len(study.plan.texts[0].ids) - study.settings.skip
    tokens = {split: count * compared for split, count in texts.items()}
    maxima = [max(values) for values in _maxima(study)]
    summary = {
        "instrument": {"passed": ground.instrument_passed, "largest_change": own["largest_change"]},
        "warnings": _warnings(study, tokens, pairs, ground),
        "texts": texts,
        "tokens": tokens,
        "skipped": study.settings.skip,
        "layers": _layers(study, duplicates, matches),
        "null": {
            "method": _METHODS[study.settings.null],
            "draws": study.settings.draws,
            "family_wise": FAMILY_WISE,
            "threshold": study.row(DECIDED)["threshold"],
            "r2_floor": study.settings.r2_floor,
        },
        "null_max_correlation": max(maxima),
        "duplicates": duplicates,
        "analytic": study.row("analytic")["entries"] + _silent_entries(study),
        "margin": study.plan.content["margin"],
        "nll": mean,
        **_known("perplexity", math.exp(mean) if mean < 700 else None, "the loss is beyond any number"),
        "replaced": replaced,
        "sets": [{key: value for key, value in entry.items() if key != "passed"} for entry in sets],
        "level": level,
    }
    return summary, _claims(ground, summary, sets), _record_rows(study, pairs, matches)


def _record_rows(study: Study, pairs: Sequence[Pair], matches: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Matches, searches, null draws, replacements."""
    rows: list[Row] = [{"kind": "match", "key": f"match/{entry['id']}", **entry} for entry in matches]
    for number in study.layers:
        row = study.row(f"search/{number}")
        kept = {key: value for key, value in row.items() if key not in ("energy", "dead")}
        rows.append({"kind": "search", **kept})
    for draw, values in enumerate(_maxima(study)):
        rows.append(
            {
                "kind": "null",
                "key": f"null/{draw}",
                "draw": draw,
                "layers": list(study.layers),
                "maxima": values,
                "maximum": max(values),
            }
        )
    for split in SPLITS:
        rows.extend({"kind": "replacement", **row} for row in replacement_rows(study, pairs, split))
    return rows


def _match_entries(
    study: Study, pairs: Sequence[Pair], ground: Ground, sets: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every pair as the record has it, the strongest first."""
    entries = []
    identical = study.row(DECIDED)["identical"]
    heldout = study.row(CONFIRMED)["pairs"]
    confirmed = _confirmed(study, pairs)
    for pair, same, values, held in zip(pairs, identical, heldout, confirmed, strict=True):
        members = [entry for entry in sets if pair.rank is not None and pair.rank <= entry["pairs"]]
        best = max(members, key=lambda entry: LEVELS.index(entry["level"]), default=None)
        passed = best["passed"] if held and best is not None and best["level"] == "intervention" else {}
        level = assign_level(ground.facts(held, passed))
        entry: dict[str, Any] = {
            "id": pair.id,
            "left": named(pair.forward.neuron),
            "right": named(pair.forward.by),
            "rank": pair.rank,
            "beyond_null": pair.beyond_null,
            "confirmed": held,
            "identical_weights": same,
            "level": level,
            "reason": _reason(study, pair, values, held, level, ground, best),
            "directions": [
                {
                    "direction": item.name,
                    "correlation": item.correlation,
                    "scale": item.scale,
                    "r2_calibration": item.correlation**2,
                    **_known("r2_heldout", r2, "the neuron is zero on all held-out tokens"),
                    **_known("branch_error", error, "the MLP gives nothing on held-out text"),
                }
                for item, (r2, error) in zip(pair.directions, values, strict=True)
            ],
        }
        if pair.rank is None:
            entry["rank_reason"] = "a stronger pair has one of the two neurons"
        entries.append(entry)
    return entries


def _reason(
    study: Study,
    pair: Pair,
    values: Sequence[Sequence[float | None]],
    held: bool,
    level: Level,
    ground: Ground,
    best: Mapping[str, Any] | None,
) -> str:
    threshold, floor = study.row(DECIDED)["threshold"], study.settings.r2_floor
    if not pair.beyond_null:
        short = max(threshold, floor**0.5)
        return (
            f"the weaker correlation is {pair.strength:.3f} on calibration text, where more than {short:.3f} "
            f"counts ({'the null reaches it' if threshold >= floor**0.5 else 'the floor of R²'})"
        )
    r2 = [value for value, _ in values]
    if not held:
        worst = "none" if None in r2 else f"{min(value for value in r2 if value is not None):.3f}"
        return f"the smaller R² is {worst} on held-out text, where {floor:g} is the least"
    shown = (
        f"in both directions the correlation is at least {pair.strength:.3f} (null {threshold:.3f}) and the "
        f"held-out R² at least {min(value for value in r2 if value is not None):.3f}"
    )
    if level == "intervention" and best is not None:
        alone = best["pairs"] == 1
        how = "replaced by each other" if alone else f"with the {best['pairs']} best pairs replaced"
        return f"{shown}; {how}, the loss keeps to the margin"
    if not ground.seal_intact:
        return f"the seal of the plan is broken, so the pair stays below a candidate although {shown}"
    if not ground.parity_passed:
        return f"parity was not shown, so the pair stays below a candidate although {shown}"
    if ground.weights == "random":
        return f"the weights are random, so the pair stays below a candidate although {shown}"
    return shown


def _confirmed(study: Study, pairs: Sequence[Pair]) -> list[bool]:
    floor = study.settings.r2_floor
    rows = study.row(CONFIRMED)["pairs"]
    return [
        pair.beyond_null and all(r2 is not None and r2 >= floor for r2, _ in values)
        for pair, values in zip(pairs, rows, strict=True)
    ]


def _replaced(study: Study, row: Row) -> dict[str, Any]:
    """One replacement over the held-out texts."""
    margin = study.plan.content["margin"]
    needed = study.row(NEEDED)["needed"][place_of(row)]
    deltas, calibration = row["delta_nll"], study.row(row["key"].replace("/heldout/", "/calibration/"))
    wide, narrow = paired_interval(deltas), paired_interval(deltas, 0.90)
    # A number that no corpus reaches stands for one that does not exist.
    verdict = equivalence_verdict(deltas, margin, needed or 10**9)
    return {
        "pairs": row["pairs"],
        "way": row["way"],
        "stand": row["stand"],
        "texts": len(deltas),
        "delta_nll": wide.estimate,
        "low": wide.low,
        "high": wide.high,
        "low_90": narrow.low,
        "high_90": narrow.high,
        "delta_nll_calibration": mean_interval(calibration["delta_nll"]).estimate,
        **_known("needed", needed, "the spread of the change on calibration text is beyond any texts"),
        "verdict": verdict,
        "branch_error": sum(row["branch_error"]) / len(row["branch_error"]),
    }


def _set(
    study: Study,
    ground: Ground,
    pairs: Sequence[Pair],
    confirmed: Sequence[bool],
    replaced: Sequence[Mapping[str, Any]],
    count: int,
) -> dict[str, Any]:
    """The best pairs together; ``passed`` says which way kept the loss."""
    members = [
        (pair, held)
        for pair, held in zip(pairs, confirmed, strict=True)
        if pair.rank is not None and pair.rank <= count
    ]
    here = [item for item in replaced if item["pairs"] == count]
    verdicts = {
        stand: {item["way"]: item["verdict"] for item in here if item["stand"] == stand} for stand in STANDS
    }
    passed = {way: verdicts["best"][way] == "equivalent" for way in WAYS}
    held = sum(flag for _, flag in members)
    level = assign_level(ground.facts(held == count, passed))
    alike = all(verdicts["zeroed"][way] == "equivalent" for way in WAYS)
    spoken = " and ".join(f"{way} {verdicts['best'][way]}" for way in WAYS)
    reason = f"{held} of {count} pairs are confirmed duplicates; replaced they are {spoken}"
    if held == count and not ground.instrument_passed:
        reason = f"{reason}, which does not count: neurons replaced by themselves changed the loss"
    if alike:
        reason = f"{reason}; set to zero they are equivalent both ways as well"
    parameters = sum(_saved(study, pair) for pair, _ in members)
    return {
        "pairs": count,
        "confirmed": held,
        "zeroed_alike": alike,
        "level": level,
        "reason": reason,
        "parameters": parameters,
        "bytes": parameters * _value_bytes(study),
        "passed": passed,
    }


def _saved(study: Study, pair: Pair) -> int:
    """Values that need not be stored: gate and up of one neuron, its output vector too within one layer."""
    within = pair.forward.neuron[0] == pair.forward.by[0]
    return (3 if within else 2) * study.lm.width


def _value_bytes(study: Study) -> int:
    _, tensors = study.lm.module(next(iter(study.layers.values())).site)
    entry = study.lm.files.entry(next(names[0] for names in tensors.values() if names))
    return entry.nbytes // math.prod(entry.shape)


def _layers(
    study: Study, duplicates: Sequence[Mapping[str, Any]], matches: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One entry a layer; a neuron counts once, in whichever pair and direction it stands."""
    found = []
    beyond = [entry for entry in matches if entry["beyond_null"]]
    for number, layer in study.layers.items():
        row = study.row(f"search/{number}")
        useless = set(row["silent"])
        strengths = [
            abs(value) for neuron, value in enumerate(row["correlation"]) if neuron not in useless
        ] or [0.0]
        found.append(
            {
                "layer": number,
                "neurons": layer.neurons,
                "dead": len(useless),
                "beyond_null": _neurons_of(number, beyond),
                "confirmed": _neurons_of(number, duplicates),
                "largest_correlation": max(strengths),
                "median_correlation": plain.median(strengths),
            }
        )
    return found


def _neurons_of(number: int, entries: Sequence[Mapping[str, Any]]) -> int:
    ends = {entry[side] for entry in entries for side in ("left", "right")}
    return sum(end.startswith(f"layers.{number}.") for end in ends)


def _silent_entries(study: Study) -> list[dict[str, Any]]:
    """Neurons that add next to nothing on calibration text, layer by layer, without those dead by weights."""
    entries = []
    for number in study.layers:
        row = study.row(f"search/{number}")
        numbers = [neuron for neuron in row["silent"] if neuron not in set(row["dead"])]
        if numbers:
            entries.append(
                {
                    "kind": "dead",
                    "layers": [number],
                    "neurons": len(numbers),
                    "examples": [f"layers.{number}.mlp.{neuron}" for neuron in numbers[:5]],
                    "detail": "they add next to nothing on calibration text, though their weights could",
                }
            )
    return entries


def _warnings(study: Study, tokens: Mapping[str, int], pairs: Sequence[Pair], ground: Ground) -> list[str]:
    found = [
        f"{tokens[split]} {split} tokens, where {ENOUGH_TOKENS} are meant: correlations are less certain"
        for split in SPLITS
        if tokens[split] < ENOUGH_TOKENS
    ]
    if len(study.layers) < 4:
        found.append(f"the plan fixes {len(study.layers)} layers, where four are meant")
    ranks = sum(pair.rank is not None for pair in pairs)
    if ranks < study.settings.replaced[-1]:
        found.append(f"there are {ranks} pairs to replace, {study.settings.replaced[-1]} were asked for")
    if not ground.instrument_passed:
        found.append("neurons replaced by themselves changed the loss, so no verdict counts")
    return found


def _claims(
    ground: Ground, summary: Mapping[str, Any], sets: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    searched = sum(layer["neurons"] for layer in summary["layers"])
    found = len(summary["duplicates"])
    claims = [
        reuse_claim(
            f"{found} pairs among {searched} neurons of {len(summary['layers'])} layers compute the same up "
            "to a factor on real text, beyond a null that reaches a correlation of "
            f"{summary['null']['threshold']:.3f}",
            ground.facts(found > 0, {}),
        )
    ]
    for entry in sets:
        facts = ground.facts(entry["confirmed"] == entry["pairs"], entry["passed"])
        which = "the best pair" if entry["pairs"] == 1 else f"the {entry['pairs']} best pairs"
        said = reuse_claim(f"{which}, replaced: {entry['reason']}", facts)
        if entry["zeroed_alike"]:
            said["does_not_support"] = f"{said['does_not_support']}; {_ZEROED}"
        claims.append(said)
    return claims


def _maxima(study: Study) -> list[list[float]]:
    """Draw by draw, the largest correlation of each layer."""
    by_layer = [
        [
            value
            for row in study.run.rows
            if row["key"].startswith(f"null/{number}/")
            for value in row["maxima"]
        ]
        for number in study.layers
    ]
    return [list(values) for values in zip(*by_layer, strict=True)]


def _known(key: str, value: Any, reason: str) -> dict[str, Any]:
    return {key: value} if value is not None else {key: None, f"{key}_reason": reason}
