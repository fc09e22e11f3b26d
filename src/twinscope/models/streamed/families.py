"""Where the branches of a layer are, for every family of ``transformers`` whose layers are known.

Covers layers of the form ``z + post(module(pre(z)))`` one branch after the other: which module, which norm
before it, which norm after it. A family that is not listed (parallel branches, scaled residuals, a norm on
the residual stream itself) has no branches here and is refused by name. The forward pass of a whole model
does not need this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinscope.lab.errors import ConfigError

#: Kind of a site -> the last part of its name.
KINDS: Mapping[str, str] = {
    "attention": "self_attn",
    "linear_attention": "linear_attn",
    "mlp": "mlp",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class BranchNames:
    """One branch of a layer: its ``module`` and the norms before and after it, as the library names them."""

    module: str
    before: str
    after: str | None = None


@dataclass(frozen=True)
class FamilyLayout:
    """Names inside the base model: its layers, what surrounds them, and the branches of a layer in order.

    ``branches`` maps the last part of a site's name to the names of the library; a layer has those whose
    module exists in it. ``angles_by_kind``: rotary angles differ between kinds of layer. ``learned``:
    the embedding of positions that is added to that of tokens.
    """

    branches: Mapping[str, BranchNames]
    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    learned: str | None = None
    angles_by_kind: bool = False


_PLAIN = FamilyLayout(
    {
        "self_attn": BranchNames("self_attn", "input_layernorm"),
        "linear_attn": BranchNames("linear_attn", "input_layernorm"),
        "mlp": BranchNames("mlp", "post_attention_layernorm"),
    }
)
_BETWEEN_NORMS = {
    "self_attn": BranchNames("self_attn", "input_layernorm", "post_attention_layernorm"),
    "mlp": BranchNames("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
_LAYOUTS: Mapping[str, FamilyLayout] = {
    "gpt2": FamilyLayout(
        {"self_attn": BranchNames("attn", "ln_1"), "mlp": BranchNames("mlp", "ln_2")},
        layers="h",
        embedding="wte",
        norm="ln_f",
        learned="wpe",
    ),
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "phi3": _PLAIN,
    "gemma": _PLAIN,
    "gemma2": FamilyLayout(_BETWEEN_NORMS),
    "gemma3_text": FamilyLayout(_BETWEEN_NORMS, angles_by_kind=True),
    "qwen3_5_text": _PLAIN,
    "qwen3_next": _PLAIN,
}


def layout_of(family: str) -> FamilyLayout | None:
    """The layout of a family by its ``model_type``, or None where its layers are not known."""
    return _LAYOUTS.get(family)


def known_layout(family: str, layout: FamilyLayout | None) -> FamilyLayout:
    """``layout``, or a refusal by name.

    Raises:
        ConfigError: the family's layers are not known.
    """
    if layout is None:
        raise ConfigError(
            f"the layers of a '{family}' model are not known to be pre-norm branches one after the other, "
            f"so it has no sites to look at: use one of {', '.join(_LAYOUTS)}"
        )
    return layout
