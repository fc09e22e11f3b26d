"""The reader of safetensors against the official library, and every damaged or hostile file it refuses.

Values are compared bit by bit with ``safe_open``; files that the official library refuses are refused too.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from twinscope.lab.errors import DataError
from twinscope.models.tensor_files import PIECE_BYTES, open_tensors

MIXED = {"a.weight": torch.bfloat16, "b.weight": torch.float16, "c.weight": torch.float32, "d": torch.float64}


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with that header, given as an object or as the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["file", "single", "one in the index", "sharded"])
def test_every_value_is_the_official_librarys(tmp_path: Path, layout: str) -> None:
    # Longer than a piece, with a last piece that is not full, and special values of every type.
    tensors = {name: draw((37, PIECE_BYTES // 64), dtype, 1) for name, dtype in MIXED.items()}
    for tensor in tensors.values():
        tensor.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-7, -65000.0])
    tensors["scalar"], tensors["empty"] = torch.tensor(1.5), torch.empty((0, 3))
    shards = [tensors]
    names = ["model.safetensors"]
    if layout == "one in the index":
        names = ["weights.safetensors"]
    if layout == "sharded":
        shards = [dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])]
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name, {"format": "pt"})
    if layout in ("one in the index", "sharded"):
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with open_tensors(tmp_path / names[0] if layout == "file" else tmp_path) as files:
        assert files.names == tuple(sorted(tensors))
        for name in names:
            with safe_open(tmp_path / name, "pt") as official:
                for key in list(official.keys()):
                    theirs = official.get_tensor(key)
                    assert files.entry(key).shape == tuple(theirs.shape)
                    assert torch.equal(files.read(key).view(torch.int32), theirs.float().view(torch.int32))
        assert torch.equal(files.read("a.weight", rows=(5, 36)), tensors["a.weight"][5:36].float())
        out = torch.empty(2, PIECE_BYTES // 64)
        assert files.read("b.weight", out, (35, 37)) is out
        assert torch.equal(out, tensors["b.weight"][35:].float())
        assert torch.equal(files.gather("a.weight", [36, 0, 36]), tensors["a.weight"][[36, 0, 36]].float())


def test_the_hash_is_of_the_tensors_not_of_the_shards(tmp_path: Path) -> None:
    tensors = {name: draw((8, 8), dtype) for name, dtype in MIXED.items()}
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    where = {}
    for number, (name, tensor) in enumerate(reversed(tensors.items())):
        save_file({name: tensor}, tmp_path / "parts" / f"{number}.safetensors")
        where[name] = f"{number}.safetensors"
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with open_tensors(tmp_path / "whole") as whole, open_tensors(tmp_path / "parts") as parts:
        assert whole.sha256() == parts.sha256()
    tensors["d"][3, 3] += 1e-9
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    with open_tensors(tmp_path / "whole") as changed, open_tensors(tmp_path / "parts") as parts:
        assert changed.sha256() != parts.sha256()


def test_reading_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": draw((64, 65536), torch.bfloat16)}, path)  # 8 MiB on disk
    out = torch.empty(1, 65536)
    with open_tensors(path) as files:
        tracemalloc.start()
        for row in range(64):
            files.read("w", out, (row, row + 1))
        files.sha256()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * PIECE_BYTES


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    tensors = {str(n): draw((64, 4096), torch.bfloat16, n) for n in range(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    wrong = []
    with open_tensors(tmp_path / "x.safetensors") as files:

        def read(name: str) -> None:
            wrong.extend(name for _ in range(5) if not torch.equal(files.read(name), tensors[name].float()))

        threads = [threading.Thread(target=read, args=(name,)) for name in tensors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensor = draw((16, 64), dtype)
    tensor[11, 63] = value
    save_file({"layers.3.weight": tensor, "fine": draw((4,), dtype)}, tmp_path / "x.safetensors")
    with open_tensors(tmp_path / "x.safetensors") as files:
        files.read("fine")
        files.read("layers.3.weight", rows=(0, 11))
        for read in (
            lambda: files.read("layers.3.weight"),
            lambda: files.read("layers.3.weight", rows=(11, 12)),
            lambda: files.gather("layers.3.weight", [3, 11]),
        ):
            with pytest.raises(DataError, match=r"NaN or infinite values in layers\.3\.weight"):
                read()


def test_large_values_whose_sum_overflows_are_finite(tmp_path: Path) -> None:
    tensor = torch.full((16,), torch.finfo(torch.float32).max)
    save_file({"w": tensor}, tmp_path / "x.safetensors")
    with open_tensors(tmp_path / "x.safetensors") as files:
        assert torch.equal(files.read("w"), tensor)


def test_a_file_that_shrinks_or_changes_while_open_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": draw((1024, 64), torch.bfloat16)}, path)
    whole = path.read_bytes()
    with open_tensors(path) as files:
        os.truncate(path, len(whole) - 4096)
        with pytest.raises(DataError, match="shrank while it was open"):
            files.read("w")
    path.write_bytes(whole)
    with open_tensors(path) as files:
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
        os.utime(path, ns=(0, 0))
        with pytest.raises(DataError, match="changed while it was open"):
            files.read("w", rows=(0, 1))


def test_wrong_calls_are_defects_of_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": draw((4, 6), torch.bfloat16), "ids": torch.arange(3)}, path)
    with open_tensors(path) as files:
        for call in (
            lambda: files.read("w", rows=(1, 5)),
            lambda: files.read("w", rows=(-1, 2)),
            lambda: files.read("w", torch.empty(4, 5)),
            lambda: files.read("w", torch.empty(4, 6, dtype=torch.float64)),
            lambda: files.read("w", torch.empty(6, 4).t()),
            lambda: files.gather("w", [4]),
        ):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(DataError, match="holds no tensor 'v'"):
            files.read("v")
        with pytest.raises(DataError, match="ids is I64, not a floating-point weight"):
            files.read("ids")
    with pytest.raises(ValueError, match="closed"):
        files.read("w")


# --- refusing --------------------------------------------------------------------------------------------

HEADERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes, not even a header's length"),
    "seven bytes": (lambda p: p.write_bytes(b"\1" * 7), "7 bytes"),
    "header beyond the file": (lambda p: raw_file(p, {}, length=100), "truncated or no safetensors"),
    "header of 1 TB": (lambda p: raw_file(p, {}, length=1 << 40), "1099511627776 bytes"),
    "header of 2^64 - 1": (lambda p: raw_file(p, {}, length=(1 << 64) - 1), "18446744073709551615"),
    "no JSON": (lambda p: raw_file(p, b"{nonsense"), "is damaged"),
    "no UTF-8": (lambda p: raw_file(p, b'{"\xff": 1}'), "is damaged"),
    "a list": (lambda p: raw_file(p, []), "no object"),
    "deep": (lambda p: raw_file(p, b"[" * 100_000), "is damaged"),
    "an entry that is no object": (lambda p: raw_file(p, {"w": 3}), "is damaged"),
    "no offsets": (lambda p: raw_file(p, {"w": {"dtype": "F32", "shape": []}}, bytes(4)), "data_offsets"),
    "twice one key": (
        lambda p: raw_file(
            p, b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8),
        ),
        "'w' occurs twice",
    ),
    "out of range": (lambda p: raw_file(p, {"w": entry(0, 16)}, bytes(8)), "outside the file"),
    "backwards": (lambda p: raw_file(p, {"w": entry(8, 4, [1])}, bytes(8)), "outside the file"),
    "negative offset": (lambda p: raw_file(p, {"w": entry(-4, 0, [1])}, bytes(4)), "no natural numbers"),
    "negative shape": (lambda p: raw_file(p, {"w": entry(0, 4, [-1, -1])}, bytes(4)), "no natural numbers"),
    "a float shape": (lambda p: raw_file(p, {"w": entry(0, 4, [1.0])}, bytes(4)), "no natural numbers"),
    "a true shape": (lambda p: raw_file(p, {"w": entry(0, 4, [True])}, bytes(4)), "no natural numbers"),
    "shape and bytes": (lambda p: raw_file(p, {"w": entry(0, 8, [3])}, bytes(8)), r"shape \[3\] but takes 8"),
    "type and bytes": (lambda p: raw_file(p, {"w": entry(0, 8, [2], "BF16")}, bytes(8)), "BF16"),
    "a huge shape": (lambda p: raw_file(p, {"w": entry(0, 4, [1 << 62, 1 << 62])}, bytes(4)), "takes 4"),
    "unknown type": (lambda p: raw_file(p, {"w": entry(0, 4, [1], "F31")}, bytes(4)), "unknown type 'F31'"),
    "overlapping": (
        lambda p: raw_file(p, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' overlaps",
    ),
    "the same place": (lambda p: raw_file(p, {"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "overlaps"),
    "a hole": (lambda p: raw_file(p, {"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "leaves a hole"),
    "bytes left over": (lambda p: raw_file(p, {"a": entry(0, 4)}, bytes(12)), "end at byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers_are_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    write, words = HEADERS[case]
    path = tmp_path / "model.safetensors"
    write(path)
    tracemalloc.start()
    with pytest.raises(DataError, match=words) as caught:
        open_tensors(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.exit_code == 65
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert peak < 4 << 20
    # What the official library accepts of these, it reads wrongly or not at all: there is nothing to compare.
    if case not in ("a true shape", "twice one key"):
        with pytest.raises(Exception), safe_open(path, "np") as official:  # noqa: B017
            official.get_tensor("w")


@pytest.mark.parametrize("cut", [1, 4096, 8000])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": draw((64, 64), torch.bfloat16)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match="outside the file"):
        open_tensors(tmp_path)


INDEXES: dict[str, tuple[Any, str]] = {
    "a path above": ({"w": "../model.safetensors"}, "outside its folder"),
    "an absolute path": ({"w": "/etc/passwd"}, "outside its folder"),
    "a folder": ({"w": ".."}, "outside its folder"),
    "no name": ({"w": ""}, "outside its folder"),
    "a number": ({"w": 3}, "outside its folder"),
    "a missing shard": ({"w": "model-00009-of-00009.safetensors"}, "no weights file"),
    "a pickle": ({"w": "pytorch_model.bin"}, "pickle"),
    "a missing tensor": ({"w": "one.safetensors", "v": "one.safetensors"}, "holds 'v', which it does not"),
    "another shard": ({"w": "two.safetensors", "u": "one.safetensors"}, "which it does not"),
    "nothing": ({}, "names no tensors"),
    "a list": ([1], "no index of tensors"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_hostile_indexes_are_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": draw((2,), torch.float32)}, folder / "one.safetensors")
    save_file({"u": draw((2,), torch.float32)}, folder / "two.safetensors")
    save_file({"w": draw((2,), torch.float32)}, tmp_path / "model.safetensors")
    weight_map, words = INDEXES[case]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match=words):
        open_tensors(folder)


def test_an_index_with_a_key_twice_and_a_tensor_in_two_shards_are_refused(tmp_path: Path) -> None:
    save_file({"w": draw((2,), torch.float32)}, tmp_path / "one.safetensors")
    save_file({"w": draw((2,), torch.float32), "u": torch.ones(1)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "one.safetensors", "w": "two.safetensors"}}')
    with pytest.raises(DataError, match="'w' occurs twice"):
        open_tensors(tmp_path)
    index.write_text('{"weight_map": {"w": "one.safetensors", "u": "two.safetensors"}}')
    with pytest.raises(DataError, match=r"'w' is both in one\.safetensors and in .*two\.safetensors"):
        open_tensors(tmp_path)


def test_places_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.safetensors file"):
        open_tensors(tmp_path)
    with pytest.raises(DataError, match="there is no"):
        open_tensors(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match="pickles"):
        open_tensors(tmp_path)
    with pytest.raises(DataError, match="pickle by its name"):
        open_tensors(tmp_path / "pytorch_model.bin")
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    with pytest.raises(DataError, match="cannot read"):
        open_tensors(loop)
    with pytest.raises(DataError, match="cannot read the weights file"):
        open_tensors(tmp_path)
    loop.unlink()
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(DataError, match="no regular file"):
        open_tensors(tmp_path)
    (tmp_path / "more.safetensors").touch()
    with pytest.raises(DataError, match=r"2 \.safetensors files but no"):
        open_tensors(tmp_path)


def test_nothing_stays_open_after_a_refusal(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        raw_file(tmp_path / "model.safetensors", {"w": entry(0, 16)}, bytes(8))
        with pytest.raises(DataError):
            open_tensors(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    save_file({"w": draw((2,), torch.float32)}, tmp_path / "model.safetensors")
    open_tensors(tmp_path).close()
    assert len(os.listdir("/proc/self/fd")) == before
