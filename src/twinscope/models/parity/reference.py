"""The library's own forward pass of a folder, in a process of its own: what a streamed pass is compared with.

Covers the whole model in memory, and one layer at a time where it does not fit: each layer of the library's
class, made and filled by the official safetensors library, is fed the streamed residual that enters it.
Nothing here uses the package's own reader or modules, so that a defect in them cannot hide. What is compared
and how is in ``parity.py``; :func:`main` is what the process runs.

Shapes: B texts, T positions, C channels, L layers, V tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twinscope.lab.errors import TwinscopeError

#: Rows of the head that are multiplied at a time, layer by layer.
_HEAD_ROWS = 8192
#: What files put before the names of the base model, most specific first.
_PLACES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
#: Families whose layers can be run alone: only layer_types tells one layer from another.
ALONE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "qwen3_5_text")


def main(work: str) -> None:
    """Read ``request.json`` and ``given.safetensors`` in the folder ``work``, and write the answer there.

    The answer is ``answer.safetensors``: ``states.0 … states.L-1`` that enter the layers, ``hidden``
    ``(B, T, C)`` after the last norm, ``nll`` ``(B, T - 1)`` in nats; or ``error.txt``, a sentence.
    """
    place = Path(work)
    request = json.loads((place / "request.json").read_bytes())
    torch.set_num_threads(request["threads"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "0"
    given = load_file(place / "given.safetensors")
    run = whole if request["method"] == "whole" else layer_by_layer
    try:
        with torch.no_grad():
            answer = run(Path(request["folder"]), request["attention"], given)
    except TwinscopeError as error:
        (place / "error.txt").write_text(str(error))
        sys.exit(1)
    save_file({name: tensor.contiguous().clone() for name, tensor in answer.items()}, place / "answer.part")
    os.replace(place / "answer.part", place / "answer.safetensors")


def whole(folder: Path, attention: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load the folder the library's way in float32 and run ``given["ids"] (B, T)`` through it.

    Raises:
        TwinscopeError: the library cannot load it, or misses weights.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen: Any = transformers.AutoModelForCausalLM
    try:
        model, report = chosen.from_pretrained(
            str(folder),
            config=_text_config(folder),
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # the library has no error of its own for a bad folder
        raise TwinscopeError(f"the library cannot load {folder} ({_reason(error)})") from None
    for key in ("missing_keys", "mismatched_keys"):
        if report[key]:
            raise TwinscopeError(f"the library finds no weights in {folder} for {sorted(report[key])[0]}")
    model.eval()
    found: dict[str, Tensor] = {}
    base = model.base_model
    for number, layer in enumerate(_layers(base)):
        layer.register_forward_pre_hook(_recorder(found, number), with_kwargs=True)
    ids = given["ids"]
    out = base(input_ids=ids, use_cache=False)
    found["hidden"] = out.last_hidden_state
    found = {name: value.clone() for name, value in found.items()}
    losses = []
    for text in ids:  # the logits of one text at a time
        logits = model(input_ids=text[None], use_cache=False).logits[0, :-1].double()
        losses.append(nn.functional.cross_entropy(logits, text[1:], reduction="none").float())
    return {**found, "nll": torch.stack(losses)}


def layer_by_layer(folder: Path, attention: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer of the library's class on the residual ``given["states.l"]`` that entered it when streamed.

    A layer runs inside a model of the library that has this layer alone, so that masks and rotary angles are
    the library's too. The answer's ``states.l + 1`` is what layer l makes of ``given["states.l"]``, its
    ``hidden`` what the last layer and the norm make of ``given["states.L-1"]``, its ``nll`` what the head
    makes of ``given["hidden"]``. Memory: one layer, and some rows of the head.

    Raises:
        TwinscopeError: the family is none of :data:`ALONE`, or a tensor has another name than the library's.
    """
    import transformers

    config = _text_config(folder)
    if config.model_type not in ALONE:
        raise TwinscopeError(
            f"the layers of a '{config.model_type}' model cannot be run one at a time: free memory, so that "
            "the whole model fits, and use --method whole"
        )
    files = _Files(folder)
    ids = given["ids"]
    present, places = torch.unique(ids, return_inverse=True)
    found: dict[str, Tensor] = {}
    for number in range(config.num_hidden_layers):
        model: Any = transformers.AutoModel.from_config(
            _one_layer(config, number, len(present)), attn_implementation=attention, dtype=torch.float32
        )
        stored = {}
        for key in model.state_dict():
            name = key.replace("layers.0.", f"layers.{number}.")
            stored[key] = files.rows(name, present) if key == "embed_tokens.weight" else files.get(name)
        model.load_state_dict(stored, strict=True)
        model.eval()
        if number == 0:
            found["states.0"] = model.get_input_embeddings()(places)
        model.layers[0].register_forward_hook(_result_recorder(found, number + 1))
        out = model(inputs_embeds=given[f"states.{number}"], use_cache=False)
        found["hidden"] = out.last_hidden_state
    # After the last layer comes the norm, which `hidden` shows.
    del found[f"states.{config.num_hidden_layers}"]
    found["nll"] = _nll(files, config, given["hidden"], ids)
    return found


def _nll(files: _Files, config: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Nats ``(B, T - 1)`` of final states, the head some rows at a time, summed in float64."""
    states, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    cap = getattr(config, "final_logit_softcapping", None)
    total = torch.full((len(states),), -torch.inf, dtype=torch.float64)
    chosen = torch.zeros(len(states), dtype=torch.float64)
    vocab = files.head_rows()
    for start in range(0, vocab, _HEAD_ROWS):
        rows = torch.arange(start, min(vocab, start + _HEAD_ROWS))
        logits = states @ files.head(rows).T
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        total = torch.logaddexp(total, logits.double().logsumexp(-1))
        inside = (targets >= start) & (targets < start + len(rows))
        chosen[inside] = logits[inside].gather(1, targets[inside, None] - start)[:, 0].double()
    return (total - chosen).float().view(len(ids), -1)


class _Files:
    """Tensors of a folder by their name inside the base model, through the official library, in float32."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file() or not index.is_file():
            names = [path.name for path in folder.glob("*.safetensors")]
            names = ["model.safetensors"] if "model.safetensors" in names else names
        else:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        self.of: dict[str, Path] = {}
        for name in names:
            with safe_open(folder / name, "pt") as file:
                self.of |= dict.fromkeys(file.keys(), folder / name)
        self.folder = folder

    def get(self, name: str) -> Tensor:
        key = self._key(name)
        # Opened anew each time: an open file keeps every page that was touched in memory.
        with safe_open(self.of[key], "pt") as file:
            return file.get_tensor(key).float()

    def rows(self, name: str, rows: Tensor) -> Tensor:
        key = self._key(name)
        with safe_open(self.of[key], "pt") as file:
            part = file.get_slice(key)
            return torch.stack([part[int(row)] for row in rows]).float()

    def head_rows(self) -> int:
        key = self._head()
        with safe_open(self.of[key], "pt") as file:
            return file.get_slice(key).get_shape()[0]

    def head(self, rows: Tensor) -> Tensor:
        key = self._head()
        with safe_open(self.of[key], "pt") as file:
            return file.get_slice(key)[int(rows[0]) : int(rows[-1]) + 1].float()

    def _head(self) -> str:
        names = ("lm_head.weight", "language_model.lm_head.weight")
        return next((name for name in names if name in self.of), None) or self._key("embed_tokens.weight")

    def _key(self, name: str) -> str:
        for place in _PLACES:
            if place + name in self.of:
                return place + name
        raise TwinscopeError(f"{self.folder} holds no tensor for {name} under a name that the library uses")


def _one_layer(config: Any, number: int, vocab: int) -> Any:
    """``config`` with one layer, the ``number``-th, and a vocabulary of ``vocab`` tokens."""
    values = config.to_dict()
    values |= {"num_hidden_layers": 1, "vocab_size": vocab, "pad_token_id": None}
    if values.get("layer_types") is not None:
        values["layer_types"] = [config.layer_types[number]]
    if config.model_type in ("qwen2", "qwen3"):
        values["max_window_layers"] = 0 if values["layer_types"][0] == "sliding_attention" else 1
    return type(config).from_dict(values)


def _text_config(folder: Path) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # as in `whole`
        raise TwinscopeError(f"the library cannot read {folder}/config.json ({_reason(error)})") from None
    return config.get_text_config(decoder=True)


def _layers(base: Any) -> nn.ModuleList:
    count = base.config.num_hidden_layers
    for module in base.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TwinscopeError(f"a {type(base).__name__} of the library has no list of layers to look at")


def _recorder(found: dict[str, Tensor], number: int) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[f"states.{number}"] = args[0] if args else kwargs["hidden_states"]

    return record


def _result_recorder(found: dict[str, Tensor], number: int) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, result: Any) -> None:
        found[f"states.{number}"] = result[0] if isinstance(result, tuple) else result

    return record


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
