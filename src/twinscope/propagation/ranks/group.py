"""The ranks of one job: how they meet, what they add up and tell each other, and what ends them together.

Covers joining under torchrun, sums and messages over all ranks, and a rank that is gone. When gradients are
summed is in buckets.py; what rank 0 does alone is in training.py.

Tensors on the CPU travel by gloo, those on a GPU by NCCL. Words travel as JSON or plain text, never as
pickles. Every rank must make the same calls in the same order, so what decides about a call is the same on
all: the configuration, or a value that was summed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# Public and documented, though torch does not mark them so for type checkers.
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from twinscope.lab.errors import ConfigError, DataError, RankLost, Stopped, TwinscopeError
from twinscope.lab.launch import Place

#: Seconds without an answer after which a rank counts as lost, unless ``$TWINSCOPE_RANK_TIMEOUT`` says. A
#: process that ended is noticed at once, by its closed connections.
PATIENCE = 600.0
#: The same while rank 0 prepares alone: it may train a tokenizer or the base of all arms.
_PREPARING = timedelta(days=1)
#: Seconds that last words may take to write or to read.
_SOON = 3.0

T = TypeVar("T")


class Ranks:
    """The ranks of a job, seen from one of them, from :func:`joined` to the end of its block."""

    def __init__(self, place: Place, backend: str, store: Store, words: dist.ProcessGroup) -> None:
        self.rank, self.size, self.backend = place.rank, place.size, backend
        self.local_rank = place.local_rank
        self._store = store
        self._words = words  # a group of its own, of more patience
        self._known = False  # whether the others know why this rank ends

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which owns the run directory and speaks to the user."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """The texts of a batch that belong to this rank: all are dealt out in order, evenly up to one.

        Raises:
            ConfigError: there are more ranks than texts.
        """
        if batch < self.size:
            raise ConfigError(
                f"a batch of {batch} cannot be split over {self.size} ranks: "
                "set data.batch to at least one text for each rank, or start fewer ranks"
            )
        return slice(batch * self.rank // self.size, batch * (self.rank + 1) // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all ranks, the same bits on each; ``values`` stay as they are."""
        total = values.detach().clone()
        self._reduce(total, dist.ReduceOp.SUM)
        return total

    def start_sum(self, values: Tensor) -> Callable[[], None]:
        """Begin to sum ``values`` in place; call what is returned before reading them, or to do so again.

        It goes on beside what this rank computes in between.
        """
        with self._in_touch():
            work = dist.all_reduce(values, async_op=True)
        assert work is not None

        def finish() -> None:
            with self._in_touch():
                work.wait()

        return finish

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place; the tensors are alike on all ranks."""
        with torch.no_grad(), self._in_touch():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def require_same(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise TwinscopeError unless all ranks hold the same bits, as far as a sum of them tells."""
        total = sum(_bits(tensor) for tensor in tensors)
        assert isinstance(total, Tensor)
        # The largest of a number and of its complement are complements only if all ranks have one number.
        pair = torch.stack([total, ~total])
        self._reduce(pair, dist.ReduceOp.MAX)
        if int(pair[0]) != ~int(pair[1]):
            self._known = True
            raise TwinscopeError(
                f"the {self.size} ranks hold different {what}, where they should be equal to the bit: "
                "run all ranks on one kind of machine, with the same versions of everything"
            )

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on this rank; if it fails on any rank, all fail with that one's sentence.

        Raises:
            TwinscopeError: the error of the first rank on which it failed.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        said = self._gather("" if error is None else _ending(error))
        first = next((rank for rank, words in enumerate(said) if words), None)
        if first is None:
            return result  # pyright: ignore[reportReturnType]
        self._known = True
        if error is not None and first == self.rank:
            raise error
        raise _error_of(first, said[first])

    def lead(self, work: Callable[[], str]) -> str:
        """What ``work`` gives on rank 0 alone, told to all; the others wait, and fail if it fails."""
        return self._gather(self.together(lambda: work() if self.leads else ""))[0]

    def gather(self, text: str) -> list[str]:
        """What every rank says, in their order."""
        return self._gather(text)

    def agree_to_stop(self, stop: Stopped | None) -> Stopped | None:
        """Why all ranks stop here: the reason of the first that has one, None if none has."""
        asked = torch.tensor([int(stop is not None)])
        self._reduce(asked, dist.ReduceOp.MAX)
        if not int(asked):
            return None
        said = self._gather("" if stop is None else _ending(stop))
        self._known = True
        first = next(rank for rank, words in enumerate(said) if words)
        if stop is not None and first == self.rank:
            return stop
        return Stopped(str(_error_of(first, said[first])))

    def tell_ending(self, error: BaseException) -> None:
        """Leave word of why this rank ends, for those that find it gone; does nothing if they know."""
        if not self._known and not isinstance(error, RankLost):
            _in_time(lambda: self._store.set(f"ended-{self.rank}", _ending(error)))

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        with self._in_touch():
            dist.all_reduce(values, operation)

    def _gather(self, text: str) -> list[str]:
        data = text.encode()
        with self._in_touch():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self._words)
            longest = max(1, *(int(length) for length in lengths))
            padded = torch.zeros(longest, dtype=torch.uint8)
            if data:
                padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._words)
        return [bytes(p[: int(n)].tolist()).decode() for p, n in zip(parts, lengths, strict=True)]

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TwinscopeError:
        """Why another rank is gone, in its own words where it left some."""
        left = _in_time(self._last_words)
        if left is not None:
            self._known = True
            return _error_of(*left)
        return RankLost(
            f"rank {self.rank} of {self.size} lost another rank, which ended or stopped answering "
            f"({_reason(error)}): the run goes on from its last checkpoint when it is resumed, on any "
            "number of ranks"
        )

    def _last_words(self) -> tuple[int, str] | None:
        for rank in range(self.size):
            if self._store.check([f"ended-{rank}"]):
                return rank, self._store.get(f"ended-{rank}").decode()
        return None


@contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """Meet the other ranks of the job that the environment describes; part from them at the end.

    If the block fails, the connections are left to the end of the process: closing them waits for others,
    who may be waiting for this one.

    Raises:
        RankLost: the others did not come.
        ConfigError: ``$TWINSCOPE_RANK_TIMEOUT`` is no number of seconds.
    """
    patience = timedelta(seconds=_patience())
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        # Waiting for a sum then holds the host, and fails there, instead of ending the process without a
        # word. The host waits only where it needs the sum.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        if place.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(place.local_rank)
    try:
        store, _, _ = next(rendezvous("env://", timeout=patience))
        store = PrefixStore("twinscope", store)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=patience
        )
        words = dist.new_group(backend="gloo", timeout=_PREPARING)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankLost(
            f"rank {place.rank} of {place.size} on {socket.gethostname()} did not meet the others at {where} "
            f"({_reason(error)}): start all of them, where they reach each other"
        ) from error
    assert isinstance(words, dist.ProcessGroup)
    ranks = Ranks(place, backend, store, words)
    try:
        yield ranks
    except BaseException as error:
        ranks.tell_ending(error)
        raise
    dist.destroy_process_group()


def _in_time(ask: Callable[[], T]) -> T | None:
    """What ``ask`` gives, None if it fails or does not soon: where ranks met may be gone or hang as well."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(_SOON)
    return found[0] if found else None


def _patience() -> float:
    text = os.environ.get("TWINSCOPE_RANK_TIMEOUT", str(PATIENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"TWINSCOPE_RANK_TIMEOUT = '{text}': give a number of seconds")
    return seconds


def _bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as whole numbers of its width: int64, modulo 2^64."""
    whole = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(whole).sum(dtype=torch.int64)


def _ending(error: BaseException) -> str:
    """An error as one line that another rank can raise again."""
    if isinstance(error, TwinscopeError):
        return json.dumps([error.exit_code, str(error)])
    if isinstance(error, KeyboardInterrupt):
        return json.dumps([Stopped.exit_code, "interrupted"])
    return json.dumps([1, f"{type(error).__name__}: {error}"])


def _error_of(rank: int, words: str) -> TwinscopeError:
    """The error that ``words`` of another rank stand for."""
    code, sentence = json.loads(words)
    kinds = {2: ConfigError, 65: DataError, 75: Stopped}
    return kinds.get(code, TwinscopeError)(sentence if rank == 0 else f"rank {rank}: {sentence}")


def _reason(error: RuntimeError) -> str:
    """The first sentence of what the library says, without the place in its source that it begins with."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    said = line.rpartition("] ")[2] if line.startswith("[") else line
    return said.partition(". ")[0].rstrip(".")
