"""What the weights of a model folder are: hashes of its files, and random, trained or released.

Covers the folder as it lies on the disk. Of the weights, norm gains alone are read, and only where nobody
says what they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.evidence import Weights
from twinscope.models.store.origin import content_sha256, file_sha256, read_origin
from twinscope.models.tensor_files import open_tensors

#: The files of a model's folder that decide what it computes and how text is read.
_WEIGHTS = ".safetensors"
_FILES = (f"*{_WEIGHTS}", "*.index.json", "config.json", "tokenizer.json", "tokenizer_config.json")
_NORM = re.compile(r"(norm|\.ln_\w+)\.weight$")


@dataclass(frozen=True)
class Identity:
    """What the weights in a folder are: hashes of files and of all, the kind, and who says so."""

    sha256: str
    files: dict[str, str]
    weights: Weights
    planted: bool
    told_by: str


def identify(folder: Path, stated: Weights | None = None) -> Identity:
    """Hash the files of a model's folder, and tell what its weights are.

    ``twinscope.json`` tells where its hashes still hold; else ``stated``; else weights of which every norm
    gain is constant, as initialisation leaves it, count as random, and others as released.

    Raises:
        ConfigError: ``stated`` contradicts ``twinscope.json``.
        DataError: the folder cannot be read or holds no weights.
    """
    names = sorted({path.name for pattern in _FILES for path in folder.glob(pattern)})
    try:
        files = {name: file_sha256(folder / name) for name in names}
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None
    if not any(name.endswith(_WEIGHTS) for name in files):
        raise DataError(f"{folder} holds no .safetensors file: give the folder of a model")
    sha256 = content_sha256(files)
    origin = read_origin(folder)
    weights_files = {name: digest for name, digest in files.items() if name.endswith(_WEIGHTS)}
    if origin is not None and weights_files.items() <= origin.files.items():
        weights, planted = origin.evidence
        if stated not in (None, weights):
            raise ConfigError(
                f"model.weights = '{stated}', but {folder} says that its weights are {origin.weights}: leave "
                "model.weights out"
            )
        return Identity(sha256, files, weights, planted, "twinscope.json")
    if stated is not None:
        return Identity(sha256, files, stated, False, "the configuration")
    if _as_initialised(folder):
        return Identity(sha256, files, "random", False, "norm gains that are all as initialised")
    return Identity(sha256, files, "released", False, "nobody; norm gains are not as initialised")


def _as_initialised(folder: Path) -> bool:
    """Whether every norm gain of the model is one constant; False if it has none."""
    with open_tensors(folder) as tensors:
        norms = [name for name in tensors.names if _NORM.search(name)]
        return bool(norms) and all(_constant(tensors.read(name)) for name in norms)


def _constant(values: Tensor) -> bool:
    return bool(values.eq(values.flatten()[0]).all())
