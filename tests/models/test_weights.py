"""Weights on disk: exact round trips, every kind of damage as one sentence, strict loading into a module."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.weights import load_into, load_tensors, model_tensors, read_metadata, save_tensors


def raw(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.safetensors"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
)
def test_round_trip_is_exact(path: Path, dtype: torch.dtype) -> None:
    drawn = (torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    turned = drawn.clone().T
    tensors = {"a": drawn, "scalar": drawn[0, 0], "empty": drawn[:0], "turned": turned, "row": drawn[1]}
    save_tensors(path, tensors)
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)


def test_special_values_keep_their_bits(path: Path) -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    save_tensors(path, {"x": values})
    assert torch.equal(load_tensors(path)["x"].view(torch.int64), values.view(torch.int64))


def test_loaded_tensors_are_writable_and_own_their_memory(path: Path) -> None:
    save_tensors(path, {"x": torch.zeros(3), "y": torch.zeros(3)})
    loaded = load_tensors(path)
    loaded["x"] += 1
    assert loaded["y"].tolist() == [0, 0, 0]
    assert load_tensors(path)["x"].tolist() == [0, 0, 0]


def test_equal_content_gives_equal_bytes_and_the_returned_hash_is_theirs(path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.arange(4)}
    metadata = {f"key{i}": str(i) for i in range(9)}
    first = save_tensors(path, tensors, metadata)
    content = path.read_bytes()
    # The format wants the tensors to start at a multiple of 8 bytes.
    assert struct.unpack("<Q", content[:8])[0] % 8 == 0
    assert first == hashlib.sha256(content).hexdigest()
    assert save_tensors(path, dict(reversed(tensors.items())), dict(reversed(metadata.items()))) == first
    assert path.read_bytes() == content
    assert read_metadata(path) == metadata
    save_tensors(path, tensors)
    assert read_metadata(path) == {}


def test_metadata_beyond_ascii(path: Path) -> None:
    save_tensors(path, {"x": torch.ones(1)}, {"β": "ρ* = 1e-3"})
    assert read_metadata(path) == {"β": "ρ* = 1e-3"}
    assert load_tensors(path)["x"].item() == 1


def test_any_flipped_byte_is_found_by_the_hash(path: Path) -> None:
    digest = save_tensors(path, {"x": torch.arange(5.0)}, {"step": "3"})
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DataError, match=path.name):
            load_tensors(path, digest)
    path.write_bytes(whole)
    assert load_tensors(path, digest)["x"].tolist() == [0, 1, 2, 3, 4]


def test_the_sentence_for_a_changed_value_says_so(path: Path) -> None:
    digest = save_tensors(path, {"x": torch.arange(5.0)})
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match="changed since it was written"):
        load_tensors(path, digest)


def test_a_file_cut_anywhere_is_called_truncated(path: Path) -> None:
    save_tensors(path, {"x": torch.arange(5.0)}, {"step": "3"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"{path.name} is truncated"):
            load_tensors(path)


def test_a_text_is_no_weights_file(path: Path) -> None:
    path.write_text("Fellow-citizens of the Senate and of the House of Representatives")
    with pytest.raises(DataError, match="is no safetensors file"):
        load_tensors(path)


def test_bytes_after_the_last_tensor_are_refused(path: Path) -> None:
    save_tensors(path, {"x": torch.arange(5.0)})
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    with pytest.raises(DataError, match="its tensors take 20 bytes, but 28 follow"):
        load_tensors(path)


@pytest.mark.parametrize(
    "content",
    [
        raw(b"[]"),
        raw(b"nonsense"),
        raw(b'{"x": 3}'),
        raw(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}', b"\0" * 4),
        raw(b'{"x": {"dtype": "F32", "shape": [1]}}', b"\0" * 4),
        raw(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"\0" * 4),
        raw(b'{"x": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4),
        raw(b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"\0" * 4),
        raw(b'{"__metadata__": 3}'),
        raw(b"[" * 100_000),
        b"\xff" * 64,
    ],
)
def test_a_malformed_header_is_one_sentence(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (load_tensors, read_metadata):
        if read is read_metadata and b"dtype" in content:
            continue
        with pytest.raises(DataError, match=path.name) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.binary(max_size=80) | st.text(max_size=60).map(str.encode), body=st.binary(max_size=8))
def test_arbitrary_bytes_never_escape_as_another_error(path: Path, header: bytes, body: bytes) -> None:
    for content in (header, raw(header, body)):
        path.write_bytes(content)
        try:
            load_tensors(path)
        except DataError:
            continue
        assert json.loads(header) is not None


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no weights file .*gone\.safetensors"):
        load_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(DataError, match="cannot read the weights file"):
        load_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "model.PTH", "pytorch_model.bin", "last.ckpt", "state.pkl"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    for action in (load_tensors, read_metadata, lambda place: save_tensors(place, {"x": torch.ones(1)})):
        with pytest.raises(DataError, match="pickles run code when opened"):
            action(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_pickles_are_refused_under_a_false_name(path: Path, protocol: int | None) -> None:
    if protocol is None:
        torch.save({"x": torch.ones(1)}, path)
    else:
        path.write_bytes(pickle.dumps({"x": [1.0] * 9}, protocol))
    with pytest.raises(DataError, match="is a pickle under another name"):
        load_tensors(path)


def test_a_header_of_640_bytes_is_no_pickle(path: Path) -> None:
    save_tensors(path, {"x": torch.ones(1)}, {"pad": ""})
    short = struct.unpack("<Q", path.read_bytes()[:8])[0]
    save_tensors(path, {"x": torch.ones(1)}, {"pad": "." * (640 - short)})
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert load_tensors(path)["x"].item() == 1


def test_a_failed_write_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(path, {"x": torch.ones(1)})
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match=path.name):
        save_tensors(path, {"x": torch.zeros(1)})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_one_tensor_under_two_names_is_refused(path: Path) -> None:
    model = Tied()
    with pytest.raises(ValueError, match=r"tok\.weight and head\.weight are one tensor"):
        save_tensors(path, model.state_dict())
    assert not path.exists()


def test_a_tied_parameter_is_saved_once_and_stays_tied(path: Path) -> None:
    model, other = Tied(), Tied()
    save_tensors(path, model_tensors(model))
    loaded = load_tensors(path)
    assert loaded.keys() == {"tok.weight", "count"}
    load_into(other, loaded)
    assert torch.equal(other.head.weight, model.tok.weight)
    assert other.head.weight is other.tok.weight


def test_load_into_copies_everything_and_keeps_parameters_in_place() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    before = list(model.parameters())
    wanted = {name: torch.full_like(tensor, 0.5) for name, tensor in model_tensors(model).items()}
    load_into(model, wanted)
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in model.parameters())
    assert all(a is b and a.requires_grad for a, b in zip(before, model.parameters(), strict=True))


def damaged(change: str) -> dict[str, torch.Tensor]:
    tensors = {name: t.detach().clone() for name, t in model_tensors(nn.Linear(2, 3)).items()}
    match change:
        case "missing":
            del tensors["bias"]
        case "unexpected":
            tensors["extra"] = torch.ones(1)
        case "shape":
            tensors["bias"] = torch.ones(4)
        case "turned":
            tensors["weight"] = tensors["weight"].T
        case "dtype":
            tensors["bias"] = tensors["bias"].double()
        case "nan":
            tensors["bias"][1] = float("nan")
        case "inf":
            tensors["weight"][0, 1] = -float("inf")
    return tensors


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", r"run/w\.safetensors lack bias"),
        ("unexpected", r"run/w\.safetensors hold extra"),
        ("shape", "bias has shape 4 but this model needs 3"),
        ("turned", "weight has shape 2×3 but this model needs 3×2"),
        ("dtype", "bias is float64 but this model is float32"),
        ("nan", "NaN or infinite values in bias"),
        ("inf", "NaN or infinite values in weight"),
    ],
)
def test_load_into_refuses_and_changes_nothing(change: str, sentence: str) -> None:
    model = nn.Linear(2, 3)
    before = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    with pytest.raises(DataError, match=sentence):
        load_into(model, damaged(change), origin="run/w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model_tensors(model).items())


def test_long_lists_of_names_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    with pytest.raises(DataError, match=r"lack 0\.weight, 0\.bias, 1\.weight, 1\.bias and 4 more:"):
        load_into(model, {})
