"""Random weights at the shape of a real model, written shard by shard: models for capacity and parity.

Covers the hybrid of gated-DeltaNet and gated full attention of Qwen3.5, at the real size and small, in two
layouts: as the library saves a text model (``library``), and as the released files are (``released``: the
text model under another prefix, vision and multi-token-prediction tensors beside it, an index that names one
file). Every value is a function of seed, shape and tensor name alone, so both layouts hold the same text
model. Random weights support no statement about reuse.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from twinscope.lab.config import suggestion
from twinscope.lab.draws import generator
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, TwinscopeError
from twinscope.lab.progress import Progress
from twinscope.models.store.library import making, place_of, require_space
from twinscope.models.store.origin import file_sha256, is_whole, read_origin, write_origin
from twinscope.models.tensor_writer import PlannedTensor, header_bytes, write_tensors

Layout = Literal["library", "released"]
LAYOUTS: tuple[Layout, ...] = ("library", "released")
#: Part of what a shard says of itself: raising it makes every shard written before count as another's.
_VERSION = 1
_BLOCK = 1 << 20  # values drawn at a time
_SHARD_BYTES = 512 << 20
_WORKERS = 2
#: Standard deviation of biases, and of norm weights around the identity.
_BIAS_SD, _NORM_SD = 0.02, 0.1


@dataclass(frozen=True)
class Shape:
    """What a synthetic model looks like: the library's text and vision configurations, and its size."""

    text: dict[str, Any]
    vision: dict[str, Any]
    parameters: int  # of the text model, the tied head once


def _hybrid(*, vocab: int, width: int, hidden: int, layers: int, heads: tuple[int, int, int],
            linear: tuple[int, int], sections: list[int], context: int) -> dict[str, Any]:  # fmt: skip
    """Text configuration; ``heads``: query, key/value, width of each; ``linear``: heads, width of each."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)
        ],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "linear_num_key_heads": linear[0],
        "linear_num_value_heads": linear[0],
        "linear_key_head_dim": linear[1],
        "linear_value_head_dim": linear[1],
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": context,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": sections,
        },
        "tie_word_embeddings": True,
    }


SHAPES = {
    "qwen3.5-2b": Shape(
        text=_hybrid(vocab=248_320, width=2048, hidden=6144, layers=24, heads=(8, 2, 256),
                     linear=(16, 128), sections=[11, 11, 10], context=262_144),
        vision={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                "out_hidden_size": 2048},
        parameters=1_881_825_088,
    ),
    "qwen3.5-tiny": Shape(
        text=_hybrid(vocab=512, width=64, hidden=160, layers=8, heads=(4, 2, 32), linear=(4, 16),
                     sections=[2, 1, 1], context=1024),
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 16},
        parameters=475_984,
    ),
}  # fmt: skip


def synthesize(
    shape: str,
    *,
    seed: int = 0,
    layout: Layout = "library",
    name: str | None = None,
    out: Path | None = None,
    shard_bytes: int = _SHARD_BYTES,
    quiet: bool = False,
) -> Path:
    """Write a model of random weights, or find it made; returns its folder.

    BF16; in the ``released`` layout the decay and the gated norm are F32, as they are there. ``shard_bytes``
    bounds a file of the ``library`` layout unless one tensor is larger. An interrupted call leaves complete
    shards, which the next one keeps. Memory: a few blocks of 2^20 values, whatever the shape.

    Raises:
        ConfigError: an unknown shape or layout, a name that is taken, or a place that cannot be written.
        Stopped: the disk has too little space.
    """
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape '{shape}' to make{suggestion(shape, list(SHAPES))}")
    if layout not in LAYOUTS:
        raise ConfigError(f"there is no layout '{layout}'{suggestion(layout, LAYOUTS)}")
    ending = ("-released" if layout == "released" else "") + (f"-seed{seed}" if seed else "")
    folder = place_of(name or f"{shape}{ending}", out)
    details = {"shape": shape, "seed": seed, "layout": layout, "version": _VERSION}
    found = read_origin(folder)
    if found is not None and {key: found.details.get(key) for key in details} != details:
        raise ConfigError(f"{folder} holds another model ({found.source}): choose another --name or --out")
    if found is not None and is_whole(folder):
        return folder
    tensors = text_tensors(shape)
    if layout == "released":
        tensors = {**_released_text(tensors), **_beside(shape, tensors)}
    shards = _shards(list(tensors), shard_bytes if layout == "library" else None)
    total = sum(tensor.nbytes for tensor in tensors)
    with making(folder, keep=True) as work:
        # Before the space is checked: what is there already takes none.
        kept = [_is_made(work / file, members, details) for file, members in shards.items()]
        left = sum(
            sum(tensor.nbytes for tensor in members)
            for members, made in zip(shards.values(), kept, strict=True)
            if not made
        )
        require_space(work, left, f"'{shape}'")
        files = {}
        with Progress(f"{shape}, MiB", quiet) as progress:
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                progress.update(done >> 20, total >> 20)

            for (file, members), made in zip(shards.items(), kept, strict=True):
                if made:
                    advance(sum(tensor.nbytes for tensor in members))
                    files[file] = file_sha256(work / file)
                else:
                    files[file] = write_tensors(
                        work / file,
                        members,
                        lambda tensor: _blocks(tensor, tensors[tensor], shape, seed),
                        _metadata(details),
                        advance,
                    )
        texts = {"config.json": config_json(shape, layout)}
        if len(shards) > 1 or layout == "released":
            index = {
                "metadata": {"total_size": total},
                "weight_map": {tensor.name: file for file, members in shards.items() for tensor in members},
            }
            texts["model.safetensors.index.json"] = json.dumps(index, indent=2) + "\n"
        for file, text in texts.items():
            write_atomic(work / file, text.encode())
            files[file] = file_sha256(work / file)
        write_origin(work, "random", f"twinscope model synth {shape}", files, details)
    return folder


def text_tensors(shape: str) -> dict[PlannedTensor, str]:
    """Every tensor of the text model as the library names and shapes it, mapped to the name it is drawn by.

    Raises:
        TwinscopeError: the installed library gives the shape another number of parameters.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    chosen = SHAPES[shape]
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**chosen.text))
    # Parameters, not the state: a tied head is named once, under the embedding.
    found = {name: tuple(value.shape) for name, value in model.named_parameters()}
    count = sum(math.prod(size) for size in found.values())
    if count != chosen.parameters:
        raise TwinscopeError(
            f"'{shape}' has {count:,} parameters in this transformers, not {chosen.parameters:,}: "
            "install the pinned version"
        )
    return {PlannedTensor(name, torch.bfloat16, size): name for name, size in found.items()}


def config_json(shape: str, layout: Layout) -> str:
    """The text of ``config.json``."""
    chosen = SHAPES[shape]
    text = {"model_type": "qwen3_5_text", "dtype": "bfloat16", **chosen.text}
    if layout == "library":
        content: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    else:
        content = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "text_config": {**text, "mtp_num_hidden_layers": 1},
            "vision_config": {"model_type": "qwen3_5_vision", **chosen.vision},
        }
    return json.dumps(content, indent=2) + "\n"


def _released_text(tensors: dict[PlannedTensor, str]) -> dict[PlannedTensor, str]:
    """The text model under the prefix of the released files; what the recurrence multiplies up is F32."""
    wide = (".A_log", ".linear_attn.norm.weight")
    return {
        PlannedTensor(
            f"model.language_model.{name.removeprefix('model.')}",
            torch.float32 if name.endswith(wide) else tensor.dtype,
            tensor.shape,
        ): name
        for tensor, name in tensors.items()
    }


def _beside(shape: str, tensors: dict[PlannedTensor, str]) -> dict[PlannedTensor, str]:
    """Vision tensors by the library's class, and those of one multi-token-prediction layer."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    chosen = SHAPES[shape]
    with torch.device("meta"):
        vision = Qwen3_5VisionModel(Qwen3_5VisionConfig(**chosen.vision))
    sizes = {f"model.visual.{name}": tuple(value.shape) for name, value in vision.named_parameters()}
    width = chosen.text["hidden_size"]
    layer = f"model.layers.{chosen.text['layer_types'].index('full_attention')}."
    sizes |= {
        f"mtp.layers.0.{name.removeprefix(layer)}": tensor.shape
        for tensor, name in tensors.items()
        if name.startswith(layer)
    }
    sizes["mtp.fc.weight"] = (width, 2 * width)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        sizes[f"mtp.{norm}.weight"] = (width,)
    return {PlannedTensor(name, torch.bfloat16, size): name for name, size in sizes.items()}


def _shards(tensors: list[PlannedTensor], limit: int | None) -> dict[str, list[PlannedTensor]]:
    """File -> its tensors, in order; one file where there is no limit, as in the released layout."""
    if limit is None:
        return {"model.safetensors-00001-of-00001.safetensors": tensors}
    groups: list[list[PlannedTensor]] = []
    size = limit
    for tensor in tensors:
        if size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)
    }


def _metadata(details: dict[str, Any]) -> dict[str, str]:
    return {"format": "pt", "twinscope": json.dumps(details, sort_keys=True)}


def _is_made(path: Path, tensors: list[PlannedTensor], details: dict[str, Any]) -> bool:
    """Whether an earlier call wrote this shard: files come to be whole, so header and length tell."""
    header = header_bytes(tensors, _metadata(details))
    try:
        with path.open("rb") as file:
            size = len(header) + sum(tensor.nbytes for tensor in tensors)
            return file.read(len(header)) == header and path.stat().st_size == size
    except OSError:
        return False


def _blocks(tensor: PlannedTensor, name: str, shape: str, seed: int) -> Iterator[Tensor]:
    """The values of one tensor, flat, a block at a time; a few are drawn ahead by threads."""
    count = math.prod(tensor.shape)
    draw = partial(_block, tensor, name, f"synth {shape} {name}", seed)
    sizes = [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]
    if len(sizes) == 1:
        yield draw(0, sizes[0])
        return
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead = deque()
        for index, size in enumerate(sizes):
            ahead.append(pool.submit(draw, index, size))
            if len(ahead) > _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _block(tensor: PlannedTensor, name: str, stream: str, seed: int, index: int, size: int) -> Tensor:
    draws = generator(seed, stream, index)
    values = torch.from_numpy(_values(name, tensor.shape, draws, size))
    # Rounded to bf16 in either dtype, so that both layouts hold the same model.
    return values.to(torch.bfloat16).to(tensor.dtype)


def _values(name: str, shape: tuple[int, ...], draws: np.random.Generator, size: int) -> np.ndarray:
    """``size`` values (float32) of the tensor ``name`` such that activations stay finite.

    Matrices and convolutions are normal with variance one over the number of inputs of a row. Decay rates A
    are uniform on (0.01, 16), as the library draws them; the biases of the step are those whose softplus is
    log-uniform on (0.001, 0.1), as in Mamba (Gu & Dao 2023, arXiv:2312.00752, section 3.6), so that states
    last for some to hundreds of tokens. Norm weights scatter around the value that makes them the identity,
    so that a factor forgotten anywhere shows.
    """
    if name.endswith(".A_log"):
        return np.log(draws.uniform(0.01, 16.0, size)).astype(np.float32)
    if name.endswith(".dt_bias"):
        step = np.exp(draws.uniform(math.log(1e-3), math.log(1e-1), size))
        return np.log(np.expm1(step)).astype(np.float32)
    values = draws.standard_normal(size, dtype=np.float32)
    if len(shape) > 1:
        return values / np.float32(math.sqrt(math.prod(shape[1:])))
    if name.endswith(".bias"):
        return values * np.float32(_BIAS_SD)
    # The text model's norms multiply by 1 + w; the gated one and those of the vision model by w.
    centre = float(name.endswith(".linear_attn.norm.weight") or ".visual." in name)
    return values * np.float32(_NORM_SD) + np.float32(centre)
