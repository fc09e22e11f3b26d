"""A synthetic ``train`` run with the shape and the numbers of a real one, from a seeded generator."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinscope.lab.draws import generator

STEPS = 2000
BLOCKS = 4
BATCHES = 16
CONFIG = """\
name = "twin-sotu"

[model]
layers = 4
width = 128
heads = 4
context = 64

[train]
steps = 2000
seeds = [0, 1]
eval_every = 100

[ep]
displacement = 0.002
rounds = 1
fused = true
"""

Build = Callable[..., Path]


def synthetic_record(
    arms: Sequence[str] = ("ep", "bp"), seeds: Sequence[int] = (0, 1), blocks: int = BLOCKS
) -> dict[str, Any]:
    """A complete record: 20 evaluations and 11 gate points per arm and seed; EP ends 0.004 above BP."""
    steps = range(100, STEPS + 1, 100)
    rows: list[dict[str, Any]] = []
    losses: dict[tuple[str, int, int], np.ndarray] = {}
    for seed in seeds:
        batches = generator(seed, "batches").normal(0, 0.05, BATCHES)
        for index, arm in enumerate(arms):
            behind = 0.0 if arm == "bp" else 0.0035 + 0.012 * index
            for step in steps:
                noise = generator(seed, f"noise {arm}", step)
                curve = 1.718 + 1.3 * (1 + step / 90) ** -0.9 + 0.006 * seed
                early = behind * (1 + 8 * np.exp(-step / 200)) + noise.normal(0, 0.0012)
                values = curve + early + batches + noise.normal(0, 0.006, BATCHES)
                losses[arm, seed, step] = values
                rows.append(
                    {
                        "key": f"eval/{seed}/{step}/{arm}",
                        "kind": "eval",
                        "seed": seed,
                        "step": step,
                        "arm": arm,
                        "train_loss": float(curve - 0.05 + noise.normal(0, 0.02)),
                        "val_loss": float(values.mean()),
                        "val_losses": [float(value) for value in values],
                        "skipped_steps": 0,
                        "timing": {"seconds": 0.2},
                    }
                )
            if arm != "bp":
                rows += [_gate_row(seed, step, arm, blocks, index) for step in range(0, STEPS + 1, 200)]
    return {
        "schema": "twinscope.train/1",
        "status": "complete",
        "config": {"name": "twin-sotu", "train": {"steps": STEPS, "seeds": list(seeds)}},
        "provenance": _provenance(seeds),
        "summary": _summary(arms, seeds, rows, losses),
        "rows": rows,
        "claims": [
            {
                "statement": "Each EP model ends within 0.015 nats per token of its BP twin.",
                "level": "measured",
                "supports": "This model, text and seeds, with the states displaced by at least 1e-3.",
                "does_not_support": "Other sizes, texts or seeds; anything about speed.",
            }
        ],
    }


def _gate_row(seed: int, step: int, arm: str, blocks: int, index: int) -> dict[str, Any]:
    draws = generator(seed, f"gate {arm}", step)
    depth = np.arange(blocks) / max(1, blocks - 1)
    gaps = 10 ** (-3.1 + 0.9 * (1 - depth) - 0.35 * np.exp(-step / 300) + draws.normal(0, 0.06, blocks))
    ratios = 0.002 * 10 ** (-0.45 * (1 - depth) * (0.6 + 0.4 * step / STEPS))
    return {
        "key": f"gate/{seed}/{step}/{arm}",
        "kind": "gate",
        "seed": seed,
        "step": step,
        "arm": arm,
        "block_cosine": [float(1 - gap * (index + 1)) for gap in gaps],
        "outer_cosine": float(1 - gaps.max() * 1.4),
        "control_cosine": 1 - 2.1e-7,
        "displacement_ratio": [float(ratio) for ratio in ratios],
        "residual": float(0.004 * 10 ** draws.normal(0, 0.12) * (1 + step / STEPS)),
        "beta": 0.0123,
        "timing": {"seconds": 0.5},
    }


def _summary(
    arms: Sequence[str],
    seeds: Sequence[int],
    rows: Sequence[dict[str, Any]],
    losses: dict[tuple[str, int, int], np.ndarray],
) -> dict[str, Any]:
    per_arm: dict[str, Any] = {}
    for arm in arms:
        final = {seed: float(losses[arm, seed, STEPS].mean()) for seed in seeds}
        parts = [
            {"seed": seed, "val_loss": loss, "val_bits_per_byte": loss / np.log(2), "skipped_steps": 0}
            for seed, loss in final.items()
        ]
        mean = float(np.mean(list(final.values())))
        per_arm[arm] = {
            "rule": "bp" if arm == "bp" else "ep",
            "val_loss": mean,
            "val_bits_per_byte": mean / float(np.log(2)),
            "steps": STEPS,
            "skipped_steps": 0,
            "per_seed": parts,
        }
    difference = {}
    for arm in arms if "bp" in arms else ():
        if arm == "bp":
            continue
        windows = []
        for start in range(1, STEPS, 400):
            inside = range(start + 99, start + 400, 100)
            paired = {
                seed: np.mean([losses[arm, seed, step] - losses["bp", seed, step] for step in inside], axis=0)
                for seed in seeds
            }
            windows.append(
                {
                    "start": start,
                    "end": start + 399,
                    **_interval(np.mean(list(paired.values()), axis=0)),
                    "n": BATCHES,
                    "per_seed": [{"seed": seed, **_interval(values)} for seed, values in paired.items()],
                }
            )
        difference[arm] = {"windows": windows}
    fidelity = {}
    for arm in arms:
        gates = [row for row in rows if row["kind"] == "gate" and row["arm"] == arm]
        if gates:
            cosines = [value for row in gates for value in row["block_cosine"]]
            fidelity[arm] = {
                "median_cosine": float(np.median(cosines)),
                "worst_cosine": min(cosines),
                "displacement": min(max(row["displacement_ratio"]) for row in gates),
                "residual": max(row["residual"] for row in gates),
            }
    final = [float(losses["bp", seed, STEPS].mean()) for seed in seeds] if "bp" in arms else []
    return {
        "arms": per_arm,
        "difference": difference,
        "gate": {**next(iter(fidelity.values())), "per_arm": fidelity},
        "baselines": {"unigram": 3.1072, "bigram": 2.4986, "trigram": 2.0741},
        "seed_scatter": {
            **(
                {"bp_final_sd": float(np.std(final, ddof=1))}
                if len(final) > 1
                else {"bp_final_sd": None, "bp_final_sd_reason": "one seed has no scatter"}
            ),
            "n": len(final),
            "note": "Two seeds give no interval over seeds.",
        },
    }


def _interval(values: np.ndarray) -> dict[str, float]:
    half = 2.1314 * float(values.std(ddof=1)) / len(values) ** 0.5  # Student t, 15 degrees of freedom
    mean = float(values.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _provenance(seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "verb": "train",
        "name": "twin-sotu",
        "started": "2026-11-30T14:15:30Z",
        "command": ["/usr/bin/python", "-m", "twinscope", "train", "experiments/twin-sotu.toml"],
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.6"},
        "cpu": {"model": "A processor", "logical_cores": 2, "affinity": [0, 1]},
        "compute": {"device": "cpu", "threads": 2, "precision": "fp32"},
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "seeds": list(seeds),
        "data": {"sotu": "sha256:" + "0123456789abcdef" * 4},
        "load_at_start": [0.12, 0.3, 0.2],
        "finished": "2026-11-30T14:52:01Z",
        "load_at_end": [2.05, 1.9, 1.5],
    }


@pytest.fixture
def record() -> dict[str, Any]:
    """A complete record that the test may change."""
    return synthetic_record()


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """The generator itself, for other arms, seeds and depths."""
    return synthetic_record


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write a record as a run directory; ``result=False`` leaves only config, provenance and journal."""
    return lambda record, **options: write_run(tmp_path, record, **options)


def write_run(
    root: Path,
    record: dict[str, Any],
    name: str = "twin-sotu",
    result: bool = True,
    config: str = CONFIG,
) -> Path:
    record = copy.deepcopy(record)
    verb = record["schema"].removeprefix("twinscope.").partition("/")[0]
    folder = root / f"20261130T141530Z-{verb}-{name}"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(record["provenance"]), encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in record["rows"]]
    (folder / "journal.jsonl").write_text("".join(lines), encoding="utf-8")
    if result:
        (folder / "result.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium to look at pages with; the test is skipped where there is none."""
    chosen = os.environ.get("TWINSCOPE_CHROMIUM")
    found = next(
        (
            path
            for path in (chosen, "/usr/bin/chromium", shutil.which("chromium"))
            if path and Path(path).is_file()
        ),
        None,
    )
    if found is None:
        pytest.skip("no Chromium found: install it, or set TWINSCOPE_CHROMIUM to its path")
    return found
