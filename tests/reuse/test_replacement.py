"""One site replaced: losses, divergences and nulls against the library's model with its weights changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import write_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.streamed.model import open_streamed
from twinscope.reuse import nulls, replacement
from twinscope.reuse.branches import Comparison

NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
IDS = torch.randint(0, 48, (3, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), layers=4)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A Qwen 3, which has q and k norms, with uneven gains."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(folder: Path, change: Callable[[Any], None] = lambda model: None) -> Tensor:
    """Logits (B, T − 1, V) float64 of the library's model of the folder, changed in memory first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    change(model)
    return model(IDS).logits[:, :-1].double()


def text_losses(logits: Tensor) -> Tensor:
    """Mean nats of each text (B,)."""
    chosen = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    return -chosen.mean(dim=1)


def moved(target: str, source: str) -> Callable[[Any], None]:
    """Copy the tensors of one site, and its pre-norm, over those of another."""

    def change(model: Any) -> None:
        tensors = model.state_dict()
        (_, to, part), (_, of, other) = target.split(".", 2), source.split(".", 2)
        parts = [(part, other)] + ([(NORMS[part], NORMS[part])] if part in NORMS else [])
        for ours, theirs in parts:
            for name, tensor in tensors.items():
                if f"layers.{to}.{ours}." in name:
                    tensor.copy_(tensors[name.replace(f"layers.{to}.{ours}", f"layers.{of}.{theirs}")])

    return change


def constant(site: str, value: Tensor) -> Callable[[Any], None]:
    """Let a module of the library's model return one vector at every token."""

    def change(model: Any) -> None:
        module = model.get_submodule(f"model.{site}")

        def instead(_: Any, inputs: Any, output: Any) -> Any:
            update = output[0] if isinstance(output, tuple) else output
            filled = value.expand_as(update)
            return (filled, *output[1:]) if isinstance(output, tuple) else filled

        module.register_forward_hook(instead)

    return change


def js_bits(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Jensen–Shannon divergence in bits, mean over predicted tokens, (B,)."""
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    middle = (p + q) / 2
    terms = p * (p / middle).log2() + q * (q / middle).log2()
    return (terms.sum(-1) / 2).mean(dim=1)


def agreement(p_logits: Tensor, q_logits: Tensor, k: int) -> Tensor:
    first, second = p_logits.topk(k).indices, q_logits.topk(k).indices
    return (first[..., :, None] == second[..., None, :]).any(-1).double().mean(dim=(1, 2))


COMPARISONS = {
    "mlp": Comparison("mlp", "layers.1.mlp", "layers.2.mlp", ("layers.0.mlp", "layers.3.mlp")),
    "attention": Comparison("attention", "layers.2.self_attn", "layers.1.self_attn", ("layers.0.self_attn",)),
    "last": Comparison("mlp", "layers.3.mlp", "layers.0.mlp", ()),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_replaced_module_gives_the_losses_of_the_library_with_its_tensors_copied(llama, name):
    comparison = COMPARISONS[name]
    here = logits_of(llama)
    with open_streamed(llama, None) as lm:
        given = replacement.passed(lm, IDS, [comparison.residual])
        mean = (replacement.summed_update(lm, comparison, given) / IDS.numel()).float()
        found = replacement.effects(lm, comparison, given, mean)
        alone = replacement.changes(lm, comparison, given)
        own = lm.branch(comparison.reference, given.entering[comparison.reference]).update
    assert given.nll.mean(dim=1).tolist() == pytest.approx(text_losses(here).tolist(), abs=1e-5)
    assert mean.tolist() == pytest.approx(own.double().mean(dim=(0, 1)).tolist(), abs=1e-6)
    variants = {
        "pair": moved(comparison.reference, comparison.substitute),
        nulls.ZERO: constant(comparison.reference, torch.zeros(16)),
        nulls.MEAN: constant(comparison.reference, mean),
        **{f"other.{site}": moved(comparison.reference, site) for site in comparison.others},
    }
    assert [row["null"] for row in found[0]["nulls"]] == [
        "zero", "mean", "self", *(f"other.{site}" for site in comparison.others)
    ]  # fmt: skip
    for variant, change in variants.items():
        there = logits_of(llama, change)
        rows = found if variant == "pair" else [
            next(null for null in row["nulls"] if null["null"] == variant) for row in found
        ]  # fmt: skip
        expected = text_losses(there)
        assert [row["nll"] for row in rows] == pytest.approx(expected.tolist(), abs=2e-5)
        change_of = (expected - text_losses(here)).tolist()
        assert [row["delta_nll"] for row in rows] == pytest.approx(change_of, abs=2e-5)
        assert max(abs(value) for value in change_of) > 1e-2
        js = js_bits(here, there).tolist()
        assert [row["logit_js"] for row in rows] == pytest.approx(js, rel=1e-3, abs=1e-7)
        for k in (1, 5, 10):
            shares = pytest.approx(agreement(here, there, k).tolist(), abs=1e-12)
            assert [row[f"logit_topk_{k}"] for row in rows] == shares
    assert [row["nll"] for row in alone] == [row["nll"] for row in found]
    assert [row["delta_nll"] for row in alone] == [row["delta_nll"] for row in found]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("layers.1.self_attn.q_norm", "layers.1.self_attn.k_norm"),
        ("layers.1.self_attn.k_norm", "layers.1.self_attn.q_norm"),
        ("layers.0.self_attn.q_norm", "layers.2.self_attn.q_norm"),
    ],
)
def test_a_replaced_gain_changes_the_attention_of_its_layer(qwen, own, other):
    comparison = Comparison(
        "q_norm" if own.endswith("q_norm") else "k_norm", own, other, ("layers.2.self_attn.k_norm",)
    )
    with open_streamed(qwen, None) as lm:
        given = replacement.passed(lm, IDS, [comparison.residual])
        (found, *_) = replacement.effects(lm, comparison, given, torch.zeros(16))
        everywhere = replacement.effects(lm, comparison, given, torch.zeros(16))
    here, there = logits_of(qwen), logits_of(qwen, moved(own, other))
    expected = (text_losses(there) - text_losses(here)).tolist()
    assert [row["delta_nll"] for row in everywhere] == pytest.approx(expected, abs=2e-5)
    assert max(abs(value) for value in expected) > 1e-3
    zero = next(null for null in found["nulls"] if null["null"] == "zero")
    without = logits_of(qwen, constant(comparison.residual, torch.zeros(16)))
    assert zero["nll"] == pytest.approx(text_losses(without)[0].item(), abs=2e-5)


def test_a_site_in_its_own_place_changes_exactly_nothing(llama, qwen):
    cases = [(llama, comparison) for comparison in COMPARISONS.values()]
    norm = "layers.1.self_attn.q_norm"
    cases.append((qwen, Comparison("q_norm", norm, "layers.1.self_attn.k_norm", ())))
    for folder, comparison in cases:
        with open_streamed(folder, None) as lm:
            given = replacement.passed(lm, IDS, [comparison.residual])
            for row in replacement.effects(lm, comparison, given, torch.zeros(16)):
                itself = next(null for null in row["nulls"] if null["null"] == nulls.SELF)
                shares = [itself[f"logit_topk_{k}"] for k in (1, 5, 10)]
                assert (itself["delta_nll"], itself["logit_js"], shares) == (0.0, 0.0, [1.0, 1.0, 1.0])
                assert row["delta_nll"] != 0


def test_a_replacement_is_the_remapped_model_from_end_to_end(llama):
    comparison = COMPARISONS["mlp"]
    with open_streamed(llama, None) as lm:
        found = replacement.changes(lm, comparison, replacement.passed(lm, IDS, [comparison.residual]))
        with lm.remapped({comparison.reference: comparison.substitute}):
            whole = lm.nll(IDS)
        assert torch.equal(lm.nll(IDS), replacement.passed(lm, IDS, []).nll)
    assert [row["nll"] for row in found] == pytest.approx(whole.double().mean(dim=1).tolist(), abs=1e-6)


def test_every_part_of_the_work_can_be_stopped(llama):
    comparison = COMPARISONS["mlp"]
    calls: list[str] = []
    with open_streamed(llama, None) as lm:
        given = replacement.passed(lm, IDS, [comparison.residual], lambda: calls.append("walk"))
        assert calls == ["walk", "walk"]
        calls.clear()
        replacement.effects(lm, comparison, given, torch.zeros(16), lambda: calls.append("work"))
    # Six variants are carried on, six losses are taken, and the head is gone through at least once.
    assert len(calls) >= 13


def test_divergences_do_not_depend_on_how_the_head_is_cut(llama, monkeypatch):
    comparison = COMPARISONS["mlp"]
    with open_streamed(llama, None) as lm:
        given = replacement.passed(lm, IDS, [comparison.residual])
        whole = replacement.effects(lm, comparison, given, torch.zeros(16))
        monkeypatch.setattr(replacement, "HEAD_ROWS", 21)
        cut = replacement.effects(lm, comparison, given, torch.zeros(16))
    for one, other in zip(whole, cut, strict=True):
        assert one["logit_js"] == pytest.approx(other["logit_js"], rel=1e-6)
        assert one["logit_topk_5"] == other["logit_topk_5"]


def sized(per_token: float) -> Any:
    return SimpleNamespace(width=1, plan_mib=lambda texts, tokens: 100.0 + per_token * texts * tokens)


def test_as_many_texts_go_together_as_the_budget_has_room_for():
    # 512 tokens together at most; a fake model of 0.25 MiB for each token beside 100 MiB.
    beside = replacement.planned_mib(sized(0.0), 1, 64, 6) - 100
    assert replacement.group_size(sized(0.0), 64, 64, 6, 1e6)[0] == 8
    assert replacement.group_size(sized(0.0), 3, 64, 6, 1e6)[0] == 3
    assert replacement.group_size(sized(0.0), 64, 1000, 6, 1e6)[0] == 1
    group, planned = replacement.group_size(sized(0.25), 64, 64, 6, 140.0 + beside)
    assert group == 2
    assert planned == pytest.approx(100 + 0.25 * 2 * 64 + beside, abs=1e-2)
    with pytest.raises(ConfigError, match=r"one text of 64 tokens would take about \d+ MiB, over the plan's"):
        replacement.group_size(sized(0.25), 64, 64, 6, 110.0)


def test_values_that_are_not_finite_are_refused():
    comparison = COMPARISONS["mlp"]

    @contextmanager
    def remapped(mapping: dict[str, str]) -> Any:
        yield

    broken = SimpleNamespace(
        remapped=remapped, branch=lambda site, z: SimpleNamespace(update=torch.full_like(z, math.inf))
    )
    with pytest.raises(
        DataError, match=r"layers\.2\.mlp gives NaN or infinite values in the place of layers\.1"
    ):
        replacement.update_of(broken, comparison, "layers.2.mlp", torch.zeros(1, 2, 4))  # pyright: ignore[reportArgumentType]
    lost = SimpleNamespace(nll_at=lambda z, ids: torch.full((1, 1), math.nan))
    given = replacement.Passed(torch.zeros(1, 2), {}, torch.zeros(1, 2, 4), torch.zeros(1, 1))
    with pytest.raises(DataError, match="a loss with a module replaced is not finite"):
        replacement._losses(lost, given, torch.zeros(1, 2, 4))  # pyright: ignore[reportArgumentType]
