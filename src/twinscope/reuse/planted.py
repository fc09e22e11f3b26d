"""Copies of a model folder with modules planted in it on purpose, to see what a scan finds and rejects.

Covers modules of decoders whose layers have ``self_attn`` with separate projections and a gated ``mlp``
(Llama, SmolLM2, Mistral, Qwen2, Qwen3, the first Gemma, full-attention layers of Qwen3.5). A module is
written over another one: as it is, with noise, with its inner units in another order, with the gain of its
pre-norm folded into the matrices behind it, or scaled. The source folder is only read; of the copy, one
tensor is in memory at a time. The copy says in ``twinscope.json`` that it is planted, and what was done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.lab.durable import writing
from twinscope.lab.errors import ConfigError
from twinscope.models.store.library import making, require_space
from twinscope.models.store.origin import ORIGIN, file_sha256, read_origin, write_origin
from twinscope.models.tensor_files import TensorFiles, open_tensors

#: Files of a model folder that belong to the copy; pickles never do.
_COPIED = {".safetensors", ".json", ".txt", ".model", ".jinja"}
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
#: Families whose RMSNorm multiplies by 1 + weight, so that a gain of 1 is stored as 0.
_UNIT_OFFSET = re.compile(r"gemma|qwen3_5|qwen3_next")
#: module: (its pre-norm, matrices that read the normed input, matrix that writes the update)
_MODULES = {
    "self_attn": ("input_layernorm", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    "mlp": ("post_attention_layernorm", ("gate_proj", "up_proj"), "down_proj"),
}


@dataclass(frozen=True)
class Planting:
    """The module at ``source`` written over that at ``target``, then changed as the other fields say.

    Sites are ``layers.N.self_attn``, ``layers.N.mlp`` (both with their pre-norm) or
    ``layers.N.self_attn.q_norm | k_norm`` (the gain alone); source and target may be one. ``noise`` adds
    normal noise of that share of each tensor's RMS. ``permute`` reorders the MLP's neurons, or the heads
    with their key–value groups, and ``fold`` moves the pre-norm's gain into the matrices it feeds: neither
    changes the function. ``scale`` multiplies the update (or the norm's output), which does.
    """

    source: str
    target: str
    noise: float = 0.0
    permute: bool = False
    fold: bool = False
    scale: float = 1.0


def plant(source: Path, out: Path, plantings: Sequence[Planting], seed: int = 0) -> Path:
    """Write a copy of the model folder ``source`` to ``out`` with ``plantings`` in it; returns ``out``.

    Every planting reads the source as it was, so their order matters only where targets coincide. Weights
    that are random stay ``random`` in ``twinscope.json``; any other become ``planted``.

    Raises:
        ConfigError: a site that is none, modules of different shapes or families that cannot be planted,
            or ``out`` cannot be written.
        DataError: the source is damaged.
        Stopped: no space is left.
    """
    if not plantings:
        raise ConfigError("nothing is to be planted: give at least one planting")

    def changes(tensors: TensorFiles, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        # All of them are checked before the first is made.
        found = [change for planting in plantings for change in _changes(tensors, config, planting)]
        return (
            (target, _value(tensors, config, planting, name, seed, written))
            for written, (planting, name, target) in enumerate(found)
        )

    described = "; ".join(dict.fromkeys(_described(planting) for planting in plantings))
    details = {"planted": [asdict(planting) for planting in plantings], "seed": seed}
    return write_planted(Path(source), Path(out), changes, described, details)


def write_planted(
    source: Path,
    out: Path,
    changes: Callable[[TensorFiles, dict[str, Any]], Iterable[tuple[str, Tensor]]],
    described: str,
    details: dict[str, Any],
) -> Path:
    """Write a copy of the folder ``source`` to ``out`` with other values in some tensors; returns ``out``.

    ``changes(tensors, config)`` gives (name, value float32) one after the other; what it refuses when it is
    called, it refuses before anything is written. The copy's ``twinscope.json`` holds ``described`` and
    ``details``, and says ``planted``, or ``random`` if the source is.

    Raises:
        ConfigError, DataError, Stopped: as for :func:`plant`.
    """
    out = out.absolute()
    origin = read_origin(source)
    config = _config(source)
    with open_tensors(source) as tensors:
        values = changes(tensors, config)
        files = _files(source)
        require_space(out, sum(path.stat().st_size for path in files), "the planted copy")
        with making(out) as work:
            with writing(work):
                for path in files:
                    shutil.copyfile(path, work / path.name)
                for target, value in values:
                    _overwrite(tensors, work, target, value)
            hashes = {path.name: file_sha256(work / path.name) for path in files}
            random = origin is not None and origin.weights == "random"
            planted_in = "weights of unknown origin" if origin is None else origin.source
            write_origin(
                work,
                "random" if random else "planted",
                described,
                hashes,
                details | {"planted_in": planted_in},
            )
    return out


def _described(planting: Planting) -> str:
    changes = [
        f"with noise of {planting.noise:g}" if planting.noise else "",
        "with its units reordered" if planting.permute else "",
        "with its gain folded" if planting.fold else "",
        f"scaled by {planting.scale:g}" if planting.scale != 1 else "",
    ]
    return " ".join([f"{planting.target} from {planting.source}", *filter(None, changes)])


def _changes(
    tensors: TensorFiles, config: dict[str, Any], planting: Planting
) -> Iterator[tuple[Planting, str, str]]:
    """(planting, tensor to read, tensor to write) for every tensor of the module, once all of them fit."""
    _check(config, planting)
    names, targets = (tensors_of(tensors, site) for site in (planting.source, planting.target))
    layers = [prefix_of(tensors, site).rpartition(".")[0] for site in (planting.source, planting.target)]
    ends = [
        [name.removeprefix(layer) for name in part]
        for layer, part in zip(layers, (names, targets), strict=True)
    ]
    if not _is_norm(planting.source) and ends[0] != ends[1]:
        raise ConfigError(
            f"{planting.source} has other tensors than {planting.target}: plant a module of the same kind"
        )
    for name, target in zip(names, targets, strict=True):
        one, other = tensors.entry(name).shape, tensors.entry(target).shape
        if one != other:
            raise ConfigError(
                f"{name} has the shape {one}, {target} {other}: plant a module of the same shape"
            )
        yield planting, name, target


def _check(config: dict[str, Any], planting: Planting) -> None:
    for site in (planting.source, planting.target):
        if not re.fullmatch(r"layers\.\d+\.(self_attn(\.[qk]_norm)?|mlp)", site):
            raise ConfigError(
                f"'{site}' cannot be planted: give layers.N.self_attn, layers.N.mlp "
                "or layers.N.self_attn.q_norm"
            )
    one, other = (
        site.rpartition(".")[2].replace("k_norm", "q_norm") for site in (planting.source, planting.target)
    )
    if one != other:
        raise ConfigError(
            f"{planting.source} and {planting.target} are not of one kind: plant like over like"
        )
    if one == "q_norm" and (planting.permute or planting.fold):
        raise ConfigError(f"{planting.source} is a gain: it has no inner units and no pre-norm of its own")
    text = config.get("text_config", config)
    if planting.permute and one == "self_attn" and not text.get("num_attention_heads"):
        raise ConfigError("config.json gives no num_attention_heads, so heads cannot be reordered")


def tensors_of(tensors: TensorFiles, site: str) -> list[str]:
    """Every tensor of a site and of its pre-norm, in order of name.

    Raises:
        ConfigError: the model has none there, or not under the names of the families covered.
    """
    prefix = prefix_of(tensors, site)
    if _is_norm(site):
        return [prefix + ".weight"]
    layer, _, module = prefix.rpartition(".")
    norm, readers, writer = _MODULES[module]
    if any(f"{prefix}.{name}.weight" not in tensors for name in (*readers, writer)) or (
        f"{layer}.{norm}.weight" not in tensors
    ):
        raise ConfigError(
            f"{site} has not the tensors of a Llama layer ({', '.join((norm, *readers, writer))}), "
            "so nothing is planted there"
        )
    if f"{layer}.pre_feedforward_layernorm.weight" in tensors:
        raise ConfigError(
            f"{site} has a norm behind it as well, which planting does not move: use a model with pre-norms "
            "alone"
        )
    own = [name for name in tensors.names if name.startswith(f"{prefix}.")]
    return [*own, *(name for name in tensors.names if name.startswith(f"{layer}.{norm}."))]


def prefix_of(tensors: TensorFiles, site: str) -> str:
    """The full name of a site: ``layers.3.mlp`` is ``model.layers.3.mlp`` in most files.

    Raises:
        ConfigError: the model has no such site, or more than one.
    """
    pattern = re.compile(rf"((?:.*\.)?{re.escape(site)})\.")
    # Vision and multi-token-prediction towers beside the decoder have layers of their own.
    found = {match[1] for name in tensors.names if (match := pattern.match(name))}
    own = [name for name in found if not re.search(r"(^|\.)(visual|vision|mtp)", name)]
    if len(own) != 1:
        raise ConfigError(
            f"the model has {len(own) or 'no'} modules '{site}': give a site that it has once, in a family "
            "whose layers are named as Llama's"
        )
    return own[0]


def _is_norm(site: str) -> bool:
    return site.endswith("_norm")


def _value(
    tensors: TensorFiles, config: dict[str, Any], planting: Planting, name: str, seed: int, index: int
) -> Tensor:
    """What one tensor of the source becomes in the copy, float32."""
    value = tensors.read(name)
    offset = 1.0 if _UNIT_OFFSET.search(str(config.get("model_type", ""))) else 0.0
    if _is_norm(planting.source):
        value = (value + offset) * planting.scale - offset
        return _with_noise(value, planting.noise, seed, index)
    prefix = prefix_of(tensors, planting.source)
    layer, _, module = prefix.rpartition(".")
    norm, readers, writer = _MODULES[module]
    part = name.removeprefix(f"{prefix}.").partition(".")[0]
    is_gain = name == f"{layer}.{norm}.weight"
    if planting.fold:
        if is_gain:
            value = torch.full_like(value, 1.0 - offset)
        elif part in readers and value.ndim == 2:
            value = value * (tensors.read(f"{layer}.{norm}.weight") + offset)
    if planting.permute and (part in readers or part == writer):
        value = _reordered(config, value, module, part, part == writer, seed)
    if part == writer:
        value = value * planting.scale
    return _with_noise(value, planting.noise, seed, index)


def _reordered(
    config: dict[str, Any], value: Tensor, module: str, part: str, writes: bool, seed: int
) -> Tensor:
    """Rows of a reading matrix (or its bias), columns of the writing one, in the same new order of units."""
    if writes and value.ndim == 1:
        return value
    units = value.shape[-1] if writes else value.shape[0]
    if module == "mlp":
        order = torch.from_numpy(generator(seed, "planted neurons").permutation(units))
    else:
        order = _head_order(config, part, units, seed)
    return value[:, order] if writes else value[order]


def _head_order(config: dict[str, Any], part: str, units: int, seed: int) -> Tensor:
    """Groups of a shared key and value in a new order, and the query heads of each group among themselves."""
    text = config.get("text_config", config)
    heads = int(text["num_attention_heads"])
    groups = int(text.get("num_key_value_heads") or heads)
    draws = generator(seed, "planted heads")
    moved = draws.permutation(groups)
    within = [draws.permutation(heads // groups) for _ in range(groups)]
    if part in ("k_proj", "v_proj"):
        order = [int(group) for group in moved]
    else:
        size = heads // groups
        order = [int(group) * size + int(head) for group in moved for head in within[group]]
    block = units // len(order)
    return torch.cat([torch.arange(block) + head * block for head in order])


def _with_noise(value: Tensor, noise: float, seed: int, index: int) -> Tensor:
    if not noise:
        return value
    # Rows at a time: the draws are float64, and the whole matrix of them would outweigh it.
    rms = float(value.double().square().mean().sqrt())
    draws = generator(seed, "planted noise", index)
    for part in value.view(value.shape[0], -1):
        part += noise * rms * torch.from_numpy(draws.standard_normal(part.numel())).float()
    return value


def _overwrite(tensors: TensorFiles, work: Path, target: str, value: Tensor) -> None:
    """Put ``value`` at the place of ``target`` in the copied file, in the type that the file has."""
    entry = tensors.entry(target)
    data = value.contiguous().to(_DTYPES[entry.dtype]).view(torch.uint8).numpy()
    with (work / entry.file.name).open("r+b") as file:
        file.seek(entry.offset)
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _files(source: Path) -> list[Path]:
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file() and path.suffix in _COPIED and path.name != ORIGIN and not path.name.startswith(".")
    )


def _config(source: Path) -> dict[str, Any]:
    try:
        found = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{source} has no readable config.json: give a Hugging Face folder")
    return found
