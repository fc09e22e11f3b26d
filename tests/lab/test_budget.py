"""Budgets against a fake system tree with known numbers, and against this process."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinscope.lab.budget import (
    Budget,
    available_mib,
    cgroup_cpus,
    cgroup_limit_mib,
    peak_rss_mib,
    rss_mib,
    rss_parts_mib,
    swapped_mib,
)
from twinscope.lab.errors import BudgetExceeded

MIB = 1024 * 1024


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """8,000 MiB available, this process at 300 MiB (peak 400), and no control group."""
    status = {"VmHWM": 400, "VmRSS": 300, "RssAnon": 200, "RssFile": 90, "RssShmem": 10, "Threads": 0}
    lines = [f"{name}:\t{size * 1024:8d} kB" for name, size in status.items() if size]
    return tree(
        tmp_path,
        {
            "proc/self/status": "Name:\tpython\n" + "\n".join([*lines, "Threads:\t2\n"]),
            "proc/meminfo": f"MemTotal: {16000 * 1024} kB\nMemFree: 9 kB\nMemAvailable: {8000 * 1024} kB\n",
        },
    )


def group(
    folder: str, limit: int | str, used: int, stat: str | None = None, version: int = 2
) -> dict[str, str]:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    sizes = (limit if isinstance(limit, str) else str(limit * MIB), str(used * MIB))
    files = {f"{folder}/{name}": f"{size}\n" for name, size in zip(names, sizes, strict=True)}
    return files if stat is None else files | {f"{folder}/memory.stat": stat}


def test_numbers_of_the_kernel_are_read_in_mib(machine: Path) -> None:
    assert rss_mib(machine) == 300
    assert rss_parts_mib(machine) == {"total": 300, "anonymous": 200, "file": 90}
    assert peak_rss_mib(machine) == 400
    assert available_mib(machine) == 8000
    assert cgroup_limit_mib(machine) is None


def test_control_group_v2_limits_itself_and_through_its_ancestors(machine: Path) -> None:
    tree(machine, {"proc/self/cgroup": "0::/outer/inner\n"})
    tree(machine, group("sys/fs/cgroup/outer/inner", "max", 100))
    assert available_mib(machine) == 8000
    tree(machine, group("sys/fs/cgroup/outer/inner", 1000, 400))
    assert (available_mib(machine), cgroup_limit_mib(machine)) == (600, 1000)
    tree(machine, group("sys/fs/cgroup/outer", 1500, 1400))
    assert (available_mib(machine), cgroup_limit_mib(machine)) == (100, 1000)
    # Another process's group does not count.
    tree(machine, group("sys/fs/cgroup/outer/other", 10, 10))
    assert available_mib(machine) == 100


def test_droppable_page_cache_counts_as_available(machine: Path) -> None:
    tree(machine, {"proc/self/cgroup": "0::/a\n"})
    tree(machine, group("sys/fs/cgroup/a", 1000, 900, f"anon 5\ninactive_file {300 * MIB}\nactive_file 7\n"))
    assert available_mib(machine) == 400


def test_control_group_v1(machine: Path) -> None:
    tree(machine, {"proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/jobs/mine\n1:name=systemd:/\n0::/\n"})
    folder = "sys/fs/cgroup/memory/jobs/mine"
    tree(machine, group(folder, "9223372036854771712", 100, version=1))
    assert (available_mib(machine), cgroup_limit_mib(machine)) == (8000, None)
    stat = f"inactive_file {9 * MIB}\ntotal_inactive_file {50 * MIB}\n"
    tree(machine, group(folder, 2000, 500, stat, version=1))
    assert (available_mib(machine), cgroup_limit_mib(machine)) == (1550, 2000)
    # The v2 tree that is mounted beside v1 limits as well.
    tree(machine, {"proc/self/cgroup": "4:memory:/jobs/mine\n0::/slice\n"})
    tree(machine, group("sys/fs/cgroup/unified/slice", 700, 600))
    assert (available_mib(machine), cgroup_limit_mib(machine)) == (100, 700)


@pytest.mark.parametrize("seen", ["/docker/0123", "/", "/../../elsewhere"])
def test_inside_a_container_the_mount_point_is_the_own_group(machine: Path, seen: str) -> None:
    tree(machine, {"proc/self/cgroup": f"0::{seen}\n"})
    tree(machine, group("sys/fs/cgroup", 512, 112))
    assert available_mib(machine) == 400
    tree(machine, {"proc/self/cgroup": f"4:memory:{seen}\n"})
    tree(machine, group("sys/fs/cgroup/memory", 256, 156, version=1))
    assert available_mib(machine) == 100


def test_a_group_over_its_limit_leaves_nothing_not_less(machine: Path) -> None:
    tree(machine, {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", 100, 120))
    assert available_mib(machine) == 0


def test_without_the_kernels_files_psutil_answers(tmp_path: Path) -> None:
    assert rss_mib(tmp_path) == pytest.approx(psutil.Process().memory_info().rss / MIB, rel=0.05)
    assert set(rss_parts_mib(tmp_path)) == {"total"}
    assert available_mib(tmp_path) == pytest.approx(psutil.virtual_memory().available / MIB, rel=0.2)
    assert peak_rss_mib(tmp_path) >= rss_mib(tmp_path) * 0.95
    assert cgroup_limit_mib(tmp_path) is None


def test_this_process_grows_by_what_it_touches() -> None:
    parts = rss_parts_mib()
    if "anonymous" not in parts:
        pytest.skip("this system does not split resident memory")
    assert parts["total"] >= parts["anonymous"] + parts["file"] > 0
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for offset in range(0, 64 * MIB, mmap.PAGESIZE):
            block[offset] = 1
        held = rss_parts_mib()
        assert held["anonymous"] - parts["anonymous"] == pytest.approx(64, abs=4)
        assert held["total"] - parts["total"] == pytest.approx(64, abs=4)
        assert peak_rss_mib() >= held["total"] - 1
    assert rss_mib() - parts["total"] == pytest.approx(0, abs=4)
    assert peak_rss_mib() >= held["total"] - 1
    assert 0 < available_mib() <= psutil.virtual_memory().total / MIB


@pytest.mark.parametrize(
    ("limits", "kind", "value", "limit"),
    [
        ({"process_mib": 299.0}, "process_memory", 300, 299),
        ({"available_mib": 8001.0}, "available_memory", 8000, 8001),
        ({"seconds": 10.0}, "time", 60, 10),
        ({"process_mib": 299.0, "available_mib": 8001.0, "seconds": 10.0}, "process_memory", 300, 299),
        ({"process_mib": 301.0, "available_mib": 8001.0, "seconds": 10.0}, "available_memory", 8000, 8001),
    ],
)
def test_the_first_broken_limit_is_raised(
    machine: Path, limits: dict[str, Any], kind: str, value: float, limit: float
) -> None:
    budget = Budget(**limits, spent=60.0, root=machine)
    with pytest.raises(BudgetExceeded) as caught:
        budget.check()
    assert caught.value.exit_code == 75
    assert (caught.value.kind, caught.value.limit) == (kind, limit)
    assert caught.value.value == pytest.approx(value, abs=1)
    assert f"{limit:.0f} " in str(caught.value)
    assert "resume" in str(caught.value)


def test_limits_that_hold_raise_nothing(machine: Path) -> None:
    Budget(root=machine).check()
    Budget(process_mib=300, available_mib=8000, seconds=1000, spent=60, root=machine).check()


def test_time_is_monotonic_and_continues_over_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the wall clock was read"))
    first = Budget(seconds=100)
    clock[0] += 70
    first.check()
    assert first.elapsed() == 70
    saved = first.elapsed()
    clock[0] = 5.0  # another boot
    second = Budget(seconds=100, spent=saved)
    assert second.elapsed() == 70
    clock[0] += 30
    second.check()
    clock[0] += 1
    with pytest.raises(BudgetExceeded, match="101 s have passed, over the budget of 100 s"):
        second.check()


@pytest.mark.parametrize("limits", [{"process_mib": 0}, {"available_mib": -1}, {"seconds": float("nan")}])
def test_limits_that_limit_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive or None"):
        Budget(**limits)


def test_a_stage_has_a_budget_of_its_own(machine: Path) -> None:
    budget = Budget(seconds=1000.0, root=machine)
    with budget.stage("calibration", 1e-6):
        time.sleep(0.001)
        with budget.stage("inner", None):
            budget.check()
        with pytest.raises(BudgetExceeded, match="the stage 'calibration' has taken 0 s") as raised:
            budget.check()
    budget.check()
    assert (raised.value.kind, raised.value.limit) == ("time", 1e-6)


def swapped(root: Path, pages: int) -> None:
    tree(root, {"proc/vmstat": f"nr_free_pages 1\npswpin {pages}\npswpout {3 * pages}\n"})


def test_only_swapping_that_lasts_is_a_reason_to_stop(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    page = os.sysconf("SC_PAGE_SIZE") / MIB
    swapped(machine, 0)
    budget = Budget(swap_mib_per_s=8.0, swap_seconds=10.0, root=machine)
    done = 0

    def after(seconds: float, mib_per_s: float) -> None:
        nonlocal done
        clock[0] += seconds
        done += round(seconds * mib_per_s / page / 4)
        swapped(machine, done)
        budget.check()

    after(60.0, 0.0)
    for _ in range(4):  # bursts of 8 seconds with a second of rest between them
        after(4.0, 50.0)
        after(4.0, 50.0)
        after(1.0, 1.0)
    after(5.0, 50.0)
    after(0.1, 50.0)  # too short a time to tell a rate
    with pytest.raises(BudgetExceeded, match=r"has swapped for 10 s, 21 MiB/s in the end") as raised:
        after(5.0, 20.0)
    assert raised.value.kind == "swap"
    assert raised.value.value == pytest.approx((0.1 * 50 + 5 * 20) / 5.1, rel=1e-3)


def test_no_counter_of_swap_is_no_swapping(machine: Path) -> None:
    assert swapped_mib(machine) is None
    budget = Budget(swap_mib_per_s=1.0, root=machine)
    budget.check()
    swapped(machine, 256)
    assert swapped_mib(machine) == 1024 * os.sysconf("SC_PAGE_SIZE") / MIB


def test_processors_granted_by_control_groups(machine: Path) -> None:
    assert cgroup_cpus(machine) is None
    tree(machine, {"proc/self/cgroup": "2:cpu,cpuacct:/box\n0::/box\n"})
    tree(machine, {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1\n"})
    tree(machine, {"sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n"})
    assert cgroup_cpus(machine) is None
    tree(machine, {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000\n"})
    assert cgroup_cpus(machine) == 2.5
    tree(machine, {"sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert cgroup_cpus(machine) == 1.5
