"""Tokenizers: characters, byte-pair encoding trained on the training text, or a ``tokenizer.json``.

Covers text → ids and back. No special token is ever added, and the held-out text never shapes a
vocabulary. Trained tokenizers and the ids they give are cached (``cached.py``); characters are fast enough
without.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twinscope.lab.errors import ConfigError, DataError, TwinscopeError
from twinscope.text.cached import cached_bytes

UNKNOWN = "\ufffd"
_BYTES = 256
_PIECE = 1 << 18


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids (uint16, or int32 above 65,536 symbols; one dimension) and back.

    ``digest`` is a SHA-256 of the vocabulary; ``unknown`` is the id of characters outside it, if there is
    one of that meaning.
    """

    name: str
    vocab: int
    digest: str
    encode: Callable[[str], np.ndarray]
    decode: Callable[[Sequence[int]], str]
    unknown: int | None = None


def open_tokenizer(spec: str, train_text: str) -> TextTokenizer:
    """The tokenizer named ``"char"``, ``"bpe:SIZE"``, or by the path of a ``tokenizer.json``.

    Raises:
        ConfigError: ``SIZE`` is no whole number from 256 on.
        DataError: the file is missing or no tokenizer with one encoding per text.
    """
    if spec == "char":
        return char_tokenizer(train_text)
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not re.fullmatch(r"\d{1,7}", size) or int(size) < _BYTES:
            raise ConfigError(
                f"tokenizer {spec!r} is refused: the size is a whole number of at least {_BYTES}, "
                "one symbol for each byte (as in 'bpe:4096')"
            )
        return bpe_tokenizer(int(size), train_text)
    return file_tokenizer(Path(spec).expanduser())


def char_tokenizer(train_text: str) -> TextTokenizer:
    """One id per character of ``train_text``, in code-point order from 1 on; 0 is any other character."""
    present = np.unique(_code_points(train_text))
    vocab = len(present) + 1
    table = np.zeros(0x110000, dtype=token_dtype(vocab))
    table[present] = np.arange(1, vocab)
    symbols = [UNKNOWN, *map(chr, present)]
    return TextTokenizer(
        name=f"characters, {vocab} symbols",
        vocab=vocab,
        digest=hashlib.sha256("".join(symbols).encode()).hexdigest(),
        encode=lambda text: table[_code_points(text)],
        decode=lambda ids: "".join(symbols[index] for index in ids),
        unknown=0,
    )


def bpe_tokenizer(size: int, train_text: str) -> TextTokenizer:
    """Byte-level byte-pair encoding of at most ``size`` symbols, trained on ``train_text``, cached.

    Sennrich, Haddow, Birch 2016 (arXiv:1508.07909), over bytes as in GPT-2, so that every text has an
    encoding. A short text may yield fewer symbols than asked for.
    """
    text_digest = hashlib.sha256(train_text.encode()).hexdigest()
    key = f"bpe {size} {tokenizers.__version__} {text_digest}"
    data = cached_bytes(key, ".json", lambda: _trained_bpe(size, train_text))
    return _wrapped(data, "byte pairs", Tokenizer.from_str(data.decode()))


def file_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a ``tokenizer.json``, without its special tokens, truncation and padding.

    Raises:
        DataError: the file is missing, no tokenizer, without a vocabulary, or encodes at random (dropout).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path}: {error.strerror}; give 'char', 'bpe:SIZE' or the path of a "
            "tokenizer.json"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception for malformed files
        raise DataError(f"{path} is no tokenizer.json: {error}") from None
    if not tokenizer.get_vocab():
        raise DataError(f"the tokenizer {path} has no vocabulary: give a trained one")
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(f"the tokenizer {path} drops merges at random: set its dropout to null")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _wrapped(data, str(path), tokenizer)


def token_dtype(vocab: int) -> type[np.uint16] | type[np.int32]:
    """The type ids are stored in: uint16 up to 65,536 symbols, int32 above."""
    return np.uint16 if vocab <= 1 << 16 else np.int32


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def _trained_bpe(size: int, train_text: str) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_pieces(train_text), trainer)
    return tokenizer.to_str().encode()


def _wrapped(data: bytes, name: str, tokenizer: Tokenizer) -> TextTokenizer:
    digest = hashlib.sha256(data).hexdigest()
    vocab = max(tokenizer.get_vocab().values()) + 1

    def encode(text: str) -> np.ndarray:
        text_digest = hashlib.sha256(text.encode()).hexdigest()
        key = f"ids {digest} {tokenizers.__version__} {text_digest}"
        try:
            stored = cached_bytes(key, ".npy", lambda: _encoded(tokenizer, text, vocab))
        except TwinscopeError:
            raise
        except Exception as error:  # bare again: a vocabulary of words without an unknown one, for example
            raise DataError(f"the tokenizer ({name}) cannot encode the text: {error}") from None
        return np.load(io.BytesIO(stored), allow_pickle=False)

    return TextTokenizer(
        name=f"{name}, {vocab} symbols",
        vocab=vocab,
        digest=digest,
        encode=encode,
        decode=lambda ids: tokenizer.decode([int(index) for index in ids], skip_special_tokens=False),
    )


def _encoded(tokenizer: Tokenizer, text: str, vocab: int) -> bytes:
    encodings = tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
    ids = np.concatenate([np.asarray(encoding.ids, dtype=token_dtype(vocab)) for encoding in encodings])
    buffer = io.BytesIO()
    np.save(buffer, ids, allow_pickle=False)
    return buffer.getvalue()


def _pieces(text: str) -> Iterator[str]:
    # The library wants pieces for its threads. GPT-2's rule for splitting words ends one before the last
    # blank of a run, so a cut before a newline that ends a run of blanks leaves the ids as they are.
    cut, start = re.compile(r"\n(?=\S)"), 0
    while (match := cut.search(text, start + _PIECE)) is not None:
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]
