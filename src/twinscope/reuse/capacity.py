"""The verb ``probe``: what this machine can hold and how fast it reads, converts and multiplies.

Covers processors, memory, swap, disk and container limits, one matrix product timed in a process of its own,
reading a file from the disk and from memory, and the conversion of bf16 to fp32. It opens no model, and so
supports no statement about one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field

from twinscope.lab.budget import Budget, available_mib, cgroup_cpus, cgroup_limit_mib
from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.durable import writing
from twinscope.lab.errors import BudgetExceeded, RunFailed, Stopped, TwinscopeError
from twinscope.lab.evidence import MEANING, claim
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect, cpu_model
from twinscope.lab.run import Run, cache_root

_MIB = 1024 * 1024
#: Environment variables by which the libraries under NumPy learn how many threads to take.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
#: Pieces in which bf16 is converted: 1 MiB of bf16.
_PIECE = _MIB // 2
#: Times that the conversion goes over its source.
_SWEEPS = 8


class ProbeConfig(Section):
    """What ``probe`` multiplies and reads, and within how many seconds.

    X is ``rows`` × ``inner``, W is ``inner`` × each of ``columns``; ``file_mib`` is the size of the file
    that is written, read and removed again.
    """

    name: str = "machine"
    seconds: float = Field(default=60.0, gt=0)
    seed: int = Field(default=42, ge=0)
    rows: int = Field(default=32, ge=1)
    inner: int = Field(default=2048, ge=1)
    columns: list[int] = Field(default=[2048, 6144], min_length=1)
    repeats: int = Field(default=3, ge=1)
    file_mib: int = Field(default=128, ge=1)


def create_run(config: ProbeConfig, root: Path) -> Run:
    """Make the run directory with configuration and provenance."""
    provenance = collect(
        seeds=[config.seed],
        data={},
        compute={"device": "cpu", "threads": [1, usable_cores()], "precision": "fp32"},
    )
    return Run.create(root, "probe", config.name, to_toml(config), provenance)


def probe(config: ProbeConfig, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Measure, or go on measuring, into ``run`` and write its result; returns the record.

    Raises:
        Stopped: the seconds ran out, or a signal ended it; parts already measured are kept.
        RunFailed: a product is not finite, or further from float64 than rounding allows.
    """
    budget = Budget(seconds=config.seconds)
    parts = _parts(config, run, budget)

    def work() -> Findings:
        with Progress(config.name, quiet) as progress:
            for index, (name, part) in enumerate(parts.items()):
                progress.update(index, len(parts), name)
                budget.check()
                if run.stop_requested:
                    raise Stopped(f"stopped by {run.stop_requested} before the part '{name}'")
                if not any(row["key"].startswith(f"{name}/") for row in run.rows):
                    for row in part():
                        run.append(row)
        return _summary(config, run, budget), _claims(run.rows)

    return carry_out(run, config.model_dump(mode="json"), work)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Measure the parts that an interrupted probe did not reach."""
    mapping = tomllib.loads(run.config_toml)
    return probe(parse_config(mapping, ProbeConfig, origin=str(run.path / "config.toml")), run, quiet)


def usable_cores(root: Path = Path("/")) -> int:
    """How many processors this process can keep busy: affinity and control groups counted, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus(root)
    # Part of a processor more than a whole number keeps one more thread busy for part of the time only.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def read_rates(folder: Path, size_mib: int) -> dict[str, Any]:
    """MiB per second of reading a file in ``folder`` from the disk and from memory; the file is removed.

    The disk's rate is null, with a reason, where the system does not let go of the file's pages: what
    would be timed then is memory. It is read in pieces of 1 MiB.

    Raises:
        Stopped, ConfigError: the folder cannot be written.
    """
    free = shutil.disk_usage(folder).free / _MIB
    if free < 2 * size_mib:
        reason = f"{free:.0f} MiB are free in {folder}, too little to write a file of {size_mib} MiB"
        return {
            "disk_mib_per_s": None, "disk_mib_per_s_reason": reason,
            "cache_mib_per_s": None, "cache_mib_per_s_reason": reason,
        }  # fmt: skip
    with writing(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        piece = os.urandom(_MIB)
        for _ in range(size_mib):
            file.write(piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = _bytes_from_disk()
        cold = _read_through(file, size_mib)
        after = _bytes_from_disk()
        warm = _read_through(file, size_mib)
    rates: dict[str, Any] = {"cache_mib_per_s": size_mib / warm}
    if before is None or after is None:
        rates |= {"disk_mib_per_s": None, "disk_mib_per_s_reason": "this system does not count disk reads"}
    elif after - before < 0.9 * size_mib * _MIB:
        reason = "the file's pages stayed in memory, so reading it again did not reach a disk"
        rates |= {"disk_mib_per_s": None, "disk_mib_per_s_reason": reason}
    else:
        rates["disk_mib_per_s"] = size_mib / cold
    return rates


def conversion_rate() -> float:
    """Million values per second of bf16 → fp32 by torch, in pieces into one buffer, with one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(16 * _PIECE, dtype=torch.bfloat16)
        target = torch.empty(_PIECE, dtype=torch.float32)
        target.copy_(source[:_PIECE])  # pages of the buffer are taken before the clock starts
        began = time.perf_counter()
        for _ in range(_SWEEPS):
            for start in range(0, len(source), _PIECE):
                target.copy_(source[start : start + _PIECE])
        return _SWEEPS * len(source) / (time.perf_counter() - began) / 1e6
    finally:
        torch.set_num_threads(threads)


def _parts(config: ProbeConfig, run: Run, budget: Budget) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Name of a part -> what measures its rows, whose keys begin with the name."""
    cores = usable_cores()
    parts = {f"matmul-{count}": _products(config, count, budget) for count in sorted({1, cores})}

    def reading() -> list[dict[str, Any]]:
        folder = _existing(cache_root())
        rates = read_rates(folder, config.file_mib)
        return [{"key": "reading/1", "kind": "reading", "file_mib": float(config.file_mib), **rates}]

    def conversion() -> list[dict[str, Any]]:
        rate = conversion_rate()
        return [
            {
                "key": "conversion/1",
                "kind": "conversion",
                "million_values_per_s": rate,
                "piece_values": _PIECE,
            }
        ]

    return {**parts, "reading": reading, "conversion": conversion}


def _products(config: ProbeConfig, threads: int, budget: Budget) -> Callable[[], list[dict[str, Any]]]:
    def rows() -> list[dict[str, Any]]:
        found = _in_bare_process(config, threads, budget)
        return [_row(config, product, threads, found["peak_rss_mib"]) for product in found["products"]]

    return rows


def _in_bare_process(config: ProbeConfig, threads: int, budget: Budget) -> dict[str, Any]:
    """What bare_matmul.py prints, run with ``threads`` threads and nothing but NumPy."""
    request = {
        "rows": config.rows,
        "shapes": [[config.inner, columns] for columns in config.columns],
        "repeats": config.repeats,
        "seed": config.seed,
    }
    left = config.seconds - budget.elapsed()
    # -P: the script's folder holds modules of the house, which must not stand before others.
    command = [sys.executable, "-P", str(Path(__file__).with_name("bare_matmul.py")), json.dumps(request)]
    environment = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=max(left, 0.1), check=False
        )
    except subprocess.TimeoutExpired:
        raise BudgetExceeded(
            "time",
            budget.elapsed(),
            config.seconds,
            f"the product with {threads} threads did not end within the {config.seconds:.0f} s of the probe: "
            "give it more with --set seconds=N",
        ) from None
    if done.returncode < 0:
        raise Stopped(
            f"the process that multiplies was ended by signal {-done.returncode}, as a machine short of "
            "memory does: free some memory"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise TwinscopeError(f"the process that multiplies failed: {last}")
    return json.loads(done.stdout)


def _row(config: ProbeConfig, product: dict[str, Any], threads: int, peak: float | None) -> dict[str, Any]:
    rows, inner, columns = product["shape"]
    bound = (inner + 1) * 2.0**-24
    what = f"X ({rows} × {inner}) @ W ({inner} × {columns}) in fp32 with {threads} threads"
    if not product["finite"]:
        raise RunFailed(f"{what} is not finite: this machine, or its NumPy, computes wrongly")
    if product["error"] > bound:
        raise RunFailed(
            f"{what} departs from float64 by {product['error']:.1e} where rounding allows {bound:.1e}: "
            "this machine, or its NumPy, computes wrongly"
        )
    row = {
        "key": f"matmul-{threads}/{inner}x{columns}",
        "kind": "matmul",
        "threads": threads,
        **product,
        "gflop_per_s": 2e-9 * rows * inner * columns / min(product["next_s"]),
        "error_bound": bound,
        "peak_rss_mib": peak,
    }
    if peak is None:
        row["peak_rss_mib_reason"] = "this system does not tell a process's peak"
    return row


def _summary(config: ProbeConfig, run: Run, budget: Budget) -> dict[str, Any]:
    products = [row for row in run.rows if row["kind"] == "matmul"]
    alone = next(row for row in products if row["threads"] == 1)
    folder = _existing(cache_root())
    disk, memory, swap = shutil.disk_usage(folder), psutil.virtual_memory(), psutil.swap_memory()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "cores": usable_cores(),
        "processor": {
            "model": cpu_model(),
            "logical": os.cpu_count() or 1,
            **_known("physical", psutil.cpu_count(logical=False), "this system does not tell"),
            **_known("affinity", affinity, "this system does not tell"),
            **_known("quota", cgroup_cpus(), "no control group limits this process"),
        },
        "memory": {
            "total_mib": memory.total / _MIB,
            "available_mib": available_mib(),
            **_known("limit_mib", cgroup_limit_mib(), "no control group limits this process"),
        },
        "swap": {"total_mib": swap.total / _MIB, "used_mib": swap.used / _MIB},
        "disk": {"path": str(folder), "total_mib": disk.total / _MIB, "free_mib": disk.free / _MIB},
        **{key: alone[key] for key in ("peak_rss_mib", "peak_rss_mib_reason") if key in alone},
        "matmul": products,
        "reading": next(row for row in run.rows if row["kind"] == "reading"),
        "conversion": next(row for row in run.rows if row["kind"] == "conversion"),
        "level": "capacity",
        "seconds": budget.elapsed(),
    }


def _claims(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    products = [row for row in rows if row["kind"] == "matmul"]
    counts = sorted({row["threads"] for row in products})
    best = [max(row["gflop_per_s"] for row in products if row["threads"] == count) for count in counts]
    rates = ", ".join(
        f"{rate:.0f} with {count} {'thread' if count == 1 else 'threads'}"
        for count, rate in zip(counts, best, strict=True)
    )
    size = max(row["shape"][1] * row["shape"][2] for row in products)
    statement = f"this machine multiplies fp32 matrices of up to {size:,} values, in GFLOP/s: {rates}"
    return [claim(statement, "capacity", *MEANING["capacity"])]


def _read_through(file: Any, size_mib: int) -> float:
    """Seconds of reading the whole unbuffered file into one buffer of 1 MiB."""
    buffer = bytearray(_MIB)
    file.seek(0)
    began = time.perf_counter()
    for _ in range(size_mib):
        file.readinto(buffer)
    return time.perf_counter() - began


def _bytes_from_disk() -> int | None:
    """Bytes this process has had read from storage, or None where they are not counted."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _known(key: str, value: Any, reason: str) -> dict[str, Any]:
    return {key: value} if value is not None else {key: None, f"{key}_reason": reason}
