"""Random weights at a real shape: count, layout, determinism, resume, and what an interruption leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from twinscope.lab.errors import ConfigError, Stopped
from twinscope.models.store import synth
from twinscope.models.store.library import known_models, model_folder
from twinscope.models.store.origin import is_whole, read_origin
from twinscope.models.store.synth import SHAPES, synthesize, text_tensors
from twinscope.models.tensor_files import open_tensors
from twinscope.models.tensor_writer import PlannedTensor, write_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_the_real_shape_has_exactly_its_parameters() -> None:
    tensors = text_tensors("qwen3.5-2b")
    assert sum(math.prod(tensor.shape) for tensor in tensors) == 1_881_825_088
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    full = [n for n in range(24) if f"model.layers.{n}.self_attn.q_proj.weight" in shapes]
    linear = [n for n in range(24) if f"model.layers.{n}.linear_attn.A_log" in shapes]
    assert full == [3, 7, 11, 15, 19, 23]
    assert len(linear) == 18
    assert not set(full) & set(linear)
    assert shapes["model.embed_tokens.weight"] == (248_320, 2048)
    assert "lm_head.weight" not in shapes  # tied
    # 8 query heads of 256 with a gate each, 2 key and value heads of 256, a convolution over 4 tokens.
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (2 * 8 * 256, 2048)
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (2 * 256, 2048)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (3 * 16 * 128, 1, 4)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (6144, 2048)
    rope = SHAPES["qwen3.5-2b"].text["rope_parameters"]
    assert (rope["rope_theta"], rope["partial_rotary_factor"] * 256) == (1e7, 64)


def test_both_layouts_hold_the_same_model_for_the_library() -> None:
    import transformers

    models = []
    for layout in ("library", "released"):
        folder = synthesize("qwen3.5-tiny", layout=layout, quiet=True)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["mismatched_keys"]
        assert sum(p.numel() for p in model.parameters()) == SHAPES["qwen3.5-tiny"].parameters
        models.append(model.eval())
    ids = torch.arange(80).view(2, 40)
    with torch.no_grad():
        library, released = (m(input_ids=ids, output_hidden_states=True) for m in models)
    assert torch.equal(library.logits, released.logits)
    sizes = [states.pow(2).mean().sqrt().item() for states in library.hidden_states]
    assert 0.01 < min(sizes) <= max(sizes) < 100
    # Layers do something: random weights that hardly move the residual would test nothing.
    moved = (library.hidden_states[4] - library.hidden_states[0]).norm() / library.hidden_states[0].norm()
    assert moved > 0.3


def test_the_released_layout_is_that_of_the_released_files() -> None:
    folder = synthesize("qwen3.5-tiny", layout="released", quiet=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["text_config"]["model_type"] == "qwen3_5_text"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors-00001-of-00001.safetensors"}
    tensors = stored(folder)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in tensors} == {
        "model.language_model", "model.visual", "mtp.layers", "mtp.fc", "mtp.norm",
        "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
    }  # fmt: skip
    kinds = {name: t.dtype for name, t in tensors.items() if t.dtype != torch.bfloat16}
    assert set(kinds.values()) == {torch.float32}
    assert all(name.endswith(("A_log", "linear_attn.norm.weight")) for name in kinds)
    assert len(kinds) == 2 * 6


def test_values_lie_where_they_make_sense() -> None:
    tensors = {k: t.double() for k, t in stored(synthesize("qwen3.5-tiny", quiet=True)).items()}
    for name, values in tensors.items():
        if name.endswith("A_log"):
            assert 0.009 <= values.exp().min() <= values.exp().max() <= 16.1, name
        elif name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(values)
            assert 0.0009 <= step.min() <= step.max() <= 0.11, name
        elif values.ndim > 1:
            inputs = math.prod(values.shape[1:])
            # The standard deviation of n normal values is within 4/√(2n) of theirs.
            assert values.std() * math.sqrt(inputs) == pytest.approx(1, abs=4 / math.sqrt(2 * values.numel()))
        else:
            centre = float(name.endswith("linear_attn.norm.weight"))
            assert abs(values.mean() - centre) < 0.1, name


def test_values_depend_on_seed_and_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stored(synthesize("qwen3.5-tiny", out=tmp_path / "a", quiet=True))
    cut = stored(synthesize("qwen3.5-tiny", out=tmp_path / "b", shard_bytes=100_000, quiet=True))
    other = stored(synthesize("qwen3.5-tiny", out=tmp_path / "c", seed=1, quiet=True))
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 5
    assert first.keys() == cut.keys() == other.keys()
    assert all(torch.equal(first[name], cut[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    matrices = [name for name in first if name.endswith("up_proj.weight")]
    assert not torch.equal(first[matrices[0]], first[matrices[1]])
    # Many blocks, drawn ahead by threads, are in order.
    monkeypatch.setattr(synth, "_BLOCK", 1000)
    small = [stored(synthesize("qwen3.5-tiny", out=tmp_path / x, quiet=True)) for x in ("d", "e")]
    assert all(torch.equal(small[0][name], small[1][name]) for name in first)
    name = "model.embed_tokens.weight"
    block = synth._block(PlannedTensor(name, torch.bfloat16, (512, 64)), name,
                         f"synth qwen3.5-tiny {name}", 0, 3, 1000)  # fmt: skip
    assert torch.equal(small[0][name].flatten()[3000:4000], block)


def test_an_interrupted_call_keeps_whole_shards_and_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = synthesize("qwen3.5-tiny", out=cache / "models" / "reference", shard_bytes=200_000, quiet=True)
    calls = []

    def stop_in_the_third(path: Path, *arguments: object) -> str:
        calls.append(path.name)
        if len(calls) == 3:
            blocks = arguments[1]

            def breaks(tensor: PlannedTensor):
                yield next(iter(blocks(tensor)))  # pyright: ignore
                raise KeyboardInterrupt

            arguments = (arguments[0], breaks, *arguments[2:])
        return write_tensors(path, *arguments)  # pyright: ignore

    monkeypatch.setattr(synth, "write_tensors", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        synthesize("qwen3.5-tiny", shard_bytes=200_000, quiet=True)
    assert known_models() == ["reference"]
    with pytest.raises(ConfigError, match="was not finished: run the command that makes it again"):
        model_folder("qwen3.5-tiny")
    left = cache / "models" / ".making-qwen3.5-tiny"
    assert sorted(path.name for path in left.iterdir()) == calls[:2]
    for path in left.iterdir():
        with safe_open(path, "pt") as file:
            assert file.keys()
    calls.clear()
    monkeypatch.setattr(synth, "write_tensors", lambda *a: (calls.append(a[0].name), write_tensors(*a))[1])
    folder = synthesize("qwen3.5-tiny", shard_bytes=200_000, quiet=True)
    assert len(calls) == len(list(folder.glob("*.safetensors"))) - 2
    assert not left.exists()
    assert read_origin(folder).files == read_origin(whole).files  # pyright: ignore[reportOptionalMemberAccess]
    calls.clear()
    assert synthesize("qwen3.5-tiny", shard_bytes=200_000, quiet=True) == folder
    assert calls == []


def test_the_folder_says_what_it_is(cache: Path) -> None:
    folder = synthesize("qwen3.5-tiny", quiet=True)
    assert folder == cache / "models" / "qwen3.5-tiny" == model_folder("qwen3.5-tiny")
    origin = read_origin(folder)
    assert origin is not None
    assert (origin.weights, origin.evidence) == ("random", ("random", False))
    assert is_whole(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert not is_whole(folder)
    synthesize("qwen3.5-tiny", quiet=True)
    assert is_whole(folder)


def test_what_is_asked_wrongly_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no shape 'qwen3.5-2' to make \(did you mean 'qwen3.5-2b'\?\)"):
        synthesize("qwen3.5-2", quiet=True)
    synthesize("qwen3.5-tiny", name="mine", quiet=True)
    with pytest.raises(ConfigError, match="holds another model"):
        synthesize("qwen3.5-tiny", name="mine", seed=1, quiet=True)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1 << 30})())
    with pytest.raises(Stopped, match=r"'qwen3.5-2b' takes 3,589 MiB in .*, where 1,024 MiB are free"):
        synthesize("qwen3.5-2b", quiet=True)
    assert known_models() == ["mine"]


def test_the_writer_writes_what_the_official_library_reads(tmp_path: Path) -> None:
    values = {
        "half": torch.arange(6, dtype=torch.float16).view(2, 3),
        "wide": torch.tensor([1.5, -2.0]),
        "brain": torch.randn(3, 4).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
    }
    planned = [PlannedTensor(name, t.dtype, tuple(t.shape)) for name, t in values.items()]
    digest = write_tensors(
        tmp_path / "x.safetensors", planned, lambda p: values[p.name].flatten().split(2), {"format": "pt"}
    )
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with open_tensors(tmp_path / "x.safetensors") as files:
        assert all(files.entry(p.name).offset % p.dtype.itemsize == 0 for p in planned)
    import hashlib

    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="got 4 bytes, planned 8"):
        write_tensors(tmp_path / "y.safetensors", planned[1:2], lambda p: [values["wide"][:1]])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.safetensors"]
