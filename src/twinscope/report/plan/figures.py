"""The figure of a plan: which layers are compared, and which modules serve as nulls.

Covers rows, words, data and ink. Layers count from 0, as the names of tensors do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from twinscope.report.axes import MUTED
from twinscope.report.drawing import PALETTE, PANEL_WIDTH, Panel, Plot
from twinscope.report.lanes import LANE, NAME, hollow, key, panel_height, prepare, write_lane, write_name
from twinscope.report.plan.findings import rows_of
from twinscope.report.reading import Row, RunData
from twinscope.report.scan.findings import GROUPS
from twinscope.report.wording import count, listed, number

_PAIR = PALETTE["arm-1"][0]
_KEY = {
    "pair": {"color": _PAIR, "marker": "o", "markersize": 5.0, "linewidth": 2.0},
    "null": hollow("o", MUTED, 4.0),
}
_MOST = 40


def figures(run: RunData) -> list[Plot]:
    """The one figure, if pairs were chosen."""
    rows = rows_of(run, "pair")
    if not rows:
        return []
    kinds = dict.fromkeys(row["of"] for row in rows)
    groups: dict[str, list[Row]] = {kind: [row for row in rows if row["of"] == kind] for kind in kinds}
    # Each line is a pair; of very many, the first.
    shown = {kind: part[:_MOST] for kind, part in groups.items()}
    height = panel_height([[len(part) for part in shown.values()]], len(_KEY))
    layers = (run.summary.get("model") or {}).get("layers") or 1 + max(
        layer(site) for row in rows for site in (row["left"], row["right"])
    )
    words = " ".join(
        f"{_kind(kind)}: " + listed([_ends(row) for row in part]) + "." for kind, part in groups.items()
    )
    more = " Of many pairs the first are drawn; all are in the table." if shown != groups else ""
    return [
        Plot(
            name="plan-pairs",
            title="Which layers are compared",
            reading=(
                "Each line is one pair of modules at their depths; hollow: the other modules that stand "
                f"beside it as nulls.{more}"
            ),
            panels=(Panel("Pairs by depth", words, partial(draw_pairs, shown, layers, height)),),
            columns=("pair", "kind", "left", "right", "null_modules"),
            rows=tuple(
                (
                    row["key"],
                    row["of"],
                    row["left"],
                    row["right"],
                    " ".join(dict.fromkeys([*row["others_left"], *row["others_right"]])),
                )
                for row in rows
            ),
            size=(PANEL_WIDTH, height),
        )
    ]


def draw_pairs(groups: Mapping[str, Sequence[Row]], layers: int, height: int, axes: Axes) -> None:
    """A lane for each pair."""
    axes.set_xlabel("layer")
    axes.set_xlim(-0.8, layers - 0.2)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 0)))
    place = prepare(axes, height, len(_KEY))
    for kind, rows in groups.items():
        write_name(axes, place, _kind(kind), count(len(rows)))
        place += NAME
        for row in rows:
            ends = [layer(row["left"]), layer(row["right"])]
            middle = place + LANE / 2
            write_lane(axes, middle, _ends(row))
            nulls = {layer(site) for site in (*row["others_left"], *row["others_right"])} - set(ends)
            axes.plot(sorted(nulls), [middle] * len(nulls), **hollow("o", MUTED, 4.0))
            axes.plot(ends, [middle] * 2, color=_PAIR, marker="o", markersize=5.0, linewidth=2.0)
            place += LANE
    key(axes, _KEY)


def layer(site: str) -> int:
    """The layer in the name of a site; -1 where it has none."""
    found = re.search(r"layers\.(\d+)", site)
    return int(found[1]) if found else -1


def _kind(kind: str) -> str:
    name = GROUPS.get(kind, kind.replace("_", " "))
    return name[0].upper() + name[1:]


def _ends(row: Row) -> str:
    """``3 – 7``; of two modules of one layer, that layer."""
    left, right = layer(row["left"]), layer(row["right"])
    return str(left) if left == right else f"{left} – {right}"
