"""Pausing real processes: they stop, and go on after success, error, and kill -9 of whoever paused them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from twinscope.lab.errors import ConfigError
from twinscope.propagation.cost import pausing
from twinscope.propagation.cost.pausing import paused, targets

if not hasattr(signal, "pidfd_send_signal"):
    pytest.skip("this system has no process descriptors", allow_module_level=True)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.01)
    return False


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_a_process_stands_still_inside_the_block_and_goes_on_after_it(victim):
    before = set(psutil.Process().children())
    with paused(targets([victim.pid, victim.pid])) as held:
        assert [target.pid for target in held] == [victim.pid]
        assert stopped(victim.pid)
    assert not stopped(victim.pid)
    assert set(psutil.Process().children()) == before, "the guardian is still there"


def _fail_inside(pid: int, error: type[BaseException]) -> None:
    with paused(targets([pid])):
        assert stopped(pid)
        raise error


def test_an_error_and_an_interrupt_let_it_go(victim):
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            _fail_inside(victim.pid, error)
        assert not stopped(victim.pid)


def test_the_loss_of_the_guardian_leaves_nothing_standing(victim):
    before = set(psutil.Process().children())
    with paused(targets([victim.pid])):
        (guardian,) = set(psutil.Process().children()) - before
        guardian.kill()
        assert stopped(victim.pid)
    assert not stopped(victim.pid)


_OTHER = "import os, time; os.setuid(65534); print(flush=True); time.sleep(60)"
_PAUSER = """
import sys, time
from twinscope.propagation.cost.pausing import paused, targets
with paused(targets([int(sys.argv[1])])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_pauser_lets_it_go(victim, number):
    pauser = subprocess.Popen(
        [sys.executable, "-c", _PAUSER, str(victim.pid)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert pauser.stdout is not None
    try:
        assert pauser.stdout.readline() == b"held\n"
        assert stopped(victim.pid)
        # To the whole job, as a terminal or a supervisor sends it: the guardian is no part of it.
        os.killpg(pauser.pid, number)
        assert pauser.wait(10) == -number
        assert eventually(lambda: not stopped(victim.pid)), "the paused process was left standing"
    finally:
        pauser.kill()
        pauser.wait()
        pauser.stdout.close()


def test_a_process_that_has_ended_or_whose_number_is_another_ones_is_left_alone(victim):
    (target,) = targets([victim.pid])
    with paused([replace(target, started=target.started - 5)]) as held:
        assert held == []
        assert not stopped(victim.pid)
    victim.kill()
    victim.wait()
    with paused([target]) as held:
        assert held == []


def test_what_must_not_be_paused_is_refused(victim):
    gone = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    gone.wait()
    for pid, words in (
        (os.getpid(), "twinscope itself"),
        (os.getppid(), "runs under"),
        (1, "runs under"),
        (gone.pid, "no such process"),
        (-4, "no such process"),
    ):
        with pytest.raises(ConfigError, match=words):
            targets([pid])
    os.kill(victim.pid, signal.SIGSTOP)
    assert eventually(lambda: stopped(victim.pid))
    with pytest.raises(ConfigError, match="stopped already"):
        targets([victim.pid])
    os.kill(victim.pid, signal.SIGCONT)
    assert eventually(lambda: not stopped(victim.pid))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_refused():
    code = [sys.executable, "-I", "-S", "-c", _OTHER]
    theirs = subprocess.Popen(code, stdout=subprocess.PIPE)
    assert theirs.stdout is not None
    try:
        theirs.stdout.read(1)
        with pytest.raises(ConfigError, match="another user"):
            targets([theirs.pid])
    finally:
        theirs.kill()
        theirs.wait()
        theirs.stdout.close()


def test_nothing_is_paused_where_no_guardian_starts(victim, monkeypatch):
    monkeypatch.setattr(pausing, "_GUARDIAN", "raise SystemExit")
    with pytest.raises(ConfigError, match="did not start"), paused(targets([victim.pid])):
        pytest.fail("the block ran without a guardian")
    assert not stopped(victim.pid)
