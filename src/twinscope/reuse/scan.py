"""The scan over a streamed model: the order of passes, comparisons and the opening of held-out text.

Covers the passes, what is kept between them, and the rows. Every unit of work is a row of a journal under
its key; a unit whose rows are there is not done again, and one that is done again comes out the same, since
texts always go through in the same groups: the first calibration text alone, the other calibration texts, all
held-out texts. What is compared is in branches.py, what a row means for a pair in decision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.errors import DataError
from twinscope.lab.provenance import utc_now
from twinscope.lab.run import Run
from twinscope.models.streamed.reading import LEAST_BYTES
from twinscope.models.weights import load_tensors, save_tensors
from twinscope.reuse.branches import HEAD_ROWS, Calibration, Comparison, calibrate, compare
from twinscope.reuse.decision import judge
from twinscope.reuse.plan import Pair, Plan
from twinscope.reuse.texts import SPLITS, Passage, Split

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

_MIB = 1024 * 1024
#: Blocks of logits that exist at once: two threads' own, and about as much in float64 and sorted.
_LOGITS = 4
HELDOUT_OPENED = "heldout-opened"
CALIBRATED = "calibration-decided"

#: ``before(stage, done, total)`` is called before each unit of work and may raise to end it there.
Before = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Group:
    """Texts that go through the model together: ``ids`` (B, T)."""

    name: str
    split: Split
    passages: tuple[Passage, ...]
    ids: Tensor


@dataclass(frozen=True)
class Scan:
    """One scan: the model, its plan, all pairs (exploratory ones behind), and where its rows are kept."""

    lm: StreamedLM
    plan: Plan
    pairs: Sequence[Pair]
    run: Run
    timing: Callable[[], dict[str, float]]

    @property
    def device(self) -> torch.device:
        """Where comparisons are computed."""
        return torch.device(self.plan.content["compute"]["device"])

    def has(self, key: str) -> bool:
        """Whether the journal has the row."""
        return self.find(key) is not None

    def find(self, key: str) -> dict[str, Any] | None:
        """The journal's row of that key."""
        return next((row for row in self.run.rows if row["key"] == key), None)

    def keep(self, row: dict[str, Any]) -> None:
        """Append a row with what it took."""
        self.run.append({**row, "timing": self.timing()})


def first_text(scan: Scan, before: Before) -> None:
    """Take the first text alone through the model and through one pair of each kind, to see memory hold.

    Raises:
        BudgetExceeded: it does not; and whatever the model raises.
    """
    if scan.has("first-text"):
        return
    group = groups(scan.plan)[0]
    z = residuals(scan, group, before)
    kinds = {pair.kind: pair for pair in reversed(scan.pairs)}
    for done, pair in enumerate(kinds.values()):
        before("first-text", done, len(kinds))
        comparison = pair.comparisons[0]
        part = z[comparison.residual].to(scan.device)
        compare(scan.lm, comparison, part, calibrate(scan.lm, comparison, part), scan.plan.seed)
    before("first-text", len(kinds), len(kinds))
    scan.keep({"key": "first-text", "text": group.passages[0].name})


def calibrate_pairs(scan: Scan, before: Before) -> dict[tuple[str, str], Calibration]:
    """Compare every pair, both ways, on all calibration texts, and write down what calibration alone says.

    Returns what held-out comparisons use, by pair and reference site.
    """
    first, rest = (group for group in groups(scan.plan) if group.split == "calibration")
    parts = [residuals(scan, group, before) for group in (first, rest)]
    z = {site: torch.cat([part[site] for part in parts]) for site in parts[0]}
    del parts
    passages = (*first.passages, *rest.passages)
    found = {}
    for done, total, pair, comparison in _comparisons(scan):
        before("calibration", done, total)
        here = z[comparison.residual].to(scan.device)
        calibration = calibrate(scan.lm, comparison, here)
        found[pair.id, comparison.reference] = calibration
        _measure(scan, pair, comparison, passages, here, calibration)
    thresholds = scan.plan.thresholds
    verdicts = {pair.id: judge(rows_of(scan, pair, "calibration"), [], thresholds) for pair in scan.pairs}
    scan.keep(
        {
            "key": CALIBRATED,
            "candidates": {
                name: {"candidate": verdict.candidate, "reason": verdict.reason}
                for name, verdict in verdicts.items()
            },
        }
    )
    return found


def open_heldout(scan: Scan) -> str:
    """Write down that held-out text is opened, before it is, and only after calibration was decided.

    Returns when, in UTC; a scan that is resumed keeps the time of the first opening.
    """
    known = scan.find(HELDOUT_OPENED)
    if known is None:
        if not scan.has(CALIBRATED):
            raise ValueError("held-out text is opened after calibration was decided")
        known = {"key": HELDOUT_OPENED, "at": utc_now()}
        scan.run.append(known)
    return str(known["at"])


def confirm_pairs(scan: Scan, calibrations: dict[tuple[str, str], Calibration], before: Before) -> None:
    """Compare every pair, both ways, on all held-out texts."""
    (group,) = (group for group in groups(scan.plan) if group.split == "heldout")
    z = residuals(scan, group, before)
    for done, total, pair, comparison in _comparisons(scan):
        before("heldout", done, total)
        calibration = calibrations[pair.id, comparison.reference]
        here = z[comparison.residual].to(scan.device)
        _measure(scan, pair, comparison, group.passages, here, calibration)


def groups(plan: Plan) -> list[Group]:
    """The texts in the groups in which they always go through the model."""
    split: dict[Split, list[Passage]] = {
        name: [passage for passage in plan.texts if passage.split == name] for name in SPLITS
    }
    first, *rest = split["calibration"]
    members: list[tuple[str, Split, list[Passage]]] = [
        ("calibration-first", "calibration", [first]),
        ("calibration-rest", "calibration", rest),
        ("heldout", "heldout", split["heldout"]),
    ]
    return [
        Group(name, of, tuple(passages), torch.tensor([passage.ids for passage in passages]))
        for name, of, passages in members
    ]


def residuals(scan: Scan, group: Group, before: Before) -> dict[str, Tensor]:
    """The residual stream ``(B, T, C)`` that enters each site the pairs need, from one streamed pass.

    Kept in the run's checkpoints under its hash, so that a resumed scan reads it back.
    """
    key = f"residuals/{group.name}"
    path = scan.run.checkpoints / f"residuals-{group.name}.safetensors"
    known = scan.find(key)
    if known is not None:
        try:
            return load_tensors(path, known["sha256"])
        except DataError:
            path.unlink(missing_ok=True)  # damaged or gone: the pass gives the same again
    sites = {comparison.residual for pair in scan.pairs for comparison in pair.comparisons}
    found: dict[str, Tensor] = {}
    for point in scan.lm.walk(group.ids, sites):
        before(group.split if group.name != "calibration-first" else "first-text", len(found), len(sites))
        # A residual is shared by sites of one layer, and a file holds every tensor once.
        found[point.site] = point.z.to("cpu", copy=True)
    sha256 = save_tensors(path, found)
    scan.keep({"key": key, "sha256": sha256})
    return found


def rows_of(scan: Scan, pair: Pair, split: Split | None = None) -> list[dict[str, Any]]:
    """The rows of one pair in the order of the plan: inputs of the left site first, then texts."""
    found = []
    for comparison in pair.comparisons:
        for passage in scan.plan.texts:
            if split in (None, passage.split):
                row = scan.find(_key(pair, comparison, passage))
                if row is not None:
                    found.append(row)
    return found


def planned_mib(lm: StreamedLM, pairs: Sequence[Pair], passages: Sequence[Passage]) -> float:
    """The planned peak of a scan in MiB: that of a streamed pass, and what comparisons hold beside it.

    Beside it stand the residuals of every site of one split; of one comparison the outputs of its variants,
    twice in float64 for one text, and the rows that go through the head together, with the logits of a block
    of the vocabulary and what is computed of them.
    """
    tokens = len(passages[0].ids)
    texts = max(sum(passage.split == split for passage in passages) for split in SPLITS)
    sites = {comparison.residual for pair in pairs for comparison in pair.comparisons}
    variants = max(6 + len(comparison.others) for pair in pairs for comparison in pair.comparisons)
    rows = min(HEAD_ROWS, variants * texts * tokens)
    values = lm.width * (len(sites) * texts * tokens + variants * texts * tokens + 4 * tokens + rows)
    heads = int(getattr(lm.config, "num_attention_heads", 1))
    attention = variants * texts * heads * tokens**2 if any(p.kind != "mlp" for p in pairs) else 0
    logits = _LOGITS * rows * LEAST_BYTES // (4 * lm.width)
    return lm.plan_mib(texts, tokens) + 4 * (values + attention + logits) / _MIB


def _comparisons(scan: Scan) -> Iterator[tuple[int, int, Pair, Comparison]]:
    flat = [(pair, comparison) for pair in scan.pairs for comparison in pair.comparisons]
    for done, (pair, comparison) in enumerate(flat):
        yield done, len(flat), pair, comparison


def _measure(
    scan: Scan,
    pair: Pair,
    comparison: Comparison,
    passages: Sequence[Passage],
    z: Tensor,
    calibration: Calibration,
) -> None:
    """The rows of one comparison on all texts of a split, unless they are there already."""
    keys = [_key(pair, comparison, passage) for passage in passages]
    if all(scan.has(key) for key in keys):
        return
    measured = compare(scan.lm, comparison, z, calibration, scan.plan.seed)
    for key, passage, values in zip(keys, passages, measured, strict=True):
        row = {
            "key": key,
            "pair": pair.id,
            "kind": comparison.kind,
            "exploratory": pair.exploratory,
            "split": passage.split,
            "text": passage.name,
            "reference": comparison.reference,
            "substitute": comparison.substitute,
        }
        scan.keep(row | values)


def _key(pair: Pair, comparison: Comparison, passage: Passage) -> str:
    return f"{pair.id}/{comparison.reference}/{passage.name}"
