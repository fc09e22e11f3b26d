"""Neurons against the formula in float64, and against the library's own MLP in the families covered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from gated_models import exact, gated, inputs, matrices, write_gated

from twinscope.lab.errors import ConfigError
from twinscope.models.streamed.model import open_streamed
from twinscope.reuse.neurons import activations as module
from twinscope.reuse.neurons.activations import (
    activations,
    column_norms,
    columns_of,
    energies,
    evaluate,
    gated_layer,
    layer_of_matrices,
    rows_of,
)

FAMILIES = {
    "Llama": "post_attention_layernorm",
    "Mistral": "post_attention_layernorm",
    "Qwen3": "post_attention_layernorm",
    "Phi3": "post_attention_layernorm",
    "Gemma": "post_attention_layernorm",
    "Gemma3Text": "pre_feedforward_layernorm",
}


def test_activations_are_the_formula():
    layer, x = gated(0), inputs(0)
    found = activations(x, layer.gate(0, 30), layer.up(0, 30), layer.act)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), exact(x, layer), rtol=2e-5, atol=2e-6)


def test_energies_are_summed_in_float64():
    values = torch.full((10_000, 2), 1.0) + torch.tensor([0.0, 1e-4])
    expected = [10_000.0, float((1 + np.float64(np.float32(1.0001) - 1)) ** 2 * 10_000)]
    np.testing.assert_allclose(energies(values).numpy(), expected, rtol=1e-12)


def test_blocks_cover_every_neuron_once():
    layer = gated(0)
    parts = list(layer.blocks(7))
    assert [start for start, _, _ in parts] == [0, 7, 14, 21, 28]
    assert torch.equal(torch.cat([gate for _, gate, _ in parts]), layer.gate(0, 30))
    assert torch.equal(torch.cat([up for _, _, up in parts]), layer.up(0, 30))


def test_neurons_by_number_come_in_the_order_asked_for(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)
    gate, up, down = matrices(1)
    layer, order = layer_of_matrices(0, gate, up, down), [29, 3, 3, 17, 0]
    assert torch.equal(rows_of(layer, order)[0], gate[order])
    assert torch.equal(rows_of(layer, torch.tensor(order))[1], up[order])
    assert torch.equal(columns_of(layer, order), down[:, order])
    x = inputs(1)
    np.testing.assert_allclose(
        evaluate(x, layer, order).numpy(), exact(x, layer)[:, order], rtol=2e-5, atol=2e-6
    )
    assert evaluate(x, layer, []).shape == (200, 0)
    np.testing.assert_allclose(column_norms(layer).numpy(), np.linalg.norm(down.double().numpy(), axis=0))


@pytest.mark.parametrize("number", [-1, 30])
def test_a_neuron_that_is_not_there(number):
    with pytest.raises(ValueError, match="layer 0 has the neurons 0 … 29"):
        rows_of(gated(0), [0, number])


def test_matrices_of_two_mlps():
    gate, up, down = matrices(0)
    with pytest.raises(ValueError, match="not those of one MLP"):
        layer_of_matrices(0, gate, up[:-1], down)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_neurons_add_up_to_the_mlp_of_the_library(tmp_path, family):
    folder = write_gated(tmp_path / "model", family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    z = torch.from_numpy(np.random.default_rng(5).normal(size=(2, 9, 24))).float()
    with open_streamed(folder, budget_mib=None) as lm:
        layer = gated_layer(lm, 2)
        x = lm.module_input("layers.2.mlp", z)
        assert (layer.layer, layer.neurons, layer.width, layer.site) == (2, 40, 24, "layers.2.mlp")
        assert layer.rounding == module.ROUNDING["F32"]
        found = evaluate(x.reshape(-1, 24), layer, range(40)) @ columns_of(layer, range(40)).t()
        with torch.no_grad():
            library = model.model.layers[2]
            norm = getattr(library, FAMILIES[family])
            torch.testing.assert_close(x, norm(z), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found.view(2, 9, 24), library.mlp(norm(z)), rtol=1e-4, atol=1e-5)
        gain = norm.weight + (1.0 if family.startswith("Gemma") else 0.0)
        torch.testing.assert_close(layer.gain, gain.detach(), rtol=1e-6, atol=1e-6)


def test_a_remapped_model_has_its_own_neurons(tmp_path):
    folder = write_gated(tmp_path / "model")
    with open_streamed(folder, budget_mib=None) as lm:
        before = gated_layer(lm, 1).gate(0, 40)
        with lm.remapped({"layers.1.mlp": "layers.2.mlp"}):
            assert torch.equal(gated_layer(lm, 1).gate(0, 40), before)
        assert not torch.equal(gated_layer(lm, 2).gate(0, 40), before)


class TestRefusals:
    def test_an_mlp_without_a_gate(self, tmp_path):
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        with (
            open_streamed(tmp_path / "gpt2", budget_mib=None) as lm,
            pytest.raises(
                ConfigError, match=r"layers\.1\.mlp of this 'gpt2' model has no neurons of the form"
            ) as caught,
        ):
            gated_layer(lm, 1)
        assert caught.value.exit_code == 2
        assert "c_fc.weight" in str(caught.value)

    def test_an_mlp_with_biases(self, tmp_path):
        folder = write_gated(tmp_path / "model", mlp_bias=True)
        with (
            open_streamed(folder, budget_mib=None) as lm,
            pytest.raises(ConfigError, match=r"gate_proj\.bias.*without biases"),
        ):
            gated_layer(lm, 0)

    def test_experts(self):
        names = {"gate.weight": ("g",), "experts.gate_up_proj": ("a", "b"), "experts.down_proj": ("c",)}
        lm = SimpleNamespace(
            module=lambda site: (SimpleNamespace(act_fn=torch.relu), names), family="some_moe"
        )
        with pytest.raises(ConfigError, match=r"'some_moe'.*experts\.down_proj.*without biases and experts"):
            gated_layer(lm, 0)  # pyright: ignore[reportArgumentType]

    def test_a_layer_that_is_not_there(self, tmp_path):
        folder = write_gated(tmp_path / "model")
        with (
            open_streamed(folder, budget_mib=None) as lm,
            pytest.raises(ConfigError, match=r"no site 'layers\.4\.mlp'"),
        ):
            gated_layer(lm, 4)
