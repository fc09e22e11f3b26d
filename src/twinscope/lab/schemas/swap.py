"""The record of the verb ``swap``: losses in nats per token, divergences in bits, shares, memory in MiB.

Covers both of its modes: ``pair`` replaces the two sites of one pair by each other, ``sweep`` every site by
every other of its kind. A *direction* is written ``"<replaced> <- <by>"``, for example
``"layers.3.mlp <- layers.4.mlp"``. A *change* is the loss with the replacement less the loss without.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinscope.lab.evidence import Level, Weights
from twinscope.lab.schemas.parts import Measured, Strict, Text
from twinscope.lab.schemas.scan import ScanMemory, ScanParity

SiteKind = Literal["attention", "linear_attention", "mlp", "q_norm", "k_norm"]
Split = Literal["calibration", "heldout"]
#: As ``lab.statistics.Verdict``, which stands in a module that takes scipy to import.
Verdict = Literal["different", "underpowered", "equivalent", "inconclusive"]


class Divergence(Strict):
    """How far next-token distributions lie from those of the model as it is, mean over predicted tokens."""

    logit_js: Measured
    logit_topk_1: Measured
    logit_topk_5: Measured
    logit_topk_10: Measured


class Effect(Divergence):
    """The loss with something in the place of a site, and its change."""

    nll: float
    delta_nll: float


class NullEffect(Effect):
    """The effect of a null in the place of the site: ``zero | mean | self | other.<site>``."""

    null: Text


class SwapRow(Effect):
    """One direction on one text: the model as it is (``nll_before``), replaced (``nll``), every null.

    ``tokens`` are those predicted, ``bytes`` the UTF-8 bytes of their text. Divergences and nulls are
    measured on held-out text alone; calibration gives the spread of the change, and the mean update.
    """

    mode: Literal["pair"]
    key: Text
    direction: Text
    replaced: Text
    by: Text
    kind: SiteKind
    exploratory: bool
    split: Split
    text: Text
    tokens: int
    bytes: int | None
    nll_before: float
    nulls: list[NullEffect]
    timing: dict[str, Measured] = Field(default_factory=dict)


class SweepRow(Strict):
    """One site replaced by every other of its kind on every text of one split.

    ``delta_nll[j][t]`` is the change with ``by[j]`` in its place on ``texts[t]``; ``nll_before``, ``zero``
    (the change with no update at all) and ``itself`` (the site replaced by itself, exactly 0) run over texts.
    """

    mode: Literal["sweep"]
    key: Text
    kind: SiteKind
    split: Split
    replaced: Text
    by: list[Text]
    texts: list[Text]
    nll_before: list[float]
    delta_nll: list[list[float]]
    zero: list[float]
    itself: list[float]
    timing: dict[str, Measured] = Field(default_factory=dict)


class NullSummary(Divergence):
    """A null over the held-out texts: mean change with its 95 % interval."""

    null: Text
    delta_nll: float
    low: float
    high: float


class WorstChange(Strict):
    """The held-out text on which the loss rises most."""

    text: Text
    delta_nll: float


class Saved(Strict):
    """What one of two modules would save if the other did its work: stated, never a condition.

    ``parameters`` and ``bytes`` are those of the replaced site's own tensors that the replacement leaves
    unused, at the type in which the files hold them.
    """

    parameters: int
    bytes: int


class SwapDirection(Divergence):
    """One direction over all held-out texts, and what calibration said of it before they were opened.

    ``delta_nll`` is the mean change with its 95 % interval ``low … high`` and 90 % interval ``low_90 …
    high_90``. ``needed`` texts find a true change of 0 equivalent with the recorded power, computed from
    ``calibration_sd``. ``verdict`` is null where the instrument is at fault. Perplexity is the exponential of
    the mean loss over all predicted tokens.
    """

    direction: Text
    replaced: Text
    by: Text
    delta_nll: float
    low: float
    high: float
    low_90: float
    high_90: float
    method: Text
    verdict: Verdict | None
    reason: Text
    level: Level
    texts: int
    needed: int
    calibration_delta_nll: float
    calibration_sd: float
    logit_js_worst: Measured
    worst: WorstChange
    nll_before: float
    nll_after: float
    perplexity_before: Measured
    perplexity_after: Measured
    bits_per_byte_before: Measured
    bits_per_byte_after: Measured
    saved: Saved
    nulls: list[NullSummary]


class SwapPair(Strict):
    """The pair whose sites replace each other: why this one, what the scan's rows say of it, its level.

    ``candidate`` and ``strain`` are judged again from the scan's rows; ``passed`` says that both directions
    are equivalent.
    """

    id: Text
    kind: SiteKind
    left: Text
    right: Text
    exploratory: bool
    chosen: Text
    candidate: bool
    strain: Measured
    scan_reason: Text
    passed: bool
    level: Level


class SwapScan(Strict):
    """The scan that this run rests on: its plan's seal, its folder's name, the candidates its rows give."""

    sealed: Text
    run: Text
    candidates: list[Text]


class SweptSite(Strict):
    """The change with no update at all in the place of one site, with its 95 % interval."""

    site: Text
    delta_nll: float
    low: float
    high: float


class SweepKind(Strict):
    """The matrix of sites of one kind that fit in each other's place: row i replaced by column j, held out.

    All matrices are n × n over ``sites``; on the diagonal a site is replaced by itself, with a change of 0
    and the verdict ``equivalent``. ``low … high`` are 95 % intervals of single entries; ``low_all …
    high_all`` hold for the n (n − 1) changes of every matrix of the run at once, ``p_holm`` are Holm's
    adjusted p-values of equivalence within the margin over all of them, and ``verdict`` rests on these two.
    ``verdict_alone`` is the verdict of an entry that had been looked at alone. ``needed`` texts find a true
    change of 0 equivalent in spite of the correction, from calibration's spread, rounded up to a ladder of
    numbers. Verdicts are null in the row of a site whose replacement by itself changes anything.
    """

    kind: SiteKind
    sites: list[Text]
    pairs: int
    delta_nll: list[list[float]]
    low: list[list[float]]
    high: list[list[float]]
    low_all: list[list[float]]
    high_all: list[list[float]]
    p_holm: list[list[float]]
    verdict: list[list[Verdict | None]]
    verdict_alone: list[list[Verdict | None]]
    needed: list[list[int]]
    calibration_delta_nll: list[list[float]]
    zero: list[SweptSite]


class SwapSummary(Strict):
    """Summary of the verb ``swap``.

    ``mode`` says which half is filled: ``pair`` and ``directions``, or ``kinds`` (then ``pair`` is null and
    ``directions`` is empty). ``sealed`` is the hash of what this run fixed before any activation, ``scan``
    the scan it rests on, ``level`` the level of the whole. ``bytes_counted`` and ``bos`` say how bytes are
    counted and what stands before a text; ``heldout_opened_at`` is UTC.
    """

    mode: Literal["pair", "sweep"]
    sealed: Text
    sealed_at: Text
    scan: SwapScan
    model: Text
    weights: Weights
    planted: bool
    parity: ScanParity
    margin: float
    power: float
    level: Level
    pair: SwapPair | None
    directions: list[SwapDirection]
    kinds: list[SweepKind]
    texts: dict[Split, int]
    texts_from: Text
    tokens: int
    bos: Text
    bytes_counted: Text
    heldout_opened_at: Text
    notes: list[Text]
    peak_rss_mib: float
    planned_peak_mib: float
    memory: ScanMemory


#: One row of a ``swap`` record.
SwapRecordRow = Annotated[SwapRow | SweepRow, Field(discriminator="mode")]
