"""Modules planted in small models: each found or rejected as it should be, with the nulls in order.

The weights are drawn at scales at which every branch matters, and the folder says "trained" so that the
levels can be seen; nothing here rests on what a real model has learned.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError
from twinscope.models.store.origin import read_origin, write_origin
from twinscope.models.streamed.model import open_streamed
from twinscope.models.tensor_files import open_tensors
from twinscope.reuse.branches import NORMS, both_ways, calibrate, compare
from twinscope.reuse.decision import Thresholds, judge, pair_level
from twinscope.reuse.planted import Planting, plant

ATTENTION = "layers.1.self_attn", "layers.4.self_attn"
MLP = "layers.1.mlp", "layers.4.mlp"
NORM = "layers.2.self_attn.k_norm", "layers.2.self_attn.q_norm"
SHAPE = {
    "vocab_size": 192,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, family: str, weights: str = "trained", dtype=torch.float32, **shape) -> Path:
    import transformers

    config = getattr(transformers, f"{family}Config")(**(SHAPE | shape))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    offset = float(family.startswith("Gemma"))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = rng.normal(size=tuple(parameter.shape))
            if parameter.ndim == 1:
                values = np.exp(0.4 * values) - offset
            else:
                # Queries and keys large enough for attention that is not uniform.
                values *= (2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0) / np.sqrt(
                    parameter.shape[-1]
                )
            parameter.copy_(torch.from_numpy(values).float())
    model.to(dtype).save_pretrained(folder, max_shard_size="200KB")
    write_origin(folder, weights, "drawn for a test", hashes(folder))  # pyright: ignore[reportArgumentType]
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "twinscope.json"
    }


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", "Qwen3")


@pytest.fixture
def planted(base, tmp_path):
    return lambda *plantings: plant(base, tmp_path / "planted", plantings)


def rows_of(folder: Path, kind: str, left: str, right: str) -> tuple[list[dict], list[dict]]:
    """Calibration and held-out rows of one pair: three texts of 24 tokens each."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, SHAPE["vocab_size"], size=(6, 24)))
    with open_streamed(folder, budget_mib=None) as lm:
        comparisons = both_ways(lm, kind, left, right, seed=0)  # pyright: ignore[reportArgumentType]
        wanted = {comparison.residual for comparison in comparisons}
        z = {point.site: point.z for point in lm.walk(ids, wanted)}
        found: tuple[list[dict], list[dict]] = ([], [])
        for comparison in comparisons:
            here: Tensor = z[comparison.residual]
            calibration = calibrate(lm, comparison, here[:3])
            for split, part in enumerate((here[:3], here[3:])):
                for text, row in enumerate(compare(lm, comparison, part, calibration, seed=0)):
                    name = f"{('calibration', 'heldout')[split]}-{text}"
                    found[split].append(
                        row
                        | {"kind": comparison.kind, "reference": comparison.reference, "text": name}
                        | {"substitute": comparison.substitute}
                    )
    return found


def verdict_of(folder: Path, kind: str, left: str, right: str):
    calibration, heldout = rows_of(folder, kind, left, right)
    verdict = judge(calibration, heldout, Thresholds())
    origin = read_origin(folder)
    assert origin is not None
    weights, planted = origin.evidence
    level, reason = pair_level(
        verdict,
        confirmed=True,
        parity_passed=True,
        weights=weights,
        planted=planted,
        seal_intact=True,
    )
    return level, reason, [*calibration, *heldout]


def values(rows, measure, null=None):
    if null is None:
        return [row[measure] for row in rows]
    return [part[measure] for row in rows for part in row["nulls"] if part["null"].startswith(null)]


def assert_nulls_in_order(rows) -> None:
    """Itself exactly 0, no update exactly 1, the mean no better than a little below 1, others far away."""
    assert set(values(rows, "branch_error", "self")) == {0.0}
    assert set(values(rows, "branch_error", "zero")) == {1.0}
    assert 0.5 < min(values(rows, "branch_error", "mean")) < max(values(rows, "branch_error", "mean")) < 1.2
    assert min(values(rows, "branch_error", "permuted")) > 1.0
    if rows[0]["kind"] not in NORMS:  # one gain changes part of an attention, another module all of it
        assert min(values(rows, "branch_error", "other")) > 1.0


@pytest.mark.parametrize(("kind", "sites"), [("attention", ATTENTION), ("mlp", MLP), ("q_norm", NORM)])
class TestEveryKind:
    def test_unplanted_modules_are_rejected(self, base, kind, sites):
        level, reason, rows = verdict_of(base, kind, *sites)
        assert level == "parity"
        assert "on calibration text" in reason
        assert_nulls_in_order(rows)

    def test_an_exact_copy_is_exactly_0(self, planted, kind, sites):
        level, reason, rows = verdict_of(planted(Planting(*sites)), kind, *sites)
        assert level == "candidate"
        assert "branch error is at most exactly 0" in reason
        distances = ["branch_error", "branch_error_trimmed", "logit_js"]
        distances += [] if kind == "mlp" else ["attention_js_worst"]
        distances += ["norm_error"] if kind == "q_norm" else []
        for measure in distances:
            assert set(values(rows, measure)) == {0.0}
        assert_nulls_in_order(rows)

    def test_a_copy_with_1_percent_noise_is_found(self, planted, kind, sites):
        level, _, rows = verdict_of(planted(Planting(*sites, noise=0.01)), kind, *sites)
        assert level == "candidate"
        measure = "norm_error" if kind == "q_norm" else "branch_error"
        assert 0.005 < min(values(rows, measure)) < max(values(rows, measure)) < 0.05
        assert_nulls_in_order(rows)

    def test_a_scaled_copy_is_rejected_and_its_error_is_the_scale(self, planted, kind, sites):
        source = sites[0]
        level, reason, rows = verdict_of(planted(Planting(*sites, scale=1.3)), kind, *sites)
        assert level == "parity"
        assert "counts as the same" in reason
        measure = "norm_error" if kind == "q_norm" else "branch_error"
        for row in rows:
            expected = 0.3 if row["reference"] == source else 0.3 / 1.3
            assert row[measure] == pytest.approx(expected, rel=1e-5)
            if kind == "attention":
                assert row["attention_js_worst"] == 0.0

    def test_random_weights_stay_below_a_candidate(self, base, tmp_path, kind, sites):
        random = plant(
            write_model(tmp_path / "random", "Qwen3", weights="random"), tmp_path / "out", [Planting(*sites)]
        )
        level, reason, _ = verdict_of(random, kind, *sites)
        assert level == "parity"
        assert reason.startswith("the weights are random")


class TestSameFunction:
    def test_neurons_in_another_order(self, planted):
        level, _, rows = verdict_of(planted(Planting(*MLP, permute=True)), "mlp", *MLP)
        assert level == "candidate"
        assert 0 < max(values(rows, "branch_error")) < 1e-5

    def test_heads_in_another_order(self, planted):
        level, _, rows = verdict_of(planted(Planting(*ATTENTION, permute=True)), "attention", *ATTENTION)
        assert level == "candidate"
        assert max(values(rows, "branch_error")) < 1e-5
        assert max(values(rows, "attention_js_worst")) < 1e-9

    @pytest.mark.parametrize(("kind", "sites"), [("attention", ATTENTION), ("mlp", MLP)])
    def test_a_gain_folded_into_the_matrices_behind_it(self, planted, kind, sites):
        folder = planted(Planting(*sites, fold=True))
        level, _, rows = verdict_of(folder, kind, *sites)
        assert level == "candidate"
        assert max(values(rows, "branch_error")) < 1e-5
        norm = {"mlp": "post_attention_layernorm", "attention": "input_layernorm"}[kind]
        with open_tensors(folder) as tensors:
            assert set(tensors.read(f"model.layers.4.{norm}.weight").tolist()) == {1.0}

    def test_gemmas_gain_of_1_is_stored_as_0(self, tmp_path):
        source = write_model(tmp_path / "gemma", "Gemma", max_position_embeddings=64)
        folder = plant(source, tmp_path / "out", [Planting(*MLP, fold=True)])
        assert verdict_of(folder, "mlp", *MLP)[0] == "candidate"
        with open_tensors(folder) as tensors:
            assert set(tensors.read("model.layers.4.post_attention_layernorm.weight").tolist()) == {0.0}

    def test_bfloat16_keeps_the_function_to_its_precision(self, tmp_path):
        source = write_model(tmp_path / "half", "Llama", dtype=torch.bfloat16)
        folder = plant(source, tmp_path / "out", [Planting(*MLP, fold=True, permute=True)])
        level, _, rows = verdict_of(folder, "mlp", *MLP)
        assert level == "candidate"
        assert 1e-4 < max(values(rows, "branch_error")) < 0.01


def test_one_module_of_a_layer_says_nothing_of_the_other(planted):
    folder = planted(Planting(*ATTENTION))
    assert verdict_of(folder, "attention", *ATTENTION)[0] == "candidate"
    level, reason, rows = verdict_of(folder, "mlp", *MLP)
    assert level == "parity"
    assert "calibration" in reason
    assert min(values(rows, "branch_error")) > 0.5


def test_three_alike_are_no_candidate_because_a_null_is_as_close(base, tmp_path):
    copies = [Planting("layers.1.mlp", f"layers.{layer}.mlp") for layer in (0, 2, 3, 4, 5)]
    level, reason, _ = verdict_of(plant(base, tmp_path / "out", copies), "mlp", *MLP)
    assert level == "parity"
    assert "nearest null" in reason


class TestTheCopy:
    def test_only_the_target_changes_and_the_source_never(self, base, planted):
        before = hashes(base)
        folder = planted(Planting(*MLP, noise=0.5))
        assert hashes(base) == before
        with open_tensors(base) as one, open_tensors(folder) as other:
            assert one.names == other.names
            changed = {name for name in one.names if not torch.equal(one.read(name), other.read(name))}
            for name in one.names:
                assert one.entry(name).dtype == other.entry(name).dtype
        assert changed == {
            f"model.layers.4.{name}.weight"
            for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        }
        assert len(list(folder.glob("*.safetensors"))) > 1

    def test_noise_has_the_size_asked_for(self, base, planted):
        with open_tensors(base) as one, open_tensors(planted(Planting(*MLP, noise=0.01))) as other:
            weight = one.read("model.layers.1.mlp.gate_proj.weight")
            noise = other.read("model.layers.4.mlp.gate_proj.weight") - weight
        assert float(noise.norm() / weight.norm()) == pytest.approx(0.01, rel=0.03)
        assert abs(float((noise * weight).sum() / weight.norm() / noise.norm())) < 0.05

    def test_an_attention_takes_its_norms_along(self, base, planted):
        with open_tensors(base) as one, open_tensors(planted(Planting(*ATTENTION))) as other:
            for name in ("self_attn.q_norm", "self_attn.o_proj", "input_layernorm"):
                expected = one.read(f"model.layers.1.{name}.weight")
                assert torch.equal(other.read(f"model.layers.4.{name}.weight"), expected)

    def test_it_says_that_it_is_planted_and_how(self, planted):
        folder = planted(Planting(*MLP, scale=1.3), Planting(*NORM))
        origin = read_origin(folder)
        assert origin is not None
        assert origin.weights == "planted"
        assert origin.evidence == ("trained", True)
        assert origin.source == (
            "layers.4.mlp from layers.1.mlp scaled by 1.3; "
            "layers.2.self_attn.q_norm from layers.2.self_attn.k_norm"
        )
        assert origin.details["planted"][0]["scale"] == 1.3
        assert origin.details["planted_in"] == "drawn for a test"
        assert origin.files == hashes(folder)

    def test_the_seed_decides(self, base, tmp_path):
        case = Planting(*MLP, noise=0.01, permute=True)
        first, second, third = (
            hashes(plant(base, tmp_path / name, [case], seed))
            for name, seed in (("a", 1), ("b", 1), ("c", 2))
        )
        assert first == second != third

    def test_beside_other_towers(self, base, tmp_path):
        # As released multimodal files are laid out: a prefix, and other towers with layers of their own.
        from safetensors.torch import load_file, save_file

        source = tmp_path / "tower"
        source.mkdir()
        tensors = {}
        for path in base.glob("*.safetensors"):
            tensors |= load_file(path)
        renamed = {name.replace("model.", "model.language_model.", 1): part for name, part in tensors.items()}
        renamed |= {f"mtp.{name.removeprefix('model.')}": part for name, part in tensors.items()}
        save_file({name: part.clone() for name, part in renamed.items()}, source / "model.safetensors")
        (source / "config.json").write_text((base / "config.json").read_text())
        folder = plant(source, tmp_path / "out", [Planting(*MLP)])
        changed = load_file(folder / "model.safetensors")
        left = renamed["model.language_model.layers.1.mlp.up_proj.weight"]
        assert torch.equal(changed["model.language_model.layers.4.mlp.up_proj.weight"], left)
        kept = "mtp.layers.4.mlp.up_proj.weight"
        assert torch.equal(changed[kept], renamed[kept])


class TestRefusals:
    @pytest.mark.parametrize(
        ("planting", "words"),
        [
            (Planting("layers.1.mlp", "layers.9.mlp"), "the model has no modules 'layers.9.mlp'"),
            (Planting("layers.1.mlp", "layers.2.self_attn"), "not of one kind"),
            (Planting("layers.1.mlp.up_proj", "layers.2.mlp"), "cannot be planted"),
            (Planting(*NORM, permute=True), "has no inner units"),
        ],
    )
    def test_what_cannot_be_planted(self, planted, tmp_path, planting, words):
        with pytest.raises(ConfigError, match=words) as caught:
            planted(planting)
        assert caught.value.exit_code == 2
        assert not (tmp_path / "planted").exists()

    def test_nothing_to_plant_and_nothing_to_plant_in(self, base, planted, tmp_path):
        with pytest.raises(ConfigError, match="nothing is to be planted"):
            planted()
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="no readable config"):
            plant(tmp_path / "empty", tmp_path / "out", [Planting(*MLP)])

    def test_a_folder_that_is_not_ours_is_left_alone(self, base, tmp_path):
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "notes.txt").write_text("keep me")
        with pytest.raises(ConfigError, match="did not make"):
            plant(base, mine, [Planting(*MLP)])
        assert (mine / "notes.txt").read_text() == "keep me"

    def test_a_family_without_these_tensors(self, tmp_path):
        import transformers

        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        with pytest.raises(ConfigError, match="no modules 'layers\\.0"):
            plant(tmp_path / "gpt2", tmp_path / "out", [Planting("layers.0.mlp", "layers.1.mlp")])

    def test_a_family_with_norms_behind_its_modules(self, tmp_path):
        source = write_model(tmp_path / "gemma3", "Gemma3Text", num_hidden_layers=2, sliding_window=16)
        with pytest.raises(ConfigError, match="has a norm behind it as well"):
            plant(source, tmp_path / "out", [Planting("layers.0.mlp", "layers.1.mlp")])


def test_config_of_a_copy_is_that_of_its_source(base, planted):
    folder = planted(Planting(*MLP))
    assert json.loads((folder / "config.json").read_text()) == json.loads((base / "config.json").read_text())
