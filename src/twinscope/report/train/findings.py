"""What a training run says in sentences: its outcome, and what a reader must know before believing it.

Covers the sentences and the numbers in them; no drawing, no markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinscope.report.reading import RunData
from twinscope.report.wording import contended, count, known, listed, number, small, unfinished

#: Below this displacement ratio of the largest block, a cosine says nothing about EP (METHOD 1.2).
LEAST_DISPLACEMENT = 1e-3
#: Above this fixed-point residual the nudged states are no equilibrium (METHOD 1.2).
LARGEST_RESIDUAL = 0.1


def arm_label(name: str) -> str:
    """The arm's name as prose shows it: the two default arms are abbreviations."""
    return name.upper() if name in ("ep", "bp") else name


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
        *unfinished(run, _reached(run)),
        *_skipped(run),
        *_fidelity(run),
        *_seeds(run),
        *contended(run, "Losses and cosines"),
    ]


def _reached(run: RunData) -> str:
    if run.last_step is None:
        return "before its first evaluation"
    planned = f" of {count(run.planned_steps)}" if run.planned_steps else ""
    return f"at step {count(run.last_step)}{planned}"


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


def facts(run: RunData) -> list[str]:
    """How far the run came, and from how many seeds."""
    found = []
    if run.last_step is not None:
        planned = f" of {count(run.planned_steps)}" if run.planned_steps and run.status != "complete" else ""
        found.append(f"{count(run.last_step)}{planned} steps")
    if run.seeds:
        found.append(f"{len(run.seeds)} {'seed' if len(run.seeds) == 1 else 'seeds'}")
    return found
