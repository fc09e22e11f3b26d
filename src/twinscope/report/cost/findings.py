"""What a cost run says in sentences: what a step costs and why, and what limits the measurement.

Covers the sentences, and reading arms, shapes and quantities of a record; no drawing, no markup. What a
frontier says is in frontier_findings.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinscope.report.cost import frontier_findings
from twinscope.report.drawing import short_label
from twinscope.report.reading import Row, RunData
from twinscope.report.train.findings import LARGEST_RESIDUAL, LEAST_DISPLACEMENT, arm_label
from twinscope.report.wording import contended, cosine, count, listed, number, signed, small, unfinished

#: An interval wider than this, end over end, less 1, is called wide.
WIDE = 0.2
#: Below this cosine the control K = 0 is no backpropagation.
_LEAST_CONTROL = 0.9999
_MANY = 4

#: Quantity of a claim -> how prose calls it.
QUANTITIES: Mapping[str, str] = {
    "wall_clock_ratio": "time per step, evaluation included",
    "train_step_ratio": "time per training step",
    "flops_ratio": "FLOPs per training step",
    "peak_memory_ratio": "peak memory",
    "activation_peak_ratio": "peak memory of activations",
}


def times(value: float | None) -> str:
    """A ratio with its sign of multiplication: ``1.62×``, ``12.3×``."""
    return "–" if value is None else f"{_three(value)}×"


def bounds(low: float | None, high: float | None) -> str:
    """The ends of an interval of ratios: ``[1.44, 1.83]``; nothing where there is none."""
    return "" if low is None or high is None else f"[{_three(low)}, {_three(high)}]"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with three digits, from a minute on as seconds."""
    if seconds is None:
        return "–"
    return f"{small(1e3 * seconds)} ms" if seconds < 10 else f"{number(seconds, 1)} s"


def flops(value: float) -> str:
    """A number of FLOPs with three digits and its prefix: ``174 MFLOP``."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= power:
            return f"{small(value / power)} {prefix}FLOP"
    return f"{count(round(value))} FLOP"


def mebibytes(value: float) -> str:
    """A memory in MiB with three digits, of large ones all that stand before the point."""
    return f"{count(round(value))} MiB" if value >= 100 else f"{small(value)} MiB"


def per_cent(value: float) -> str:
    """A share as per cent, with a decimal below ten."""
    text = number(100 * value, 1 if abs(value) < 0.1 else 0)
    return f"{text.removesuffix('.0')} %"


def shapes(run: RunData) -> list[str]:
    """The shapes, in the order of the record."""
    return list(dict.fromkeys(row["shape"] for row in run.rows))


def shape_title(run: RunData, shape: str) -> str:
    """A shape by its name and, where the config gives them, its sizes: ``6x512: 6 blocks of 512, T 256``."""
    tables = [part for part in run.settings.get("shapes") or [] if isinstance(part, Mapping)]
    model, data = (run.settings.get(key) or {} for key in ("model", "data"))
    own = next((part for part in tables if part.get("name") == shape), {})
    known = {**data, **model, **own}
    sizes = [known.get(key) for key in ("layers", "width", "context", "batch")]
    if "source" in known or not all(isinstance(size, int) for size in sizes):
        return f"Shape {short_label(shape, 30)}"
    layers, width, context, batch = sizes
    name = f"{short_label(shape, 14)}: " if tables else ""
    return f"{name}{layers} blocks of {width}, T {context}, batch {batch}"


def arms(run: RunData) -> list[str]:
    """The arms that were timed: in the order of the config, which the first window need not have."""
    timed = {row["arm"] for row in run.rows if row["kind"] == "window"}
    tables = run.settings.get("arms")
    planned = [str(part.get("name")) for part in tables or [] if isinstance(part, Mapping)]
    found = [row["arm"] for row in run.rows if row["kind"] == "window"]
    return list(dict.fromkeys([*(arm for arm in planned if arm in timed), *found]))


def windows(run: RunData, shape: str, arm: str | None = None) -> list[Row]:
    """The windows at a shape, of one arm where given, in order of time."""
    found = (
        row
        for row in run.rows
        if row["kind"] == "window" and row["shape"] == shape and arm in (None, row["arm"])
    )
    return sorted(found, key=lambda row: row["position"])


def entries(run: RunData, key: str, shape: str | None = None, arm: str | None = None) -> list[Row]:
    """The parts of the list ``key`` of the summary, of one shape or arm where given."""
    return [
        part
        for part in run.summary.get(key) or []
        if shape in (None, part["shape"]) and arm in (None, part["arm"])
    ]


def main(run: RunData) -> Row | None:
    """The comparison that the summary leads with."""
    summary = run.summary
    found = entries(run, "comparisons", summary.get("shape"), summary.get("numerator"))
    return found[0] if found else None


def versus(entry: Mapping[str, Any]) -> str:
    """``EP against BP``."""
    return f"{arm_label(entry['arm'])} against {arm_label(entry['against'])}"


def outcome(run: RunData) -> str:
    """The ratio of times with its interval beside that of FLOPs; then what a frontier found."""
    entry = main(run)
    if entry is None:
        measured = sum(row["kind"] == "window" for row in run.rows)
        return f"No ratio has been made of {count(measured)} windows." if measured else "Nothing was timed."
    step, ratio = entry["train_step_ratio"], entry["flops"]["analytic_ratio"]
    text = (
        f"A training step of {arm_label(entry['arm'])} takes {_three(step['median'])} times as long as one "
        f"of {arm_label(entry['against'])} (95 % interval {_three(step['low'])} to "
        f"{_three(step['high'])}), for {_three(ratio)} times the FLOPs"
    )
    if len(shapes(run)) > 1:
        text += f", at shape {entry['shape']}"
    return " ".join([f"{text}.", *frontier_findings.outcome(run)])


def label(run: RunData) -> str:
    """That the measurement was not controlled, if it was not."""
    return "Not a controlled measurement" if run.summary.get("controlled") is False else ""


def remarks(run: RunData) -> list[str]:
    """Whether the counts agree, fidelity, memory, and the trainer's own time."""
    entry = main(run)
    if entry is None:
        return []
    found = [*_counts(run)]
    fidelity = entry["fidelity"]
    if fidelity["median_cosine"] is not None:
        found.append(
            f"{arm_label(entry['arm'])}'s gradient against backpropagation: median block cosine "
            f"{cosine(fidelity['median_cosine'])}, worst {cosine(fidelity['worst_cosine'])}, at displacement "
            f"{small(fidelity['displacement'])} and residual {small(fidelity['residual'])}; the control "
            f"K = 0 is {cosine(fidelity['control_cosine'])}."
        )
    if entry["peak_memory_ratio"] is not None:
        found.append(
            f"Peak memory of a step: {times(entry['peak_memory_ratio'])} that of "
            f"{arm_label(entry['against'])}, of activations alone {times(entry['activation_peak_ratio'])}."
        )
    found += [
        f"The trainer's loop adds {per_cent(part['overhead'])} to {arm_label(part['arm'])}'s bare step at "
        f"shape {part['shape']} (95 % interval {per_cent(part['low'])} to {per_cent(part['high'])})."
        for part in entries(run, "overhead")
    ]
    paused = (run.provenance.get("compute") or {}).get("paused")
    if paused:
        found.append(f"Held still during windows: {listed([str(each) for each in paused])}.")
    return found + frontier_findings.remarks(run)


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the run shows, the gravest first."""
    reached = f"after {count(run.journaled or len(run.rows))} units of work"
    found = [
        *unfinished(run, reached),
        *_disturbed(run),
        *_unsteady(run),
        *_wide(run),
        *_resumed(run),
        *_miscounted(run),
        *_unfaithful(run),
        *frontier_findings.warnings(run),
    ]
    if run.summary.get("controlled") is not False:
        found += contended(run, "FLOPs, memory and cosines")
    return found


def facts(run: RunData) -> list[str]:
    """Shapes, arms, windows and precision."""
    timed = [row for row in run.rows if row["kind"] == "window"]
    if not timed:
        return []
    sweeps, steps = 1 + max(row["sweep"] for row in timed), max(row["steps"] for row in timed)
    names = shapes(run)
    found = [
        f"{len(names)} shapes" if len(names) > 1 else f"shape {names[0]}",
        f"{len(arms(run))} arms",
        f"{sweeps} windows of {steps} steps",
    ]
    compute = run.provenance.get("compute") or {}
    if isinstance(compute.get("precision"), str):
        found.append(compute["precision"])
    if (run.settings.get("cost") or {}).get("compile"):
        found.append("compiled")
    return found


def _three(value: float) -> str:
    return number(value, 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0)


def _counts(run: RunData) -> Iterable[str]:
    found = [part["flops"] for part in entries(run, "comparisons") if part["flops"]["agree"] is not None]
    if found and all(part["agree"] for part in found):
        yield "The ledger of FLOPs and the dispatcher's count agree within 1 % in every stage of every arm."


def _disturbed(run: RunData) -> Iterable[str]:
    disturbances = run.summary.get("disturbances") or []
    if not disturbances:
        return
    kinds: dict[str, list[str]] = {}
    for part in disturbances:
        # The same bound with other numbers is the same reason.
        kinds.setdefault(re.sub(r"[\d.]+", "#", part["reason"].partition(":")[0]), []).append(part["reason"])
    ordered = sorted(kinds.values(), key=len, reverse=True)
    reasons = [f"in {count(len(part))}: {part[0].rstrip('.')}" for part in ordered[:_MANY]]
    touched = len({(part["shape"], part["arm"], part["sweep"]) for part in disturbances})
    timed = sum(row["kind"] == "window" for row in run.rows)
    yield (
        f"Not controlled: {count(touched)} of {count(timed)} windows exceed a bound on what else the machine "
        f"does, so no ratio of times here is due to the arms alone ({'; '.join(reasons)})."
    )


def _unsteady(run: RunData) -> Iterable[str]:
    band = run.summary.get("band")
    apart = sorted(
        (part for part in entries(run, "agreement") if not part["agree"]), key=lambda part: -part["spread"]
    )
    if not apart or band is None:
        return
    named = [
        f"those of {arm_label(part['arm'])} at shape {part['shape']} by {per_cent(part['spread'])}"
        for part in apart[:_MANY]
    ]
    if len(apart) > _MANY:
        named.append(f"those of {count(len(apart) - _MANY)} more by less")
    yield (
        f"Windows of {count(len(apart))} of {count(len(entries(run, 'agreement')))} arms do not agree within "
        f"{per_cent(band)}: from the fastest to the slowest they differ, {listed(named)}."
    )


def _wide(run: RunData) -> Iterable[str]:
    found = []
    for part in entries(run, "comparisons"):
        step = part["train_step_ratio"]
        if step["high"] / step["low"] - 1 > WIDE:
            found.append((step["high"] / step["low"], part, step))
    if not found:
        return
    _, part, step = max(found, key=lambda item: item[0])
    yield (
        f"{count(len(found))} of {count(len(entries(run, 'comparisons')))} intervals of the training-step "
        f"ratio are wider than {per_cent(WIDE)}; the widest, of {versus(part)} at shape {part['shape']}, is "
        f"{bounds(step['low'], step['high'])} from {count(step['n'])} pairs of windows."
    )


def _resumed(run: RunData) -> Iterable[str]:
    again = run.provenance.get("resumed")
    if isinstance(again, list) and again:
        yield (
            f"The run was resumed {'once' if len(again) == 1 else f'{len(again)} times'}: its windows come "
            "from more than one process, and need not have met the same machine."
        )


def _miscounted(run: RunData) -> Iterable[str]:
    differing: Sequence[str] = list(
        dict.fromkeys(text for part in entries(run, "comparisons") for text in part["flops"]["differences"])
    )
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        yield f"Ledger and count of FLOPs differ by more than 1 %: {'; '.join(differing[:3])}{more}."


def _unfaithful(run: RunData) -> Iterable[str]:
    for part in entries(run, "comparisons"):
        fidelity, who = part["fidelity"], f"{arm_label(part['arm'])} at shape {part['shape']}"
        displacement, residual = fidelity["displacement"], fidelity["residual"]
        if displacement is not None and displacement < LEAST_DISPLACEMENT * (1 - 1e-6):
            yield (
                f"The states of {who} move by {small(displacement)}, below {LEAST_DISPLACEMENT:g}: there a "
                "high cosine does not show equilibrium propagation."
            )
        if residual is not None and residual > LARGEST_RESIDUAL:
            yield (
                f"The fixed-point residual of {who} is {small(residual)}, above {LARGEST_RESIDUAL}: its "
                "states are no equilibrium."
            )
        control = fidelity["control_cosine"]
        if control is not None and control < _LEAST_CONTROL:
            yield (
                f"The control K = 0 of {who} has a cosine of {cosine(control)}, {signed(control - 1, 5)} "
                "from backpropagation: cosines here are limited by rounding."
            )
