"""The comparison of neurons over a streamed model: the order of its parts and the opening of held-out text.

Covers the passes and the rows of the journal. Every unit of work is a row under its key; a unit whose row is
there is not done again, and one that is done again comes out the same, since texts always go through in the
same groups. Everything that is chosen (matches, the null's threshold, scales, the best pairs, how many texts
are needed) is written down before held-out text is opened. What is kept of texts is in study.py, what rows
mean in findings.py.

Shapes: B texts, T positions, C channels, n neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.provenance import utc_now
from twinscope.reuse.neurons.activations import GatedLayer, activations, column_norms
from twinscope.reuse.neurons.analytic import silent
from twinscope.reuse.neurons.confirm import moments
from twinscope.reuse.neurons.needed import needed_texts
from twinscope.reuse.neurons.null import judge, null_search
from twinscope.reuse.neurons.pairs import (
    Direction,
    Pair,
    between_layers,
    decided,
    found_partners,
    from_json,
    measured,
    to_json,
)
from twinscope.reuse.neurons.parallel import compare_weights
from twinscope.reuse.neurons.replaced import (
    Neuron,
    Replacement,
    at_random,
    fitted,
    replaced,
    themselves,
    zeroed,
)
from twinscope.reuse.neurons.search import APART, Matches, search
from twinscope.reuse.neurons.settings import FAMILY_WISE
from twinscope.reuse.neurons.sizes import DRAWS_AT_A_TIME, NULL_BLOCK
from twinscope.reuse.neurons.study import Residuals, Study, inputs_of, text_groups

if TYPE_CHECKING:
    from twinscope.reuse.scan import Before
    from twinscope.reuse.texts import Split

WAYS = ("forward", "backward")
STANDS = ("best", "random", "zeroed")
DECIDED, NEEDED, OPENED, CONFIRMED, SELF = (
    "pairs-decided",
    "calibration-decided",
    "heldout-opened",
    "confirmed",
    "self",
)


def search_layers(study: Study, found: Residuals, before: Before) -> dict[int, Matches]:
    """The best match of every neuron of every layer; a row each."""
    matches: dict[int, Matches] = {}
    for done, (number, layer) in enumerate(study.layers.items()):
        before("search", done, len(study.layers))
        key = f"search/{number}"
        row = study.find(key)
        if row is None:
            groups = study.groups
            x = inputs_of(study, found)(number)
            best = search(x, layer, list(study.layers.values()), groups=groups)
            # What adds nothing is no match, whatever its activations look like.
            dead = groups[number] == APART
            useless = silent(layer, best.energy) | dead
            row = {
                "key": key,
                "layer": number,
                "tokens": len(x),
                "best_layer": best.layer.tolist(),
                "best_neuron": best.neuron.tolist(),
                "correlation": best.correlation.tolist(),
                "scale": best.scale.tolist(),
                "energy": best.energy.tolist(),
                "silent": useless.nonzero().flatten().tolist(),
                "dead": dead.nonzero().flatten().tolist(),
            }
            study.keep(row)
        values = (torch.tensor(row[name], dtype=torch.float64) for name in ("correlation", "scale", "energy"))
        places = (torch.tensor(row[name]) for name in ("best_layer", "best_neuron"))
        matches[number] = Matches(*places, *values)
    return matches


def draw_null(study: Study, found: Residuals, before: Before) -> dict[int, list[float]]:
    """The largest correlation of each draw in each layer, by layer; a row for some draws of a layer."""
    every = range(study.settings.draws)
    parts = [every[at : at + DRAWS_AT_A_TIME] for at in range(0, len(every), DRAWS_AT_A_TIME)]
    maxima: dict[int, list[float]] = {number: [] for number in study.layers}
    total = len(parts) * len(study.layers)
    for done, (number, draws) in enumerate((number, part) for number in study.layers for part in parts):
        before("null", done, total)
        key = f"null/{number}/{draws[0]}"
        row = study.find(key)
        if row is None:
            largest = null_search(
                inputs_of(study, found)(number),
                study.layers[number],
                list(study.layers.values()),
                draws,
                study.plan.seed,
                study.settings.null,
                NULL_BLOCK,
                study.groups,
            )
            row = {"key": key, "layer": number, "draws": list(draws), "maxima": largest.amax(dim=1).tolist()}
            study.keep(row)
        maxima[number].extend(row["maxima"])
    return maxima


def decide_pairs(
    study: Study,
    found: Residuals,
    matches: Mapping[int, Matches],
    maxima: Mapping[int, Sequence[float]],
    before: Before,
) -> list[Pair]:
    """Write down the pairs that calibration puts forward, and those drawn at random beside the best."""
    row = study.find(DECIDED)
    if row is None:
        judged = judge(
            {number: best.correlation for number, best in matches.items()},
            {number: torch.tensor(values, dtype=torch.float64)[:, None] for number, values in maxima.items()},
            FAMILY_WISE,
        )
        silent_ones = {number: study.row(f"search/{number}")["silent"] for number in matches}
        useless = {(number, neuron) for number, numbers in silent_ones.items() for neuron in numbers}
        ways = found_partners(matches, useless)
        plain = inputs_of(study, found)

        def inputs(number: int) -> Tensor:
            before("pairs", 0, 1)
            return plain(number)

        forward = measured(study.layers, inputs, ways)
        backward = measured(study.layers, inputs, [(other, one) for one, other in ways])
        most = study.settings.replaced[-1]
        pairs = decided(forward, backward, judged.max_correlation, study.settings.r2_floor, most)
        best = _best(pairs, most)
        drawn = {}
        for at, way in enumerate(WAYS):
            own = [pair.directions[at].replacement for pair in best]
            drawn[way] = fitted(study.layers, at_random(study.layers, own, study.plan.seed, way), inputs)
        row = {
            "key": DECIDED,
            "threshold": judged.max_correlation,
            "pairs": [to_json(pair) for pair in pairs],
            "identical": _identical(study, pairs),
            "random": {way: [[*r.neuron, *r.by, r.scale] for r in own] for way, own in drawn.items()},
        }
        study.keep(row)
    return [from_json(item) for item in row["pairs"]]


def decide_needed(study: Study, pairs: Sequence[Pair]) -> None:
    """Write down, from the calibration spread alone, how many texts each replacement needs; one row."""
    if study.find(NEEDED) is not None:
        return
    spreads = {
        place_of(row): stdev(row["delta_nll"]) for row in replacement_rows(study, pairs, "calibration")
    }
    study.keep({"key": NEEDED, "needed": needed_texts(spreads, study.plan.content["margin"])})


def open_heldout(study: Study) -> str:
    """Write down that held-out text is opened, before it is, and only after everything was decided.

    Returns when, in UTC; a run that is resumed keeps the time of the first opening.

    Raises:
        ValueError: calibration has not decided how many texts are needed.
    """
    known = study.find(OPENED)
    if known is None:
        study.row(NEEDED)
        known = {"key": OPENED, "at": utc_now()}
        study.run.append(known)
    return str(known["at"])


def confirm_pairs(study: Study, found: Residuals, pairs: Sequence[Pair], before: Before) -> None:
    """Held-out R² and branch error of every pair, both ways, with the scales of calibration; one row."""
    if study.find(CONFIRMED) is not None:
        return
    inputs = inputs_of(study, found)
    values: dict[tuple[Neuron, Neuron], tuple[float | None, float | None]] = {}
    ways = [(item.neuron, item.by) for pair in pairs for item in pair.directions]
    scales = {(item.neuron, item.by): item.scale for pair in pairs for item in pair.directions}
    outputs: dict[int, tuple[float, Tensor]] = {}
    between = between_layers(ways)
    for done, ((recipient, donor), members) in enumerate(between.items()):
        before("heldout", done, len(between))
        layer, x = study.layers[recipient], inputs(recipient)
        if recipient not in outputs:
            outputs[recipient] = output_energy(x, layer), column_norms(layer)
        whole, columns = outputs[recipient]
        own, other = [one[1] for one, _ in members], [two[1] for _, two in members]
        sums = moments(x, layer, own, study.layers[donor], other)
        scale = torch.tensor([scales[way] for way in members], dtype=torch.float64)
        left = (sums.own - 2 * scale * sums.both + scale.square() * sums.other).clamp(min=0)
        errors = left.sqrt() * columns[own] / whole**0.5 if whole > 0 else torch.full_like(left, torch.nan)
        for way, r2, error in zip(members, sums.r2(scale).tolist(), errors.tolist(), strict=True):
            values[way] = (None if r2 != r2 else r2, None if error != error else error)
    rows = [[values[item.neuron, item.by] for item in pair.directions] for pair in pairs]
    study.keep({"key": CONFIRMED, "pairs": rows})


def replace_pairs(
    study: Study, found: Residuals, pairs: Sequence[Pair], split: Split, before: Before
) -> None:
    """The loss with the best pairs, and the controls, replaced on all texts of a split; a row each."""
    tasks = list(_tasks(study, pairs))
    for done, (way, stand, count) in enumerate(tasks):
        before("replacement", done, len(tasks))
        key = f"replacement/{split}/{way}/{count}/{stand}"
        if study.find(key) is not None:
            continue
        nll, errors = _pass(study, found, _replacements(study, pairs, way, stand, count))
        study.keep(
            {
                "key": key,
                "split": split,
                "way": way,
                "stand": stand,
                "pairs": count,
                "texts": [passage.name for passage in found.passages],
                "nll": nll,
                "delta_nll": [new - old for new, old in zip(nll, found.nll, strict=True)],
                "branch_error": errors,
            }
        )


def replace_by_themselves(study: Study, found: Residuals, pairs: Sequence[Pair], before: Before) -> None:
    """The check of the instrument: neurons replaced by themselves, which must change nothing; one row."""
    if study.find(SELF) is not None:
        return
    before("replacement", 0, 1)
    own = [pair.forward.replacement for pair in _best(pairs, study.settings.replaced[-1])]
    # Without any pair one neuron of the first layer does.
    first = (next(iter(study.layers)), 0)
    nll, errors = _pass(study, found, themselves(own or [Replacement(first, first, 1.0)]))
    change = max(abs(new - old) for new, old in zip(nll, found.nll, strict=True))
    study.keep({"key": SELF, "largest_change": change, "branch_error": max(errors)})


def counts(pairs: Sequence[Pair], wanted: Sequence[int]) -> list[int]:
    """How many best pairs are replaced at once: the numbers asked for, as far as there are so many."""
    ranks = sum(pair.rank is not None for pair in pairs)
    return sorted({min(count, ranks) for count in wanted} - {0})


def replacement_rows(study: Study, pairs: Sequence[Pair], split: str) -> list[dict[str, Any]]:
    """The journal's rows of all replacements on the texts of a split, in order."""
    return [
        study.row(f"replacement/{split}/{way}/{count}/{stand}") for way, stand, count in _tasks(study, pairs)
    ]


def place_of(row: Mapping[str, Any]) -> str:
    """What a row replaces, whatever the texts: ``forward/10/best``."""
    return f"{row['way']}/{row['pairs']}/{row['stand']}"


def output_energy(x: Tensor, layer: GatedLayer) -> float:
    """Σ over tokens of squares of what the MLP gives on x ``(N, C)``, before a post-norm."""
    parts = [activations(x, gate, up, layer.act) for _, gate, up in layer.blocks()]
    values = torch.cat(parts, dim=1)
    del parts
    total = 0.0
    for start in range(0, layer.width, 64):
        down = layer.down(start, min(start + 64, layer.width)).to(values)
        total += float((values @ down.t()).double().square().sum())
    return total


def _best(pairs: Sequence[Pair], most: int) -> list[Pair]:
    return [pair for pair in pairs if pair.rank is not None and pair.rank <= most]


def _tasks(study: Study, pairs: Sequence[Pair]) -> Iterator[tuple[str, str, int]]:
    for count in counts(pairs, study.settings.replaced):
        for way in WAYS:
            for stand in STANDS:
                yield way, stand, count


def _replacements(study: Study, pairs: Sequence[Pair], way: str, stand: str, count: int) -> list[Replacement]:
    own = [pair.directions[WAYS.index(way)].replacement for pair in _best(pairs, count)]
    if stand == "zeroed":
        return zeroed(own)
    if stand == "random":
        drawn = study.row(DECIDED)["random"][way][:count]
        return [Replacement((item[0], item[1]), (item[2], item[3]), item[4]) for item in drawn]
    return own


def _pass(
    study: Study, found: Residuals, replacements: Sequence[Replacement]
) -> tuple[list[float], list[float]]:
    """Loss and branch error, text by text, with some neurons replaced."""
    first = min(item.neuron[0] for item in replacements)
    site = study.layers[first].site
    nll: list[float] = []
    errors: list[float] = []
    for part in text_groups(study, len(found.ids)):
        z = {site: found.z[site][part].to(study.device)}
        done = replaced(study.lm, study.layers, replacements, z, found.ids[part])
        nll.extend(done.nll.tolist())
        errors.extend(done.branch_error.tolist())
    return nll, errors


def _identical(study: Study, pairs: Sequence[Pair]) -> list[bool]:
    """Whether the weights of each pair's neurons are equal up to a scale."""
    forward: list[Direction] = [pair.forward for pair in pairs]
    found: dict[tuple[Neuron, Neuron], bool] = {}
    for (one, other), members in between_layers([(item.neuron, item.by) for item in forward]).items():
        own, theirs = [first[1] for first, _ in members], [second[1] for _, second in members]
        same = compare_weights(study.layers[one], own, study.layers[other], theirs).identical
        found |= dict(zip(members, same.tolist(), strict=True))
    return [found[item.neuron, item.by] for item in forward]
