"""The ``config.json`` of a Hugging Face folder, read and refused before the library sees it.

Covers what no kind of use may accept: no JSON, no family, foreign code, quantised weights. Which families
can be used is the business of those who read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinscope.lab.errors import DataError


def read_model_json(folder: Path) -> dict[str, Any]:
    """The object in ``folder/config.json``; its ``model_type`` is a string.

    Raises:
        DataError: no such file, one that is no model's, that asks for code, or that describes quantised
            weights, in itself or in a part of it.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} is no Hugging Face folder: give the path of one with a config.json and safetensors"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}): fetch or convert the model again") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise DataError(f"{path} names no model_type: it is not the configuration of a model")
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        if "auto_map" in part:
            raise DataError(
                f"{path} asks for code that comes with the model (auto_map), which is never run: "
                "remove the key if the installed transformers knows the architecture"
            )
        if part.get("quantization_config") is not None:
            raise DataError(f"{path} describes quantised weights: give the model in bf16, fp16 or fp32")
    return raw
