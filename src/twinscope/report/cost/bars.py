"""The figures of a cost run made of bars: where time and FLOPs of a step go, and its peak memory.

Covers rows, words and data; cost_panels.py puts them on axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from twinscope.report.cost.findings import (
    arms,
    entries,
    flops,
    mebibytes,
    milliseconds,
    shape_title,
    shapes,
    times,
)
from twinscope.report.cost.panels import Bar, Bars, bar_key, bar_limit, draw_bars
from twinscope.report.drawing import PALETTE, PANEL_WIDTH, Panel, Plot, short_label
from twinscope.report.lanes import panel_height
from twinscope.report.reading import Row, RunData
from twinscope.report.train.findings import arm_label
from twinscope.report.wording import listed

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
_NAME = 30
_PART_COLUMNS = ("shape", "arm", "part", "seconds", "share", "flops", "gflops_per_second")
_MEMORY_COLUMNS = (
    "total_mib", "activations_mib", "parameters_mib", "gradients_mib", "optimizer_mib", "resident_mib",
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
    limit = bar_limit([group for groups, _ in panels.values() for group in groups])
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
                f"{times(totals[0] / whole[0])}",
                value=step and step["median"],
                low=step and step["low"],
                high=step and step["high"],
            ),
            Bar(
                "FLOPs",
                {name: value / whole[1] for name, value in work.items()},
                f"{times(totals[1] / whole[1])}",
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
            Bar("step", state, f"{to_base('total_mib')}", line=part["total_mib"]),
            Bar("activ.", {"activations": part["activations_mib"]}, f"{to_base('activations_mib')}"),
        ),
    )


def _memory_words(part: Mapping[str, float | str]) -> str:
    values = {key: mebibytes(value) for key, value in part.items() if isinstance(value, int | float)}
    return (
        f"{arm_label(str(part['arm']))}: peak {values['total_mib']}; parameters {values['parameters_mib']}, "
        f"gradients {values['gradients_mib']}, optimizer state {values['optimizer_mib']}; activations at "
        f"their peak {values['activations_mib']}."
    )
