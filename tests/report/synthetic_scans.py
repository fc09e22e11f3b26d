"""Synthetic ``scan`` and ``probe`` records with the shape of real ones, from a seeded generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinscope.lab.draws import generator

CALIBRATION, HELDOUT = ("c1", "c2", "c3", "c4"), ("h1", "h2", "h3", "h4")
KEYS = (
    "branch_error",
    "branch_error_trimmed",
    "norm_error",
    "attention_js",
    "attention_js_worst",
    "attention_topk",
    "attention_topk_worst",
    "logit_js",
    "logit_topk_1",
    "logit_topk_5",
    "logit_topk_10",
)
#: (kind of the left, left, right, branch error): far, an exact copy, a noisy copy.
PAIRS = (
    ("attention", "layers.3.self_attn", "layers.4.self_attn", 1.3),
    ("attention", "layers.7.self_attn", "layers.12.self_attn", 0.0),
    ("attention", "layers.16.self_attn", "layers.17.self_attn", 0.9),
    ("mlp", "layers.5.mlp", "layers.6.mlp", 1.1),
    ("mlp", "layers.8.mlp", "layers.17.mlp", 0.03),
    ("q_norm", "layers.9.self_attn.q_norm", "layers.9.self_attn.k_norm", 0.4),
)
THRESHOLDS = {
    "branch_error": 0.15,
    "branch_error_trimmed": 0.15,
    "norm_error": 0.15,
    "attention_js": 0.01,
    "attention_js_worst": 0.05,
    "logit_js": 0.01,
}


def measures(kind: str, error: float, draw: np.random.Generator) -> dict[str, Any]:
    """Every measure at about one branch error; what a kind lacks is null with a reason."""
    size = error * float(np.exp(0.12 * draw.normal()))
    agreement = float(np.clip(1 - 0.4 * size, 0, 1))
    found: dict[str, Any] = dict.fromkeys(KEYS, agreement)
    found |= {"branch_error": size, "branch_error_trimmed": size, "norm_error": size}
    found |= {"attention_js": 0.2 * size**2, "attention_js_worst": 0.4 * size**2, "logit_js": 0.04 * size**2}
    for key in KEYS:
        if (key == "norm_error" and kind != "q_norm") or (kind == "mlp" and key.startswith("attention")):
            found |= {key: None, f"{key}_reason": "this kind has none"}
    return found


def null_of(kind: str, name: str, error: float, draw: np.random.Generator) -> dict[str, Any]:
    found = {"null": name} | measures(kind, error, draw)
    if name in ("zero", "mean", "permuted"):
        for key in KEYS:
            if key.startswith("attention") and found[key] is not None:
                found |= {key: None, f"{key}_reason": "a null without attention"}
    if name == "zero":
        found["branch_error"] = 1.0
    if name == "self":
        found |= {key: 1.0 if "topk" in key else 0.0 for key in KEYS if found[key] is not None}
    return found


def scan_record(planted: bool = True) -> dict[str, Any]:
    """A complete record: six pairs, of which an exact and a noisy copy are candidates."""
    rows, pairs = [], []
    for number, (kind, left, right, error) in enumerate(PAIRS):
        directions = []
        for way, (reference, substitute) in enumerate(((left, right), (right, left))):
            mine: list[dict[str, Any]] = []
            for split, texts in (("calibration", CALIBRATION), ("heldout", HELDOUT)):
                for place, text in enumerate(texts):
                    draw = generator(number, f"scan {way} {split}", place)
                    other = reference.replace("layers.", "layers.1")
                    heads = None if kind == "mlp" else [0.2 * error**2, 0.1 * error**2]
                    mine.append(
                        {
                            "key": f"{left}={right}/{reference}/{text}",
                            "pair": f"{left}={right}",
                            "kind": kind
                            if kind != "q_norm"
                            else ("k_norm" if reference.endswith("k_norm") else kind),
                            "exploratory": False,
                            "split": split,
                            "text": text,
                            "reference": reference,
                            "substitute": substitute,
                            "tokens": 32,
                            "reference_norm": 40.0,
                            **measures(kind, error, draw),
                            "attention_js_heads": heads,
                            "attention_topk_heads": heads and [1.0, 0.9],
                            **(
                                {}
                                if heads
                                else {
                                    f"attention_{part}_heads_reason": "this kind has none"
                                    for part in ("js", "topk")
                                }
                            ),
                            "nulls": [
                                null_of(kind, "zero", 1.0, draw),
                                null_of(kind, "mean", 0.8, draw),
                                null_of(kind, "permuted", 1.4, draw),
                                null_of(kind, "self", 0.0, draw),
                                null_of(kind, f"other.{other}", 1.5, draw),
                            ],
                            "timing": {"seconds": 1.5},
                        }
                    )
            rows += mine
            known = [key for key in THRESHOLDS if mine[0][key] is not None]
            pooled = {
                split: {
                    key: float(np.mean([row[key] for row in mine if row["split"] == split]))
                    if mine[0][key] is not None
                    else None
                    for key in KEYS
                }
                | {f"{key}_reason": "this kind has none" for key in KEYS if mine[0][key] is None}
                for split in ("calibration", "heldout")
            }
            worst = max(mine, key=lambda row: row["branch_error"])
            directions.append(
                {
                    "reference": reference,
                    "substitute": substitute,
                    **pooled,
                    "worst": {"text": worst["text"], "branch_error": worst["branch_error"]},
                    "limits": [
                        {"measure": key, "most": THRESHOLDS[key], "null": "mean", "nearest": 0.8}
                        for key in known
                    ],
                }
            )
        candidate = error < 0.1
        pairs.append(
            {
                "id": f"{left}={right}",
                "kind": kind,
                "left": left,
                "right": right,
                "exploratory": False,
                "level": "candidate" if candidate else "parity",
                "reason": "on all 8 texts it is close" if candidate else f"the branch error is {error:g}",
                "candidate": candidate,
                **(
                    {"failed_on": None, "failed_on_reason": "it failed nowhere"}
                    if candidate
                    else {"failed_on": "calibration"}
                ),
                "strain": error / 0.15,
                "directions": directions,
            }
        )
    return {
        "schema": "twinscope.scan/1",
        "status": "complete",
        "config": {"name": "reuse"},
        "provenance": {"verb": "scan", "name": "reuse", "started": "2026-11-30T14:15:30Z"},
        "summary": {
            "sealed": "0123456789abcdef" * 4,
            "heldout_opened_at": "2026-11-30T14:20:00Z",
            "model": "a folder, qwen3, 24 layers, width 576",
            "weights": "trained",
            "planted": planted,
            "parity": {"passed": True, "detail": "by a check before the scan"},
            "notes": ["6 pairs of q and k norms were asked for, the model gives 1"],
            "texts": {"calibration": 4, "heldout": 4},
            "tokens": 32,
            "pairs": pairs,
            "peak_rss_mib": 458.2,
            "planned_peak_mib": 470.0,
            "memory": {"budget_mib": 512.0, "anonymous_mib": 341.0, "file_mib": 117.0},
        },
        "rows": rows,
        "claims": [],
    }


def probe_record() -> dict[str, Any]:
    """A complete record of a machine with two cores whose disk rate is not known."""
    matmul = [
        {
            "kind": "matmul",
            "key": f"matmul-{threads}/2048x{columns}",
            "shape": [32, 2048, columns],
            "threads": threads,
            "first_s": 0.004 * columns / 2048 * (3 - threads),
            "next_s": [0.0026 * columns / 2048 / threads * (1 + 0.1 * call) for call in range(3)],
            "gflop_per_s": 2e-9 * 32 * 2048 * columns / (0.0026 * columns / 2048 / threads),
            "finite": True,
            "error": 4.3e-8,
            "error_bound": 1.2e-4,
            "peak_rss_mib": 83.5,
        }
        for threads in (1, 2)
        for columns in (2048, 6144)
    ]
    reading = {
        "kind": "reading",
        "key": "reading/1",
        "file_mib": 128.0,
        "disk_mib_per_s": None,
        "disk_mib_per_s_reason": "the file's pages stayed in memory",
        "cache_mib_per_s": 11518.7,
    }
    conversion = {
        "kind": "conversion",
        "key": "conversion/1",
        "million_values_per_s": 4404.6,
        "piece_values": 524288,
    }
    return {
        "schema": "twinscope.probe/1",
        "status": "complete",
        "config": {"name": "machine"},
        "provenance": {"verb": "probe", "name": "machine", "started": "2026-11-30T14:15:30Z"},
        "summary": {
            "cores": 2,
            "processor": {
                "model": "A processor",
                "logical": 2,
                "physical": 2,
                "affinity": 2,
                "quota": None,
                "quota_reason": "no control group limits this process",
            },
            "memory": {
                "total_mib": 24105.6,
                "available_mib": 22798.3,
                "limit_mib": None,
                "limit_mib_reason": "no control group limits this process",
            },
            "swap": {"total_mib": 0.0, "used_mib": 0.0},
            "disk": {"path": "/somewhere", "total_mib": 258019.6, "free_mib": 79175.6},
            "peak_rss_mib": 83.5,
            "matmul": matmul,
            "reading": reading,
            "conversion": conversion,
            "level": "capacity",
            "seconds": 5.5,
        },
        "rows": [*matmul, reading, conversion],
        "claims": [],
    }
