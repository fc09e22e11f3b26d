"""What else used the machine while something was timed: other processes' CPU time, load, other GPU work.

Covers the measurement from the kernel's counters and the sentences about what exceeded a bound. It changes
nothing; holding other processes still is in pausing.py.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: The kernel counts CPU time in hundredths of a second: a shorter window tells nothing.
SHORTEST_SECONDS = 0.5
#: Processes named as the cause, most CPU time first, and the least each must have used to be named.
_NAMED, _LEAST_CPUS = 3, 0.02
_SMI = ("nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")


@dataclass(frozen=True)
class Bounds:
    """What other work may use for a measurement to count as controlled.

    ``other_cpus`` is the mean number of CPUs kept busy by other processes or taken by the hypervisor, and
    ``excess_load`` is the 1-minute load average beyond our own threads.
    """

    other_cpus: float
    excess_load: float


@dataclass(frozen=True)
class Disturbance:
    """What ran beside one window; None where this system or so short a window does not tell.

    ``other_cpus`` and ``stolen_cpus`` are mean numbers of CPUs, ``load`` is the 1-minute load average at
    the end, ``reasons`` has a sentence for every bound that was exceeded or could not be checked.
    """

    other_cpus: float | None
    stolen_cpus: float | None
    load: float | None
    reasons: list[str]


@dataclass(frozen=True)
class _Counters:
    at: float
    busy: float | None  # CPU seconds of all processes since boot
    stolen: float | None
    own: float  # CPU seconds of this process and of its children that have ended
    processes: dict[tuple[int, float], tuple[str, float]]


def watch(
    bounds: Bounds, threads: int, device: str = "cpu", root: Path = Path("/")
) -> Callable[[], Disturbance]:
    """Begin to watch; the function that is returned ends it and says what was seen."""
    before = _counters(root)

    def end() -> Disturbance:
        gpu = other_gpu_processes() if device.startswith("cuda") else []
        return _difference(before, _counters(root), bounds, threads, _load(), gpu)

    return end


def other_gpu_processes(listing: Callable[[], str] | None = None, own: int | None = None) -> list[str]:
    """A sentence for each process on a GPU that is not this one, or that says why nobody can tell.

    In a container the numbers may be another namespace's: one process of a number that is not ours, where
    ours is missing, is taken for this one.
    """
    try:
        text = listing() if listing is not None else _smi()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi does not tell who else uses the GPU ({type(error).__name__})"]
    found = [line.partition(",") for line in text.splitlines() if line.strip()]
    apps = [(pid.strip(), name.strip()) for pid, _, name in found]
    ours = str(own if own is not None else os.getpid())
    others = [app for app in apps if app[0] != ours]
    if len(others) == len(apps) and len(others) == 1:
        return []
    return [f"process {pid} ({Path(name).name}) uses the GPU too" for pid, name in others]


def _difference(
    before: _Counters,
    after: _Counters,
    bounds: Bounds,
    threads: int,
    load: float | None,
    gpu: Sequence[str],
) -> Disturbance:
    seconds = after.at - before.at
    reasons = list(gpu)
    others = stolen = None
    if before.busy is None or after.busy is None or before.stolen is None or after.stolen is None:
        reasons.append("this system does not tell the CPU time of other processes")
    elif seconds < SHORTEST_SECONDS:
        reasons.append(f"windows under {SHORTEST_SECONDS:g} s are too short to tell what else ran")
    else:
        others = max(0.0, (after.busy - before.busy) - (after.own - before.own)) / seconds
        stolen = (after.stolen - before.stolen) / seconds
        if others > bounds.other_cpus:
            reasons.append(_sentence(others, bounds.other_cpus, _top(before, after, seconds)))
        if stolen > bounds.other_cpus:
            reasons.append(f"the hypervisor withheld {stolen:.2f} CPUs (bound {bounds.other_cpus:g})")
    if load is not None and load - threads > bounds.excess_load:
        reasons.append(
            f"the load average is {load:.2f} with {threads} threads of ours "
            f"(bound {bounds.excess_load:g} more)"
        )
    return Disturbance(others, stolen, load, reasons)


def _sentence(cpus: float, bound: float, top: list[str]) -> str:
    named = f": {', '.join(top)}" if top else ", by processes that have ended since or cannot be seen"
    return f"other processes kept {cpus:.2f} CPUs busy (bound {bound:g}){named}"


def _top(before: _Counters, after: _Counters, seconds: float) -> list[str]:
    used = []
    for identity, (name, total) in after.processes.items():
        cpus = (total - before.processes.get(identity, (name, 0.0))[1]) / seconds
        if cpus > _LEAST_CPUS:
            used.append((cpus, f"{name} ({identity[0]}) {cpus:.2f}"))
    return [text for _, text in sorted(used, reverse=True)[:_NAMED]]


def _counters(root: Path) -> _Counters:
    busy, stolen = _machine_seconds(root)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    ours = {os.getpid()}
    processes: dict[tuple[int, float], tuple[str, float]] = {}
    for process in psutil.process_iter(["pid", "name", "cpu_times", "create_time"]):
        info = process.info
        if info["pid"] not in ours and info["cpu_times"] is not None and info["create_time"] is not None:
            used = info["cpu_times"].user + info["cpu_times"].system
            processes[info["pid"], info["create_time"]] = (info["name"] or "?", used)
    return _Counters(time.monotonic(), busy, stolen, own, processes)


def _machine_seconds(root: Path) -> tuple[float | None, float | None]:
    """CPU seconds spent by all processes, and withheld by a hypervisor, since boot."""
    try:
        fields = (root / "proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [int(field) for field in fields[:8]]
    except (OSError, ValueError, IndexError):
        return None, None
    if len(ticks) < 8 or not any(ticks):
        return None, None
    user, nice, system, _, _, interrupts, soft, stolen = ticks
    second = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / second, stolen / second


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _smi() -> str:
    return subprocess.run(
        _SMI, check=True, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
    ).stdout
