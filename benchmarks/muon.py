"""One Muon step here against torch's own and against bare matrix products, on this machine's CPU.

Prints a table and writes benchmarks/results/muon.json. Measured is the whole step of
twinscope.propagation.optimizers (norm, clipping, momentum, Newton–Schulz, decay, update), and its rate is
taken over the FLOPs of Newton–Schulz alone, so whatever else the step does counts against it. Beside it, in
alternating windows of one process:

- square: the fastest large square float32 product. The target, 70 % of the float32 matmul rate, refers to it.
- same shapes: the step's own products, one at a time into buffers that are there already, and nothing else.
- stock: torch.optim.Muon (AdamW for the rest), whose Newton–Schulz computes in bfloat16.

Each number of threads runs twice in a process of its own: with every instruction the CPU has, and with AVX2
only, which stands in for a CPU without bfloat16 units. Not covered: CUDA, and how well anything trains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twinscope.lab.provenance import close, collect
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.gradients import parameter_names
from twinscope.propagation.optimizers import NEWTON_SCHULZ_ITERATIONS, Optimizer, newton_schulz_flops
from twinscope.propagation.settings import OptimizerSettings

RESULT = Path(__file__).parent / "results" / "muon.json"
TARGET = 0.7
SQUARES = (512, 768, 1024, 1536)
INSTRUCTIONS = {
    "native": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
#: A window is repeated calls of one contender that take about this long.
WINDOW_S = 0.03
#: Stock Muon is left out where it would take longer than this for one step, judged by its last rate.
STOCK_LIMIT_S = 20.0

Shape = tuple[int, ...]
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What one step updates: the shapes of Muon's matrices, and of AdamW's parameters beside them."""

    name: str
    matrices: Sequence[Shape]
    others: Sequence[Shape] = ()

    @property
    def flops(self) -> int:
        return sum(newton_schulz_flops(*shape) for shape in self.matrices)


def cases() -> list[Case]:
    """As many matrices of one shape as a small decoder has blocks, a lone one, and a whole decoder."""
    one_shape = [
        ((128, 128), 8),
        ((384, 128), 8),
        ((512, 128), 8),
        ((256, 256), 8),
        ((1024, 256), 4),
        ((768, 768), 2),
        ((3072, 768), 1),
        ((256, 256), 1),
    ]
    found = [
        Case(f"{rows}×{columns}, {k} of them", [(rows, columns)] * k) for (rows, columns), k in one_shape
    ]
    decoder = build_gpt(GPTConfig(vocab=96, layers=4, width=128, heads=4, context=64))
    inner = [p for block in parameter_names(decoder).blocks for _, p in block if p.dim() == 2]
    ids = {id(p) for p in inner}
    outer = [tuple(p.shape) for p in decoder.parameters() if id(p) not in ids]
    return [*found, Case("decoder, 4 blocks × 128", [tuple(p.shape) for p in inner], outer)]


def ours(case: Case) -> Run:
    parameters = _parameters(case)
    matrices = {name: p for name, p in parameters.items() if name.startswith("matrix")}
    others = {name: p for name, p in parameters.items() if name not in matrices}
    settings = OptimizerSettings(kind="muon", lr=1e-4, adamw_lr=1e-4, warmup=0, final_lr_fraction=1.0)
    optimizer = Optimizer(matrices, others, settings, horizon=1)
    grads = _gradients(parameters)
    return lambda: optimizer.step(grads, 0)


def stock(case: Case) -> Run:
    parameters = _parameters(case)
    matrices = [p for name, p in parameters.items() if name.startswith("matrix")]
    others = [p for name, p in parameters.items() if not name.startswith("matrix")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=1e-4)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-4, fused=True))
    for name, grad in _gradients(parameters).items():
        parameters[name].grad = grad

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return step


def same_shapes(case: Case) -> Run:
    products = []
    for shape in case.matrices:
        m, n = sorted(shape)
        x, gram = torch.randn(n, m), torch.randn(m, m)
        products += [
            (x.mT, x, torch.empty(m, m)),
            (gram, gram, torch.empty(m, m)),
            (x, gram, torch.empty(n, m)),
        ]

    def run() -> None:
        for left, right, out in products:
            for _ in range(NEWTON_SCHULZ_ITERATIONS):
                torch.mm(left, right, out=out)

    return run


def square(side: int) -> Run:
    left, right, out = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    return lambda: torch.mm(left, right, out=out)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Every case in this process, with the threads and instructions it was started with."""
    torch.manual_seed(0)
    fastest = min(SQUARES, key=lambda side: _alternate({"square": square(side)}, 5)["square"][0] / side**3)
    rows = []
    stock_rate = float("inf")
    for case in cases():
        contenders = {"square": square(fastest), "same_shapes": same_shapes(case), "ours": ours(case)}
        stock_seconds: list[float] = []
        if case.flops / stock_rate < STOCK_LIMIT_S:
            step = stock(case)
            first = _seconds(step, 1)
            if first < 0.5:
                contenders["stock"] = step
            else:
                stock_seconds = [first]
            stock_rate = case.flops / first
        seconds = _alternate(contenders, rounds)
        rates = [2 * fastest**3 / s for s in seconds["square"]]
        of_square = sorted(case.flops / s / rate for s, rate in zip(seconds["ours"], rates, strict=True))
        of_same = [f / s for s, f in zip(seconds["ours"], seconds["same_shapes"], strict=True)]
        row = {
            "case": case.name,
            "flops": case.flops,
            "ours_s": statistics.median(seconds["ours"]),
            "ours_gflops": case.flops / statistics.median(seconds["ours"]) / 1e9,
            "square_side": fastest,
            "square_gflops": statistics.median(rates) / 1e9,
            "of_square": statistics.median(of_square),
            "of_square_range": [of_square[0], of_square[-1]],
            "of_square_best_against_best": case.flops / min(seconds["ours"]) / max(rates),
            "of_same_shapes": statistics.median(of_same),
            "reaches_target": statistics.median(of_square) >= TARGET,
            "rounds": rounds,
        }
        stock_seconds = seconds.get("stock", stock_seconds)
        if stock_seconds:
            row |= {"stock_s": statistics.median(stock_seconds), "stock_windows": len(stock_seconds)}
            row["times_faster_than_stock"] = row["stock_s"] / row["ours_s"]
        else:
            row |= {"stock_s": None, "stock_s_reason": f"one step would take over {STOCK_LIMIT_S:.0f} s"}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11, help="windows per contender")
    parser.add_argument("--here", action="store_true", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(options.threads[0])
        print(json.dumps(measure(options.rounds)))
        return
    provenance = collect(seeds=[0], data={}, compute={"device": "cpu", "threads": options.threads})
    rows = []
    for threads in options.threads:
        for instructions, variables in INSTRUCTIONS.items():
            load = os.getloadavg()[0]
            command = [sys.executable, __file__, "--here", "--threads", str(threads)]
            child = subprocess.run(
                [*command, "--rounds", str(options.rounds)],
                env=os.environ | variables | {"OMP_NUM_THREADS": str(threads)},
                stdout=subprocess.PIPE,
                check=True,
            )
            where = {"threads": threads, "instructions": instructions, "load_before": round(load, 2)}
            found = [where | row for row in json.loads(child.stdout)]
            _print_table(found)
            rows += found
    kept = ("started", "finished", "versions", "cpu", "load_at_start", "load_at_end")
    closed = close(provenance)
    record = {
        "benchmark": "muon",
        "target": f"ours at {TARGET:.0%} or more of the rate of the fastest large square float32 product",
        **{key: closed[key] for key in kept},
        "environment": INSTRUCTIONS,
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten: {RESULT}")


def _alternate(contenders: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each contender, once per round, the order reversed every other round."""
    calls = {}
    for name, run in contenders.items():
        run()
        calls[name] = max(1, round(WINDOW_S / _seconds(run, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(_seconds(contenders[name], calls[name]))
    return seconds


def _seconds(run: Run, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def _parameters(case: Case) -> dict[str, nn.Parameter]:
    shapes = [("matrix", shape) for shape in case.matrices] + [("other", shape) for shape in case.others]
    return {f"{kind}.{i}": nn.Parameter(0.02 * torch.randn(shape)) for i, (kind, shape) in enumerate(shapes)}


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in parameters.items()}


def _print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"\n{first['threads']} thread(s), {first['instructions']} instructions, "
        f"load before {first['load_before']:.1f}; "
        f"square product {first['square_side']}: {first['square_gflops']:.0f} GFLOP/s\n"
        f"{'case':26}{'ms':>9}{'GFLOP/s':>9}{'of square':>11}{'of same shapes':>16}"
        f"{'stock ms':>11}{'faster':>8}"
    )
    for row in rows:
        slow = "–" if row["stock_s"] is None else f"{1e3 * row['stock_s']:.1f}"
        faster = "–" if row["stock_s"] is None else f"{row['times_faster_than_stock']:.1f}×"
        print(
            f"{row['case']:26}{1e3 * row['ours_s']:9.2f}{row['ours_gflops']:9.0f}{row['of_square']:11.0%}"
            f"{row['of_same_shapes']:16.0%}{slow:>11}{faster:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
