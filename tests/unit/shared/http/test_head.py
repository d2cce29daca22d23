"""What a head says of its body, and header values as they are handed on."""

from __future__ import annotations

import pytest

from shared.core.errors import BodyTooLarge, UnsupportedEncoding
from shared.http.head import HttpLimits, RequestParser, is_repeated, require_readable

LIMIT_BYTES = 10


class Sink:
    def request_begins(self) -> None: ...

    def body_arrives(self, part: bytes) -> None: ...

    def request_ends(self) -> None: ...


@pytest.mark.parametrize("length", [b"11", b"9223372036854775808", b"9" * 5_000])
def test_a_length_above_the_limit_is_refused_unread(length: bytes) -> None:
    with pytest.raises(BodyTooLarge, match="--max-body-bytes"):
        require_readable({b"content-length": length}, LIMIT_BYTES)


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"identity, gzip", b"br", b"\xff"])
def test_compressed(coding: bytes) -> None:
    with pytest.raises(UnsupportedEncoding):
        require_readable({b"content-encoding": coding}, LIMIT_BYTES)


@pytest.mark.parametrize("coding", [b"identity", b" Identity ", b""])
def test_not_compressed(coding: bytes) -> None:
    require_readable({b"content-encoding": coding, b"content-length": b"10"}, LIMIT_BYTES)


@pytest.mark.parametrize("more", [b"", b"A: " + b"a" * 8_000 + b"\r\n"], ids=["a small head", "a large one"])
def test_trailing_blanks_of_a_value_are_no_part_of_it(more: bytes) -> None:
    parser = RequestParser(Sink(), HttpLimits())
    parser.feed(b"POST / HTTP/1.1\r\nHost: h \t\r\nX-B: a b\t\r\nContent-Length: 2 \r\n" + more + b"\r\n{}")
    assert (parser.fields[b"host"], parser.fields[b"x-b"]) == (b"h", b"a b")
    assert (parser.fields[b"content-length"], parser.has_body) == (b"2", True)


def test_a_header_that_comes_twice_is_repeated() -> None:
    headers = [(b"a", b"1"), (b"b", b"2"), (b"a", b"1")]
    assert is_repeated(headers, b"a") and not is_repeated(headers, b"b") and not is_repeated(headers, b"c")
