"""What one batch under the spectrometer costs, and how much memory more gains take.

Time: one batch with ten arms (its share of pass 1, pass 2 and the control included) beside its ten EP and
two BP gradients computed alone, alternating within one process. Memory: peak of a fresh process with 2 and
with 12 gains, vectors per arm left out. Writes results/leak.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from twinscope import EPSettings, GPTConfig, bp_gradient, build_gpt, ep_gradient, leak_spectrum
from twinscope.lab.budget import peak_rss_mib
from twinscope.lab.provenance import close, collect
from twinscope.propagation.leak.config import LeakSettings
from twinscope.propagation.leak.passes import Bench, Ledger

RESULTS = Path(__file__).parent / "results" / "leak.json"
ROUNDS = 7
CASES: list[dict[str, Any]] = [
    {"read": "energy", "rounds": 1, "fused": False},
    {"read": "linear", "rounds": 1, "fused": False},
    {"read": "energy", "rounds": 3, "fused": False},
]


def model_and_batches(count: int):
    """8 blocks × 128 channels and ``count`` random batches of 12 × 64 tokens."""
    model = build_gpt(GPTConfig(vocab=96, layers=8, width=128, heads=4, context=64), seed=0)
    rng = np.random.default_rng(0)
    draw = [[torch.from_numpy(rng.integers(0, 96, size=(12, 64))) for _ in range(2)] for _ in range(count)]
    return model, [(tokens, targets) for tokens, targets in draw]


def timed(case: dict[str, Any], budget_mib: float) -> dict[str, Any]:
    """Seconds of one batch here and of its gradients alone: medians and the median of paired ratios."""
    model, batches = model_and_batches(8)
    settings = EPSettings(displacement=1e-8, nudge="positive", **case)
    ledger = Ledger()
    bench = Bench(model, batches, settings, LeakSettings(batches=8, budget_mib=budget_mib), ledger)
    alone = EPSettings(beta=bench.nudge()["beta"], nudge="positive", **case)
    ours, gradients = [], []
    with tempfile.TemporaryDirectory() as scratch, bench.means(Path(scratch)) as means:
        for index in range(8):
            bench.reference(index, means)
        means.divide(1)
        vectors = bench.vectors()
        for _ in range(ROUNDS):
            for key in ("reference batch=0", "arms batch=0", "cross batch=0 of=8"):
                ledger._rows.pop(key, None)
            began = time.perf_counter()
            bench.reference(0, means)
            bench.arms(0, means, vectors)
            ours.append(time.perf_counter() - began)
            began = time.perf_counter()
            for arm in bench.every:
                gain = {"profile": "uniform", "value": arm.gain}
                arm_settings = EPSettings.model_validate(alone.model_dump(exclude_none=True) | {"gain": gain})
                ep_gradient(model, *batches[0], arm_settings, diagnose=False)
            for _ in range(2):
                bp_gradient(model, *batches[0])
            gradients.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(ours, gradients, strict=True)]
    return {
        **case,
        "arms": len(bench.every),
        "vectors_kept": len(bench.with_vectors),
        "ours_s": median(ours),
        "gradients_alone_s": median(gradients),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def peak(gains: int) -> float:
    """Peak MiB of a fresh process that measures a spectrum with so many gains."""
    command = [sys.executable, __file__, "--peak", str(gains)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peak"]:
        model, batches = model_and_batches(8)
        gains = [2.0**exponent for exponent in range(int(sys.argv[2]))]
        leak_spectrum(model, batches, EPSettings(displacement=1e-8, rounds=1, fused=False, read="energy"),
                      gains=gains, budget_mib=60.0)  # fmt: skip
        print(peak_rss_mib())
        return
    provenance = collect(seeds=[0], data={}, compute={"device": "cpu", "threads": 1, "precision": "fp32"})
    rows = [timed(case, budget) for case in CASES for budget in (1024.0, 60.0)]
    peaks = {str(gains): peak(gains) for gains in (2, 12)}
    for row in rows:
        print(
            f"{row['read']} read, K = {row['rounds']}, vectors of {row['vectors_kept']} arms kept: "
            f"{row['ours_s']:.3f} s a batch, gradients alone {row['gradients_alone_s']:.3f} s, "
            f"ratio {row['ratio']:.2f}"
        )
    print(f"peak memory with 2 gains {peaks['2']:.0f} MiB, with 12 gains {peaks['12']:.0f} MiB")
    record = {"benchmark": "leak", "rows": rows, "peak_rss_mib": peaks, "provenance": close(provenance)}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
