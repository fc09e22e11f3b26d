"""Cells of the tables: derived numbers against their definitions, reasons beside what is missing."""

from __future__ import annotations

from math import log

import pytest

from twinscope.report.reading import read_run
from twinscope.report.tables import Table
from twinscope.report.train.tables import arms, comparison, gates, windows


def column(table: Table | None, name: str) -> list:
    assert table is not None
    place = table.columns.index(name)
    return [row[place] for row in table.rows]


def test_arms_and_baselines_stand_in_one_table(record, build):
    table = arms(read_run(build(record)))
    assert [cell.text for cell in column(table, "arm")] == ["EP"] * 3 + ["BP"] * 3 + [
        "unigram",
        "bigram",
        "trigram",
    ]
    assert [cell.text for cell in column(table, "seed")][:6] == ["mean", "0", "1"] * 2
    found = record["summary"]["arms"]
    apart = [
        found["ep"]["val_loss"] - found["bp"]["val_loss"],
        *(
            ep["val_loss"] - bp["val_loss"]
            for ep, bp in zip(*(found[arm]["per_seed"] for arm in ("ep", "bp")), strict=True)
        ),
    ]
    assert [cell.value for cell in column(table, "minus BP")] == pytest.approx([*apart, *[None] * 6])
    assert column(table, "below trigram")[3].value == pytest.approx(2.0741 - found["bp"]["val_loss"])
    # One token of the synthetic text is one byte.
    assert [cell.value for cell in column(table, "bits per byte")][6:] == pytest.approx(
        [3.1072 / log(2), 2.4986 / log(2), 2.0741 / log(2)]
    )
    assert table.note.endswith("nats per token. Two seeds give no interval over seeds.")


def test_what_is_missing_has_its_reason(make_record, build):
    record = make_record(seeds=(0,))
    record["summary"]["arms"]["ep"]["per_seed"][0] |= {"val_loss": None, "val_loss_reason": "it diverged"}
    table = arms(read_run(build(record)))
    cell = column(table, "held-out loss")[0]
    assert (cell.text, cell.value, cell.reason) == ("–", None, "it diverged")
    assert table.note == "Two seeds give no interval over seeds. One seed has no scatter."


def test_windows_over_seeds_and_seed_by_seed(record, build):
    table = windows(read_run(build(record)))
    expected = []
    for part in record["summary"]["difference"]["ep"]["windows"]:
        expected += [part["low"], *(seed["low"] for seed in part["per_seed"])]
    assert [cell.value for cell in column(table, "low")] == expected
    assert [cell.text for cell in column(table, "n")][:3] == ["16", "", ""]


def test_gate_points(record, build):
    row = next(row for row in record["rows"] if row["kind"] == "gate")
    row["block_cosine"] = [0.9, 0.7, 0.8, None]
    row["block_cosine_reason"] = "not finite"
    table = gates(read_run(build(record)))
    assert column(table, "median")[0].value == pytest.approx(0.8)
    assert (column(table, "worst")[0].value, column(table, "block")[0].value) == (0.7, 2)
    assert column(table, "displacement")[0].value == max(row["displacement_ratio"])
    assert len(column(table, "arm")) == 22


def test_comparison_has_a_row_per_run_and_arm(record, build):
    complete = read_run(build(record))
    cut = read_run(build(record, name="cut", result=False))
    table = comparison({"one": complete, "two": cut})
    assert [(row[0].text, row[1].text, row[2].text) for row in table.rows] == [
        ("one", "complete", "EP"),
        ("one", "complete", "BP"),
        ("two", "interrupted", "EP"),
        ("two", "interrupted", "BP"),
    ]
    # The journal of a whole run holds what its summary says.
    for name in ("held-out loss", "minus BP", "median cosine", "worst cosine", "displacement", "residual"):
        one, two = column(table, name)[0].value, column(table, name)[2].value
        assert one == pytest.approx(two, rel=1e-12), name
