from __future__ import annotations

import hashlib
import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from twinscope.lab.errors import ConfigError, DataError
from twinscope.text import tokenizers as subject
from twinscope.text.tokenizers import bpe_tokenizer, char_tokenizer, file_tokenizer, open_tokenizer

PROSE = "The cat sat on the mat.\n\n  The rat, it's said, ate the oat — naïve!\n\tAnd so on…\r\n" * 40

# The cache folder is the same for every example on purpose.
cached_examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@settings(deadline=None)
@given(st.text(), st.text())
def test_characters_round_trip_and_strangers_become_unknown(train, other):
    tokenizer = char_tokenizer(train)
    assert tokenizer.vocab == len(set(train)) + 1
    assert tokenizer.decode(tokenizer.encode(train).tolist()) == train
    alphabet = sorted(set(train))
    expected = [alphabet.index(letter) + 1 if letter in alphabet else 0 for letter in other]
    assert tokenizer.encode(other).tolist() == expected
    assert tokenizer.decode(expected) == "".join(x if x in alphabet else "\ufffd" for x in other)


def test_character_ids_are_in_code_point_order_after_the_unknown_one():
    tokenizer = char_tokenizer("banané")
    assert tokenizer.encode("abné?").tolist() == [1, 2, 3, 4, 0]
    assert tokenizer.encode("").dtype == np.uint16
    assert tokenizer.unknown == 0
    assert tokenizer.digest != char_tokenizer("banane").digest


def test_a_vocabulary_above_16_bits_is_stored_wider():
    train = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    tokenizer = char_tokenizer(train)
    assert tokenizer.encode(train).dtype == np.int32
    assert tokenizer.encode(train).tolist() == list(range(1, len(train) + 1))


def test_eleven_million_characters_are_encoded_within_a_second():
    text = PROSE * (11_300_000 // len(PROSE))
    tokenizer = char_tokenizer(PROSE)
    started = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - started < 1
    assert len(ids) == len(text)


@cached_examples
@given(st.text(min_size=1), st.text())
def test_byte_pairs_round_trip_on_any_text(train, other):
    tokenizer = bpe_tokenizer(260, train)
    for text in (train, other):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids.tolist()) == text
        assert not len(ids) or int(ids.max()) < tokenizer.vocab <= 260


def test_byte_pairs_learn_the_text_they_are_trained_on():
    tokenizer = open_tokenizer("bpe:280", PROSE)
    assert tokenizer.vocab == 280
    assert len(tokenizer.encode(PROSE)) < 0.6 * len(PROSE.encode())


def test_byte_pairs_are_the_same_when_trained_again(cache):
    first = bpe_tokenizer(300, PROSE)
    (path,) = cache.glob("*.json")
    path.unlink()
    assert bpe_tokenizer(300, PROSE).digest == first.digest
    assert bpe_tokenizer(280, PROSE).digest != first.digest


def test_pieces_leave_the_ids_as_they_are(monkeypatch):
    text = "a b\n\n\nc  \n \n d\n\u00a0\nit's\n\n" * 30 + "end\n\n"
    tokenizer = Tokenizer.from_str(subject._trained_bpe(300, PROSE).decode())
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(subject, "_PIECE", 1)
    pieces = list(subject._pieces(text))
    assert len(pieces) > 60
    assert "".join(pieces) == text
    assert bpe_tokenizer(300, PROSE).encode(text).tolist() == whole


def test_cached_work_is_used_and_damaged_work_is_done_again(cache, monkeypatch):
    tokenizer = bpe_tokenizer(300, PROSE)
    ids = tokenizer.encode(PROSE)
    (ids_path,), (tokenizer_path,) = cache.glob("*.npy"), cache.glob("*.json")
    assert np.load(ids_path, allow_pickle=False).tolist() == ids.tolist()

    original = subject._trained_bpe, subject._encoded
    for name in ("_trained_bpe", "_encoded"):
        monkeypatch.setattr(subject, name, lambda *_: pytest.fail("done again"))
    assert bpe_tokenizer(300, PROSE).encode(PROSE).tolist() == ids.tolist()

    for name, function in zip(("_trained_bpe", "_encoded"), original, strict=True):
        monkeypatch.setattr(subject, name, function)
    for path in (ids_path, tokenizer_path):
        good = path.read_bytes()
        path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        assert bpe_tokenizer(300, PROSE).encode(PROSE).tolist() == ids.tolist()
        assert path.read_bytes() == good


@pytest.mark.parametrize("spec", ["bpe:", "bpe:x", "bpe:255", "bpe:-4096", "bpe:4096.0", "bpe:²"])
def test_a_bad_size_is_a_usage_error(spec):
    with pytest.raises(ConfigError, match="at least 256"):
        open_tokenizer(spec, PROSE)


def saved(tmp_path, tokenizer: Tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def words(unknown: str | None = "[UNK]") -> Tokenizer:
    vocab = {"[UNK]": 0, "[BOS]": 1, "the": 2, "cat": 3, "sat": 9}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))  # pyright: ignore[reportArgumentType]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_a_file_is_used_without_special_tokens_truncation_or_padding(tmp_path):
    tokenizer = words()
    tokenizer.add_special_tokens(["[BOS]"])
    tokenizer.post_processor = processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = saved(tmp_path, tokenizer)
    opened = open_tokenizer(str(path), "ignored")
    assert opened.encode("the cat sat the dog").tolist() == [2, 3, 9, 2, 0]
    assert opened.decode([1, 2, 3]) == "[BOS] the cat"
    # Ids may have gaps; the model needs a row up to the highest.
    assert opened.vocab == 10
    assert opened.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_bad_tokenizer_files_are_sentences(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        file_tokenizer(path)
    good = saved(tmp_path, Tokenizer(models.BPE({"a": 0}, []))).read_text()
    for bad in ("", "{", "{}", good[:-20], good.replace('"BPE"', '"XYZ"')):
        path.write_text(bad)
        with pytest.raises(DataError, match=r"is no tokenizer\.json"):
            file_tokenizer(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        file_tokenizer(path)
    saved(tmp_path, Tokenizer(models.BPE()))
    with pytest.raises(DataError, match="has no vocabulary"):
        file_tokenizer(path)
    document = json.loads(good)
    document["model"]["dropout"] = 0.1
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="drops merges at random"):
        file_tokenizer(path)


def test_a_text_that_cannot_be_encoded_is_a_sentence(tmp_path):
    tokenizer = file_tokenizer(saved(tmp_path, words(unknown="[NONE]")))
    with pytest.raises(DataError, match=r"tokenizer\.json\) cannot encode the text"):
        tokenizer.encode("the dog")
