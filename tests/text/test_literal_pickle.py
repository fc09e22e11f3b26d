from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinscope.text.literal_pickle import read_literal_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
    ),
)


@settings(deadline=None)
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_of_every_protocol_are_read_as_pickle_reads_them(value, protocol):
    assert read_literal_pickle(pickle.dumps(value, protocol)) == value


def test_shared_and_large_containers_keep_their_items():
    shared = ["a", "b"]
    meta = {
        "vocab_size": 3000,
        "itos": {index: chr(index + 200) for index in range(3000)},
        "x": [shared, shared],
    }
    assert read_literal_pickle(pickle.dumps(meta)) == meta


class Bomb:
    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_refused_and_not_made(protocol):
    with pytest.raises(ValueError, match="more than plain values"):
        read_literal_pickle(pickle.dumps({"vocab_size": Bomb()}, protocol))
    assert not Bomb.exploded


@pytest.mark.parametrize("value", [b"bytes", 1.5, {1, 2}, ValueError, pickle.loads, bytearray(b"x"), 1j])
def test_other_kinds_of_value_are_refused(value):
    with pytest.raises(ValueError, match="opcode"):
        read_literal_pickle(pickle.dumps(value))


@pytest.mark.parametrize(
    "data", [b"", b"not a pickle", b"K\x01K\x02.", b"0.", b".", b"(.", b"t.", b"h\x05.", b"K\x01u."]
)
def test_bytes_that_are_no_pickle_are_a_value_error(data):
    with pytest.raises(ValueError):
        read_literal_pickle(data)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(data):
    whole = pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}})
    for attempt in (data, whole[: len(data)] + data, data + whole):
        with contextlib.suppress(ValueError):
            read_literal_pickle(attempt)
