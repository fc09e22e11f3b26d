"""The record: what it accepts and gives back unchanged, and every kind of thing it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinscope.lab import record as record_module
from twinscope.lab.errors import DataError
from twinscope.lab.record import decode, dump, encode, headline, load_record, validate

GOLDEN = Path(__file__).parent.parent / "golden" / "train-1.json"


@pytest.fixture
def content() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def at(value: Any, *path: Any) -> Any:
    for part in path:
        value = value[part]
    return value


def test_the_golden_record_loads_and_is_kept_as_written(tmp_path: Path, content: dict[str, Any]) -> None:
    record = load_record(GOLDEN)
    assert (record.verb, record.version, record.status, record.reason) == ("train", 1, "complete", None)
    assert record.summary == content["summary"]
    assert record.rows == content["rows"]
    (tmp_path / "result.json").write_bytes(dump(record))
    assert load_record(tmp_path) == record
    assert json.loads(dump(record)) == content
    assert headline(record) == "held-out nats per token: ep 2.250, bp 2.125"


def test_floats_keep_every_bit() -> None:
    values = np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-300, 300, 0.6)
    given = [*values.tolist(), -0.0, 5e-324, 1.7976931348623157e308]
    assert [float(x).hex() for x in decode(encode(given))] == [x.hex() for x in given]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ((), {"colour": 1}, "unknown field 'colour'"),
        (("summary",), {"colour": 1}, "unknown field 'summary.colour'"),
        (("summary", "arms", "ep"), {"colour": 1}, "unknown field 'summary.arms.ep.colour'"),
        (
            ("summary", "arms", "ep", "per_seed", 0),
            {"colour": 1},
            "unknown field 'summary.arms.ep.per_seed.0.colour",
        ),
        (("rows", 1), {"colour": 1}, "unknown field 'rows.1.eval.colour'"),
        (("claims", 0), {"colour": 1}, "unknown field 'claims.0.colour'"),
        ((), {"schema": "twinscope.train/2"}, "version 2 of 'train' records is unknown"),
        ((), {"schema": "twinscope.bake/1"}, "unknown kind of record 'bake'"),
        ((), {"schema": "other/1"}, "is not a twinscope record"),
        ((), {"schema": 7}, "is not a twinscope record"),
        ((), {"status": "running"}, "'status' is refused"),
        ((), {"rows": {}}, "'rows' is refused"),
        ((), {"reason": "a whim"}, "'reason' says why a run did not complete"),
        (("summary", "arms", "ep"), {"steps": "20"}, "'summary.arms.ep.steps' is refused"),
        (("summary", "arms", "ep"), {"steps": 20.0}, "'summary.arms.ep.steps' is refused"),
        (("summary", "arms", "ep"), {"val_loss": True}, "'summary.arms.ep.val_loss' is refused"),
        (
            ("summary", "arms", "ep"),
            {"steps": None, "steps_reason": "lost"},
            "'summary.arms.ep.steps' is refused",
        ),
        (("rows", 1), {"val_losses": [2.0, "2.5"]}, "'rows.1.eval.val_losses.1' is refused"),
        (("rows", 1), {"kind": "guess"}, "'rows.1' is refused"),
        (("rows", 1), {"key": "0/ep/eval/0"}, "two rows have the key '0/ep/eval/0'"),
        (("claims", 0), {"level": "certain"}, "'claims.0.level' is refused"),
        (("claims", 0), {"does_not_support": ""}, "'claims.0.does_not_support' is refused"),
        # null without a reason: at the top, inside a row, inside a list, and with a reason that says nothing
        (("summary",), {"gate": None}, "'summary.gate' is null without"),
        (("rows", 1), {"val_loss": None}, "'rows.1.val_loss' is null without"),
        (("rows", 1), {"val_losses": [2.0, None]}, "'rows.1.val_losses' is null without"),
        (("rows", 1), {"val_loss": None, "val_loss_reason": "  "}, "'rows.1.val_loss' is null without"),
        (("rows", 1), {"val_loss": None, "val_loss_reason": None}, "is null without"),
        (("rows", 1), {"val_loss_reason": "it is not null"}, "'rows.1.val_loss_reason' explains a null"),
        (("summary", "chosen"), {"rounds": None}, "'summary.chosen.rounds' is null without"),
        # not finite, anywhere
        (("rows", 1), {"val_loss": float("nan")}, "rows[1].val_loss is nan"),
        (("rows", 1), {"val_losses": [1.0, float("-inf")]}, "rows[1].val_losses[1] is -inf"),
        (("provenance",), {"load": float("inf")}, "provenance.load is inf"),
        (("config",), {"lr": np.float64("nan")}, "config.lr is nan"),
        (("config",), {"path": Path("x")}, "config.path is of the type"),
        (("config",), {1: 2}, "config has the key 1"),
    ],
)
def test_refusals_name_the_place(
    content: dict[str, Any], path: tuple[Any, ...], change: Any, words: str
) -> None:
    at(content, *path).update(change)
    with pytest.raises(DataError) as caught:
        validate(content)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", [("status",), ("claims",), ("summary", "arms"), ("rows", 2, "beta"), ("rows", 0, "key")]
)
def test_a_missing_field_is_refused(content: dict[str, Any], path: tuple[Any, ...]) -> None:
    del at(content, *path[:-1])[path[-1]]
    with pytest.raises(DataError, match="is missing"):
        validate(content)


def test_a_null_with_its_reason_passes(content: dict[str, Any]) -> None:
    content["summary"] |= {"gate": None, "gate_reason": "gate_every is beyond the last step"}
    content["rows"][1] |= {"val_losses": [None, 2.5], "val_losses_reason": "one batch overflowed"}
    assert validate(content).summary["gate_reason"] == "gate_every is beyond the last step"


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_a_run_that_ended_early_may_lack_parts_but_says_why(content: dict[str, Any], status: str) -> None:
    content |= {"status": status, "summary": {}}
    with pytest.raises(DataError, match="'reason' must say why"):
        validate(content)
    content["reason"] = "SIGTERM"
    record = validate(content)
    assert (record.reason, headline(record)) == ("SIGTERM", "SIGTERM")
    assert validate(json.loads(dump(record))) == record
    content["summary"] = {"arms": {"ep": {"rule": "ep", "steps": 3}}}
    validate(content)
    content["summary"] = {"arms": {"ep": {"rule": "ep", "steps": "3"}}}
    with pytest.raises(DataError, match=r"summary\.arms\.ep\.steps"):
        validate(content)
    content["summary"] = {"colour": 1}
    with pytest.raises(DataError, match="unknown field"):
        validate(content)
    content["summary"] = {}
    del content["rows"][0]["step"]
    with pytest.raises(DataError, match=r"rows\.0\.eval\.step' is missing"):
        validate(content)


def test_a_complete_record_with_an_empty_summary_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"'summary\.arms' is missing"):
        validate(content | {"summary": {}})


def test_checking_changes_nothing_and_tuples_become_lists(content: dict[str, Any]) -> None:
    content["rows"][1]["val_losses"] = (2, 2.5)
    before = copy.deepcopy(content)
    assert validate(content).rows[1]["val_losses"] == [2, 2.5]
    assert content == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a JSON record"),
        (b"{", "is not a JSON record"),
        (b"[]", "is not a record"),
        (b"null", "is not a record"),
        (b'{"schema": "twinscope.train/1"}', "is missing"),
        (b"\xff\xfe", "is not a JSON record"),
        (b'{"schema": NaN}', "contains NaN"),
        (b'{"schema": -Infinity}', "contains -Infinity"),
        (b'{"schema": 1e999}', "schema is inf"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not a JSON record"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        load_record(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_oversized_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no record at"):
        load_record(tmp_path)
    huge = tmp_path / "result.json"
    with huge.open("wb") as file:
        file.truncate(2000)
    monkeypatch.setattr(record_module, "MAX_BYTES", 1999)
    with pytest.raises(DataError, match="larger than"):
        load_record(huge)
    monkeypatch.setattr(record_module, "MAX_BYTES", 2000)
    with pytest.raises(DataError, match="not a JSON record"):
        load_record(huge)
    (tmp_path / "folder" / "result.json").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot read the record"):
        load_record(tmp_path / "folder")


def test_deep_values_in_memory_are_refused_in_a_sentence(content: dict[str, Any]) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    content["config"]["deep"] = deep
    with pytest.raises(DataError, match="nested too deeply"):
        validate(content)


def test_any_text_survives_even_half_a_surrogate_pair(content: dict[str, Any]) -> None:
    content["summary"]["chosen"] = {"why": "\ud800 é 漢 \u2028"}
    record = validate(content)
    assert validate(json.loads(dump(record))).summary["chosen"] == {"why": "\ud800 é 漢 \u2028"}
