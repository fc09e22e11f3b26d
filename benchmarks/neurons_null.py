"""How often duplicated neurons are found where there are none, and how many are found of those there are.

Small decoders with drawn weights (4 layers of 40 gated neurons, 24 channels, a stream that goes through them
and through a causal mixing of tokens, Zipf tokens) run the whole pipeline: weight identities, search on 256
calibration tokens, null of the maximum with 19 draws, R² floor, confirmation on 256 other tokens, both
directions. Kinds of model:

- plain: normal weights, inputs without a preferred direction.
- dominant: inputs share a direction, and the first token of each text has a massive channel.
- heavy: weights from Student's t with 3 degrees of freedom, inputs as in dominant.
- shared: the rows of all layers share a direction. They are related, so the null is not the truth here: what
  is found is no error of the threshold, and the floor has to keep it small.

Reported with exact (Clopper–Pearson) 95 % intervals: how often anything passes the null alone, which is what
5 % refers to; how often anything is confirmed in the end; the same with each neuron judged against its own
null, with isotropic draws, and with permuted tokens, which is no valid null. Recall: neurons copied across
layers with a sign, a scale and noise of a share of their RMS, by noise. Prints tables and writes
results/neurons_null.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.stats import binomtest
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import close, collect
from twinscope.report.drawing import LINES, PALETTE, Panel, Plot, plot_files
from twinscope.reuse.neurons.activations import GatedLayer, activations, layer_of_matrices
from twinscope.reuse.neurons.analytic import identities
from twinscope.reuse.neurons.confirm import R2_FLOOR, moments
from twinscope.reuse.neurons.null import ALPHA, DRAWS, judge, judge_each, null_search
from twinscope.reuse.neurons.search import RunningBest, receive, search

RESULT = Path(__file__).parent / "results" / "neurons_null.json"
FIGURE = Path(__file__).parents[1] / "docs" / "results" / "neurons-null"
LAYERS, NEURONS, WIDTH, TEXTS, LENGTH, VOCAB = 4, 40, 24, 8, 32, 200
KINDS = ("plain", "dominant", "heavy", "shared")
Null = Literal["signs", "isotropic", "tokens"]
NULLS: tuple[Null, ...] = ("signs", "isotropic", "tokens")
#: The draws of "signs" again, each neuron judged against its own.
EACH = "signs, each"
#: Noise of planted neurons as a share of each row's RMS, and how many pairs have it in a model.
NOISES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5)
PAIRS = 2

Neuron = tuple[int, int]


@dataclass(frozen=True)
class Model:
    """Layers, and what enters each of them on calibration and on held-out texts, ``(N, C)``."""

    layers: dict[int, GatedLayer]
    calibration: dict[int, Tensor]
    heldout: dict[int, Tensor]


@dataclass(frozen=True)
class Outcome:
    """(neuron, partner) that pass the null, and those of them that the floor and held-out tokens confirm."""

    beyond_null: set[tuple[Neuron, Neuron]]
    confirmed: set[tuple[Neuron, Neuron]]


def make_model(
    kind: str, seed: int, planted: bool = False
) -> tuple[Model, dict[tuple[Neuron, Neuron], float]]:
    """A model of a kind; with ``planted``, pairs of neurons that were copied and the noise of each."""
    rng = generator(seed, f"null model {kind}")
    weights = []
    for _ in range(LAYERS):
        parts = [draw_rows(rng, kind) for _ in range(2)]
        weights.append([*parts, rng.normal(size=(WIDTH, NEURONS)) / np.sqrt(NEURONS)])
    if kind == "shared":
        common = rng.normal(size=(2, WIDTH))
        for layer in weights:
            for part in range(2):
                layer[part] = 0.8 * layer[part] + 0.6 * common[part] / np.sqrt(WIDTH)
    pairs = plant(rng, weights) if planted else {}
    layers = {}
    for number, layer in enumerate(weights):
        gate, up, down = (torch.from_numpy(np.ascontiguousarray(part)).float() for part in layer)
        layers[number] = layer_of_matrices(number, gate, up, down)
    embedding = rng.normal(size=(VOCAB, WIDTH))
    direction = 0.0 if kind == "plain" else 2.0 * rng.normal(size=WIDTH)
    mixing = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    gains = np.exp(0.3 * rng.normal(size=(LAYERS, WIDTH)))
    shares = 1.0 / np.arange(1, VOCAB + 1)
    inputs = []
    for _ in range(2):
        ids = rng.choice(VOCAB, size=(TEXTS, LENGTH), p=shares / shares.sum())
        z = embedding[ids] + direction
        if kind != "plain":
            z[:, 0, 0] += 30.0
        inputs.append(forward(z, weights, mixing, gains))
    return Model(layers, *inputs), pairs


def draw_rows(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Rows ``(n, C)`` of gate or up, of variance about 1/C."""
    if kind == "heavy":
        return rng.standard_t(3, size=(NEURONS, WIDTH)) / np.sqrt(3 * WIDTH)
    return rng.normal(size=(NEURONS, WIDTH)) / np.sqrt(WIDTH)


def plant(rng: np.random.Generator, weights: list[list[np.ndarray]]) -> dict[tuple[Neuron, Neuron], float]:
    """Copy neurons over others in other layers, scaled, with a sign and noise; no neuron is used twice."""
    free = {layer: list(rng.permutation(NEURONS)) for layer in range(LAYERS)}
    found = {}
    for noise in NOISES:
        for _ in range(PAIRS):
            source, target = (int(layer) for layer in rng.choice(LAYERS, size=2, replace=False))
            of, to = int(free[source].pop()), int(free[target].pop())
            scales = 1.0, float(rng.choice([-1, 1]) * rng.uniform(0.3, 3.0))
            for part, scale in enumerate(scales):
                row = scale * weights[source][part][of]
                rms = np.sqrt(np.mean(row**2))
                weights[target][part][to] = row + noise * rms * rng.normal(size=WIDTH)
            found[(source, of), (target, to)] = noise
    return found


def forward(
    z: np.ndarray, weights: list[list[np.ndarray]], mixing: np.ndarray, gains: np.ndarray
) -> dict[int, Tensor]:
    """The normalised input of every layer for embedded texts ``(B, T, C)``."""
    found = {}
    for number, (gate, up, down) in enumerate(weights):
        before = np.cumsum(normed(z), axis=1) / np.arange(1, LENGTH + 1)[:, None]
        z = z + before @ mixing[number]
        x = normed(z) * gains[number]
        found[number] = torch.from_numpy(x.reshape(-1, WIDTH)).float()
        t = x @ gate.T
        z = z + (t / (1 + np.exp(-t)) * (x @ up.T)) @ down.T
    return found


def normed(z: np.ndarray) -> np.ndarray:
    return z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True))


def run(model: Model, seed: int, nulls: Sequence[Null]) -> dict[str, Outcome]:
    """The whole pipeline on one model, under each of some nulls."""
    layers = list(model.layers.values())
    groups = identities(layers).groups
    best = {
        number: search(model.calibration[number], layer, layers, groups=groups)
        for number, layer in model.layers.items()
    }
    observed = {number: found.correlation for number, found in best.items()}
    outcomes = {}
    for null in nulls:
        drawn = {}
        for number, layer in model.layers.items():
            x = model.calibration[number]
            if null == "tokens":
                drawn[number] = permuted_tokens(x, layer, layers, seed)
            else:
                drawn[number] = null_search(x, layer, layers, range(DRAWS), seed, null, groups=groups)
        passed = {null: judge(observed, drawn).passed}
        if null == "signs":
            passed[EACH] = judge_each(observed, drawn).passed
        for name, which in passed.items():
            beyond = {
                ((number, own), (int(best[number].layer[own]), int(best[number].neuron[own])))
                for number, part in which.items()
                for own in part.nonzero().flatten().tolist()
            }
            outcomes[name] = Outcome(beyond, {pair for pair in beyond if confirmed(model, *pair)})
    return outcomes


def permuted_tokens(x: Tensor, recipient: GatedLayer, donors: list[GatedLayer], seed: int) -> Tensor:
    """The same maxima with the donors' tokens permuted: what looks like a null and is none."""
    own, rows = receive(x, recipient), []
    for draw in range(DRAWS):
        rng = generator(seed, f"permuted tokens {recipient.layer}", draw)
        order = torch.from_numpy(rng.permutation(len(x)))
        running = RunningBest(recipient.neurons)
        for donor in donors:
            for start, gate, up in donor.blocks():
                running.see(own, donor.layer, start, activations(x, gate, up, donor.act)[order])
        rows.append(running.strength.double())
    return torch.stack(rows)


def confirmed(model: Model, one: Neuron, other: Neuron) -> bool:
    """R² of at least the floor on calibration and held-out tokens, in both directions."""
    for (layer, own), (donor, partner) in ((one, other), (other, one)):
        pair = model.layers[layer], [own], model.layers[donor], [partner]
        fit, held = moments(model.calibration[layer], *pair), moments(model.heldout[layer], *pair)
        if min(float(fit.r2(fit.scale)), float(held.r2(fit.scale))) < R2_FLOOR:
            return False
    return True


def interval(count: int, of: int) -> dict[str, Any]:
    """A rate with its exact 95 % interval."""
    found = binomtest(count, of).proportion_ci(0.95, method="exact")
    return {"count": count, "of": of, "rate": count / of, "low": float(found.low), "high": float(found.high)}


def error_rates(models: int, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """For each kind and null: how often anything passes the null, and how often anything is confirmed."""
    rows = []
    for kind in KINDS:
        beyond: Counter[str] = Counter()
        in_the_end: Counter[str] = Counter()
        for seed in range(models):
            outcomes = run(make_model(kind, seed)[0], seed, NULLS)
            beyond.update(name for name, outcome in outcomes.items() if outcome.beyond_null)
            in_the_end.update(name for name, outcome in outcomes.items() if outcome.confirmed)
            tick(kind)
        rows += [
            {
                "kind": kind,
                "null": name,
                "beyond_null": interval(beyond[name], models),
                "confirmed": interval(in_the_end[name], models),
            }
            for name in (*NULLS, EACH)
        ]
    return rows


def recall(models: int, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """For each kind, judgement and noise: the share of planted pairs found, and false ones beside them."""
    rows = []
    for kind in KINDS:
        found = {name: dict.fromkeys(NOISES, 0) for name in ("signs", EACH)}
        r2: dict[float, list[float]] = {noise: [] for noise in NOISES}
        false: Counter[str] = Counter()
        for seed in range(models):
            model, pairs = make_model(kind, seed, planted=True)
            known = {frozenset(pair) for pair in pairs}
            for name, outcome in run(model, seed, ["signs"]).items():
                got = {frozenset(pair) for pair in outcome.confirmed}
                false[name] += bool(got - known)
                for pair, noise in pairs.items():
                    found[name][noise] += frozenset(pair) in got
            for (one, other), noise in pairs.items():
                where = model.layers[one[0]], [one[1]], model.layers[other[0]], [other[1]]
                fit = moments(model.calibration[one[0]], *where)
                r2[noise].append(float(moments(model.heldout[one[0]], *where).r2(fit.scale)))
            tick(f"planted, {kind}")
        rows += [
            {
                "kind": kind,
                "null": name,
                "models_with_a_false_pair": interval(false[name], models),
                "curve": [
                    {
                        "noise": noise,
                        "recall": interval(count, models * PAIRS),
                        "median_heldout_r2": float(np.median(r2[noise])),
                    }
                    for noise, count in counts.items()
                ],
            }
            for name, counts in found.items()
        ]
    return rows


def figure(record: Mapping[str, Any]) -> Plot:
    """The share of planted pairs that is found, over the noise on their weights, by judgement."""
    rows = record["planted_models"]
    titles = {"signs": "One threshold for all neurons", EACH: "Each neuron against its own null"}
    columns = ("null", "kind", "noise", "recall", "low", "high", "median_heldout_r2")
    panels, data = [], []
    for name, title in titles.items():
        mine = [row for row in rows if row["null"] == name]
        words = ". ".join(
            f"{row['kind']}: " + ", ".join(f"{p['noise']:g} {p['recall']['rate']:.2f}" for p in row["curve"])
            for row in mine
        )
        panels.append(Panel(title, words, partial(draw_recall, mine)))
        data += [
            (name, row["kind"], p["noise"], *(p["recall"][key] for key in ("rate", "low", "high")),
             p["median_heldout_r2"])
            for row in mine for p in row["curve"]
        ]  # fmt: skip
    return Plot("recall", "Planted pairs found", "", tuple(panels), columns, tuple(data))


def draw(record: Mapping[str, Any]) -> None:
    """Write the figure of a record."""
    FIGURE.mkdir(exist_ok=True)
    (FIGURE / "recall.png").write_bytes(plot_files(figure(record))["recall.png"])


def draw_recall(rows: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    """A curve for each kind of model, with its 95 % interval."""
    for number, row in enumerate(rows):
        noise = [point["noise"] for point in row["curve"]]
        rate, low, high = ([p["recall"][key] for p in row["curve"]] for key in ("rate", "low", "high"))
        colour = PALETTE[f"arm-{number + 1}"][0]
        axes.fill_between(noise, low, high, color=colour, alpha=0.15, linewidth=0)
        style = {"color": colour, "linestyle": LINES[number], "linewidth": 1.6, "label": row["kind"]}
        axes.plot(noise, rate, **style)
    axes.set_xlabel("noise on the weights of a copy, over their RMS")
    axes.set_ylabel("share of planted pairs found")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=200, help="null models of each kind")
    parser.add_argument("--planted", type=int, default=100, help="models of each kind with planted pairs")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compute = {"device": "cpu", "threads": 1, "precision": "fp32"}
    provenance = collect(seeds=list(range(options.models)), data={}, compute=compute)
    total, done = len(KINDS) * (options.models + options.planted), 0
    with Progress("neurons") as progress:

        def tick(status: str) -> None:
            nonlocal done
            done += 1
            progress.update(done, total, status)

        errors = error_rates(options.models, tick)
        curves = recall(options.planted, tick)
    print(f"a false match in how many of {options.models} null models (nominal {ALPHA:.0%} beyond the null)")
    for row in errors:
        shown = [f"{row[key]['rate']:.3f} [{row[key]['low']:.3f}, {row[key]['high']:.3f}]"
                 for key in ("beyond_null", "confirmed")]  # fmt: skip
        print(f"{row['kind']:>9} {row['null']:>12}  beyond the null {shown[0]}  confirmed {shown[1]}")
    print("planted pairs found, by noise: " + "  ".join(f"{noise:g}" for noise in NOISES))
    for row in curves:
        shares = "  ".join(f"{point['recall']['rate']:.2f}" for point in row["curve"])
        false = row["models_with_a_false_pair"]["rate"]
        print(f"{row['kind']:>9} {row['null']:>12}  {shares}  false {false:.3f}")
    record = {
        "benchmark": "neurons_null", "settings": {"draws": DRAWS, "alpha": ALPHA, "r2_floor": R2_FLOOR,
        "layers": LAYERS, "neurons": NEURONS,
                     "width": WIDTH, "tokens": TEXTS * LENGTH},
        "null_models": errors,
        "planted_models": curves,
        "provenance": close(provenance),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.out == RESULT:
        draw(record)


if __name__ == "__main__":
    main()
