"""The figure of a frontier: cost against fidelity, a panel for every displacement and start.

Covers rows, words, data and ink. Both axes are logarithmic: cost as a ratio to backpropagation, fidelity as
1 − cosine, nearer on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from twinscope.report.axes import INK, MUTED, short_power, ticks_between
from twinscope.report.cost.frontier_findings import (
    cost_in_words,
    ground_title,
    grounds,
    points,
    references,
    undominated,
)
from twinscope.report.drawing import LINES, PALETTE, PANEL_WIDTH, Panel, Plot, short_label
from twinscope.report.lanes import SMALL_TEXT, ratio_ticks
from twinscope.report.reading import Row, RunData
from twinscope.report.train.panels import SMALLEST_GAP
from twinscope.report.wording import cosine, number

_HEIGHT = 348
#: Share of the height that the two lines of the key take.
_KEY = 0.12
_PAPER, _RULE = PALETTE["paper"][0], PALETTE["rule"][0]
_CONTROL = PALETTE["reference"][0]
_COLOURS = [PALETTE[f"arm-{index}"][0] for index in (1, 2, 3, 5, 4, 6)]
_KINDS = {"fused": "o", "unfused": "s", "energy read": "^"}
_COLUMNS = (
    "start", "target", "label", "rounds", "fused", "nudge", "read", "analytic_ratio", "counted_ratio",
    "measured_ratio", "measured_low", "measured_high", "median_cosine", "median_low", "median_high",
    "worst_cosine", "worst_low", "worst_high", "displacement", "residual", "valid",
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """What the panels of the figure share: limits, colour by number of rounds, and references."""

    ratios: tuple[float, float]
    gaps: tuple[float, float]
    colours: Mapping[int, str]
    references: Sequence[Mapping[str, Any]]


def frontier(run: RunData) -> Plot | None:
    """Cost against fidelity of every point, or None for a run without a frontier."""
    found = [row for row in points(run) if row["median_cosine"] is not None]
    ground = grounds(run)
    if not found or not ground:
        return None
    scale = _scale(run, found)
    panels = []
    for start, target in ground:
        part = [row for row in found if row["start"] == start and row["target"] in (None, target)]
        best = undominated(run, start, target)
        panels.append(
            Panel(
                ground_title(start, target)[0].upper() + ground_title(start, target)[1:],
                _words(part, best),
                partial(draw_frontier, part, best, scale),
            )
        )
    return Plot(
        name="cost-frontier",
        title="Cost against fidelity",
        reading=(
            "Each mark is one estimator: right is dearer, up is nearer to backpropagation. Filled: measured "
            "time per step with its 95 % interval; small and hollow: FLOPs by count. Below each mark, a line "
            "to the cosine of its worst block. Colour: rounds K; a ring: symmetric nudge; grey: does not "
            "count as equilibrium propagation, for the reason in the table. Stepped line: the points that "
            "none betters in FLOPs and cosine. ρ is the displacement of the most displaced block at the "
            f"states that are read. What is nearer than {short_power(SMALLEST_GAP)} stands there."
            + _reference_reading(scale.references)
        ),
        panels=tuple(panels),
        columns=_COLUMNS,
        rows=tuple(tuple(row[key] for key in _COLUMNS) for row in points(run)),
        size=(PANEL_WIDTH, _HEIGHT),
    )


def draw_frontier(rows: Sequence[Row], best: Sequence[Mapping[str, Any]], scale: Scale, axes: Axes) -> None:
    axes.set_xlabel("cost over that of BP, logarithmic")
    axes.set_xscale("log")
    axes.set_xlim(*scale.ratios)
    axes.xaxis.set_major_locator(FixedLocator(ratio_ticks(*scale.ratios)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_ylabel("1 − median block cosine to BP")
    axes.set_yscale("log")
    worst, best_gap = scale.gaps
    axes.set_ylim(worst, best_gap * (best_gap / worst) ** (_KEY / (1 - _KEY)))
    axes.yaxis.set_major_locator(FixedLocator(ticks_between(best_gap, worst)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.grid(True, axis="x")
    if best:
        steps = [(row["analytic_ratio"], _place(row["median_cosine"])) for row in best]
        axes.step(
            [*(cost for cost, _ in steps), scale.ratios[1]],
            [*(gap for _, gap in steps), steps[-1][1]],
            where="post",
            color=MUTED,
            linestyle=LINES[4],
            linewidth=1.0,
        )
    # What does not count lies below what does, marks above all lines.
    for row in sorted(rows, key=lambda row: row["valid"]):
        _draw_point(axes, row, scale)
    for reference in scale.references:
        _draw_reference(axes, reference, scale)
    _key(axes, rows, scale)


def _draw_point(axes: Axes, row: Row, scale: Scale) -> None:
    colour, marker = _look(row, scale)
    height = _place(row["median_cosine"])
    cost = row["measured_ratio"] if row["measured_ratio"] is not None else row["analytic_ratio"]
    thin: dict[str, Any] = {"color": colour, "linewidth": 0.8, "alpha": 0.55, "zorder": 2}
    hollow: dict[str, Any] = {"color": colour, "linestyle": "", "zorder": 3}
    mark: dict[str, Any] = {"color": colour, "linestyle": "", "zorder": 4}
    if row["worst_cosine"] is not None:
        axes.plot([cost] * 2, [height, _place(row["worst_cosine"])], **thin)
    if row["measured_low"] is not None:
        axes.plot([row["measured_low"], row["measured_high"]], [height] * 2, **thin)
    counted = row["counted_ratio"] if row["counted_ratio"] is not None else row["analytic_ratio"]
    axes.plot(
        [counted],
        [height],
        marker=marker,
        markersize=3.6 if row["measured_ratio"] is not None else 5.2,
        markerfacecolor=_PAPER,
        markeredgewidth=0.8,
        **hollow,
    )
    if row["measured_ratio"] is not None:
        axes.plot([cost], [height], marker=marker, markersize=5.2, **mark)
    if row["nudge"] == "symmetric":
        axes.plot(
            [cost], [height], marker="o", markersize=10, markerfacecolor="none", markeredgewidth=0.9, **mark
        )


def _draw_reference(axes: Axes, reference: Mapping[str, Any], scale: Scale) -> None:
    height = _place(reference["median_cosine"])
    axes.plot(
        [reference["cost_ratio"]], [height], color=INK, marker="*", markersize=9, linestyle="", zorder=5
    )
    right = reference["cost_ratio"] < (scale.ratios[0] * scale.ratios[1]) ** 0.5
    axes.annotate(
        short_label(str(reference["name"]), 18),
        (reference["cost_ratio"], height),
        # By the offset: a text whose place is right of 1 would count as the label of a line.
        xytext=(0.9 if right else -7, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        color=INK,
        size=SMALL_TEXT,
        bbox={"facecolor": _PAPER, "edgecolor": "none", "pad": 0.5},
        zorder=5,
    )


def _key(axes: Axes, rows: Sequence[Row], scale: Scale) -> None:
    """Two lines: colours and the hollow mark, then markers and the ring."""
    solid: dict[str, Any] = {"markersize": 5.2, "linestyle": ""}
    thin: dict[str, Any] = {"linestyle": "", "color": MUTED, "marker": "o", "markeredgewidth": 0.9}
    colours = [
        Line2D([], [], color=colour, marker="o" if rounds else "D", label=f"K = {rounds}", **solid)
        for rounds, colour in scale.colours.items()
        if any(row["rounds"] == rounds for row in rows)
    ]
    colours.append(Line2D([], [], markersize=3.6, markerfacecolor=_PAPER, label="FLOPs", **thin))
    if any(row["rounds"] and not row["valid"] for row in rows):
        colours.append(Line2D([], [], color=_RULE, marker="o", label="not EP", **solid))
    kinds = {_kind(row) for row in rows if row["rounds"]}
    markers = [
        Line2D([], [], color=MUTED, marker=marker, label=name, **solid)
        for name, marker in _KINDS.items()
        if name in kinds
    ]
    if any(row["nudge"] == "symmetric" for row in rows):
        markers.append(Line2D([], [], markersize=9, markerfacecolor="none", label="symmetric", **thin))
    for line, handles in enumerate((colours, markers)):
        legend = Legend(
            axes,
            handles,
            [str(handle.get_label()) for handle in handles],
            loc="upper right",
            bbox_to_anchor=(1.0, 1.0 - line * _KEY / 2),
            facecolor=_PAPER,
            edgecolor="none",
            framealpha=1.0,
            fancybox=False,
            ncols=len(handles),
            fontsize=SMALL_TEXT,
            labelcolor=MUTED,
            handletextpad=0.1,
            handlelength=1.2,
            columnspacing=0.9,
            borderaxespad=0.0,
            borderpad=0.0,
        )
        axes.add_artist(legend)


def _look(row: Row, scale: Scale) -> tuple[str, str]:
    if row["rounds"] == 0:
        return scale.colours[0], "D"
    return (scale.colours[row["rounds"]] if row["valid"] else _RULE), _KINDS[_kind(row)]


def _kind(row: Row) -> str:
    return "energy read" if row["read"] == "energy" else "fused" if row["fused"] else "unfused"


def _place(value: float) -> float:
    return max(1 - value, SMALLEST_GAP)


def _scale(run: RunData, found: Sequence[Row]) -> Scale:
    known = references(run)
    keys = ("analytic_ratio", "measured_ratio")
    ratios = [row[key] for row in found for key in keys if row[key] is not None]
    ratios += [float(part["cost_ratio"]) for part in known]
    gaps = [
        _place(row[key]) for row in found for key in ("median_cosine", "worst_cosine") if row[key] is not None
    ]
    gaps += [_place(float(part["median_cosine"])) for part in known]
    room = max(1.5, (max(gaps) / min(gaps)) ** 0.06)
    rounds = sorted({row["rounds"] for row in found})
    colours = {value: _COLOURS[(value - 1) % len(_COLOURS)] if value else _CONTROL for value in rounds}
    return Scale(
        (min(ratios) / 1.12, max(ratios) * 1.12),
        (max(gaps) * room, min(gaps) / room),
        colours,
        known,
    )


def _words(rows: Sequence[Row], best: Sequence[Mapping[str, Any]]) -> str:
    control = [row["median_cosine"] for row in rows if row["rounds"] == 0]
    valid = [row for row in rows if row["valid"]]
    text = f"{number(len(valid), 0)} of {number(sum(row['rounds'] > 0 for row in rows), 0)} points count."
    if best:
        named = [
            f"{row['label']} costs {cost_in_words(row)}, with a median cosine of "
            f"{cosine(row['median_cosine'])} and {cosine(row['worst_cosine'])} in the worst block"
            for row in best
        ]
        text += f" On the frontier: {'; '.join(named)}."
    if control:
        text += f" The control K = 0 has a cosine of {cosine(min(control))}."
    return text


def _reference_reading(known: Sequence[Mapping[str, Any]]) -> str:
    if not known:
        return ""
    shown = "; ".join(
        f"{part['name']}, {number(part['cost_ratio'], 2)}× at about {cosine(part['median_cosine'])}"
        for part in known
    )
    return f" Star: {shown}, under conditions of its own."
