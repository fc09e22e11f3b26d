"""What a collapse says in sentences: the slope beside its prediction, and where the threshold law fails.

Covers the sentences, and the two lines that a figure draws; no drawing, no markup.
"""

from __future__ import annotations

from math import exp

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import sentence
from twinscope.report.wording import (
    compact,
    contended,
    count,
    interval,
    listed,
    number,
    small,
    study,
    unfinished,
)

#: Fewer models than this give an interval clustered by model little to rest on.
FEW_MODELS = 5


def placed(run: RunData, role: str = "point") -> list[Row]:
    """The rows of a role (``point | control``) that have a gain_low, and so a place on the axes."""
    return [row for row in run.rows if row["role"] == role and row["gain_low"] is not None]


def law(run: RunData, ratio: float) -> float | None:
    """gain_low at a displacement ratio by the law, with the constant of the record."""
    constant, unit = run.summary.get("constant"), run.summary.get("unit_roundoff")
    return None if constant is None or unit is None else constant * unit / ratio


def fitted(run: RunData, ratio: float) -> float | None:
    """gain_low at a displacement ratio on the fitted line."""
    slope, intercept = run.summary.get("slope"), run.summary.get("intercept")
    return None if slope is None or intercept is None else exp(intercept) * ratio**slope


def outcome(run: RunData) -> str:
    """The slope with its interval beside the prediction, and the constant."""
    summary = run.summary
    slope = summary.get("slope")
    if slope is None:
        reason = summary.get("slope_reason", "").rstrip(".")
        return f"No slope was measured{f': {reason}' if reason else ''}."
    text = (
        f"Over {count(summary.get('n_points', 0))} blocks of {count(summary.get('n_models', 0))} models, log "
        "gain_low against log displacement ratio has the slope "
        f"{interval(slope, summary.get('slope_low'), summary.get('slope_high'))}; the threshold law predicts "
        f"{compact(summary.get('prediction')).removesuffix('.000')}"
    )
    constant = summary.get("constant")
    if constant is not None:
        ends = [summary.get("constant_low"), summary.get("constant_high")]
        within = f" (95 % interval {number(ends[0], 2)} to {number(ends[1], 2)})" if None not in ends else ""
        text += f". gain_low times the ratio is {number(constant, 2)}{within} unit roundoffs of the format"
    return f"{text}."


def remarks(run: RunData) -> list[str]:
    """Where the law fails, as the record has it, and how the controls lie."""
    found = []
    fails = run.summary.get("fails")
    if fails:
        found.append(f"Where the law fails: {' '.join(sentence(each) for each in fails)}")
    elif fails is not None:
        found.append("The law was not seen to fail at any of these blocks.")
    controls = (run.summary.get("controls") or {}).get("runs") or []
    if controls:
        shifts = [
            f"{each['model']} at β {small(each['beta'])}: {_times(each['shift'])}" for each in controls[:6]
        ]
        more = f"; {len(controls) - 6} more are in the table" if len(controls) > 6 else ""
        found.append(f"Controls, mean of gain_low over the law: {'; '.join(shifts)}{more}.")
    return found


def _times(shift: float | None) -> str:
    return "none" if shift is None else f"{number(exp(shift), 2)} times"


def label(run: RunData) -> str:
    """What is under study, where that is not the instrument's own precision."""
    return study(run.summary)


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the collapse shows, the gravest first."""
    found = unfinished(run, "before there is a slope")
    models = run.summary.get("n_models")
    if models is not None and models < FEW_MODELS:
        found.append(
            f"The points come from {count(models)} {'model' if models == 1 else 'models'}: an interval "
            "clustered by model rests on no more independent units than that."
        )
    if run.rows and not placed(run, "control"):
        found.append("No run at another β stands beside the points as a control.")
    return [*found, *contended(run, "Gains and ratios")]


def facts(run: RunData) -> list[str]:
    """Points and controls, and what was measured with."""
    summary = run.summary
    if "n_points" not in summary:
        return []
    precision = listed(list(dict.fromkeys(str(summary.get(key)) for key in ("study", "instrument"))))
    return [
        f"{count(summary['n_points'])} points",
        f"{count(len(placed(run, 'control')))} controls",
        f"{summary.get('read')} read in {precision}",
        f"β {small(summary.get('beta'))}",
        f"band ±{summary.get('band')}",
    ]
