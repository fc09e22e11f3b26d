"""Parity checks: differences against tolerances, exact equality at zero, and what the check cannot show."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from synthetic_costs import check_record

from twinscope.report.check.figures import figures
from twinscope.report.check.findings import facts, label, outcome, remarks, warnings
from twinscope.report.check.tables import comparison, tables
from twinscope.report.page import render
from twinscope.report.reading import read_run

CONFIG = 'name = "a-model"\n'


@pytest.fixture
def read(build):
    return lambda record, name="a-model": read_run(build(record, name=name, config=CONFIG))


def dots(plot, panel):
    axes = Figure().add_subplot()
    plot.panels[panel].draw(axes)
    line = next(line for line in axes.lines if line.get_marker() == "o")
    return axes, list(line.get_xdata()), list(line.get_ydata())


def test_differences_stand_at_their_values_and_zero_below_the_axis(read):
    (plot,) = figures(read(check_record()))
    assert [panel.title for panel in plot.panels] == [
        "Final states",
        "Loss of a token",
        "What enters a layer",
    ]
    axes, places, values = dots(plot, 0)
    assert places == [1, 2, 3, 4]
    assert values[1:] == [2e-7, 3e-7, 4e-6]
    assert axes.get_ylim()[0] < values[0] < 1e-7
    ticks = dict(
        zip(axes.yaxis.get_major_locator()(), (t.get_text() for t in axes.get_yticklabels()), strict=True)
    )
    assert ticks[values[0]] == "0"
    assert 1e-5 in [line.get_ydata()[0] for line in axes.lines]
    assert dots(plot, 1)[2][1:] == [2e-6] * 3
    _, places, values = dots(plot, 2)
    assert places == [0, 1, 2]
    assert values[1:] == [1e-8, 2e-8]
    assert "final states: 0 to 4.00×10⁻⁶ over 4 texts; tolerance 1.00×10⁻⁵" in plot.words
    assert ("final states", 3, 4e-6, 1e-5) in plot.rows


def test_a_check_of_the_whole_model_has_no_layers(read):
    run = read(check_record(layers=0))
    assert len(figures(run)[0].panels) == 2
    assert [table.name for table in tables(run)] == ["check-texts", "check-compared"]
    assert warnings(run) == []


def test_sentences_where_parity_holds(read):
    run = read(check_record())
    assert outcome(run) == (
        "The streamed forward equals the library's, layer by layer, on 4 texts of 32 tokens: final states "
        "differ by 4.00×10⁻⁶ of their size at most (tolerance 1.00×10⁻⁵), losses of tokens by 2.00×10⁻⁶ nats "
        "at most (tolerance 1.00×10⁻⁴)."
    )
    assert label(run) == ""
    assert facts(run) == ["a-model", "released weights", "library layer by layer"]
    assert remarks(run) == ["The process that streamed took 446 MiB at its peak.", "The head is tied."]
    assert len(warnings(run)) == 1
    assert warnings(run)[0].startswith("The library ran one layer at a time")


def test_sentences_where_it_does_not(read):
    record = check_record(passed=False)
    record["summary"]["weights"] = "unstated"
    for row in record["rows"]:
        if row["kind"] == "text":
            row["source"] = "random"
    run = read(record)
    assert "does not equal" in outcome(run)
    assert outcome(run).endswith("The first part that differs is layer 1.")
    said = warnings(run)
    assert said[0] == "Parity does not hold: nothing read through the streamed forward can be relied on."
    assert said[2].startswith("All texts are random tokens")
    assert said[3].startswith("Nobody has stated")


@pytest.mark.parametrize(("weights", "words"), [("random", "Random weights"), ("planted", "Planted weights")])
def test_weights_that_training_did_not_leave_are_a_label(read, weights, words):
    record = check_record()
    record["summary"]["weights"] = weights
    assert label(read(record)).startswith(words)


def test_tables_and_checks_side_by_side(read, build):
    first, second = read(check_record()), read(check_record(passed=False), name="other")
    for table in (*tables(first), comparison({"a": first, "b": second})):
        assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}
    rows = [[cell.text for cell in row] for row in comparison({"a": first, "b": second}).rows]
    assert [row[4] for row in rows] == ["yes", "no"]
    assert rows[1][5] == "0.0400"
    text = [[cell.text for cell in row] for row in tables(first)[0].rows]
    assert text[3] == ["4", "real", "4.00×10⁻⁶", "2.00×10⁻⁶", "6.000000", "6.000000"]


def test_a_check_that_failed_has_a_page(build):
    record = check_record() | {"status": "failed", "reason": "<b>no</b>", "summary": {}, "rows": []}
    path = build(record, name="failed", config=CONFIG)
    run = read_run(path)
    assert outcome(run) == "Nothing has been compared."
    assert figures(run) == tables(run) == facts(run) == remarks(run) == []
    text = render([path]).read_text(encoding="utf-8")
    assert "This run failed (&lt;b&gt;no&lt;/b&gt;)" in text
