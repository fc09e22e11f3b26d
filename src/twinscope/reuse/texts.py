"""The texts of a plan: which passages calibrate and which are held out, and the refusal of copies.

Covers passages drawn from a corpus, texts from the user's files, the tokens that stand before a text, and
how much two texts share. A text is a window of tokens without padding, cut at its end and nowhere else.
Reading corpora is in ``text/corpora.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from twinscope.lab.config import Section
from twinscope.lab.draws import generator
from twinscope.lab.errors import ConfigError, DataError
from twinscope.text.corpora import SEPARATOR, TextCorpus, read_text, sotu_corpus, text_corpus
from twinscope.text.tokenizers import open_tokenizer

Split = Literal["calibration", "heldout"]
SPLITS: tuple[Split, ...] = ("calibration", "heldout")
#: Lengths of the runs whose sharing is counted: tokens, and words without case and punctuation.
TOKEN_RUN, WORD_RUN = 5, 4
#: Characters of one piece of a long paragraph for each token of the window: more than tokens take.
_PIECE = 12


class TextSettings(Section):
    """``[reuse.texts]``: how many texts of how many tokens, and where they come from.

    ``corpus`` is ``"sotu"``, a text file or a folder of ``.txt`` files; calibration passages come from its
    training part, held-out passages from its held-out part. ``calibration_files`` and ``heldout_files``
    name one text each instead. ``tokenizer`` is the model's own if left out, else ``"char"``,
    ``"bpe:SIZE"`` or the path of a ``tokenizer.json``. ``bos = "tokenizer"`` puts before each text what the
    tokenizer puts there, inside the window; ``"none"`` nothing. Two texts may share at most ``max_overlap``
    of the shorter one's runs (:func:`overlap`).
    """

    corpus: str = Field(default="sotu", min_length=1)
    calibration: int = Field(default=4, ge=2)
    heldout: int = Field(default=4, ge=2)
    tokens: int = Field(default=32, ge=8)
    tokenizer: str | None = None
    bos: Literal["tokenizer", "none"] = "tokenizer"
    max_overlap: float = Field(default=0.2, ge=0, lt=1)
    first_heldout_year: int = 2000
    heldout_corpus: str | None = None
    heldout_fraction: float = Field(default=0.1, gt=0, lt=1)
    calibration_files: list[str] | None = None
    heldout_files: list[str] | None = None

    @model_validator(mode="after")
    def _files_come_in_pairs(self) -> TextSettings:
        files = {"calibration_files": self.calibration_files, "heldout_files": self.heldout_files}
        missing = [name for name, given in files.items() if given is None]
        if len(missing) == 1:
            raise ValueError(f"{missing[0]}: give both lists of files, or a corpus")
        for name, given in files.items():
            if given is not None and len(given) < 2:
                raise ValueError(f"{name}: give at least 2 files")
        if not missing and self.corpus != "sotu":
            raise ValueError(
                "calibration_files and heldout_files stand instead of a corpus: give one of the two"
            )
        return self


@dataclass(frozen=True)
class Passage:
    """One text: its tokens, what they read, where it is from; ``name`` is unique within a plan."""

    name: str
    split: Split
    origin: str
    ids: tuple[int, ...]
    text: str

    @property
    def sha256(self) -> str:
        """The hash of the tokens."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()


@dataclass(frozen=True)
class TextCodec:
    """Text to ids and back, the ids that stand before every text, and the hash of all that decides them."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    prefix: tuple[int, ...]
    policy: str
    sha256: str


def choose_texts(
    settings: TextSettings, codec: TextCodec, seed: int, beside: Sequence[Passage] = ()
) -> list[Passage]:
    """The passages of a plan, calibration first; a function of settings, corpus, tokenizer and seed.

    From a corpus, pieces of paragraphs are taken in an order drawn from the seed; one that is too short or
    shares too much with those already chosen, or with those in ``beside``, is passed over. A part whose
    paragraphs give too few texts is cut across paragraphs instead, all of its texts alike.

    Raises:
        ConfigError: the corpus cannot be opened as configured.
        DataError: too few passages, a file shorter than the window, or files that share too much.
    """
    if settings.calibration_files is not None and settings.heldout_files is not None:
        files = {"calibration": settings.calibration_files, "heldout": settings.heldout_files}
        chosen = [
            _of_file(Path(file), split, index, settings.tokens, codec)
            for split in SPLITS
            for index, file in enumerate(files[split])
        ]
        refuse_overlap([*beside, *chosen], settings.max_overlap)
        return chosen
    corpus = _corpus(settings)
    parts = {"calibration": corpus.train, "heldout": corpus.heldout}
    counts = {"calibration": settings.calibration, "heldout": settings.heldout}
    chosen: list[Passage] = []
    for split in SPLITS:
        found: list[Passage] = []
        for across in (False, True):
            drawn = _drawn(parts[split], split, settings, codec, seed, across)
            found = _apart(drawn, [*beside, *chosen], settings.max_overlap, counts[split])
            if len(found) == counts[split]:
                break
        if len(found) < counts[split]:
            raise DataError(
                f"{corpus.description}: the {split} part gives {len(found)} texts of {settings.tokens} "
                f"tokens that share little enough, {counts[split]} are asked for: give a longer corpus, or "
                "fewer or shorter texts"
            )
        chosen.extend(found)
    return chosen


def open_codec(settings: TextSettings, folder: Path, bos_token_id: int | None = None) -> TextCodec:
    """The tokenizer of the texts: the one that lies in ``folder`` with the model, unless another is named.

    ``bos_token_id`` is the model's; it is used where ``tokenizer_config.json`` asks for one and the
    ``tokenizer.json`` does not put it.

    Raises:
        ConfigError: the folder has no tokenizer and none is named; DataError: it cannot be read.
    """
    if settings.tokenizer in ("char",) or (settings.tokenizer or "").startswith("bpe:"):
        assert settings.tokenizer is not None
        opened = open_tokenizer(settings.tokenizer, _corpus(settings).train)
        policy = f"none: {opened.name}, which have no such token"
        return TextCodec(
            opened.name, lambda text: opened.encode(text).tolist(), opened.decode, (), policy, opened.digest
        )
    path = folder / "tokenizer.json" if settings.tokenizer is None else Path(settings.tokenizer).expanduser()
    if settings.tokenizer is None and not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: set reuse.texts.tokenizer to the path of one")
    from tokenizers import Tokenizer

    try:
        data = path.read_bytes()
        tokenizer: Any = Tokenizer.from_str(data.decode())
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from None
    except Exception as error:  # the library raises bare Exception for malformed files
        raise DataError(f"{path} is no tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    prefix, policy = (), "none: as configured"
    if settings.bos == "tokenizer":
        prefix, policy = _prefix(tokenizer, path.with_name("tokenizer_config.json"), bos_token_id)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)

    return TextCodec(str(path), encode, decode, prefix, policy, hashlib.sha256(data).hexdigest())


def bos_token_id(folder: Path) -> int | None:
    """The BOS token of the model in ``folder`` by its ``config.json``, or None."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("bos_token_id")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def overlap(first: Passage, second: Passage) -> float:
    """How much two texts share, in [0, 1]: the larger share of runs, of tokens or of words.

    A share is the number of distinct runs that stand in both texts over those of the text that has fewer:
    runs of 5 tokens, and of 4 words without case and punctuation, so that a copy with other capitals or
    line breaks is one all the same. Containment rather than Jaccard's index (Broder 1997): a short text
    inside a long one is a copy.
    """
    shares = []
    for runs in (_token_runs, _word_runs):
        left, right = runs(first), runs(second)
        if left and right:
            shares.append(len(left & right) / min(len(left), len(right)))
    return max(shares, default=0.0)


def refuse_overlap(passages: Sequence[Passage], limit: float) -> None:
    """Return if no two texts share more than ``limit`` (:func:`overlap`).

    Raises:
        DataError: two do; the sentence names the pair that shares most.
    """
    shared = [(overlap(one, two), one, two) for one, two in combinations(passages, 2)]
    most, one, two = max(shared, key=lambda item: item[0], default=(0.0, None, None))
    if most > limit and one is not None and two is not None:
        raise DataError(
            f"the texts {one.name} ({one.origin}) and {two.name} ({two.origin}) share {most:.0%} of the "
            f"shorter one's runs of words or tokens, more than the {limit:.0%} allowed: choose other texts, "
            "so that held-out text is not calibration text"
        )


def _corpus(settings: TextSettings) -> TextCorpus:
    if settings.corpus == "sotu":
        if settings.heldout_corpus is not None:
            raise ConfigError("heldout_corpus does not go with 'sotu': set first_heldout_year instead")
        return sotu_corpus(settings.first_heldout_year)
    heldout = None if settings.heldout_corpus is None else Path(settings.heldout_corpus).expanduser()
    return text_corpus(Path(settings.corpus).expanduser(), heldout, settings.heldout_fraction)


def _of_file(path: Path, split: Split, index: int, tokens: int, codec: TextCodec) -> Passage:
    ids = _window(read_text(path.expanduser()), tokens, codec)
    if ids is None:
        raise DataError(
            f"{path} is shorter than the window of {tokens} tokens, and texts are never padded: give a "
            "longer text or set reuse.texts.tokens"
        )
    return Passage(f"{split}-{index}", split, str(path), ids, codec.decode(ids))


def _window(text: str, tokens: int, codec: TextCodec) -> tuple[int, ...] | None:
    """The first ``tokens`` tokens of a text, its prefix included, or None if it has fewer."""
    # Longer than any window: a whole book is not tokenised for its first line.
    ids = (*codec.prefix, *codec.encode(text[: 64 * tokens]))
    return ids[:tokens] if len(ids) >= tokens else None


def _drawn(
    text: str, split: Split, settings: TextSettings, codec: TextCodec, seed: int, across: bool
) -> Iterator[Passage]:
    """Windows of one part in an order drawn from the seed; ``across`` paragraphs, or each within one."""
    pieces = list((_runs if across else _pieces)(text, settings.tokens))
    how = ", across paragraphs" if across else ""
    for place in generator(seed, f"reuse texts {split}{how}").permutation(len(pieces)):
        start, piece = pieces[place]
        ids = _window(piece, settings.tokens, codec)
        if ids is not None:
            origin = f"{settings.corpus}, {split} part{how}, from character {start}"
            yield Passage(split, split, origin, ids, codec.decode(ids))


def _apart(drawn: Iterator[Passage], beside: Sequence[Passage], limit: float, count: int) -> list[Passage]:
    """The first ``count`` of the passages that share at most ``limit`` with those before and ``beside``."""
    found: list[Passage] = []
    for passage in drawn:
        if all(overlap(passage, other) <= limit for other in (*beside, *found)):
            found.append(replace(passage, name=f"{passage.split}-{len(found)}"))
        if len(found) == count:
            break
    return found


def _pieces(text: str, tokens: int) -> Iterator[tuple[int, str]]:
    """(place, piece) of every paragraph, long ones cut between words into pieces a window fits in."""
    size, start = _PIECE * tokens, 0
    for paragraph in text.split(SEPARATOR):
        at = 0
        while at < len(paragraph):
            end = at + size
            if end < len(paragraph):
                blank = paragraph.find(" ", end)
                end = len(paragraph) if blank < 0 else blank + 1
            yield start + at, paragraph[at:end]
            at = end
        start += len(paragraph) + len(SEPARATOR)


def _runs(text: str, tokens: int) -> Iterator[tuple[int, str]]:
    """(place, run) of paragraphs that follow each other, as few as a window fits in; none stands in two."""
    size, start, at = _PIECE * tokens, 0, 0
    for paragraph in text.split(SEPARATOR):
        at += len(paragraph)
        if at - start >= size:
            yield start, text[start:at]
            start = at + len(SEPARATOR)
        at += len(SEPARATOR)


def _prefix(tokenizer: Any, config: Path, bos_token_id: int | None) -> tuple[tuple[int, ...], str]:
    """What stands before a text by the tokenizer's own rule, and that rule in words."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    if at:
        return tuple(full[:at]), "what the tokenizer puts before a text"
    try:
        asks = json.loads(config.read_bytes()).get("add_bos_token") is True
    except (OSError, ValueError, AttributeError):
        asks = False
    if asks and bos_token_id is not None:
        return (bos_token_id,), "the model's BOS token, which tokenizer_config.json asks for"
    return (), "none: the tokenizer puts nothing before a text"


def _token_runs(passage: Passage) -> set[tuple[int, ...]]:
    ids = passage.ids
    return {ids[at : at + TOKEN_RUN] for at in range(len(ids) - TOKEN_RUN + 1)}


def _word_runs(passage: Passage) -> set[tuple[str, ...]]:
    words = tuple(re.findall(r"\w+", passage.text.casefold()))
    return {words[at : at + WORD_RUN] for at in range(len(words) - WORD_RUN + 1)}
