"""Cost beside fidelity: many settings of the estimator, each with what it costs and how near it is to BP.

Covers the measurements, each a unit of work with a row of its own: the FLOPs of all settings, the wall clock
of each against backpropagation, and cosines to backpropagation at one displacement. What the rows add up to
is in frontier_summary.py, the sweep in frontier_config.py.

Settings that differ in the sign or gain of the nudge alone cost the same and are timed once. Cosines are
those of fp32 gradients on the same batches and weights, whatever precision the cost is measured in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor

from twinscope.lab.statistics import mean_interval
from twinscope.models.gpt import GPT, build_gpt
from twinscope.propagation.config import ArmSettings
from twinscope.propagation.cost.bench import Bench, Row
from twinscope.propagation.cost.counting import Counting, count_apart
from twinscope.propagation.cost.disturbance import watch
from twinscope.propagation.cost.flops import compare, ledger
from twinscope.propagation.cost.frontier_config import FrontierSettings, Variant
from twinscope.propagation.cost.pausing import paused
from twinscope.propagation.cost.timing import ratio_of_pairs, spread, sweep_order, synchronizer, time_window
from twinscope.propagation.estimators import Diagnostics, Gradient, bp_gradient, ep_gradient
from twinscope.propagation.gates import Cosines, cosines
from twinscope.propagation.settings import EPSettings

#: When a cosine counts as fidelity of equilibrium propagation (METHOD 1.2).
LEAST_DISPLACEMENT, LARGEST_RESIDUAL = 1e-3, 0.1
#: The displacement aimed at over the one that a point is named after, and how near to the aim it must come on
#: every batch: together they keep it from falling below the name.
AIM, NEAR = 1.01, 0.005
_CORRECTIONS, _LARGEST_ASKED = 3, 0.99
#: Fields that a point takes over from the row of its cost.
COST_FIELDS = (
    "analytic_ratio", "counted_ratio", "measured_ratio", "measured_low", "measured_high", "windows_agree",
    "controlled",
)  # fmt: skip

Unit = tuple[str, Callable[[], Row]]
Found = TypeVar("Found")


def frontier_units(
    bench: Bench, settings: FrontierSettings, band: float, count: bool, rows: Callable[[], Sequence[Row]]
) -> list[Unit]:
    """The units of work in order: the counts, the cost of each distinct variant, then every point.

    ``bench`` is at the shape and start of the run; ``band`` is that in which windows agree; ``rows`` gives
    the rows of the units that are done, where a point finds what it costs.
    """
    variants = settings.variants(bench.training.ep)
    costs = list({variant.cost.label: variant.cost for variant in variants}.values())
    units: list[Unit] = []
    if count:
        units.append((_COUNT_KEY, lambda: _count(bench, costs)))
    units += [_cost_unit(bench, variant, settings, band, rows) for variant in costs]
    for start in settings.starts:
        ground = Ground(bench, start, settings.batches)
        points = [
            (variant, target)
            for target in settings.displacements
            for variant in variants
            if not variant.control or target == settings.displacements[0]
        ]
        units += [_point_unit(ground, variant, target, rows) for variant, target in points]
    return units


@dataclass
class Ground:
    """A set of weights with its batches and backpropagation's gradients on them, made at first use.

    Holds one gradient for each batch: ``batches`` copies of the parameters.
    """

    bench: Bench
    start: str
    batches: int
    _model: list[GPT] = field(default_factory=list)
    _references: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def model(self) -> GPT:
        """The weights in fp32, on the device."""
        if not self._model:
            device, initial = self.bench.device, self.bench.initial
            if self.start == "fresh":
                self._model.append(build_gpt(initial.config, self.bench.seed, torch.float32, device))
            else:
                self._model.append(initial.build(self.bench.seed, torch.float32, device))
        return self._model[0]

    def estimate(self, settings: EPSettings, index: int) -> Gradient:
        """The EP gradient on batch ``index``, with its diagnostics."""
        tokens, targets = self.bench.batch(index)
        return ep_gradient(self.model, tokens, targets, settings, self.bench.seed, index)

    def against_bp(self, found: Gradient, index: int) -> Cosines:
        """Cosines of a gradient on batch ``index`` to backpropagation's."""
        while len(self._references) <= index:
            tokens, targets = self.bench.batch(len(self._references))
            self._references.append(bp_gradient(self.model, tokens, targets).grads)
        return cosines(self.model, found.grads, self._references[index])


def calibrated(
    estimate: Callable[[float], Found], size: Callable[[Found], float], aim: float, asked: float
) -> tuple[Found, float]:
    """An estimate whose ``size``, its displacement, is within :data:`NEAR` of ``aim``, and what was asked.

    The first force sweep sets the displacement of one undamped round; damping, further rounds and curvature
    move it by a factor that hardly depends on it, so a few proportional corrections of ``asked`` are enough.
    """
    for _ in range(_CORRECTIONS):
        found = estimate(asked)
        got = size(found)
        if not got > 0 or not math.isfinite(got) or abs(got / aim - 1) < NEAR:
            return found, asked
        asked = min(asked * aim / got, _LARGEST_ASKED)
    return estimate(asked), asked


def measure_point(ground: Ground, variant: Variant, target: float) -> Row:
    """Fidelity of one variant at the displacement ``target`` on each batch of ``ground``.

    ``displacement`` is the mean over batches of the largest block's ratio at the states that are read,
    ``residual`` the largest. ``median`` and ``worst`` are over blocks within a batch, then averaged.
    """
    found: list[Cosines] = []
    seen: list[Diagnostics] = []
    asked = target * AIM
    for index in range(ground.batches):

        def estimate(ask: float, index: int = index) -> Gradient:
            return ground.estimate(variant.at(ask), index)

        if variant.control:
            gradient = estimate(asked)
        else:
            # What the batch before was asked for is nearly right for the next one.
            gradient, asked = calibrated(estimate, _largest, target * AIM, asked)
        found.append(ground.against_bp(gradient, index))
        seen.append(gradient.diagnostics)
    row: Row = {
        "batches": ground.batches,
        "block_cosine": [_finite(fmean(values)) for values in zip(*(c.blocks for c in found), strict=True)],
    }
    if None in row["block_cosine"]:
        row["block_cosine_reason"] = "a gradient of this block is not finite"
    row |= _over_batches("median", [median(c.blocks) for c in found])
    row |= _over_batches("worst", [min(c.blocks) for c in found])
    outer = [c.outer for c in found if c.outer is not None]
    row |= _given("outer_cosine", fmean(outer) if len(outer) == len(found) else None, "no such parameter")
    return row | (_free() if variant.control else _displaced(seen, row["median_cosine"]))


def validity(displacement: float | None, residual: float | None, cosine: float | None) -> list[str]:
    """Why a cosine does not count as fidelity of equilibrium propagation (METHOD 1.2); empty if it does.

    ``displacement`` is the smallest over batches of the largest block's, ``residual`` the largest.
    """
    reasons = []
    if displacement is None or residual is None or cosine is None:
        reasons.append("a gradient or a state is not finite")
        return reasons
    if displacement < LEAST_DISPLACEMENT:
        reasons.append(f"the displacement {displacement:.2e} is below {LEAST_DISPLACEMENT:g}")
    if residual > LARGEST_RESIDUAL:
        reasons.append(f"the residual {residual:.3f} is above {LARGEST_RESIDUAL:g}")
    return reasons


_COUNT_KEY = "frontier count"


def _count(bench: Bench, variants: Sequence[Variant]) -> Row:
    training = bench.training
    arms = {variant.label: variant.at(LEAST_DISPLACEMENT) for variant in variants}
    found = count_apart(
        Counting(
            shape=bench.initial.config,
            batch=training.data.batch,
            arms={"bp": None, **arms},
            optimizer=training.optimizer,
            precision=training.train.precision,
            device=training.train.device,
            threads=training.train.threads or torch.get_num_threads(),
        )
    )
    return {
        "kind": "frontier_count",
        "shape": bench.name,
        "flops": {name: counted.total for name, counted in found.items()},
    }


def _cost_unit(
    bench: Bench,
    variant: Variant,
    settings: FrontierSettings,
    band: float,
    rows: Callable[[], Sequence[Row]],
) -> Unit:
    def work() -> Row:
        shape, training = bench.initial.config, bench.training
        ours = ledger(shape, training.data.batch, variant.at(LEAST_DISPLACEMENT), training.optimizer)
        theirs = ledger(shape, training.data.batch, None, training.optimizer)
        comparison = compare(ours, theirs)
        counts = next((row["flops"] for row in rows() if row["key"] == _COUNT_KEY), None)
        counted = None if counts is None else counts[variant.label] / counts["bp"]
        return {
            "kind": "frontier_cost",
            "shape": bench.name,
            "label": variant.label,
            **_settings_fields(variant),
            "analytic_ratio": comparison.ratio,
            "causal_ratio": comparison.causal_ratio,
            "shorthand_ratio": comparison.shorthand_ratio,
            **_given("counted_ratio", counted, "cost.count = false leaves the count out"),
            **(_timed(bench, variant, settings, band) if settings.measure else _untimed()),
        }

    return _cost_key(variant), work


def _timed(bench: Bench, variant: Variant, settings: FrontierSettings, band: float) -> Row:
    """Wall clock per training step over backpropagation's, from alternating windows in this process."""
    arm = ArmSettings.model_validate(
        {"name": "ep", "rule": "ep", **variant.overrides, "displacement": LEAST_DISPLACEMENT}
    )
    arms = [arm, ArmSettings(name="bp", rule="bp")]
    # The configuration's own check refuses to train without rounds; here such an arm is timed only.
    training = bench.training.model_copy(update={"arms": arms})
    pair = Bench(variant.label, training, bench.data, bench.initial, bench.pause, bench.bounds)
    seconds: dict[str, list[float]] = {"ep": [], "bp": []}
    threads = training.train.threads or torch.get_num_threads()
    synchronize = synchronizer(bench.device)
    with paused(bench.pause):
        end = watch(bench.bounds, threads, training.train.device)
        for _, name in sweep_order(["ep", "bp"], settings.windows):
            contender = replace(pair.contender(name), evaluate=lambda: None)
            span = time_window(
                contender, warmup=settings.warmup, steps=settings.steps, synchronize=synchronize
            )
            seconds[name].append(span.step_seconds)
        seen = end()
    pair.require_finite()
    ratio = ratio_of_pairs(seconds["ep"], seconds["bp"])
    return {
        "measured_ratio": ratio.median,
        "measured_low": ratio.low,
        "measured_high": ratio.high,
        "step_seconds": seconds,
        "windows_agree": all(spread(times) <= band for times in seconds.values()),
        "controlled": not seen.reasons,
        "disturbances": seen.reasons,
    }


def _untimed() -> Row:
    fields = (
        "measured_ratio",
        "measured_low",
        "measured_high",
        "step_seconds",
        "windows_agree",
        "controlled",
    )
    row: Row = {"disturbances": []}
    for name in fields:
        row |= _given(name, None, "frontier.measure = false leaves the clock out")
    return row


def _point_unit(ground: Ground, variant: Variant, target: float, rows: Callable[[], Sequence[Row]]) -> Unit:
    def work() -> Row:
        key = _cost_key(variant.cost)
        cost = next(row for row in rows() if row["key"] == key)
        taken = {
            name: cost[name]
            for field_name in COST_FIELDS
            for name in (field_name, f"{field_name}_reason")
            if name in cost
        }
        asked: Row = _given(
            "target", None if variant.control else target, "free states: nothing is displaced"
        )
        return {
            "kind": "frontier",
            "shape": ground.bench.name,
            "start": ground.start,
            "label": variant.label,
            **_settings_fields(variant),
            **asked,
            **measure_point(ground, variant, target),
            **taken,
        }

    at = "" if variant.control else f" displacement={target:g}"
    return f"frontier start={ground.start}{at} {variant.label}", work


def _cost_key(variant: Variant) -> str:
    return f"frontier cost {variant.label}"


def _settings_fields(variant: Variant) -> Row:
    names = ("rounds", "fused", "nudge", "read", "damping", "top_refresh")
    return {name: variant.overrides[name] for name in names}


def _free() -> Row:
    """The fields of a control: nothing is displaced, and no cosine of it is one of EP."""
    row: Row = {}
    for name in ("displacement", "displacement_low", "residual", "beta"):
        row |= _given(name, None, "free states: nothing is displaced")
    return row | {"valid": False, "invalid": ["K = 0 is backpropagation: the control"]}


def _displaced(seen: Sequence[Diagnostics], cosine: float | None) -> Row:
    largest = [max(diagnostics.displacement_ratio) for diagnostics in seen]
    values = {
        "displacement": _over(fmean, largest),
        "displacement_low": _over(min, largest),
        "residual": _over(max, [diagnostics.residual for diagnostics in seen]),
        "beta": _over(fmean, [diagnostics.beta for diagnostics in seen]),
    }
    row: Row = {}
    for name, value in values.items():
        row |= _given(name, value, "a state is not finite")
    reasons = validity(values["displacement_low"], values["residual"], cosine)
    return row | {"valid": not reasons, "invalid": reasons}


def _largest(gradient: Gradient) -> float:
    return max(gradient.diagnostics.displacement_ratio)


def _over_batches(name: str, values: Sequence[float]) -> Row:
    """Mean over batches with Student's interval, as ``<name>_cosine``, ``_low`` and ``_high``."""
    keys = (f"{name}_cosine", f"{name}_low", f"{name}_high")
    if not all(math.isfinite(value) for value in values):
        nulls = [_given(key, None, "a gradient is not finite") for key in keys]
        return {key: value for part in nulls for key, value in part.items()}
    found = mean_interval(values)
    return dict(zip(keys, (found.estimate, found.low, found.high), strict=True))


def _over(summary: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return summary(known) if len(known) == len(values) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _given(name: str, value: Any, reason: str) -> Row:
    return {name: None, f"{name}_reason": reason} if value is None else {name: value}
