"""The figures of a cost run: ratios, claims, where a step's time and FLOPs go, windows, memory, the frontier.

Covers which rows make a panel, how a figure is read, its content in words and its data; cost_panels.py puts
it on axes, cost_bars.py makes those of bars, frontier_figures.py that of a frontier.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from twinscope.report.axes import Line
from twinscope.report.cost.bars import memory, parts
from twinscope.report.cost.findings import (
    QUANTITIES,
    arms,
    bounds,
    entries,
    milliseconds,
    per_cent,
    shape_title,
    shapes,
    times,
    versus,
    windows,
)
from twinscope.report.cost.frontier_figures import frontier
from twinscope.report.cost.panels import (
    Lane,
    Lanes,
    draw_ratios,
    draw_windows,
    ratio_key,
    ratio_limits,
)
from twinscope.report.drawing import (
    LINES,
    MARKERS,
    PALETTE,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    Panel,
    Plot,
    short_label,
)
from twinscope.report.lanes import panel_height
from twinscope.report.reading import Row, RunData
from twinscope.report.train.findings import arm_label
from twinscope.report.wording import count, listed

#: Quantity of a claim -> how the name of a lane abbreviates it.
_SHORT = {
    "wall_clock_ratio": "wall clock",
    "train_step_ratio": "step time",
    "flops_ratio": "FLOPs",
    "peak_memory_ratio": "memory",
    "activation_peak_ratio": "activ.",
}
_NAME = 30


def figures(run: RunData) -> list[Plot]:
    """The figures that the run has data for, in the order of the report."""
    made = (ratios(run), parts(run), steadiness(run), memory(run), claims(run), frontier(run))
    return [plot for plot in made if plot is not None]


def ratios(run: RunData) -> Plot | None:
    """Every comparison: the ratio of times with its interval, and of FLOPs as ledger, count and shorthand."""
    found = {shape: part for shape in shapes(run) if (part := entries(run, "comparisons", shape))}
    if not found:
        return None
    groups = {shape: [_ratio_lanes(entry) for entry in part] for shape, part in found.items()}
    limits = ratio_limits([group for part in groups.values() for group in part])
    height = panel_height(
        [[len(group.lanes) for group in part] for part in groups.values()],
        max(len(ratio_key(part)) for part in groups.values()),
    )
    return Plot(
        name="cost-ratios",
        title="What a step costs, as a ratio",
        reading=(
            "Time per training step with its 95 % interval over pairs of windows, and FLOPs per step: the "
            "ledger from the shapes, the dispatcher's count, and the shorthand (1 + 2K + 2)/3. The interval "
            "reaches beyond the axis where it ends in an arrow."
        ),
        panels=tuple(
            Panel(
                shape_title(run, shape),
                " ".join(_ratio_words(entry) for entry in found[shape]),
                partial(draw_ratios, part, limits, height),
            )
            for shape, part in groups.items()
        ),
        columns=(
            "shape", "arm", "against", "step_ratio", "low", "high", "n", "wall_clock_ratio", "wall_clock_low",
            "wall_clock_high", "ledger", "ledger_causal", "counted", "shorthand",
        ),
        rows=tuple(
            (
                entry["shape"], entry["arm"], entry["against"],
                *(entry["train_step_ratio"][key] for key in ("median", "low", "high", "n")),
                *(entry["wall_clock_ratio"][key] for key in ("median", "low", "high")),
                *(
                    entry["flops"][f"{key}_ratio"]
                    for key in ("analytic", "causal", "counted", "shorthand")
                ),
            )
            for part in found.values()
            for entry in part
        ),
        size=(PANEL_WIDTH, height),
    )  # fmt: skip


def claims(run: RunData) -> Plot | None:
    """Every claim about a ratio, what it was judged against, and the published measurements."""
    judged = run.summary.get("claims") or []
    published = run.summary.get("published") or []
    names = {part["name"] for part in published}
    groups = [_claim_lanes(part, names) for part in judged]
    groups += [
        Lanes(
            short_label(part["name"], 44),
            "",
            tuple(
                Lane(_SHORT.get(quantity, short_label(quantity, 9)), published=value)
                for quantity, value in part["values"].items()
            ),
        )
        for part in published
    ]
    if not groups:
        return None
    height = panel_height([[len(group.lanes) for group in groups]], len(ratio_key(groups)))
    words = " ".join(_claim_words(part) for part in judged)
    words += "".join(
        f" {part['name']}: "
        + listed([f"{QUANTITIES.get(name, name)} {times(value)}" for name, value in part["values"].items()])
        + "."
        for part in published
    )
    return Plot(
        name="cost-claims",
        title="Claims and published measurements",
        reading=(
            "Box: what is claimed. Mark: what was measured under the claim's own conditions, here or in a "
            "published measurement, with its interval; a grey box has no such measurement. Reasons and "
            "sources are in the table."
        ),
        panels=(
            Panel(
                "What is claimed, and what was measured",
                words.strip(),
                partial(draw_ratios, groups, ratio_limits(groups), height),
            ),
        ),
        columns=("name", "quantity", "claim_low", "claim_high", "measured", "low", "high", "verdict", "of"),
        rows=tuple(
            (
                part["name"], part["quantity"], part["low"], part["high"], part["measured"],
                part["measured_low"], part["measured_high"], part["verdict"], part["measurement"],
            )
            for part in judged
        ) + tuple(
            (part["name"], quantity, None, None, value, None, None, "published", part["name"])
            for part in published
            for quantity, value in part["values"].items()
        ),
        size=(PANEL_WIDTH, height),
    )  # fmt: skip


def steadiness(run: RunData) -> Plot | None:
    """Milliseconds per step of every window over time, with the band in which windows agree."""
    timed = {shape: found for shape in shapes(run) if (found := windows(run, shape))}
    if not timed:
        return None
    band = run.summary.get("band")
    styles = _styles(run)
    names = {arm: short_label(arm_label(arm), 14) for arm in arms(run)}
    panels = []
    for shape, found in timed.items():
        lines = {
            arm: [
                (row["position"], 1e3 * row["step_seconds"], bool(row["disturbances"]))
                for row in found
                if row["arm"] == arm
            ]
            for arm in arms(run)
        }
        lines = {arm: points for arm, points in lines.items() if points}
        values = [value for points in lines.values() for _, value, _ in points]
        room = (max(values) / min(values)) ** 0.06 * 1.02
        limits = (min(values) / room, max(values) * room * (max(values) / min(values)) ** 0.08)
        panels.append(
            Panel(
                shape_title(run, shape),
                " ".join(_window_words(arm, points) for arm, points in lines.items()),
                partial(draw_windows, lines, names, styles, band, limits),
            )
        )
    shown = f" Tinted: within {per_cent(band)} of an arm's fastest window." if band is not None else ""
    return Plot(
        name="cost-windows",
        title="Every window, in the order in which they ran",
        reading=(
            "Time per training step, evaluation subtracted; equal heights are equal ratios. Windows of one "
            f"arm should lie level.{shown} Hollow: other work on the machine exceeded a bound meanwhile."
        ),
        panels=tuple(panels),
        columns=("shape", "arm", "sweep", "position", "step_seconds", "wall_seconds", "disturbed"),
        rows=tuple(
            (
                *(row[key] for key in ("shape", "arm", "sweep", "position", "step_seconds", "wall_seconds")),
                int(bool(row["disturbances"])),
            )
            for found in timed.values()
            for row in found
        ),
        size=(PANEL_WIDTH, PANEL_HEIGHT + 30),
    )


def _styles(run: RunData) -> dict[str, Line]:
    colours = [light for name, (light, _) in PALETTE.items() if name.startswith("arm-")]
    against = run.summary.get("denominator", "")
    others = [arm for arm in arms(run) if arm != against]
    styles = {
        arm: Line(colours[index % len(colours)], LINES[index % len(LINES)], MARKERS[index % len(MARKERS)])
        for index, arm in enumerate(others)
    }
    # What all are compared with has the colour of the text, as a yardstick has.
    return styles | {against: Line(PALETTE["reference"][0], "-", "D")}


def _ratio_lanes(entry: Row) -> Lanes:
    step, books = entry["train_step_ratio"], entry["flops"]
    return Lanes(
        short_label(versus(entry), _NAME),
        f"{times(step['median'])} {bounds(step['low'], step['high'])}",
        (
            Lane("time", value=step["median"], low=step["low"], high=step["high"]),
            Lane(
                "FLOPs",
                ledger=books["analytic_ratio"],
                counted=books["counted_ratio"],
                shorthand=books["shorthand_ratio"],
            ),
        ),
    )


def _ratio_words(entry: Row) -> str:
    step, books = entry["train_step_ratio"], entry["flops"]
    counted = "not counted"
    if books["counted_ratio"] is not None:
        counted = f"counted {times(books['counted_ratio'])}"
    return (
        f"{versus(entry)}: time {times(step['median'])} {bounds(step['low'], step['high'])}, FLOPs by ledger "
        f"{times(books['analytic_ratio'])}, {counted}, shorthand {times(books['shorthand_ratio'])}."
    )


def _claim_lanes(part: Row, published: set[str]) -> Lanes:
    other = part["measurement"] in published
    return Lanes(
        short_label(part["name"], 34),
        part["verdict"],
        (
            Lane(
                _SHORT[part["quantity"]],
                claim=(part["low"], part["high"]),
                judged=part["measurement"] is not None,
                value=None if other else part["measured"],
                published=part["measured"] if other else None,
                low=part["measured_low"],
                high=part["measured_high"],
            ),
        ),
    )


def _claim_words(part: Row) -> str:
    ends = (
        times(part["low"])
        if part["low"] == part["high"]
        else f"{times(part['low'])} to {times(part['high'])}"
    )
    text = f"{part['name']}, {QUANTITIES.get(part['quantity'], part['quantity'])} {ends}: {part['verdict']}"
    if part["measured"] is None:
        return f"{text}."
    return (
        f"{text}, measured {times(part['measured'])} {bounds(part['measured_low'], part['measured_high'])}."
    )


def _window_words(arm: str, points: Iterable[tuple[int, float, bool]]) -> str:
    values = [value for _, value, _ in points]
    disturbed = sum(touched for *_, touched in points)
    text = f"{arm_label(arm)}: {milliseconds(min(values) / 1e3)} to {milliseconds(max(values) / 1e3)} over "
    text += f"{count(len(values))} windows"
    return f"{text}, {count(disturbed)} of them disturbed." if disturbed else f"{text}."
