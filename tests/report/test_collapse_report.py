"""Collapses: points, lines and residuals against the record, and where the law fails in words."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from synthetic_spectra import UNIT, collapse_record

from twinscope.report.collapse.figures import figures
from twinscope.report.collapse.findings import fitted, law, outcome, remarks, warnings
from twinscope.report.collapse.tables import comparison, controls, models, points
from twinscope.report.reading import read_run


@pytest.fixture
def record():
    return collapse_record(widths=(32, 64), blocks=4)


def drawn(plot, index=0):
    axes = Figure().add_subplot()
    plot.panels[index].draw(axes)
    return axes


def test_every_point_is_drawn_and_controls_are_hollow(record, build):
    (plot,) = figures(read_run(build(record)))
    for index, unit in enumerate(("one", "predicted")):
        axes = drawn(plot, index)
        found = {
            (line.get_xdata()[0], line.get_ydata()[0]): (line.get_color(), line.get_markerfacecolor())
            for line in axes.lines
            if len(line.get_xdata()) == 1
        }
        placed = [row for row in record["rows"] if row["gain_low"] is not None]
        assert len(found) == len(placed) == 11
        colours = {}
        for row in placed:
            height = row["gain_low"] / (1.0 if unit == "one" else row["predicted"])
            colour, face = found[row["displacement_ratio"], height]
            assert (face == colour) == (row["role"] == "point")
            colours.setdefault(row["model"], set()).add(colour)
        assert all(len(part) == 1 for part in colours.values())
        assert len(set.union(*colours.values())) == len(colours) == 2
        assert axes.get_xscale() == axes.get_yscale() == "log"


def test_the_two_lines_have_the_slopes_of_the_record(record, build):
    run = read_run(build(record))
    axes = drawn(figures(run)[0])
    slopes = []
    for line in axes.lines:
        x, y = line.get_xdata(), line.get_ydata()
        if len(x) > 2:
            slopes.append(math.log(y[-1] / y[0]) / math.log(x[-1] / x[0]))
    assert slopes == pytest.approx([record["summary"]["slope"], -1.0], rel=1e-9)
    summary = record["summary"]
    assert law(run, 2e-8) == pytest.approx(summary["constant"] * UNIT / 2e-8)
    assert fitted(run, 1.0) == pytest.approx(math.exp(summary["intercept"]))
    # The least-squares line goes through the centre of the points.
    rows = [row for row in record["rows"] if row["role"] == "point" and row["gain_low"] is not None]
    across = sum(math.log(row["displacement_ratio"]) for row in rows) / len(rows)
    up = sum(math.log(row["gain_low"]) for row in rows) / len(rows)
    assert math.log(fitted(run, math.exp(across)) or 0) == pytest.approx(up, rel=1e-9)
    low, high = summary["slope_low"], summary["slope_high"]
    band = axes.collections[0].get_paths()[0].vertices
    last = max(band[:, 0])
    ends = sorted({y for x, y in band if x == last})
    expected = [math.exp(up + slope * (math.log(last) - across)) for slope in (low, high)]
    assert (ends[0], ends[-1]) == pytest.approx(expected, rel=1e-6)


def test_sentences(record, build):
    run = read_run(build(record))
    slope, low = record["summary"]["slope"], record["summary"]["slope_low"]
    text = outcome(run)
    assert f"slope {slope:.3f} (95 % interval {low:.3f}".replace("-", "−") in text
    assert "Over 7 blocks of 2 models" in text
    assert "the threshold law predicts −1." in text
    assert f"gain_low times the ratio is {record['summary']['constant']:.2f}" in text
    fails, beside = remarks(run)
    assert fails == "Where the law fails: 1 of 60 blocks have no gain_low and are in no fit."
    assert beside.endswith("4 blocks, width 64 at β 1.00×10⁻⁷: 1.05 times.")
    assert warnings(run)[0].startswith("The points come from 2 models")


def test_a_law_that_holds_and_no_controls(record, build):
    record["summary"]["fails"] = []
    record["summary"]["controls"]["runs"] = []
    record["rows"] = [row for row in record["rows"] if row["role"] == "point"]
    run = read_run(build(record))
    assert remarks(run) == ["The law was not seen to fail at any of these blocks."]
    assert warnings(run)[-1].startswith("No run at another β")
    assert controls(run) is None


def test_without_a_slope_the_points_remain(record, build):
    for key in ("slope", "slope_low", "slope_high", "slope_dof", "intercept"):
        record["summary"] |= {key: None, f"{key}_reason": "1 points do not determine a slope"}
    run = read_run(build(record))
    assert outcome(run) == "No slope was measured: 1 points do not determine a slope."
    assert len([line for line in drawn(figures(run)[0]).lines if len(line.get_xdata()) > 2]) == 1


def test_tables(record, build):
    run = read_run(build(record))
    table = points(run)
    assert len(table.rows) == len(record["rows"])
    for cells, row in zip(table.rows, record["rows"], strict=True):
        assert cells[7].value == row["gain_low"]
        times = None if row["residual"] is None else math.exp(row["residual"])
        assert cells[10].value == times
    missing = next(cells for cells in table.rows if cells[7].value is None)
    assert missing[7].reason == "inside the band at the smallest gain (1)"
    assert [cell.reason for cell in missing[8:]] == [None] * 3
    assert [cell.reason for cell in models(run).rows[0][3:6]] == [None, "too few blocks", None]
    assert controls(run).rows[0][5].value == 0.05
    assert comparison({"a": run}).rows[0][2].value == record["summary"]["slope"]


def test_without_a_result_nothing_is_drawn(record, build):
    run = read_run(build(record, result=False))
    assert figures(run) == []
    assert "No slope was measured." in outcome(run)
