"""Holding other processes of the user still while something is timed, and letting them go whatever happens.

Covers checking which processes may be paused, stopping them for the length of a ``with`` block, and the
guardian: a small process of its own session that holds the read end of a pipe. The pipe closes when this
process leaves the block, fails, or is killed, and the guardian then continues every paused process. Only
processes that were named are stopped, not their children. Linux only: it takes process descriptors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from twinscope.lab.errors import ConfigError

#: Reads until every writer is gone, then continues what the descriptors in its arguments refer to. Signals
#: that a terminal or a supervisor sends to a whole job must not end it first.
_GUARDIAN = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b"r")
while os.read(0, 1):
    pass
for descriptor in sys.argv[1:]:
    try:
        signal.pidfd_send_signal(int(descriptor), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""
#: A process that waits in the kernel stops when it comes back; longer than this it is not waited for.
_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class Target:
    """One process to pause; ``started`` tells it from a later one that is given the same number."""

    pid: int
    started: float
    name: str


def targets(pids: Sequence[int]) -> list[Target]:
    """The processes of these numbers, each once.

    Raises:
        ConfigError: a process is gone, another user's, this one or one that it runs under, stopped
            already, or this system has no process descriptors.
    """
    if pids and not hasattr(signal, "pidfd_send_signal"):
        raise ConfigError("--pause needs Linux 5.3 or later: leave it out, and stop other work by hand")
    return [_target(pid) for pid in dict.fromkeys(pids)]


def _target(pid: int) -> Target:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            found = Target(pid, process.create_time(), process.name())
            owner, status = process.uids().real, process.status()
    except (psutil.Error, ValueError, OverflowError):
        raise ConfigError(f"--pause {pid}: there is no such process, or it cannot be looked at") from None
    us = psutil.Process()
    if pid == us.pid:
        raise ConfigError(f"--pause {pid}: that is twinscope itself")
    if pid in {parent.pid for parent in us.parents()} or pid == 1:
        raise ConfigError(f"--pause {pid}: twinscope runs under '{found.name}', so pausing it would hang")
    if owner != us.uids().real:
        raise ConfigError(f"--pause {pid}: '{found.name}' belongs to another user; only your own are paused")
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        raise ConfigError(
            f"--pause {pid}: '{found.name}' is stopped already, and the end would continue it; leave it out"
        )
    if status == psutil.STATUS_ZOMBIE:
        raise ConfigError(f"--pause {pid}: '{found.name}' has ended; leave it out")
    return found


@contextmanager
def paused(processes: Sequence[Target]) -> Iterator[list[Target]]:
    """Stop the processes for the ``with`` block and continue them after it; yields those that stopped.

    One that has ended in the meantime, or whose number another process has, is left alone.
    """
    descriptors: dict[int, Target] = {}
    try:
        for target in processes:
            descriptor = _opened(target)
            if descriptor is not None:
                descriptors[descriptor] = target
        if not descriptors:
            yield []
            return
        with _guardian(list(descriptors)):
            try:
                held = [target for descriptor, target in descriptors.items() if _stop(descriptor)]
                _wait_until_stopped(held)
                yield held
            finally:
                for descriptor in descriptors:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def _guardian(descriptors: list[int]) -> Iterator[None]:
    """A process that continues the others as soon as this block is left, in whatever way."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN, *map(str, descriptors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    try:
        if guardian.stdout.read(1) != b"r":
            raise ConfigError("--pause: the process that would continue the others did not start")
        yield
    finally:
        guardian.stdin.close()
        guardian.stdout.close()
        guardian.wait()


def _opened(target: Target) -> int | None:
    """A descriptor of the process, None if it is not the one that was named."""
    try:
        descriptor = os.pidfd_open(target.pid)
    except OSError:
        return None
    # With the descriptor held, the number cannot go to another process between this look and a signal.
    with suppress(psutil.Error):
        if psutil.Process(target.pid).create_time() == target.started:
            return descriptor
    os.close(descriptor)
    return None


def _stop(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_until_stopped(held: Sequence[Target]) -> None:
    limit = time.monotonic() + _STOP_SECONDS
    for target in held:
        while time.monotonic() < limit:
            try:
                if psutil.Process(target.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    break
            except psutil.Error:
                break
            time.sleep(0.002)
