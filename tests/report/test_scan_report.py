"""Scans: every text is a dot at its value, nulls and limits stand where they are, levels in sentences."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from synthetic_scans import scan_record

from twinscope.lab.record import headline, load_record
from twinscope.report.page import render
from twinscope.report.reading import read_run
from twinscope.report.scan.figures import figures
from twinscope.report.scan.findings import directions, label, outcome, remarks, warnings
from twinscope.report.scan.tables import comparison, limits, nulls, pairs, pooled, tables, texts

CONFIG = 'name = "reuse"\n'


@pytest.fixture
def record():
    return scan_record()


@pytest.fixture
def run(record, build):
    return read_run(build(record, name="reuse", config=CONFIG))


def drawn(plot, title):
    axes = Figure().add_subplot()
    next(panel for panel in plot.panels if panel.title == title).draw(axes)
    return axes


def dots(axes):
    """{line: values}, calibration and held-out together; a marker stands for each text."""
    found = {}
    for line in axes.lines:
        if line.get_marker() == "o" and len(line.get_xdata()):
            found.setdefault(round(line.get_ydata()[0]), []).extend(line.get_xdata())
    return found


def test_a_figure_for_each_kind_with_the_measures_it_has(run):
    titles = {plot.name: [panel.title for panel in plot.panels] for plot in figures(run)}
    shared = ["divergence of attention", "divergence of the next token"]
    assert titles == {
        "scan-attention": ["branch error", *shared],
        "scan-mlp": ["branch error", "divergence of the next token"],
        "scan-q-and-k-norm": ["branch error", "error of the norm's output", *shared],
    }


def test_every_text_is_a_dot_at_its_value(run, record):
    mlp = next(plot for plot in figures(run) if plot.name == "scan-mlp")
    for title, measure in (("branch error", "branch_error"), ("divergence of the next token", "logit_js")):
        axes = drawn(mlp, title)
        expected = {}
        for row in record["rows"]:
            if row["kind"] == "mlp":
                expected.setdefault((row["pair"], row["reference"]), []).append(row[measure])
        found = dots(axes)
        assert [sorted(found[line]) for line in sorted(found)] == [
            sorted(values) for values in expected.values()
        ]
        assert axes.get_xscale() == "log"


def test_nulls_are_a_band_without_the_module_itself_and_the_limit_a_bar(run, record):
    mlp = next(plot for plot in figures(run) if plot.name == "scan-mlp")
    axes = drawn(mlp, "branch error")
    lines = [line for line in axes.lines if len(line.get_xdata())]
    bands = {round(line.get_ydata()[0]): line.get_xdata() for line in lines if line.get_linewidth() == 7}
    bars = [line.get_xdata()[0] for line in lines if line.get_linewidth() == 1.4]
    rows = [row for row in record["rows"] if row["kind"] == "mlp" and row["reference"] == "layers.5.mlp"]
    values = [null["branch_error"] for row in rows for null in row["nulls"] if null["null"] != "self"]
    assert list(bands[0]) == [min(values), max(values)]
    assert min(values) > 0
    assert bars == [0.15] * 4
    assert [text.get_text() for text in axes.get_yticklabels()] == ["5 ← 6", "6 ← 5", "8 ← 17", "17 ← 8"]


def test_exactly_0_has_a_place_of_its_own(run):
    attention = next(plot for plot in figures(run) if plot.name == "scan-attention")
    axes = drawn(attention, "branch error")
    (edge,) = set(dots(axes)[2])
    assert axes.get_xticks()[0] == edge
    assert axes.get_xticklabels()[0].get_text() == "0"
    smallest = min(value for values in dots(axes).values() for value in values if value != edge)
    assert axes.get_xlim()[0] < edge < smallest
    assert "7 ← 12: branch error 0 over 8 texts, nulls" in attention.words


def test_norms_within_a_layer_are_named(run):
    names = [part.label for part in directions(run) if part.group == "q and k norm"]
    assert names == ["9 q ← k", "9 k ← q"]


def test_very_many_pairs_are_cut_to_the_nearest(record, build):
    rows = [row for row in record["rows"] if row["pair"] == "layers.5.mlp=layers.6.mlp"]
    for copy in range(30):
        for row in rows:
            pair = f"layers.5.mlp=layers.{copy + 30}.mlp"
            error = 2.0 + copy
            record["rows"].append(
                row | {"pair": pair, "key": f"{row['key']}/{copy}", "branch_error": error, "logit_js": 0.1}
            )
    mlp = next(
        plot for plot in figures(read_run(build(record, name="reuse", config=CONFIG))) if "mlp" in plot.name
    )
    assert "Shown are the 40 nearest of 64" in mlp.reading
    assert len(dots(drawn(mlp, "branch error"))) == 40
    assert len({row[0] for row in mlp.rows}) == 32


def test_sentences(run, record):
    assert outcome(run) == (
        "2 of 6 pairs computed the same function on all texts, both inputs and beyond every null: "
        "layers.7.self_attn with layers.12.self_attn and layers.8.mlp with layers.17.mlp. "
        "The other 4 end at parity."
    )
    assert label(run).startswith("Planted weights")
    said = remarks(run)
    assert said[0] == "The streamed forward equals the library's (by a check before the scan)."
    assert "sealed as 0123456789ab" in said[1]
    assert said[2] == "Peak memory 458 MiB, planned 470, budget 512."
    assert said[3].startswith("6 pairs of q and k norms")
    assert warnings(run) == [
        "8 texts of 32 tokens: what holds on all of them is an effect size against nulls, not a probability; "
        "no p-value over so few is small."
    ]


def test_without_a_candidate_the_closest_pair_is_told(record, build):
    for pair in record["summary"]["pairs"]:
        pair["level"] = "parity"
    record["rows"] = [row for row in record["rows"] if row["pair"] == "layers.5.mlp=layers.6.mlp"]
    run = read_run(build(record, name="reuse", config=CONFIG))
    errors = [row["branch_error"] for row in record["rows"] if row["reference"] == "layers.5.mlp"]
    text = outcome(run)
    assert text.startswith("None of 6 pairs")
    assert "They end at parity. The closest, layers.6.mlp in the place of layers.5.mlp" in text
    assert f"{min(errors):.3f} to {max(errors):.2f}" in text
    assert text.endswith("at most 0.150 would count.")


def test_what_limits_the_answer(record, build):
    summary = record["summary"]
    summary |= {"planted": False, "weights": "random"}
    summary["parity"] |= {"passed": False, "detail": "there is no receipt"}
    summary["pairs"][0] |= {"failed_on": "instrument"}
    summary["pairs"][1] |= {"exploratory": True}
    run = read_run(build(record, name="reuse", config=CONFIG))
    assert label(run) == "Random weights: nothing here can rise above parity"
    found = warnings(run)
    assert found[0] == "Parity was not shown, so no pair can be a candidate."
    assert "layers.3.self_attn=layers.4.self_attn: a module differs from itself" in found[1]
    assert found[2].endswith("layers.7.self_attn=layers.12.self_attn.")
    assert remarks(run)[0].startswith("The streamed forward was not shown to equal")


def test_tables(run, record):
    assert [table.name for table in tables(run)] == ["pairs", "pooled", "limits", "nulls", "texts"]
    assert [row[2].text for row in pairs(run).rows].count("candidate") == 2
    assert pairs(run).rows[-1][1].text == "q and k norm"
    assert len(pooled(run).rows) == 6 * 2 * 2
    table = texts(run)
    assert len(table.rows) == len(record["rows"]) == 96
    for cells, row in zip(table.rows, record["rows"], strict=True):
        assert cells[4].value == row["branch_error"]
        assert cells[10].value == row["logit_js"]
        nearest = min(null["branch_error"] for null in row["nulls"] if null["null"] != "self")
        assert cells[-1].value == nearest
    first = limits(run).rows[0]
    assert [cell.text for cell in first][2:] == ["branch error", "0.150", "mean", "0.800"]
    itself = [row for row in nulls(run).rows if row[2].text == "the module itself"]
    assert {cell.value for row in itself for cell in row[3:]} == {0.0}
    (side,) = comparison({"one": run}).rows
    assert [cell.text for cell in side][3:] == ["planted", "6", "2", "458", "470"]


def test_a_stopped_scan_shows_what_it_has(record, build):
    record |= {"status": "stopped", "reason": "stopped by SIGTERM", "summary": {}, "rows": []}
    run = read_run(build(record, name="reuse", config=CONFIG))
    assert outcome(run) == "No pair has been judged."
    assert "stopped by SIGTERM" in warnings(run)[0]
    assert figures(run) == tables(run) == []
    render([run.path])


def test_the_page_holds_it(record, build):
    path = build(record, name="reuse", config=CONFIG)
    page = render([path]).read_text(encoding="utf-8")
    assert page.count("<figure") == 3
    assert "Planted weights" in page
    assert (path / "figures" / "scan-attention.png").stat().st_size > 10_000
    assert headline(load_record(path)) is not None
