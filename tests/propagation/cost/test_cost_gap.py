"""The way from the ratio of FLOPs to that of times: its steps add up, and each is what it says."""

from __future__ import annotations

import pytest

from twinscope.propagation.cost.gap import Side, chain, sentence

BP = Side(
    "bp",
    {"forward": 100, "readout": 20, "backward": 200, "optimizer": 0},
    {"data": 1.0, "forward": 10.0, "readout": 2.0, "backward": 20.0, "optimizer": 4.0, "unmarked": 3.0},
)


def ep(**seconds) -> Side:
    took = {"data": 1.0, "free": 10.0, "forces": 10.0, "rebuild": 10.0, "read": 20.0, "readout": 6.0}
    flops = {"free": 100, "forces": 100, "rebuild": 100, "read": 200, "readout": 60, "optimizer": 0}
    return Side("ep", flops, took | {"optimizer": 4.0, "unmarked": 3.0} | seconds)


def test_at_one_rate_only_the_parts_without_products_move_the_ratio():
    moves = chain(ep(), BP, 64 / 40)
    assert [move.change for move in moves[1:6]] == pytest.approx([0.0] * 5, abs=1e-12)
    dilution = moves[6]
    # 8 seconds without products in both: (56 + 8) / (32 + 8) in place of 56 / 32.
    assert dilution.change == pytest.approx(64 / 40 - 56 / 32)
    assert "12% of ep's step and 20% of bp's" in dilution.reason
    assert moves[-1].change == pytest.approx(0.0, abs=1e-12)


def test_a_slow_part_moves_it_by_its_excess_and_names_its_rate():
    moves = chain(ep(forces=16.0), BP, 1.7)
    by_reason = {move.reason: move.change for move in moves}
    # 100 FLOPs take 10 s at BP's rate: 6 s too many, of 32.
    assert by_reason["'forces' runs at 0.62 of bp's rate"] == pytest.approx(6 / 32)
    assert sum(move.change for move in moves) == pytest.approx(1.7 - 560 / 320, rel=1e-12)
    assert moves[-1].ratio == 1.7
    text = sentence("ep", "bp", 1.7, 560 / 320, moves, " [1.6, 1.8]")
    assert "takes 1.7× [1.6, 1.8] the time and 1.75× the FLOPs" in text
    assert "wall clock follows the FLOPs within 3%" in text
    assert "+0.19 'forces' runs at 0.62" in text
    assert "lies 20% above" in sentence("ep", "bp", 2.1, 1.75, moves)
    assert "lies 20% below" in sentence("ep", "bp", 1.4, 1.75, moves)


def test_products_of_the_optimizer_are_set_aside_first():
    above, below = ep(), BP
    with_muon = [Side(side.name, {**side.flops, "optimizer": 80}, side.seconds) for side in (above, below)]
    moves = chain(with_muon[0], with_muon[1], 1.6)
    assert moves[0].change == pytest.approx(560 / 320 - 640 / 400)


def test_without_times_of_parts_no_reason_is_given():
    bare = Side("ep", {"free": 1}, {})
    assert chain(bare, BP, 1.7) == []
    assert "no reason is given" in sentence("ep", "bp", 1.9, 1.7, [])
