"""Leak spectra: what the page says and draws against the record, and what a null or a bad control does."""

from __future__ import annotations

import csv
import io
import itertools

import pytest
from matplotlib.figure import Figure
from synthetic_spectra import BAND, UNIT, leak_record

from twinscope.report.drawing import plot_files
from twinscope.report.leak.figures import at_gain_one, figures, projections, spread_over, windows
from twinscope.report.leak.findings import label, outcome, per_block, reasons, remarks, warnings, window
from twinscope.report.leak.tables import comparison, parts, spectra
from twinscope.report.leak.tables import windows as windows_table
from twinscope.report.reading import read_run


@pytest.fixture
def record():
    return leak_record(blocks=3)


def drawn(plot, index=0):
    axes = Figure().add_subplot()
    plot.panels[index].draw(axes)
    return axes


def verticals(axes):
    """(low, high) of every vertical line at its place."""
    return {
        (line.get_xdata()[0], *line.get_ydata())
        for line in axes.lines
        if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]
    }


def column(table, name, which=0):
    place = [index for index, head in enumerate(table.columns) if head == name][which]
    return [row[place] for row in table.rows]


def test_projections_are_drawn_with_intervals_edges_and_the_control(record, build):
    plot = projections(read_run(build(record)))
    assert [panel.title for panel in plot.panels] == [
        "Block 1 · ρ = 8.80×10⁻⁹",
        "Block 2 · ρ = 4.73×10⁻⁹",
        "Block 3 · ρ = 4.47×10⁻⁹",
    ]
    axes = drawn(plot, 2)
    rows = [row for row in record["rows"] if (row["block"], row["beta_sign"]) == (3, 1)]
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert ([row["gain"] for row in rows], [row["projection"] for row in rows]) in lines
    intervals = verticals(axes)
    for row in rows:
        assert (row["gain"], row["projection_low"], row["projection_high"]) in intervals
    # The mean projection stands beside, at a slightly larger gain.
    means = next(ys for xs, ys in lines if len(xs) == len(rows) and xs[0] > rows[0]["gain"])
    assert means == [row["mean_projection"] for row in rows]
    control = record["summary"]["control"]
    beside = next(xs[0] for xs, ys in lines if len(xs) == 1 and ys == [control["projection"][2]])
    assert beside < 1
    assert (beside, control["projection_low"][2], control["projection_high"][2]) in intervals
    assert axes.get_yscale() == "symlog"
    assert axes.get_xscale() == "log"
    band = axes.patches[0]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((-BAND, BAND))
    for edge in ("gain_low", "gain_high"):
        assert (record["summary"][edge][2], 0, 1) in intervals
    assert drawn(plot, 0).get_ylim() == axes.get_ylim()
    low, high = axes.get_ylim()
    assert low < min(row["projection_low"] for row in record["rows"])
    assert high > BAND
    assert "No mean projection exists in block 2" in plot.reading
    assert f"{rows[0]['projection']:.3f}".replace("-", "−") in plot.panels[2].words


def test_one_panel_for_each_of_at_most_twelve_blocks(build):
    plot = projections(read_run(build(leak_record(blocks=30))))
    shown = [int(panel.title.split()[1]) for panel in plot.panels]
    assert (len(shown), shown[0], shown[-1]) == (12, 1, 30)
    assert max(b - a for a, b in itertools.pairwise(shown)) <= 3
    assert "Shown: 12 of 30 blocks" in plot.reading
    assert len({row[0] for row in plot.rows}) == 30
    assert spread_over([1, 2], 12) == [1, 2]


def test_windows_are_bars_whose_missing_edges_are_arrows(record, build):
    summary = record["summary"]
    run = read_run(build(record))
    assert summary["gain_high"][0] is None
    assert window(run, 1) == (summary["gain_low"][0], 2.0**22)
    plot = windows(run)
    axes = drawn(plot)
    lines = [(list(line.get_xdata()), list(line.get_ydata()), line.get_marker()) for line in axes.lines]
    assert ([summary["gain_low"][2], summary["gain_high"][2]], [3, 3], "None") in lines
    assert ([summary["gain_low_low"][2], summary["gain_low_high"][2]], [3, 3], "None") in lines
    assert ([2.0**22], [1], ">") in lines
    assert [place for _, place, marker in lines if marker == "<"] == []
    assert [place[0] for x, place, marker in lines if marker == "D" and x == [5268.0]] == [1, 2, 3]
    assert "no edge (inside the band at the largest gain" in plot.panels[0].words
    assert "Still inside the band at an end of the measured gains: block 1 at the largest" in warnings(run)[0]


def test_a_block_without_a_window_says_so(record, build):
    for row in record["rows"]:
        if row["block"] == 2:
            row["projection"] = -0.5
    reason = "no gain is inside the band (nearest: -0.5 at gain 1)"
    for key in ("gain_low", "gain_high"):
        for suffix in ("", "_low", "_high"):
            record["summary"][f"{key}{suffix}"][1] = None
            before = record["summary"].get(f"{key}{suffix}_reason")
            text = f"block 2: {reason}"
            record["summary"][f"{key}{suffix}_reason"] = f"{before}; {text}" if before else text
    run = read_run(build(record))
    assert window(run, 2) is None
    assert [text.get_text() for text in drawn(windows(run)).texts] == ["no gain inside ±0.02"]
    assert f"Block 2 has no window: {reason}." in windows(run).panels[0].words
    assert "No measured gain brings block 2 inside ±0.02." in outcome(run)
    assert column(windows_table(run), "gain_low")[1].reason == reason
    # Once is enough.
    assert column(windows_table(run), "from")[1].reason is None


def test_reasons_of_a_list_are_told_apart():
    part = {
        "gain": [None, 1.0, None, None],
        "gain_reason": "block 1, 3: it is zero; then some; block 4: block 4 is odd",
        "all": [None, None],
        "all_reason": "nothing was measured",
    }
    assert reasons(part, "gain") == {
        1: "it is zero; then some",
        3: "it is zero; then some",
        4: "block 4 is odd",
    }
    assert reasons(part, "all") == {1: "nothing was measured", 2: "nothing was measured"}


def test_odd_even_and_ratio_per_block(record, build):
    plot = at_gain_one(read_run(build(record)))
    summary = record["summary"]
    axes = drawn(plot)
    series = [list(line.get_ydata()) for line in axes.lines]
    assert summary["odd"] in series
    assert summary["even"] in series
    assert summary["control"]["projection"] in series
    heights = {part[1:] for part in verticals(axes)}
    assert (summary["even_low"][1], summary["even_high"][1]) in heights
    assert (summary["odd_low"][1], summary["odd_high"][1]) in heights
    axes = drawn(plot, 1)
    assert summary["displacement_ratio"] in [list(line.get_ydata()) for line in axes.lines]
    assert [UNIT, UNIT] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_yscale() == "log"


def test_sentences_of_a_healthy_run(record, build):
    run = read_run(build(record))
    at_one = [row["projection"] for row in record["rows"] if row["gain"] == row["beta_sign"] == 1]
    text = outcome(run)
    assert f"{min(at_one):.3f} to {max(at_one):.3f} over 3 blocks".replace("-", "−") in text
    assert "where the control reads" in text
    low, high = max(record["summary"]["gain_low"]), min(filter(None, record["summary"]["gain_high"]))
    assert f"Gains from {low:.3g} to {high / 1e4:.2f}×10⁴ keep every block inside ±0.02." in text
    first, control, advice = remarks(run)
    assert first.startswith("Self-test passed. Null: BP against BP")
    assert "Planted: thresholds" in first
    assert control.startswith("Control: linear read")
    assert "displacement 4.40×10⁻⁵, which is gain 5268" in advice
    assert label(run) == ""


def test_amp_is_named_wherever_a_reader_may_begin(build):
    run = read_run(build(leak_record(blocks=2, study="amp")))
    assert label(run) == "Study: EP in amp, read by an fp32 instrument"
    assert "EP ran in amp" in warnings(run)[0]
    assert all("EP in amp" in plot.title for plot in figures(run))
    assert "EP in amp" in spectra(run).caption


def test_a_control_or_a_self_test_that_fails_is_a_warning(record, build):
    record["summary"]["control"]["projection"][1] = -0.03
    record["summary"]["self_test"]["planted"]["passed"] = False
    run = read_run(build(record))
    found = warnings(run)
    assert found[0].startswith("The self-test failed (planted)")
    assert found[1].startswith("The control reads −0.0300 in block 2, outside ±0.02")
    assert remarks(run)[0].startswith("Self-test failed.")


def test_added_batches_name_what_was_recomputed(record, build):
    record["summary"] |= {"extended_from": [8], "recomputed": ["group means of B", "mean_projection"]}
    found = " ".join(warnings(read_run(build(record))))
    assert "(8 before, 16 now); recomputed from all of them: group means of B and mean_projection." in found


def test_a_run_without_a_result_has_no_spectrum(record, build):
    run = read_run(build(record, result=False))
    assert (run.verb, run.rows, run.journaled) == ("leak", (), len(record["rows"]))
    assert outcome(run) == "No leak has been measured."
    assert figures(run) == []
    assert f"after {len(record['rows'])} units of work" in warnings(run)[0]


def test_a_failed_self_test_gives_its_reason(record, build):
    record |= {
        "status": "failed",
        "reason": "the self-test failed: null",
        "summary": {},
        "rows": [],
        "claims": [],
    }
    assert "This run failed (the self-test failed: null)" in warnings(read_run(build(record)))[0]


def test_every_number_is_in_the_tables_and_the_csv(record, build):
    run = read_run(build(record))
    table = spectra(run)
    assert len(table.rows) == len(record["rows"])
    first = record["rows"][0]
    for name in (
        "projection",
        "mean_projection",
        "proj_on_bp",
        "leak_squared",
        "rel_leak",
        "half_split",
        "cosine",
    ):
        assert column(table, name)[0].value == first[name], name
    missing = [index for index, cell in enumerate(column(table, "block")) if cell.value == 2]
    assert column(table, "mean_projection")[missing[0]].text == "– [1]"
    assert table.note == "[1] the denominator is not clearly positive: 8e-05."
    assert column(parts(run), "high", 2)[1].value == record["summary"]["control"]["projection_high"][1]
    lines = list(
        csv.DictReader(io.StringIO(plot_files(projections(run))["projection-over-gain.csv"].decode()))
    )
    assert len(lines) == len(record["rows"]) + 3
    assert float(lines[0]["projection"]) == first["projection"]
    assert [line["gain"] for line in lines[-3:]] == ["control"] * 3
    rows = comparison({"a": run, "b": read_run(build(leak_record(blocks=2, study="amp"), name="b"))}).rows
    assert [row[2].text for row in rows] == ["fp32", "amp"]


def test_lists_shorter_than_the_model_are_padded(record, build):
    record["summary"]["gain_low"] = record["summary"]["gain_low"][:1]
    run = read_run(build(record))
    assert per_block(run, "gain_low")[1:] == [None, None]
    assert len(figures(run)) == 3
