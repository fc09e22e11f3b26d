"""The simulation of verdicts: closed forms against another way to them; a wrong rate is noticed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from twinscope.lab.draws import generator
from twinscope.lab.statistics import texts_needed

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "verdict_rates.py"


@pytest.fixture(scope="module")
def rates():
    spec = importlib.util.spec_from_file_location("verdict_rates", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("texts", [4, 16, 64])
def test_the_spread_for_which_so_many_texts_are_needed(rates, texts):
    spread = rates.largest_spread(texts)
    assert texts_needed(spread * (1 - 1e-9), 1.0) == texts
    assert texts_needed(spread * (1 + 1e-9), 1.0) == texts + 1


@pytest.mark.parametrize(
    ("texts", "share", "difference"), [(4, 0.5, 0.0), (4, 1.0, 1.0), (16, 1.0, 2.0), (16, 2.0, 0.4)]
)
def test_closed_forms_against_draws_of_mean_and_spread(rates, texts, share, difference):
    """A normal sample's mean and spread are independent; both are drawn without any sample."""
    draws, spread = 400_000, share * rates.largest_spread(texts)
    rng = generator(3, "test closed forms", texts)
    mean = difference + spread / texts**0.5 * rng.normal(size=draws)
    error = spread * np.sqrt(rng.chisquare(texts - 1, draws) / (texts - 1) / texts)
    measured = spread * np.sqrt(rng.chisquare(texts - 1, draws) / (texts - 1))
    wide, narrow = {4: (3.182446305, 2.353363435), 16: (2.131449546, 1.753050356)}[texts]
    different = np.abs(mean) - wide * error > 1
    short = ~different & (measured > rates.largest_spread(texts))
    equivalent = ~different & ~short & (np.abs(mean) + narrow * error < 1)
    found = {"different": different, "underpowered": short, "equivalent": equivalent}
    exact = rates.exact_rates(texts, spread, difference)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-12)
    for word, hits in found.items():
        assert exact[word] == pytest.approx(hits.mean(), abs=4 * 0.5 / draws**0.5), word


def test_noise_has_mean_0_and_spread_1(rates):
    for shape, skewness in zip(rates.SHAPES, (0.0, None, 2.0, -2.0), strict=True):
        noise = rates.draw_noise(shape, generator(4, "test noise"), (400, 1000))
        assert noise.mean() == pytest.approx(0, abs=0.01)
        # The spread of t with 3 degrees of freedom is finite, that of its square is not.
        assert noise.std() == pytest.approx(1, abs=0.05 if skewness is None else 0.01)
        if skewness is not None:
            assert (noise**3).mean() == pytest.approx(skewness, abs=0.15)


def test_a_rate_that_contradicts_its_closed_form_is_noticed(rates, monkeypatch):
    rows = rates.simulate(4, "normal", 600)
    assert len(rows) == 9
    found = rates.compare(rows)
    assert found["compared"] == 36
    assert found["largest_gap"] < 0.1
    honest = rates.intervals
    monkeypatch.setattr(rates, "intervals", lambda noise: honest(noise) * 0.5)
    monkeypatch.setattr(rates, "CHECKED", 0)
    with pytest.raises(AssertionError, match="contradicts its closed form"):
        rates.compare(rates.simulate(4, "normal", 600))


def test_the_fast_judgement_is_held_against_the_real_one(rates, monkeypatch):
    honest = rates.intervals
    monkeypatch.setattr(rates, "intervals", lambda noise: honest(noise) * 0.5)
    with pytest.raises(AssertionError):
        rates.simulate(4, "normal", 100)


def test_what_counts_as_false(rates):
    false = {
        (word, difference): rates.is_error(word, difference)
        for word in rates.VERDICTS
        for difference in rates.DIFFERENCES
    }
    assert {case for case, wrong in false.items() if wrong} == {
        ("equivalent", 1.0), ("equivalent", 2.0), ("different", 0.0), ("different", 1.0),
    }  # fmt: skip


def test_the_figure_has_every_case_and_bars_of_length_1(rates):
    from matplotlib.figure import Figure

    rows = [row for texts in rates.TEXTS for shape in rates.SHAPES for row in rates.simulate(texts, shape, 3)]
    plot = rates.figure({"rows": rows})
    assert len(plot.panels) == 6
    assert plot.panels[0].title == "4 texts, 3 needed"
    axes = Figure().add_subplot()
    plot.panels[1].draw(axes)
    ends: dict[float, float] = {}
    for bar in axes.patches:
        ends[round(bar.get_y(), 3)] = bar.get_x() + bar.get_width()
    assert len(ends) == 12
    assert list(ends.values()) == pytest.approx([1.0] * 12)
