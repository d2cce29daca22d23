"""Arrays in pieces, and how much is decoded at all."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.errors import BadRequest
from shared.wire.strict_json import MAX_REST_BYTES, MAX_VALUES, Boundary, array_pieces, at_once, decode

_any = msgspec.json.Decoder()


class Empty(msgspec.Struct):
    pass


OBJECTS = Boundary(b"{", b"}")
TEXTS = Boundary(b'"', b'"')


def read(body: bytes, boundary: Boundary, piece_bytes: int) -> list[Any]:
    items: list[Any] = []
    end = 0
    for piece, behind in array_pieces(body, 1, boundary, piece_bytes):
        items += json.loads(b"[%b]" % piece)
        end = behind
    assert body[end:] == b"]]"
    return items


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers() | st.lists(st.integers())), min_size=1),
    st.integers(1, 60),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", ":")]),
)
def test_objects_in_pieces_of_any_size(items: list[Any], piece_bytes: int, separators: tuple[str, str]) -> None:
    assert read(json.dumps(items, separators=separators).encode() + b"]", OBJECTS, piece_bytes) == items


@given(st.lists(st.from_regex(r"\A[a-z:.0-9]{1,9}\Z"), min_size=1), st.integers(1, 60))
def test_texts_in_pieces_of_any_size(items: list[str], piece_bytes: int) -> None:
    assert read(json.dumps(items).encode() + b"]", TEXTS, piece_bytes) == items


@pytest.mark.parametrize("body", [b"[", b"[{}", b"[{}" + b" " * 1000 + b"]", b"[" + b"}" * 1000])
def test_an_array_without_its_end_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        list(array_pieces(body, 1, OBJECTS, 16))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'"%b"' % (b"x" * MAX_REST_BYTES), "bytes besides"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "values besides"),
        (b'{"a":"\xff"}', "utf-8"),
        (b'{"a":1,"a":2}', "the key 'a' is given twice"),
        (b'{"a":1,"\\u0061":2}', "the key 'a' is given twice"),
        (b'[{"b":{}},{"a":":","a":2}]', "the key 'a' is given twice"),
        (b"1" * 5000, "not a valid thing"),
        (b'{"a":[1e400]}', "out of range"),
        (b"", "not a valid thing"),
    ],
)
def test_refused(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(_any, body, "thing")
    assert words in str(caught.value)


def test_a_number_that_nobody_reads_is_checked_too() -> None:
    with pytest.raises(BadRequest, match="a number is out of range"):
        decode(msgspec.json.Decoder(Empty), b'{"a":-1e400}', "thing")


def test_as_much_as_is_allowed() -> None:
    values = [1] * (MAX_VALUES - 1)
    assert decode(_any, json.dumps(values).encode(), "thing") == values
    assert decode(_any, b' \n {"a":[{"a":1},{"a":2}]} ', "thing") == {"a": [{"a": 1}, {"a": 2}]}


def test_steps_at_once() -> None:
    def steps() -> Any:
        yield
        yield
        return 7

    assert at_once(steps()) == 7
