"""Figures of a run: which panels there are, what they say, what is drawn, and their data."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from matplotlib.figure import Figure

from twinscope.report.drawing import Plot, plot_files
from twinscope.report.reading import read_run
from twinscope.report.train.figures import cosines, differences, figures, losses, states


def made(plot: Plot | None) -> Plot:
    assert plot is not None
    return plot


def drawn(plot: Plot, index: int) -> Any:
    """The axes of one panel, after drawing."""
    axes = Figure().add_subplot()
    plot.panels[index].draw(axes)
    return axes


def line_data(axes, step):
    """Every y that a line of the axes has at x = ``step``."""
    return [
        y for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if x == step
    ]


def test_four_figures_with_a_panel_per_seed_or_arm(record, build):
    plots = figures(read_run(build(record)))
    assert [(plot.name, [panel.title for panel in plot.panels]) for plot in plots] == [
        ("heldout-loss", ["Seed 0", "Seed 1"]),
        ("paired-difference", ["EP − BP"]),
        ("block-cosine", ["EP, seed 0", "EP, seed 1"]),
        (
            "displaced-states",
            ["Displacement: EP, seed 0", "Displacement: EP, seed 1", "Fixed-point residual"],
        ),
    ]


def test_losses_draw_every_arm_and_baseline(record, build):
    plot = made(losses(read_run(build(record))))
    axes = drawn(plot, 1)
    expected = [
        row["val_loss"]
        for row in record["rows"]
        if (row["seed"], row["step"], row["kind"]) == (1, 700, "eval")
    ]
    assert sorted(line_data(axes, 700)) == sorted(expected)
    labels = [text.get_text() for text in axes.texts]
    assert {"unigram 3.11", "bigram 2.50", "trigram 2.07"} < set(labels)
    final = record["summary"]["arms"]["ep"]["per_seed"][1]["val_loss"]
    assert f"EP {final:.3f}" in labels
    assert f"to {final:.3f} at step 2,000" in plot.panels[1].words
    low, high = axes.get_ylim()
    assert low < final < 3.1072 < high


def test_points_above_the_axis_are_counted(record, build):
    first = next(row for row in record["rows"] if row["kind"] == "eval")
    first["val_loss"] = 4.56
    reading = made(losses(read_run(build(record)))).reading
    assert "1 early point lies above the axis (up to 4.56)" in reading


def test_windows_are_drawn_with_their_intervals_and_the_band(record, build):
    plot = made(differences(read_run(build(record))))
    axes = drawn(plot, 0)
    window = record["summary"]["difference"]["ep"]["windows"][-1]
    box = axes.collections[-1].get_paths()[0].get_extents()
    assert (box.y0, box.y1) == pytest.approx((window["low"], window["high"]))
    assert window["start"] <= box.x0 < box.x1 <= window["end"]
    drawn_y = [tuple(line.get_ydata()) for line in axes.lines]
    assert (window["mean"], window["mean"]) in drawn_y
    for seed in window["per_seed"]:
        assert (seed["low"], seed["high"]) in drawn_y
        assert (seed["mean"],) in drawn_y
    band = axes.patches[0]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((-0.015, 0.015))
    assert "within ±0.015" in [text.get_text() for text in axes.texts]
    assert f"95 % interval {window['low']:+.4f} to {window['high']:+.4f}" in plot.panels[0].words


def test_without_windows_the_paired_differences_of_each_seed(record, build):
    plot = made(differences(read_run(build(record, result=False))))
    losses_at = {
        (row["arm"], row["seed"], row["step"]): row["val_loss"]
        for row in record["rows"]
        if row["kind"] == "eval"
    }
    expected = losses_at["ep", 1, 300] - losses_at["bp", 1, 300]
    assert ("ep", 300, 300, 1, expected, None, None, None) in plot.rows
    assert expected in line_data(drawn(plot, 0), 300)
    assert "no windows with intervals yet" in plot.reading


def test_no_differences_without_a_reference(make_record, build):
    run = read_run(build(make_record(arms=("ep",))))
    assert differences(run) is None
    assert [plot.name for plot in figures(run)] == ["heldout-loss", "block-cosine", "displaced-states"]


def test_cosines_on_a_logarithmic_scale_of_the_gap(record, build):
    plot = made(cosines(read_run(build(record))))
    axes = drawn(plot, 0)
    row = next(r for r in record["rows"] if r["kind"] == "gate" and (r["seed"], r["step"]) == (0, 400))
    assert sorted(line_data(axes, 400)) == pytest.approx(sorted(1 - value for value in row["block_cosine"]))
    assert axes.get_yscale() == "log"
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom  # the smaller gap is on top
    axes.figure.canvas.draw()
    ticks = {label.get_text() for label in axes.get_yticklabels()}
    assert {"0.99", "0.995", "0.998", "0.999"} <= ticks
    assert any("K = 0 control, worst: 1 − 2.10×10⁻⁷" in text.get_text() for text in axes.texts)
    worst = min(min(r["block_cosine"]) for r in record["rows"] if r["kind"] == "gate" and r["seed"] == 0)
    assert f"{worst:.4f}" in plot.panels[0].words


def test_a_control_within_the_axis_is_a_line(record, build):
    for row in record["rows"]:
        if row["kind"] == "gate":
            row["control_cosine"] = 0.9951
    axes = drawn(made(cosines(read_run(build(record)))), 0)
    assert len([y for y in line_data(axes, 400) if y == pytest.approx(0.0049)]) == 1


def test_cosines_of_one_and_below_zero_have_a_place(record, build):
    gates = [row for row in record["rows"] if row["kind"] == "gate"]
    gates[0]["block_cosine"] = [1.0, 1.0, -0.5, None]
    gates[0]["block_cosine_reason"] = "the last block has no gradient"
    plot = made(cosines(read_run(build(record))))
    axes = drawn(plot, 0)
    bottom, top = axes.get_ylim()
    heights = line_data(axes, 0)
    assert len(heights) == 3 + 1  # and the control, which is within this axis
    assert all(top <= y <= bottom for y in heights)


def test_states_draw_ratios_residuals_and_limits(record, build):
    plot = made(states(read_run(build(record))))
    rows = [row for row in record["rows"] if row["kind"] == "gate" and row["step"] == 600]
    assert sorted(line_data(drawn(plot, 0), 600)) == sorted(rows[0]["displacement_ratio"])
    axes = drawn(plot, 2)
    assert sorted(line_data(axes, 600)) == sorted(row["residual"] for row in rows)
    assert "limit 0.1" in [text.get_text() for text in axes.texts]
    assert "limit 0.001" in [text.get_text() for text in drawn(plot, 0).texts]


def test_data_of_the_figures_as_csv(record, build):
    files = {}
    for plot in figures(read_run(build(record))):
        files |= plot_files(plot)
    table = list(csv.DictReader(io.StringIO(files["block-cosine.csv"].decode())))
    row = next(r for r in record["rows"] if r["kind"] == "gate" and (r["seed"], r["step"]) == (1, 800))
    found = {
        line["part"]: float(line["cosine"])
        for line in table
        if (line["arm"], line["seed"], line["step"]) == ("ep", "1", "800")
    }
    assert found == {
        **{f"block {index}": value for index, value in enumerate(row["block_cosine"], start=1)},
        "outer": row["outer_cosine"],
        "control": row["control_cosine"],
    }
    assert len(table) == 2 * 11 * 6


def test_many_arms_and_deep_models(make_record, build):
    arms = (*(f"arm {index}" for index in range(9)), "bp")
    record = make_record(arms=arms, seeds=(0,), blocks=24)
    plot = made(cosines(read_run(build(record))))
    assert len(plot.panels) == 9
    assert len(plot.variables) == 24
    assert [text.get_text() for text in drawn(plot, 0).texts][-3:] == ["block 1", "block 12", "block 24"]


def test_nothing_measured_means_no_figure(record, build):
    record["rows"] = []
    assert figures(read_run(build(record, result=False))) == []
