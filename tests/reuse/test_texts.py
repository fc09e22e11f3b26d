"""Texts of a plan: chosen by the seed alone, never padded, and never copies of each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_llama import SENTENCE, write_text
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from twinscope.lab.errors import ConfigError, DataError
from twinscope.reuse.texts import (
    Passage,
    TextCodec,
    TextSettings,
    choose_texts,
    open_codec,
    overlap,
    refuse_overlap,
)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path) -> Path:
    return write_text(tmp_path / "text.txt")


def write_tokenizer(folder: Path, bos: bool) -> Path:
    """A tokenizer of whole words that puts <s> before a text if ``bos``."""
    folder.mkdir(exist_ok=True)
    vocab = {word: place for place, word in enumerate(["<unk>", "<s>", *dict.fromkeys(SENTENCE.split())])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def passage(name: str, ids: list[int], text: str) -> Passage:
    return Passage(name, "calibration", f"file {name}", tuple(ids), text)


def words(text: str) -> Passage:
    # Tokens that share nothing, so that words alone count.
    offset = sum(map(ord, text))
    return passage(text[:5], [offset * 100 + place for place in range(20)], text)


def test_overlap_is_the_share_of_runs_of_the_shorter_text():
    first = passage("a", list(range(20)), "")
    # 12 tokens, of which the first 8 follow each other in the longer text: 4 of 8 runs of 5 tokens.
    second = passage("b", [*range(3, 11), 100, 101, 102, 103], "")
    assert overlap(first, second) == overlap(second, first) == pytest.approx(4 / 8)
    assert overlap(first, passage("c", list(range(50, 70)), "")) == 0
    assert overlap(first, first) == 1
    # Words without case and punctuation: 9 words, 6 runs of 4; those before and after the change are shared.
    here = words("We hold these truths to be self evident today")
    there = words("we HOLD these truths,\nto be\nself-evident now")
    assert overlap(here, there) == pytest.approx(5 / 6)


def test_a_text_inside_a_longer_one_is_a_copy():
    long, short = passage("long", list(range(100)), ""), passage("short", list(range(40, 48)), "")
    assert overlap(long, short) == 1
    with pytest.raises(DataError, match=r"long \(file long\) and short \(file short\) share 100%"):
        refuse_overlap([long, passage("other", list(range(200, 220)), ""), short], 0.2)
    refuse_overlap([long], 0.0)


def test_passages_are_a_function_of_the_seed_and_the_parts_stay_apart(tmp_path, text):
    settings = TextSettings(corpus=str(text), calibration=3, heldout=2, tokens=10)
    folder = write_tokenizer(tmp_path / "model", bos=True)
    codec = open_codec(settings, folder)
    chosen = choose_texts(settings, codec, seed=1)
    assert chosen == choose_texts(settings, codec, seed=1) != choose_texts(settings, codec, seed=2)
    assert [item.name for item in chosen] == [
        "calibration-0", "calibration-1", "calibration-2", "heldout-0", "heldout-1",
    ]  # fmt: skip
    whole = text.read_text()
    cut = len(whole) - round(len(whole) * 0.1)
    for item in chosen:
        assert (len(item.ids), item.ids[0]) == (10, 1)
        start = int(item.origin.rpartition(" ")[2])
        part = whole[:cut] if item.split == "calibration" else whole[cut:]
        assert part[start:].startswith(" ".join(item.text.removeprefix("<s> ").split()[:5]))
    refuse_overlap(chosen, settings.max_overlap)


def test_the_policy_of_the_first_token_is_the_tokenizers(tmp_path):
    settings = TextSettings()
    with_bos = open_codec(settings, write_tokenizer(tmp_path / "with", bos=True))
    assert (with_bos.prefix, with_bos.policy) == ((1,), "what the tokenizer puts before a text")
    folder = write_tokenizer(tmp_path / "without", bos=False)
    assert open_codec(settings, folder, bos_token_id=7).prefix == ()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert open_codec(settings, folder, bos_token_id=7).prefix == (7,)
    bare = open_codec(TextSettings(bos="none"), tmp_path / "with")
    assert (bare.prefix, bare.policy) == ((), "none: as configured")


def test_a_repetitive_corpus_has_too_few_passages(tmp_path):
    path = tmp_path / "same.txt"
    path.write_text("\n\n".join([SENTENCE] * 40))
    settings = TextSettings(corpus=str(path), tokens=16, calibration=2, heldout=2)
    codec = open_codec(settings, write_tokenizer(tmp_path / "model", bos=False))
    with pytest.raises(DataError, match="the calibration part gives 1 texts of 16 tokens that share little"):
        choose_texts(settings, codec, 0)


def test_files_are_one_text_each_and_never_padded(tmp_path):
    paths = []
    for index, start in enumerate((0, 8, 16, 24)):
        path = tmp_path / f"{index}.txt"
        path.write_text(" ".join(SENTENCE.split()[start : start + 8]))
        paths.append(str(path))
    codec = open_codec(TextSettings(), write_tokenizer(tmp_path / "model", bos=False))
    settings = TextSettings(calibration_files=paths[:2], heldout_files=paths[2:], tokens=8)
    chosen = choose_texts(settings, codec, 0)
    assert [(item.split, item.origin) for item in chosen] == [
        ("calibration", paths[0]), ("calibration", paths[1]), ("heldout", paths[2]), ("heldout", paths[3]),
    ]  # fmt: skip
    assert chosen[0].text == "the state of union is strong and people"

    longer = settings.model_copy(update={"tokens": 9})
    with pytest.raises(DataError, match=r"0\.txt is shorter than the window of 9 tokens, and texts are"):
        choose_texts(longer, codec, 0)
    copied = settings.model_copy(update={"heldout_files": [paths[2], paths[0]]})
    with pytest.raises(DataError, match=r"calibration-0 .* and heldout-1 .* share 100%"):
        choose_texts(copied, codec, 0)


def test_what_cannot_be_chosen_is_refused(tmp_path, text):
    with pytest.raises(ValidationError, match="heldout_files: give both lists of files"):
        TextSettings(calibration_files=["a", "b"])
    with pytest.raises(ValidationError, match="stand instead of a corpus"):
        TextSettings(corpus="x", calibration_files=["a", "b"], heldout_files=["c", "d"])
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: set reuse\.texts\.tokenizer"):
        open_codec(TextSettings(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        open_codec(TextSettings(), tmp_path)
    codec = TextCodec("", lambda text: [], lambda ids: "", (), "", "")
    with pytest.raises(ConfigError, match="does not go with 'sotu'"):
        choose_texts(TextSettings(heldout_corpus="x"), codec, 0)


def test_characters_of_a_corpus_are_tokens_of_a_model_without_tokenizer(tmp_path, text):
    settings = TextSettings(corpus=str(text), tokenizer="char", tokens=12, calibration=2, heldout=2)
    codec = open_codec(settings, tmp_path)
    chosen = choose_texts(settings, codec, 0)
    assert [len(item.text) for item in chosen] == [12] * 4
    assert codec.policy == "none: characters, 26 symbols, which have no such token"


def paragraphs(words: int, count: int) -> str:
    """So many paragraphs of so many words of five random letters each."""
    letters = np.random.default_rng(words).integers(97, 123, size=(count, words, 5))
    return "\n\n".join(" ".join("".join(map(chr, word)) for word in part) for part in letters.tolist())


def test_paragraphs_shorter_than_the_window_are_read_on_into_the_next(tmp_path):
    corpus, held = tmp_path / "short.txt", tmp_path / "held.txt"
    corpus.write_text(paragraphs(60, 40))
    held.write_text(paragraphs(3, 400))
    settings = TextSettings(
        corpus=str(corpus), heldout_corpus=str(held), tokenizer="char", tokens=64, calibration=3, heldout=3
    )
    codec = TextCodec("", lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)), (), "", "")
    chosen = choose_texts(settings, codec, 0)
    calibration, heldout = chosen[:3], chosen[3:]
    # Where paragraphs are long enough, no text crosses the end of one.
    assert not any("\n" in item.text or "across" in item.origin for item in calibration)
    assert all("\n\n" in item.text and "heldout part, across paragraphs" in item.origin for item in heldout)
    for item in heldout:
        start = int(item.origin.rpartition(" ")[2])
        assert held.read_text()[start:].startswith(item.text)
        assert start == 0 or held.read_text()[:start].endswith("\n\n")
    refuse_overlap(chosen, settings.max_overlap)


def test_texts_stand_apart_from_those_that_were_chosen_before(tmp_path):
    corpus = tmp_path / "text.txt"
    corpus.write_text(paragraphs(60, 60))
    settings = TextSettings(corpus=str(corpus), tokenizer="char", tokens=64, calibration=3, heldout=2)
    codec = TextCodec("", lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)), (), "", "")
    first = choose_texts(settings, codec, 0)
    second = choose_texts(settings, codec, 0, beside=first)
    assert [item.name for item in second] == [item.name for item in first]
    refuse_overlap([*(replace(item, name=f"first-{item.name}") for item in first), *second], 0.2)
    assert not {item.ids for item in first} & {item.ids for item in second}
