"""What a scan shows, judged again from its rows: edits of its record, plan and journal do not get through."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from scanned import CHECKED, COPIED, PAIRS, copied_run, edit, edit_journal, scanned, write_source

from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.record import load_record
from twinscope.reuse import sitting
from twinscope.reuse.plan import seal
from twinscope.reuse.scan_evidence import evidence_of


@pytest.fixture(scope="module")
def scan(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINSCOPE_CACHE", str(folder / "cache"))
        patch.setattr(sitting, "find_parity", lambda _: CHECKED)
        return scanned(write_source(folder), folder / "runs")


def lift(record: dict[str, Any]) -> None:
    """Write the best into the summary of every pair."""
    for pair in record["summary"]["pairs"]:
        pair.update(level="intervention", candidate=True, failed_on=None, failed_on_reason="none", strain=0.0)
        pair.pop("strain_reason", None)


def perfect(rows: list[dict[str, Any]]) -> None:
    """Write the distances of a copy into the rows of a pair that is none."""
    for row in rows:
        if row.get("pair") == PAIRS[1]:
            row |= dict.fromkeys(("branch_error", "branch_error_trimmed", "logit_js"), 0.0)
            row |= {f"logit_topk_{k}": 1.0 for k in (1, 5, 10)}


def test_pairs_are_judged_as_the_scan_judged_them(scan):
    evidence = evidence_of(scan)
    summary = load_record(scan).summary
    found = {item.pair.id: (item.level, item.reason, item.verdict.strain) for item in evidence.judged}
    assert found == {pair["id"]: (pair["level"], pair["reason"], pair["strain"]) for pair in summary["pairs"]}
    assert [item.pair.id for item in evidence.candidates] == [COPIED]
    assert evidence.of(PAIRS[1]).verdict.failed_on == "calibration"  # pyright: ignore[reportOptionalMemberAccess]
    assert (evidence.of("no=pair"), evidence.run, evidence.others) == (None, scan.name, 2)


def test_a_level_in_the_summary_changes_nothing(scan, tmp_path):
    path = copied_run(scan, tmp_path)
    edit(path / "result.json", lift)
    assert {pair["level"] for pair in load_record(path).summary["pairs"]} == {"intervention"}
    levels = {item.pair.id: item.level for item in evidence_of(path).judged}
    assert levels == {COPIED: "candidate", PAIRS[1]: "parity", PAIRS[2]: "parity"}


def test_rows_count_and_not_what_was_written_about_them(scan, tmp_path):
    path = copied_run(scan, tmp_path)

    def spoil(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row.get("pair") == COPIED and row["text"] == "heldout-1":
                row["branch_error"] = 0.9

    edit_journal(path, spoil)
    edit(path / "result.json", lambda record: (lift(record), spoil(record["rows"])))
    evidence = evidence_of(path)
    assert evidence.candidates == []
    assert "the branch error is 0.9 on held-out text heldout-1" in evidence.judged[0].reason


def test_rows_that_the_journal_does_not_have_are_refused(scan, tmp_path):
    path = copied_run(scan, tmp_path)
    edit(path / "result.json", lambda record: (lift(record), perfect(record["rows"])))
    with pytest.raises(DataError, match=r"differ in the row 'layers\.0\.mlp=layers\.1\.mlp/.*was edited"):
        evidence_of(path)
    shutil.copy(scan / "result.json", path / "result.json")
    edit_journal(path, perfect)
    with pytest.raises(DataError, match="differ in the row"):
        evidence_of(path)


def test_a_text_on_which_the_pair_fails_cannot_be_left_out(scan, tmp_path):
    path = copied_run(scan, tmp_path)

    def shorten(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in rows if not row["key"].startswith(PAIRS[1]) or row["text"] == "heldout-0"]

    edit(path / "result.json", lambda record: shorten(record["rows"]))
    with pytest.raises(DataError, match=r"lacks the row 'layers\.0\.mlp=.*/calibration-0' of the plan"):
        evidence_of(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["nulls"].pop(),
        lambda row: row.update(split="calibration"),
        lambda row: row.update(substitute="layers.2.mlp"),
        lambda row: row.update(exploratory=True),
    ],
    ids=["null", "split", "substitute", "exploratory"],
)
def test_a_row_is_what_the_plan_measures(scan, tmp_path, change):
    path = copied_run(scan, tmp_path)

    def changed(rows: list[dict[str, Any]]) -> None:
        change(next(row for row in rows if row["key"] == f"{COPIED}/layers.2.mlp/heldout-0"))

    edit_journal(path, changed)
    edit(path / "result.json", lambda record: changed(record["rows"]))
    with pytest.raises(DataError, match=r"the row '.*heldout-0' is not what the plan measures there"):
        evidence_of(path)


def test_a_changed_plan_breaks_the_seal(scan, tmp_path):
    path = copied_run(scan, tmp_path)
    edit(path / "plan.json", lambda plan: plan["content"].update(margin=9.0))
    with pytest.raises(DataError, match="is not the plan that was sealed: its margin changed"):
        evidence_of(path)

    def sealed_again(plan: dict[str, Any]) -> None:
        plan["sealed"] = seal(plan["content"])

    edit(path / "plan.json", sealed_again)
    with pytest.raises(DataError, match="is not the plan that was sealed"):
        evidence_of(path)
    new = seal({**load_record(scan).config["plan"], "margin": 9.0})
    edit(path / "result.json", lambda record: record["summary"].update(sealed=new))
    with pytest.raises(DataError, match="holds another plan than"):
        evidence_of(path)


def test_only_a_finished_scan_is_evidence(scan, tmp_path):
    with pytest.raises(ConfigError, match="there is no run at"):
        evidence_of(tmp_path / "nowhere")
    with pytest.raises(DataError, match="there is no record at"):
        evidence_of(tmp_path)
    plan = next(path for path in scan.parent.iterdir() if "-plan-" in path.name)
    with pytest.raises(ConfigError, match="is the record of a 'plan': give the directory of a finished scan"):
        evidence_of(plan)
    path = copied_run(scan, tmp_path)
    edit(path / "result.json", lambda record: record.update(status="stopped", reason="a test"))
    with pytest.raises(ConfigError, match="is stopped: finish it with twinscope resume"):
        evidence_of(path)
