"""The texts of a replacement: the plan's own with their bytes, or others by its rule that are no copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scanned import texts_here
from tiny_llama import tiny_config, write_letters, write_llama

from twinscope.lab.errors import ConfigError, DataError
from twinscope.reuse import plan_run, swap_texts
from twinscope.reuse.apart import compute_apart
from twinscope.reuse.plan import Plan
from twinscope.reuse.swap_texts import BYTES_COUNTED, NEW, OWN, fixed_texts
from twinscope.reuse.texts import TextCodec, overlap


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_llama(folder / "model", layers=3)
    write_letters(folder / "text.txt")
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(swap_texts, "compute_apart", texts_here)


def planned(source: Path, root: Path, **changes: Any) -> Plan:
    config = tiny_config(source / "model", source / "text.txt", **changes)
    with plan_run.create_run(config, root) as run:
        plan_run.plan(run, quiet=True)
    return plan_run.plan_of_run(run.path)


def test_without_a_wish_the_texts_are_the_plans_own(source, tmp_path):
    plan = planned(source, tmp_path)
    found = fixed_texts(plan, source / "model")
    assert list(found.passages) == plan.texts
    # Characters of ASCII: one byte each, and nothing predicts the first.
    assert (found.nbytes, found.origin) == ((11,) * 5, OWN)


def test_other_texts_are_as_many_and_as_long_as_asked_for_and_no_copies(source, tmp_path):
    plan = planned(source, tmp_path)
    found = fixed_texts(plan, source / "model", texts=6, tokens=40)
    assert found.origin == NEW
    assert found.nbytes == (39,) * 12
    assert [passage.split for passage in found.passages] == ["calibration"] * 6 + ["heldout"] * 6
    assert {len(passage.ids) for passage in found.passages} == {40}
    assert len({passage.name for passage in found.passages}) == 12
    every = [*plan.texts, *found.passages]
    for one in found.passages:
        assert all(overlap(one, two) <= 0.2 for two in every if two is not one)
    whole = (source / "text.txt").read_text()
    cut = len(whole) - round(len(whole) * 0.1)
    for passage in found.passages:
        part = whole[:cut] if passage.split == "calibration" else whole[cut:]
        assert passage.text in part
    assert fixed_texts(plan, source / "model", texts=6, tokens=40) == found


def test_a_length_or_a_number_alone_keeps_the_other_as_planned(source, tmp_path):
    plan = planned(source, tmp_path)
    longer = fixed_texts(plan, source / "model", tokens=20)
    assert [(passage.split, len(passage.ids)) for passage in longer.passages] == (
        [("calibration", 20)] * 2 + [("heldout", 20)] * 2
    )
    more = fixed_texts(plan, source / "model", texts=4)
    assert [len(passage.ids) for passage in more.passages] == [12] * 8
    assert not {passage.ids for passage in more.passages} & {passage.ids for passage in plan.texts}


def test_texts_are_chosen_in_a_process_of_their_own(source, tmp_path, monkeypatch):
    monkeypatch.setattr(swap_texts, "compute_apart", compute_apart)
    plan = planned(source, tmp_path)
    apart = fixed_texts(plan, source / "model", texts=3, tokens=16)
    with pytest.raises(DataError, match=r"the calibration part gives .* 9999 are asked for"):
        fixed_texts(plan, source / "model", texts=9999)
    monkeypatch.setattr(swap_texts, "compute_apart", texts_here)
    assert fixed_texts(plan, source / "model", texts=3, tokens=16) == apart


def test_what_cannot_be_chosen_is_refused(source, tmp_path):
    plan = planned(source, tmp_path)
    older = Plan(json.loads(json.dumps(plan.content)), "", "", plan.folder, 0.0)
    del older.content["texts"]["settings"]
    with pytest.raises(ConfigError, match="by the plan's own rule, which this plan does not hold: plan and"):
        fixed_texts(older, source / "model", texts=4)
    files = []
    for number, text in enumerate((source / "text.txt").read_text().split("\n\n")[:4]):
        files.append(str(tmp_path / f"{number}.txt"))
        Path(files[-1]).write_text(text)
    listed = {"calibration_files": files[:2], "heldout_files": files[2:]}
    older.content["texts"]["settings"] = {**plan.content["texts"]["settings"], **listed}
    with pytest.raises(ConfigError, match="the texts of this plan are files given one by one"):
        fixed_texts(older, source / "model", tokens=16)
    with pytest.raises(ConfigError, match="--texts and --tokens: tokens: input should be greater"):
        fixed_texts(plan, source / "model", tokens=4)


def test_a_tokenizer_that_is_not_the_plans_counts_no_bytes_and_chooses_no_texts(source, tmp_path):
    plan = planned(source, tmp_path)
    other = Plan(json.loads(json.dumps(plan.content)), "", "", plan.folder, 0.0)
    other.content["texts"]["tokenizer_sha256"] = "0" * 64
    found = fixed_texts(other, source / "model")
    assert found.nbytes == (None,) * 5
    assert "is not the tokenizer that made the plan's texts" in found.bytes_reason
    with pytest.raises(DataError, match="is not the tokenizer that made the plan's texts: bring it back, or"):
        fixed_texts(other, source / "model", texts=3)
    other.content["texts"]["settings"] = None
    assert "tokenizer of the plan's texts is not at hand" in fixed_texts(other, source / "model").bytes_reason


def test_bytes_are_those_of_the_text_behind_the_first_token():
    pieces = {1: "<s>", 2: "na", 3: "ïve", 4: " 水"}
    codec = TextCodec("", lambda text: [], lambda ids: "".join(pieces[i] for i in ids), (), "", "")
    passage = swap_texts.Passage("a", "heldout", "", (1, 2, 3, 4), "")
    assert swap_texts._predicted_bytes(passage, codec) == len("naïve 水".encode()) == 10
    empty = TextCodec("", lambda text: [], lambda ids: "", (), "", "")
    assert swap_texts._predicted_bytes(passage, empty) is None
    assert "less those of its first token alone" in BYTES_COUNTED
