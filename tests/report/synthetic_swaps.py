"""Synthetic ``swap`` records of both modes with the shape of real ones, from a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinscope.lab.draws import generator
from twinscope.lab.statistics import (
    equivalence_verdict,
    holm,
    mean_interval,
    paired_interval,
    texts_needed,
    tost,
)

MARGIN, POWER = 0.01, 0.8
LEFT, RIGHT = "layers.3.mlp", "layers.4.mlp"
DIVERGENCES = ("logit_js", "logit_topk_1", "logit_topk_5", "logit_topk_10")
#: null: its change of the loss, in nats
NULLS = {"zero": 0.21, "mean": 0.12, "other.layers.5.mlp": 0.4, "other.layers.2.mlp": 0.9, "self": 0.0}


def swap_record(
    texts: int = 16, changes: Sequence[float] = (0.001, 0.03), kind: str = "mlp", planted: bool = False
) -> dict[str, Any]:
    """A complete record of one pair: the first direction is close to 0, the second beyond the margin."""
    left, right = (LEFT, RIGHT)
    if kind == "q_norm":
        left, right = "layers.9.self_attn.q_norm", "layers.9.self_attn.k_norm"
    rows: list[dict[str, Any]] = []
    directions = []
    for way, (replaced, by) in enumerate(((left, right), (right, left))):
        draw = generator(way, "swap")
        found: dict[str, list[dict[str, Any]]] = {"calibration": [], "heldout": []}
        for split, mine in found.items():
            for place in range(texts):
                before = 2.9 + 0.3 * draw.normal()
                change = changes[way] + 0.006 * draw.normal()
                heldout = split == "heldout"
                mine.append(
                    {
                        "mode": "pair",
                        "key": f"{replaced} <- {by}/{split}/{place}",
                        "direction": f"{replaced} <- {by}",
                        "replaced": replaced,
                        "by": by,
                        "kind": kind,
                        "exploratory": False,
                        "split": split,
                        "text": f"{split[0]}{place + 1}",
                        "tokens": 255,
                        "bytes": 1180 + place,
                        "nll_before": before,
                        "nll": before + change,
                        "delta_nll": change,
                        **_divergences(abs(change), heldout, draw),
                        "nulls": [_null(name, size, before, draw) for name, size in NULLS.items()]
                        if heldout
                        else [],
                        "timing": {"seconds": 1.5},
                    }
                )
            rows += mine
        directions.append(_direction(replaced, by, found["calibration"], found["heldout"]))
    return {
        "schema": "twinscope.swap/1",
        "status": "complete",
        "config": {"name": "swap"},
        "provenance": {"verb": "swap", "name": "swap", "started": "2026-11-30T14:15:30Z"},
        "summary": _summary(texts, planted)
        | {
            "mode": "pair",
            "level": "candidate",
            "pair": {
                "id": f"{left}={right}",
                "kind": kind,
                "left": left,
                "right": right,
                "exploratory": False,
                "chosen": "the candidate of least strain on calibration",
                "candidate": True,
                "strain": 0.4,
                "scan_reason": "on all 8 texts the branch error is at most 0.06",
                "passed": all(part["verdict"] == "equivalent" for part in directions),
                "level": "candidate",
            },
            "directions": directions,
            "kinds": [],
        },
        "rows": rows,
        "claims": [],
    }


def sweep_record(
    layers: int = 12, texts: int = 8, kinds: Sequence[str] = ("mlp", "attention"), every: int = 1
) -> dict[str, Any]:
    """A complete sweep: dearer with distance and at both ends; MLP 5 and 6 are nearly the same."""
    rows, found = [], []
    for kind in kinds:
        sites = [f"layers.{n}.{'mlp' if kind == 'mlp' else 'self_attn'}" for n in range(0, layers, every)]
        draw = generator(len(kind), "sweep")
        n = len(sites)
        place = np.arange(n)
        weight = 0.03 * (1 + 300 * np.exp(-1.6 * place) + 8 * np.exp(place - n))
        mean = (
            weight[:, None]
            * (0.6 + np.abs(place[:, None] - place[None]) ** 0.6)
            * draw.lognormal(0, 0.4, (n, n))
        )
        if n > 6:
            mean[5, 6], mean[6, 5], mean[3, 4] = 0.0006, 0.002, -0.03
        zero = weight * draw.lognormal(0.1, 0.5, n)
        noise = 0.12 * draw.normal(size=(n, n, texts))
        deltas = mean[:, :, None] * (1 + noise) + 0.001 * draw.normal(size=(n, n, texts))
        zeros = zero[:, None] * (1 + 0.1 * draw.normal(size=(n, texts)))
        for i, site in enumerate(sites):
            rows.append(
                {
                    "mode": "sweep",
                    "key": f"{kind}/heldout/{site}",
                    "kind": kind,
                    "split": "heldout",
                    "replaced": site,
                    "by": [other for other in sites if other != site],
                    "texts": [f"h{text}" for text in range(texts)],
                    "nll_before": [2.9] * texts,
                    "delta_nll": [deltas[i, j].tolist() for j in range(n) if j != i],
                    "zero": zeros[i].tolist(),
                    "itself": [0.0] * texts,
                    "timing": {"seconds": 9.0},
                }
            )
        found.append(_kind(kind, sites, deltas, zeros))
    return {
        "schema": "twinscope.swap/1",
        "status": "complete",
        "config": {"name": "sweep"},
        "provenance": {"verb": "swap", "name": "sweep", "started": "2026-11-30T14:15:30Z"},
        "summary": _summary(texts, False)
        | {
            "mode": "sweep",
            "level": "parity",
            "pair": None,
            "pair_reason": "a sweep tries every pair",
            "directions": [],
            "kinds": found,
        },
        "rows": rows,
        "claims": [],
    }


def _summary(texts: int, planted: bool) -> dict[str, Any]:
    return {
        "sealed": "0123456789abcdef" * 4,
        "sealed_at": "2026-11-30T14:16:00Z",
        "scan": {"sealed": "fedcba9876543210" * 4, "run": "20261130T120000Z-scan-reuse", "candidates": []},
        "model": "a folder, llama, 30 layers, width 576",
        "weights": "released",
        "planted": planted,
        "parity": {"passed": True, "detail": "by a check of this model on this machine"},
        "margin": MARGIN,
        "power": POWER,
        "texts": {"calibration": texts, "heldout": texts},
        "texts_from": "the plan's own",
        "tokens": 256,
        "bos": "none: the tokenizer puts nothing before a text",
        "bytes_counted": "UTF-8 bytes of what the predicted tokens add to the text",
        "heldout_opened_at": "2026-11-30T14:20:00Z",
        "notes": [],
        "peak_rss_mib": 458.2,
        "planned_peak_mib": 470.0,
        "memory": {"budget_mib": 512.0, "anonymous_mib": 341.0, "file_mib": 117.0},
    }


def _divergences(size: float, measured: bool, draw: np.random.Generator) -> dict[str, Any]:
    if not measured:
        reason = {f"{key}_reason": "measured on held-out text alone" for key in DIVERGENCES}
        return dict.fromkeys(DIVERGENCES) | reason
    js = 0.3 * size * float(np.exp(0.2 * draw.normal()))
    agreed = float(np.clip(1 - 1.5 * size, 0, 1))
    return {"logit_js": js, "logit_topk_1": agreed, "logit_topk_5": agreed, "logit_topk_10": agreed}


def _null(name: str, size: float, before: float, draw: np.random.Generator) -> dict[str, Any]:
    change = size * (1 + 0.1 * draw.normal())
    return {"null": name, "nll": before + change, "delta_nll": change, **_divergences(change, True, draw)}


def _direction(
    replaced: str, by: str, calibration: list[dict[str, Any]], heldout: list[dict[str, Any]]
) -> dict[str, Any]:
    changes = [row["delta_nll"] for row in heldout]
    wide, narrow = paired_interval(changes, 0.95), paired_interval(changes, 0.90)
    sd = float(np.std([row["delta_nll"] for row in calibration], ddof=1))
    needed = texts_needed(sd, MARGIN, POWER)
    before, after = (float(np.mean([row[key] for row in heldout])) for key in ("nll_before", "nll"))
    size = sum(row["bytes"] for row in heldout) / sum(row["tokens"] for row in heldout)
    verdict = equivalence_verdict(changes, MARGIN, needed)
    worst = max(heldout, key=lambda row: row["delta_nll"])
    nulls = []
    for name in NULLS:
        mine = [null for row in heldout for null in row["nulls"] if null["null"] == name]
        interval = mean_interval([null["delta_nll"] for null in mine])
        nulls.append(
            {
                "null": name,
                "delta_nll": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                **{key: float(np.mean([null[key] for null in mine])) for key in DIVERGENCES},
            }
        )
    return {
        "direction": f"{replaced} <- {by}",
        "replaced": replaced,
        "by": by,
        "delta_nll": wide.estimate,
        "low": wide.low,
        "high": wide.high,
        "low_90": narrow.low,
        "high_90": narrow.high,
        "method": wide.method,
        "verdict": verdict,
        "reason": f"the change is {wide.estimate:+.4f}",
        "level": "intervention" if verdict == "equivalent" else "candidate",
        "texts": len(heldout),
        "needed": needed,
        "calibration_delta_nll": float(np.mean([row["delta_nll"] for row in calibration])),
        "calibration_sd": sd,
        **{key: float(np.mean([row[key] for row in heldout])) for key in DIVERGENCES},
        "logit_js_worst": max(row["logit_js"] for row in heldout),
        "worst": {"text": worst["text"], "delta_nll": worst["delta_nll"]},
        "nll_before": before,
        "nll_after": after,
        "perplexity_before": float(np.exp(before)),
        "perplexity_after": float(np.exp(after)),
        "bits_per_byte_before": before / np.log(2) / size,
        "bits_per_byte_after": after / np.log(2) / size,
        "saved": {"parameters": 2_654_784, "bytes": 5_309_568},
        "nulls": nulls,
    }


def _kind(kind: str, sites: list[str], deltas: np.ndarray, zeros: np.ndarray) -> dict[str, Any]:
    n = len(sites)
    others = [(i, j) for i in range(n) for j in range(n) if i != j]
    p = np.zeros((n, n))
    adjusted = holm([tost(deltas[i, j], MARGIN).p_value for i, j in others])
    for (i, j), value in zip(others, adjusted, strict=True):
        p[i, j] = value
    tables: dict[str, list[list[Any]]] = {}
    for key, level, end in (
        ("delta_nll", 0.95, "estimate"),
        ("low", 0.95, "low"),
        ("high", 0.95, "high"),
        ("low_all", 1 - 0.05 / len(others), "low"),
        ("high_all", 1 - 0.05 / len(others), "high"),
    ):
        tables[key] = [
            [getattr(mean_interval(deltas[i, j], level), end) if i != j else 0.0 for j in range(n)]
            for i in range(n)
        ]

    def verdict(i: int, j: int) -> str:
        if i == j or p[i, j] < 0.05:
            return "equivalent"
        beyond = tables["low_all"][i][j] > MARGIN or tables["high_all"][i][j] < -MARGIN
        return "different" if beyond else "inconclusive"

    return {
        "kind": kind,
        "sites": sites,
        "pairs": len(others),
        **tables,
        "p_holm": p.tolist(),
        "verdict": [[verdict(i, j) for j in range(n)] for i in range(n)],
        "verdict_alone": [[verdict(i, j) for j in range(n)] for i in range(n)],
        "needed": [[12 if i != j else 2 for j in range(n)] for i in range(n)],
        "calibration_delta_nll": tables["delta_nll"],
        "zero": [
            {"site": site, "delta_nll": found.estimate, "low": found.low, "high": found.high}
            for site, found in ((site, mean_interval(zeros[i])) for i, site in enumerate(sites))
        ],
    }
