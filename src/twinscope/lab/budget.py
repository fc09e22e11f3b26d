"""Limits on memory and time, checked where the work can still be saved.

Covers this process's resident memory, the memory it may still take (machine and control group, v1 and
v2), and elapsed time that continues over a resume. Sizes are in MiB, times in seconds. Checks are
soft: they raise one typed error between units of work and cannot stop an allocation under way.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil

from twinscope.lab.errors import BudgetExceeded

_MIB = 1024.0 * 1024.0
#: Control group v1 writes "no limit" as the largest page multiple of a signed 64-bit number.
_UNLIMITED = 2**62


class Budget:
    """Limits in MiB and seconds; ``None`` is no limit.

    The clock starts at construction, ``spent`` seconds in, and is monotonic: a suspended or corrected
    wall clock does not count. ``root`` is the folder that holds ``proc`` and ``sys``.
    """

    def __init__(
        self,
        process_mib: float | None = None,
        available_mib: float | None = None,
        seconds: float | None = None,
        *,
        spent: float = 0.0,
        root: Path = Path("/"),
    ) -> None:
        for name, limit in (
            ("process_mib", process_mib),
            ("available_mib", available_mib),
            ("seconds", seconds),
        ):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be positive or None, got {limit}")
        self.process_mib = process_mib
        self.available_mib = available_mib
        self.seconds = seconds
        self._root = root
        self._began = time.monotonic() - spent

    def elapsed(self) -> float:
        """Seconds used, those of earlier parts of the run included: save it, and resume with ``spent``."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Return if every limit holds.

        Raises:
            BudgetExceeded: the first limit that does not, in the order process, available, time.
        """
        if self.process_mib is not None:
            used = rss_mib(self._root)
            if used > self.process_mib:
                raise BudgetExceeded(
                    "process_memory",
                    used,
                    self.process_mib,
                    f"this process holds {used:.0f} MiB, over its budget of {self.process_mib:.0f} MiB: "
                    "raise the budget or choose smaller sizes, then resume the run",
                )
        if self.available_mib is not None:
            left = available_mib(self._root)
            if left < self.available_mib:
                raise BudgetExceeded(
                    "available_memory",
                    left,
                    self.available_mib,
                    f"{left:.0f} MiB of memory are left, under the floor of {self.available_mib:.0f} MiB: "
                    "free some memory, then resume the run",
                )
        if self.seconds is not None:
            elapsed = self.elapsed()
            if elapsed > self.seconds:
                raise BudgetExceeded(
                    "time",
                    elapsed,
                    self.seconds,
                    f"{elapsed:.0f} s have passed, over the budget of {self.seconds:.0f} s: "
                    "raise the budget, then resume the run",
                )


def rss_mib(root: Path = Path("/")) -> float:
    """Resident memory of this process, file pages included, in MiB."""
    return rss_parts_mib(root)["total"]


def rss_parts_mib(root: Path = Path("/")) -> dict[str, float]:
    """Resident memory in MiB: ``total``, and where the kernel tells them apart ``anonymous`` and ``file``.

    File pages (mapped libraries and weights) can be dropped by the kernel; anonymous ones cannot.
    """
    status = _status(root)
    if "VmRSS" not in status:
        return {"total": psutil.Process().memory_info().rss / _MIB}
    parts = {"total": status["VmRSS"]}
    if "RssAnon" in status and "RssFile" in status:
        parts |= {"anonymous": status["RssAnon"], "file": status["RssFile"]}
    return parts


def peak_rss_mib(root: Path = Path("/")) -> float:
    """Largest resident memory of this process since it started, in MiB.

    Read from ``VmHWM``, because the peak of ``getrusage`` is inherited from the parent over ``exec``.
    """
    status = _status(root)
    if "VmHWM" in status:
        return status["VmHWM"]
    import resource

    # The unit of ru_maxrss is bytes on macOS and KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024.0


def available_mib(root: Path = Path("/")) -> float:
    """Memory this process may still take in MiB: the least of the machine's and its control groups'.

    Page cache that can be dropped counts as available in both, otherwise reading a large file once
    would look like running out of memory.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        machine = next(_kib(line) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        machine = psutil.virtual_memory().available / _MIB
    room = [limit - used for limit, used in _groups(root)]
    return max(0.0, min([machine, *room]))


def cgroup_limit_mib(root: Path = Path("/")) -> float | None:
    """The tightest memory limit of this process's control groups in MiB, or None if there is none."""
    return min((limit for limit, _ in _groups(root)), default=None)


def _status(root: Path) -> dict[str, float]:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: _kib(line) for line in lines if line.endswith(" kB")}


def _kib(line: str) -> float:
    return float(line.split()[1]) / 1024.0


def _groups(root: Path) -> list[tuple[float, float]]:
    """(limit, used) in MiB of each memory control group around this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            # Beside v1 controllers, v2 is mounted one folder deeper.
            mounts, names = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mounts, names = ("sys/fs/cgroup/memory",), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Every ancestor limits too. A path that does not exist here is one seen from outside a container,
        # whose own group is then the mount point itself: the last ancestor of the walk.
        below = Path(os.path.normpath("/" + group.strip().lstrip("/"))).relative_to("/")
        for mount in mounts:
            for folder in dict.fromkeys([root / mount / below, *(root / mount / p for p in below.parents)]):
                pair = _limit_and_use(folder, *names)
                if pair is not None:
                    found.append(pair)
    return found


def _limit_and_use(folder: Path, limit_name: str, use_name: str) -> tuple[float, float] | None:
    try:
        limit = float((folder / limit_name).read_text().replace("max", "inf"))
        used = float((folder / use_name).read_text())
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED:
        return None
    droppable = 0.0
    try:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # v1 counts descendants under "total_"; in v2 every count includes them.
        droppable = float(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return limit / _MIB, (used - droppable) / _MIB
