"""The figures of a swap: changes of the loss in both directions beside their nulls, or a sweep's matrices.

Covers rows, words and data; panels.py and matrix.py put them on axes. Changes are in nats per token,
divergences in bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from twinscope.report.changes import linear_part
from twinscope.report.drawing import PANEL_WIDTH, Panel, Plot
from twinscope.report.reading import Row, RunData
from twinscope.report.swap.findings import (
    Entry,
    better_left_out,
    directions,
    entries,
    is_sweep,
    kind_name,
    kinds,
    null_name,
    rows_of,
    title,
)
from twinscope.report.swap.matrix import MATRIX_SIZE, draw_matrix, draw_substitutes, steps_for
from twinscope.report.swap.panels import Group, Lane, draw_lanes, height_of, scale_of
from twinscope.report.wording import arrow, compact, count, interval, known, listed, signed, small, span

_MEASURES = ("nll", "delta_nll", "logit_js", "logit_topk_1", "logit_topk_5", "logit_topk_10")
_COLUMNS = ("direction", "split", "text", "null", "nll_before", *_MEASURES)
_SWEPT = tuple(field.name for field in fields(Entry))


def figures(run: RunData) -> list[Plot]:
    """The figures that the run has data for, in the order of the report."""
    if is_sweep(run):
        names = [kind_name(kind["kind"]) for kind in kinds(run)]
        return [
            # Modules of one kind that do not fit in each other's place have a matrix for each shape.
            _sweep(run, kind, name, f"-{place + 1}" if names.count(name) > 1 else "")
            for place, (kind, name) in enumerate(zip(kinds(run), names, strict=True))
        ]
    found = directions(run)
    if not found:
        return []
    plots = [_losses(run, found)]
    return [*plots, _divergences(run, found)] if any(_has_js(run, part) for part in found) else plots


def _losses(run: RunData, found: Sequence[Mapping[str, Any]]) -> Plot:
    margin, kind = run.summary["margin"], _kind(run)
    panels = [_loss_groups(run, part) for part in found]
    scale = scale_of(panels, "change of the loss, nats per token", margin, margin)
    height = height_of(panels)
    return Plot(
        name="swap-loss",
        title="What replacing changes of the loss",
        reading=(
            "3 ← 4 is module 4 in the place of module 3, in the whole model. A dot is one text, a diamond "
            "the mean over texts with its intervals; tinted is the margin. A direction is equivalent if its "
            "90 % interval lies within the margin, and different if its 95 % interval lies outside. Grey: "
            "nulls in the same place. The axis is linear within the margin and logarithmic beyond."
        ),
        panels=tuple(
            Panel(title(part, kind), _loss_words(part), partial(draw_lanes, groups, scale, height))
            for part, groups in zip(found, panels, strict=True)
        ),
        columns=_COLUMNS,
        rows=tuple(_data(run)),
        size=(PANEL_WIDTH, height),
    )


def _divergences(run: RunData, found: Sequence[Mapping[str, Any]]) -> Plot:
    panels = [_js_groups(run, part) for part in found]
    values = [value for panel in panels for group in panel for lane in group.lanes for value in lane.texts]
    scale = scale_of(panels, "divergence of the next token, bits", linear_part(values), None)
    height = height_of(panels)
    return Plot(
        name="swap-divergence",
        title="What replacing changes of the next token",
        reading=(
            "Jensen–Shannon divergence between the next-token distributions of the model as it is and of the "
            "model with the replacement, mean over the tokens of a held-out text: a dot is one text, a "
            "diamond the mean over texts. Grey: nulls in the same place. Share of tokens with the same most "
            "probable next token at the right. The axis is linear up to its first tick and logarithmic "
            "beyond."
        ),
        panels=tuple(
            Panel(title(part, _kind(run)), _js_words(part), partial(draw_lanes, groups, scale, height))
            for part, groups in zip(found, panels, strict=True)
        ),
        columns=_COLUMNS,
        rows=tuple(_data(run)),
        size=(PANEL_WIDTH, height),
    )


def _sweep(run: RunData, kind: Mapping[str, Any], name: str, mark: str) -> Plot:
    margin = run.summary["margin"]
    zero = [part["delta_nll"] for part in kind["zero"]]
    steps = steps_for([*(entry.delta_nll for entry in entries(kind)), *zero], margin)
    return Plot(
        name=f"sweep-{name.lower().replace(' ', '-')}{mark}",
        title=f"Every {name} in the place of every other",
        reading=(
            "First: change of the held-out loss with the column's module in the place of the row's; last, "
            f"with no update at all. The palest tint is within the margin of ±{margin:g}; a dot marks "
            "what is equivalent after correction for the number of pairs; the diagonal is the module "
            "itself, exactly 0. Second: the same by site. Where the bar lies below all dots, leaving the "
            "module out costs less than any substitute."
        ),
        panels=(
            Panel(
                f"{name[0].upper()}{name[1:]}: row replaced by column",
                _matrix_words(run, kind),
                partial(draw_matrix, kind, steps),
            ),
            Panel(
                "Every substitute, by site",
                _substitute_words(kind),
                partial(draw_substitutes, kind, margin),
            ),
        ),
        columns=_SWEPT,
        rows=tuple(
            [tuple(getattr(entry, key) for key in _SWEPT) for entry in entries(kind)]
            + [
                (part["site"], "none", part["delta_nll"], part["low"], part["high"], *[None] * 6)
                for part in kind["zero"]
            ]
        ),
        size=MATRIX_SIZE,
    )


def _loss_groups(run: RunData, part: Mapping[str, Any]) -> list[Group]:
    heldout = rows_of(run, part["direction"], "heldout")
    calibration = rows_of(run, part["direction"], "calibration")
    lanes = [
        Lane(
            "held-out",
            tuple(row["delta_nll"] for row in heldout),
            part["delta_nll"],
            (part["low"], part["high"]),
            (part["low_90"], part["high_90"]),
        )
    ]
    if calibration:
        lanes.append(Lane("calibr.", tuple(row["delta_nll"] for row in calibration), hollow=True))
    nulls = [
        Lane(
            null_name(null["null"]),
            tuple(entry["delta_nll"] for entry in _nulls(heldout, null["null"])),
            null["delta_nll"],
            (null["low"], null["high"]),
            null=True,
        )
        for null in part["nulls"]
    ]
    verdict = part["verdict"] or "no verdict"
    return [
        Group("Replaced", f"{compact(part['delta_nll'])}, {verdict}", tuple(lanes)),
        Group("Nulls", "", tuple(nulls)),
    ]


def _js_groups(run: RunData, part: Mapping[str, Any]) -> list[Group]:
    heldout = rows_of(run, part["direction"], "heldout")
    replaced = Lane("held-out", tuple(known(row["logit_js"] for row in heldout)), part["logit_js"])
    nulls = [
        Lane(
            null_name(null["null"]),
            tuple(known(entry["logit_js"] for entry in _nulls(heldout, null["null"]))),
            null["logit_js"],
            null=True,
        )
        for null in part["nulls"]
        if null["logit_js"] is not None
    ]
    agreed = part["logit_topk_1"]
    same = "" if agreed is None else f"same token {100 * agreed:.0f} %"
    return [Group("Replaced", same, (replaced,)), Group("Nulls", "", tuple(nulls))]


def _loss_words(part: Mapping[str, Any]) -> str:
    change = interval(part["delta_nll"], part["low"], part["high"])
    nulls = [f"{null_name(null['null'], True)} {compact(null['delta_nll'])}" for null in part["nulls"]]
    beside = f" Nulls: {listed(nulls)}." if nulls else ""
    return (
        f"{part['by']} in the place of {part['replaced']}: {change} nats per token over "
        f"{count(part['texts'])} texts, {part['verdict'] or 'no verdict'}.{beside}"
    )


def _js_words(part: Mapping[str, Any]) -> str:
    nulls = [
        f"{null_name(null['null'], True)} {small(null['logit_js'])}"
        for null in part["nulls"]
        if null["logit_js"] is not None
    ]
    beside = f" Nulls: {listed(nulls)}." if nulls else ""
    return (
        f"{part['by']} in the place of {part['replaced']}: {small(part['logit_js'])} bits, at most "
        f"{small(part['logit_js_worst'])} on a text.{beside}"
    )


def _matrix_words(run: RunData, kind: Mapping[str, Any]) -> str:
    every = sorted(entries(kind), key=lambda entry: abs(entry.delta_nll))
    mildest = [f"{arrow(entry.replaced, entry.by)} {signed(entry.delta_nll)}" for entry in every[:5]]
    within = sum(entry.verdict == "equivalent" for entry in every)
    return (
        f"{count(within)} of {count(len(every))} are equivalent within ±{run.summary['margin']:g}. The "
        f"mildest: {listed(mildest)}. All: {span([entry.delta_nll for entry in every])} nats per token."
    )


def _substitute_words(kind: Mapping[str, Any]) -> str:
    zero = [part["delta_nll"] for part in kind["zero"]]
    worse = better_left_out(kind)
    return (
        f"With no update: {span(zero)} nats per token. It costs less than the best substitute at "
        f"{count(len(worse))} of {count(len(kind['sites']))} sites."
    )


def _data(run: RunData) -> list[tuple[object, ...]]:
    """One line for the replacement and for each null, on every text."""
    found = []
    for row in run.rows:
        names = (row["direction"], row["split"], row["text"])
        found.append((*names, "", row["nll_before"], *(row[key] for key in _MEASURES)))
        found += [
            (*names, null["null"], row["nll_before"], *(null[key] for key in _MEASURES))
            for null in row["nulls"]
        ]
    return found


def _nulls(rows: Sequence[Row], name: str) -> list[Mapping[str, Any]]:
    return [null for row in rows for null in row["nulls"] if null["null"] == name]


def _has_js(run: RunData, part: Mapping[str, Any]) -> bool:
    return any(row["logit_js"] is not None for row in rows_of(run, part["direction"], "heldout"))


def _kind(run: RunData) -> str:
    return (run.summary.get("pair") or {}).get("kind", "")
