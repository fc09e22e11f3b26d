"""Swaps: texts, means and intervals at their places, cells in the colour of their change, sentences."""

from __future__ import annotations

from math import log10

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from synthetic_swaps import MARGIN, NULLS, swap_record, sweep_record

from twinscope.lab.record import headline, load_record
from twinscope.report.changes import change_limits, change_ticks, linear_part, signed_power
from twinscope.report.drawing import PALETTE
from twinscope.report.page import render
from twinscope.report.reading import read_run
from twinscope.report.swap.figures import figures
from twinscope.report.swap.findings import better_left_out, entries, facts, label, outcome, remarks, warnings
from twinscope.report.swap.matrix import steps_for
from twinscope.report.swap.tables import comparison, measures, nulls, pairs, sites, tables, texts, verdicts
from twinscope.report.wording import compact

CONFIG = 'name = "swap"\n'


@pytest.fixture
def record():
    return swap_record()


@pytest.fixture
def run(record, build):
    return read_run(build(record, name="swap", config=CONFIG))


@pytest.fixture
def sweep():
    return sweep_record(layers=8)


@pytest.fixture
def swept(sweep, build):
    return read_run(build(sweep, name="sweep", config=CONFIG))


def drawn(plot, place):
    axes = Figure().add_subplot()
    plot.panels[place].draw(axes)
    return axes


def marks(axes, marker):
    """x values of every line with the marker, lane by lane from the top, the key aside."""
    lines = [line for line in axes.lines if line.get_marker() == marker and len(line.get_xdata())]
    return [sorted(line.get_xdata()) for line in sorted(lines, key=lambda line: min(line.get_ydata()))]


# ------------------------------------------------------------------------------------------------ one pair


def test_each_direction_has_its_texts_means_and_intervals(run, record):
    losses = figures(run)[0]
    assert [panel.title for panel in losses.panels] == ["MLP 3 ← 4", "MLP 4 ← 3"]
    for place, part in enumerate(record["summary"]["directions"]):
        axes = drawn(losses, place)
        rows = [row for row in record["rows"] if row["direction"] == part["direction"]]
        split = {
            name: sorted(row["delta_nll"] for row in rows if row["split"] == name)
            for name in ("heldout", "calibration")
        }
        beside = [
            sorted(null["delta_nll"] for row in rows for null in row["nulls"] if null["null"] == name)
            for name in NULLS
        ]
        assert marks(axes, "o") == [split["heldout"], split["calibration"], *beside]
        means = [part["delta_nll"], *(null["delta_nll"] for null in part["nulls"])]
        assert marks(axes, "D") == [[mean] for mean in means]
        ends = {
            width: [
                tuple(xs)
                for xs in (line.get_xdata() for line in axes.lines if line.get_linewidth() == width)
                if len(xs)
            ]
            for width in (1.1, 3.0)
        }
        assert ends[3.0] == [(part["low_90"], part["high_90"])]
        assert ends[1.1] == [(entry["low"], entry["high"]) for entry in (part, *part["nulls"])]


def test_the_margin_is_the_tint_and_the_linear_part(run):
    losses = figures(run)[0]
    axes = drawn(losses, 0)
    band = next(patch for patch in axes.patches if to_hex(patch.get_facecolor()) == PALETTE["band"][0])
    box = band.get_window_extent().transformed(axes.transData.inverted())
    assert [box.x0, box.x1] == pytest.approx([-MARGIN, MARGIN])
    assert axes.get_xscale() == "symlog"
    assert axes.xaxis.get_transform().linthresh == MARGIN
    # Both directions on one axis: they are there to be compared.
    assert axes.get_xlim() == drawn(losses, 1).get_xlim()
    low, high = axes.get_xlim()
    inside = [x for line in axes.lines for x in line.get_xdata() if line.get_linestyle() == "None"]
    assert low < min(inside)
    assert max(inside) < high


def test_divergences_have_their_place_from_exactly_0_on(run, record):
    divergence = figures(run)[1]
    axes = drawn(divergence, 1)
    part = record["summary"]["directions"][1]
    heldout = [
        row["logit_js"]
        for row in record["rows"]
        if row["direction"] == part["direction"] and row["split"] == "heldout"
    ]
    assert marks(axes, "o")[0] == sorted(heldout)
    assert marks(axes, "o")[-1] == [0.0] * 16
    assert marks(axes, "D")[0] == [part["logit_js"]]
    assert axes.get_xlim()[0] < 0 < axes.xaxis.get_transform().linthresh <= min(heldout)
    assert "same token 96 %" in [text.get_text() for text in axes.texts]


def test_gains_of_norms_are_named(build):
    plot = figures(read_run(build(swap_record(kind="q_norm"), name="norms", config=CONFIG)))[0]
    assert [panel.title for panel in plot.panels] == ["Norm 9 q ← k", "Norm 9 k ← q"]


def test_sentences(run, record):
    forward, backward = record["summary"]["directions"]
    assert (forward["verdict"], backward["verdict"]) == ("equivalent", "different")
    assert outcome(run) == (
        "With layers.4.mlp in the place of layers.3.mlp the held-out loss changes by "
        f"{compact(forward['delta_nll'])} (95 % interval {compact(forward['low'])} to "
        f"{compact(forward['high'])}) nats per token: equivalent for a margin of ±0.01. With "
        "layers.3.mlp in the place of layers.4.mlp the held-out loss changes by "
        f"{backward['delta_nll']:+.3f} (95 % interval {backward['low']:+.3f} to {backward['high']:+.3f}): "
        "different. The pair does not pass in both directions; it ends at candidate."
    )
    assert label(run) == ""
    assert facts(run)[1:] == ["one pair", "16 calibration and 16 held-out texts of 256 tokens"]
    assert warnings(run) == []
    heard = " ".join(remarks(run))
    assert "The pair: the candidate of least strain" in heard
    assert "Sites, texts, margin and nulls were sealed as 0123456789ab" in heard
    assert "would save 2,654,784 parameters (5.1 MiB), which counts for nothing here" in heard
    assert "BOS: none" in heard


def test_too_few_texts_and_a_fault_of_the_instrument_are_told(build):
    record = swap_record(texts=4)
    first, second = record["summary"]["directions"]
    first |= {"verdict": "underpowered", "needed": 23}
    second |= {"verdict": None, "verdict_reason": "the module itself changes the loss", "needed": 3}
    record["summary"]["pair"]["exploratory"] = True
    run = read_run(build(record, name="short", config=CONFIG))
    assert "underpowered, 4 of 23 texts needed for a margin" in outcome(run)
    assert "no verdict" in outcome(run)
    said = warnings(run)
    assert said[0].startswith("The instrument was at fault for layers.4.mlp <- layers.3.mlp")
    assert said[1] == (
        "4 texts are too few for a margin of 0.01: by the spread on calibration text, 23 are needed."
    )
    assert said[2].startswith("The intervals rest on 4 texts")
    assert label(run).startswith("Exploratory: the pair was named by hand")
    cell = verdicts(run).rows[1][7]
    assert (cell.text, cell.reason) == ("–", "the module itself changes the loss")


def test_planted_weights_are_told(build):
    assert label(read_run(build(swap_record(planted=True), name="a", config=CONFIG))).startswith("Planted")


def test_tables_of_a_pair(run, record):
    assert [table.name for table in tables(run)] == [
        "swap-verdicts", "swap-measures", "swap-nulls", "swap-texts",
    ]  # fmt: skip
    for table in tables(run):
        assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}, table.name
    first = record["summary"]["directions"][0]
    assert [cell.value for cell in verdicts(run).rows[0][2:7]] == [
        first[key] for key in ("delta_nll", "low", "high", "low_90", "high_90")
    ]
    assert [cell.value for cell in measures(run).rows[0][4:8]] == [
        first[f"{what}_{when}"] for what in ("perplexity", "bits_per_byte") for when in ("before", "after")
    ]
    assert [row[1].text for row in nulls(run).rows[:5]] == [
        "no update at all", "the mean update", "layers.5.mlp", "layers.2.mlp", "the module itself",
    ]  # fmt: skip
    assert [row[8].value for row in texts(run).rows] == [row["delta_nll"] for row in record["rows"]]
    side = comparison({"one": run}).rows
    assert [row[5].text for row in side] == [part["direction"] for part in record["summary"]["directions"]]


def test_a_stopped_swap_shows_what_it_has(record, build):
    record |= {"status": "stopped", "reason": "stopped by SIGTERM", "summary": {}}
    run = read_run(build(record, name="swap", config=CONFIG))
    assert outcome(run) == "No replacement has been judged."
    assert "stopped by SIGTERM" in warnings(run)[0]
    assert figures(run) == []
    assert [table.name for table in tables(run)] == ["swap-texts"]
    render([run.path])


def test_the_page_holds_both_modes(record, sweep, build):
    paths = [build(record, name="swap", config=CONFIG), build(sweep, name="sweep", config=CONFIG)]
    page = render(paths).read_text(encoding="utf-8")
    assert page.count("<figure") == 4
    assert "The swaps side by side" in page
    assert (paths[0] / "figures" / "swap-loss.png").stat().st_size > 10_000
    assert (paths[1] / "figures" / "sweep-mlp.png").stat().st_size > 10_000
    assert all(headline(load_record(path)) is not None for path in paths)


# ------------------------------------------------------------------------------------------------- a sweep


def test_every_cell_has_the_colour_of_its_change(swept, sweep):
    kind = sweep["summary"]["kinds"][0]
    n = len(kind["sites"])
    axes = drawn(figures(swept)[0], 0)
    found: dict[tuple[int, int], str] = {}
    for patch in axes.patches:
        if isinstance(patch, PathPatch):
            colour = to_hex(patch.get_facecolor())
            for x, y in patch.get_path().vertices[::5]:
                assert (int(x), int(y)) not in found
                found[int(x), int(y)] = colour
    names = {light: name for name, (light, _) in PALETTE.items()}
    for i in range(n):
        assert (i, i) not in found
        for j in range(n):
            if i != j:
                assert names[found[j, i]] == _tint(kind["delta_nll"][i][j]), (i, j)
        assert names[found[n, i]] == _tint(kind["zero"][i]["delta_nll"])
    assert len(found) == n * n
    dots = next(line for line in axes.lines if line.get_marker() == "o")
    kept = {(i, j) for i in range(n) for j in range(n) if i != j and kind["verdict"][i][j] == "equivalent"}
    assert {(int(y), int(x)) for x, y in zip(*dots.get_data(), strict=True)} == kept
    assert (5, 6) in kept
    assert [text.get_text() for text in axes.get_xticklabels()] == [*"01234567", "none"]


def _tint(change):
    if -MARGIN < change < MARGIN:
        return "band"
    size = abs(change) / MARGIN
    edges = (1, 3, 10, 30, 100, 300, 1000) if change > 0 else (1, 10, 100)
    return f"{'heat' if change > 0 else 'cool'}-{sum(size >= edge for edge in edges)}"


def test_steps_of_colour_hold_what_there_is():
    assert steps_for([0.0, 0.005], 0.01).edges == (0.01,)
    steps = steps_for([-0.2, 0.005, 0.5, 900.0], 0.01)
    assert steps.edges == pytest.approx((-0.1, -0.01, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0))
    assert len(steps.colours) == len(steps.edges) + 1 == len(set(steps.colours))
    shown = [steps.step(value) for value in (-0.2, -0.05, 0.0, 0.02, 0.05, 900.0)]
    assert shown == [0, 1, 2, 3, 4, 9]
    assert steps.colours[2] == PALETTE["band"][0]


def test_substitutes_stand_over_their_site(swept, sweep):
    kind = sweep["summary"]["kinds"][0]
    axes = drawn(figures(swept)[0], 1)
    lines = [line for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    every, best, none = (list(zip(*line.get_data(), strict=True)) for line in lines)
    n = len(kind["sites"])
    assert every == [(i, kind["delta_nll"][i][j]) for i in range(n) for j in range(n) if i != j]
    assert best == [(i, min(kind["delta_nll"][i][j] for j in range(n) if i != j)) for i in range(n)]
    assert none == [(i, kind["zero"][i]["delta_nll"]) for i in range(n)]


def test_sentences_of_a_sweep(swept, sweep):
    said = outcome(swept)
    kind = sweep["summary"]["kinds"][0]
    verdicts = [entry.verdict for entry in entries(kind)]
    assert f"{verdicts.count('equivalent')} of 56 MLP replacements" in said
    assert f"{verdicts.count('different')} change it by more" in said
    assert said.endswith("The sweep ends at parity.")
    assert "the mildest is 5 ← 6" in said or "the mildest is 6 ← 5" in said
    assert label(swept).startswith("Exploratory: every pair was tried")
    below = [
        part["site"]
        for i, part in enumerate(kind["zero"])
        if part["delta_nll"] < min(value for j, value in enumerate(kind["delta_nll"][i]) if j != i)
    ]
    assert better_left_out(kind) == below
    assert facts(swept)[1] == "sweep"


def test_what_a_sweep_cannot_decide_is_told(sweep, build):
    kind = sweep["summary"]["kinds"][0]
    kind["verdict"][0] = [None] * 8
    kind["verdict_reason"] = "replaced by itself, layers.0.mlp changes the loss"
    kind["verdict"][1][2] = kind["verdict"][1][3] = "underpowered"
    kind["needed"][1][2], kind["needed"][1][3] = 100, 300
    run = read_run(build(sweep, name="sweep", config=CONFIG))
    said = warnings(run)
    assert said[0] == (
        "For 2 of 112 replacements the texts are too few, corrected for their number; half of these need at "
        "most 200."
    )
    assert said[1].startswith("The instrument was at fault")
    assert sites(run).rows[0][6].reason == "replaced by itself, layers.0.mlp changes the loss"
    assert [table.name for table in tables(run)] == ["sweep-sites", "sweep-pairs"]


def test_tables_of_a_sweep(swept, sweep):
    for table in tables(swept):
        assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}, table.name
    sizes = [abs(row[3].value) for row in pairs(swept).rows]
    assert sizes == sorted(sizes)
    assert len(sizes) == 60
    first = sites(swept).rows[0]
    kind = sweep["summary"]["kinds"][0]
    assert first[3].value == min(kind["delta_nll"][0][1:])
    assert first[7].value == kind["zero"][0]["delta_nll"]
    assert len(comparison({"one": swept}).rows) == 2


def test_matrices_of_one_kind_have_files_of_their_own(sweep, build):
    sweep["summary"]["kinds"][1]["kind"] = "mlp"
    names = [plot.name for plot in figures(read_run(build(sweep, name="sweep", config=CONFIG)))]
    assert names == ["sweep-mlp-1", "sweep-mlp-2"]


# ---------------------------------------------------------------------------------------- axes of changes


def test_limits_leave_room_on_either_side():
    low, high = change_limits([0.5], 0.01, (0.1, 0.2))
    # In decades from 0: the values span −1 … 1 + log10(50), which is 70 % of the axis.
    span = (2 + log10(50)) / 0.7
    assert low == pytest.approx(-0.01 * 10 ** (0.1 * span))
    assert log10(high / 0.5) == pytest.approx(0.2 * span)


def test_ticks_are_few_and_have_signs():
    assert change_ticks(0.01, (-0.015, 0.015)) == [-0.01, 0.0, 0.01]
    assert change_ticks(0.01, (-0.012, 12.0)) == pytest.approx([-0.01, 0, 0.01, 0.1, 1, 10])
    assert change_ticks(0.02, (-0.05, 0.05)) == pytest.approx([-0.04, -0.02, 0, 0.02, 0.04])
    assert len(change_ticks(1e-5, (-100.0, 100.0))) <= 7
    assert [signed_power(value) for value in (-0.3, 0.0, 1e-5, 1e-4, 2.0)] == [
        "−0.3",
        "0",
        "+10⁻⁵",
        "+10⁻⁴",
        "+2",
    ]


def test_the_linear_part_keeps_what_is_small_apart():
    assert linear_part([0.2, -0.004]) == pytest.approx(1e-3)
    assert linear_part([0.2, 1e-9]) == pytest.approx(1e-4)
    assert linear_part([0.01]) == pytest.approx(1e-2)
    assert linear_part([0.0]) == 1e-3
