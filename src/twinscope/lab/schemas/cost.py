"""The record of the verb ``cost``: times in seconds, memory in MiB, ratios of one arm to another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twinscope.lab.schemas.frontier import FrontierCost, FrontierCount, FrontierPoint, FrontierSummary
from twinscope.lab.schemas.parts import Fidelity, Measured, Strict, Text


class RatioOfTimes(Strict):
    """Median over pairs of windows with its 95 % interval; ``n`` pairs."""

    median: float
    low: float
    high: float
    n: int


class FlopsRatio(Strict):
    """Two counts of one ratio; ``agree``: they do, stage by stage, within one per cent.

    ``causal_ratio`` takes masked pairs of attention as free, ``shorthand_ratio`` is (1 + 2K + 2) / 3, and
    ``explanation`` leads from there to ``analytic_ratio``.
    """

    analytic_ratio: float
    causal_ratio: float
    shorthand_ratio: float
    counted_ratio: Measured
    agree: bool | None
    differences: list[Text]
    explanation: list[Text]


class CostFidelity(Fidelity):
    """Fidelity with the worst block cosine of the same estimator at K = 0, which is backpropagation."""

    control_cosine: Measured


class GapStep(Strict):
    """One step from the ratio of FLOPs to that of times: why, by how much, and the ratio after it."""

    reason: Text
    change: float
    ratio: float


class Comparison(Strict):
    """One arm against the denominator at one shape."""

    shape: Text
    arm: Text
    against: Text
    wall_clock_ratio: RatioOfTimes
    train_step_ratio: RatioOfTimes
    windows_agree: bool
    flops: FlopsRatio
    peak_memory_ratio: Measured
    activation_peak_ratio: Measured
    fidelity: CostFidelity
    gap: list[GapStep]
    verdict: Text


class Agreement(Strict):
    """Windows of one arm: ``spread`` is the slowest over the fastest, less 1."""

    shape: Text
    arm: Text
    step_seconds: float
    steps_per_second: float
    windows: int
    spread: float
    agree: bool


class Part(Strict):
    """One marked part of a step; ``flops`` are the ledger's, 0 where it enters none."""

    shape: Text
    arm: Text
    part: Text
    seconds: float
    share: float
    flops: int
    gflops_per_second: float


class LedgerLine(Strict):
    """One term of one stage; ``causal_flops`` takes masked pairs of attention as free."""

    shape: Text
    arm: Text
    stage: Text
    term: Text
    flops: int
    causal_flops: int
    formula: Text


class Memory(Strict):
    """Peaks of tensor memory in one step; ``resident_mib`` is the whole process's, code included."""

    shape: Text
    arm: Text
    total_mib: float
    activations_mib: float
    parameters_mib: float
    gradients_mib: float
    optimizer_mib: float
    resident_mib: float


class Overhead(Strict):
    """The trainer's loop over the bare gradient and optimizer, less 1, with its 95 % interval."""

    shape: Text
    arm: Text
    overhead: float
    low: float
    high: float
    n: int
    bare_step_seconds: float
    journal_seconds_per_step: float


class DisturbanceEntry(Strict):
    """A bound that one window exceeded."""

    shape: Text
    arm: Text
    sweep: int
    reason: Text


class CostBounds(Strict):
    """What other work may use in a controlled measurement, in CPUs and in load average."""

    other_cpus: float
    excess_load: float


ClaimVerdict = Literal["consistent", "understated", "overstated", "another quantity", "not comparable"]


class Verdict(Strict):
    """A claim against one measurement."""

    verdict: ClaimVerdict
    reason: Text
    measurement: Text | None
    measured: Measured
    measured_low: Measured
    measured_high: Measured


class JudgedClaim(Verdict):
    """A claim with its verdict; ``others`` are those against further measurements that it also fits."""

    name: Text
    quantity: Text
    low: float
    high: float
    source: Text
    conditions: dict[str, Any]
    others: list[Verdict]


class PublishedRecord(Strict):
    """A measurement that was published elsewhere, by quantity."""

    name: Text
    source: Text
    values: dict[str, float]


class CostSummary(Strict):
    """Summary of the verb ``cost``.

    The first ratios, ``flops``, ``fidelity`` and ``verdict`` are of ``numerator`` against ``denominator``
    at ``shape``; ``comparisons`` has every arm at every shape. ``windows_agree`` and ``controlled`` are
    about all of them.
    """

    numerator: Text
    denominator: Text
    shape: Text
    wall_clock_ratio: RatioOfTimes
    train_step_ratio: RatioOfTimes
    windows_agree: bool
    band: float
    flops: FlopsRatio
    peak_memory_ratio: Measured
    activation_peak_ratio: Measured
    fidelity: CostFidelity
    controlled: bool
    bounds: CostBounds
    disturbances: list[DisturbanceEntry]
    claims: list[JudgedClaim]
    verdict: Text
    comparisons: list[Comparison]
    agreement: list[Agreement]
    parts: list[Part]
    ledger: list[LedgerLine]
    memory: list[Memory]
    overhead: list[Overhead]
    published: list[PublishedRecord]
    frontier: FrontierSummary | None = None


class CostPoint(Strict):
    """What the rows of ``cost`` share."""

    key: Text
    shape: Text


class WindowRow(CostPoint):
    """One window of one arm; ``step_seconds`` without evaluation, ``wall_seconds`` with it at its cadence.

    ``position`` is the window's place in time at its shape. ``other_cpus`` and ``stolen_cpus`` are mean
    numbers of CPUs, ``paused`` the processes held still.
    """

    kind: Literal["window"]
    arm: Text
    sweep: int
    position: int
    steps: int
    seconds: float
    evaluation_seconds: float
    step_seconds: float
    wall_seconds: float
    other_cpus: Measured
    stolen_cpus: Measured
    load: Measured
    disturbances: list[Text]
    paused: list[int]


class PartsRow(CostPoint):
    """Seconds per step of each marked part, their edges synchronised."""

    kind: Literal["parts"]
    arm: Text
    steps: int
    seconds: dict[str, float]
    step_seconds: float


class OverheadRow(CostPoint):
    """One window of the bare step or of the trainer's loop."""

    kind: Literal["overhead"]
    arm: Text
    sweep: int
    contender: Literal["bare", "trainer"]
    steps: int
    step_seconds: float
    journal_row_seconds: float


class MemoryRow(CostPoint, Memory):
    """Peaks of one arm's step."""

    kind: Literal["memory"]


class CountRow(CostPoint):
    """FLOPs by arm and stage, as the dispatcher counts them."""

    kind: Literal["count"]
    flops: dict[str, dict[str, int]]


class FidelityRow(CostPoint):
    """One EP arm's gradient against backpropagation on one batch; lists run over blocks."""

    kind: Literal["fidelity"]
    arm: Text
    batch: int
    block_cosine: list[float]
    control_cosine: float
    displacement_ratio: list[float]
    residual: float
    beta: float


#: One row of a ``cost`` record.
CostRow = Annotated[
    WindowRow
    | PartsRow
    | OverheadRow
    | MemoryRow
    | CountRow
    | FidelityRow
    | FrontierCount
    | FrontierCost
    | FrontierPoint,
    Field(discriminator="kind"),
]
