"""A matrix product timed in a process that holds NumPy alone; run by path, it prints one JSON object.

Covers the draw, the product, its check against one row in float64, and the peak memory of the process. It
imports nothing of the house, so that the peak is that of NumPy and the matrices. How many threads NumPy's
library takes is set in the environment before the start.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

#: Columns of the matrix that the float64 row takes at a time, so that the check needs little memory.
_COLUMNS = 32


def timed_product(rows: int, inner: int, columns: int, repeats: int, seed: int) -> dict[str, object]:
    """X (rows × inner) @ W (inner × columns) in float32, ``1 + repeats`` times, in seconds.

    ``error`` is the largest difference of X's first row from the same row in float64, over the norm of
    what is summed: ``|x W − fl(x W)|_j / (|x| |W|)_j``; ``(inner + 1) · 2⁻²⁴`` bounds it (Higham 2002,
    Accuracy and Stability, section 3.5).
    """
    draws = np.random.default_rng(seed)
    x = draws.standard_normal((rows, inner), dtype=np.float32)
    w = draws.standard_normal((inner, columns), dtype=np.float32)
    out = np.empty((rows, columns), dtype=np.float32)
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        np.matmul(x, w, out=out)
        seconds.append(time.perf_counter() - began)
    row, error = x[0].astype(np.float64), 0.0
    for start in range(0, columns, _COLUMNS):
        block = w[:, start : start + _COLUMNS].astype(np.float64)
        scale = np.abs(row) @ np.abs(block)
        error = max(error, float(np.max(np.abs(row @ block - out[0, start : start + _COLUMNS]) / scale)))
    return {
        "shape": [rows, inner, columns],
        "first_s": seconds[0],
        "next_s": seconds[1:],
        "finite": bool(np.isfinite(out).all()),
        "error": error,
    }


def peak_mib() -> float | None:
    """The largest resident memory of this process in MiB, or None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def main(request: str) -> None:
    """Time the products of the JSON ``request``: rows, shapes as [inner, columns], repeats and seed."""
    wanted = json.loads(request)
    products = [
        timed_product(wanted["rows"], inner, columns, wanted["repeats"], wanted["seed"])
        for inner, columns in wanted["shapes"]
    ]
    print(json.dumps({"products": products, "peak_rss_mib": peak_mib()}))


if __name__ == "__main__":
    main(sys.argv[1])
