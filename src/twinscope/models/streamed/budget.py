"""What a pass through a streamed model holds in memory: planned before it begins, looked at while it runs.

Covers the planned size of a pass from shapes, how many texts go through together, and a soft limit on the
process that looks between matrices. Not covered: the budgets of a whole run (``lab/budget.py``).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from twinscope.lab.budget import rss_mib
from twinscope.lab.errors import BudgetExceeded

MIB = 1024.0 * 1024.0
#: What the libraries and a model's class hold before any weight is read (370 to 380 MiB where measured).
LIBRARY_MIB = 384.0
#: Pages of the libraries' code and tables that the first pass touches, and memory freed but not given back.
_FIRST_PASS_MIB = 24.0
#: When the process has grown by so much, freed memory is given back; that takes a millisecond at most.
_SWELL_MIB = 10.0
#: A pass always has so much, whatever else the process holds.
_LEAST_MIB = 32.0


@dataclass(frozen=True)
class PassSizes:
    """Memory of one pass: of the whole pass (``fixed_mib``), and in float32 values per token and text.

    ``squared`` counts values per text and squared length: attention probabilities that are kept.
    """

    fixed_mib: float
    per_token: int
    squared: int = 0

    def mib(self, texts: int, tokens: int) -> float:
        """The planned size in MiB of ``texts`` texts of ``tokens`` tokens that go through together."""
        values = texts * (tokens * self.per_token + tokens * tokens * self.squared)
        return self.fixed_mib + 4 * values / MIB

    def together(self, tokens: int, budget_mib: float | None) -> int | None:
        """How many texts of ``tokens`` tokens go through together within a budget; None is all of them."""
        if budget_mib is None:
            return None
        room = max(_LEAST_MIB, budget_mib - LIBRARY_MIB - self.fixed_mib)
        return max(1, int(room / (self.mib(1, tokens) - self.fixed_mib)))


class PassLimit:
    """A soft limit on resident memory. ``begin()`` starts a pass; ``check()`` raises when it outgrows it.

    What the process held beyond the budget when the pass began belongs to others and does not stop it. When
    the process has swollen, memory that was freed but is still held is first given back to the system.
    """

    def __init__(self, budget_mib: float | None) -> None:
        self._budget = budget_mib
        self._allowed = self._floor = float("inf")

    def begin(self) -> None:
        """Set the limit for the pass that begins: the budget, or what there is with room for the model."""
        if self._budget is not None:
            own = max(_LEAST_MIB, self._budget - LIBRARY_MIB)
            self._allowed = max(self._budget, rss_mib() + own)
            _give_back()
            self._floor = rss_mib()

    def check(self) -> None:
        """Return if the process keeps to the limit.

        Raises:
            BudgetExceeded: it does not.
        """
        if self._budget is None:
            return
        used = rss_mib()
        if used > self._floor + _SWELL_MIB:
            _give_back()
            used = rss_mib()
            self._floor = min(self._floor, used)
        if used > self._allowed:
            raise BudgetExceeded(
                "process_memory",
                used,
                self._allowed,
                f"this process holds {used:.0f} MiB in the middle of a pass through a model that may have "
                f"{self._allowed:.0f} MiB: raise the budget, or choose fewer or shorter texts",
            )


def _give_back() -> None:
    """Return freed memory to the system where the C library can (glibc): large arrays leave holes behind."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def first_pass_mib() -> float:
    """What the first pass adds to a fresh process apart from its arrays."""
    return _FIRST_PASS_MIB
