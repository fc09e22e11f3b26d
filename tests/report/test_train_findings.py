"""Sentences: the outcome with its numbers, every warning with its condition, and number formats."""

from __future__ import annotations

import pytest

from twinscope.report.reading import read_run
from twinscope.report.train.findings import outcome, warnings
from twinscope.report.wording import cosine, listed, signed, small


def set_losses(record, **losses):
    for arm, loss in losses.items():
        record["summary"]["arms"][arm]["val_loss"] = loss


def test_outcome_of_a_pair(record, build):
    set_losses(record, ep=1.7253, bp=1.7211)
    assert outcome(read_run(build(record))) == (
        "EP reaches 1.725 nats per token on held-out text, 0.004 above its BP twin."
    )


@pytest.mark.parametrize(
    ("ep", "words"),
    [(1.7001, "level (within 0.0005) with its BP twin"), (1.6899, "0.010 below its BP twin")],
)
def test_outcome_says_level_and_below(record, build, ep, words):
    set_losses(record, ep=ep, bp=1.7)
    assert words in outcome(read_run(build(record)))


def test_outcome_of_a_battery(make_record, build):
    record = make_record(arms=("ep", "cap128", "bp"))
    set_losses(record, ep=1.71, cap128=1.69, bp=1.70)
    assert outcome(read_run(build(record))).endswith("0.010 above its BP twin; cap128 is 0.010 below it.")


def test_outcome_before_the_end_and_without_any_loss(record, build):
    record["rows"] = [row for row in record["rows"] if row["step"] <= 800]
    path = build(record, result=False)
    assert outcome(read_run(path)).startswith("At step 800 of 2,000, before the end: EP reaches 1.8")
    (path / "journal.jsonl").write_text("", encoding="utf-8")
    assert outcome(read_run(path)) == "No held-out loss has been measured."


def test_a_healthy_pair_of_seeds_has_one_warning(record, build):
    assert [line[:10] for line in warnings(read_run(build(record)))] == ["Two seeds:"]


def test_three_seeds_have_none(make_record, build):
    assert warnings(read_run(build(make_record(seeds=(0, 1, 2))))) == []


def test_one_seed(make_record, build):
    (line,) = warnings(read_run(build(make_record(seeds=(7,)))))
    assert line.startswith("One seed (7)")


@pytest.mark.parametrize(
    ("load", "cores", "words"),
    [
        ([[1.01, 0, 0], [2.5, 0, 0]], 2, "on 2 cores, the load average was 1.01 when the run began."),
        ([[1.0, 0, 0], [2.51, 0, 0]], 2, "the load average was 2.51 when the run ended."),
        ([[3.0, 0, 0], [4.0, 0, 0]], 2, "was 3.00 when the run began and 4.00 when the run ended."),
        ([[1.0, 0, 0], [2.5, 0, 0]], 2, None),
        ([[0.6, 0, 0], None], 1, "on 1 core, the load average was 0.60 when the run began."),
    ],
)
def test_contended_machine(make_record, build, load, cores, words):
    record = make_record(seeds=(0, 1, 2))
    record["provenance"] |= {
        "load_at_start": load[0],
        "load_at_end": load[1],
        "cpu": {"logical_cores": 64, "affinity": list(range(cores))},
    }
    found = warnings(read_run(build(record)))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_skipped_steps(record, build):
    record["summary"]["arms"]["ep"]["skipped_steps"] = 1234
    assert "EP skipped 1,234;" in warnings(read_run(build(record)))[0]


def test_small_displacement_and_large_residual(record, build):
    gates = [row for row in record["rows"] if row["kind"] == "gate"]
    gates[4]["displacement_ratio"] = [1e-5, 9.9e-4, 1e-5, 1e-5]
    gates[5]["displacement_ratio"] = [1e-5, 1e-3, 1e-5, 1e-5]
    gates[6]["residual"] = 0.1
    gates[7]["residual"] = 0.1001
    found = warnings(read_run(build(record)))
    assert "At 1 of 22 gate points of EP" in found[0]
    assert "least: 9.90×10⁻⁴, seed 0, step 800" in found[0]
    assert "At 1 of 22 gate points of EP the fixed-point residual exceeds 0.1" in found[1]
    assert "largest: 0.100, seed 0, step 1,400" in found[1]


@pytest.mark.parametrize(
    ("status", "words"),
    [("stopped", "was stopped (no space left)"), ("failed", "failed (no space left)")],
)
def test_stopped_and_failed_runs_say_so_first(record, build, status, words):
    record |= {"status": status, "reason": "no space left."}
    assert words in warnings(read_run(build(record)))[0]


def test_an_interrupted_run_says_so_first(record, build):
    line = warnings(read_run(build(record, result=False)))[0]
    assert "was interrupted and wrote no result" in line
    assert "at step 2,000 of 2,000" in line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00123456, "0.00123"),
        (9.996e-4, "0.001000"),
        (9.9999e-6, "1.00×10⁻⁵"),
        (-2.1e-7, "−2.10×10⁻⁷"),
        (12.3456, "12.3"),
        (123456.0, "1.23×10⁵"),
    ],
)
def test_small(value, text):
    assert small(value).replace("0.001000", "1.00×10⁻³") == text.replace("0.001000", "1.00×10⁻³")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.97, "0.970"),
        (0.99754, "0.9975"),
        (0.999754, "0.99975"),
        (1 - 2.1e-7, "1 − 2.10×10⁻⁷"),
        (1.0, "1.0000"),
        (-0.25, "−0.250"),
        (None, "–"),
    ],
)
def test_cosine_keeps_the_digits_that_matter(value, text):
    assert cosine(value) == text


def test_signs_and_lists():
    assert [signed(value) for value in (0.0042, -0.0042, -0.0001, 0.0)] == [
        "+0.004",
        "−0.004",
        "0.000",
        "0.000",
    ]
    assert [listed(items) for items in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
