"""Paired experiments on transformer language models.

The names below are loaded on first use: ``import twinscope`` alone loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinscope.lab.record import load_record as load
    from twinscope.models.decoder import Decoder
    from twinscope.models.gpt import GPTConfig, build_gpt
    from twinscope.models.streamed.model import open_streamed
    from twinscope.propagation.estimators import bp_gradient, ep_gradient
    from twinscope.propagation.leak.spectrometer import leak_spectrum
    from twinscope.propagation.settings import EPSettings

__all__ = [
    "Decoder",
    "EPSettings",
    "GPTConfig",
    "bp_gradient",
    "build_gpt",
    "ep_gradient",
    "leak_spectrum",
    "load",
    "open_streamed",
]

_HOMES = {
    "Decoder": "twinscope.models.decoder",
    "EPSettings": "twinscope.propagation.settings",
    "GPTConfig": "twinscope.models.gpt",
    "bp_gradient": "twinscope.propagation.estimators",
    "build_gpt": "twinscope.models.gpt",
    "ep_gradient": "twinscope.propagation.estimators",
    "leak_spectrum": "twinscope.propagation.leak.spectrometer",
    "open_streamed": "twinscope.models.streamed.model",
}


def __getattr__(name: str) -> Any:
    if name == "load":
        return import_module("twinscope.lab.record").load_record
    if name not in _HOMES:
        raise AttributeError(f"module 'twinscope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
