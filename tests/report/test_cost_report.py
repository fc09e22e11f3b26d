"""Cost runs: every ratio stands where it is, bars are in steps of the yardstick, doubts are sentences."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from synthetic_costs import COST_CONFIG, PARTS, SHAPES, cost_record

from twinscope.lab.record import load_record
from twinscope.report.cost.figures import figures
from twinscope.report.cost.findings import facts, flops, label, milliseconds, outcome, remarks, warnings
from twinscope.report.cost.tables import comparison, tables
from twinscope.report.drawing import PALETTE
from twinscope.report.lanes import ratio_ticks
from twinscope.report.page import render
from twinscope.report.reading import read_run


@pytest.fixture
def record():
    return cost_record()


@pytest.fixture
def read(build):
    return lambda record, **options: read_run(build(record, name="two", config=COST_CONFIG, **options))


def plot_of(run, name):
    return next(plot for plot in figures(run) if plot.name == name)


def drawn(plot, panel=0):
    axes = Figure().add_subplot()
    plot.panels[panel].draw(axes)
    return axes


def marks(axes, marker):
    """x of every mark of one shape that stands alone, from top to bottom."""
    found = [
        (line.get_ydata()[0], line.get_xdata()[0])
        for line in axes.lines
        if line.get_marker() == marker and len(line.get_xdata()) == 1
    ]
    return [x for _, x in sorted(found)]


def spans(axes, colour, width):
    """(left, right) of every horizontal line of a colour and width, from top to bottom."""
    found = [
        (line.get_ydata()[0], tuple(line.get_xdata()))
        for line in axes.lines
        if len(line.get_xdata()) == 2
        and line.get_ydata()[0] == line.get_ydata()[1]
        and (line.get_color(), line.get_linewidth()) == (colour, width)
    ]
    return [ends for _, ends in sorted(found)]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_record_is_one_and_the_figures_are_in_order(record, build, read):
    assert load_record(build(record, name="as-record")).status == "complete"
    run = read(record)
    assert [(plot.name, len(plot.panels)) for plot in figures(run)] == [
        ("cost-ratios", 2),
        ("cost-parts", 2),
        ("cost-windows", 2),
        ("cost-memory", 2),
        ("cost-claims", 1),
    ]
    assert [panel.title for panel in plot_of(run, "cost-ratios").panels] == [
        "12x256: 12 blocks of 256, T 128, batch 4",
        "6x512: 6 blocks of 512, T 128, batch 2",
    ]


def test_ratios_stand_where_they_are_with_their_intervals(record, read):
    plot = plot_of(read(record), "cost-ratios")
    axes = drawn(plot)
    assert axes.get_xscale() == "log"
    assert marks(axes, "o") == [1.66, 2.96]
    assert spans(axes, PALETTE["arm-1"][0], 1.4) == [(1.63, 1.69), (2.90, 3.02)]
    books = [entry["flops"] for entry in record["summary"]["comparisons"][:2]]
    assert marks(axes, "D") == [entry["counted_ratio"] for entry in books]
    assert marks(axes, "x") == [entry["shorthand_ratio"] for entry in books]
    upright = [
        line.get_xdata()[0]
        for line in axes.lines
        if line.get_linewidth() == 2.0
        and len(line.get_xdata()) == 2
        and line.get_color() == PALETTE["arm-2"][0]
    ]
    assert upright == [entry["analytic_ratio"] for entry in books]
    assert {"EP against BP", "1.66× [1.63, 1.69]", "ep3 against BP", "2.96× [2.90, 3.02]"} <= set(texts(axes))
    assert (
        "EP against BP: time 1.66× [1.63, 1.69], FLOPs by ledger 1.67×, counted 1.67×" in plot.panels[0].words
    )
    assert plot.rows[1][:4] == ("12x256", "ep3", "bp", 2.96)


def test_an_interval_that_reaches_far_ends_in_an_arrow(record, read):
    record["summary"]["comparisons"][0]["train_step_ratio"] |= {"low": 0.01, "high": 300.0}
    axes = drawn(plot_of(read(record), "cost-ratios"))
    low, high = axes.get_xlim()
    assert low > 0.3
    assert high < 10
    assert marks(axes, "<") == [low]
    assert marks(axes, ">") == [high]


def test_uncounted_flops_have_no_diamond(record, read):
    for entry in record["summary"]["comparisons"]:
        entry["flops"] |= {"counted_ratio": None, "counted_ratio_reason": "not counted", "agree": None}
        entry["flops"]["agree_reason"] = "not counted"
    run = read(record)
    assert marks(drawn(plot_of(run, "cost-ratios")), "D") == []
    assert "not counted" in plot_of(run, "cost-ratios").words
    assert not any("dispatcher" in remark for remark in remarks(run))


def bars(axes):
    """Widths of the segments of every bar, from top to bottom, and where each begins."""
    found: dict[float, list[tuple[float, float]]] = {}
    for patch in axes.patches:
        found.setdefault(patch.get_y(), []).append((patch.get_x(), patch.get_width()))
    return [found[height] for height in sorted(found)]


def test_both_bars_of_an_arm_are_in_steps_of_the_yardstick(record, read):
    plot = plot_of(read(record), "cost-parts")
    axes = drawn(plot)
    rows = bars(axes)
    assert len(rows) == 6
    bp_seconds = sum(seconds for seconds, _ in PARTS["bp"].values())
    bp_flops = sum(work for _, work in PARTS["bp"].values())
    for place, arm in enumerate(("ep", "bp", "ep3")):
        time, work = rows[2 * place], rows[2 * place + 1]
        assert sum(width for _, width in time) == pytest.approx(
            sum(seconds for seconds, _ in PARTS[arm].values()) / bp_seconds
        )
        assert sum(width for _, width in work) == pytest.approx(
            sum(flops for _, flops in PARTS[arm].values()) / bp_flops
        )
        # Segments follow each other without a gap.
        for row in (time, work):
            for (start, width), (following, _) in pairwise(row):
                assert following == pytest.approx(start + width)
    # Free, forces, rebuild, read, readout, optimizer, and the three parts that no product is in.
    assert [width for _, width in rows[0]] == pytest.approx(
        [value / bp_seconds for value in (0.1, 0.11, 0.09, 0.2, 0.02, 0.03, 0.01)]
    )
    assert marks(axes, "o") == [1.66, 2.96]
    assert {"EP", "560 ms · 5.10 GFLOP", "\u00a01.65×", "\u00a01.67×"} <= set(texts(axes))


def test_parts_of_an_unknown_name_are_among_the_others(record, read):
    for part in record["summary"]["parts"]:
        if part["part"] == "rebuild":
            part["part"] = "brand new"
    axes = drawn(plot_of(read(record), "cost-parts"))
    assert bars(axes)[0][-1][1] == pytest.approx((0.01 + 0.09) / 0.34)


def test_windows_in_time_with_their_band_and_what_disturbed_them(read):
    record = cost_record(disturbed=True)
    plot = plot_of(read(record), "cost-windows")
    axes = drawn(plot)
    rows = [row for row in record["rows"] if row["kind"] == "window" and row["shape"] == SHAPES[0]]
    points = {}
    for line in axes.lines:
        if len(line.get_xdata()) == 1 and line.get_marker() not in ("", "None"):
            filled = line.get_markerfacecolor() == line.get_color()
            points[line.get_xdata()[0]] = (line.get_ydata()[0], filled)
    assert points == {
        row["position"]: (pytest.approx(1e3 * row["step_seconds"]), not row["disturbances"]) for row in rows
    }
    fastest = min(1e3 * row["step_seconds"] for row in rows if row["arm"] == "ep")
    bands = [(patch.get_y(), patch.get_height()) for patch in axes.patches]
    assert bands[0] == pytest.approx((fastest, 0.05 * fastest))
    assert "hollow: disturbed" in texts(axes)
    assert "4 windows, 2 of them disturbed" in plot.panels[0].words
    assert [row[-1] for row in plot.rows if row[1] == "bp"] == [1, 1, 0, 0] * 2


def test_memory_is_held_state_a_peak_and_activations(record, read):
    axes = drawn(plot_of(read(record), "cost-memory"))
    rows = bars(axes)
    assert [width for _, width in rows[0]] == [36.0, 36.0, 72.0]
    assert [width for _, width in rows[1]] == [104.0]
    peaks = [
        line.get_xdata()[0]
        for line in axes.lines
        if line.get_linewidth() == 1.6 and len(line.get_xdata()) == 2
    ]
    assert peaks == [220.0, 210.0, 210.0]
    shown = set(texts(axes))
    assert {"\u00a0220 MiB, 1.05×", "\u00a0104 MiB, 1.04×", "\u00a0100 MiB", "\u00a082.0 MiB, 0.82×"} <= shown


def test_claims_are_boxes_with_what_was_measured_on_them(record, read):
    plot = plot_of(read(record), "cost-claims")
    axes = drawn(plot)
    boxes = []
    for part in axes.collections:
        extents = part.get_paths()[0].get_extents()
        boxes.append((extents.x0, extents.x1, to_hex(part.get_facecolor()[0])))
    claimed, ungiven = PALETTE["arm-5"][0], PALETTE["rule"][0]
    assert boxes[0] == (3.15, 3.25, claimed)
    assert boxes[1] == (1.95, 2.05, claimed)
    assert boxes[2][2] == ungiven
    assert boxes[2][0] < 6.67 < boxes[2][1]
    assert marks(axes, "o") == [3.0]
    # The claim judged by a published measurement, then that measurement itself.
    assert marks(axes, "D") == [2.77, 2.7, 2.77, 3.0]
    shown = texts(axes)
    assert (
        shown.index("FLOPs") < shown.index("overstated") < shown.index("twice") < shown.index("understated")
    )
    assert "not comparable" in shown
    assert "literature, time per step, evaluation included 6.67×: not comparable." in plot.words
    assert "published: an A6000" in shown


def test_a_quiet_run_says_what_it_costs_and_warns_of_nothing(record, read):
    run = read(record)
    assert outcome(run) == (
        "A training step of EP takes 1.66 times as long as one of BP (95 % interval 1.63 to 1.69), for 1.67 "
        "times the FLOPs, at shape 12x256."
    )
    assert warnings(run) == []
    assert label(run) == ""
    assert facts(run) == ["2 shapes", "3 arms", "4 windows of 6 steps", "fp32"]
    said = " ".join(remarks(run))
    assert "count agree within 1 %" in said
    assert "median block cosine 0.99930, worst 0.9981, at displacement 0.00110 and residual 0.0200" in said
    assert "1.05× that of BP, of activations alone 1.04×" in said
    assert "adds 2.1 % to BP's bare step at shape 12x256 (95 % interval 1.2 % to 3 %)" in said


def test_every_doubt_is_a_sentence(read):
    record = cost_record(disturbed=True)
    summary = record["summary"]
    summary["agreement"][0] |= {"spread": 0.19, "agree": False}
    summary["agreement"][4] |= {"spread": 0.08, "agree": False}
    first, second = summary["comparisons"][:2]
    first["train_step_ratio"] |= {"low": 1.2, "high": 2.1}
    first["flops"] |= {"agree": False, "differences": ["ep: 'read' counted 3 % above the ledger"]}
    first["fidelity"]["displacement"] = 1e-5
    second["fidelity"] |= {"residual": 0.4, "control_cosine": 0.998}
    record["provenance"]["resumed"] = ["2026-12-01T00:00:00Z"]
    run = read(record)
    said = warnings(run)
    assert label(run) == "Not a controlled measurement"
    assert said[0] == (
        "Not controlled: 4 of 24 windows exceed a bound on what else the machine does, so no ratio of times "
        "here is due to the arms alone (in 4: other processes kept 1.00 CPUs busy (bound 0.1): cc1 (7) 1.00)."
    )
    assert said[1] == (
        "Windows of 2 of 6 arms do not agree within 5 %: from the fastest to the slowest they differ, those "
        "of EP at shape 12x256 by 19 % and those of BP at shape 6x512 by 8 %."
    )
    assert said[2].startswith("1 of 4 intervals of the training-step ratio are wider than 20 %")
    assert "[1.20, 2.10] from 4 pairs" in said[2]
    assert said[3].startswith("The run was resumed once")
    assert "ep: 'read' counted 3 % above the ledger" in said[4]
    assert said[5].startswith("The states of EP at shape 12x256 move by 1.00×10⁻⁵, below 0.001")
    assert said[6].startswith("The fixed-point residual of ep3 at shape 12x256 is 0.400, above 0.1")
    assert said[7].startswith("The control K = 0 of ep3 at shape 12x256 has a cosine of 0.9980, −0.00200")
    assert len(said) == 8


def test_numbers_with_units():
    assert milliseconds(0.0123456) == "12.3 ms"
    assert milliseconds(61.0) == "61.0 s"
    assert [flops(value) for value in (999.0, 1.5e6, 2.25e12)] == ["999 FLOP", "1.50 MFLOP", "2.25 TFLOP"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.95, 3.1, [1.0, 1.5, 2.0, 2.5, 3.0]),
        (0.9, 1.3, [0.9, 1.0, 1.1, 1.2, 1.3]),
        (0.9, 13.0, [1.0, 2.0, 5.0, 10.0]),
    ],
)
def test_ticks_of_ratios(low, high, expected):
    assert ratio_ticks(low, high) == expected


def cells(run, name):
    table = next(table for table in tables(run) if table.name == name)
    return [[cell.text for cell in row] for row in table.rows]


def test_tables_hold_every_number(record, read):
    run = read(record)
    assert [table.name for table in tables(run)] == [
        "comparisons", "fidelity", "verdicts", "published", "gap", "shorthand", "step-parts", "ledger",
        "memory", "overhead", "agreement", "every-window",
    ]  # fmt: skip
    for table in tables(run):
        assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}
    assert cells(run, "comparisons")[1] == [
        "12x256", "ep3", "BP", "2.960", "2.900", "3.020", "4", "2.950", "2.890", "3.010", "3.0164", "3.0174",
        "2.9964", "3.0000", "1.000", "0.820", "yes",
    ]  # fmt: skip
    claims = cells(run, "verdicts")
    assert [row[0] for row in claims] == ["FLOPs", "FLOPs", "twice", "literature"]
    assert claims[0][4:9] == ["overstated", "3", "2.95", "3.01", "'ep3' against 'bp' at shape '12x256'"]
    assert claims[0][9:] == ["The claim of 3.15–3.25× is above the measured.", "rounds 3", "source of FLOPs"]
    assert claims[1][8] == "'ep3' against 'bp' at shape '6x512'"
    assert claims[3][4:9] == ["not comparable", "–", "–", "–", "none"]
    assert cells(run, "gap")[:2] == [
        ["12x256", "EP", "BP", "FLOPs by ledger", "–", "1.672"],
        ["12x256", "EP", "BP", "'rebuild' runs at 0.90 of bp's rate", "+0.030", "1.702"],
    ]
    assert ["12x256", "EP", "free", "100", "17.9", "1000", "1000", "10.0"] in cells(run, "step-parts")
    assert ["12x256", "EP", "data", "1.00", "0.2", "0", "–", "–"] in cells(run, "step-parts")
    assert cells(run, "overhead")[0][:5] == ["12x256", "BP", "2.10", "1.20", "3.00"]
    assert cells(run, "memory")[0] == [
        "12x256",
        "EP",
        "220.00",
        "104.00",
        "36.00",
        "36.00",
        "72.00",
        "800.00",
    ]
    assert len(cells(run, "every-window")) == 24
    assert len(cells(run, "ledger")) == len(record["summary"]["ledger"])


def test_the_runs_side_by_side(record, read, build):
    alone = cost_record(arms=("ep", "bp"), shapes=("model",), disturbed=True)
    started = read_run(build(record, name="started", config=COST_CONFIG, result=False))
    table = comparison({"a": read(record), "b": read_run(build(alone, name="alone")), "c": started})
    rows = [[cell.text for cell in row] for row in table.rows]
    assert [row[0] for row in rows] == ["a"] * 4 + ["b", "c"]
    assert rows[0] == [
        "a", "complete", "yes", "12x256", "EP", "BP", "1.660", "1.630", "1.690", "1.672", "1.05", "0.99930",
        "yes",
    ]  # fmt: skip
    assert rows[4][2] == "no"
    assert rows[5] == ["c", "interrupted", *["–"] * 11]
    assert {len(row) for row in rows} == {len(table.columns)}


def test_a_run_without_a_result_shows_its_windows(record, read):
    run = read(record, result=False)
    assert run.status == "interrupted"
    assert [plot.name for plot in figures(run)] == ["cost-windows"]
    assert outcome(run) == "No ratio has been made of 24 windows."
    assert "ends after 38 units of work" in warnings(run)[0]
    assert [table.name for table in tables(run)] == ["every-window"]


def test_a_run_that_measured_nothing_has_a_page(build):
    record = cost_record()
    record |= {"status": "failed", "reason": "no memory", "summary": {}, "rows": [], "claims": []}
    path = build(record, name="nothing", config=COST_CONFIG)
    run = read_run(path)
    assert outcome(run) == "Nothing was timed."
    assert figures(run) == tables(run) == facts(run) == remarks(run) == []
    assert "This run failed (no memory)" in render([path]).read_text(encoding="utf-8")


def test_names_are_escaped_wherever_they_stand(build):
    hostile = "<script>alert(1)</script>" + "w" * 200
    record = cost_record(arms=("ep", "bp", hostile), shapes=(hostile,), disturbed=True)
    for claim in record["summary"]["claims"]:
        claim |= {"name": hostile, "source": hostile}
    record["summary"]["published"][0] |= {"name": hostile, "values": {hostile: 2.0}}
    record["summary"]["disturbances"][0]["reason"] = hostile
    text = render([build(record, name="hostile")]).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert len(re.findall("<script", text)) == 1
    assert "&lt;script&gt;alert(1)" in text
