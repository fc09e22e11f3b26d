"""Searches for neurons: counts over correlation, every null draw, shares, R², changes, and what is said."""

from __future__ import annotations

from math import sqrt

import pytest
from matplotlib.figure import Figure
from synthetic_neurons import LAYERS, MARGIN, PAIRS, neurons_record

from twinscope.lab.record import headline, load_record
from twinscope.report.neurons.figures import figures
from twinscope.report.neurons.findings import facts, label, outcome, remarks, warnings
from twinscope.report.neurons.tables import (
    analytic,
    comparison,
    found_matches,
    layers,
    null,
    replacements,
    sets,
    tables,
)
from twinscope.report.page import render
from twinscope.report.reading import read_run

CONFIG = 'name = "neurons"\n'


@pytest.fixture
def record():
    return neurons_record()


@pytest.fixture
def run(record, build):
    return read_run(build(record, name="neurons", config=CONFIG))


def drawn(plot, place):
    axes = Figure().add_subplot()
    plot.panels[place].draw(axes)
    return axes


def rows(record, kind):
    return [row for row in record["rows"] if row["kind"] == kind]


def test_a_curve_counts_the_neurons_at_or_beyond_a_correlation(run, record):
    axes = drawn(figures(run)[0], 0)
    threshold = record["summary"]["null"]["threshold"]
    verticals = [
        line.get_xdata()[0] for line in axes.lines if line.get_label() in ("null, 5 %", "floor of R²")
    ]
    assert verticals == [sqrt(0.5), threshold]
    curves = [line for line in axes.lines if line.get_label().startswith("layer")]
    assert [line.get_label() for line in curves] == [f"layer {layer}" for layer in LAYERS]
    for line, row in zip(curves, rows(record, "search"), strict=True):
        values = [abs(value) for value in row["correlation"]]
        x, y = line.get_data()
        assert len(x) > 80
        for place, height in list(zip(x, y, strict=True))[1:]:
            assert height == sum(value >= place for value in values)
        assert y[-1] == len(values)


def test_neurons_that_add_nothing_have_no_match_that_counts(record, build):
    first = rows(record, "search")[0]
    first["silent"] = [0, 5]
    first["correlation"][0] = first["correlation"][5] = 1.0
    plot = figures(read_run(build(record, name="neurons", config=CONFIG)))[0]
    line = next(line for line in drawn(plot, 0).lines if line.get_label() == "layer 3")
    assert line.get_xdata()[1] < 1.0
    assert line.get_ydata()[-1] == 198
    assert [row[2] for row in plot.rows[:6]] == [1, 0, 0, 0, 0, 1]


def test_every_null_draw_stands_beside_the_observed(run, record):
    axes = drawn(figures(run)[0], 1)
    assert [text.get_text() for text in axes.get_yticklabels()] == [*(f"layer {n}" for n in LAYERS), "all"]
    ticks = {
        line.get_ydata()[0]: sorted(line.get_xdata())
        for line in axes.lines
        if line.get_marker() == "|" and len(line.get_xdata())
    }
    for place in range(len(LAYERS)):
        assert ticks[place] == sorted(row["maxima"][place] for row in rows(record, "null"))
    assert ticks[len(LAYERS)] == sorted(row["maximum"] for row in rows(record, "null"))
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    summary = record["summary"]["layers"]
    assert dots == [part[key] for part in summary for key in ("largest_correlation", "median_correlation")]


def test_shares_of_the_layers_where_matches_lie(run, record):
    axes = drawn(figures(run)[1], 0)
    shown = [text.get_text() for text in axes.texts]
    expected = [
        f"{100 * row['best_layer'].count(layer) / len(row['best_layer']):.0f} %"
        for row in rows(record, "search")
        for layer in LAYERS
    ]
    assert shown == expected
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(layer) for layer in LAYERS]


def test_matches_stand_at_both_of_their_r2(run, record):
    axes = drawn(figures(run)[1], 1)
    found = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    for name, chosen in (
        ("confirmed", lambda match: match["confirmed"]),
        ("not confirmed", lambda match: match["beyond_null"] and not match["confirmed"]),
        ("within the null", lambda match: not match["beyond_null"]),
    ):
        expected = [
            (part["r2_calibration"], part["r2_heldout"])
            for match in rows(record, "match")
            if chosen(match)
            for part in match["directions"]
        ]
        assert found[name] == expected
        assert expected
    floors = [line for line in axes.lines if line.get_linewidth() == 1.1 and len(line.get_xdata()) == 2]
    assert floors[0].get_ydata()[0] == floors[1].get_xdata()[0] == 0.5


def test_an_r2_far_below_0_stays_on_the_page(record, build):
    rows(record, "match")[-1]["directions"][0]["r2_heldout"] = -7.0
    axes = drawn(figures(read_run(build(record, name="neurons", config=CONFIG)))[1], 1)
    lowest = min(y for line in axes.lines for y in line.get_ydata())
    assert lowest == axes.get_ylim()[0] == -0.25


def test_changes_over_the_number_of_neurons(run, record):
    plot = figures(run)[2]
    assert [panel.title.partition(":")[0] for panel in plot.panels] == ["Forward", "Backward"]
    limits = set()
    for place, way in enumerate(("forward", "backward")):
        axes = drawn(plot, place)
        limits.add(axes.get_ylim())
        assert [text.get_text() for text in axes.get_xticklabels()] == [str(pairs) for pairs in PAIRS]
        for stand, name in (("best", "matched"), ("random", "random"), ("zeroed", "zeroed")):
            parts = [
                part
                for part in record["summary"]["replaced"]
                if part["way"] == way and part["stand"] == stand
            ]
            line = next(line for line in axes.lines if line.get_label() == name)
            assert list(line.get_ydata()) == [part["delta_nll"] for part in parts]
            ends = [
                tuple(other.get_ydata())
                for other in axes.lines
                if other.get_linewidth() == 1.3 and other.get_color() == line.get_color()
            ]
            assert ends == [(part["low"], part["high"]) for part in parts]
        everything = [end for part in record["summary"]["replaced"] for end in (part["low"], part["high"])]
        assert axes.get_ylim()[0] < min(everything)
        assert axes.get_ylim()[1] > max(*everything, MARGIN)
    assert len(limits) == 1


def test_sentences(run, record):
    said = outcome(run)
    assert said.startswith(
        "6 pairs among 800 neurons of 4 layers respond alike beyond every null, on calibration and "
        "held-out text and in both directions; the closest is layers."
    )
    best = max(
        (part for match in record["summary"]["duplicates"] for part in match["directions"]),
        key=lambda part: abs(part["correlation"]),
    )
    assert f"correlation of +{best['correlation']:.3f} and a held-out R² of {best['r2_heldout']:.3f}." in said
    costs = {
        (part["way"], part["stand"]): part for part in record["summary"]["replaced"] if part["pairs"] == 100
    }
    assert (
        "the 100 best pairs by the other changes held-out loss by "
        f"{costs['forward', 'best']['delta_nll']:+.3f}" in said
    )
    assert f"zeroing those neurons by {costs['forward', 'zeroed']['delta_nll']:+.3f} and" in said
    assert said.endswith("nats per token. It ends at candidate.")
    assert facts(run)[1:] == ["layers 3, 11, 18 and 26", "2,048 tokens of calibration, 2,048 held-out"]
    heard = " ".join(remarks(run))
    assert "is exceeded by chance in 5 % of searches" in heard
    assert "Neurons replaced by themselves change the loss of a text by at most 0 nats" in heard
    assert "would save 172,800 parameters (0.33 MiB), which counts for nothing here" in heard
    assert warnings(run) == [
        "With the 1 best pair, setting the neurons to zero keeps the loss as well: that replacing keeps "
        "it says little."
    ]
    assert label(run) == ""


def test_without_duplicates_the_largest_correlation_is_told(build):
    record = neurons_record(found=0)
    for part in record["summary"]["layers"]:
        part |= {"beyond_null": 0, "largest_correlation": 0.41}
    run = read_run(build(record, name="none", config=CONFIG))
    reached = record["summary"]["null_max_correlation"]
    assert outcome(run).startswith(
        "None of 800 neurons of 4 layers has a duplicate in another place: the largest correlation is 0.410, "
        f"where redrawn weights reach {reached:.3f}."
    )
    record["summary"]["layers"][0]["beyond_null"] = 3
    run = read_run(build(record, name="few", config=CONFIG))
    assert "3 exceed the null on calibration, and none is confirmed both ways" in outcome(run)


def test_warnings_come_in_the_order_of_their_weight(record, build):
    summary = record["summary"]
    summary["parity"]["passed"] = False
    summary["instrument"] = {"passed": False, "largest_change": 0.002}
    summary["warnings"] = ["only 512 tokens of calibration text"]
    summary["planted"] = True
    run = read_run(build(record, name="weak", config=CONFIG))
    said = warnings(run)
    assert said[0].startswith("Parity was not shown")
    assert said[1] == "Only 512 tokens of calibration text."
    assert any("change the loss of a text by at most 0.00200 nats" in text for text in remarks(run))
    assert label(run).startswith("Planted weights")


def test_tables(run, record):
    assert [table.name for table in tables(run)] == [
        "neuron-matches", "neuron-layers", "neuron-sets", "neuron-replaced", "neuron-analytic", "neuron-null",
    ]  # fmt: skip
    for table in tables(run):
        assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}, table.name
    found = found_matches(run).rows
    assert [row[0].text for row in found[:2]] == ["layers.3.mlp.1", "layers.11.mlp.11"]
    assert [row[8].text for row in found[::2]] == ["confirmed"] * 6 + ["not confirmed", "within the null"]
    assert found[-1][7].reason == "a stronger pair has one of the two neurons"
    assert [row[0].value for row in layers(run).rows] == list(LAYERS)
    assert [row[5].value for row in sets(run).rows] == [3456 * pairs / 1024 for pairs in PAIRS]
    assert [row[3].value for row in replacements(run).rows] == [
        part["delta_nll"] for part in record["summary"]["replaced"]
    ]
    assert analytic(run).rows[0][0].text == "parallel gate and up"
    assert [row[-1].value for row in null(run).rows] == [row["maximum"] for row in rows(record, "null")]
    (side,) = comparison({"one": run}).rows
    assert [cell.text for cell in side][3:5] == ["released", "800"]
    assert [cell.text for cell in side][8:] == ["6", "candidate", "471"]


def test_a_stopped_search_shows_what_it_has(record, build):
    record |= {"status": "stopped", "reason": "stopped by SIGTERM", "summary": {}, "rows": []}
    run = read_run(build(record, name="neurons", config=CONFIG))
    assert outcome(run) == "No neuron has been judged."
    assert "stopped by SIGTERM" in warnings(run)[0]
    assert figures(run) == tables(run) == facts(run) == []
    render([run.path])


def test_the_page_holds_it(record, build):
    path = build(record, name="neurons", config=CONFIG)
    page = render([path]).read_text(encoding="utf-8")
    assert page.count("<figure") == 3
    for name in ("neurons-search", "neurons-matches", "neurons-replaced"):
        assert (path / "figures" / f"{name}.png").stat().st_size > 10_000
    assert len((path / "figures" / "neurons-search.csv").read_text().splitlines()) == 801
    assert headline(load_record(path)) is not None
