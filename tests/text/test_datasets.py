from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from twinscope.lab.config import parse_config
from twinscope.lab.errors import ConfigError, DataError
from twinscope.text.datasets import DataSettings, open_dataset

TRAIN, HELDOUT = "aba cab\n", "aé€ b"


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "heldout.txt").write_text(HELDOUT)
    return {"corpus": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "heldout.txt")}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_text_is_tokenised_measured_and_hashed(texts):
    data = open_dataset(DataSettings(**texts))
    assert data.decode is not None
    assert data.decode(data.train.tolist()) == TRAIN
    assert data.heldout.tolist() == [3, 0, 0, 2, 4]
    assert data.vocab == 6
    assert data.bytes_per_token == 8 / 5
    assert "2 of 5 held-out characters unknown" in data.description
    assert (data.hashes["train"], data.hashes["heldout"]) == (digest(TRAIN), digest(HELDOUT))
    assert set(data.hashes) == {"train", "heldout", "tokenizer"}


def test_the_heldout_text_does_not_shape_the_vocabulary(texts, tmp_path):
    before = open_dataset(DataSettings(**texts))
    (tmp_path / "heldout.txt").write_text("zzz")
    after = open_dataset(DataSettings(**texts))
    assert after.hashes["tokenizer"] == before.hashes["tokenizer"]
    assert after.hashes["heldout"] != before.hashes["heldout"]
    assert after.heldout.tolist() == [0, 0, 0]


def test_byte_pairs_measure_bytes_per_token(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    data = open_dataset(DataSettings(**texts, tokenizer="bpe:256"))
    assert data.vocab == 256
    # No merges: one token a byte.
    assert data.bytes_per_token == 1.0
    assert data.decode is not None
    assert data.decode(data.heldout.tolist()) == HELDOUT


def token_folder(folder, meta=None):
    np.array([0, 1, 2, 1], dtype="<u2").tofile(folder / "train.bin")
    np.array([2, 2, 0], dtype="<u2").tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


def test_token_files_without_symbols_have_no_bytes(tmp_path):
    data = open_dataset(DataSettings(corpus=token_folder(tmp_path), vocab=8))
    assert (data.vocab, data.bytes_per_token, data.decode) == (8, None, None)
    assert set(data.hashes) == {"train", "heldout"}


def test_token_files_with_symbols_are_decoded_and_measured(tmp_path):
    corpus = token_folder(tmp_path, {"vocab_size": 3, "itos": ["a", "b", "€"]})
    data = open_dataset(DataSettings(corpus=corpus, vocab=8))
    assert data.bytes_per_token == pytest.approx(7 / 3)
    assert data.decode is not None
    assert data.decode([2, 0, 1, 7]) == "€ab\ufffd"


def test_keys_that_do_not_fit_the_corpus_are_usage_errors(texts, tmp_path):
    with pytest.raises(ConfigError, match=r"vocab belongs to \.bin"):
        open_dataset(DataSettings(**texts, vocab=9))
    with pytest.raises(ConfigError, match="first_heldout_year instead"):
        open_dataset(DataSettings(heldout=texts["heldout"]))
    with pytest.raises(ConfigError, match="holds ids already"):
        open_dataset(DataSettings(corpus=token_folder(tmp_path), tokenizer="bpe:300"))


@pytest.mark.parametrize(
    ("key", "value"), [("batch", 0), ("heldout_fraction", 1.0), ("vocab", 0), ("corpus", ""), ("corpsu", "x")]
)
def test_values_out_of_range_are_refused_by_key(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_config({key: value}, DataSettings, "test")


def test_a_missing_corpus_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"no text at .*absent"):
        open_dataset(DataSettings(corpus=str(tmp_path / "absent")))
    with pytest.raises(DataError, match=r"no token file at .*absent\.bin"):
        open_dataset(DataSettings(corpus=str(tmp_path / "absent.bin")))


def test_a_tokenizer_that_drops_everything_is_a_sentence(texts, tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"Z": 0}, [])).save(str(path))
    with pytest.raises(DataError, match="into no token at all"):
        open_dataset(DataSettings(**texts, tokenizer=str(path)))
