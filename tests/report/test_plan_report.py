"""Plans: pairs at their depths with their nulls, texts escaped, the seal in the first sentence."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from synthetic_costs import plan_record

from twinscope.report.page import render
from twinscope.report.plan.figures import figures, layer
from twinscope.report.plan.findings import facts, label, outcome, remarks, warnings
from twinscope.report.plan.tables import comparison, tables
from twinscope.report.reading import read_run

CONFIG = 'name = "reuse"\n'


@pytest.fixture
def run(build):
    return read_run(build(plan_record(), name="reuse", config=CONFIG))


def test_pairs_stand_at_their_depths_beside_their_nulls(run):
    (plot,) = figures(run)
    axes = Figure().add_subplot()
    plot.panels[0].draw(axes)
    lines = [line for line in axes.lines if len(line.get_xdata())]
    pairs = [tuple(line.get_xdata()) for line in lines if line.get_linewidth() == 2.0]
    nulls = [tuple(line.get_xdata()) for line in lines if line.get_markersize() == 4.0]
    assert pairs == [(3, 7), (7, 11), (3, 3)]
    assert nulls == [(4, 8), (8, 12)]
    shown = [text.get_text() for text in axes.texts]
    assert shown == ["Attention", "2", "3 – 7", "7 – 11", "Q and k norm", "1", "3"]
    assert axes.get_xlim()[1] > 23
    assert plot.panels[0].words == "Attention: 3 – 7 and 7 – 11. Q and k norm: 3."
    assert plot.rows[0] == (
        "pair/3-7", "attention", "layers.3.self_attn", "layers.7.self_attn",
        "layers.4.self_attn layers.8.self_attn",
    )  # fmt: skip


def test_a_site_without_a_layer():
    assert layer("embedding") == -1


def test_sentences(run):
    assert outcome(run) == (
        "3 pairs, 3 texts of 32 tokens and every threshold are fixed under the seal fedcba987654 since "
        "2026-11-30T17:51:53Z, before any activation was read."
    )
    assert label(run) == "Random weights: no scan of them can rise above parity"
    assert facts(run) == ["qwen3, 24 layers of 2,048", "random weights", "3 pairs", "3 texts"]
    assert remarks(run) == [
        "Pairs: Neighbours in depth.",
        "Texts: 2 for calibration, 1 held out; BOS: None: the tokenizer puts nothing before a text. No two "
        "share more than 0.100 of the shorter one's runs of words.",
        "Planned peak of memory: 423 MiB.",
        "One layer has no norms.",
    ]
    assert warnings(run) == []


def test_texts_that_repeat_each_other_are_warned_of(build):
    record = plan_record()
    record["summary"]["largest_overlap"] = 0.19
    said = warnings(read_run(build(record, name="alike", config=CONFIG)))
    assert said[0].startswith("Two texts share 0.190 of the shorter one's runs of words")
    assert len(said) == 1


def test_tables_hold_pairs_and_texts(run):
    found = {table.name: [[cell.text for cell in row] for row in table.rows] for table in tables(run)}
    assert list(found) == ["plan-pairs", "plan-texts", "plan-model"]
    assert found["plan-pairs"][0] == [
        "attention", "layers.3.self_attn", "layers.7.self_attn", "layers.4.self_attn",
        "layers.8.self_attn and layers.4.self_attn",
    ]  # fmt: skip
    assert found["plan-pairs"][2][3:] == ["none", "none"]
    assert found["plan-texts"][2] == [
        "held-out", "sotu, from 2", "32", "0.100", "222222222222", "And what we hold <b>2</b>",
    ]  # fmt: skip
    assert ["seal", "fedcba9876543210" * 4] in found["plan-model"]
    assert ["planted", "no"] in found["plan-model"]
    rows = comparison({"a": run}).rows
    assert [cell.text for cell in rows[0]][2:6] == ["fedcba987654", "2026-11-30T17:51:53Z", "qwen3", "3"]


def test_the_page_escapes_texts_and_survives_a_plan_that_was_not_sealed(build):
    whole = render([build(plan_record(), name="reuse", config=CONFIG)]).read_text(encoding="utf-8")
    assert "And what we hold &lt;b&gt;2&lt;/b&gt;" in whole
    record = plan_record() | {"status": "stopped", "reason": "SIGTERM", "summary": {}, "rows": []}
    path = build(record, name="stopped", config=CONFIG)
    run = read_run(path)
    assert outcome(run) == "Nothing has been sealed."
    assert figures(run) == tables(run) == facts(run) == remarks(run) == []
    assert "This run was stopped (SIGTERM)" in render([path]).read_text(encoding="utf-8")
