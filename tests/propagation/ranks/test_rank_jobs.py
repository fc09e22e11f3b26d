"""What ranks tell each other, and how a job ends when one of them fails, is killed or hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from forked import on_ranks

from twinscope.lab.errors import ConfigError, DataError, RankLost, Stopped, TwinscopeError
from twinscope.lab.launch import Place
from twinscope.propagation.ranks import group
from twinscope.propagation.ranks.group import Ranks


def test_words_travel_whole_and_in_order():
    words = ["", "ä" * 3000, '{"a": [1, null]}']
    assert on_ranks(3, lambda ranks: ranks.gather(words[ranks.rank])) == [words] * 3
    assert on_ranks(3, lambda ranks: ranks.lead(lambda: f"of {ranks.rank}")) == ["of 0"] * 3


def test_sums_leave_what_was_given_and_are_the_same_bits_everywhere():
    def summed(ranks: Ranks):
        given = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64) * (ranks.rank + 1)
        before = given.clone()
        total = ranks.sum(given)
        assert torch.equal(given, before)
        return total.tolist()

    found = on_ranks(4, summed)
    assert found[0] == pytest.approx([1.0, 2.0, 3.0], rel=1e-15)
    assert found == [found[0]] * 4


def test_spread_gives_all_the_values_of_rank_0():
    def spread(ranks: Ranks):
        mine = [torch.full((2, 3), float(ranks.rank)), torch.tensor(float(ranks.rank), requires_grad=True)]
        ranks.spread(mine)
        return [tensor.detach().sum().item() for tensor in mine]

    assert on_ranks(3, spread) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_that_differs_is_found_on_every_rank(dtype):
    def compared(ranks: Ranks):
        mine = torch.linspace(-1, 1, 100, dtype=dtype)
        ranks.require_same([mine, -mine], "weights")
        if ranks.rank == 2:
            mine[7] = torch.nextafter(mine[7], torch.tensor(9.0, dtype=dtype))
        ranks.require_same([mine, -mine], "weights of arm 'ep'")

    for error in on_ranks(3, compared):
        assert isinstance(error, TwinscopeError)
        assert error.exit_code == 1
        assert "the 3 ranks hold different weights of arm 'ep'" in str(error)


@pytest.mark.parametrize(
    ("failing", "error", "sentence"),
    [
        (0, DataError("no text in x.txt"), "no text in x.txt"),
        (1, DataError("no text in x.txt"), "rank 1: no text in x.txt"),
        (1, ConfigError("lower data.batch"), "rank 1: lower data.batch"),
        (2, ValueError("surprise"), "rank 2: ValueError: surprise"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_with_its_sentence(failing, error, sentence):
    def work() -> int:
        raise error

    def tried(ranks: Ranks):
        assert ranks.together(lambda: 10 * ranks.rank) == 10 * ranks.rank
        return ranks.together(work if ranks.rank == failing else lambda: 0)

    for rank, found in enumerate(on_ranks(3, tried)):
        if rank == failing:
            assert str(found) == str(error)
        else:
            assert str(found) == sentence
            assert found.exit_code == getattr(error, "exit_code", 1)


def test_one_rank_that_must_stop_stops_all():
    def asked(ranks: Ranks):
        nobody = ranks.agree_to_stop(None)
        stop = ranks.agree_to_stop(Stopped("stopped by SIGTERM at step 3") if ranks.rank == 1 else None)
        return nobody, type(stop), str(stop)

    said = "stopped by SIGTERM at step 3"
    mine = (None, Stopped, said)
    other = (None, Stopped, f"rank 1: {said}")
    assert on_ranks(3, asked) == [other, mine, other]


def test_a_rank_that_ends_says_why():
    def ending(ranks: Ranks):
        ranks.sum(torch.zeros(1))
        if ranks.rank == 1:
            raise DataError("a shard is gone")
        ranks.sum(torch.zeros(1))

    found = on_ranks(2, ending)
    assert type(found[0]) is DataError
    assert str(found[0]) == "rank 1: a shard is gone"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_is_noticed(victim, number):
    def work(ranks: Ranks):
        ranks.sum(torch.zeros(1))
        if ranks.rank == victim:
            os.kill(os.getpid(), number)
        began = time.monotonic()
        try:
            for _ in range(3):
                ranks.sum(torch.zeros(1))
        except RankLost as error:
            return str(error), error.exit_code, time.monotonic() - began
        return "nothing happened"

    found = on_ranks(3, work, patience=2.0, gone=frozenset({victim}))
    for rank in {0, 1, 2} - {victim}:
        sentence, code, seconds = found[rank]
        assert code == 75
        assert sentence.startswith(f"rank {rank} of 3 lost another rank")
        assert seconds < 30


def test_ranks_that_never_come_are_a_sentence(monkeypatch):
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TWINSCOPE_RANK_TIMEOUT", "0.5")

    with (
        pytest.raises(RankLost, match=r"rank 1 of 2 on .* did not meet the others at 127\.0\.0\.1:1 \("),
        group.joined(Place(1, 2, 1)),
    ):
        raise AssertionError("nobody is there")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("TWINSCOPE_RANK_TIMEOUT", text)
    with pytest.raises(ConfigError, match="give a number of seconds"), group.joined(Place(0, 2, 0)):
        raise AssertionError
