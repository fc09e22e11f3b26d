"""From the rows of a cost run to its summary: ratios, agreement, the two counts, memory, fidelity, claims.

A pure function of configuration, shapes and rows; nothing is measured and no model is touched. The summary's
own ratios are those of numerator and denominator at the first shape; ``comparisons`` has every arm at every
shape against the denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from twinscope.lab.evidence import claim
from twinscope.models.gpt import GPTConfig
from twinscope.propagation.config import ArmSettings, TrainConfig
from twinscope.propagation.cost.bench import BARE, TRAINER
from twinscope.propagation.cost.claims import Measurement, Number, Published, Value, judged
from twinscope.propagation.cost.config import CostConfig
from twinscope.propagation.cost.flops import Ledger, compare, disagreements, ledger
from twinscope.propagation.cost.frontier_summary import frontier_claims, frontier_summary
from twinscope.propagation.cost.gap import Move, Side, chain, sentence
from twinscope.propagation.cost.timing import Ratio, ratio_of_pairs, spread

Row = dict[str, Any]
_FIDELITY = ("median_cosine", "worst_cosine", "displacement", "residual")


@dataclass(frozen=True)
class Measured:
    """One shape with what was measured of it."""

    name: str
    shape: GPTConfig
    training: TrainConfig
    rows: Sequence[Row]

    def windows(self, arm: str) -> list[Row]:
        found = [row for row in self.rows if row["kind"] == "window" and row["arm"] == arm]
        return sorted(found, key=lambda row: row["sweep"])

    def of(self, kind: str, arm: str | None = None) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind and arm in (None, row.get("arm"))]

    def ledger(self, arm: ArmSettings) -> Ledger:
        settings = self.training.ep_settings(arm) if arm.rule == "ep" else None
        return ledger(
            self.shape,
            self.training.data.batch,
            settings,
            self.training.optimizer,
            recompute=arm.checkpointed,
        )

    def counted(self, arm: str) -> dict[str, int] | None:
        rows = self.of("count")
        return rows[0]["flops"][arm] if rows else None


def summarize(
    config: CostConfig, shapes: Mapping[str, GPTConfig], rows: Sequence[Row], machine: Mapping[str, Value]
) -> dict[str, Any]:
    """The summary of a complete run (``CostSummary`` in lab/schemas/cost.py).

    ``machine`` says on what the times were taken: ``device``, ``device_name``.
    """
    measured = [
        Measured(
            shape.name,
            shapes[shape.name],
            config.training(shape),
            [row for row in rows if row["shape"] == shape.name],
        )
        for shape in config.measured_shapes()
    ]
    against = config.arm(config.cost.denominator)
    comparisons = [
        _comparison(config, part, arm, against)
        for part in measured
        for arm in config.arms
        if arm.name != against.name
    ]
    agreement = [_agreement(config, part, arm.name) for part in measured for arm in config.arms]
    disturbances = [
        {"shape": row["shape"], "arm": row["arm"], "sweep": row["sweep"], "reason": reason}
        for part in measured
        for row in part.of("window")
        for reason in row["disturbances"]
    ]
    main = next(
        entry
        for entry in comparisons
        if entry["shape"] == measured[0].name and entry["arm"] == config.cost.numerator
    )
    controlled, agree = not disturbances, all(entry["agree"] for entry in agreement)
    measurements = [
        *_measurements(config, measured, machine, _caveat(controlled, agree)),
        *(item.measurement() for item in config.published if isinstance(item, Published)),
    ]
    return {
        "numerator": config.cost.numerator,
        "denominator": config.cost.denominator,
        "shape": measured[0].name,
        **{key: main[key] for key in ("wall_clock_ratio", "train_step_ratio")},
        "windows_agree": agree,
        "band": config.cost.band,
        "flops": main["flops"],
        **_copied(main, "peak_memory_ratio", "activation_peak_ratio"),
        "fidelity": main["fidelity"],
        "controlled": controlled,
        "bounds": {"other_cpus": config.cost.other_cpus, "excess_load": config.cost.excess_load},
        "disturbances": disturbances,
        "claims": [judged(item, measurements) for item in config.claims],
        "verdict": main["verdict"],
        "comparisons": comparisons,
        "agreement": agreement,
        "parts": [entry for part in measured for arm in config.arms for entry in _parts(part, arm)],
        "ledger": [
            {"shape": part.name, "arm": arm.name, **line}
            for part in measured
            for arm in config.arms
            for line in part.ledger(arm).rows()
        ],
        "memory": [
            {key: value for key, value in row.items() if key not in ("key", "kind")}
            for part in measured
            for row in part.of("memory")
        ],
        "overhead": [entry for part in measured for entry in _overhead(config, part)],
        "published": [
            {"name": item.name, "source": item.source, "values": {v.quantity: v.value for v in item.values}}
            for item in config.published
            if isinstance(item, Published)
        ],
        **({} if config.frontier is None else {"frontier": frontier_summary(config.frontier, rows)}),
    }


def statements(config: CostConfig, summary: dict[str, Any]) -> list[dict[str, str]]:
    """What the run shows and leaves open: the first comparison, and each claim's verdict."""
    where = "" if summary["controlled"] else "; the machine was not quiet while it was measured"
    steady = "" if summary["windows_agree"] else f"; windows differ by more than {config.cost.band:.0%}"
    found = [
        claim(
            f"at shape '{summary['shape']}', {summary['verdict']}{where}{steady}",
            "measured",
            "that on this machine, at this shape, batch and precision, steps take times of this ratio",
            "other devices, shapes, batches or precisions; nor how many steps either rule needs",
        )
    ]
    found += [
        claim(
            f"the claim '{item['name']}' is {_worded(item['verdict'])}: {item['reason']}",
            "measured",
            "that the claim and this measurement, made under the claim's conditions, so compare"
            if item["measurement"] is not None
            else "that nothing measured here speaks to the claim",
            "the claim under other conditions than it names",
        )
        for item in summary["claims"]
    ]
    return found + (frontier_claims(summary["frontier"]) if "frontier" in summary else [])


def _worded(verdict: str) -> str:
    return {"another quantity": "about another quantity", "not comparable": "not comparable here"}.get(
        verdict, verdict
    )


def _comparison(config: CostConfig, part: Measured, arm: ArmSettings, against: ArmSettings) -> dict[str, Any]:
    above, below = part.windows(arm.name), part.windows(against.name)
    wall = _ratio(above, below, "wall_seconds")
    step = _ratio(above, below, "step_seconds")
    flops = _flops(part, arm, against)
    moves = _moves(part, arm, against, step.median)
    bounds = f" [{step.low:.3g}, {step.high:.3g}]"
    ratio = flops["analytic_ratio"]
    return {
        "shape": part.name,
        "arm": arm.name,
        "against": against.name,
        "wall_clock_ratio": _fields(wall),
        "train_step_ratio": _fields(step),
        "windows_agree": all(_agreement(config, part, name)["agree"] for name in (arm.name, against.name)),
        "flops": flops,
        **_memory_ratio(part, arm.name, against.name, "total_mib", "peak_memory_ratio"),
        **_memory_ratio(part, arm.name, against.name, "activations_mib", "activation_peak_ratio"),
        "fidelity": _fidelity(part, arm),
        "gap": [{"reason": move.reason, "change": move.change, "ratio": move.ratio} for move in moves],
        "verdict": sentence(arm.name, against.name, step.median, ratio, moves, bounds),
    }


def _ratio(above: Sequence[Row], below: Sequence[Row], name: str) -> Ratio:
    return ratio_of_pairs([row[name] for row in above], [row[name] for row in below])


def _fields(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high, "n": ratio.n}


def _flops(part: Measured, arm: ArmSettings, against: ArmSettings) -> dict[str, Any]:
    ledgers = part.ledger(arm), part.ledger(against)
    comparison = compare(*ledgers)
    counts = part.counted(arm.name), part.counted(against.name)
    found: dict[str, Any] = {
        "analytic_ratio": comparison.ratio,
        "causal_ratio": comparison.causal_ratio,
        "shorthand_ratio": comparison.shorthand_ratio,
        "explanation": comparison.explanation(),
    }
    numerator, denominator = counts
    if numerator is None or denominator is None:
        reason = "cost.count is false, so nothing was counted"
        return found | {
            "counted_ratio": None, "counted_ratio_reason": reason,
            "agree": None, "agree_reason": reason, "differences": [],
        }  # fmt: skip
    differences = [
        f"{name}: {text}"
        for name, book, counted in zip(
            (arm.name, against.name), ledgers, (numerator, denominator), strict=True
        )
        for text in disagreements(book, counted)
    ]
    return found | {
        "counted_ratio": sum(numerator.values()) / sum(denominator.values()),
        "agree": not differences,
        "differences": differences,
    }


def _moves(part: Measured, arm: ArmSettings, against: ArmSettings, measured: float) -> list[Move]:
    sides = []
    for chosen in (arm, against):
        rows = part.of("parts", chosen.name)
        if not rows:
            return []
        sides.append(Side(chosen.name, part.ledger(chosen).by_stage(), rows[0]["seconds"]))
    return chain(sides[0], sides[1], measured)


def _memory_ratio(part: Measured, arm: str, against: str, column: str, name: str) -> dict[str, Any]:
    above, below = part.of("memory", arm), part.of("memory", against)
    if not above or not below:
        return {name: None, f"{name}_reason": "cost.memory is false, so no memory was observed"}
    return {name: above[0][column] / below[0][column]}


def _fidelity(part: Measured, arm: ArmSettings) -> dict[str, Any]:
    """Median and worst block cosine, smallest displacement (of the largest block), largest residual."""
    rows = part.of("fidelity", arm.name)
    if not rows:
        reason = "cost.fidelity_batches is 0, so no gradient was compared"
        if arm.rule == "bp":
            reason = "this arm backpropagates: it is what EP is compared with"
        nulls = dict.fromkeys(_FIDELITY) | {f"{name}_reason": reason for name in _FIDELITY}
        return nulls | {"control_cosine": None, "control_cosine_reason": reason}
    values = [cosine for row in rows for cosine in row["block_cosine"]]
    return {
        "median_cosine": median(values),
        "worst_cosine": min(values),
        "displacement": min(max(row["displacement_ratio"]) for row in rows),
        "residual": max(row["residual"] for row in rows),
        "control_cosine": min(row["control_cosine"] for row in rows),
    }


def _agreement(config: CostConfig, part: Measured, arm: str) -> dict[str, Any]:
    seconds = [row["step_seconds"] for row in part.windows(arm)]
    found = spread(seconds)
    return {
        "shape": part.name,
        "arm": arm,
        "step_seconds": median(seconds),
        "steps_per_second": 1 / median(seconds),
        "windows": len(seconds),
        "spread": found,
        "agree": found <= config.cost.band,
    }


def _parts(part: Measured, arm: ArmSettings) -> list[dict[str, Any]]:
    rows = part.of("parts", arm.name)
    if not rows:
        return []
    seconds, flops = rows[0]["seconds"], part.ledger(arm).by_stage()
    whole = sum(seconds.values())
    return [
        {
            "shape": part.name,
            "arm": arm.name,
            "part": name,
            "seconds": took,
            "share": took / whole,
            "flops": flops.get(name, 0),
            "gflops_per_second": flops.get(name, 0) / took / 1e9 if took else 0.0,
        }
        for name, took in seconds.items()
    ]


def _overhead(config: CostConfig, part: Measured) -> list[dict[str, Any]]:
    """The trainer's loop over the bare gradient and optimizer, less 1, with its interval."""
    rows = sorted(part.of("overhead"), key=lambda row: row["sweep"])
    if not rows:
        return []
    bare = [row["step_seconds"] for row in rows if row["contender"] == BARE]
    loop = [row for row in rows if row["contender"] == TRAINER]
    journal = median(row["journal_row_seconds"] for row in loop) / config.cost.eval_every
    ratio = ratio_of_pairs([row["step_seconds"] + journal for row in loop], bare)
    return [
        {
            "shape": part.name,
            "arm": rows[0]["arm"],
            "overhead": ratio.median - 1,
            "low": ratio.low - 1,
            "high": ratio.high - 1,
            "n": ratio.n,
            "bare_step_seconds": median(bare),
            "journal_seconds_per_step": journal,
        }
    ]


def _caveat(controlled: bool, agree: bool) -> str | None:
    if not controlled:
        return "the machine was not quiet while it was measured"
    return None if agree else "its windows do not agree"


def _measurements(
    config: CostConfig, measured: Sequence[Measured], machine: Mapping[str, Value], caveat: str | None
) -> list[Measurement]:
    """Every arm against every other at every shape: a claim may be about any two."""
    return [
        _measurement(config, part, arm, against, machine, caveat)
        for part in measured
        for against in sorted(config.arms, key=lambda arm: arm.name != config.cost.denominator)
        for arm in sorted(config.arms, key=lambda arm: arm.name != config.cost.numerator)
        if arm.name != against.name
    ]


def _measurement(
    config: CostConfig,
    part: Measured,
    arm: ArmSettings,
    against: ArmSettings,
    machine: Mapping[str, Value],
    caveat: str | None,
) -> Measurement:
    above, below = part.windows(arm.name), part.windows(against.name)
    numbers = {
        "wall_clock_ratio": _number(_ratio(above, below, "wall_seconds")),
        "train_step_ratio": _number(_ratio(above, below, "step_seconds")),
    }
    flops = _flops(part, arm, against)
    known = [flops[key] for key in ("analytic_ratio", "causal_ratio", "counted_ratio") if flops[key]]
    numbers["flops_ratio"] = Number(flops["analytic_ratio"], min(known), max(known))
    missing = {}
    for name, column in (("peak_memory_ratio", "total_mib"), ("activation_peak_ratio", "activations_mib")):
        found = _memory_ratio(part, arm.name, against.name, column, name)
        if found[name] is None:
            missing[name] = found[f"{name}_reason"]
        else:
            numbers[name] = Number(found[name], found[name], found[name])
    shape = part.shape
    facts: dict[str, Value] = {
        **machine,
        "precision": config.cost.precision,
        "compile": config.cost.compile,
        "model": "gpt",
        "data": config.data.corpus,
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "context": shape.context,
        "batch": part.training.data.batch,
    }
    if arm.rule == "ep":
        settings = part.training.ep_settings(arm)
        facts |= {
            "rounds": settings.rounds,
            "phases": 2 if settings.nudge == "symmetric" else 1,
            "fused": settings.fused,
            "nudge": settings.nudge,
            "read": settings.read,
        }
    return Measurement(
        f"'{arm.name}' against '{against.name}' at shape '{part.name}'",
        frozenset({arm.rule, arm.name}),
        frozenset({against.rule, against.name}),
        facts,
        numbers,
        caveat=caveat,
        missing=missing,
    )


def _number(ratio: Ratio) -> Number:
    return Number(ratio.median, ratio.low, ratio.high)


def _copied(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key.removesuffix("_reason") in names}
