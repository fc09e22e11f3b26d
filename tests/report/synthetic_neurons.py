"""Synthetic ``neurons`` records with the shape of real ones, from a seeded generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinscope.lab.draws import generator
from twinscope.lab.statistics import equivalence_verdict, mean_interval, texts_needed

LAYERS = (3, 11, 18, 26)
MARGIN, FLOOR = 0.01, 0.5
PAIRS = (1, 10, 100)
#: Change of the loss with one neuron replaced; more of them add up, a little faster than their number.
COSTS = {"best": 2e-5, "random": 4e-4, "zeroed": 1.5e-4}


def neurons_record(
    neurons: int = 200, found: int = 6, texts: int = 16, draws: int = 19, planted: bool = False
) -> dict[str, Any]:
    """A complete record with ``found`` confirmed matches, one that is not confirmed, one within the null."""
    searches = [_search(layer, neurons, found) for layer in LAYERS]
    nulls = [_null(draw) for draw in range(draws)]
    threshold = max(row["maximum"] for row in nulls)
    matches = [_match(rank, found) for rank in range(1, found + 3)]
    replacements, replaced = _replacements(texts)
    confirmed = [match for match in matches if match["confirmed"]]
    return {
        "schema": "twinscope.neurons/1",
        "status": "complete",
        "config": {"name": "neurons"},
        "provenance": {"verb": "neurons", "name": "neurons", "started": "2026-11-30T14:15:30Z"},
        "summary": {
            "sealed": "0123456789abcdef" * 4,
            "heldout_opened_at": "2026-11-30T14:20:00Z",
            "model": "a folder, llama, 30 layers, width 576",
            "weights": "released",
            "planted": planted,
            "parity": {"passed": True, "detail": "by a check of this model on this machine"},
            "instrument": {"passed": True, "largest_change": 0.0},
            "notes": [],
            "warnings": [],
            "texts": {"calibration": texts, "heldout": texts},
            "tokens": {"calibration": 128 * texts, "heldout": 128 * texts},
            "layers": [
                {
                    "layer": row["layer"],
                    "neurons": neurons,
                    "dead": 0,
                    "beyond_null": int(sum(abs(value) > threshold for value in row["correlation"])),
                    "confirmed": 2 * len(confirmed) // len(LAYERS),
                    "largest_correlation": max(abs(value) for value in row["correlation"]),
                    "median_correlation": float(np.median(np.abs(row["correlation"]))),
                }
                for row in searches
            ],
            "null": {
                "method": "random signs in the eigenbasis of the recipient's second moment",
                "draws": draws,
                "family_wise": 0.05,
                "threshold": threshold,
                "r2_floor": FLOOR,
            },
            "null_max_correlation": threshold,
            "duplicates": confirmed,
            "analytic": [
                {
                    "kind": "parallel_gate_and_up",
                    "layers": [11],
                    "neurons": 2,
                    "examples": ["layers.11.mlp.7 = 1.5 layers.11.mlp.9"],
                    "detail": "gate and up are multiples, so the two merge exactly",
                }
            ],
            "margin": MARGIN,
            "nll": 2.91,
            "perplexity": float(np.exp(2.91)),
            "replaced": replaced,
            "sets": [
                {
                    "pairs": pairs,
                    "confirmed": min(pairs, len(confirmed)),
                    "zeroed_alike": pairs == 1,
                    "level": "candidate" if pairs <= len(confirmed) else "parity",
                    "reason": "replacement keeps the loss in both ways",
                    "parameters": 1728 * pairs,
                    "bytes": 3456 * pairs,
                }
                for pairs in PAIRS
            ],
            "level": "candidate" if confirmed else "parity",
            "peak_rss_mib": 471.0,
            "planned_peak_mib": 480.0,
            "memory": {"budget_mib": 512.0, "anonymous_mib": 341.0, "file_mib": 117.0},
        },
        "rows": [
            *({"kind": "match", "key": f"match/{match['id']}"} | match for match in matches),
            *searches,
            *nulls,
            *replacements,
        ],
        "claims": [],
    }


def _search(layer: int, neurons: int, found: int) -> dict[str, Any]:
    draw = generator(layer, "neurons")
    size = np.clip(0.18 + 0.09 * draw.gumbel(size=neurons) * 0.6, 0.02, 0.55)
    size[: max(0, found // 2)] = 0.78 + 0.2 * draw.random(max(0, found // 2))
    return {
        "kind": "search",
        "key": f"search/{layer}",
        "layer": layer,
        "tokens": 2048,
        "best_layer": [int(value) for value in draw.choice(LAYERS, neurons, p=[0.1, 0.5, 0.3, 0.1])],
        "best_neuron": [int(value) for value in draw.integers(0, neurons, neurons)],
        "correlation": [float(value) for value in size * draw.choice([-1, 1], neurons)],
        "scale": [float(value) for value in draw.normal(size=neurons)],
        "silent": [],
        "timing": {"seconds": 20.0},
    }


def _null(number: int) -> dict[str, Any]:
    draw = generator(number, "neurons null")
    maxima = [float(value) for value in 0.52 + 0.035 * draw.gumbel(size=len(LAYERS))]
    return {
        "kind": "null",
        "key": f"null/{number}",
        "draw": number,
        "layers": list(LAYERS),
        "maxima": maxima,
        "maximum": max(maxima),
    }


def _match(rank: int, found: int) -> dict[str, Any]:
    draw = generator(rank, "neurons match")
    left, right = f"layers.3.mlp.{rank}", f"layers.11.mlp.{10 + rank}"
    confirmed, last = rank <= found, rank == found + 2
    directions = []
    for here, there in ((left, right), (right, left)):
        correlation = float(0.98 - 0.02 * rank + 0.005 * draw.normal())
        lost = 0.02 if confirmed else 0.45
        directions.append(
            {
                "direction": f"{here} <- {there}",
                "correlation": -correlation if rank == 2 else correlation,
                "scale": float((-1 if rank == 2 else 1) * (0.8 + 0.3 * draw.random())),
                "r2_calibration": correlation**2,
                "r2_heldout": correlation**2 - lost * (1 + 0.2 * draw.normal()),
                "branch_error": 0.004 * rank,
            }
        )
    ranked: dict[str, Any] = {"rank": rank}
    if last:
        ranked = {"rank": None, "rank_reason": "a stronger pair has one of the two neurons"}
    return {
        "id": f"{left}={right}",
        "left": left,
        "right": right,
        **ranked,
        "beyond_null": not last,
        "confirmed": confirmed,
        "identical_weights": False,
        "level": "candidate" if confirmed else "parity",
        "reason": "both R² exceed the floor" if confirmed else "on held-out text R² falls below the floor",
        "directions": directions,
    }


def _replacements(texts: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, summary = [], []
    for way in ("forward", "backward"):
        for stand, cost in COSTS.items():
            for pairs in PAIRS:
                draw = generator(pairs, f"neurons {way} {stand}")
                size = cost * pairs**1.15 * (1.4 if way == "backward" else 1.0)
                changes = {
                    split: [float(value) for value in size * (1 + 0.6 * draw.normal(size=texts))]
                    for split in ("calibration", "heldout")
                }
                errors = [float(value) for value in 0.002 * pairs**0.6 * (1 + 0.1 * draw.random(texts))]
                rows += [
                    {
                        "kind": "replacement",
                        "key": f"{split}/{way}/{stand}/{pairs}",
                        "split": split,
                        "way": way,
                        "stand": stand,
                        "pairs": pairs,
                        "texts": [f"{split[0]}{place}" for place in range(texts)],
                        "nll": [2.9 + change for change in mine],
                        "delta_nll": mine,
                        "branch_error": errors,
                    }
                    for split, mine in changes.items()
                ]
                wide, narrow = (mean_interval(changes["heldout"], level) for level in (0.95, 0.90))
                needed = texts_needed(float(np.std(changes["calibration"], ddof=1)), MARGIN)
                summary.append(
                    {
                        "pairs": pairs,
                        "way": way,
                        "stand": stand,
                        "texts": texts,
                        "delta_nll": wide.estimate,
                        "low": wide.low,
                        "high": wide.high,
                        "low_90": narrow.low,
                        "high_90": narrow.high,
                        "delta_nll_calibration": float(np.mean(changes["calibration"])),
                        "needed": needed,
                        "verdict": equivalence_verdict(changes["heldout"], MARGIN, needed),
                        "branch_error": float(np.mean(errors)),
                    }
                )
    return rows, summary
