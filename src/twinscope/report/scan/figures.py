"""The figures of a scan: for each kind of module, every pair's distances on every text against its nulls.

Covers rows, words, data and ink. Errors are relative, divergences in bits; all axes are logarithmic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from twinscope.report.axes import INK, MUTED, short_power, ticks_between
from twinscope.report.drawing import FONT_SIZE, PALETTE, PANEL_WIDTH, Panel, Plot
from twinscope.report.reading import RunData
from twinscope.report.scan.findings import Direction, directions
from twinscope.report.wording import number, small, span

#: measure: (title of its panel, name of its axis); a panel stands where any pair has the measure.
_MEASURES = {
    "branch_error": ("branch error", "branch error"),
    "norm_error": ("error of the norm's output", "error"),
    "attention_js": ("divergence of attention", "bits, mean over heads"),
    "logit_js": ("divergence of the next token", "bits"),
}
_KEYS = (*_MEASURES, "branch_error_trimmed", "attention_js_worst", "attention_topk", "logit_topk_1")
_MOST_LINES = 40
_LINE = 17
_PAIR = PALETTE["arm-1"][0]
_PAPER, _RULE = PALETTE["paper"][0], PALETTE["rule"][0]


def figures(run: RunData) -> list[Plot]:
    """A figure for each kind of module that has pairs, in the order of the record."""
    found = directions(run)
    groups = dict.fromkeys(part.group for part in found)
    return [_figure(group, [part for part in found if part.group == group]) for group in groups]


def _figure(group: str, parts: Sequence[Direction]) -> Plot:
    shown = _nearest(parts)
    left_out = len(parts) - len(shown)
    panels = [
        Panel(
            title,
            _words(shown, measure, title),
            partial(draw_distances, shown, measure, axis),
        )
        for measure, (title, axis) in _MEASURES.items()
        if any(part.values(measure) for part in shown)
    ]
    more = f" Shown are the {len(shown)} nearest of {len(parts)}; all are in the table." if left_out else ""
    height = max(160, 104 + _LINE * len(shown))
    return Plot(
        name=f"scan-{group.lower().replace(' ', '-')}",
        title=f"{group[0].upper()}{group[1:]} pairs against their nulls",
        reading=(
            "Each line is one module in the place of another: 3 ← 7 is module 7 on what enters layer 3. A "
            "dot is one text, hollow for calibration, filled for held-out. Grey: from the nearest to the "
            "farthest null over all texts. Bar: the most that counts as the same, as calibration set it. "
            f"Exactly 0 stands at the left edge.{more}"
        ),
        panels=tuple(panels),
        columns=("pair", "reference", "substitute", "split", "text", "null", *_KEYS),
        rows=tuple(_data(parts)),
        size=(PANEL_WIDTH, height),
    )


def draw_distances(parts: Sequence[Direction], measure: str, axis: str, axes: Axes) -> None:
    values = [value for part in parts for value in (*part.values(measure), *part.nulls(measure))]
    limits = [part.limits[measure] for part in parts if measure in part.limits]
    positive = [value for value in (*values, *limits) if value > 0] or [1.0]
    low, high = min(positive) / 1.7, max(positive) * 1.7
    exact = any(value == 0 for value in values)
    # Zero has no place on the axis; it gets one of its own, left of the axis proper.
    edge = low / (high / low) ** 0.09
    axes.set_xscale("log")
    axes.set_xlim(edge / (high / low) ** 0.05 if exact else low, high)
    ticks = ticks_between(low, high)
    while len(ticks) > 7:
        ticks = ticks[::2]
    axes.xaxis.set_major_locator(FixedLocator([edge, *ticks] if exact else ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FixedFormatter([*(["0"] if exact else []), *(short_power(tick) for tick in ticks)])
    )
    axes.set_xlabel(axis)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    # The legend takes the height of about one and a half lines, however high a line is.
    axes.set_ylim(len(parts) - 0.4, -0.6 - min(1.6, 0.34 * len(parts)))
    axes.yaxis.set_major_locator(FixedLocator(range(len(parts))))
    axes.yaxis.set_major_formatter(FixedFormatter([part.label for part in parts]))
    axes.tick_params(axis="y", length=0)
    if exact:
        axes.axvline(low / (high / low) ** 0.02, color=_RULE, linewidth=0.8)
    for line, part in enumerate(parts):
        nulls = [value or edge for value in part.nulls(measure)]
        if nulls:
            axes.plot(
                [min(nulls), max(nulls)],
                [line] * 2,
                color=_RULE,
                linewidth=7.0,
                alpha=0.75,
                solid_capstyle="butt",
            )
        if part.limits.get(measure):
            most = part.limits[measure]
            axes.plot([most] * 2, [line - 0.36, line + 0.36], color=INK, linewidth=1.4)
        for split, shift, filled in (("calibration", -0.16, False), ("heldout", 0.16, True)):
            dots = [value or edge for value in part.values(measure, split)]
            axes.plot(
                dots,
                [line + shift] * len(dots),
                color=_PAIR,
                marker="o",
                markersize=4.0,
                markerfacecolor=_PAIR if filled else _PAPER,
                markeredgewidth=0.9,
                linestyle="",
            )
    _legend(axes)


def _nearest(parts: Sequence[Direction]) -> list[Direction]:
    """All comparisons, or of very many those with the smallest errors, in the order they came."""
    if len(parts) <= _MOST_LINES:
        return list(parts)
    size = {id(part): max(part.values("branch_error"), default=float("inf")) for part in parts}
    kept = {id(part) for part in sorted(parts, key=lambda part: size[id(part)])[:_MOST_LINES]}
    return [part for part in parts if id(part) in kept]


def _words(parts: Sequence[Direction], measure: str, title: str) -> str:
    sentences = []
    for part in parts:
        values, nulls = part.values(measure), part.nulls(measure)
        if not values:
            continue
        text = f"{part.label}: {title} {span(values, small)} over {number(len(values), 0)} texts"
        if nulls:
            text += f", nulls {span(nulls, small)}"
        if measure in part.limits:
            text += f", at most {small(part.limits[measure])} counts"
        sentences.append(f"{text}.")
    return " ".join(sentences)


def _data(parts: Sequence[Direction]) -> list[tuple[object, ...]]:
    """One line for the pair and for each null, on every text."""
    found = []
    for part in parts:
        for row in part.rows:
            names = (part.pair, part.reference, part.substitute, row["split"], row["text"])
            found.append((*names, "", *(row[key] for key in _KEYS)))
            found += [(*names, null["null"], *(null[key] for key in _KEYS)) for null in row["nulls"]]
    return found


def _legend(axes: Axes) -> None:
    dot = {"color": _PAIR, "marker": "o", "markersize": 4.0, "markeredgewidth": 0.9, "linestyle": ""}
    axes.plot([], [], markerfacecolor=_PAPER, label="calibration", **dot)
    axes.plot([], [], label="held-out", **dot)
    axes.plot([], [], color=_RULE, linewidth=7.0, alpha=0.75, label="nulls")
    axes.plot([], [], color=INK, linewidth=1.4, label="limit")
    axes.legend(
        loc="upper right",
        frameon=False,
        ncols=4,
        fontsize=FONT_SIZE - 1.5,
        labelcolor=MUTED,
        handletextpad=0.4,
        handlelength=1.0,
        columnspacing=0.9,
        borderaxespad=0.0,
    )
