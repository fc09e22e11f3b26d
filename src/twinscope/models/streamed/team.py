"""Threads that work on the blocks of a matrix at the same time, each with one thread of torch.

Covers a team that lives as long as the model it works for, and handing out work in order. A team of its own,
instead of torch's threads inside each product, lets every member read, convert and multiply its own block,
which then never leaves its cache.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Team:
    """``size`` threads that wait for work; ``close()`` ends them. A team of one is the calling thread."""

    def __init__(self, size: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.size = size
        if size == 1:
            return
        ready = threading.Barrier(size + 1)
        for number in range(size):
            threading.Thread(
                target=_serve, args=(self._jobs, ready), name=f"weights-{number}", daemon=True
            ).start()
        ready.wait()
        # A member's setting is also the default of threads yet to come: put that back.
        torch.set_num_threads(size)

    def close(self) -> None:
        """Let every thread end after the work it has; twice is once."""
        if self.size > 1:
            for _ in range(self.size):
                self._jobs.put(None)
        self.size = 1

    def __del__(self) -> None:
        self.close()

    def each(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """The results of ``work`` in the order of ``items``; at most ``size + 1`` items are under way.

        An error of ``work`` is raised here, once nothing is under way any more.
        """
        if self.size == 1:
            yield from map(work, items)
            return
        under_way: deque[_Answer] = deque()
        source = iter(items)
        try:
            while True:
                while len(under_way) <= self.size:
                    item = next(source, _END)
                    if item is _END:
                        break
                    answer = _Answer()
                    under_way.append(answer)
                    self._jobs.put(answer.of(work, item))
                if not under_way:
                    return
                yield under_way.popleft().get()
        finally:
            # Nobody may still write into what the caller is about to drop.
            for answer in under_way:
                answer.wait()


_END: Any = object()


class _Answer:
    """The result of one piece of work, or its error, once it is there."""

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._value: Any = None
        self._error: BaseException | None = None

    def of(self, work: Callable[[Any], Any], item: Any) -> Callable[[], None]:
        def run() -> None:
            try:
                self._value = work(item)
            except BaseException as error:
                self._error = error
            finally:
                self._done.release()

        return run

    def wait(self) -> None:
        self._done.acquire()
        self._done.release()

    def get(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None], ready: threading.Barrier) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # of this thread alone
    ready.wait()
    while (job := jobs.get()) is not None:
        job()
        del job
