"""One pair replaced, each site by the other: the order of passes, the opening of held-out text, the rows.

Covers what a ``swap`` run does with a streamed model and what it writes down. Texts go through in the groups
that were sealed, the residuals of one group at a time; a direction on a text is a row of the journal, and
what is there is not done again. Calibration gives the spread of the change, from which the number of texts
that the margin needs is written down before held-out text is opened, and the mean update. How a site is
replaced is in replacement.py, what the rows mean in swap_findings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.provenance import utc_now
from twinscope.lab.run import Run
from twinscope.reuse.branches import Comparison
from twinscope.reuse.replacement import DIVERGENCES, Passed, changes, effects, passed, summed_update
from twinscope.reuse.scan import Group
from twinscope.reuse.sitting import Before
from twinscope.reuse.swap_findings import needed_texts
from twinscope.reuse.swap_plan import SwapPlan, direction_of
from twinscope.reuse.texts import SPLITS, Split

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

DECIDED = "calibration-decided"
HELDOUT_OPENED = "heldout-opened"
FIRST_TEXT = "first-text"
_NOT_ON_CALIBRATION = "divergences are measured on held-out text alone"


@dataclass(frozen=True)
class Swap:
    """One replacement run: the model, what was sealed, and where rows are kept."""

    lm: StreamedLM
    plan: SwapPlan
    run: Run
    timing: Callable[[], dict[str, float]]

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """The two directions: ``reference`` is the replaced site, ``substitute`` the one in its place."""
        return self.plan.pair.comparisons

    def find(self, key: str) -> dict[str, Any] | None:
        """The journal's row of that key."""
        return next((row for row in self.run.rows if row["key"] == key), None)

    def has(self, key: str) -> bool:
        """Whether the journal has the row."""
        return self.find(key) is not None

    def keep(self, row: dict[str, Any]) -> None:
        """Append a row with what it took."""
        self.run.append({**row, "timing": self.timing()})


def first_text(swap: Swap, before: Before) -> None:
    """Take the first calibration text alone through everything that held-out texts go through.

    It shows whether memory holds before the long part begins, and its numbers are dropped.

    Raises:
        BudgetExceeded: memory does not; and whatever the model raises.
    """
    if swap.has(FIRST_TEXT):
        return
    group = swap.plan.groups("calibration")[0]

    def each() -> None:
        before(FIRST_TEXT, 0, 1)

    given = _passed(swap, group.ids[:1], each)
    for comparison in swap.comparisons:
        mean = summed_update(swap.lm, comparison, given) / given.ids.numel()
        effects(swap.lm, comparison, given, mean.float(), each)
    before(FIRST_TEXT, 1, 1)
    swap.keep({"key": FIRST_TEXT, "text": group.passages[0].name})


def calibrate(swap: Swap, before: Before) -> None:
    """The change of loss of both directions on every calibration text, and the sums of the mean updates.

    Ends with what calibration decides: the spread, and how many texts the margin needs.
    """
    groups = swap.plan.groups("calibration")
    for done, group in enumerate(groups):

        def each(done: int = done) -> None:
            before("calibration", done, len(groups))

        each()
        left = [
            comparison
            for comparison in swap.comparisons
            if not swap.has(_sums_key(comparison, group)) or not _measured(swap, comparison, group)
        ]
        if not left:
            continue
        given = _passed(swap, group.ids, each)
        for comparison in left:
            found = changes(swap.lm, comparison, given, each)
            missing = dict.fromkeys(DIVERGENCES)
            missing |= {f"{key}_reason": _NOT_ON_CALIBRATION for key in DIVERGENCES}
            _keep(swap, comparison, group, given, [row | missing | {"nulls": []} for row in found])
            summed = summed_update(swap.lm, comparison, given).tolist()
            swap.keep({"key": _sums_key(comparison, group), "sum": summed, "tokens": group.ids.numel()})
    decided = {}
    for comparison in swap.comparisons:
        values = [row["delta_nll"] for row in rows_of(swap, comparison, "calibration")]
        decided[direction_of(comparison)] = needed_texts(values, swap.plan.margin)
    swap.keep({"key": DECIDED, "directions": decided})


def open_heldout(swap: Swap) -> str:
    """Write down that held-out text is opened, before it is, and only after calibration was decided.

    Returns when, in UTC; a run that is resumed keeps the time of the first opening.
    """
    known = swap.find(HELDOUT_OPENED)
    if known is None:
        if not swap.has(DECIDED):
            raise ValueError("held-out text is opened after calibration was decided")
        known = {"key": HELDOUT_OPENED, "at": utc_now()}
        swap.run.append(known)
    return str(known["at"])


def confirm(swap: Swap, before: Before) -> None:
    """Both directions with every null on all held-out texts, group by group."""
    if not swap.has(HELDOUT_OPENED):
        raise ValueError("held-out text was not opened")
    means = {comparison: _mean(swap, comparison) for comparison in swap.comparisons}
    groups = swap.plan.groups("heldout")
    for done, group in enumerate(groups):

        def each(done: int = done) -> None:
            before("heldout", done, len(groups))

        each()
        left = [comparison for comparison in swap.comparisons if not _measured(swap, comparison, group)]
        if not left:
            continue
        given = _passed(swap, group.ids, each)
        for comparison in left:
            found = effects(swap.lm, comparison, given, means[comparison], each)
            _keep(swap, comparison, group, given, found)


def rows_of(swap: Swap, comparison: Comparison, split: Split | None = None) -> list[dict[str, Any]]:
    """The rows of one direction in the order of the texts, calibration first."""
    keys = [
        _key(comparison, passage.name)
        for of in SPLITS
        for passage in swap.plan.texts
        if passage.split == of and split in (None, of)
    ]
    return [row for row in map(swap.find, keys) if row is not None]


def decided_of(swap: Swap, comparison: Comparison) -> dict[str, Any]:
    """What calibration decided for one direction, as the journal has it."""
    row = swap.find(DECIDED)
    assert row is not None
    return row["directions"][direction_of(comparison)]


def _passed(swap: Swap, ids: Tensor, each: Callable[[], None]) -> Passed:
    sites = [comparison.residual for comparison in swap.comparisons]
    return passed(swap.lm, ids, sites, each)


def _mean(swap: Swap, comparison: Comparison) -> Tensor:
    """The mean update of the replaced site over all calibration tokens, (C,) float32."""
    rows = [swap.find(_sums_key(comparison, group)) for group in swap.plan.groups("calibration")]
    parts = [row for row in rows if row is not None]
    total = torch.tensor([row["sum"] for row in parts], dtype=torch.float64).sum(dim=0)
    return (total / sum(row["tokens"] for row in parts)).float()


def _keep(
    swap: Swap, comparison: Comparison, group: Group, given: Passed, found: Sequence[dict[str, Any]]
) -> None:
    """The rows of one direction on the texts of a group."""
    before = given.nll.double().mean(dim=1).tolist()
    for passage, nll_before, values in zip(group.passages, before, found, strict=True):
        nbytes = swap.plan.nbytes[passage.name]
        reason = {} if nbytes is not None else {"bytes_reason": swap.plan.content["texts"]["bytes_reason"]}
        row = {
            "key": _key(comparison, passage.name),
            "mode": "pair",
            "direction": direction_of(comparison),
            "replaced": comparison.reference,
            "by": comparison.substitute,
            "kind": comparison.kind,
            "exploratory": swap.plan.pair.exploratory,
            "split": passage.split,
            "text": passage.name,
            "tokens": len(passage.ids) - 1,
            "bytes": nbytes,
            **reason,
            "nll_before": nll_before,
        }
        swap.keep(row | values)


def _measured(swap: Swap, comparison: Comparison, group: Group) -> bool:
    return all(swap.has(_key(comparison, passage.name)) for passage in group.passages)


def _key(comparison: Comparison, text: str) -> str:
    return f"{direction_of(comparison)}/{text}"


def _sums_key(comparison: Comparison, group: Group) -> str:
    return f"sums/{direction_of(comparison)}/{group.name}"
