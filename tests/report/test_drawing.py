"""The mechanics of drawing: label spacing, safe names, determinism, threads, colours and ids."""

from __future__ import annotations

import io
import re
import sys
import threading
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from pyarrow import parquet
from scipy.optimize import minimize

from twinscope.report.drawing import (
    PALETTE,
    Panel,
    Plot,
    block_colours,
    panel_svg,
    plot_files,
    short_label,
    spread,
)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours after WCAG 2, section 1.4.3."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def plot(title: str = "A title", value: float = 1.0) -> Plot:
    def draw(axes):
        axes.plot([0, 1], [0, value], color=PALETTE["arm-1"][0], marker="o")
        axes.text(0.5, 0.5, title)

    return Plot(
        "a-plot", "A plot", "Read it.", (Panel(title, "In words.", draw),) * 2, ("x", "y"), ((0, None),)
    )


def test_contrast_function_against_the_published_extremes():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_every_colour_can_be_seen_on_its_paper():
    papers = PALETTE["paper"]
    for name, colours in PALETTE.items():
        if name in ("ink", "muted", "alert"):
            assert min(map(contrast, colours, papers)) >= 4.5, name
        if name.startswith("arm-") or name == "reference":
            assert min(map(contrast, colours, papers)) >= 4.0, name
    for _, light, dark in block_colours(12):
        assert min(contrast(light, papers[0]), contrast(dark, papers[1])) >= 3.0
    assert (
        len({light for light, _ in PALETTE.values()} | {b[1] for b in block_colours(24)}) == len(PALETTE) + 24
    )


def test_block_colours_grow_lighter_in_order():
    for place in (1, 2):
        steps = [contrast(colour[place], "#000000") for colour in block_colours(8)]
        assert steps == sorted(steps)


@pytest.mark.parametrize("places", [[0.5], [0.1, 0.12, 0.13, 0.9], [0.3, 0.3, 0.3], [0.0, 0.05, 0.5, 0.51]])
def test_spread_is_the_least_squares_solution(places):
    gap = 0.1
    solution = minimize(
        lambda x: float(((x - np.array(places)) ** 2).sum()),
        np.arange(len(places)) * 0.3,
        constraints=[
            {"type": "ineq", "fun": lambda x, i=i: x[i + 1] - x[i] - gap} for i in range(len(places) - 1)
        ],
        tol=1e-12,
    ).x
    np.testing.assert_allclose(spread(places, gap), solution, atol=1e-5)


def test_short_label():
    assert short_label("ep") == "ep"
    assert short_label("a" * 40) == "a" * 15 + "…"
    assert short_label("two\n  words\t") == "two words"
    assert short_label("漢\u0007\ud800x") == "□□□x"


def test_files_are_the_same_whatever_the_settings_and_the_thread():
    expected = plot_files(plot())
    assert sorted(expected) == ["a-plot.csv", "a-plot.parquet", "a-plot.png", "a-plot.svg"]
    assert expected["a-plot.csv"] == b"x,y\n0,\n"
    assert expected["a-plot.png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert b"<dc:date>" not in expected["a-plot.svg"]
    found: list[dict[str, bytes]] = []
    with mpl.rc_context({"lines.linewidth": 9.0, "svg.fonttype": "path", "xtick.major.size": 20.0}):
        before = dict(mpl.rcParams)
        threads = [threading.Thread(target=lambda: found.append(plot_files(plot()))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dict(mpl.rcParams) == before
    assert found == [expected, expected]
    assert plot_files(plot(value=2.0))["a-plot.svg"] != expected["a-plot.svg"]


def test_panel_has_words_own_ids_and_colours_from_the_page():
    title = "<script>alert(1)</script> $x^2$ & co"
    svg = panel_svg(plot(title), 1, "r1-a")
    assert svg.startswith('<svg class="plot" role="img" aria-labelledby="r1-a-title r1-a-words"')
    assert "<script" not in svg
    assert "<!--" not in svg
    # As the panel's title and as a text in it; a dollar sign starts no formula.
    assert svg.count(">&lt;script&gt;alert(1)&lt;/script&gt; $x^2$ &amp; co</text>") == 2
    assert "<style" not in svg
    assert "<metadata" not in svg
    assert "var(--arm-1)" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r'(?:href="|url\()#[^")]*', "", svg))
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("r1-a-") for name in ids)
    used = re.findall(r'(?:href="|url\()#([^")]+)', svg)
    assert used
    assert set(used) <= set(ids)


def test_parquet_holds_the_numbers_of_the_plot(monkeypatch):
    rows = ((1, 0.1, "a", None), (2, None, 3, None), (3, 0.3, "\ud800", None))
    mixed = replace(plot(), columns=("n", "value", "either", "none"), rows=rows)
    table = parquet.read_table(io.BytesIO(plot_files(mixed)["a-plot.parquet"]))
    assert table.column_names == ["n", "value", "either", "none"]
    assert table["n"].to_pylist() == [1, 2, 3]
    assert table["value"].to_pylist() == [0.1, None, 0.3]
    assert table["either"].to_pylist() == ["a", "3", "?"]
    assert table["none"].to_pylist() == [None, None, None]
    # A machine without pyarrow gets the other files.
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert sorted(plot_files(mixed)) == ["a-plot.csv", "a-plot.png", "a-plot.svg"]
