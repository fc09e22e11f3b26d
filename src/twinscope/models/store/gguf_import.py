"""A causal language model in a GGUF file as a Hugging Face folder: configuration, tokenizer, safetensors.

Covers the dense architectures of :data:`ARCHITECTURES`, every quantisation that the ``gguf`` package can
undo, and the byte-level tokenizer of SmolLM2; a file with another tokenizer needs one given beside it.
Whatever would change the computation and has no place in the result is refused by name: scaled rotary angles,
extra tensors, unknown settings. The header is checked in ``gguf_header.py`` first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import DataError
from twinscope.lab.progress import Progress
from twinscope.models.store.gguf_header import check_gguf
from twinscope.models.store.library import require_space
from twinscope.models.store.origin import file_sha256
from twinscope.models.tensor_writer import PlannedTensor, write_tensors

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

#: Undo the quantisation of so many values at a time.
_BLOCK = 1 << 22
_NORMAL, _CONTROL = 1, 3  # kinds of token in a GGUF vocabulary
#: Metadata of every architecture -> key of the configuration.
_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
#: Metadata that may be missing, and then have these values: the number of heads, and the usual base.
_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")


@dataclass(frozen=True)
class _Architecture:
    """How one architecture of GGUF becomes a model of the library, beyond :data:`_COMMON`."""

    model_type: str
    keys: Mapping[str, str]  # metadata -> configuration
    fixed: Mapping[str, Any]  # configuration that the architecture implies
    head_dim: bool = True  # whether the configuration has a head_dim of its own
    pairs: bool = False  # query and key rows lie in rotary pairs of neighbours
    norm_shift: float = 0.0  # what the file added to the weights of norms


_SCALED = "rope.scaling.original_context_length"
_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_GEMMA = {"attention.sliding_window": "sliding_window"}
ARCHITECTURES = {
    "llama": _Architecture(
        "llama", _COMMON, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}, pairs=True
    ),
    "qwen2": _Architecture("qwen2", _COMMON, {"hidden_act": "silu"}, head_dim=False),
    "qwen3": _Architecture("qwen3", _COMMON, {"hidden_act": "silu", "attention_bias": False}),
    "phi3": _Architecture(
        "phi3", {**_COMMON, "attention.sliding_window": "sliding_window"}, {"hidden_act": "silu"},
        head_dim=False,
    ),
    "gemma2": _Architecture(
        "gemma2",
        {**_COMMON, **_GEMMA, "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        {"hidden_activation": "gelu_pytorch_tanh"},
        norm_shift=1.0,
    ),
    "gemma3": _Architecture(
        "gemma3_text", {**_COMMON, **_GEMMA}, {"hidden_activation": "gelu_pytorch_tanh"}, norm_shift=1.0
    ),
    "gpt2": _Architecture("gpt2", _GPT2, {"activation_function": "gelu_new"}, head_dim=False),
}  # fmt: skip
#: Gemma's largest models scale attention by a rule that the file does not tell: their numbers of layers.
_UNTOLD_SCALE = {"gemma2": 46, "gemma3": 62}


def convert_gguf(path: Path, work: Path, tokenizer: Path | None = None, quiet: bool = False) -> Converted:
    """Write the model in ``path`` into the folder ``work``; the caller says whether it then is whole.

    Weights are bf16 where they were quantised or lose nothing by it, and else keep the file's type.
    Memory: one matrix at a time in float32 where rows change places, else 2^22 values.

    Raises:
        DataError: no GGUF, a damaged one, or one of an architecture, tokenizer or setting that has no place
            in the result; weights that are not finite; tensors missing or left over.
        Stopped, ConfigError: the folder cannot be written.
    """
    from gguf import GGUFReader

    check_gguf(path)
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no GGUF file, or a damaged one ({error}): get it again") from None
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise DataError(
            f"{path} holds the architecture '{architecture}', which is not converted "
            f"(known: {', '.join(ARCHITECTURES)}): import a Hugging Face folder of it"
        )
    config = _config(path, fields, architecture, reader)
    text, reason = _tokenizer(path, fields, tokenizer)
    plan = _plan(path, reader, config, architecture)
    require_space(work, sum(tensor.nbytes for tensor in plan), path.name)
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    if text is not None:
        texts["tokenizer.json"] = text
    files = {}
    for name, content in texts.items():
        write_atomic(work / name, content.encode())
        files[name] = file_sha256(work / name)
    total = sum(tensor.nbytes for tensor in plan)
    with Progress(f"{path.name}, MiB", quiet) as progress:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress.update(done >> 20, total >> 20)

        name = "model.safetensors"
        files[name] = write_tensors(
            work / name, list(plan), lambda tensor: plan[tensor](tensor.dtype), {"format": "pt"}, advance
        )
    return Converted(files, architecture, reason)


@dataclass(frozen=True)
class Converted:
    """What was written: file names with their SHA-256, and why there is no tokenizer, if there is none."""

    files: dict[str, str]
    architecture: str
    tokenizer_reason: str | None


def _config(path: Path, fields: dict[str, Any], architecture: str, reader: GGUFReader) -> dict[str, Any]:
    """What ``config.json`` says, from the metadata; everything that is not understood is refused."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = ARCHITECTURES[architecture]
    known = {
        name.removeprefix(f"{architecture}."): value
        for name, value in fields.items()
        if name.startswith(f"{architecture}.")
    }
    parts = fields.get("split.count", 1)
    if parts != 1:
        raise DataError(f"{path} is one of {parts} parts of a model: join them with gguf-split first")
    missing = [key for key in kind.keys if key not in known and key not in _OPTIONAL]
    if missing:
        raise DataError(f"{path}: its metadata lack '{architecture}.{missing[0]}': get it again")
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise DataError(f"{path} has no token vectors (token_embd.weight): get it again")
    try:
        config = {target: _plain(known[key]) for key, target in kind.keys.items() if key in known}
        heads = config["n_head" if architecture == "gpt2" else "num_attention_heads"]
        width = config["n_embd" if architecture == "gpt2" else "hidden_size"]
        if architecture != "gpt2":
            config.setdefault("num_key_value_heads", heads)
            config.setdefault("rope_theta", 10000.0)
        own = known.get("attention.key_length", known.get("rope.dimension_count", width // heads))
        head = int(own)
        if kind.head_dim:
            config["head_dim"] = head
        elif head * heads != width:
            raise DataError(f"{path}: heads of {head} channels have no place in a {kind.model_type} model")
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{path}: its metadata make no {kind.model_type} model ({error})") from None
    if architecture.startswith("gemma"):
        if config["num_hidden_layers"] == _UNTOLD_SCALE[architecture]:
            raise DataError(
                f"{path}: how this size of {architecture} scales its attention is not in the file: "
                "import the Hugging Face folder"
            )
        config["query_pre_attn_scalar"] = head
    if architecture == "llama" and "blk.0.attn_q.bias" in shapes:
        raise DataError(f"{path}: a llama model with biases in its attention is not converted")
    scaling = known.get("rope.scaling.type", "none")
    if scaling != "none":
        raise DataError(f"{path} scales its rotary angles ('{scaling}'), which is not converted")
    allowed = {
        "vocab_size": shapes["token_embd.weight"][0],
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.scaling.type": "none",
        "attention.causal": True,
        _SCALED: known.get("context_length"),
    }
    for key, value in known.items():
        if key not in kind.keys and (key not in allowed or value != allowed[key]):
            raise DataError(
                f"{path}: its setting '{architecture}.{key}' = {str(value)[:60]} has no place in a "
                f"{kind.model_type} model made from GGUF: import a Hugging Face folder of it"
            )
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.model_type]],
        "model_type": kind.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        **config,
        **kind.fixed,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": _plain(fields.get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _plain(fields.get("tokenizer.ggml.eos_token_id")),
        "pad_token_id": _plain(fields.get("tokenizer.ggml.padding_token_id")),
        "dtype": "bfloat16",
    }


def _plain(value: Any) -> Any:
    """A float as the shortest decimal of its single precision: 1e-05 is stored as 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


Source = Callable[[torch.dtype], Iterator[Tensor]]


def _plan(
    path: Path, reader: GGUFReader, config: dict[str, Any], architecture: str
) -> dict[PlannedTensor, Source]:
    """Every tensor of the library's class, with what reads its values; none missing, none left over."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = ARCHITECTURES[architecture]
    chosen = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    try:
        settings = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # the library has no error of its own for settings that do not fit
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: its metadata make no {kind.model_type} model ({reason})") from None
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(chosen, int(settings.num_hidden_layers))
    plan: dict[PlannedTensor, Source] = {}
    for name, parameter in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        tensor = found.pop(f"{theirs}.{suffix}", None)
        if tensor is None:
            raise DataError(f"{path}: {name} is missing, which a {kind.model_type} model has: get it again")
        change = _change(kind, name, config)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if architecture == "gpt2" and _is_transposed(name):
            shape = shape[::-1]
        if shape != tuple(parameter.shape):
            raise DataError(
                f"{path}: {tensor.name} has the shape {shape}, but its metadata say {tuple(parameter.shape)}"
            )
        dtype = _kept_type(path, tensor, change)
        plan[PlannedTensor(name, dtype, shape)] = partial(_blocks, path, tensor, change)
    if found:
        raise DataError(
            f"{path} has a tensor '{next(iter(found))}', for which a {kind.model_type} model has no place: "
            "import a Hugging Face folder of it"
        )
    return plan


def _is_transposed(name: str) -> bool:
    """Whether GPT-2 of the library stores this matrix as inputs × outputs."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def _change(kind: _Architecture, name: str, config: dict[str, Any]) -> Callable[[Any], Any] | None:
    """What turns the values of the file into those of the library; None where they are the same."""
    if kind.pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]

        def halves(values: np.ndarray) -> np.ndarray:
            # GGUF has the rows of one head in rotary pairs of neighbours (i, i + 1); transformers turns the
            # pairs (i, i + D/2).
            rows, columns = values.shape
            pairs = values.reshape(heads, rows // heads // 2, 2, columns)
            return pairs.swapaxes(1, 2).reshape(rows, columns)

        return halves
    if kind.norm_shift and "norm" in name:
        return lambda values: values - np.float32(kind.norm_shift)
    if kind.model_type == "gpt2" and _is_transposed(name):
        return lambda values: values.T
    return None


def _kept_type(path: Path, tensor: ReaderTensor, change: Callable[[Any], Any] | None) -> torch.dtype:
    from gguf import GGMLQuantizationType

    if tensor.tensor_type == GGMLQuantizationType.F16:
        return torch.float16
    if tensor.tensor_type != GGMLQuantizationType.F32:
        return torch.bfloat16
    exact = all(
        torch.equal(block, block.to(torch.bfloat16).to(torch.float32))
        for block in _blocks(path, tensor, change, torch.float32)
    )
    return torch.bfloat16 if exact else torch.float32


def _blocks(
    path: Path, tensor: ReaderTensor, change: Callable[[Any], Any] | None, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The values of one tensor in row-major order, in pieces of ``dtype``."""
    from gguf import dequantize

    rows = len(tensor.data)
    step = rows if change is not None else max(1, _BLOCK * rows // max(1, tensor.n_elements))
    for start in range(0, rows, step):
        try:
            values = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise DataError(f"{path}: {tensor.name} cannot be dequantised ({error})") from None
        if not np.isfinite(values).all():
            raise DataError(f"{path}: {tensor.name} holds NaN or infinite values: get it again")
        if change is not None:
            values = change(values)
        yield torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)


def _tokenizer(path: Path, fields: dict[str, Any], given: Path | None) -> tuple[str | None, str | None]:
    """The text of ``tokenizer.json``, or None and why there is none."""
    if given is not None:
        return read_tokenizer(given), None
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        return None, f"its tokenizer is of the kind {kind}: give the model's tokenizer.json with --tokenizer"
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    if len(kinds) != len(tokens) or set(kinds) - {_NORMAL, _CONTROL} or len(set(tokens)) != len(tokens):
        raise DataError(f"{path}: its vocabulary repeats tokens or holds kinds that are not converted")
    try:
        tokenizer = Tokenizer(
            # A byte-level vocabulary: every digit stands alone, as the model saw it in training.
            models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
        )
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise DataError(f"{path}: its vocabulary makes no tokenizer ({error}): get it again") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer.to_str(), None


def read_tokenizer(path: Path) -> str:
    """The text of a ``tokenizer.json`` that the library can open.

    Raises:
        DataError: it is missing, or none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokenizer {path} ({error}): give a tokenizer.json") from None
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for malformed files
        raise DataError(f"{path} is no tokenizer.json ({error}): give the model's own") from None
    return text
