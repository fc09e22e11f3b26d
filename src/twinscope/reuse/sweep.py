"""Every site of a kind replaced by every other: the passes, and a row for each replaced site.

Covers which sites fit in each other's place, how texts and replacements are grouped, and the losses. A
replacement is that of replacement.py. All replacements of one site start from the residual that enters it and
go through the rest of the model as one batch, so that its weights are read once for many of them. What the
losses mean is in sweep_findings.py, the run around them in sweep_run.py.

Shapes: B texts of a group, T positions, C channels, M replacements in a stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.streamed.reading import LEAST_BYTES
from twinscope.reuse import nulls
from twinscope.reuse.branches import Comparison, Kind
from twinscope.reuse.replacement import update_of
from twinscope.reuse.scan import Group
from twinscope.reuse.sitting import Before
from twinscope.reuse.swap import Swap
from twinscope.reuse.swap_plan import SwapPlan
from twinscope.reuse.texts import Split

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

#: The kinds that are swept unless others are named; one that the model does not have is passed over.
DEFAULT_KINDS: tuple[Kind, ...] = ("attention", "mlp")
#: Nulls beside every row of a matrix, as the run states them.
NULLS = (
    "zero: the branch adds nothing",
    "self: the site itself in its own place, which must change exactly nothing",
)
#: What the batch of a stack may take in MiB, so that a model of SmolLM2's size stays within 512 MiB.
STACK_MIB = 32.0
_MIB = 1024 * 1024
#: Blocks of logits that exist at once, and their size: two threads' own, and about as much in float64.
_LOGITS, _BLOCK_BYTES = 4, 3 * LEAST_BYTES


@dataclass(frozen=True)
class Matrix:
    """Sites of one kind, in order of depth, each of which fits in the place of each other."""

    kind: Kind
    sites: tuple[str, ...]

    @property
    def pairs(self) -> int:
        """How many replacements there are: each site by each other."""
        return len(self.sites) * (len(self.sites) - 1)


@dataclass(frozen=True)
class Stacks:
    """How much goes through the model together: texts of one group, and replacements of them in a stack."""

    texts: int
    replacements: int


def choose_sites(
    lm: StreamedLM, kinds: Sequence[str] | None = None, every: int = 1
) -> tuple[list[Matrix], list[str]]:
    """What is replaced by what, and what was left out, in words.

    Of each kind every ``every``-th site in order of depth, from the first; sites whose tensors differ in
    shape go into matrices of their own, since none of them fits in the other's place.

    Raises:
        ConfigError: there is no such kind, a named kind has no two sites that fit in each other's place, or
            none has.
    """
    matrices: list[Matrix] = []
    notes: list[str] = []
    for kind in dict.fromkeys(kinds or DEFAULT_KINDS):
        sites = lm.sites(kind)[::every]
        alike = _alike(lm, sites)
        matrices.extend(Matrix(cast(Kind, kind), tuple(part)) for part in alike if len(part) > 1)
        alone = [part[0] for part in alike if len(part) == 1]
        if len(alone) < len(sites):
            notes.extend(f"{site} is left out: no other site that is swept has its shapes" for site in alone)
            continue
        among = "" if every == 1 else f" if one site in {every} is swept"
        missing = f"the model has no two sites of the kind '{kind}' that fit in each other's place{among}"
        if kinds:
            raise ConfigError(f"--kind {kind}: {missing}")
        notes.append(missing)
    if not matrices:
        raise ConfigError(f"there is nothing to sweep: {'; '.join(notes)}")
    return matrices, notes


def choose_stacks(lm: StreamedLM, texts: int, tokens: int, replacements: int) -> Stacks:
    """How many texts, and how many replacements of them, go through together within :data:`STACK_MIB`.

    A function of shapes alone, so that a resumed sweep stacks alike. ``texts`` is the larger number of the
    two splits, ``replacements`` the most that one site has.
    """
    # The difference of two plans is free of what this process happens to hold.
    one = round(lm.plan_mib(2, tokens) - lm.plan_mib(1, tokens), 6)
    most = max(1, int(STACK_MIB / one))
    together = math.ceil(texts / math.ceil(texts / most))
    return Stacks(together, min(replacements, max(1, most // together)))


def planned_mib(lm: StreamedLM, stacks: Stacks, tokens: int) -> float:
    """The planned peak in MiB: what one stack takes in a branch, or in the head where that is more.

    In a branch the streams and values of a pass; in the head the streams that enter it, normed and not, and
    blocks of logits. Beside either the residual, its update and its losses as they are.
    """
    together = stacks.texts * stacks.replacements
    rows, empty = together * tokens, lm.plan_mib(0, tokens)
    head = 3 * lm.width * rows + _LOGITS * rows * _BLOCK_BYTES // (4 * lm.width)
    beside = 3 * lm.width * stacks.texts * tokens
    return empty + max(lm.plan_mib(together, tokens) - empty, 4 * head / _MIB) + 4 * beside / _MIB


def matrices_of(plan: SwapPlan) -> list[Matrix]:
    """What is replaced by what, as it was sealed."""
    return [Matrix(item["kind"], tuple(item["sites"])) for item in plan.content["kinds"]]


def sweep_split(sweep: Swap, split: Split, before: Before) -> None:
    """Replace every site by every other on all texts of a split; a row for each site and group of texts.

    Rows that are there are not made again. One pass through the model as it is gives the residual that
    enters each site; a site is done before the pass goes on.

    Raises:
        DataError: a loss that is not finite; BudgetExceeded, Stopped: as ``before`` and the model raise.
    """
    groups = sweep.plan.groups(split)
    together = int(sweep.plan.content["stack"])
    order = {site: matrix for matrix in matrices_of(sweep.plan) for site in matrix.sites}
    done, total = 0, len(groups) * len(order)
    for group in groups:
        left = [site for site in order if not sweep.has(_key(site, group))]
        done += len(order) - len(left)
        if not left:
            continue
        before(split, done, total)
        (head,) = sweep.lm.walk(group.ids, {"head"})
        nll = sweep.lm.nll_at(head.z, group.ids)
        for point in sweep.lm.walk(group.ids, left):
            matrix = order[point.site]
            by = [site for site in matrix.sites if site != point.site]
            found = changes(
                sweep.lm,
                Place(matrix.kind, point.site, point.z, group.ids, nll),
                by,
                together,
                partial(before, split, done, total),
            )
            sweep.keep(
                {
                    "key": _key(point.site, group),
                    "mode": "sweep",
                    "kind": matrix.kind,
                    "split": split,
                    "replaced": point.site,
                    "by": by,
                    "texts": [passage.name for passage in group.passages],
                    "nll_before": nll.double().mean(dim=1).tolist(),
                    "delta_nll": [found[site] for site in by],
                    "zero": found[nulls.ZERO],
                    "itself": found[nulls.SELF],
                }
            )
            done += 1


@dataclass(frozen=True)
class Place:
    """A site and the texts on which it is replaced.

    ``z`` (B, T, C) is the residual that enters its branch on the texts ``ids`` (B, T), ``nll`` (B, T − 1)
    their losses through the model as it is. The branch of a q or k norm is its attention.
    """

    kind: Kind
    site: str
    z: Tensor
    ids: Tensor
    nll: Tensor


def changes(
    lm: StreamedLM,
    place: Place,
    by: Sequence[str],
    together: int,
    check: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Change of the mean loss of each text, B floats in nats per predicted token, for each replacement.

    Beside the sites ``by`` stand ``nulls.ZERO``, where the branch adds nothing, and ``nulls.SELF``, where the
    site replaces itself and goes on without others beside it, so that the change is 0 to the last bit.
    ``check`` is called before each stack of ``together`` replacements.

    Raises:
        ConfigError: a site that does not fit in the place.
        DataError: an update or a loss that is not finite.
    """
    check()
    entering = place.z + _update(lm, place, place.site)
    found = {nulls.SELF: _changes(lm, place, entering)[0]}
    count = len(place.z)
    for names in _parts([nulls.ZERO, *by], together):
        check()
        stacked = place.z.repeat(len(names), 1, 1)
        for number, name in enumerate(names):
            if name != nulls.ZERO:
                stacked[number * count : (number + 1) * count] += _update(lm, place, name)
        found |= dict(zip(names, _changes(lm, place, stacked), strict=True))
    for name, values in found.items():
        if not all(map(math.isfinite, values)):
            what = {nulls.ZERO: "nothing", nulls.SELF: "itself"}.get(name, name)
            raise DataError(
                f"{place.site} replaced by {what} gives a loss that is no finite number: check the weights"
            )
    return found


def site_rows(sweep: Swap, matrix: Matrix, split: Split) -> list[dict[str, Any]]:
    """The rows of one matrix and split: sites in order of depth, of each site its groups of texts."""
    groups = sweep.plan.groups(split)
    rows = (sweep.find(_key(site, group)) for site in matrix.sites for group in groups)
    return [row for row in rows if row is not None]


def sweep_part(
    matrices: Sequence[Matrix], stacks: Stacks, every: int, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """What the mode ``sweep`` seals beside what every swap does (``swap_plan.base_content``)."""
    return {
        "mode": "sweep",
        "kinds": [{"kind": matrix.kind, "sites": list(matrix.sites)} for matrix in matrices],
        "every": every,
        "stack": stacks.replacements,
        "nulls": list(NULLS),
        "notes": list(notes),
    }


def _update(lm: StreamedLM, place: Place, name: str) -> Tensor:
    """What the branch adds (B, T, C) with the tensors of ``name`` in the place."""
    return update_of(lm, Comparison(place.kind, place.site, name), name, place.z)


def _changes(lm: StreamedLM, place: Place, z: Tensor) -> list[list[float]]:
    """``z`` (M·B, T, C) that leaves the place to the changes of the B texts, for each of M replacements."""
    after = Comparison(place.kind, place.site, place.site).residual
    copies = len(z) // len(place.ids)
    nll = lm.nll_at(lm.onward(z, after), place.ids.repeat(copies, 1)).view(copies, *place.nll.shape)
    return (nll.double() - place.nll.double()).mean(dim=2).tolist()


def _alike(lm: StreamedLM, sites: Sequence[str]) -> list[list[str]]:
    """The sites in parts whose members fit in each other's place."""
    parts: list[list[str]] = []
    for site in sites:
        for part in parts:
            try:
                with lm.remapped({part[0]: site}):
                    part.append(site)
                break
            except ConfigError:
                continue
        else:
            parts.append([site])
    return parts


def _parts(items: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """The items in as few parts as possible of at most ``most``, of nearly equal size."""
    size = math.ceil(len(items) / math.ceil(len(items) / most))
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _key(site: str, group: Group) -> str:
    return f"{site}/{group.name}"
