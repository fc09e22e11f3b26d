"""Windows, agreement, ratios and parts on a machine whose clock and device are known exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from twinscope.propagation.cost.timing import (
    Contender,
    Span,
    ratio_of_pairs,
    spread,
    sweep_order,
    synchronizer,
    time_parts,
    time_window,
)
from twinscope.propagation.stages import stage


class Machine:
    """A host that launches work in a quarter of a second, and a device that does one piece after another."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.steps = self.evaluations = 0

    def launch(self, seconds: float) -> None:
        self.host += 0.25
        self.device = max(self.device, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def clock(self) -> float:
        return self.host

    def contender(self, step: float, evaluation: float) -> Contender:
        def one_step() -> None:
            self.steps += 1
            # The first steps are slow: they must not count.
            self.launch(step if self.steps > 3 else 40 * step)

        def one_evaluation() -> None:
            self.evaluations += 1
            self.launch(evaluation)

        return Contender("a", one_step, one_evaluation)


@pytest.mark.parametrize("steps", [4, 5])
def test_a_window_gives_the_devices_own_rate_without_warmup_and_evaluation(steps):
    machine = Machine()
    span = time_window(
        machine.contender(2.0, 5.0), warmup=3, steps=steps,
        synchronize=machine.synchronize, clock=machine.clock,
    )  # fmt: skip
    # Each half begins on an idle device, so one launch of each is not hidden behind the device.
    assert span.evaluation_seconds == 5.25
    assert span.seconds == 2.0 * steps + 2 * 0.25 + 5.25
    assert (machine.steps, machine.evaluations) == (3 + steps, 1)
    assert span.step_seconds == 2.0 + 0.5 / steps


def test_evaluation_is_subtracted_from_the_step_and_added_back_at_its_cadence():
    span = Span(steps=10, seconds=27.0, evaluation_seconds=7.0)
    assert span.step_seconds == 2.0
    assert span.wall_seconds(eval_every=1) == 9.0
    assert span.wall_seconds(eval_every=70) == pytest.approx(2.1, rel=1e-15)


def test_the_order_is_palindromic_over_any_number_of_arms():
    assert [name for _, name in sweep_order(["A", "B"], 2)] == ["A", "B", "B", "A"]
    order = sweep_order(["A", "B", "C"], 4)
    assert [name for _, name in order] == list("ABCCBAABCCBA")
    assert [sweep for sweep, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    # A drift that is linear in time weighs alike on every arm.
    places = {name: [i for i, (_, other) in enumerate(order) if other == name] for name in "ABC"}
    assert {sum(found) for found in places.values()} == {22}


def test_the_ratio_is_the_median_with_students_interval_of_the_logs():
    above, below = [2.0, 2.2, 1.9, 2.3], [1.0, 1.0, 1.0, 1.1]
    found = ratio_of_pairs(above, below)
    logs = np.log(np.array(above) / np.array(below))
    half = stats.t.ppf(0.975, 3) * logs.std(ddof=1) / 2
    assert found.median == pytest.approx(np.median(np.exp(logs)), rel=1e-14)
    assert found.low == pytest.approx(math.exp(logs.mean() - half), rel=1e-12)
    assert found.high == pytest.approx(math.exp(logs.mean() + half), rel=1e-12)
    assert found.n == 4
    turned = ratio_of_pairs(below, above)
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low), rel=1e-12)


def test_the_ratio_pairs_windows_so_a_common_drift_does_not_widen_it():
    drift = np.array([1.0, 1.5, 2.0, 4.0])
    found = ratio_of_pairs(list(1.7 * drift), list(drift))
    assert (found.low, found.median, found.high) == pytest.approx((1.7, 1.7, 1.7), rel=1e-12)


def test_a_median_outside_students_interval_widens_it():
    found = ratio_of_pairs([1.0] * 11 + [1e9] * 10, [1.0] * 21, level=0.2)
    assert found.low == found.median == 1.0


@pytest.mark.parametrize(
    ("above", "below", "words"),
    [([1.0], [1.0], "at least 2"), ([1.0, 1.0], [1.0], "do not pair"), ([1.0, 0.0], [1.0, 1.0], "positive")],
)
def test_what_is_no_pair_of_times_is_refused(above, below, words):
    with pytest.raises(ValueError, match=words):
        ratio_of_pairs(above, below)


def test_the_spread_is_the_slowest_over_the_fastest():
    assert spread([2.0, 2.1, 2.04]) == pytest.approx(0.05, rel=1e-12)
    assert spread([3.0, 3.0]) == 0.0


def test_parts_are_timed_between_synchronised_edges_and_the_rest_is_unmarked():
    machine = Machine()

    def step() -> None:
        with stage("free"):
            machine.launch(1.0)
        with stage("read"):
            machine.launch(2.0)
        with stage("free"):
            machine.launch(3.0)
        machine.launch(0.5)

    found = time_parts(step, 4, machine.synchronize, machine.clock)
    assert found.parts == {"free": 1.25 + 3.25, "read": 2.25}
    assert found.whole == 1.25 + 2.25 + 3.25 + 0.75
    assert found.unmarked == 0.75


def test_a_cpu_needs_no_synchronising():
    synchronizer("cpu")()
