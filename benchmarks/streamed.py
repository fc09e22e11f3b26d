"""A streamed model beside the library in memory and the usual ways to keep weights on disk.

Every arm runs in fresh processes, in alternating order, on the same texts with the same threads; loading is
not counted and the page cache is warm. Reported: seconds of a forward pass (final states), peak resident
memory (anonymous and file pages apart, watched from outside), largest difference of the states from those in
memory. Beside them the floor: bytes and FLOPs of the pass over the measured rates of this machine. Then the
peak of a forward pass with loss of 8 × 32 tokens in a fresh process, and its growth with depth. Writes
results/streamed.json.

The arms that need another package get it by pip into a folder of their own, for their processes alone.

    python benchmarks/streamed.py [FOLDER …] [--threads 1 2] [--rounds 3] [--airllm]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "streamed.json"
TEXTS, TOKENS, PASSES = 4, 32, 3
ARMS = ("streamed", "in memory", "accelerate fp32", "accelerate bf16", "accelerate upcast")
REQUIREMENTS = {"accelerate": "accelerate==1.15.0", "airllm": "airllm==4.0.*"}
MIB = 1 << 20


# --- one arm, in a process of its own ----------------------------------------------------------------------


def forward_of(arm: str, folder: Path, work: Path) -> Callable[[Any], Any]:
    """Open the model of an arm and return its forward pass: ids to final states in float32."""
    if arm == "streamed":
        from twinscope import open_streamed

        return open_streamed(folder).hidden
    import torch
    import transformers

    if arm == "airllm":
        from airllm import AutoModel  # pyright: ignore[reportMissingImports]

        model = AutoModel.from_pretrained(
            str(folder), device="cpu", dtype=torch.float32, layer_shards_saving_path=str(work)
        )
        return lambda ids: model(
            input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True
        ).hidden_states[-1]
    options: dict[str, Any] = {"dtype": torch.float32}
    if arm != "in memory":
        options = {"device_map": {"": "disk"}, "offload_folder": str(work)}
        options["dtype"] = torch.float32 if arm == "accelerate fp32" else torch.bfloat16
    if arm == "accelerate upcast":
        from accelerate.hooks import AlignDevicesHook  # pyright: ignore[reportMissingImports]

        whole = AlignDevicesHook.pre_forward

        def pre_forward(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            done = whole(self, module, *args, **kwargs)
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)
            return done

        AlignDevicesHook.pre_forward = pre_forward
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval().base_model
    return lambda ids: base(input_ids=ids, use_cache=False).last_hidden_state.float()


def run_arm(arm: str, folder: Path, texts: int, threads: int, out: Path) -> None:
    """Warm up once, then time the passes; the states of the last go to ``out``."""
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=out.parent) as work, torch.no_grad():
        began = time.perf_counter()
        forward = forward_of(arm, folder, Path(work))
        opened = time.perf_counter() - began
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, size=(texts, TOKENS)))
        states = forward(ids)
        seconds = []
        for _ in range(PASSES):
            began = time.perf_counter()
            states = forward(ids)
            seconds.append(time.perf_counter() - began)
        np.save(out, states.numpy())
    print(json.dumps({"open_s": opened, "seconds": seconds}))


def run_peak(folder: Path, threads: int) -> None:
    """Loss of 8 texts through a streamed model, and the peak of this process beside the planned one."""
    import torch

    from twinscope import open_streamed
    from twinscope.lab.budget import peak_rss_mib, rss_parts_mib

    torch.set_num_threads(threads)
    with open_streamed(folder) as lm:
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, size=(8, TOKENS)))
        planned = lm.plan_mib(8, TOKENS)
        nll = float(lm.nll(ids).mean())
        print(json.dumps({"layers": lm.layers, "peak_mib": peak_rss_mib(), "planned_mib": planned,
                          "after_mib": rss_parts_mib(), "nll": nll}))  # fmt: skip


def run_floor(folder: Path, threads: int) -> None:
    """Bytes and FLOPs of a pass, and the rates of reading, converting and multiplying on this machine."""
    import torch

    from twinscope import open_streamed

    torch.set_num_threads(threads)
    with open_streamed(folder) as lm:
        keys = lm._built.matrices
        names = [name for key in keys for name in lm._built.reader.sources[key].names]
        values = sum(int(np.prod(lm.files.entry(name).shape)) for name in names)
        nbytes = sum(lm.files.entry(name).nbytes for name in names)
        largest = max(names, key=lambda name: lm.files.entry(name).nbytes)
        rows, width = lm.files.entry(largest).shape
        block = torch.empty(max(1, 3 * MIB // 2 // 4 // width), width)
        read = best(lambda: [lm.files.read(largest, block, (n, n + len(block)))
                             for n in range(0, rows - len(block), len(block))])  # fmt: skip
        read_rate = (rows // len(block)) * len(block) * width / read
        x, w = torch.randn(TEXTS * TOKENS, width), torch.randn(rows, width)
        rate = 2 * x.numel() * rows / best(lambda: torch.mm(x, w.t()))
    flops = 2 * TEXTS * TOKENS * values
    print(json.dumps({"bytes": nbytes, "values": values, "flops": flops, "flops_per_s": rate,
                      "values_read_per_s": read_rate, "multiply_s": flops / rate,
                      "read_s": values / read_rate}))  # fmt: skip


def best(call: Callable[[], object], times: int = 5) -> float:
    """The least seconds of several calls, after one."""
    call()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


# --- all arms ----------------------------------------------------------------------------------------------


def watched(arguments: list[str], packages: Path | None = None) -> dict[str, Any]:
    """Run this script with ``arguments``; what it prints, and its peak memory as seen from here."""
    path = [str(Path(__file__).parent.parent / "src"), *([str(packages)] if packages else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment |= {"USE_HUB_KERNELS": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        peak = {"VmHWM": 0.0, "RssAnon": 0.0, "RssFile": 0.0}
        while process.poll() is None:
            for key, value in status(process.pid).items():
                peak[key] = max(peak[key], value)
            time.sleep(0.05)
        assert process.stdout is not None
        lines = process.stdout.read().strip().splitlines()
        if process.returncode or not lines:
            errors.seek(0)
            reason = errors.read().strip().splitlines()[-1:] or ["no reason given"]
            return {"failed": reason[0][:300]}
    names = {"VmHWM": "peak_mib", "RssAnon": "peak_anonymous_mib", "RssFile": "peak_file_mib"}
    return {**{names[key]: value for key, value in peak.items()}, **json.loads(lines[-1])}


def status(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith(("VmHWM:", "RssAnon:", "RssFile:")))
    return {key: float(value.split()[0]) / 1024 for key, value in pairs}


def fetched(package: str) -> Path | str:
    """A folder with a package that is not one of ours, fetched once; or why there is none."""
    from twinscope.lab.run import cache_root

    folder = cache_root() / "benchmark-packages" / package
    if not (folder / package).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        command.append(REQUIREMENTS[package])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:300]
    return folder


def compare(folder: Path, threads: int, rounds: int, arms: list[str], work: Path) -> list[dict[str, Any]]:
    """One row per arm: median seconds over the rounds, peaks, difference from the states in memory."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            packages = fetched(arm.split()[0]) if arm.split()[0] in REQUIREMENTS else None
            if isinstance(packages, str):
                found[arm].append({"failed": packages})
                continue
            out = work / f"{arm}.npy"
            arguments = ["--arm", arm, str(folder), "--out", str(out), "--threads", str(threads)]
            found[arm].append(watched(arguments, packages))
            print(f"  round {number + 1}, {arm}: {found[arm][-1]}", file=sys.stderr)
    rows = []
    for arm, runs in found.items():
        row: dict[str, Any] = {"folder": folder.name, "threads": threads, "arm": arm}
        whole = [run for run in runs if "failed" not in run]
        if not whole:
            rows.append({**row, "seconds": None, "seconds_reason": runs[0]["failed"]})
            continue
        states, theirs = np.load(work / f"{arm}.npy"), np.load(work / "in memory.npy")
        row |= {
            "seconds": median(min(run["seconds"]) for run in whole),
            "seconds_each": [run["seconds"] for run in whole],
            "open_s": median(run["open_s"] for run in whole),
            "largest_difference": float(np.abs(states - theirs).max()),
            "relative_difference": float(np.abs(states - theirs).max() / np.abs(theirs).max()),
        }
        row |= {key: max(run[key] for run in whole) for key in whole[0] if key.endswith("_mib")}
        rows.append(row)
    memory = next(row["seconds"] for row in rows if row["arm"] == "in memory")
    for row in rows:
        row["ratio"] = row["seconds"] / memory if row["seconds"] and memory else None
    return rows


def shortened(folder: Path, layers: int, target: Path) -> Path:
    """A copy of a model of plain layers that has the first ``layers`` of them."""
    import re

    from safetensors.torch import load_file, save_file

    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    kept = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not (match := re.search(r"layers\.(\d+)\.", name)) or int(match[1]) < layers
    }
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="models; SmolLM2 where none is named")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--airllm", action="store_true")
    for hidden in ("--arm", "--out", "--only"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.folders[0], TEXTS, options.threads[0], Path(options.out))
    elif options.only:
        {"peak": run_peak, "floor": run_floor}[options.only](options.folders[0], options.threads[0])
    else:
        run_all(options)


def run_all(options: argparse.Namespace) -> None:
    """Every arm, floor and peak; prints the table and writes the record."""
    from twinscope.lab.provenance import close, collect
    from twinscope.lab.run import cache_root
    from twinscope.models.store.fetch import fetch_smollm2

    folders = options.folders or [fetch_smollm2(cache_root())]
    arms = [*options.arms, *(["airllm"] if options.airllm else [])]
    compute = {"device": "cpu", "threads": max(options.threads), "precision": "fp32"}
    provenance = collect(seeds=[0], data={}, compute=compute)
    rows, floors, peaks, depths = [], [], [], []
    with tempfile.TemporaryDirectory() as work:
        for folder in folders:
            for threads in options.threads:
                here = ["--threads", str(threads)]
                rows += compare(folder, threads, options.rounds, arms, Path(work))
                floors.append({"folder": folder.name, "threads": threads,
                               **watched([str(folder), "--only", "floor", *here])})  # fmt: skip
                peaks.append({"folder": folder.name, "threads": threads,
                              **watched([str(folder), "--only", "peak", *here])})  # fmt: skip
        smollm2 = fetch_smollm2(cache_root())
        for layers in (10, 20, 30):
            short = shortened(smollm2, layers, Path(work) / f"smollm2-{layers}")
            depths.append(watched([str(short), "--only", "peak", "--threads", "1"]))
            shutil.rmtree(short)
    show(rows, floors, peaks, depths)
    record = {"benchmark": "streamed", "texts": TEXTS, "tokens": TOKENS, "rows": rows, "floors": floors,
              "peaks": peaks, "depths": depths, "provenance": close(provenance)}  # fmt: skip
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def show(
    rows: list[dict[str, Any]],
    floors: list[dict[str, Any]],
    peaks: list[dict[str, Any]],
    depths: list[dict[str, Any]],
) -> None:
    for row in rows:
        if row["seconds"] is None:
            print(f"{row['folder']}, {row['threads']} threads, {row['arm']}: {row['seconds_reason']}")
            continue
        print(
            f"{row['folder']}, {row['threads']} threads, {row['arm']}: {row['seconds']:.2f} s "
            f"({row['ratio']:.2f} × in memory), peak {row['peak_mib']:.0f} MiB (anonymous "
            f"{row['peak_anonymous_mib']:.0f}, file {row['peak_file_mib']:.0f}), "
            f"off by {row['largest_difference']:.1e}"
        )
    for floor in (each for each in floors if "failed" not in each):
        print(
            f"{floor['folder']}, {floor['threads']} threads, floor: {floor['bytes'] / MIB:.0f} MiB read and "
            f"converted in {floor['read_s']:.2f} s by one thread, {floor['flops'] / 1e9:.0f} GFLOP in "
            f"{floor['multiply_s']:.2f} s"
        )
    for peak in (each for each in peaks if "failed" not in each):
        print(
            f"{peak['folder']}, {peak['threads']} threads, loss of 8 × 32 tokens: "
            f"peak {peak['peak_mib']:.0f} MiB, planned {peak['planned_mib']:.0f} MiB"
        )
    for depth in (each for each in depths if "failed" not in each):
        print(f"SmolLM2's first {depth['layers']} layers: peak {depth['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
