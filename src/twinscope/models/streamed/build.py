"""The library's own model class without its weights: every matrix a module that reads itself from disk.

Covers reading and refusing ``config.json``, building the class on the meta device, finding the tensor of the
files that belongs to each parameter, tied and untied heads, the parameters and tables that stay in memory.
Not covered: running it (``streamed.py``). Code that comes with a model is never run; a kernel from a hub is
never fetched.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.model_json import read_model_json
from twinscope.models.streamed.budget import PassLimit
from twinscope.models.streamed.layers import (
    StreamedConv1D,
    StreamedEmbedding,
    StreamedExperts,
    StreamedLinear,
)
from twinscope.models.streamed.reading import Source, WeightReader
from twinscope.models.tensor_files import TensorFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: How files name the base model: as the class does, inside a multimodal model, or on its own.
_PREFIXES = ("{base}.", "model.language_model.", "language_model.model.", "language_model.", "")
#: Tensors that a text model does not use: other towers, prediction of several tokens, tables made anew.
_UNUSED = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|mtp|embed_vision)\."
    r"|\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$"
)
#: Parameters up to this many values stay in memory, apart from those of stacks of experts.
_RESIDENT = 65536
#: What the gated delta rule may hold for the texts that go through it at once, projections included.
DELTA_BYTES = 36 << 20


@dataclass(frozen=True)
class Built:
    """The parts of a model. ``base`` maps ids to final states; ``head`` is the class around it, whose own
    forward turns ``states`` into the logits of a ``block`` of the head's rows; ``shapes`` are those of every
    parameter by key, ``matrices`` the keys of the base's linear maps in the order of their definition.
    """

    config: Any
    family: str
    base: Any
    head: Any
    states: GivenStates
    block: GivenBlock
    reader: WeightReader
    shapes: dict[str, torch.Size]
    prefix: str
    head_key: str
    matrices: tuple[str, ...]
    notes: tuple[str, ...]


def read_config(folder: Path) -> Any:
    """The library's configuration object for the language model in ``folder``, attention by SDPA.

    Sets ``HF_HUB_OFFLINE`` and ``USE_HUB_KERNELS`` for this process, before the library is imported.

    Raises:
        DataError: no ``config.json``, one that is no model's, that asks for code or describes quantised
            weights, or that the library refuses.
        ConfigError: the installed library does not know the family.
    """
    raw = read_model_json(folder)
    path = folder / "config.json"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "0"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if raw["model_type"] not in CONFIG_MAPPING:
        raise ConfigError(
            f"{folder} holds a '{raw['model_type']}' model, which the installed transformers does not know: "
            "install a release that does"
        )
    try:
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw).get_text_config(decoder=True)
    except Exception as error:  # the library has no error of its own for a bad configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(f"{path} is no configuration of a '{raw['model_type']}' model ({reason})") from None
    config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    return config


def build(folder: Path, files: TensorFiles, config: Any, device: torch.device, limit: PassLimit) -> Built:
    """The model of ``config`` over ``files``, its small parameters and tables on ``device``.

    Raises:
        DataError: a tensor is missing, left over, of another shape, or holds NaN or infinite values.
        ConfigError: the family has no causal language model, or a part that cannot be read when called.
    """
    model = _on_meta(folder, config)
    base_name = model.base_model_prefix
    base = model.base_model
    if base is model:
        raise ConfigError(f"a {type(model).__name__} has no base model apart from its head: not supported")
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    output = model.get_output_embeddings()
    head_name = next((name for name, module in model.named_modules() if module is output), None)
    if head_name is None or not isinstance(output, nn.Linear) or output.bias is not None:
        raise ConfigError(f"the head of a {type(model).__name__} is no matrix: not supported")
    embedding = model.get_input_embeddings()
    embedding_key = next(f"{n}.weight" for n, m in model.named_modules() if m is embedding)
    head_key = f"{head_name}.weight"
    prefix = _prefix(files, base_name, embedding_key, head_key)

    def in_files(key: str) -> str:
        return prefix + key.removeprefix(f"{base_name}.") if key.startswith(f"{base_name}.") else key

    sources = {}
    for key, shape in shapes.items():
        if key not in (embedding_key, head_key):
            sources[key] = _source(files, folder, in_files(key), shape)
    notes = _tie(files, folder, config, in_files, embedding_key, head_key, shapes, sources)
    _refuse_left_over(files, folder, sources)
    reader = WeightReader(files, device, sources, limit)
    reader.small.add(head_key)  # logits of a block take memory too
    for name, module in list(base.named_modules()):
        _stream(base, name, f"{base_name}.{name}", module, reader)
    states, block = GivenStates(), GivenBlock()
    setattr(model, base_name, states)
    setattr(model, head_name, block)
    _tables(model, base, device)
    built = Built(
        config=config,
        family=config.model_type,
        base=base.eval(),
        head=model.eval(),
        states=states,
        block=block,
        reader=reader,
        shapes=shapes,
        prefix=base_name,
        head_key=head_key,
        matrices=tuple(
            module.key for module in base.modules() if isinstance(module, (StreamedLinear, StreamedConv1D))
        ),
        notes=notes,
    )
    load_resident(built, list(_resident(built)))
    return built


def load_resident(built: Built, keys: list[str]) -> None:
    """Read the parameters that stay in memory anew from their sources, in place where they are there."""
    for key in keys:
        name = key.removeprefix(f"{built.prefix}.")
        place, _, attribute = name.rpartition(".")
        module = built.base.get_submodule(place)
        value = nn.Parameter(built.reader.whole(key), requires_grad=False)
        module._parameters[attribute] = value


def resident_keys(built: Built) -> Iterator[str]:
    """The keys of the parameters that stay in memory."""
    return _resident(built)


def _resident(built: Built) -> Iterator[str]:
    for name, parameter in built.base.named_parameters():
        transient = getattr(parameter, "read_when_called", False)
        if not transient:
            yield f"{built.prefix}.{name}"


class GivenStates(nn.Module):
    """Stands for the base model: 'computes' the final states that this thread was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = threading.local()

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.given.states)


class GivenBlock(nn.Module):
    """Stands for the head: some rows of its matrix, which this thread was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = threading.local()

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.given.block)


class _Output:
    """What a base model returns, as far as a head looks at it: the states, and None for the rest."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _on_meta(folder: Path, config: Any) -> PreTrainedModel:
    """The library's causal language model class for ``config``, every tensor without memory."""
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kind = config.model_type
    home = type(config).__module__
    name = NAMES.get(kind)
    if not home.startswith("transformers.models.") or name is None:
        raise ConfigError(
            f"{folder} holds a '{kind}' model, which is no causal language model of transformers"
        )
    module = importlib.import_module(home.replace(".configuration_", ".modeling_"))
    try:
        with torch.device("meta"), no_init_weights():
            return getattr(module, name)(config)
    except Exception as error:  # the library has no error of its own for a bad configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(f"{folder}/config.json describes no {name} that can be built ({reason})") from None


def _prefix(files: TensorFiles, base: str, embedding_key: str, head_key: str) -> str:
    """What the files put before the names of the base model's tensors."""
    inner = embedding_key.removeprefix(f"{base}.")
    for pattern in _PREFIXES:
        prefix = pattern.format(base=base)
        if prefix + inner in files:
            return prefix
    # A tied model may be stored with its head alone.
    for pattern in _PREFIXES[:-1]:
        prefix = pattern.format(base=base)
        if head_key in files and any(name.startswith(prefix) for name in files.names):
            return prefix
    raise DataError(
        f"{files.place} holds no token embedding ({embedding_key}): the files are incomplete or belong to "
        "another model than config.json"
    )


def _source(files: TensorFiles, folder: Path, name: str, shape: torch.Size) -> Source:
    """The tensors behind one parameter, their shapes checked against the configuration."""
    if name in files:
        _fits(files, folder, name, shape)
        return Source((name,))
    place, _, last = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if parts is not None and len(shape) == 3:
        # Experts that the files keep apart: one matrix each, gate above up.
        rows = shape[1] // len(parts)
        experts = []
        for number in range(shape[0]):
            names = tuple(f"{place}.{number}.{part}.weight" for part in parts)
            for each in names:
                _fits(files, folder, each, torch.Size((rows, shape[2])))
            experts.append(Source(names))
        return Source(experts=tuple(experts))
    files.entry(name)  # refuses: it is not there
    raise AssertionError(name)


def _fits(files: TensorFiles, folder: Path, name: str, shape: torch.Size) -> None:
    found = files.entry(name).shape
    if found != tuple(shape):
        raise DataError(
            f"{folder}: {name} has the shape {found} but config.json asks for {tuple(shape)}: "
            "one of the two belongs to another model"
        )


def _tie(
    files: TensorFiles,
    folder: Path,
    config: Any,
    in_files: Callable[[str], str],
    embedding_key: str,
    head_key: str,
    shapes: dict[str, torch.Size],
    sources: dict[str, Source],
) -> tuple[str, ...]:
    """Decide which matrices embedding and head use, as the library does, and say so where it is no matter of
    course: a matrix that is stored is used, one that is not stored is the other one.
    """
    tied = bool(getattr(config, "tie_word_embeddings", False))
    embedding, head = in_files(embedding_key), in_files(head_key)
    if head not in files:
        # Inside a multimodal model the head may lie beside the language model.
        head = next(
            (n for n in ("language_model.lm_head.weight", "model.lm_head.weight") if n in files), head
        )
    has_embedding, has_head = embedding in files, head in files
    notes = ()
    if has_embedding and has_head:
        if tied and not _equal(files, embedding, head):
            notes = (
                f"config.json ties the head to the embedding, but {head} differs from {embedding}: "
                "the head uses its own",
            )
    elif has_embedding:
        head = embedding
        if not tied:
            notes = (
                f"config.json has a head of its own, but the files hold none: the head uses {embedding}",
            )
    elif has_head:
        embedding = head
        notes = (f"the files hold no token embedding: it uses {head}",)
    for key, name in ((embedding_key, embedding), (head_key, head)):
        _fits(files, folder, name, shapes[key])
        sources[key] = Source((name,))
    return notes


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    rows, width = files.entry(one).shape
    if files.entry(other).shape != (rows, width):
        return False
    step = max(1, (1 << 20) // width)
    for start in range(0, rows, step):
        part = (start, min(rows, start + step))
        if not torch.equal(files.read(one, rows=part), files.read(other, rows=part)):
            return False
    return True


def _refuse_left_over(files: TensorFiles, folder: Path, sources: dict[str, Source]) -> None:
    used = set()
    for source in sources.values():
        used.update(source.names)
        used.update(name for expert in source.experts for name in expert.names)
    left = [name for name in files.names if name not in used and not _UNUSED.search(name)]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise DataError(
            f"the files in {folder} hold, without a place in this model, {shown}: "
            "config.json belongs to another model"
        )


def _stream(base: nn.Module, name: str, key: str, module: nn.Module, reader: WeightReader) -> None:
    """Put a module that reads itself in the place of one with a matrix; the rest stays."""
    from transformers.pytorch_utils import Conv1D

    replacement: nn.Module | None = None
    if type(module) is nn.Linear:
        replacement = StreamedLinear(reader, f"{key}.weight", module)
    elif type(module) is Conv1D:
        replacement = StreamedConv1D(reader, f"{key}.weight", module)
    elif type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale"):
        replacement = StreamedEmbedding(reader, f"{key}.weight", module)  # pyright: ignore[reportArgumentType]
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        raise ConfigError(f"{key} is a {type(module).__name__}, which cannot be read when called")
    if replacement is not None:
        place, _, last = name.rpartition(".")
        setattr(base.get_submodule(place), last, replacement)
        return
    if type(module).__name__.endswith("GatedDeltaNet"):
        _few_texts_at_once(module, reader)
    for attribute, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 3 and parameter.numel() > 0 and type(module).__name__.endswith("Experts"):
            del module._parameters[attribute]
            setattr(module, attribute, StreamedExperts(reader, f"{key}.{attribute}", parameter.shape))
        elif parameter.numel() > _RESIDENT:
            _read_when_called(module, attribute, f"{key}.{attribute}", reader)


def _few_texts_at_once(module: Any, reader: WeightReader) -> None:
    """Let a gated delta net take its texts in groups, as many as fit :data:`DELTA_BYTES`.

    The linear maps before and after the rule take all texts at once, so that each is read once; what lies
    between them runs group by group, on several threads where their groups fit together. The library's
    chunked form holds about thirty arrays of heads × positions × width at its peak (measured), positions
    filled up to a multiple of 64.
    """
    whole = module.forward
    width = module.num_v_heads * max(module.head_k_dim, module.head_v_dim)

    def forward(hidden_states: Tensor, **places: Any) -> Tensor:
        texts, length = hidden_states.shape[:2]
        each = 30 * 4 * width * (-(-length // 64) * 64)
        last = module.out_proj
        first = [m for m in module.children() if isinstance(m, StreamedLinear) and m is not last]
        room = DELTA_BYTES - 4 * texts * length * sum(m.out_features for m in first)
        at_once = max(1, min(reader.team.size, room // each))
        most = max(1, room // (each * at_once))
        if texts <= most:
            return whole(hidden_states=hidden_states, **places)
        made = [each_map(hidden_states) for each_map in first]

        def between(part: slice) -> Tensor:
            with ExitStack() as stack:
                for each_map, values in zip(first, made, strict=True):
                    stack.enter_context(each_map.standing_in(values[part]))
                stack.enter_context(last.standing_in(None))
                return whole(hidden_states=hidden_states[part], **places)

        groups = [slice(start, start + most) for start in range(0, texts, most)]
        done = reader.team.each(groups, between) if at_once > 1 else map(between, groups)
        return last(torch.cat(list(done)))

    module.forward = forward


def _read_when_called(module: nn.Module, attribute: str, key: str, reader: WeightReader) -> None:
    """Let ``module`` have a parameter only while it runs."""
    absent: Any = module._parameters[attribute]
    absent.read_when_called = True

    def bring(*_: Any) -> None:
        module._parameters[attribute] = nn.Parameter(reader.whole(key), requires_grad=False)

    def drop(*_: Any) -> None:
        module._parameters[attribute] = absent

    module.register_forward_pre_hook(bring)
    module.register_forward_hook(drop, always_call=True)


def _tables(model: PreTrainedModel, base: nn.Module, device: torch.device) -> None:
    """Make the buffers that no file holds (rotary angles and the like) on the CPU, as the library does."""
    for name, module in base.named_modules():
        buffers = {key: value for key, value in module.named_buffers(recurse=False) if value.is_meta}
        if not buffers:
            continue
        for key, value in buffers.items():
            module._buffers[key] = torch.full(value.shape, torch.nan, dtype=value.dtype, device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        for key in buffers:
            table = module._buffers[key]
            assert table is not None
            if not np.isfinite(table.numpy()).all():
                raise ConfigError(
                    f"{name}.{key} is a table that only the class itself can make: not supported"
                )
            module._buffers[key] = table.to(device)
