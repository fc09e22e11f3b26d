"""The spectrometer against brute force on stored gradients (float64), and every promise about its work."""

from __future__ import annotations

import gc
import tomllib

import numpy as np
import pytest
import torch

from twinscope.lab.errors import ConfigError, RunFailed
from twinscope.lab.schemas.leak import LeakRow
from twinscope.lab.statistics import Interval, cross_fit_ratio, cross_fit_square, ratio_jackknife
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.estimators import begin, bp_gradient, ep_gradient, parameter_names
from twinscope.propagation.leak import paired
from twinscope.propagation.leak import passes as leak_passes
from twinscope.propagation.leak import selftest as leak_selftest
from twinscope.propagation.leak.block_vectors import GroupMeans, gram
from twinscope.propagation.leak.config import LeakSettings
from twinscope.propagation.leak.passes import Ledger
from twinscope.propagation.leak.selftest import self_test
from twinscope.propagation.leak.spectrometer import leak_spectrum, measure
from twinscope.propagation.leak.window import edges, operating_window, recommend
from twinscope.propagation.settings import EPSettings

ENERGY = {"rounds": 1, "fused": False, "read": "energy"}
GAINS = [1.0, 4.0, 64.0]


def tiny(dtype=torch.float64, layers: int = 2, batches: int = 16):
    model = build_gpt(GPTConfig(vocab=11, layers=layers, width=16, heads=2, context=8), seed=1).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = np.random.default_rng(parameter.numel()).normal(size=tuple(parameter.shape))
            parameter.add_(0.15 * torch.from_numpy(noise).to(dtype))
    rng = np.random.default_rng(2)
    # Targets follow the inputs, so that the batches' gradients share a mean.
    draws = [torch.from_numpy(rng.integers(0, 11, size=(3, 8))) for _ in range(batches)]
    return model, [(tokens, (tokens + 1) % 11) for tokens in draws]


def flat(model, gradient) -> list[np.ndarray]:
    return [
        np.concatenate([gradient.grads[name].double().numpy().ravel() for name, _ in group])
        for group in parameter_names(model).blocks
    ]


def arm_settings(beta: float, gain: float, sign: int, **options) -> EPSettings:
    nudge = "positive" if sign == 1 else "negative"
    return EPSettings(beta=beta, nudge=nudge, gain={"profile": "uniform", "value": gain}, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [ENERGY, {"rounds": 2, "fused": False, "read": "linear"}, {"rounds": 1, "fused": True, "damping": 0.7}],
)
def test_arms_that_share_a_start_equal_separate_gradients_to_the_bit(dtype, options):
    model, batches = tiny(dtype)
    options = {**options, "precision": "fp64" if dtype == torch.float64 else "fp32"}
    beta = 0.01
    start = begin(model, *batches[0], options["precision"])
    names = parameter_names(model)
    for gain, sign in ((1.0, 1), (8.0, 1), (64.0, 1), (1.0, -1)):
        settings = arm_settings(beta, gain, sign, **options)
        shared = paired.arm_vectors(start, settings, [gain, gain], sign, beta)
        alone = ep_gradient(model, *batches[0], settings).grads
        for group, vector in zip(names.blocks, shared, strict=True):
            assert torch.equal(vector, torch.cat([alone[name].flatten() for name, _ in group]))


def test_every_statistic_equals_brute_force_on_stored_gradients():
    model, batches = tiny()
    exact = {**ENERGY, "precision": "fp64"}
    settings = EPSettings(displacement=3e-3, **exact)
    found = leak_spectrum(model, batches, settings, gains=GAINS)
    beta = found.summary["beta"]
    by_ratio = ep_gradient(model, *batches[0], settings.model_copy(update={"nudge": "positive"}))
    assert beta == by_ratio.diagnostics.beta
    reference = [flat(model, bp_gradient(model, *batch, precision="fp64")) for batch in batches]
    arms = {
        (gain, sign): [
            flat(
                model, ep_gradient(model, *batch, arm_settings(beta, gain, sign, precision="fp64", **ENERGY))
            )
            for batch in batches
        ]
        for gain, sign in [*((gain, 1) for gain in GAINS), (1.0, -1)]
    }
    assert len(found.rows) == 2 * 4
    for row in found.rows:
        block = row["block"] - 1
        b = np.array([vectors[block] for vectors in reference])
        g = np.array([vectors[block] for vectors in arms[row["gain"], row["beta_sign"]]])
        d = g - b
        direct = ratio_jackknife((d * b).sum(1), (b * b).sum(1))
        assert isinstance(direct, Interval)
        expected = {
            "projection": direct.estimate,
            "projection_low": direct.low,
            "projection_high": direct.high,
        }
        groups = [np.arange(16) % 8 == j for j in range(8)]
        dj, bj = (np.array([x[mask].mean(0) for mask in groups]) for x in (d, b))
        mean, square = cross_fit_ratio(dj @ bj.T, bj @ bj.T), cross_fit_square(dj @ dj.T, bj @ bj.T)
        assert isinstance(mean, Interval)
        assert isinstance(square, Interval)
        expected |= {"mean_projection": mean.estimate, "mean_projection_low": mean.low,
                     "mean_projection_high": mean.high, "leak_squared": square.estimate,
                     "leak_squared_low": square.low, "leak_squared_high": square.high}  # fmt: skip
        whole, middle = d.mean(0), b.mean(0)
        expected["proj_on_bp"] = whole @ middle / (middle @ middle)
        expected["rel_leak"] = np.linalg.norm(whole) / np.linalg.norm(middle)
        expected["half_split"] = np.linalg.norm(d[::2].mean(0) - d[1::2].mean(0)) / np.linalg.norm(whole)
        cosines = (g * b).sum(1) / np.linalg.norm(g, axis=1) / np.linalg.norm(b, axis=1)
        expected["cosine"] = cosines.mean()
        for name, value in expected.items():
            # D is a difference of nearly equal vectors: its rounding is 1e-16 of B.
            assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-13), name
        LeakRow.model_validate(row)
    for block in range(2):
        b = np.array([vectors[block] for vectors in reference])
        plus, minus = (np.array([v[block] for v in arms[1.0, s]]) - b for s in (1, -1))
        total = (b * b).sum()
        assert found.odd[block] == pytest.approx(
            (((plus - minus) / 2) * b).sum() / total, rel=1e-8, abs=1e-13
        )
        assert found.even[block] == pytest.approx(
            (((plus + minus) / 2) * b).sum() / total, rel=1e-8, abs=1e-13
        )
        ratios = []
        for batch in batches:
            start = begin(model, *batch, "fp64")
            d, z = start.adjoints[block] * beta * 24, start.free.states[block + 1]
            ratios.append(float(d.square().mean().sqrt() / z.square().mean().sqrt()))
        assert found.displacement_ratio[block] == pytest.approx(np.mean(ratios), rel=1e-12)
    assert max(found.displacement_ratio) == pytest.approx(3e-3, rel=0.3)
    control = found.summary["control"]
    assert max(abs(value) for value in control["projection"]) < 1e-9
    assert found.self_test["null"]["passed"]
    assert found.self_test["planted"]["passed"]


def test_absorption_and_curvature_bound_the_window_in_fp32():
    model, batches = tiny(torch.float32, batches=8)
    gains = [float(4**k) for k in range(13)]
    energy = leak_spectrum(model, batches, EPSettings(displacement=1e-8, **ENERGY), gains=gains)
    linear = leak_spectrum(
        model, batches, EPSettings(displacement=1e-8, rounds=1, fused=False, read="linear"), gains=gains
    )
    for block in (1, 2):

        def at(found, gain, block=block):
            (value,) = [r["projection"] for r in found.rows
                        if (r["block"], r["gain"], r["beta_sign"]) == (block, gain, 1)]  # fmt: skip
            return value

        assert -1.0 < at(energy, 1.0) < -0.3
        assert abs(at(energy, 1024.0)) < 0.01
        assert abs(at(linear, 1.0)) < 1e-4
    assert energy.gain_low[0] is not None
    assert 1 < energy.gain_low[0] < 256
    assert linear.gain_low == [None, None]
    assert "smallest gain" in linear.summary["gain_low_reason"]
    # Block 1 reads its force at the same clamped input whatever the gain: with one round it has no curvature.
    assert energy.gain_high[1] is not None
    assert energy.gain_high[1] > 1024
    recommended = energy.summary["recommended"]
    config = TrainConfig.model_validate(tomllib.loads(recommended["config_fragment"]))
    assert config.ep.displacement == recommended["displacement"]
    assert config.ep.read == "energy"
    assert recommended["displacement"] == pytest.approx(
        max(g * r for g, r in zip(recommended["gain"], energy.displacement_ratio, strict=True))
    )


def test_the_null_is_exactly_zero_and_a_nondeterministic_model_fails_it(monkeypatch):
    model, batches = tiny(torch.float32, batches=8)
    names = parameter_names(model)
    passed = self_test(model, names, batches, "fp32")
    assert passed.null.passed
    assert "largest product 0," in passed.null.detail
    original, calls = leak_selftest.reference_vectors, []

    def wavering(*arguments):
        loss, vectors = original(*arguments)
        calls.append(1)
        return loss, [v * (1 + 1e-7 * (len(calls) % 2)) for v in vectors]

    monkeypatch.setattr(leak_selftest, "reference_vectors", wavering)
    assert not self_test(model, names, batches, "fp32").null.passed
    with pytest.raises(RunFailed, match="self-test failed, so nothing was measured: null"):
        leak_spectrum(model, batches, EPSettings(displacement=1e-3, **ENERGY), gains=[1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("breakage", "words"),
    [("shrink", "shrink of 10%"), ("square", "gain_low"), ("blind", "no gain_low in 2 blocks")],
)
def test_an_instrument_that_misreads_what_was_planted_fails(monkeypatch, dtype, breakage, words):
    model, batches = tiny(dtype, batches=8)
    names, precision = parameter_names(model), "fp64" if dtype == torch.float64 else "fp32"
    assert self_test(model, names, batches, precision).passed
    original = leak_selftest.arm_vectors

    def broken(start, settings, gain, sign, beta, displace):
        if breakage == "shrink" and displace is leak_selftest._shrinking:
            displace = paired.displaced
        if breakage == "square" and displace is not leak_selftest._shrinking:
            unit = leak_selftest._profile(start, paired.safe_displacement(precision))
            gain = [g * (g / u) for g, u in zip(gain, unit, strict=True)]
        if breakage == "blind":
            displace = paired.displaced
        return original(start, settings, gain, sign, beta, displace)

    monkeypatch.setattr(leak_selftest, "arm_vectors", broken)
    found = self_test(model, names, batches, precision)
    assert found.null.passed
    assert not found.planted.passed
    assert words in found.planted.detail


def test_rows_that_are_there_are_not_measured_again_and_give_the_same_result(monkeypatch, tmp_path):
    model, batches = tiny(torch.float32, batches=8)
    settings = EPSettings(displacement=1e-6, nudge="positive", **ENERGY)
    for budget in (0.0, 1024.0):
        leak = LeakSettings(batches=8, gains=[1.0, 8.0], budget_mib=budget)
        kept: list[dict] = []
        whole = measure(model, batches, settings, leak, Ledger((), kept.append), tmp_path)
        assert list(tmp_path.iterdir()) == []
        counted: list[int] = []
        original = leak_passes.arm_vectors
        monkeypatch.setattr(
            leak_passes, "arm_vectors", lambda *a, f=original, c=counted: c.append(1) or f(*a)
        )
        for cut in (0, 1, 5, 12, len(kept) - 1, len(kept)):
            counted.clear()
            again = measure(model, batches, settings, leak, Ledger(kept[:cut]), tmp_path)
            assert again == whole
            if budget == 0 and cut > 10:  # self-test, nudge, 8 references, then two rows a batch
                assert len(counted) == 4 * -(-(len(kept) - cut) // 2)
        assert counted == []
        monkeypatch.setattr(leak_passes, "arm_vectors", original)


def test_spilled_means_and_memory_means_give_the_same_numbers_and_say_what_is_missing(tmp_path):
    model, batches = tiny(torch.float32, batches=8)
    settings = EPSettings(displacement=1e-6, **ENERGY)
    copy = 8 * sum(p.numel() for block in model.blocks for p in block.parameters()) * 4 / 2**20
    full = leak_spectrum(model, batches, settings, gains=[1.0, 8.0])
    spilled = leak_spectrum(model, batches, settings, gains=[1.0, 8.0], budget_mib=0.5 * copy)
    some = leak_spectrum(model, batches, settings, gains=[1.0, 8.0], budget_mib=2.5 * copy)
    assert [s.summary["memory"]["arms_with_vectors"] for s in (full, spilled, some)] == [3, 0, 1]
    assert spilled.summary["memory"]["spilled"]
    vectors = {"rel_leak", "half_split", "leak_squared", "leak_squared_low", "leak_squared_high"}
    for one, two, three in zip(full.rows, spilled.rows, some.rows, strict=True):
        for name, value in one.items():
            if name in vectors:
                assert two[name] is None
                assert "raise leak.budget_mib" in two[f"{name}_reason"]
                first = (three["gain"], three["beta_sign"]) == (1.0, 1)
                assert three[name] == (value if first else None)
            elif not name.endswith("_reason"):
                assert two[name] == three[name] == value


def test_memory_of_the_scalar_statistics_does_not_grow_with_the_gains(monkeypatch):
    model, batches = tiny(torch.float32, layers=3, batches=8)

    def live() -> int:
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}  # fmt: skip
        return sum(seen.values())

    peaks = []
    original = leak_passes.compare
    for gains in ([1.0, 2.0], [2.0**k for k in range(12)]):
        box: list[int] = []

        arms = len(gains) + 2  # every arm and the control of one batch

        def watched(found, reference, box=box, arms=arms):
            products = original(found, reference)
            if len(box) < arms:
                box.append(live())
            return products

        monkeypatch.setattr(leak_passes, "compare", watched)
        leak_spectrum(
            model, batches[:8], EPSettings(displacement=1e-6, **ENERGY), gains=gains, budget_mib=0.01
        )
        peaks.append(max(box))
        monkeypatch.setattr(leak_passes, "compare", original)
    assert peaks[1] == peaks[0]


def test_group_means_and_products():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 40_000)).astype(np.float32)
    rows, vectors = torch.from_numpy(values), [torch.from_numpy(v) for v in values[:2]]
    expected = values.astype(np.float64) @ values[:2].astype(np.float64).T
    np.testing.assert_allclose(gram(rows, vectors), expected, rtol=1e-12)
    np.testing.assert_allclose(gram(list(rows), vectors), expected, rtol=1e-12)
    means = GroupMeans([2, 3], 2, torch.float64, None)
    for index in range(4):
        means.add(index % 2, 0, torch.full((2,), float(index), dtype=torch.float64))
        means.add(index % 2, 1, torch.full((3,), 10.0 * index, dtype=torch.float64))
    means.divide(2)
    assert means.block(0).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert means.block(1).tolist() == [[10.0] * 3, [20.0] * 3]


def test_edges_of_the_window():
    gains = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    lower, upper, held = edges(gains, [-0.5, -0.04, 0.0, 0.01, 0.05, 0.2], 0.02)
    # Half of the way from -0.04 to 0 over log gain; a quarter of the way from 0.01 to 0.05.
    assert lower.value == pytest.approx(2 * 2**0.5)
    assert upper.value == pytest.approx(8 * 2**0.25)
    assert held == (4.0, 8.0)
    lower, upper, held = edges(gains, [0.0, -0.3, 0.01, -0.01, 0.02, 0.0], 0.02)
    assert lower.value == pytest.approx(2 * 2 ** (0.28 / 0.31))  # from -0.3 to 0.01, where it meets -0.02
    assert (upper.value, held) == (None, (4.0, 32.0))
    assert "largest gain (32)" in upper.reason
    lower, _, held = edges(gains, [-0.5] * 6, 0.02)
    assert (lower.value, held) == (None, None)
    assert "no gain is inside" in lower.reason
    # Two runs of equal length: the lower one.
    assert edges(gains, [0.0, 1.0, 0.0, 1.0, 1.0, 1.0], 0.02)[2] == (1.0, 1.0)


def test_interval_of_an_edge_is_the_jackknife_of_its_logarithm():
    rng = np.random.default_rng(3)
    gains, ones = [1.0, 4.0, 16.0], np.ones(8)
    tops = np.stack([-0.5 + 0.1 * rng.normal(size=8), -0.1 + 0.02 * rng.normal(size=8), np.zeros(8)])
    window = operating_window(gains, tops, ones, 0.05)

    def crossing(columns):
        far = tops[1, columns].mean()
        return np.log(4.0) + np.log(4.0) * (-0.05 - far) / (0.0 - far)

    deleted = np.array([crossing(np.arange(8) != i) for i in range(8)])
    half = 2.364624 * np.sqrt(7 / 8 * ((deleted - deleted.mean()) ** 2).sum())
    assert window.lower.value == pytest.approx(np.exp(crossing(np.arange(8))))
    assert window.lower.low == pytest.approx(np.exp(crossing(np.arange(8)) - half), rel=1e-6)
    assert window.lower.high == pytest.approx(np.exp(crossing(np.arange(8)) + half), rel=1e-6)
    # One batch alone decides that gain 4 is outside: without it there is another edge, or none.
    tops[:2], tops[1, 0] = 0.0, -1.0
    window = operating_window([1.0, 4.0], tops[:2], ones, 0.05)
    assert window.upper.value is not None
    assert window.upper.low is None
    assert "without some batch" in window.upper.interval_reason


def test_recommendation_takes_a_profile_where_the_halves_differ_and_says_where_none_will_do():
    def windows(*spans):
        found = []
        for low, high in spans:
            gains = [0.5 * low, low, high, 2 * high]
            tops = np.array([[-1.0] * 4, [0.0] * 4, [0.0] * 4, [-1.0] * 4])
            found.append(operating_window(gains, tops, np.ones(4), 1e-9))
        return found

    settings, ratios = EPSettings(beta=1.0), [1e-4, 2e-4]
    found, _ = recommend([], windows((4, 64), (16, 256)), ratios, settings)
    assert found is not None
    assert found["gain"] == pytest.approx([32.0, 32.0], rel=1e-6)
    assert found["displacement"] == pytest.approx(64e-4, rel=1e-6)
    found, _ = recommend([], windows((1, 4), (64, 256)), ratios, settings)
    assert found is not None
    assert found["gain"] == pytest.approx([2.0, 128.0], rel=1e-6)
    assert "top" in found["config_fragment"]
    found, reason = recommend([], windows((1, 4), (64, 256), (1, 4), (64, 256)), ratios * 2, settings)
    assert found is None
    assert "no gain in common" in reason


def test_amp_is_labelled_and_never_the_instrument():
    model, batches = tiny(torch.float32, batches=8)
    with pytest.raises(ConfigError, match="never the instrument"):
        leak_spectrum(model, batches, EPSettings(precision="amp"), gains=[1.0])
    found = leak_spectrum(model, batches, EPSettings(displacement=1e-2), gains=[1.0], study="amp")
    assert (found.summary["study"], found.summary["instrument"]) == ("amp", "fp32")
    assert all(abs(value) < 1e-4 for value in found.summary["control"]["projection"])
    assert all(1e-4 < row["rel_leak"] < 0.5 for row in found.rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gains": [2.0]}, "gain 1 must stand"),
        ({"gains": [1.0, -2.0]}, "every gain is positive"),
        ({"groups": 9}, "even number of groups"),
        ({"groups": 10}, "multiple of groups"),
        ({"settings": EPSettings(rounds=0)}, "is backpropagation"),
        ({"settings": EPSettings(gain={"profile": "geometric"})}, "the arms set the gain"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, words):
    model, batches = tiny(torch.float32)
    arguments = {"settings": EPSettings(), **changes}
    with pytest.raises(ConfigError, match=words):
        leak_spectrum(model, batches, **arguments)
