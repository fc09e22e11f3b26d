"""Neurons planted in small models: found with scale and sign, or filed apart, through the streamed model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gated_models import SHAPE, write_gated

from twinscope.lab.errors import ConfigError
from twinscope.models.store.origin import read_origin
from twinscope.models.streamed.model import open_streamed
from twinscope.models.tensor_files import open_tensors
from twinscope.reuse.neurons.activations import gated_layer
from twinscope.reuse.neurons.analytic import identities
from twinscope.reuse.neurons.confirm import R2_FLOOR, moments
from twinscope.reuse.neurons.null import judge, null_search
from twinscope.reuse.neurons.parallel import compare_weights
from twinscope.reuse.neurons.search import search
from twinscope.reuse.planted import Planting, plant
from twinscope.reuse.planted_neurons import NeuronPlanting, plant_neurons

LAYERS = range(4)


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_gated(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def planted(base, tmp_path):
    return lambda *plantings: plant_neurons(base, tmp_path / "planted", plantings)


def matrix(folder: Path, layer: int, part: str) -> torch.Tensor:
    with open_tensors(folder) as tensors:
        return tensors.read(f"model.layers.{layer}.mlp.{part}_proj.weight")


def everything(folder: Path, draws: int = 19):
    """Search and null over four layers on 8 texts, confirmation on 8 more; and what weights alone say."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, SHAPE["vocab_size"], size=(16, 32)))
    with open_streamed(folder, budget_mib=None) as lm:
        layers = {number: gated_layer(lm, number) for number in LAYERS}
        found = identities(list(layers.values()))
        x = {
            layer: [lm.module_input(point.site, part).reshape(-1, lm.width) for part in point.z.split(8)]
            for layer, point in zip(LAYERS, lm.walk(ids, [one.site for one in layers.values()]), strict=True)
        }
        best = {n: search(x[n][0], layers[n], list(layers.values()), groups=found.groups) for n in LAYERS}
        nulls = {
            n: null_search(x[n][0], layers[n], list(layers.values()), range(draws), 0, groups=found.groups)
            for n in LAYERS
        }
        verdict = judge({n: best[n].correlation for n in LAYERS}, nulls)
        duplicates = {}
        for n in LAYERS:
            for own in verdict.passed[n].nonzero().flatten().tolist():
                m, other = int(best[n].layer[own]), int(best[n].neuron[own])
                scales, r2 = [], []
                for one, two, of, by in ((n, m, own, other), (m, n, other, own)):
                    fit = moments(x[one][0], layers[one], [of], layers[two], [by])
                    held = moments(x[one][1], layers[one], [of], layers[two], [by])
                    scales.append(float(fit.scale))
                    r2.append(float(held.r2(fit.scale)))
                same = bool(compare_weights(layers[n], [own], layers[m], [other]).identical)
                if min(r2) >= R2_FLOOR and float(best[n].correlation[own]) ** 2 >= R2_FLOOR:
                    duplicates[(n, own), (m, other)] = (scales, r2, same)
    return duplicates, found, verdict


def test_what_is_written(base, planted):
    folder = planted(
        NeuronPlanting(1, 3, ((5, 7), (6, 8)), gate_scale=1.5, up_scale=-2.0, down_scale=0.5),
        NeuronPlanting(0, 0, ((9, 9),), zero="down"),
        NeuronPlanting(2, 3, ((0, 30),)),
    )
    for part, scale in (("gate", 1.5), ("up", -2.0), ("down", 0.5)):
        before, source = matrix(base, 3, part), matrix(base, 1, part)
        if part == "down":
            before, source = before.t(), source.t()
        expected = before.clone()
        expected[[7, 8]] = scale * source[[5, 6]]
        if part != "down":
            expected[30] = matrix(base, 2, part)[0]
        found = matrix(folder, 3, part)
        torch.testing.assert_close(found.t() if part == "down" else found, expected, rtol=1e-6, atol=0)
    dead = matrix(base, 0, "down")
    dead[:, 9] = 0.0
    assert torch.equal(matrix(folder, 0, "down"), dead)
    assert torch.equal(matrix(folder, 0, "gate"), matrix(base, 0, "gate"))
    for part in ("gate", "up", "down"):
        for layer in (1, 2):
            assert torch.equal(matrix(folder, layer, part), matrix(base, layer, part))


def test_noise_is_a_share_of_each_vectors_rms(base, planted):
    pairs = tuple((n, n) for n in range(40))
    folder = planted(NeuronPlanting(1, 2, pairs, up_scale=10.0, noise=0.3))
    for part, scale in (("gate", 1.0), ("up", 10.0)):
        source = scale * matrix(base, 1, part)
        share = (matrix(folder, 2, part) - source).norm(dim=1) / source.norm(dim=1)
        # Of 40 rows with 24 draws each: the mean of χ₂₄/√24 is 0.9896, its standard error 0.0227.
        assert float(share.mean()) / 0.3 == pytest.approx(0.9896, abs=5 * 0.0227)
    assert torch.equal(matrix(folder, 2, "down"), matrix(base, 2, "down"))
    gate, up = (
        torch.nn.functional.normalize(matrix(folder, 2, part) - scale * matrix(base, 1, part))
        for part, scale in (("gate", 1.0), ("up", 10.0))
    )
    # Gate and up have noise of their own: 40 cosines in 24 dimensions, 5 standard errors of their mean.
    assert abs(float((gate * up).sum(dim=1).mean())) < 5 / (24 * 40) ** 0.5


def test_the_copy_says_that_it_is_planted(base, planted, tmp_path):
    folder = planted(NeuronPlanting(1, 3, ((5, 7),), up_scale=-2.0, noise=0.1))
    origin = read_origin(folder)
    assert origin is not None
    assert origin.evidence == ("trained", True)
    assert origin.source == "1 neuron of layers.3.mlp from layers.1.mlp, up times -2, noise of 0.1"
    random = write_gated(tmp_path / "random", weights="random")
    copy = read_origin(plant_neurons(random, tmp_path / "out", [NeuronPlanting(0, 1, ((0, 0),))]))
    assert copy is not None
    assert copy.weights == "random"


def test_nothing_is_found_where_nothing_is_planted(base):
    duplicates, found, verdict = everything(base)
    assert not duplicates
    assert not found.filed
    assert verdict.max_correlation < 0.95


def test_duplicates_across_two_layers_are_found_with_scale_and_sign(planted):
    folder = planted(
        NeuronPlanting(1, 3, ((5, 7), (6, 8)), up_scale=-2.0),
        NeuronPlanting(0, 2, ((11, 12),), up_scale=0.25, noise=0.05),
    )
    duplicates, found, _ = everything(folder)
    assert not found.filed
    exact = {((1, 5), (3, 7)), ((3, 7), (1, 5)), ((1, 6), (3, 8)), ((3, 8), (1, 6))}
    noisy = {((0, 11), (2, 12)), ((2, 12), (0, 11))}
    assert set(duplicates) == exact | noisy
    for one, other in exact:
        scales, r2, same = duplicates[one, other]
        there = -2.0 if one[0] == 3 else -0.5
        assert scales == pytest.approx([there, 1 / there], rel=1e-5)
        assert min(r2) == pytest.approx(1.0, abs=1e-9)
        assert same
    scales, r2, same = duplicates[(2, 12), (0, 11)]
    assert scales[0] == pytest.approx(0.25, rel=0.1)
    assert 0.9 < min(r2) < 1.0 - 1e-5
    assert not same


def test_identities_within_a_layer_are_filed_apart(planted):
    folder = planted(
        NeuronPlanting(1, 1, ((5, 7),), up_scale=-3.0, down_scale=2.0),
        NeuronPlanting(2, 2, ((0, 1),), gate_scale=1.5),
        NeuronPlanting(3, 3, ((4, 4),), zero="gate"),
    )
    duplicates, found, _ = everything(folder)
    assert not duplicates
    assert [(item.kind, item.layer, item.neuron, item.other_neuron, item.exact) for item in found.filed] == [
        ("parallel", 1, 5, 7, True),
        ("parallel", 2, 0, 1, False),
        ("dead", 3, 4, None, True),
    ]


@pytest.mark.parametrize("fold", [False, True])
def test_a_permuted_module_is_a_copy_and_no_heap_of_duplicates(base, tmp_path, fold):
    folder = plant(
        base, tmp_path / "out", [Planting("layers.1.mlp", "layers.3.mlp", permute=True, fold=fold)]
    )
    duplicates, found, _ = everything(folder)
    assert not duplicates
    (copy,) = found.copies
    assert (copy.layer, copy.other_layer, copy.folded, copy.share, copy.same_update) == (1, 3, fold, 1.0, 1.0)
    assert copy.update_scale == pytest.approx(1.0, rel=1e-5)
    assert {item.kind for item in found.filed} == {"module_copy"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("planting", "words"),
        [
            (NeuronPlanting(0, 9, ((0, 0),)), "no modules 'layers.9.mlp'"),
            (NeuronPlanting(0, 1, ()), "no neuron is named"),
            (NeuronPlanting(0, 1, ((0, 40),)), r"layers\.1\.mlp has the neurons 0 … 39, not all of \[40\]"),
            (NeuronPlanting(0, 1, ((-1, 0),)), r"layers\.0\.mlp has the neurons 0 … 39"),
            (NeuronPlanting(0, 1, ((0, 3), (1, 3))), "a neuron is the target of two"),
        ],
    )
    def test_what_cannot_be_planted(self, planted, tmp_path, planting, words):
        with pytest.raises(ConfigError, match=words) as caught:
            planted(NeuronPlanting(0, 1, ((0, 0),)), planting)
        assert caught.value.exit_code == 2
        assert not (tmp_path / "planted").exists()

    def test_nothing_to_plant(self, planted):
        with pytest.raises(ConfigError, match="no neuron is to be planted"):
            planted()

    def test_a_family_with_gate_and_up_in_one(self, tmp_path):
        folder = write_gated(tmp_path / "phi", "Phi3")
        with pytest.raises(ConfigError, match=r"layers\.0\.mlp has not the matrices gate_proj"):
            plant_neurons(folder, tmp_path / "out", [NeuronPlanting(0, 1, ((0, 0),))])
