"""Sweep: losses against the library's own model with modules exchanged, grouping, and rows that are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import write_llama
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.run import Run
from twinscope.models.streamed.model import open_streamed
from twinscope.reuse import nulls
from twinscope.reuse.swap import Swap
from twinscope.reuse.swap_plan import sealed_plan
from twinscope.reuse.sweep import (
    Matrix,
    Place,
    Stacks,
    changes,
    choose_sites,
    choose_stacks,
    matrices_of,
    planned_mib,
    site_rows,
    sweep_part,
    sweep_split,
)

PRE_NORM = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("sweep") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 48, (3, 10), generator=torch.Generator().manual_seed(5))


def library_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean nats per predicted token of each text."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.double()
    return torch.stack([cross_entropy(part[:-1], text[1:]) for part, text in zip(logits, ids, strict=True)])


def exchanged(model: Any, layer: int, part: str, other: int) -> Any:
    """A copy of the library's model in which a branch of one layer is that of another, pre-norm included."""
    changed = copy.deepcopy(model)
    layers = changed.model.layers
    for name in (part, PRE_NORM[part]):
        setattr(layers[layer], name, copy.deepcopy(getattr(layers[other], name)))
    return changed


def silenced(model: Any, layer: int, part: str) -> Any:
    """A copy in which a branch of one layer adds nothing."""
    changed = copy.deepcopy(model)

    def nothing(module: Any, inputs: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if part == "self_attn" else torch.zeros_like(output)

    getattr(changed.model.layers[layer], part).register_forward_hook(nothing)
    return changed


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
@pytest.mark.parametrize("layer", [0, 2])
def test_changes_are_those_of_the_library_with_the_modules_exchanged(folder, ids, part, layer):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    site = f"layers.{layer}.{part}"
    by = [f"layers.{other}.{part}" for other in range(LAYERS) if other != layer]
    expected = {
        f"layers.{other}.{part}": library_losses(exchanged(model, layer, part, other), ids)
        for other in range(LAYERS)
        if other != layer
    }
    expected[nulls.ZERO] = library_losses(silenced(model, layer, part), ids)
    own = library_losses(model, ids)
    kind = "mlp" if part == "mlp" else "attention"
    with open_streamed(folder, None) as lm:
        (point,) = lm.walk(ids, {site})
        kept = point.z.clone()
        place = Place(kind, site, point.z, ids, lm.nll(ids))
        for together in (2, 1, 100):
            found = changes(lm, place, by, together)
            # The module itself is the model bit for bit, however others are stacked.
            assert found.pop(nulls.SELF) == [0.0] * 3
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert found[name] == pytest.approx((values - own).tolist(), rel=1e-6, abs=2e-6), name
                assert (values - own).abs().min() > 1e-3, name
        # Nothing is altered, and nothing stays re-pointed.
        assert torch.equal(point.z, kept)
        assert torch.equal(lm.nll(ids), place.nll)


def test_a_norm_is_replaced_inside_its_attention(tmp_path, ids):
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, tie_word_embeddings=True,
        initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.add_(0.5 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "qwen")
    changed: Any = copy.deepcopy(model)
    changed.model.layers[1].self_attn.q_norm = copy.deepcopy(changed.model.layers[2].self_attn.q_norm)
    with open_streamed(tmp_path / "qwen", None) as lm:
        matrices, _ = choose_sites(lm, ["q_norm"])
        assert matrices == [Matrix("q_norm", tuple(f"layers.{n}.self_attn.q_norm" for n in range(3)))]
        site, other = matrices[0].sites[1:]
        (point,) = lm.walk(ids, {site})
        found = changes(lm, Place("q_norm", site, point.z, ids, lm.nll(ids)), [other], together=8)
    own = library_losses(model, ids)
    expected = library_losses(changed, ids) - own
    assert expected.abs().min() > 1e-4
    assert found[other] == pytest.approx(expected.tolist(), rel=1e-6, abs=2e-6)
    nothing = library_losses(silenced(model, 1, "self_attn"), ids) - own
    assert found[nulls.ZERO] == pytest.approx(nothing.tolist(), rel=1e-6, abs=2e-6)
    assert found[nulls.SELF] == [0.0] * 3


def test_weights_that_overflow_are_refused_by_name(tmp_path, ids):
    folder = write_llama(tmp_path / "model", layers=3)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "broken")
    with open_streamed(tmp_path / "broken", None) as lm:
        (point,) = lm.walk(ids, {"layers.0.mlp"})
        place = Place("mlp", "layers.0.mlp", point.z, ids, torch.zeros(3, 9))
        with pytest.raises(
            DataError, match=r"layers\.2\.mlp gives NaN or infinite values in the place of lay"
        ):
            changes(lm, place, ["layers.2.mlp"], together=1)
        place = replace(place, nll=torch.full((3, 9), float("nan")))
        with pytest.raises(
            DataError, match=r"layers\.0\.mlp replaced by itself gives a loss that is no finite"
        ):
            changes(lm, place, ["layers.1.mlp"], together=1)


def plain(count: int, split: Any, tokens: int = 10) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(len(split))
    return [
        {
            "name": f"{split}-{n}",
            "split": split,
            "origin": "a test",
            "ids": torch.randint(0, 48, (tokens,), generator=draws).tolist(),
            "text": "a text",
        }
        for n in range(count)
    ]


@contextmanager
def swept(folder: Path, root: Path) -> Iterator[Swap]:
    """Three calibration and two held-out texts in groups of two, three replacements in a stack."""
    passages = [*plain(3, "calibration"), *plain(2, "heldout")]
    with open_streamed(folder, None) as lm, Run.create(root, "swap", "tiny", "name = 'tiny'\n", {}) as run:
        matrices, _ = choose_sites(lm)
        content = {"texts": {"passages": passages}, "group": 2, **sweep_part(matrices, Stacks(2, 3), 1)}
        yield Swap(lm, sealed_plan(content), run, lambda: {"seconds": 0.0})


def test_rows_hold_every_replacement_on_every_text(folder, tmp_path):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with swept(folder, tmp_path) as sweep:
        asked: list[tuple[str, int, int]] = []
        sweep_split(sweep, "calibration", lambda *unit: asked.append(unit))
        attention, mlp = matrices_of(sweep.plan)
        assert (attention.kind, mlp.kind) == ("attention", "mlp")
        rows = site_rows(sweep, mlp, "calibration")
        assert [(row["replaced"], row["texts"]) for row in rows] == [
            (site, texts)
            for site in mlp.sites
            for texts in (["calibration-0", "calibration-1"], ["calibration-2"])
        ]
        assert len(site_rows(sweep, attention, "calibration")) == 2 * LAYERS
        assert site_rows(sweep, mlp, "heldout") == []
        by_name = {passage.name: torch.tensor([passage.ids]) for passage in sweep.plan.texts}
        for row in rows:
            layer = int(row["replaced"].split(".")[1])
            assert row["itself"] == [0.0] * len(row["texts"])
            assert row["by"] == [site for site in mlp.sites if site != row["replaced"]]
            for place, text in enumerate(row["texts"]):
                before = library_losses(model, by_name[text]).item()
                assert row["nll_before"][place] == pytest.approx(before, abs=1e-6)
                nothing = library_losses(silenced(model, layer, "mlp"), by_name[text]).item()
                assert row["zero"][place] == pytest.approx(nothing - before, abs=2e-6)
                for other, values in zip(row["by"], row["delta_nll"], strict=True):
                    number = int(other.split(".")[1])
                    after = library_losses(exchanged(model, layer, "mlp", number), by_name[text]).item()
                    assert values[place] == pytest.approx(after - before, abs=2e-6), (row["replaced"], other)
        # Two groups of eight sites; a group asks once, a site before it is evaluated and before each stack.
        assert {total for _, _, total in asked} == {16}
        assert sorted({done for _, done, _ in asked}) == list(range(16))
        assert len(asked) == 2 + 16 * (1 + 2)


def test_a_sweep_that_was_stopped_goes_on_where_it_was(folder, tmp_path):
    with swept(folder, tmp_path / "whole") as sweep:
        sweep_split(sweep, "heldout", lambda *_: None)
        expected = [{**row, "timing": None} for row in sweep.run.rows]

    def stop(at: int) -> Callable[[str, int, int], None]:
        def before(stage: str, done: int, total: int) -> None:
            if done == at:
                raise Stopped("a test")

        return before

    for at in (0, 5):
        with swept(folder, tmp_path / f"at-{at}") as sweep:
            with pytest.raises(Stopped):
                sweep_split(sweep, "heldout", stop(at))
            assert len(sweep.run.rows) == at
            sweep_split(sweep, "heldout", lambda *_: None)
            rows = [{**row, "timing": None} for row in sweep.run.rows]
            assert rows == expected
            # All rows are there, so the model is not asked again.
            nothing: Any = None
            sweep_split(replace(sweep, lm=nothing), "heldout", lambda *_: None)


class Shapes:
    """Sites with widths; one takes another's tensors only if both are as wide."""

    def __init__(self, **widths: list[int]) -> None:
        self.widths = {
            kind: {f"layers.{n}.{kind}": width for n, width in enumerate(found)}
            for kind, found in widths.items()
        }
        self.width = 2

    def sites(self, kind: str) -> list[str]:
        return list(self.widths.get(kind, {}))

    @contextmanager
    def remapped(self, mapping: dict[str, str]) -> Iterator[None]:
        ((to, of),) = mapping.items()
        of_all = {site: width for sites in self.widths.values() for site, width in sites.items()}
        if of_all[to] != of_all[of]:
            raise ConfigError("their shapes differ")
        yield


def chosen(lm: Any, *arguments: Any) -> tuple[list[tuple[str, list[int]]], list[str]]:
    matrices, notes = choose_sites(lm, *arguments)
    return [(m.kind, [int(site.split(".")[1]) for site in m.sites]) for m in matrices], notes


def test_only_sites_that_fit_in_each_others_place_meet():
    lm = Shapes(mlp=[8, 8, 4, 8, 4, 16])
    matrices, notes = chosen(lm)
    assert matrices == [("mlp", [0, 1, 3]), ("mlp", [2, 4])]
    assert notes == [
        "the model has no two sites of the kind 'attention' that fit in each other's place",
        "layers.5.mlp is left out: no other site that is swept has its shapes",
    ]
    assert Matrix("mlp", ("a", "b", "c")).pairs == 6
    assert chosen(lm, ["mlp"], 3) == ([("mlp", [0, 3])], [])
    assert chosen(Shapes(attention=[8] * 7), ["attention"], 2) == ([("attention", [0, 2, 4, 6])], [])
    with pytest.raises(
        ConfigError, match="--kind mlp: the model has no two sites of the kind 'mlp' that fit"
    ):
        chosen(lm, ["mlp"], 5)
    with pytest.raises(
        ConfigError, match="there is nothing to sweep: the model has no two sites of the kind"
    ):
        chosen(Shapes(linear_attention=[8, 8]))


class Sizes:
    """A model whose pass takes ``token`` MiB a token beside what the process holds."""

    width, token = 1024, 0.01

    def __init__(self, holds: float) -> None:
        self.holds = holds

    def plan_mib(self, texts: int, tokens: int) -> float:
        return self.holds + self.token * texts * tokens


@pytest.mark.parametrize("holds", [100.0, 1234.567])
def test_stacks_fill_what_they_may_take_whatever_the_process_holds(holds):
    lm: Any = Sizes(holds)
    # 3200 tokens in a stack: 100 texts of 32.
    assert choose_stacks(lm, 4, 32, 20) == Stacks(4, 20)
    assert choose_stacks(lm, 4, 32, 60) == Stacks(4, 25)
    # 25 texts of 128; 90 texts go in four groups of 23 at most.
    assert choose_stacks(lm, 12, 128, 30) == Stacks(12, 2)
    assert choose_stacks(lm, 90, 128, 30) == Stacks(23, 1)
    assert choose_stacks(lm, 3, 9000, 30) == Stacks(1, 1)
    # Four blocks of 768 tokens of the vocabulary, 3 MiB of 1024 channels each, are more than the streams.
    beside, head = 3 * 4 * 4 * 32 * 1024 / 2**20, 4 * 80 * 32 * (3 * 1024 + 4 * 768) / 2**20
    assert planned_mib(lm, Stacks(4, 20), 32) == pytest.approx(holds + head + beside)
    # With so wide a model the pass takes more.
    lm.width, lm.token = 32768, 1.0
    beside = 3 * 4 * 4 * 32 * 32768 / 2**20
    assert planned_mib(lm, Stacks(4, 20), 32) == pytest.approx(holds + 80 * 32 + beside)
