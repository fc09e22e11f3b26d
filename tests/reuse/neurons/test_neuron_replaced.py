"""Replaced neurons against the library's model with those weights written into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_models import SHAPE, exact, gated, inputs, write_gated
from torch import Tensor

from twinscope import open_streamed
from twinscope.reuse.neurons.activations import GatedLayer, gated_layer
from twinscope.reuse.neurons.replaced import (
    Replacement,
    at_random,
    fitted,
    losses,
    replaced,
    themselves,
    zeroed,
)

LAYERS = (0, 2, 3)
#: Two within one layer, one from a later and one from an earlier layer, a sign, and a large scale.
CHANGES = [
    Replacement((0, 3), (0, 7), -0.5),
    Replacement((0, 4), (3, 39), 2.0),
    Replacement((2, 0), (0, 3), 1.5),
    Replacement((3, 11), (2, 12), 0.25),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replaced")
    families = {"Llama": {}, "Gemma2": {"sliding_window": 8}, "Phi3": {"tie_word_embeddings": False}}
    return {family: write_gated(root / family, family, **changes) for family, changes in families.items()}


def library(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def halves(model: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Gate and up of one layer, as views that write through."""
    mlp = model.model.layers[layer].mlp
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj.weight.data.chunk(2)
        return gate, up
    return mlp.gate_proj.weight.data, mlp.up_proj.weight.data


def written(folder: Path, replacements: list[Replacement]) -> Any:
    """The library's model in which gate and up rows are those of the neurons that stand in."""
    model, source = library(folder), library(folder)
    for item in replacements:
        (layer, neuron), (of, by) = item.neuron, item.by
        gate, up = halves(model, layer)
        from_gate, from_up = halves(source, of)
        gate[neuron], up[neuron] = from_gate[by], item.scale * from_up[by]
    return model


def library_nll(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids).logits.double()
    chosen = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return -chosen.mean(dim=1)


def opened(folder: Path, ids: Tensor) -> tuple[Any, dict[int, GatedLayer], dict[str, Tensor]]:
    lm = open_streamed(folder, budget_mib=None)
    layers = {number: gated_layer(lm, number) for number in LAYERS}
    points = {point.site: point.z for point in lm.walk(ids)}
    return lm, layers, points


def texts() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(1, SHAPE["vocab_size"], size=(3, 14)))


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3"])
def test_the_loss_is_that_of_the_library_with_the_weights_written_in(folders, family):
    folder, ids = folders[family], texts()
    lm, layers, points = opened(folder, ids)
    with lm:
        for changes in (CHANGES, CHANGES[2:], zeroed(CHANGES)):
            found = replaced(lm, layers, changes, points, ids)
            expected = library_nll(written(folder, changes), ids)
            assert found.nll.tolist() == pytest.approx(expected.tolist(), abs=2e-5)
            # A wrong sign, row or layer moves the loss by far more than that.
            plain = library_nll(library(folder), ids)
            assert float((expected - plain).abs().min()) > 1e-3


def test_nothing_changes_when_neurons_stand_in_for_themselves(folders):
    folder, ids = folders["Gemma2"], texts()
    lm, layers, points = opened(folder, ids)
    with lm:
        plain = losses(lm, points["head"], ids)
        found = replaced(lm, layers, themselves(CHANGES), points, ids)
        assert torch.equal(found.nll, plain)
        assert found.branch_error.tolist() == [0.0, 0.0, 0.0]
        assert plain.tolist() == pytest.approx(lm.nll(ids).double().mean(dim=1).tolist(), rel=1e-6)


def test_the_branch_error_is_what_changes_of_the_outputs_of_those_layers(folders):
    folder, ids = folders["Llama"], texts()
    model, changed = library(folder), written(folder, CHANGES)
    entering: dict[int, Tensor] = {}
    for number in LAYERS:
        changed.model.layers[number].mlp.register_forward_pre_hook(
            lambda _, args, number=number: entering.update({number: args[0].clone()})
        )
    lm, layers, points = opened(folder, ids)
    with lm, torch.no_grad():
        found = replaced(lm, layers, CHANGES, points, ids).branch_error
        changed(ids)
        change, whole = torch.zeros(3).double(), torch.zeros(3).double()
        for number in LAYERS:
            own = model.model.layers[number].mlp(entering[number])
            other = changed.model.layers[number].mlp(entering[number])
            change += (other - own).double().square().sum(dim=(1, 2))
            whole += own.double().square().sum(dim=(1, 2))
    assert found.tolist() == pytest.approx((change / whole).sqrt().tolist(), rel=1e-4)


def test_what_cannot_be_replaced_is_refused(folders):
    ids = texts()
    lm, layers, points = opened(folders["Llama"], ids)
    with lm:
        for wrong in ([], [CHANGES[0], CHANGES[0]]):
            with pytest.raises(ValueError, match="each of them once"):
                replaced(lm, layers, wrong, points, ids)
        with pytest.raises(ValueError, match="has the neurons 0 … 39"):
            replaced(lm, layers, [Replacement((0, 40), (0, 1), 1.0)], points, ids)


def test_scales_are_those_of_least_squares():
    layers = {number: gated(0, layer=number) for number in (4, 9)}
    x = {number: inputs(number, dominant=0.7) for number in layers}
    items = [
        Replacement((9, 2), (4, 5), 0.0),
        Replacement((4, 5), (4, 6), 0.0),
        Replacement((9, 0), (9, 1), 3.0),
    ]
    found = fitted(layers, items, x.__getitem__)
    assert [(item.neuron, item.by) for item in found] == [(item.neuron, item.by) for item in items]
    for item in found:
        own = exact(x[item.neuron[0]], layers[item.neuron[0]])[:, item.neuron[1]]
        other = exact(x[item.neuron[0]], layers[item.by[0]])[:, item.by[1]]
        (expected,), *_ = np.linalg.lstsq(other[:, None], own, rcond=None)
        assert item.scale == pytest.approx(expected, rel=1e-5)


def test_random_neurons_are_drawn_evenly_from_all_but_the_one_replaced():
    layers = {number: gated(0, neurons=count, layer=number) for number, count in ((1, 3), (5, 4))}
    own = [Replacement((5, 1), (1, 0), 1.0)] * 3500
    drawn = at_random(layers, own, seed=2, way="forward")
    assert {item.neuron for item in drawn} == {(5, 1)}
    seen = [item.by for item in drawn]
    counts = {by: seen.count(by) for by in set(seen)}
    assert counts.keys() == {(1, 0), (1, 1), (1, 2), (5, 0), (5, 2), (5, 3)}
    # 3,500/6 with a standard deviation of 22.
    assert all(abs(count - 3500 / 6) < 5 * 22 for count in counts.values())
    assert at_random(layers, own[:7], seed=2, way="forward") == drawn[:7]
    assert at_random(layers, own[:50], seed=2, way="backward") != drawn[:50]
    first = at_random(layers, [Replacement((1, 0), (5, 0), 1.0)] * 200, seed=0, way="forward")
    assert (1, 0) not in {item.by for item in first}
