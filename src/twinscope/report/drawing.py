"""How a plot becomes SVG, PNG and CSV: palette, one-panel and composite figures, end-of-line labels.

Covers the mechanics only; what is drawn from a record is in the figures of its verb. Drawing goes through
matplotlib's object interface. Its settings are global to the process, so every drawing holds one
lock and restores them: calls from several threads are safe with each other.
"""

from __future__ import annotations

import csv
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from math import ceil
from typing import Any

import matplotlib as mpl
import matplotlib.style as mpl_style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

# One panel is drawn at the size at which a phone shows it, so that its text never shrinks; a wide
# screen puts panels side by side. One SVG unit is one CSS pixel at that size.
PANEL_WIDTH = 400
PANEL_HEIGHT = 268
# Of small multiples: three stand side by side, and a phone shows them a little larger.
SMALL_PANEL = (292, 212)
FONT_SIZE = 11
# Around the axes; on the right, the labels of the lines need what they need.
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 28, 40

# name: (on light paper, on dark paper). The light value doubles as the placeholder that the page
# replaces by var(--name), so every light value is used once. Lines: Okabe–Ito, darkened or
# lightened to at least 3:1 against the paper.
PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#fefefd", "#15171a"),
    "ink": ("#1c1d1f", "#e9e7e2"),
    "muted": ("#5b6067", "#a7acb3"),
    "rule": ("#c9cbce", "#43474d"),
    "grid": ("#ececed", "#272a2f"),
    "wash": ("#f4f4f1", "#1d2024"),
    "band": ("#ecf2ef", "#1b2522"),
    "alert": ("#9a3412", "#f5a97f"),
    "reference": ("#3a3b3d", "#d3d1cb"),
    "arm-1": ("#0072b2", "#5db5ec"),
    "arm-2": ("#c8500a", "#ff9455"),
    "arm-3": ("#008562", "#35c79f"),
    "arm-4": ("#b0578a", "#e5a1c7"),
    "arm-5": ("#a06c00", "#f0b63a"),
    "arm-6": ("#4b6a9b", "#a8c1ea"),
    # Steps of a map: away from the paper in both schemes, apart in lightness as well as in hue.
    "heat-1": ("#fbe7c8", "#33251a"),
    "heat-2": ("#f8cf94", "#523618"),
    "heat-3": ("#f2ab5c", "#7b4d17"),
    "heat-4": ("#e38434", "#a9671c"),
    "heat-5": ("#c45d1c", "#d5892f"),
    "heat-6": ("#94400f", "#f2b366"),
    "heat-7": ("#5f2709", "#fbe0b6"),
    "cool-1": ("#d3e3f2", "#1b2f42"),
    "cool-2": ("#98c0e1", "#285175"),
    "cool-3": ("#5f9ccd", "#3a74a8"),
}
LINES = ("-", (0, (6, 1.6, 1.2, 1.6)), (0, (1.6, 1.3)), (0, (7, 1.5)), (0, (3.5, 1.4)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

_STYLE: Any = {
    "svg.hashsalt": "twinscope",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "text.parse_math": False,
    "text.color": PALETTE["ink"][0],
    "axes.titlesize": FONT_SIZE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": FONT_SIZE,
    "axes.labelcolor": PALETTE["muted"][0],
    "axes.edgecolor": PALETTE["rule"][0],
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": PALETTE["grid"][0],
    "grid.linewidth": 0.8,
    "xtick.color": PALETTE["rule"][0],
    "ytick.color": PALETTE["rule"][0],
    "xtick.labelcolor": PALETTE["muted"][0],
    "ytick.labelcolor": PALETTE["muted"][0],
    "xtick.labelsize": FONT_SIZE - 1,
    "ytick.labelsize": FONT_SIZE - 1,
    "xtick.minor.bottom": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "figure.facecolor": PALETTE["paper"][0],
}
_lock = threading.RLock()


@dataclass(frozen=True)
class Panel:
    """One set of axes: a title, its content in words, and the function that draws it."""

    title: str
    words: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Plot:
    """One figure of the report: panels, how to read it, its content in words, and its data.

    ``variables`` maps colours used beyond the palette to names of CSS variables; ``size`` is that of a
    panel.
    """

    name: str
    title: str
    reading: str
    panels: tuple[Panel, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    size: tuple[int, int] = (PANEL_WIDTH, PANEL_HEIGHT)

    @property
    def words(self) -> str:
        """What all panels show, in sentences."""
        return " ".join(panel.words for panel in self.panels)


def panel_svg(plot: Plot, index: int, prefix: str) -> str:
    """Panel ``index`` as an ``<svg>`` element for an HTML page; colours are CSS variables.

    Every id starts with ``prefix``, so that many panels live in one document.
    """
    panel = plot.panels[index]
    text, _ = _drawn([panel], 1, plot.size)
    text = text[text.index("<svg") :]
    # The style sheet inside would apply to the whole page; page.css has the same two rules.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    variables = {light: name for name, (light, _) in PALETTE.items()} | dict(plot.variables)
    # A reference such as url(#p0a1b2c) never matches: what follows a colour is no word character.
    text = re.sub(
        r"(?<=: )#[0-9a-f]{6}\b",
        lambda match: f"var(--{variables[match[0]]})" if match[0] in variables else match[0],
        text,
    )
    opening = (
        f'<svg class="plot" role="img" aria-labelledby="{prefix}-title {prefix}-words" '
        f'viewBox="0 0 {plot.size[0]} {plot.size[1]}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{prefix}-title">{escape(f"{plot.title}: {panel.title}")}</title>'
        f'<desc id="{prefix}-words">{escape(panel.words)}</desc>'
    )
    return opening + text[text.index(">") + 1 :].strip()


def plot_files(plot: Plot) -> dict[str, bytes]:
    """The whole plot as files, name to bytes: ``.svg``, ``.png``, its data as ``.csv`` and ``.parquet``.

    The same plot gives the same bytes, whatever the date and the settings of the user's matplotlib. Parquet
    comes along where pyarrow is installed (the extra ``frames``).
    """
    columns = min(3 if plot.size == SMALL_PANEL else 2, len(plot.panels))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(plot.columns)
    writer.writerows([("" if value is None else value) for value in row] for row in plot.rows)
    svg, png = _drawn(plot.panels, columns, plot.size, png=True)
    return {
        f"{plot.name}.svg": svg.encode(),
        f"{plot.name}.png": png,
        # A name from JSON may hold half a surrogate pair, which UTF-8 does not have.
        f"{plot.name}.csv": table.getvalue().encode("utf-8", "replace"),
        **_parquet(plot),
    }


def _parquet(plot: Plot) -> dict[str, bytes]:
    """``{"name.parquet": bytes}``, or nothing without pyarrow; a column of mixed kinds is one of strings."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return {}
    columns: dict[str, Any] = {}
    for place, name in enumerate(plot.columns):
        values = [row[place] for row in plot.rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, UnicodeError):
            said = [None if value is None else str(value) for value in values]
            columns[name] = pa.array(
                [None if text is None else text.encode("utf-8", "replace").decode() for text in said]
            )
    out = io.BytesIO()
    parquet.write_table(pa.table(columns), out)
    return {f"{plot.name}.parquet": out.getvalue()}


def block_colours(count: int) -> list[tuple[str, str, str]]:
    """For blocks 1 … ``count``: (CSS variable, colour on light, colour on dark), from viridis.

    Each paper leaves out the end of the map that has less than 3:1 contrast against it.
    """
    scale = mpl.colormaps["viridis"]
    places = [index / max(1, count - 1) for index in range(count)]
    return [
        (f"block-{count}-{index + 1}", to_hex(scale(0.58 * place)), to_hex(scale(0.40 + 0.60 * place)))
        for index, place in enumerate(places)
    ]


def short_label(name: str, length: int = 16) -> str:
    """``name`` cut to ``length`` characters, with a box for what the figures' font does not have."""
    name = " ".join(name.split())
    with _lock:
        font = get_font(findfont(FontProperties(family="DejaVu Sans")))
        drawable = "".join(
            char if char.isprintable() and font.get_char_index(ord(char)) else "□" for char in name
        )
    return drawable if len(drawable) <= length else drawable[: length - 1].rstrip() + "…"


@dataclass(frozen=True)
class EndLabel:
    """A text for the right end of a line at ``y``, in data units; the leader has the line's colour."""

    y: float
    text: str
    leader: str
    colour: str


def end_labels(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Write labels right of the axes of a panel of the usual height, moved apart where they would touch."""
    to_axes = axes.transScale + axes.transLimits
    heights = {label: float(to_axes.transform((0.0, label.y))[1]) for label in labels}
    ordered = sorted(labels, key=lambda label: heights[label])
    starts = [min(1.0, max(0.0, heights[label])) for label in ordered]
    gap = 1.2 * FONT_SIZE / (PANEL_HEIGHT - _TOP - _BOTTOM)
    for label, start, place in zip(ordered, starts, spread(starts, gap), strict=True):
        axes.plot(
            [1.005, 1.03],
            [start, place],
            transform=axes.transAxes,
            clip_on=False,
            color=label.leader,
            linewidth=1.0,
            solid_capstyle="round",
        )
        axes.text(
            1.04,
            place,
            label.text,
            transform=axes.transAxes,
            color=label.colour,
            va="center",
            size=FONT_SIZE - 0.5,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The nearest places (least squares) to the sorted ``places`` that keep ``gap`` between them."""
    # With i·gap taken off, "at least gap apart" becomes "not decreasing": isotonic regression by
    # pooling adjacent violators.
    pools: list[list[float]] = []
    for index, place in enumerate(places):
        pools.append([place - index * gap, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, weight = pools.pop()
            pools[-1] = [
                (pools[-1][0] * pools[-1][1] + value * weight) / (pools[-1][1] + weight),
                pools[-1][1] + weight,
            ]
    flat = [value for value, weight in pools for _ in range(int(weight))]
    return [value + index * gap for index, value in enumerate(flat)]


@contextmanager
def _matplotlib_settings() -> Iterator[None]:
    with _lock, mpl.rc_context():
        # From the shipped defaults, so that a user's matplotlibrc changes nothing.
        mpl_style.use("default")
        mpl.rcParams.update(_STYLE)
        yield


def _compose(panels: Sequence[Panel], columns: int, size: tuple[int, int]) -> Figure:
    lines = ceil(len(panels) / columns)
    panel_width, panel_height = size
    width, height = columns * panel_width, lines * panel_height
    figure = Figure(figsize=(width / 72, height / 72))
    for index, panel in enumerate(panels):
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_title(panel.title)
        panel.draw(axes)
        # Margins by measure rather than by a layout engine, which draws everything twice.
        labels = [text for text in axes.texts if text.get_position()[0] > 1]
        inner = panel_width - _LEFT - _RIGHT
        inner -= max((_text_width(text.get_text()) + 0.05 * inner for text in labels), default=0.0)
        line, column = divmod(index, columns)
        bottom = (lines - line - 1) * panel_height + _BOTTOM
        inner_height = panel_height - _TOP - _BOTTOM
        left = column * panel_width + _LEFT
        axes.set_position((left / width, bottom / height, inner / width, inner_height / height))
        axes.yaxis.set_label_coords(-(_LEFT - 15) / inner, 0.5)
        axes.xaxis.set_label_coords(0.5, -22 / inner_height)
    return figure


def _text_width(text: str) -> float:
    """Width of an end label, in the units of a panel; the fonts of a page are rarely wider."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    font.set_size(FONT_SIZE - 0.5, 72)
    font.set_text(text)
    return font.get_width_height()[0] / 64


def _drawn(
    panels: Sequence[Panel], columns: int, size: tuple[int, int], png: bool = False
) -> tuple[str, bytes]:
    with _matplotlib_settings():
        figure = _compose(panels, columns, size)
        vector, raster = io.BytesIO(), io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(vector, metadata=nothing)
        if png:
            figure.set_dpi(180)
            FigureCanvasAgg(figure).print_png(raster, metadata={"Software": None})
    return vector.getvalue().decode(), raster.getvalue()
