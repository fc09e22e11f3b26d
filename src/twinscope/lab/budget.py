"""Limits on memory and time, checked where the work can still be saved.

Covers this process's resident memory, the memory it may still take (machine and control group, v1 and
v2), sustained swapping, processors that a control group grants, and elapsed time, in total and by stage.
Sizes are in MiB, times in seconds. Checks are soft: they raise one typed error between units of work and
cannot stop an allocation under way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from twinscope.lab.errors import BudgetExceeded

_MIB = 1024.0 * 1024.0
#: Control group v1 writes "no limit" as the largest page multiple of a signed 64-bit number.
_UNLIMITED = 2**62


#: Two looks at the swap counters closer than this tell nothing about a rate.
_SWAP_GAP = 0.5


class Budget:
    """Limits in MiB and seconds; ``None`` is no limit.

    The clock starts at construction, ``spent`` seconds in, and is monotonic: a suspended or corrected
    wall clock does not count. ``swap_mib_per_s`` is a rate of pages to and from swap, on the whole machine,
    that must not last ``swap_seconds``; single bursts are let pass. ``root`` is the folder that holds
    ``proc`` and ``sys``.
    """

    def __init__(
        self,
        process_mib: float | None = None,
        available_mib: float | None = None,
        seconds: float | None = None,
        *,
        swap_mib_per_s: float | None = None,
        swap_seconds: float = 10.0,
        spent: float = 0.0,
        root: Path = Path("/"),
    ) -> None:
        for name, limit in (
            ("process_mib", process_mib),
            ("available_mib", available_mib),
            ("seconds", seconds),
            ("swap_mib_per_s", swap_mib_per_s),
        ):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be positive or None, got {limit}")
        self.process_mib = process_mib
        self.available_mib = available_mib
        self.seconds = seconds
        self.swap_mib_per_s = swap_mib_per_s
        self.swap_seconds = swap_seconds
        self._root = root
        self._began = time.monotonic() - spent
        self._stage: tuple[str, float, float | None] | None = None
        self._swapped = (time.monotonic(), swapped_mib(root) if swap_mib_per_s is not None else None)
        self._swapping_since: float | None = None

    def elapsed(self) -> float:
        """Seconds used, those of earlier parts of the run included: save it, and resume with ``spent``."""
        return time.monotonic() - self._began

    @contextmanager
    def stage(self, name: str, seconds: float | None) -> Iterator[None]:
        """Inside the block, :meth:`check` also holds this part of the work to ``seconds`` from its start."""
        before, self._stage = self._stage, (name, time.monotonic(), seconds)
        try:
            yield
        finally:
            self._stage = before

    def check(self) -> None:
        """Return if every limit holds.

        Raises:
            BudgetExceeded: the first limit that does not, in the order process, available, swap, time,
                time of the stage.
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
        self._check_swap()
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
        if self._stage is not None:
            name, began, limit = self._stage
            took = time.monotonic() - began
            if limit is not None and took > limit:
                raise BudgetExceeded(
                    "time",
                    took,
                    limit,
                    f"the stage '{name}' has taken {took:.0f} s, over its budget of {limit:.0f} s: "
                    "raise the budget, then resume the run",
                )

    def _check_swap(self) -> None:
        if self.swap_mib_per_s is None:
            return
        now, then = time.monotonic(), self._swapped[0]
        if now - then < _SWAP_GAP:
            return
        before, after = self._swapped[1], swapped_mib(self._root)
        self._swapped = (now, after)
        if before is None or after is None:
            return
        rate = (after - before) / (now - then)
        if rate <= self.swap_mib_per_s:
            self._swapping_since = None
            return
        since = self._swapping_since = then if self._swapping_since is None else self._swapping_since
        if now - since >= self.swap_seconds:
            raise BudgetExceeded(
                "swap",
                rate,
                self.swap_mib_per_s,
                f"this machine has swapped for {now - since:.0f} s, {rate:.0f} MiB/s in the end, over the "
                f"limit of {self.swap_mib_per_s:.0f} MiB/s: free some memory, then resume the run",
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


def swapped_mib(root: Path = Path("/")) -> float | None:
    """Memory moved to and from swap since the machine started, in MiB; None where no counter is kept."""
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        if root != Path("/"):
            return None
        swap = psutil.swap_memory()
        return (swap.sin + swap.sout) / _MIB
    pages = [int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout "))]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / _MIB if pages else None


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process's control groups grant it, or None if none limits it."""
    quotas = []
    for folder in _folders(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(quotas, default=None)


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
    found = []
    for folder in _folders(root, "memory"):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            pair = _limit_and_use(folder, *names)
            if pair is not None:
                found.append(pair)
    return found


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Every folder of this process's control groups in which ``controller`` may set a limit, v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            # Beside v1 controllers, v2 is mounted one folder deeper.
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
        elif controller in controllers.split(","):
            mounts = (f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}")
        else:
            continue
        # Every ancestor limits too. A path that does not exist here is one seen from outside a container,
        # whose own group is then the mount point itself: the last ancestor of the walk.
        below = Path(os.path.normpath("/" + group.strip().lstrip("/"))).relative_to("/")
        for mount in dict.fromkeys(mounts):
            yield from dict.fromkeys([root / mount / below, *(root / mount / p for p in below.parents)])


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
