"""Synthetic ``cost``, ``check`` and ``plan`` records with the shape and the numbers of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conftest import _provenance
from twinscope.lab.draws import generator

COST_CONFIG = """\
name = "two-shapes"

[model]
layers = 12
width = 256
context = 128

[data]
batch = 4

[[shapes]]
name = "12x256"

[[shapes]]
name = "6x512"
layers = 6
width = 512
batch = 2

[[arms]]
name = "ep"
rule = "ep"

[[arms]]
name = "bp"
rule = "bp"

[[arms]]
name = "ep3"
rule = "ep"

[cost]
denominator = "bp"
"""
SHAPES = ("12x256", "6x512")
#: Seconds and MFLOP of each part of a step.
PARTS: dict[str, dict[str, tuple[float, int]]] = {
    "ep": {
        "data": (0.001, 0), "embedding": (0.001, 0), "free": (0.100, 1000), "forces": (0.110, 1000),
        "rebuild": (0.090, 1000), "read": (0.200, 2000), "readout": (0.020, 100), "optimizer": (0.030, 0),
        "unmarked": (0.008, 0),
    },
    "bp": {
        "data": (0.001, 0), "embedding": (0.001, 0), "forward": (0.100, 1000), "backward": (0.190, 2000),
        "readout": (0.010, 50), "optimizer": (0.030, 0), "unmarked": (0.008, 0),
    },
    "ep3": {
        "data": (0.001, 0), "embedding": (0.001, 0), "free": (0.100, 1000), "forces": (0.330, 3000),
        "rebuild": (0.300, 3000), "read": (0.200, 2000), "readout": (0.040, 200), "optimizer": (0.030, 0),
        "unmarked": (0.008, 0),
    },
}  # fmt: skip
RATIOS = {"ep": (1.66, 1.63, 1.69), "ep3": (2.96, 2.90, 3.02)}
FREE = "free states: nothing is displaced"


def cost_record(
    arms: Sequence[str] = ("ep", "bp", "ep3"),
    shapes: Sequence[str] = SHAPES,
    windows: int = 4,
    frontier: bool = False,
    disturbed: bool = False,
) -> dict[str, Any]:
    """A complete record of a quiet machine, or with two windows of the second arm ``disturbed``."""
    draws = generator(0, "cost")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        position = 0
        for sweep in range(windows):
            for arm in arms if sweep % 2 == 0 else arms[::-1]:
                seconds = _whole(arm) * (1 + 0.01 * float(draws.uniform()))
                reasons = []
                if disturbed and arm == arms[1] and sweep < 2:
                    reasons = ["other processes kept 1.00 CPUs busy (bound 0.1): cc1 (7) 1.00"]
                rows.append(_window(shape, arm, sweep, position, seconds, reasons))
                position += 1
        rows += [_parts_row(shape, arm) for arm in arms]
        rows += [{"key": f"memory {shape} {arm}", "kind": "memory", **_memory(shape, arm)} for arm in arms]
        rows.append(
            {
                "key": f"count {shape}",
                "kind": "count",
                "shape": shape,
                "flops": {arm: {p: n * 10**6 for p, (_, n) in _of(arm).items() if n} for arm in arms},
            }
        )
    compared = [_comparison(shape, arm) for shape in shapes for arm in arms if arm != "bp"]
    main = compared[0]
    summary = {
        "numerator": main["arm"],
        "denominator": "bp",
        "shape": shapes[0],
        **{
            key: main[key]
            for key in (
                "wall_clock_ratio", "train_step_ratio", "flops", "peak_memory_ratio", "activation_peak_ratio",
                "fidelity", "verdict",
            )
        },
        "windows_agree": True,
        "band": 0.05,
        "controlled": not disturbed,
        "bounds": {"other_cpus": 0.1, "excess_load": 0.5},
        "disturbances": [
            {"shape": row["shape"], "arm": row["arm"], "sweep": row["sweep"], "reason": reason}
            for row in rows
            if row["kind"] == "window"
            for reason in row["disturbances"]
        ],
        "claims": _claims(),
        "comparisons": compared,
        "agreement": [_agreement(shape, arm, windows) for shape in shapes for arm in arms],
        "parts": [entry for shape in shapes for arm in arms for entry in _parts(shape, arm)],
        "ledger": [
            {
                "shape": shape, "arm": arm, "stage": part, "term": "matmul", "flops": flops * 10**6,
                "causal_flops": flops * 9 * 10**5, "formula": f"12 × 2NW = {flops}",
            }
            for shape in shapes
            for arm in arms
            for part, (_, flops) in _of(arm).items()
            if flops
        ],
        "memory": [_memory(shape, arm) for shape in shapes for arm in arms],
        "overhead": [
            {
                "shape": shapes[0], "arm": "bp", "overhead": 0.021, "low": 0.012, "high": 0.03, "n": windows,
                "bare_step_seconds": 0.33, "journal_seconds_per_step": 1e-5,
            }
        ],
        "published": [
            {
                "name": "published: an A6000",
                "source": "published training rates",
                "values": {"wall_clock_ratio": 2.7, "train_step_ratio": 2.77, "flops_ratio": 3.0},
            }
        ],
    }  # fmt: skip
    if frontier:
        found = frontier_rows()
        rows += found
        summary["frontier"] = _frontier_summary([row for row in found if row["kind"] == "frontier"])
    return {
        "schema": "twinscope.cost/1",
        "status": "complete",
        "config": {"name": "two-shapes"},
        "provenance": _provenance([0]) | {"verb": "cost", "name": "two-shapes"},
        "summary": summary,
        "rows": rows,
        "claims": [
            {
                "statement": f"at shape '{shapes[0]}', {main['verdict']}",
                "level": "measured",
                "supports": "that steps take times of this ratio here",
                "does_not_support": "other devices or shapes",
            }
        ],
    }


def frontier_rows(measured: bool = True) -> list[dict[str, Any]]:
    """A control, a cheap point, a symmetric one nearer than any axis shows, and one that does not count."""
    rows: list[dict[str, Any]] = []
    settings = (
        # label, K, fused, nudge, read, FLOPs, 1 - median cosine, residual
        ("k0", 0, True, "positive", "linear", 1.0, 0.0, None),
        ("k1-fused-positive-linear", 1, True, "positive", "linear", 1.61, 2e-4, 0.03),
        ("k1-unfused-symmetric-linear", 1, False, "symmetric", "linear", 2.6, 1e-12, 0.03),
        ("k3-unfused-positive-energy", 3, False, "positive", "energy", 2.9, 4e-5, 0.002),
        ("k3-unfused-positive-linear-damping0.7", 3, False, "positive", "linear", 2.9, 1e-5, 0.54),
    )
    for label, rounds, fused, nudge, read, cost, _, _ in settings:
        rows.append(
            {
                "key": f"frontier cost {label}", "kind": "frontier_cost", "shape": "model",
                **_setting(label, rounds, fused, nudge, read, cost, measured),
                "causal_ratio": cost, "shorthand_ratio": cost + 0.05, "disturbances": [],
                **(
                    {"step_seconds": {"ep": [cost, cost], "bp": [1.0, 1.0]}}
                    if measured
                    else {"step_seconds": None, "step_seconds_reason": "frontier.measure = false"}
                ),
            }
        )  # fmt: skip
    for start in ("trained", "fresh"):
        for target in (1e-3, 1e-2):
            for label, rounds, fused, nudge, read, cost, gap, residual in settings:
                if rounds == 0 and target == 1e-2:
                    continue
                rows.append(
                    {
                        "key": f"frontier {start} {target} {label}", "kind": "frontier", "shape": "model",
                        "start": start, "batches": 4, "block_cosine": [1 - gap] * 4,
                        **_setting(label, rounds, fused, nudge, read, cost, measured),
                        **_point(target if rounds else None, gap * (target / 1e-3), residual),
                    }
                )  # fmt: skip
    return rows


def _setting(
    label: str, rounds: int, fused: bool, nudge: str, read: str, cost: float, measured: bool
) -> dict[str, Any]:
    clock: dict[str, Any] = {
        "measured_ratio": cost + 0.1, "measured_low": cost, "measured_high": cost + 0.2,
        "windows_agree": True, "controlled": True,
    }  # fmt: skip
    if not measured:
        clock = dict.fromkeys(clock) | {f"{key}_reason": "frontier.measure = false" for key in clock}
    return {
        "label": label, "rounds": rounds, "fused": fused, "nudge": nudge, "read": read, "damping": 1.0,
        "top_refresh": 1, "analytic_ratio": cost, "counted_ratio": cost + 0.004, **clock,
    }  # fmt: skip


def _point(target: float | None, gap: float, residual: float | None) -> dict[str, Any]:
    cosines = {
        "median_cosine": 1 - gap, "median_low": 1 - 1.2 * gap, "median_high": 1 - 0.8 * gap,
        "worst_cosine": 1 - 3 * gap, "worst_low": 1 - 4 * gap, "worst_high": 1 - 2 * gap,
        "outer_cosine": 1 - gap,
    }  # fmt: skip
    if target is None or residual is None:
        keys = ("target", "displacement", "displacement_low", "residual", "beta")
        nulls = dict.fromkeys(keys) | {f"{key}_reason": FREE for key in keys}
        return cosines | nulls | {"valid": False, "invalid": ["K = 0 is backpropagation: the control"]}
    invalid = [f"the residual {residual:.3f} is above 0.1"] if residual > 0.1 else []
    return cosines | {
        "target": target, "displacement": 1.01 * target, "displacement_low": 1.005 * target,
        "residual": residual, "beta": 0.01, "valid": not invalid, "invalid": invalid,
    }  # fmt: skip


def _frontier_summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    keys = (
        "start", "label", "target", "analytic_ratio", "counted_ratio", "measured_ratio", "measured_low",
        "measured_high", "median_cosine", "worst_cosine", "displacement", "residual",
    )  # fmt: skip

    def shown(wanted: str) -> list[dict[str, Any]]:
        return [
            {key: row[name] for field in keys for name in (field, f"{field}_reason") if (key := name) in row}
            for row in points
            if wanted in row["label"]
        ]

    best = shown("k1-fused") + shown("symmetric")
    return {
        "points": len(points),
        "valid": sum(row["valid"] for row in points),
        "enough": 0.99,
        "frontier": best,
        "cheapest": shown("k1-fused"),
        "control": shown("k0"),
        "references": [
            {
                "name": "reference run", "cost_ratio": 2.77, "median_cosine": 0.969,
                "conditions": "12 blocks, amp", "source": "published rates",
            }
        ],
        "beyond_reference": {"reference run": best},
    }  # fmt: skip


def _of(arm: str) -> dict[str, tuple[float, int]]:
    return PARTS.get(arm, PARTS["ep"])


def _whole(arm: str) -> float:
    return sum(seconds for seconds, _ in _of(arm).values())


def _window(
    shape: str, arm: str, sweep: int, position: int, seconds: float, reasons: list[str]
) -> dict[str, Any]:
    return {
        "key": f"window shape={shape} sweep={sweep} arm={arm}", "kind": "window", "shape": shape, "arm": arm,
        "sweep": sweep, "position": position, "steps": 6, "seconds": 6 * seconds + 0.1,
        "evaluation_seconds": 0.1, "step_seconds": seconds, "wall_seconds": seconds + 0.001,
        "other_cpus": 0.01, "stolen_cpus": None, "stolen_cpus_reason": "this system does not tell",
        "load": 2.0, "disturbances": reasons, "paused": [],
    }  # fmt: skip


def _parts_row(shape: str, arm: str) -> dict[str, Any]:
    return {
        "key": f"parts shape={shape} arm={arm}", "kind": "parts", "shape": shape, "arm": arm, "steps": 4,
        "seconds": {part: seconds for part, (seconds, _) in _of(arm).items()}, "step_seconds": _whole(arm),
    }  # fmt: skip


def _parts(shape: str, arm: str) -> list[dict[str, Any]]:
    return [
        {
            "shape": shape, "arm": arm, "part": part, "seconds": seconds, "share": seconds / _whole(arm),
            "flops": flops * 10**6, "gflops_per_second": flops / seconds / 1e3,
        }
        for part, (seconds, flops) in _of(arm).items()
    ]  # fmt: skip


def _memory(shape: str, arm: str) -> dict[str, Any]:
    activations = {"ep": 104.0, "bp": 100.0, "ep3": 82.0}.get(arm, 90.0)
    return {
        "shape": shape, "arm": arm, "total_mib": 220.0 if arm == "ep" else 210.0,
        "activations_mib": activations, "parameters_mib": 36.0, "gradients_mib": 36.0, "optimizer_mib": 72.0,
        "resident_mib": 800.0,
    }  # fmt: skip


def _agreement(shape: str, arm: str, windows: int) -> dict[str, Any]:
    seconds = _whole(arm)
    return {
        "shape": shape, "arm": arm, "step_seconds": seconds, "steps_per_second": 1 / seconds,
        "windows": windows, "spread": 0.01, "agree": True,
    }  # fmt: skip


def _comparison(shape: str, arm: str) -> dict[str, Any]:
    value, low, high = RATIOS.get(arm, RATIOS["ep"])
    work = sum(flops for _, flops in _of(arm).values()) / sum(flops for _, flops in PARTS["bp"].values())
    return {
        "shape": shape,
        "arm": arm,
        "against": "bp",
        "wall_clock_ratio": {"median": value - 0.01, "low": low - 0.01, "high": high - 0.01, "n": 4},
        "train_step_ratio": {"median": value, "low": low, "high": high, "n": 4},
        "windows_agree": True,
        "flops": {
            "analytic_ratio": work,
            "causal_ratio": work - 0.02,
            "shorthand_ratio": 3.0 if arm == "ep3" else 5 / 3,
            "counted_ratio": work + 0.001,
            "agree": True,
            "differences": [],
            "explanation": ["shorthand 1.6667", "-0.0833 → 1.5833  block 1 needs no force"],
        },
        "peak_memory_ratio": 220 / 210 if arm == "ep" else 1.0,
        "activation_peak_ratio": 1.04 if arm == "ep" else 0.82,
        "fidelity": {
            "median_cosine": 0.9993, "worst_cosine": 0.9981, "displacement": 1.1e-3, "residual": 0.02,
            "control_cosine": 1 - 1e-12,
        },
        "gap": [
            {"reason": "'rebuild' runs at 0.90 of bp's rate", "change": 0.03, "ratio": work + 0.03},
            {"reason": "the pass that times parts, against the windows", "change": 0.0, "ratio": value},
        ],
        "verdict": f"a training step of {arm} takes {value:.3g}× the time and {work:.3g}× the FLOPs",
    }  # fmt: skip


def _claims() -> list[dict[str, Any]]:
    none = "no measurement was made under the claim's conditions"
    ours = {
        "verdict": "overstated", "reason": "the claim of 3.15–3.25× is above the measured",
        "measurement": "'ep3' against 'bp' at shape '12x256'", "measured": 3.0, "measured_low": 2.95,
        "measured_high": 3.01,
    }  # fmt: skip
    other = {
        "verdict": "understated", "reason": "the claim of 1.95–2.05× is below the measured",
        "measurement": "published: an A6000", "measured": 2.77, "measured_low": 2.765, "measured_high": 2.775,
    }  # fmt: skip
    nothing: dict[str, Any] = {
        "verdict": "not comparable", "reason": "the claim holds for other conditions than any measurement",
        **{
            name: value
            for key in ("measurement", "measured", "measured_low", "measured_high")
            for name, value in ((key, None), (f"{key}_reason", none))
        },
    }  # fmt: skip

    def claim(name: str, quantity: str, low: float, high: float, verdict: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name, "quantity": quantity, "low": low, "high": high, "source": f"source of {name}",
            "conditions": {"rounds": 3}, "others": [], **verdict,
        }  # fmt: skip

    found = [
        claim("FLOPs", "flops_ratio", 3.15, 3.25, ours),
        claim("twice", "train_step_ratio", 1.95, 2.05, other),
        claim("literature", "wall_clock_ratio", 6.67, 6.67, nothing),
    ]
    found[0]["others"] = [ours | {"measurement": "'ep3' against 'bp' at shape '6x512'", "measured": 3.02}]
    return found


def check_record(passed: bool = True, layers: int = 3) -> dict[str, Any]:
    """Parity of a model whose last text differs most, or, not ``passed``, of one that differs in a layer."""
    texts = [0.0, 2e-7, 3e-7, 4e-6] if passed else [0.0, 2e-7, 3e-7, 4e-2]
    where: dict[str, Any] = (
        {"first_part": None, "first_part_reason": "no part differs by more than the tolerance"}
        if passed
        else {"first_part": "layer 1"}
    )
    return {
        "schema": "twinscope.check/1",
        "status": "complete",
        "config": {"name": "a-model"},
        "provenance": _provenance([0]) | {"verb": "check", "name": "a-model"},
        "summary": {
            "model": "/models/a-model", "weights": "released", "weights_sha256": "0123456789abcdef" * 4,
            "passed": passed, **where, "bit_equal": False, "method": "layers" if layers else "whole",
            "tokens": 32, "hidden_difference": texts[-1], "hidden_tolerance": 1e-5, "nll_difference": 2e-6,
            "nll_tolerance": 1e-4, "peak_rss_mib": 445.8, "notes": ["the head is tied"],
            "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        },
        "rows": [
            *(
                {
                    "key": f"text-{index}", "kind": "text", "source": "real" if index % 2 else "random",
                    "hidden_difference": value, "nll_difference": 2e-6 * (index > 0),
                    "nll_streamed": 3.0 + index, "nll_library": 3.0 + index,
                }
                for index, value in enumerate(texts)
            ),
            *(
                {"key": f"layer-{index}", "kind": "layer", "layer": index, "difference": 1e-8 * index}
                for index in range(layers)
            ),
        ],
        "claims": [],
    }  # fmt: skip


def plan_record() -> dict[str, Any]:
    """Two attention pairs, and the norms of one layer, over three texts."""
    pairs = [("attention", 3, 7), ("attention", 7, 11)]
    rows: list[dict[str, Any]] = [
        {
            "kind": "text", "key": f"text/{split}-{index}", "split": split, "origin": f"sotu, from {index}",
            "text": f"And what we hold <b>{index}</b>", "tokens": 32, "sha256": f"{index}" * 64,
            "overlap": 0.05 * index,
        }
        for index, split in enumerate(("calibration", "calibration", "heldout"))
    ]  # fmt: skip
    rows += [
        {
            "kind": "pair", "key": f"pair/{left}-{right}", "of": kind, "left": f"layers.{left}.self_attn",
            "right": f"layers.{right}.self_attn", "others_left": [f"layers.{left + 1}.self_attn"],
            "others_right": [f"layers.{right + 1}.self_attn", f"layers.{left + 1}.self_attn"],
        }
        for kind, left, right in pairs
    ]  # fmt: skip
    rows.append(
        {
            "kind": "pair", "key": "pair/norms", "of": "q_norm", "left": "layers.3.self_attn.q_norm",
            "right": "layers.3.self_attn.k_norm", "others_left": [], "others_right": [],
        }
    )  # fmt: skip
    return {
        "schema": "twinscope.plan/1",
        "status": "complete",
        "config": {"name": "reuse"},
        "provenance": _provenance([0]) | {"verb": "plan", "name": "reuse"},
        "summary": {
            "sealed": "fedcba9876543210" * 4, "sealed_at": "2026-11-30T17:51:53Z", "file": "plan.json",
            "model": {
                "family": "qwen3", "layers": 24, "width": 2048, "vocab": 1000, "sha256": "ab" * 32,
                "weights": "random", "planted": False, "told_by": "twinscope.json",
            },
            "rule": "neighbours in depth", "notes": ["one layer has no norms"],
            "pairs": [row["key"] for row in rows if row["kind"] == "pair"], "texts": 3, "tokens": 32,
            "bos": "none: the tokenizer puts nothing before a text", "largest_overlap": 0.1,
            "planned_peak_mib": 422.7,
        },
        "rows": rows,
        "claims": [],
    }  # fmt: skip
