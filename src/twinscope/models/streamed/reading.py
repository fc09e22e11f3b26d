"""Blocks of weights in the order in which they are needed, through buffers that are used again and again.

Covers which tensors of the files stand behind each parameter, cutting matrices into blocks of rows, reading
ahead on a thread of its own where a core is free for it, and sharing the blocks of a matrix among several
threads where torch may use several. Memory is that of the buffers, whatever the size of the model. Not
covered: what is done with a block (``layers.py``).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from twinscope.models.streamed.budget import MIB, PassLimit
from twinscope.models.streamed.team import Team
from twinscope.models.tensor_files import PIECE_BYTES, TensorFiles

#: Bytes of all blocks that are held at a time, in float32, and of the least block: small enough to stay in
#: the cache between conversion and product, and large enough that a product is worth the handing over.
_BLOCKS_BYTES, LEAST_BYTES = 6 << 20, 1 << 20
#: A matrix is cut into so many blocks, as far as those limits allow.
_BLOCKS = 12
#: Blocks that are read before they are asked for: with the one in use, a double buffer.
_AHEAD = 1

Result = TypeVar("Result")


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: tensors of the files by name, joined along their first dimension.

    ``experts``: one such source for each index of the parameter's first dimension, instead.
    """

    names: tuple[str, ...] = ()
    experts: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Block:
    """Rows ``start … stop - 1`` of a matrix, which are rows ``first …`` of one tensor of the files."""

    name: str
    first: int
    start: int
    stop: int
    width: int


#: A block by its place: which matrix of the expected order, and which block of it.
_Place = tuple[int, int]


class WeightReader:
    """Reads parameters by key; ``sources`` says which tensors stand behind a key and may be re-pointed.

    ``limit`` is looked at before each parameter and may stop the pass. A matrix in ``small`` is cut into the
    least blocks, because of what is made from each. ``block_bytes`` is the size of every block, in tests.
    """

    def __init__(
        self,
        files: TensorFiles,
        device: torch.device,
        sources: dict[str, Source],
        limit: PassLimit,
        block_bytes: int | None = None,
    ) -> None:
        self.files = files
        self.device = device
        self.sources = sources
        self.limit = limit
        self.block_bytes = block_bytes
        self.small: set[str] = set()
        self.team = Team(1)
        self._changed = threading.Condition()
        self._size = 0
        self._free: list[_Buffer] = []
        self._order: list[str] = []
        self._position = -1
        self._cursor: _Place = (0, 0)
        self._ready: dict[_Place, _Buffer | BaseException] = {}
        self._loading: set[_Place] = set()
        self._stop = True
        self._asked: list[str] = []
        self._learned: dict[str, list[str]] = {}

    def close(self) -> None:
        """End the threads and close the files."""
        self.team.close()
        self.files.close()

    @property
    def buffers_mib(self) -> float:
        """Memory of all buffers in MiB when torch uses the threads it uses at present."""
        threads = self._threads()
        return (self._block_size(threads) * (threads + _AHEAD) + PIECE_BYTES * (threads + 2)) / MIB

    @contextmanager
    def reading(self, label: str, order: Sequence[str]) -> Iterator[None]:
        """Expect the matrices ``order`` for the length of a ``with`` block, and read ahead of the calls.

        The second time under one ``label`` the order of the calls of the first time is expected instead.
        A matrix that is not expected is read when it is asked for. Inside another such block this is nothing.
        """
        if not self._stop:
            yield
            return
        if self.files.closed:
            raise ValueError(f"the model in {self.files.place} is closed")
        self.limit.begin()
        threads = self._threads()
        if self.team.size != threads:
            self.team.close()
            self.team = Team(threads)
        self._size = self._block_size(threads)
        self._free = [_Buffer(self._size, self.device) for _ in range(threads + _AHEAD)]
        self._order = list(self._learned.get(label, order))
        self._asked = []
        self._position, self._cursor = -1, (0, 0)
        self._stop = False
        ahead = None
        if self.device.type != "cpu" or _cores() > threads:
            ahead = threading.Thread(target=self._read_ahead, name="weights-ahead", daemon=True)
            ahead.start()
        try:
            yield
            self._learned[label] = self._asked
        finally:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            if ahead is not None:
                ahead.join()
            self._ready.clear()
            self._free.clear()

    def each(self, key: str, work: Callable[[int, int, Tensor], Result]) -> Iterator[Result]:
        """``work(start, stop, rows)`` for every block of a matrix; the results in order.

        Several blocks are worked on at once, each on a thread of its own, where torch has several threads. A
        block's rows are gone when its work returns. Only inside :meth:`reading`.
        """
        self.limit.check()
        blocks = self._blocks(key)
        position = self._advance(key)

        def take(number: int) -> Result:
            buffer = self._take((position, number), blocks[number])
            block = blocks[number]
            try:
                return work(block.start, block.stop, buffer.rows())
            finally:
                self._give(buffer)

        yield from self.team.each(range(len(blocks)), take)

    def rows(self, key: str, numbers: list[int]) -> Tensor:
        """Rows of a matrix by number: ``(len(numbers), C)``."""
        self.limit.check()
        (name,) = self.sources[key].names
        return self.files.gather(name, numbers).to(self.device)

    def expert(self, key: str, number: int) -> Tensor:
        """One expert's matrix ``(O, I)`` of a stack."""
        self.limit.check()
        source = self.sources[key]
        if source.experts:
            return self._joined(source.experts[number].names)
        return self.files.read(source.names[0], rows=(number, number + 1))[0].to(self.device)

    def whole(self, key: str) -> Tensor:
        """A small parameter, in memory of its own."""
        return self._joined(self.sources[key].names)

    def _joined(self, names: tuple[str, ...]) -> Tensor:
        parts = [self.files.read(name) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self.device)

    def _threads(self) -> int:
        """How many blocks are multiplied at once: on a GPU one, there is one queue of work."""
        return torch.get_num_threads() if self.device.type == "cpu" else 1

    def _block_size(self, threads: int) -> int:
        return self.block_bytes or max(LEAST_BYTES, _BLOCKS_BYTES // max(2, threads))

    def _blocks(self, key: str) -> list[Block]:
        found = []
        base = 0
        for name in self.sources[key].names:
            rows, width = self.files.entry(name).shape
            most = self._size
            if not self.block_bytes:
                least = key in self.small or 4 * rows * width < LEAST_BYTES * _BLOCKS
                most = LEAST_BYTES if least else min(most, 4 * rows * width // _BLOCKS)
            fit = max(1, most // 4 // width)
            step = rows
            if rows > fit:
                # As equal as can be, of sixteen rows each time: whole registers of the product.
                equal = math.ceil(rows / math.ceil(rows / fit))
                step = min(16 * math.ceil(equal / 16), fit // 16 * 16 or fit)
            for first in range(0, rows, step):
                stop = min(rows, first + step)
                found.append(Block(name, first, base + first, base + stop, width))
            base += rows
        return found

    def _advance(self, key: str) -> int:
        """The place of a matrix in the expected order, −1 if it has none; what came before it is dropped."""
        self._asked.append(key)
        try:
            position = self._order.index(key, self._position + 1)
        except ValueError:
            return -1
        with self._changed:
            self._position = position
            self._cursor = max(self._cursor, (position, 0))
            for place in [place for place in self._ready if place < (position, 0)]:
                self._release(self._ready.pop(place))
            self._changed.notify_all()
        return position

    def _take(self, place: _Place, block: Block) -> _Buffer:
        """A block in a buffer: one that was read ahead, or read here."""
        with self._changed:
            while place in self._loading:
                self._changed.wait()
            found = self._ready.pop(place, None)
            if isinstance(found, BaseException):
                raise found
            if found is not None:
                self._changed.notify_all()
                return found
            if place[0] >= 0:
                self._cursor = max(self._cursor, (place[0], place[1] + 1))
            buffer = self._free.pop()
        try:
            buffer.load(self.files, block)
        except BaseException:
            self._give(buffer)
            raise
        return buffer

    def _give(self, buffer: _Buffer) -> None:
        with self._changed:
            self._release(buffer)
            self._changed.notify_all()

    def _release(self, buffer: _Buffer | BaseException) -> None:
        if isinstance(buffer, _Buffer):
            self._free.append(buffer)

    def _read_ahead(self) -> None:
        """Read the blocks at the cursor, as long as fewer than :data:`_AHEAD` wait; ends with the pass."""
        blocks: list[Block] = []
        of = -1
        while True:
            with self._changed:
                while not self._stop and (
                    len(self._ready) + len(self._loading) >= _AHEAD or self._cursor[0] >= len(self._order)
                ):
                    self._changed.wait()
                if self._stop:
                    return
                position, number = self._cursor
                if position != of:
                    of, blocks = position, self._blocks(self._order[position])
                if number >= len(blocks):
                    self._cursor = (position + 1, 0)
                    continue
                place = position, number
                self._cursor = (position, number + 1)
                self._loading.add(place)
                buffer = self._free.pop()
            found: _Buffer | BaseException = buffer
            try:
                buffer.load(self.files, blocks[number])
            except BaseException as error:
                found = error
            with self._changed:
                self._loading.discard(place)
                if found is not buffer:
                    self._release(buffer)
                if place >= (self._position, 0):
                    self._ready[place] = found
                else:
                    self._release(found)
                self._changed.notify_all()


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Buffer:
    """Memory for one block on the CPU, pinned where the model is on a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(nbytes // 4, pin_memory=device.type == "cuda")
        self._rows = self._memory
        self._copied: torch.cuda.Event | None = None

    def load(self, files: TensorFiles, block: Block) -> None:
        """Read a block; only when the GPU has taken the one before."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = block.stop - block.start
        if rows * block.width > self._memory.numel():  # one row may be longer than a block
            self._memory = torch.empty(rows * block.width, pin_memory=self._device.type == "cuda")
        self._rows = self._memory[: rows * block.width].view(rows, block.width)
        files.read(block.name, self._rows, (block.first, block.first + rows))

    def rows(self) -> Tensor:
        """The rows that were read last, on the model's device."""
        if self._device.type != "cuda":
            return self._rows
        rows = self._rows.to(self._device, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return rows
