"""From the ``[data]`` table to token ids: one corpus, split and tokenised, with its hashes.

Covers the choice between texts and token files. Reading them is in ``corpora.py`` and ``token_files.py``,
tokenising in ``tokenizers.py``, windows in ``batches.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import Field

from twinscope.lab.config import Section
from twinscope.lab.errors import ConfigError, DataError
from twinscope.text.corpora import TextCorpus, sotu_corpus, text_corpus
from twinscope.text.token_files import TokenCorpus, is_token_corpus, token_corpus
from twinscope.text.tokenizers import UNKNOWN, open_tokenizer


class DataSettings(Section):
    """The ``[data]`` table: which corpus, how it is split, tokenised and batched.

    ``corpus`` is ``"sotu"``, a text file, a folder of ``.txt`` files, a ``.bin`` token file or a folder with
    ``train.bin`` and ``val.bin``. ``heldout`` is a path of the same kind. ``first_heldout_year`` splits
    ``sotu``; ``vocab`` is the vocabulary size of token files.
    """

    corpus: str = Field(default="sotu", min_length=1)
    tokenizer: str = Field(default="char", min_length=1)
    batch: int = Field(default=12, ge=1)
    heldout: str | None = None
    heldout_fraction: float = Field(default=0.1, gt=0, lt=1)
    first_heldout_year: int = 2000
    vocab: int | None = Field(default=None, ge=1, le=1 << 16)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Ids of both parts (uint16 or int32, one dimension, below ``vocab``), and what is known of them.

    ``bytes_per_token`` is measured on the held-out part (UTF-8 bytes per token) and None where the ids
    cannot be turned into text. ``hashes`` holds SHA-256 digests of ``train``, ``heldout`` and, if there is
    one, ``tokenizer``.
    """

    train: np.ndarray
    heldout: np.ndarray
    vocab: int
    bytes_per_token: float | None
    hashes: dict[str, str]
    description: str
    decode: Callable[[Sequence[int]], str] | None


def open_dataset(settings: DataSettings) -> Dataset:
    """Read, check, split and tokenise the corpus of ``settings``.

    Raises:
        ConfigError: a key does not fit the corpus, or the package ``sotu`` is missing.
        DataError: a file is missing, empty, malformed or not UTF-8, or a token is outside the vocabulary.
    """
    heldout = Path(settings.heldout).expanduser() if settings.heldout is not None else None
    path = Path(settings.corpus).expanduser()
    if settings.corpus != "sotu" and is_token_corpus(path):
        if settings.tokenizer != "char":
            raise ConfigError(f"tokenizer = {settings.tokenizer!r}: {path} holds ids already, leave it out")
        return _of_tokens(token_corpus(path, heldout, settings.heldout_fraction, settings.vocab))
    if settings.vocab is not None:
        raise ConfigError("vocab belongs to .bin token files: the tokenizer sets the vocabulary of a text")
    if settings.corpus == "sotu":
        if heldout is not None:
            raise ConfigError("heldout does not go with the corpus 'sotu': set first_heldout_year instead")
        return _of_text(sotu_corpus(settings.first_heldout_year), settings.tokenizer)
    return _of_text(text_corpus(path, heldout, settings.heldout_fraction), settings.tokenizer)


def _of_text(corpus: TextCorpus, tokenizer_spec: str) -> Dataset:
    if corpus.heldout == corpus.train:
        raise DataError(
            f"{corpus.description}: the held-out text stands in the training text; hold out another"
        )
    tokenizer = open_tokenizer(tokenizer_spec, corpus.train)
    train, heldout = tokenizer.encode(corpus.train), tokenizer.encode(corpus.heldout)
    if not len(train) or not len(heldout):
        raise DataError(f"the tokenizer ({tokenizer.name}) turns {corpus.description} into no token at all")
    description = f"{corpus.description}; {tokenizer.name}"
    if tokenizer.unknown is not None:
        unknown = int(np.count_nonzero(heldout == tokenizer.unknown))
        description += f", {unknown} of {len(heldout)} held-out characters unknown"
    heldout_bytes = corpus.heldout.encode()
    return Dataset(
        train=train,
        heldout=heldout,
        vocab=tokenizer.vocab,
        bytes_per_token=len(heldout_bytes) / len(heldout),
        hashes={
            "train": hashlib.sha256(corpus.train.encode()).hexdigest(),
            "heldout": hashlib.sha256(heldout_bytes).hexdigest(),
            "tokenizer": tokenizer.digest,
        },
        description=description,
        decode=tokenizer.decode,
    )


def _of_tokens(corpus: TokenCorpus) -> Dataset:
    bytes_per_token = decode = None
    if corpus.symbols is not None:
        widths = np.array([len(symbol.encode(errors="surrogatepass")) for symbol in corpus.symbols])
        bytes_per_token = float(widths[corpus.heldout].mean())
        decode = partial(_join, corpus.symbols)
    return Dataset(
        train=corpus.train,
        heldout=corpus.heldout,
        vocab=corpus.vocab,
        bytes_per_token=bytes_per_token,
        hashes=corpus.hashes,
        description=f"{corpus.description}; token file, {corpus.vocab} symbols",
        decode=decode,
    )


def _join(symbols: tuple[str, ...], ids: Sequence[int]) -> str:
    # Ids above the symbols exist where the vocabulary is padded.
    return "".join(symbols[index] if index < len(symbols) else UNKNOWN for index in ids)
