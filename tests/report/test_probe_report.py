"""Probes: bars at the best later call, rates as read, and no word about any model."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from synthetic_scans import probe_record

from twinscope.report.page import render
from twinscope.report.probe.figures import figures
from twinscope.report.probe.findings import outcome, remarks, warnings
from twinscope.report.probe.tables import comparison, machine, matmul
from twinscope.report.reading import read_run

CONFIG = 'name = "machine"\n'


@pytest.fixture
def record():
    return probe_record()


@pytest.fixture
def run(record, build):
    return read_run(build(record, name="machine", config=CONFIG))


def drawn(plot, index):
    axes = Figure().add_subplot()
    plot.panels[index].draw(axes)
    return axes


def test_bars_begin_at_0_and_end_at_the_best_later_call(run, record):
    (plot,) = figures(run)
    axes = drawn(plot, 0)
    assert axes.get_xlim()[0] == 0
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([1e3 * min(row["next_s"]) for row in record["summary"]["matmul"]])
    points = [value for line in axes.lines if line.get_marker() == "o" for value in line.get_xdata()]
    assert len(points) == 12
    first = [value for line in axes.lines if line.get_marker() == "D" for value in line.get_xdata()]
    assert first == pytest.approx([1e3 * row["first_s"] for row in record["summary"]["matmul"]])


def test_rates_that_exist_are_bars(run):
    axes = drawn(figures(run)[0], 1)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["memory", "bf16\nto fp32"]
    # 4404.6 million values of two bytes.
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([11518.7, 4404.6e6 * 2 / 2**20])


def test_sentences(run):
    assert outcome(run) == (
        "This machine multiplies fp32 matrices at up to 103 GFLOP/s with 1 thread and 206 GFLOP/s with 2 "
        "threads; the process that held NumPy alone peaked at 84 MiB. It says nothing about any model."
    )
    said = remarks(run)
    assert said[1] == "The disk's rate is not known: the file's pages stayed in memory."
    assert said[2].startswith("bf16 becomes fp32 at 4405 million values per second")
    assert said[3] == "A first call takes up to 3.08 times the best of the later ones."
    assert warnings(run) == []


def test_a_limited_container_is_told(record, build):
    record["summary"]["memory"]["limit_mib"] = 2048.0
    del record["summary"]["memory"]["limit_mib_reason"]
    (text,) = warnings(read_run(build(record, name="machine", config=CONFIG)))
    assert text == "A control group limits this process to 2048 MiB of memory."


def test_tables(run, record):
    assert [row[5].value for row in matmul(run).rows] == [
        row["gflop_per_s"] for row in record["summary"]["matmul"]
    ]
    cells = {row[0].text: row[1] for row in machine(run).rows}
    assert cells["read from the disk, MiB/s"].reason == "the file's pages stayed in memory"
    assert cells["limit of the control group, MiB"].reason == "no control group limits this process"
    assert cells["memory, MiB"].text == "24106"
    (side,) = comparison({"here": run}).rows
    assert [cell.text for cell in side] == ["here", "complete", "2", "24106", "206", "–", "11519", "4405"]


def test_a_probe_that_was_stopped(record, build):
    record |= {"status": "stopped", "reason": "the time ran out", "summary": {}}
    record["rows"] = record["rows"][:2]
    run = read_run(build(record, name="machine", config=CONFIG))
    assert machine(run) is None
    assert len(matmul(run).rows) == 2
    assert "the time ran out" in warnings(run)[0]
    page = render([run.path]).read_text(encoding="utf-8")
    assert page.count("<figure") == 1
