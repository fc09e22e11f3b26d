"""Frontiers: every point at its cost and cosine, what does not count is grey, the reference is a star."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from synthetic_costs import cost_record, frontier_rows

from twinscope.report.cost.figures import figures
from twinscope.report.cost.findings import outcome, remarks, warnings
from twinscope.report.cost.frontier_findings import grounds, undominated
from twinscope.report.cost.frontier_tables import frontier_points
from twinscope.report.drawing import PALETTE
from twinscope.report.reading import read_run

K1, K3, GREY = PALETTE["arm-1"][0], PALETTE["arm-3"][0], PALETTE["rule"][0]


@pytest.fixture
def record():
    return cost_record(arms=("ep", "bp"), shapes=("model",), frontier=True)


@pytest.fixture
def run(record, build):
    return read_run(build(record, name="frontier", config='name = "frontier"\n'))


def drawn(run, panel=0):
    plot = next(plot for plot in figures(run) if plot.name == "cost-frontier")
    axes = Figure().add_subplot()
    plot.panels[panel].draw(axes)
    return plot, axes


def marks(axes, size):
    """{(x, y, shape): colour} of the marks of one size."""
    found = {}
    for line in axes.lines:
        alone = len(line.get_xdata()) == 1 and line.get_marker() not in ("", "None")
        if alone and line.get_markersize() == size:
            (x,), (y,) = line.get_xdata(), line.get_ydata()
            found[round(x, 6), float(f"{y:.4g}"), line.get_marker()] = line.get_color()
    return found


def test_a_panel_for_every_start_and_displacement(run):
    assert grounds(run) == [("trained", 1e-3), ("trained", 1e-2), ("fresh", 1e-3), ("fresh", 1e-2)]
    plot, axes = drawn(run)
    assert [panel.title for panel in plot.panels] == [
        "Trained, ρ = 0.001", "Trained, ρ = 0.01", "Fresh, ρ = 0.001", "Fresh, ρ = 0.01",
    ]  # fmt: skip
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    worst, best = axes.get_ylim()
    assert best < 1e-9 < 0.031 < worst  # nearer is higher


def test_points_stand_at_their_measured_cost_and_their_count_is_hollow(run):
    _, axes = drawn(run)
    assert marks(axes, 5.2) == {
        (1.1, 1e-9, "D"): PALETTE["reference"][0],
        (1.71, 2e-4, "o"): K1,
        (2.7, 1e-9, "s"): K1,
        (3.0, 4e-5, "^"): K3,
        (3.0, 1e-5, "s"): GREY,
    }
    counted = marks(axes, 3.6)
    assert sorted(x for x, *_ in counted) == pytest.approx([1.004, 1.614, 2.604, 2.904, 2.904])
    # The ring of a symmetric nudge, and the star of the reference.
    assert [x for x, *_ in marks(axes, 10)] == pytest.approx([2.7])
    assert list(marks(axes, 9)) == [(2.77, 0.031, "*")]
    assert [text.get_text() for text in axes.texts] == ["reference run"]


def test_intervals_and_the_worst_block(run):
    _, axes = drawn(run)
    lines = [line for line in axes.lines if line.get_linewidth() == 0.8 and len(line.get_xdata()) == 2]
    across = [tuple(line.get_xdata()) for line in lines if line.get_ydata()[0] == line.get_ydata()[1]]
    down = [tuple(line.get_ydata()) for line in lines if line.get_xdata()[0] == line.get_xdata()[1]]
    assert (1.61, pytest.approx(1.81)) in across
    assert (pytest.approx(2e-4), pytest.approx(6e-4)) in down


def test_the_second_displacement_keeps_the_control(run):
    _, axes = drawn(run, 1)
    found = marks(axes, 5.2)
    assert len(found) == 5
    assert (1.1, 1e-9, "D") in found
    assert (1.71, 2e-3, "o") in found


def test_the_frontier_is_a_line_through_what_none_betters(run):
    assert [part["label"] for part in undominated(run, "trained", 1e-3)] == [
        "k1-fused-positive-linear",
        "k1-unfused-symmetric-linear",
    ]
    plot, axes = drawn(run)
    steps = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert list(steps.get_xdata())[:2] == [1.61, 2.6]
    assert list(steps.get_ydata()) == pytest.approx([2e-4, 1e-9, 1e-9])
    assert (
        "k1-fused-positive-linear costs 1.61 times BP's FLOPs and 1.71 [1.61, 1.81]" in plot.panels[0].words
    )
    assert "3 of 4 points count" in plot.panels[0].words


def test_without_a_clock_the_count_is_the_point(record, build):
    record["rows"] = [row for row in record["rows"] if not row["kind"].startswith("frontier")]
    record["rows"] += frontier_rows(measured=False)
    del record["summary"]["frontier"]
    run = read_run(build(record, name="untimed", config='name = "frontier"\n'))
    _, axes = drawn(run)
    assert marks(axes, 3.6) == {}
    assert sorted(x for x, *_ in marks(axes, 5.2)) == pytest.approx([1.004, 1.614, 2.604, 2.904, 2.904])
    table = frontier_points(run)
    assert table is not None
    assert table.note == "Frontier.measure = false."
    assert [cell.text for cell in table.rows[1]][6:9] == ["–"] * 3


def test_references_of_a_run_without_a_summary_come_from_its_config(record, build):
    config = 'name = "a"\n[[frontier.references]]\nname = "b"\ncost_ratio = 2.0\nmedian_cosine = 0.9\n'
    _, axes = drawn(read_run(build(record, name="going", config=config, result=False)))
    assert list(marks(axes, 9)) == [(2.0, 0.1, "*")]


def test_sentences(run):
    assert outcome(run).endswith(
        "Cheapest with a median block cosine of 0.99 or more: k1-fused-positive-linear at 1.61 times BP's "
        "FLOPs (trained, ρ = 0.001: cosine 0.99980; trained, ρ = 0.01: cosine 0.9980; fresh, ρ = 0.001: "
        "cosine 0.99980; fresh, ρ = 0.01: cosine 0.9980)."
    )
    said = " ".join(remarks(run))
    assert "12 of 18 points of the frontier count" in said
    assert "Reference run: 2.77× at a cosine of about 0.969 (12 blocks, amp; published rates)" in said
    assert "Here 8 points of the frontiers are as cheap in FLOPs and as near" in said
    assert warnings(run) == [
        "4 points besides the controls do not count as equilibrium propagation (the residual is above 0.1 in "
        "4; largest residual 0.540): a high cosine there shows nothing about it."
    ]


def test_costs_that_were_not_timed_in_quiet_are_counted(record, build):
    costs = [row for row in record["rows"] if row["kind"] == "frontier_cost"]
    costs[0]["controlled"] = False
    for row in costs[:3]:
        row["windows_agree"] = False
    run = read_run(build(record, name="loud", config='name = "frontier"\n'))
    assert warnings(run)[0].startswith(
        "Of 5 settings timed for the frontier, 1 were not timed on a machine known to be quiet, and the "
        "windows of 3 do not agree"
    )


def test_the_table_says_why_a_point_does_not_count(run):
    table = frontier_points(run)
    assert table is not None
    rows = [[cell.text for cell in row] for row in table.rows]
    assert {len(row) for row in rows} == {len(table.columns)} == {len(table.numeric)}
    assert rows[0][:4] == ["trained", "–", "k0", "0"]
    assert rows[0][-3:] == ["no", "", "K = 0 is backpropagation: the control."]
    assert rows[1][1:9] == [
        "0.00100",
        "k1-fused-positive-linear",
        "1",
        "1.610",
        "1.614",
        "1.710",
        "1.610",
        "1.810",
    ]
    assert [row[-2] for row in rows[1:5]] == ["cheapest", "on it", "", ""]
    assert rows[4][-3:] == ["no", "", "The residual 0.540 is above 0.1."]
