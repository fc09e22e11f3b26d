"""Several ranks in forked processes, so that nothing is imported again; one torch thread makes that safe."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from twinscope.cli import main
from twinscope.lab.launch import Place
from twinscope.propagation.ranks.group import Ranks, joined

#: No job of these tests takes as long.
LIMIT = 60.0
#: Seconds after which a rank that does not answer is lost.
PATIENCE = 20.0


def on_ranks(
    size: int,
    work: Callable[[Ranks], Any],
    patience: float = PATIENCE,
    gone: frozenset[int] = frozenset(),
) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks: plain values and NumPy arrays, or an exception.

    Nothing is expected of the ranks in ``gone``, which kill or stop themselves: None stands for them.
    """
    port = free_port()
    ends = []
    for rank in range(size):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        ends.append((_fork(_work, rank, size, port, patience, work, sender), receiver))
        sender.close()
    found = []
    try:
        for rank, (_, receiver) in enumerate(ends):
            if rank in gone:
                found.append(None)
                continue
            assert receiver.poll(LIMIT), f"rank {rank} hangs"
            found.append(receiver.recv())
    finally:
        for process, _ in ends:
            process.kill()
            process.join()
    return found


def command_on_ranks(
    size: int, arguments: list[str], folder: Path, patience: float = PATIENCE
) -> list[BaseProcess]:
    """``twinscope ARGUMENTS`` on each of ``size`` ranks, r writing ``folder/r.out`` and ``folder/r.err``."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    return [_fork(_command, rank, size, port, patience, arguments, folder) for rank in range(size)]


def codes(processes: list[BaseProcess]) -> list[int | None]:
    """The exit codes, in order; a process that does not end in time is killed and fails the test."""
    try:
        for rank, process in enumerate(processes):
            process.join(LIMIT)
            assert process.exitcode is not None, f"rank {rank} hangs"
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
    return [process.exitcode for process in processes]


def _fork(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def _work(
    rank: int, size: int, port: int, patience: float, work: Callable[[Ranks], Any], sender: Connection
) -> None:
    _environment(rank, size, port, patience)
    try:
        with joined(Place(rank, size, rank)) as ranks:
            sender.send(work(ranks))
    except Exception as error:
        traceback.print_exc()
        sender.send(error)
    os._exit(0)


def _command(rank: int, size: int, port: int, patience: float, arguments: list[str], folder: Path) -> None:
    _environment(rank, size, port, patience)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    import sys

    # Those of pytest would keep the words to themselves.
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        main(arguments)
    except SystemExit as left:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else 99)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(98)


def _environment(rank: int, size: int, port: int, patience: float) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TWINSCOPE_RANK_TIMEOUT": str(patience),
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
