"""The place among several ranks, as the environment tells it."""

from __future__ import annotations

import pytest

from twinscope.lab.errors import ConfigError
from twinscope.lab.launch import Place, place

JOB = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def set_job(monkeypatch, **changes: str | None) -> None:
    for name, value in {**JOB, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_the_place_is_what_torchrun_says(monkeypatch):
    set_job(monkeypatch)
    assert place() == Place(rank=2, size=4, local_rank=0)
    set_job(monkeypatch, LOCAL_RANK=None)
    assert place() == Place(rank=2, size=4, local_rank=2)


@pytest.mark.parametrize("size", [None, "1", ""])
def test_one_process_has_no_place(monkeypatch, size):
    set_job(monkeypatch, WORLD_SIZE=size)
    assert place() is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"RANK": "4"}, "RANK = 4, WORLD_SIZE = 4 and MASTER_PORT = 29500 make no job"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "make no job"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR, where the ranks meet, is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, "make no job"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, changes, problem):
    set_job(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=problem) as caught:
        place()
    assert "torchrun" in str(caught.value)
    assert caught.value.exit_code == 2
