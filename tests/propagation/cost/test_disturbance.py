"""What else ran: from known kernel counters, a real busy process, and listings of nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from twinscope.propagation.cost import disturbance
from twinscope.propagation.cost.disturbance import Bounds, other_gpu_processes, watch

TICKS = os.sysconf("SC_CLK_TCK")


def counters(at, busy, stolen, own, processes=()):
    return disturbance._Counters(at, busy, stolen, own, dict(processes))


def difference(before, after, load=None, threads=2, bounds=None, gpu=()):
    bounds = bounds or Bounds(0.1, 0.5)
    return disturbance._difference(before, after, bounds, threads, load, list(gpu))


def test_others_are_what_was_busy_less_our_own_over_the_window():
    process = {(7, 1.0): ("rsync", 3.0), (8, 1.0): ("idle", 5.0)}
    later = {(7, 1.0): ("rsync", 5.0), (8, 1.0): ("idle", 5.0), (9, 2.0): ("make", 1.0)}
    found = difference(counters(100.0, 50.0, 2.0, 10.0, process.items()),
                       counters(110.0, 68.0, 2.5, 25.0, later.items()), load=2.4)  # fmt: skip
    assert found.other_cpus == pytest.approx((18.0 - 15.0) / 10)
    assert found.stolen_cpus == pytest.approx(0.05)
    assert found.reasons == ["other processes kept 0.30 CPUs busy (bound 0.1): rsync (7) 0.20, make (9) 0.10"]


def test_a_quiet_machine_gives_no_reason_and_every_bound_its_own():
    quiet = difference(counters(0.0, 0.0, 0.0, 0.0), counters(10.0, 20.5, 0.0, 20.0), load=2.3)
    assert (quiet.reasons, quiet.other_cpus) == ([], pytest.approx(0.05))
    stolen = difference(counters(0.0, 0.0, 0.0, 0.0), counters(10.0, 20.0, 2.0, 20.0))
    assert stolen.reasons == ["the hypervisor withheld 0.20 CPUs (bound 0.1)"]
    loaded = difference(counters(0.0, 0.0, 0.0, 0.0), counters(10.0, 20.0, 0.0, 20.0), load=2.6)
    assert loaded.reasons == ["the load average is 2.60 with 2 threads of ours (bound 0.5 more)"]
    short = difference(counters(0.0, 0.0, 0.0, 0.0), counters(0.1, 0.1, 0.0, 0.1))
    assert short.other_cpus is None
    assert "too short" in short.reasons[0]


def test_the_kernels_line_is_read_without_idle_time(tmp_path):
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    seconds = (3, 1, 2, 99, 9, 0, 1, 5, 0, 0)
    stat.write_text("cpu  " + " ".join(str(value * TICKS) for value in seconds) + "\ncpu0 1 1\n")
    assert disturbance._machine_seconds(tmp_path) == (7.0, 5.0)
    for text in ("", "cpu 0 0 0 0 0 0 0 0 0 0", "cpu a b"):
        stat.write_text(text)
        assert disturbance._machine_seconds(tmp_path) == (None, None)
    unknown = difference(counters(0.0, None, None, 0.0), counters(10.0, None, None, 0.0))
    assert unknown.reasons == ["this system does not tell the CPU time of other processes"]


def test_a_busy_neighbour_is_named(monkeypatch):
    monkeypatch.setattr(disturbance, "_NAMED", 1000)
    neighbour = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
    try:
        end = watch(Bounds(0.02, 1e9), threads=1)
        time.sleep(0.8)
        found = end()
    finally:
        neighbour.kill()
        neighbour.wait()
    assert any(f"({neighbour.pid})" in reason for reason in found.reasons), found


def test_gpu_processes_that_are_not_ours():
    listing = "123, /usr/bin/python3\n456, /opt/game\n"
    assert other_gpu_processes(lambda: listing, own=123) == ["process 456 (game) uses the GPU too"]
    assert other_gpu_processes(lambda: "123, python3\n", own=123) == []
    assert other_gpu_processes(lambda: "", own=123) == []
    # Another namespace's number for this process.
    assert other_gpu_processes(lambda: "9, python3\n", own=123) == []
    assert len(other_gpu_processes(lambda: listing, own=9)) == 2

    def fails() -> str:
        raise FileNotFoundError("nvidia-smi")

    assert "does not tell" in other_gpu_processes(fails)[0]
