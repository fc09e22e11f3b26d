"""What a frontier of a cost run says in sentences: the cheapest faithful settings, and what limits them.

Covers the sentences, and reading its points; a run without a frontier has none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from twinscope.report.reading import Row, RunData
from twinscope.report.wording import cosine, count, number, small


def points(run: RunData) -> list[Row]:
    """Every point, control included, in the order of the record."""
    return [row for row in run.rows if row["kind"] == "frontier"]


def grounds(run: RunData) -> list[tuple[str, float]]:
    """The pairs of start and displacement, in the order of the record."""
    return list(
        dict.fromkeys((row["start"], row["target"]) for row in points(run) if row["target"] is not None)
    )


def ground_title(start: str, target: float) -> str:
    """``trained, ρ = 0.001``."""
    return f"{start}, ρ = {target:g}"


def references(run: RunData) -> list[Mapping[str, Any]]:
    """Costs and fidelities known from elsewhere; of a run without a summary those of its config."""
    for source in (run.summary.get("frontier"), run.settings.get("frontier")):
        if isinstance(source, Mapping) and isinstance(source.get("references"), list):
            return [part for part in source["references"] if isinstance(part, Mapping)]
    return []


def undominated(run: RunData, start: str, target: float) -> list[Row]:
    """The points that none betters in FLOPs and median cosine, as the summary names them."""
    found = (run.summary.get("frontier") or {}).get("frontier") or []
    return [part for part in found if (part["start"], part["target"]) == (start, target)]


def cost_in_words(point: Mapping[str, Any]) -> str:
    """``1.53 times BP's FLOPs and 1.87 [1.44, 2.38] times its time``."""
    text = f"{number(point['analytic_ratio'], 2)} times BP's FLOPs"
    if point["measured_ratio"] is None:
        return text
    ends = f"[{number(point['measured_low'], 2)}, {number(point['measured_high'], 2)}]"
    return f"{text} and {number(point['measured_ratio'], 2)} {ends} times its time"


def outcome(run: RunData) -> list[str]:
    """The cheapest setting that is faithful enough, from every start at every displacement."""
    summary = run.summary.get("frontier")
    if not summary:
        return []
    found = summary["cheapest"]
    enough = number(summary["enough"], 2)
    if not found:
        return [f"No setting of the frontier has a median block cosine of {enough} or more."]
    places: dict[str, list[str]] = {}
    for point in found:
        setting = f"{point['label']} at {number(point['analytic_ratio'], 2)} times BP's FLOPs"
        where = ground_title(point["start"], point["target"])
        places.setdefault(setting, []).append(f"{where}: cosine {cosine(point['median_cosine'])}")
    parts = [f"{setting} ({'; '.join(where)})" for setting, where in places.items()]
    return [f"Cheapest with a median block cosine of {enough} or more: {', '.join(parts)}."]


def remarks(run: RunData) -> list[str]:
    """How many points count, and which better a reference, with the reference's conditions."""
    summary = run.summary.get("frontier")
    if not summary:
        return []
    found = [
        f"{count(summary['valid'])} of {count(summary['points'])} points of the frontier count as "
        "equilibrium propagation; the others, controls included, are in the table with the reason."
    ]
    for reference in summary["references"]:
        beyond = summary["beyond_reference"].get(reference["name"]) or []
        reached = f"{count(len(beyond))} points of the frontiers are" if len(beyond) > 1 else "one point is"
        if not beyond:
            reached = "no point of a frontier is"
        found.append(
            f"{reference['name'].capitalize()}: {number(reference['cost_ratio'], 2)}× at a cosine of about "
            f"{cosine(reference['median_cosine'])} ({reference['conditions'].rstrip('.')}; "
            f"{reference['source'].rstrip('.')}). Here {reached} as cheap in FLOPs and as near, under other "
            "conditions."
        )
    return found


def warnings(run: RunData) -> Iterable[str]:
    """Which costs were not measured in quiet, and points that do not count."""
    costs = [row for row in run.rows if row["kind"] == "frontier_cost"]
    disturbed = [row for row in costs if row["controlled"] is False]
    apart = [row for row in costs if row["windows_agree"] is False]
    if disturbed or apart:
        yield (
            f"Of {count(len(costs))} settings timed for the frontier, {count(len(disturbed))} were not timed "
            f"on a machine known to be quiet, and the windows of {count(len(apart))} do not agree: there the "
            "count of FLOPs is the cost to go by."
        )
    invalid = Counter(
        # The same bound with other numbers is the same reason.
        re.sub(r" [\d.][\d.e+-]*(?= is )", "", reason)
        for row in points(run)
        if not row["valid"] and row["rounds"] > 0
        for reason in row["invalid"]
    )
    if invalid:
        total = sum(not row["valid"] and row["rounds"] > 0 for row in points(run))
        worst = max((row["residual"] for row in points(run) if row["residual"] is not None), default=None)
        named = "; ".join(f"{reason} in {count(times)}" for reason, times in invalid.most_common(3))
        yield (
            f"{count(total)} points besides the controls do not count as equilibrium propagation ({named}; "
            f"largest residual {small(worst)}): a high cosine there shows nothing about it."
        )
