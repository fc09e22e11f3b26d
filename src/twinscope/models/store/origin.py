"""What the weights in a folder are and where they come from: the file ``twinscope.json`` beside them.

Covers writing it, reading it, and comparing the folder with it. It is written last, so a folder that has one
was made whole. Making folders is in ``library.py`` and the modules that call it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import DataError
from twinscope.lab.evidence import Weights
from twinscope.lab.provenance import utc_now

ORIGIN = "twinscope.json"
#: ``planted``: copies of modules were put into trained or released weights on purpose.
Kind = Literal["random", "released", "trained", "planted"]
_MAX_BYTES = 1 << 22


class Origin(BaseModel):
    """What a folder of weights is.

    ``files`` maps each file's name to the SHA-256 of its bytes; ``sha256`` is one hash over them all
    (:func:`content_sha256`); ``details`` are JSON values that the maker adds, such as a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["twinscope.weights/1"] = "twinscope.weights/1"
    weights: Kind
    source: str
    made: str
    details: dict[str, Any]
    files: dict[str, str]
    sha256: str

    @property
    def evidence(self) -> tuple[Weights, bool]:
        """The kind of weights as the levels of evidence count it, and whether copies were planted."""
        return ("trained", True) if self.weights == "planted" else (self.weights, False)


def write_origin(
    folder: Path,
    weights: Kind,
    source: str,
    files: Mapping[str, str],
    details: Mapping[str, Any] | None = None,
) -> Origin:
    """Write ``twinscope.json`` into ``folder``, whose ``files`` are on disk already; returns its content.

    Raises:
        Stopped, ConfigError, TwinscopeError: as for :func:`~twinscope.lab.durable.write_atomic`.
    """
    origin = Origin(
        weights=weights,
        source=source,
        made=utc_now(),
        details=dict(details or {}),
        files=dict(sorted(files.items())),
        sha256=content_sha256(files),
    )
    text = json.dumps(origin.model_dump(mode="json"), indent=2, allow_nan=False)
    write_atomic(folder / ORIGIN, text.encode() + b"\n")
    return origin


def read_origin(folder: Path) -> Origin | None:
    """The content of ``twinscope.json`` in ``folder``; None if there is none.

    Raises:
        DataError: it cannot be read, or is not of this form.
    """
    path = folder / ORIGIN
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    try:
        origin = Origin.model_validate_json(data)
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, item["loc"])) or "the whole"
        raise DataError(
            f"{path} does not say what the weights are ({where}: {item['msg']}): make the model again"
        ) from None
    if any(Path(name).name != name or name in ("", ".", "..") for name in origin.files):
        raise DataError(f"{path} names files outside its folder: make the model again")
    return origin


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` has a ``twinscope.json`` and every file in it hashes to what that says."""
    try:
        origin = read_origin(folder)
        return origin is not None and all(
            file_sha256(folder / name) == digest for name, digest in origin.files.items()
        )
    except (OSError, DataError):
        return False


def content_sha256(files: Mapping[str, str]) -> str:
    """One SHA-256 for a set of files, whatever their order: over lines of name and hash, sorted by name."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 of one file, read in pieces. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
