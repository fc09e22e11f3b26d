from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest

from twinscope.lab.errors import ConfigError, DataError
from twinscope.text import token_files
from twinscope.text.token_files import is_token_corpus, token_corpus

LETTERS = "abcdé"


def write(path, ids):
    np.asarray(ids, dtype="<u2").tofile(path)
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.bin", [0, 1, 2, 3, 4, 3, 2, 1])
    write(tmp_path / "val.bin", [4, 0, 2])
    return tmp_path


def test_a_folder_is_memory_mapped_and_hashed(folder):
    corpus = token_corpus(folder, None, 0.1, None)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.tolist() == [0, 1, 2, 3, 4, 3, 2, 1]
    assert corpus.heldout.tolist() == [4, 0, 2]
    assert (corpus.vocab, corpus.symbols) == (5, None)
    assert corpus.hashes == {
        "train": hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest(),
        "heldout": hashlib.sha256((folder / "val.bin").read_bytes()).hexdigest(),
    }


def test_the_vocabulary_spans_both_parts(folder):
    write(folder / "val.bin", [4, 9])
    assert token_corpus(folder, None, 0.1, None).vocab == 10


@pytest.mark.parametrize("form", ["pickle", "json list", "json dict"])
def test_a_meta_file_gives_the_vocabulary_and_its_symbols(folder, form):
    itos = dict(enumerate(LETTERS))
    if form == "pickle":
        meta = {"vocab_size": 5, "itos": itos, "stoi": {letter: index for index, letter in itos.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    else:
        meta = {"vocab_size": 5, "itos": list(LETTERS) if form == "json list" else itos}
        (folder / "meta.json").write_text(json.dumps(meta))
    corpus = token_corpus(folder, None, 0.1, None)
    assert (corpus.vocab, corpus.symbols) == (5, tuple(LETTERS))
    path = next(folder.glob("meta.*"))
    assert corpus.hashes["tokenizer"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_meta_file_without_symbols_gives_the_size(folder):
    (folder / "meta.json").write_text('{"vocab_size": 7}')
    corpus = token_corpus(folder, None, 0.1, None)
    assert (corpus.vocab, corpus.symbols) == (7, None)


def test_a_pickle_that_would_run_code_is_refused_and_does_not(folder, tmp_path):
    target = tmp_path / "touched"
    # What a hostile pickle looks like: the global os.system and its argument, then REDUCE.
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(target).encode() + b"'\ntR.")
    with pytest.raises(DataError, match=r"meta\.pkl is no vocabulary: it holds more than plain values"):
        token_corpus(folder, None, 0.1, None)
    assert not target.exists()


@pytest.mark.parametrize(
    "meta",
    [
        "[]",
        "{}",
        "not json",
        '{"vocab_size": 0}',
        '{"vocab_size": true}',
        '{"vocab_size": "5"}',
        '{"vocab_size": 5, "itos": ["a"]}',
        '{"vocab_size": 2, "itos": ["a", 1]}',
        '{"vocab_size": 2, "itos": ["a", "b", 1]}',
        '{"vocab_size": 2, "itos": {"0": "a", "2": "b"}}',
        '{"vocab_size": 1, "itos": "a"}',
        "[" * 100_000,
    ],
)
def test_a_malformed_meta_file_is_refused(folder, meta):
    (folder / "meta.json").write_text(meta)
    with pytest.raises(DataError, match=r"meta\.json is no vocabulary"):
        token_corpus(folder, None, 0.1, None)


def test_a_single_file_is_split_by_fraction(tmp_path):
    path = write(tmp_path / "all.bin", np.arange(20))
    corpus = token_corpus(path, None, 0.25, None)
    assert corpus.train.tolist() == list(range(15))
    assert corpus.heldout.tolist() == list(range(15, 20))
    assert corpus.hashes["heldout"] == hashlib.sha256(path.read_bytes()[30:]).hexdigest()


def test_a_heldout_path_replaces_the_rest(folder, tmp_path):
    other = write(tmp_path / "other.bin", [1, 1])
    assert token_corpus(folder, other, 0.1, None).heldout.tolist() == [1, 1]
    corpus = token_corpus(folder / "train.bin", other, 0.1, None)
    assert (len(corpus.train), len(corpus.heldout)) == (8, 2)


@pytest.mark.parametrize("slab", [1 << 24, 3])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(folder, monkeypatch, slab):
    monkeypatch.setattr(token_files, "_SLAB", slab)
    with pytest.raises(DataError, match=r"train\.bin: token 4 has id 4, outside the vocabulary of 4"):
        token_corpus(folder, None, 0.1, 4)
    write(folder / "val.bin", [0, 0, 0, 0, 8])
    with pytest.raises(DataError, match=r"val\.bin: token 4 has id 8, outside the vocabulary of 5"):
        token_corpus(folder, None, 0.1, 5)
    path = write(folder / "all.bin", [0] * 9 + [7])
    with pytest.raises(DataError, match=r"all\.bin: token 9 has id 7, outside the vocabulary of 7"):
        token_corpus(path, None, 0.5, 7)


def test_a_padded_vocabulary_does_not_excuse_an_id_without_symbol(folder):
    (folder / "meta.json").write_text('{"vocab_size": 5}')
    assert token_corpus(folder, None, 0.1, 64).vocab == 64
    write(folder / "val.bin", [0, 5])
    with pytest.raises(DataError, match=r"val\.bin: token 1 has id 5, outside the vocabulary of 5"):
        token_corpus(folder, None, 0.1, 64)


def test_a_vocabulary_below_the_meta_file_is_a_usage_error(folder):
    (folder / "meta.json").write_text('{"vocab_size": 6}')
    with pytest.raises(ConfigError, match=r"vocab = 5 is smaller than the 6 symbols"):
        token_corpus(folder, None, 0.1, 5)


def test_bad_files_are_sentences(folder):
    (folder / "val.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"val\.bin has 0 bytes"):
        token_corpus(folder, None, 0.1, None)
    (folder / "val.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"val\.bin has 3 bytes"):
        token_corpus(folder, None, 0.1, None)
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match=r"no token file at .*val\.bin"):
        token_corpus(folder, None, 0.1, None)
    np.array([20240520, 1, 4], dtype="<i4").tofile(folder / "train.bin")
    with pytest.raises(DataError, match="begins with a header"):
        token_corpus(folder, None, 0.1, None)
    with pytest.raises(DataError, match="has 1 tokens, too few"):
        token_corpus(write(folder / "one.bin", [3]), None, 0.1, None)


def test_what_counts_as_token_files(folder, tmp_path):
    assert is_token_corpus(folder)
    assert is_token_corpus(tmp_path / "missing.bin")
    assert not is_token_corpus(tmp_path / "text.txt")
