"""Records as pandas frames: every value is where the record has it."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest

import twinscope
from twinscope.lab.errors import ConfigError
from twinscope.lab.frames import frame_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_rows_of_a_kept_record():
    record = twinscope.load(RESULTS / "leak")
    frame = record.frame()
    assert len(frame) == len(record.rows)
    for name in ("block", "gain", "projection", "mean_projection"):
        expected = [np.nan if row[name] is None else row[name] for row in record.rows]
        np.testing.assert_array_equal(frame[name].to_numpy(float), np.array(expected, float))
    at_one = frame[(frame.gain == 1) & (frame.beta_sign == 1)].set_index("block").projection
    rows = {row["block"]: row["projection"] for row in record.rows if row["gain"] == row["beta_sign"] == 1}
    assert at_one.to_dict() == rows


def test_lists_of_the_summary_and_objects_inside_them():
    record = twinscope.load(RESULTS / "cost-fast")
    frame = record.frame("comparisons")
    for line, entry in zip(frame.to_dict("records"), record.summary["comparisons"], strict=True):
        assert line["train_step_ratio.median"] == entry["train_step_ratio"]["median"]
        assert line["arm"] == entry["arm"]
    assert list(record.frame("claims").columns) == ["statement", "level", "supports", "does_not_support"]
    with pytest.raises(
        ConfigError, match=r"no list 'comparison' \(did you mean 'comparisons'\?\); it has rows"
    ):
        record.frame("comparison")


def test_missing_numbers_are_nan_and_lists_stay_lists():
    frame = frame_of(
        [{"a": 1, "b": {"c": None, "c_reason": "none"}}, {"a": None, "b": {"c": 2}, "d": [1, 2]}]
    )
    assert list(frame.columns) == ["a", "b.c", "b.c_reason", "d"]
    assert frame["a"].dtype == np.float64
    assert np.isnan(frame["a"][1])
    assert frame["b.c"][1] == 2
    assert frame["b.c_reason"][0] == "none"
    assert frame["d"][1] == [1, 2]
    assert frame_of([{"n": 2**40}, {"n": 3}])["n"].dtype == np.int64


def test_without_pandas_a_sentence(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"frames need pandas: pip install 'twinscope\[frames\]'"):
        frame_of([{"a": 1}])
