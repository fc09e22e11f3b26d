"""What a run says in sentences: its outcome, and what a reader must know before believing it.

Covers the sentences and the numbers in them; no drawing, no markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any

from twinscope.report.reading import RunData

#: Below this displacement ratio of the largest block, a cosine says nothing about EP (METHOD 1.2).
LEAST_DISPLACEMENT = 1e-3
#: Above this fixed-point residual the nudged states are no equilibrium (METHOD 1.2).
LARGEST_RESIDUAL = 0.1

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def arm_label(name: str) -> str:
    """The arm's name as prose shows it: the two default arms are abbreviations."""
    return name.upper() if name in ("ep", "bp") else name


def number(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` decimals and a true minus sign; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """As :func:`number`, with a plus sign before a positive value."""
    if value is None:
        return "–"
    text = number(value, digits)
    # A negative number that rounds to zero is zero.
    if float(text.replace("−", "-")) == 0:
        return f"{0:.{digits}f}"
    return text if value < 0 else f"+{text}"


def small(value: float | None) -> str:
    """Three significant digits, with a power of ten below 0.001 and from 10,000 on."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    exponent = floor(log10(abs(value)))
    if -3 <= exponent < 4:
        return number(value, max(0, 2 - exponent))
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa.replace('-', '−')}×10{str(int(power)).translate(_SUPERSCRIPTS)}"


def cosine(value: float | None) -> str:
    """A cosine with enough digits to show its distance from 1; as ``1 − d`` where that needs too many."""
    if value is None:
        return "–"
    gap = 1.0 - value
    if gap <= 0:
        return number(value, 4)
    # A digit beyond the first nine that differs: 0.9975, 0.99975.
    digits = max(3, 1 - floor(log10(gap)))
    return number(value, digits) if digits <= 7 else f"1 − {small(gap)}"


def count(value: int) -> str:
    """An integer with commas between thousands."""
    return f"{value:,}"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def outcome(run: RunData) -> str:
    """One sentence: where each arm ended on held-out text, and how far from its backpropagation twin."""
    losses = {arm: loss for arm in run.arms if (loss := run.final(arm, "val_loss")) is not None}
    if not losses:
        return "No held-out loss has been measured."
    reference = run.reference
    twin = losses.get(reference) if reference is not None else None
    others = [arm for arm in losses if arm != reference] or list(losses)
    first, *rest = others
    text = f"{arm_label(first)} reaches {number(losses[first])} nats per token on held-out text"
    if twin is not None and first != reference:
        text += f", {_against(losses[first] - twin)} its {arm_label(reference or '')} twin"
        text += "".join(f"; {arm_label(arm)} is {_against(losses[arm] - twin)} it" for arm in rest[:4])
    else:
        text += "".join(f"; {arm_label(arm)} {number(losses[arm])}" for arm in rest[:4])
    if len(rest) > 4:
        text += f"; {len(rest) - 4} more arms are in the table"
    if run.status == "complete":
        return f"{text}."
    reached = f"At step {count(run.last_step or 0)}"
    planned = f" of {count(run.planned_steps)}" if run.planned_steps else ""
    return f"{reached}{planned}, before the end: {text}."


def _against(difference: float) -> str:
    if abs(difference) < 0.0005:
        return "level (within 0.0005) with"
    return f"{number(abs(difference))} {'above' if difference > 0 else 'below'}"


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the run shows, the gravest first."""
    return [
        *_unfinished(run),
        *_skipped(run),
        *_fidelity(run),
        *_seeds(run),
        *_load(run),
    ]


def _unfinished(run: RunData) -> Iterable[str]:
    if run.status == "complete":
        return
    reached = "before its first evaluation" if run.last_step is None else f"at step {count(run.last_step)}"
    planned = f" of {count(run.planned_steps)}" if run.planned_steps and run.last_step is not None else ""
    because = f" ({run.reason.rstrip('.')})" if run.reason else ""
    what = {
        "running": f"This run is still going: the page shows it {reached}{planned}.",
        "interrupted": f"This run was interrupted and wrote no result: the page shows its journal, "
        f"which ends {reached}{planned}.",
        "failed": f"This run failed{because}: what it measured ends {reached}{planned}.",
    }
    yield what.get(run.status, f"This run was stopped{because}: what it measured ends {reached}{planned}.")


def _skipped(run: RunData) -> Iterable[str]:
    skipped = {arm: run.skipped(arm) for arm in run.arms}
    skipped = {arm: steps for arm, steps in skipped.items() if steps}
    if skipped:
        parts = [f"{arm_label(arm)} skipped {count(steps)}" for arm, steps in skipped.items()]
        yield (
            f"Steps with a loss or gradient that was not finite were skipped: {listed(parts)}; "
            "from there on the arms saw different updates."
        )


def _fidelity(run: RunData) -> Iterable[str]:
    for arm in run.arms:
        rows = run.rows_of("gate", arm)
        largest = [(max(ratios), row) for row in rows if (ratios := known(row["displacement_ratio"]))]
        too_small = [(value, row) for value, row in largest if value < LEAST_DISPLACEMENT * (1 - 1e-6)]
        if too_small:
            value, row = min(too_small, key=lambda pair: pair[0])
            yield (
                f"At {len(too_small)} of {len(largest)} gate points of {arm_label(arm)} the states of the "
                f"most displaced block moved by less than {LEAST_DISPLACEMENT:g} of their size (least: "
                f"{small(value)}, seed {row['seed']}, step {count(row['step'])}): there a high cosine does "
                "not show equilibrium propagation, for any variant becomes backpropagation as the nudge "
                "vanishes."
            )
        residuals = [(row["residual"], row) for row in rows if row["residual"] is not None]
        too_large = [(value, row) for value, row in residuals if value > LARGEST_RESIDUAL]
        if too_large:
            value, row = max(too_large, key=lambda pair: pair[0])
            yield (
                f"At {len(too_large)} of {len(residuals)} gate points of {arm_label(arm)} the fixed-point "
                f"residual exceeds {LARGEST_RESIDUAL} (largest: {small(value)}, seed {row['seed']}, step "
                f"{count(row['step'])}): there the nudged states are no equilibrium."
            )


def _seeds(run: RunData) -> Iterable[str]:
    if len(run.seeds) == 1:
        yield (
            f"One seed ({run.seeds[0]}): the intervals are over held-out batches of one trained pair, and "
            "say nothing about the scatter between initialisations."
        )
    elif len(run.seeds) == 2:
        yield (
            "Two seeds: they are shown one by one, and give no interval over seeds; every interval is over "
            "held-out batches."
        )


def _load(run: RunData) -> Iterable[str]:
    cpu = run.provenance.get("cpu")
    cores = None
    if isinstance(cpu, Mapping):
        affinity = cpu.get("affinity")
        cores = len(affinity) if isinstance(affinity, list) and affinity else cpu.get("logical_cores")
    if not isinstance(cores, int) or cores < 1:
        return
    # At the start nothing of the load is the run's own; at the end it may keep every core busy itself.
    found = []
    for key, when, limit in (("load_at_start", "began", 0.5), ("load_at_end", "ended", 1.25)):
        load = run.provenance.get(key)
        if isinstance(load, list) and load and isinstance(load[0], int | float) and load[0] > limit * cores:
            found.append(f"{number(load[0], 2)} when the run {when}")
    if found:
        yield (
            f"The machine was shared: on {cores} {'core' if cores == 1 else 'cores'}, the load average was "
            f"{listed(found)}. Losses and cosines do not depend on it; timings do."
        )


def known(values: Iterable[Any]) -> list[float]:
    """The values that exist."""
    return [value for value in values if value is not None]
