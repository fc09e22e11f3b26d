"""The figures of a cost run: ratios, claims, where a step's time and FLOPs go, windows, memory, the frontier.

Covers which rows make a panel, how a figure is read, its content in words and its data; cost_panels.py puts
it on axes, frontier_figures.py draws the frontier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from twinscope.report.axes import Line
from twinscope.report.cost_findings import (
    QUANTITIES,
    arms,
    bounds,
    entries,
    flops,
    mebibytes,
    milliseconds,
    per_cent,
    shape_title,
    shapes,
    times,
    versus,
    windows,
)
from twinscope.report.cost_panels import (
    Bar,
    Bars,
    Lane,
    Lanes,
    bar_key,
    draw_bars,
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
from twinscope.report.frontier_figures import frontier
from twinscope.report.lanes import panel_height
from twinscope.report.reading import Row, RunData
from twinscope.report.train_findings import arm_label
from twinscope.report.wording import count, listed

#: Part of a step -> its colour; parts of one colour do not meet in one arm.
_PARTS = {
    "free": PALETTE["arm-1"][0],
    "forward": PALETTE["arm-1"][0],
    "forces": PALETTE["arm-2"][0],
    "rebuild": PALETTE["arm-5"][0],
    "read": PALETTE["arm-3"][0],
    "backward": PALETTE["arm-4"][0],
    "readout": PALETTE["arm-6"][0],
    "optimizer": PALETTE["muted"][0],
    "other": PALETTE["rule"][0],
}
_MEMORY = {
    "parameters": PALETTE["arm-1"][0],
    "gradients": PALETTE["arm-5"][0],
    "optimizer state": PALETTE["muted"][0],
    "activations": PALETTE["arm-2"][0],
}
#: Quantity of a claim -> how the name of a lane abbreviates it.
_SHORT = {
    "wall_clock_ratio": "wall clock",
    "train_step_ratio": "step time",
    "flops_ratio": "FLOPs",
    "peak_memory_ratio": "memory",
    "activation_peak_ratio": "activ.",
}
_NAME = 30
_PART_COLUMNS = ("shape", "arm", "part", "seconds", "share", "flops", "gflops_per_second")
_MEMORY_COLUMNS = (
    "total_mib", "activations_mib", "parameters_mib", "gradients_mib", "optimizer_mib", "resident_mib",
)  # fmt: skip


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


def parts(run: RunData) -> Plot | None:
    """Seconds and FLOPs of every part of a step, both in steps of the arm that is compared with."""
    against = run.summary.get("denominator", "")
    panels: dict[str, tuple[list[Bars], str]] = {}
    for shape in shapes(run):
        base = entries(run, "parts", shape, against)
        whole = sum(part["seconds"] for part in base), sum(part["flops"] for part in base)
        if not all(whole):
            continue
        groups, words = [], []
        for arm in arms(run):
            found = entries(run, "parts", shape, arm)
            if found:
                groups.append(_part_bars(run, arm, found, whole))
                words.append(_part_words(arm, found))
        panels[shape] = groups, " ".join(words)
    if not panels:
        return None
    bars = [bar for groups, _ in panels.values() for group in groups for bar in group.bars]
    limit = 1.28 * max(place for bar in bars for place in bar.places)
    height = panel_height(
        [[len(group.bars) for group in groups] for groups, _ in panels.values()],
        max(len(bar_key(groups, _PARTS)) for groups, _ in panels.values()),
    )
    name = arm_label(against)
    return Plot(
        name="cost-parts",
        title="Where a step's time and FLOPs go",
        reading=(
            f"Both bars of an arm are in steps of {name}: of its time in the pass that times parts, and of "
            "its FLOPs by the ledger. Where the bars of an arm differ in length, wall clock and FLOPs "
            "disagree, and the segments show in which part. Dot: the ratio of the windows, with its 95 % "
            "interval. Other: data, embedding, and what no mark covers."
        ),
        panels=tuple(
            Panel(
                shape_title(run, shape),
                words,
                partial(draw_bars, groups, _PARTS, limit, f"steps of {short_label(name, 20)}", height),
            )
            for shape, (groups, words) in panels.items()
        ),
        columns=_PART_COLUMNS,
        rows=tuple(tuple(part[key] for key in _PART_COLUMNS) for part in entries(run, "parts")),
        size=(PANEL_WIDTH, height),
    )


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


def memory(run: RunData) -> Plot | None:
    """Peaks of memory by arm: what is held, and activations; in MiB."""
    against = run.summary.get("denominator", "")
    panels: dict[str, list[Row]] = {}
    for shape in shapes(run):
        found = [part for arm in arms(run) for part in entries(run, "memory", shape, arm)]
        if found:
            panels[shape] = found
    if not panels:
        return None
    groups = {
        shape: [_memory_bars(part, found, against) for part in found] for shape, found in panels.items()
    }
    height = panel_height(
        [[len(group.bars) for group in part] for part in groups.values()],
        max(len(bar_key(part, _MEMORY)) for part in groups.values()),
    )
    rows = [part for found in panels.values() for part in found]
    return Plot(
        name="cost-memory",
        title="Peak memory of a step",
        reading=(
            "Upper bar: what a step holds whatever the rule, and a line at the peak of the whole step. Lower "
            "bar: the peak of activations, which are graphs, states, adjoints, logits and what kernels need "
            "while the gradient is computed. The peaks fall at different times, so they do not add up. "
            f"Ratios are to {arm_label(against)}."
        ),
        panels=tuple(
            Panel(
                shape_title(run, shape),
                " ".join(_memory_words(part) for part in panels[shape]),
                partial(
                    draw_bars,
                    part,
                    _MEMORY,
                    1.4 * max(place for group in part for bar in group.bars for place in bar.places),
                    "MiB",
                    height,
                ),
            )
            for shape, part in groups.items()
        ),
        columns=("shape", "arm", *_MEMORY_COLUMNS),
        rows=tuple((part["shape"], part["arm"], *(part[key] for key in _MEMORY_COLUMNS)) for part in rows),
        size=(PANEL_WIDTH, height),
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


def _part_bars(run: RunData, arm: str, found: Sequence[Row], whole: tuple[float, float]) -> Bars:
    seconds, work = _merged(found, "seconds"), _merged(found, "flops")
    totals = sum(seconds.values()), sum(work.values())
    shape = found[0]["shape"]
    step = next((part["train_step_ratio"] for part in entries(run, "comparisons", shape, arm)), None)
    return Bars(
        short_label(arm_label(arm), _NAME),
        f"{milliseconds(totals[0])} · {flops(totals[1])}",
        (
            Bar(
                "time",
                {name: value / whole[0] for name, value in seconds.items()},
                f" {times(totals[0] / whole[0])}",
                value=step and step["median"],
                low=step and step["low"],
                high=step and step["high"],
            ),
            Bar(
                "FLOPs",
                {name: value / whole[1] for name, value in work.items()},
                f" {times(totals[1] / whole[1])}",
            ),
        ),
    )


def _merged(found: Sequence[Row], key: str) -> dict[str, float]:
    merged: dict[str, float] = {}
    for part in found:
        name = part["part"] if part["part"] in _PARTS else "other"
        merged[name] = merged.get(name, 0.0) + part[key]
    return merged


def _part_words(arm: str, found: Sequence[Row]) -> str:
    named = []
    for part in found:
        work = f" for {flops(part['flops'])}" if part["flops"] else ""
        named.append(f"{part['part']} {milliseconds(part['seconds'])}{work}")
    return f"{arm_label(arm)}: {listed(named)}."


def _window_words(arm: str, points: Iterable[tuple[int, float, bool]]) -> str:
    values = [value for _, value, _ in points]
    disturbed = sum(touched for *_, touched in points)
    text = f"{arm_label(arm)}: {milliseconds(min(values) / 1e3)} to {milliseconds(max(values) / 1e3)} over "
    text += f"{count(len(values))} windows"
    return f"{text}, {count(disturbed)} of them disturbed." if disturbed else f"{text}."


def _memory_bars(part: Row, found: Sequence[Row], against: str) -> Bars:
    base = next((other for other in found if other["arm"] == against), None)

    def to_base(key: str) -> str:
        if base is None or base is part or not base[key]:
            return mebibytes(part[key])
        return f"{mebibytes(part[key])}, {times(part[key] / base[key])}"

    state = {
        "parameters": part["parameters_mib"],
        "gradients": part["gradients_mib"],
        "optimizer state": part["optimizer_mib"],
    }
    return Bars(
        short_label(arm_label(part["arm"]), _NAME),
        "",
        (
            Bar("step", state, f" {to_base('total_mib')}", line=part["total_mib"]),
            Bar("activ.", {"activations": part["activations_mib"]}, f" {to_base('activations_mib')}"),
        ),
    )


def _memory_words(part: Mapping[str, float | str]) -> str:
    values = {key: mebibytes(value) for key, value in part.items() if isinstance(value, int | float)}
    return (
        f"{arm_label(str(part['arm']))}: peak {values['total_mib']}; parameters {values['parameters_mib']}, "
        f"gradients {values['gradients_mib']}, optimizer state {values['optimizer_mib']}; activations at "
        f"their peak {values['activations_mib']}."
    )
