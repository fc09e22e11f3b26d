"""Causal language models of the installed ``transformers`` release as decoders.

Covers wrapping one that is in memory, and opening a local folder. A wrapped model runs the library's own
modules under the library's own names; only the loop over its layers is replaced, so positions, rotary
angles and causal masks are made here from the length of the text alone. Not covered: code that comes with
a model, adapters, quantised weights, downloads (``fetch.py``), streaming.

The library's RMSNorm, softmax of eager attention and rotary angles compute in float32 whatever the dtype:
states, residual sums and products of a float64 model are float64, those parts are not.

Shapes: B texts, T positions, C channels of the residual stream, V tokens in the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.decoder import Blocks, Decoder, check_decoder, forward
from twinscope.models.model_json import read_model_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Family:
    """What the library's forward of one family does around its layers, beyond what Llama does."""

    name: str  # of the class in transformers
    windows: Literal["none", "all", "by layer"] = "none"  # layers that see config.sliding_window positions
    angles: Literal["one", "by layer"] = "one"  # rotary angles: the same everywhere, or per kind of layer
    capped: bool = False  # logits pass through config.final_logit_softcapping
    attention: Literal["sdpa", "eager"] = "sdpa"


_FAMILIES = {
    "gpt2": _Family("GPT2LMHeadModel"),
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", windows="all"),
    "qwen2": _Family("Qwen2ForCausalLM", windows="by layer"),
    "qwen3": _Family("Qwen3ForCausalLM", windows="by layer"),
    "gemma": _Family("GemmaForCausalLM"),
    # Its attention scores are soft-capped, which scaled_dot_product_attention cannot do.
    "gemma2": _Family("Gemma2ForCausalLM", windows="by layer", capped=True, attention="eager"),
    "gemma3_text": _Family("Gemma3ForCausalLM", windows="by layer", angles="by layer", capped=True),
}
_SUPPORTED = ", ".join(f"{family.name} ({kind})" for kind, family in _FAMILIES.items())


class HFBlock(nn.Module):
    """One layer of the library as a function of its input ``(B, T, C)`` alone."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, kind: str, family: _Family, config: Any):
        super().__init__()
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        self.layer = layer
        self.rotary = rotary  # one module for all blocks: it has no parameters
        self._config = config
        self._mask = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        self._angles = (kind,) if family.angles == "by layer" else ()

    def forward(self, z: Tensor) -> Tensor:
        """``(B, T, C)`` to ``(B, T, C)`` at positions 0 … T − 1, causal, without a cache."""
        positions = torch.arange(z.shape[1], device=z.device)[None]
        mask = self._mask(config=self._config, inputs_embeds=z, attention_mask=None, cache=None)
        places = {"attention_mask": mask, "position_ids": positions}
        if self.rotary is not None:
            places["position_embeddings"] = self.rotary(z, positions, *self._angles)
        return self.layer(z, **places)


class HFDecoder(nn.Module, Decoder):
    """The decoder :func:`wrap_causal_lm` returns; it shares every module with the model it was made of.

    ``vocab`` is V, padding of the vocabulary included; ``context`` the most positions the model reads;
    ``family`` the library's ``model_type``.
    """

    blocks: Blocks

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        super().__init__()
        # The children, not the model: parameters keep the library's names without a prefix.
        for name, child in model.named_children():
            self.add_module(name, child)
        family, config = _FAMILIES[kind], model.config
        self.family = kind
        self.context = int(config.max_position_embeddings)
        self.vocab = int(config.vocab_size)
        self._prefix = model.base_model_prefix
        self._cap: float | None = config.final_logit_softcapping if family.capped else None
        base = self._base
        layers = base.h if kind == "gpt2" else base.layers
        rotary = None if kind == "gpt2" else base.rotary_emb
        kinds = _layer_kinds(family, config)
        # A tuple, so that the blocks' parameters are not registered under a second name.
        self.blocks = tuple(
            HFBlock(layer, rotary, kinds[index], family, config) for index, layer in enumerate(layers)
        )
        self.eval()

    @property
    def _base(self) -> Any:
        return getattr(self, self._prefix)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``(B, T)`` int64 to ``(B, T, C)``: token vectors as the family scales them, plus
        position vectors where they are learned.

        Raises:
            DataError: the text is empty or longer than the context, or (on the CPU) a token is outside
                the vocabulary.
        """
        length = tokens.shape[-1]
        if not 1 <= length <= self.context:
            raise DataError(
                f"a text of {length} tokens does not fit this model, which reads 1 to {self.context}: "
                "change the length"
            )
        base = self._base
        try:
            z = base.get_input_embeddings()(tokens)
        except IndexError:
            raise DataError(
                f"a token id lies outside 0 … {self.vocab - 1}, the vocabulary of this model: "
                "use the tokenizer it was trained with"
            ) from None
        return z + base.wpe.weight[:length] if self.family == "gpt2" else z

    def readout(self, z: Tensor) -> Tensor:
        """``(B, T, C)`` to logits ``(B, T, V)``: final norm, head, and the soft cap where there is one."""
        base = self._base
        norm = base.ln_f if self.family == "gpt2" else base.norm
        logits = cast(nn.Module, self.lm_head)(norm(z))
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``(B, T, V)`` of token ids ``(B, T)`` int64."""
        return forward(self, tokens)


def wrap_causal_lm(model: PreTrainedModel) -> HFDecoder:
    """``model`` as a decoder that shares its parameters, under its names, tied ones once; dropout goes off.

    Raises:
        ConfigError: the family is not supported, its attention looks ahead or runs in another kernel, its
            rotary angles depend on more than the position, or it is no decoder (see ``check_decoder``).
    """
    kind = next((kind for kind, family in _FAMILIES.items() if _is(model, family)), None)
    if kind is None:
        raise ConfigError(f"{type(model).__name__} is not supported as a decoder: use one of {_SUPPORTED}")
    config = model.config
    name = type(model).__name__
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"this {name} attends to later positions, so it is no decoder: use a causal model")
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"this {name} runs its attention by '{implementation}': load it with "
            f"attn_implementation = '{_FAMILIES[kind].attention}'"
        )
    stateful = sorted(_rope_types(config) & {"dynamic", "longrope"})
    if stateful:
        raise ConfigError(
            f"this {name} has rotary angles of the type '{stateful[0]}', which depend on the lengths of "
            "texts: use a model whose angles depend on the position alone"
        )
    return cast(HFDecoder, check_decoder(HFDecoder(model, kind)))


def open_causal_lm(folder: Path | str, dtype: torch.dtype = torch.float32) -> HFDecoder:
    """The model in a local Hugging Face folder (``config.json`` and safetensors) as a decoder on the CPU.

    ``dtype`` is float32 or float64, whatever the file stores. Nothing is downloaded, no code from the
    folder is run and no pickle is opened. Sets ``HF_HUB_OFFLINE`` and ``USE_HUB_KERNELS`` for this process.

    Raises:
        DataError: no such folder, a damaged or incomplete file, weights that do not fit the
            configuration or are not finite, quantised weights, or a model that brings code of its own.
        ConfigError: as for :func:`wrap_causal_lm`.
    """
    folder = Path(folder).expanduser().absolute()
    kind = _read_family(folder)
    family = _FAMILIES[kind]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "0"
    import transformers

    try:
        with _silent(transformers.utils.logging):
            model, report = getattr(transformers, family.name).from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=family.attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # the library has no error of its own for a bad file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{folder} cannot be opened as a {family.name} ({reason}): fetch or convert it again"
        ) from None
    for key, words in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have another shape for"),
        ("unexpected_keys", "hold, without a place in this model,"),
    ):
        names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in report.get(key, ()))
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise DataError(
                f"the weights in {folder} {words} {shown}: config.json belongs to another model, "
                "or the files are incomplete"
            )
    damaged = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor).all())]
    if damaged:
        raise DataError(f"{folder}: NaN or infinite values in {damaged[0]}: fetch or convert it again")
    return wrap_causal_lm(model)


def _is(model: object, family: _Family) -> bool:
    # The class itself: a subclass, or a class of that name from a model's own code, may compute anything.
    return type(model).__name__ == family.name and type(model).__module__.startswith("transformers.models.")


def _layer_kinds(family: _Family, config: Any) -> list[str]:
    if family.windows == "by layer":
        return list(config.layer_types)
    windowed = family.windows == "all" and config.sliding_window is not None
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {table.get("rope_type", "default") for table in tables}


def _read_family(folder: Path) -> str:
    """The ``model_type`` in the folder's ``config.json``, once nothing in it asks for foreign code."""
    config = read_model_json(folder)
    path = folder / "config.json"
    if "quantization_config" in config:
        raise DataError(f"{path} describes quantised weights: give the model in bf16, fp16 or fp32")
    kind = config["model_type"]
    if kind not in _FAMILIES:
        raise ConfigError(f"{folder} holds a '{kind}' model, which is not supported: use one of {_SUPPORTED}")
    return kind


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    """The library's own progress bars and warnings off; what they would say is checked and raised here."""
    verbosity = logging.get_verbosity()
    hook = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)
