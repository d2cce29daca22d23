"""Both ways of looking at a list of token ids agree with each other, and with a JSON parser."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire import json_arrays

# Written so that it shares nothing with the code: one number after the other.
PLAIN = re.compile(rb"(0|[1-9][0-9]{0,8})(,(0|[1-9][0-9]{0,8}))*")
# Long enough for every window that is looked through.
LONG = b",".join([b"7"] * 40)


def expected(inside: bytes) -> int | None:
    return len(json.loads(b"[" + inside + b"]")) if PLAIN.fullmatch(inside) else None


@given(inside=st.text(alphabet="0,19", max_size=24).map(str.encode), ahead=st.booleans(), behind=st.booleans())
def test_what_is_a_list_and_what_is_not(inside: bytes, ahead: bool, behind: bool) -> None:
    told = (LONG + b"," if ahead else b"") + inside + (b"," + LONG if behind else b"")
    assert json_arrays._count_short(told) == expected(told)
    if len(told) >= 16:
        assert json_arrays._count_long(told) == expected(told)


@given(data=st.data())
def test_one_byte_that_is_another(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 10**9 - 1) | st.just(0), min_size=8, max_size=60))
    told = bytearray(b",".join(b"%d" % token for token in ids))
    for at in data.draw(st.lists(st.integers(0, len(told) - 1), max_size=2)):
        told[at] = data.draw(st.sampled_from(b"0,9-./:+"))
    assert json_arrays._count_long(bytes(told)) == expected(bytes(told))


@given(inside=st.binary(max_size=8), at=st.integers(0, len(LONG)))
def test_nothing_but_digits_and_commas(inside: bytes, at: int) -> None:
    told = LONG[:at] + inside + LONG[at:]
    assert json_arrays._count_short(told) == json_arrays._count_long(told) == expected(told)


@pytest.mark.parametrize("size", [1, 2, 1_000, 10_000])
def test_the_number_of_ids(size: int) -> None:
    assert json_arrays.count(b",".join([b"151643"] * size)) == size


@pytest.mark.parametrize("spoiled", [b"01", b"1234567890", b"", b"-1", b"1.0", b"1e3", b" 1", b'"1"', b"[1]", b"null"])
@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize("place", [0, -1])
def test_one_that_is_not_plain_spoils_the_list(spoiled: bytes, size: int, place: int) -> None:
    ids = [b"151643"] * size
    ids[place] = spoiled
    assert json_arrays.count(b",".join(ids)) is None
