"""Names for the parts of a training step, so that what a step costs can be told part by part.

Covers marking only. A mark does nothing unless somebody observes, which is a matter of the current context
and thread, never of the model; timing and counting are in cost/timing.py and cost/counting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

#: Gives the context in which the part of that name runs.
Observer = Callable[[str], AbstractContextManager[object]]

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)
_UNOBSERVED = nullcontext()


def stage(name: str) -> AbstractContextManager[object]:
    """Marks the ``with`` block as the part ``name`` of a step: data, free, forces, rebuild, read, readout,
    embedding, optimizer; of a backpropagation step forward and backward for the blocks. Marks do not nest."""
    observer = _observer.get()
    return _UNOBSERVED if observer is None else observer(name)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let ``observer`` see every mark of the ``with`` block."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
