"""A request's body: whole, within its limit, in as few copies as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shared.core.errors import BodyIncomplete, BodyTooLarge, UnsupportedEncoding
from shared.http.head import read_body

if TYPE_CHECKING:
    from starlette.types import Message, Receive


class Pieces:
    """A `receive` that hands over `pieces`, then a disconnect."""

    def __init__(self, *pieces: bytes, whole: bool = True) -> None:
        self._messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": not whole or n + 1 < len(pieces)}
            for n, piece in enumerate(pieces)
        ]
        self.received = 0

    async def __call__(self) -> Message:
        self.received += 1
        return self._messages.pop(0) if self._messages else {"type": "http.disconnect"}


async def read(receive: Receive, *headers: tuple[bytes, bytes]) -> bytes:
    scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
    return await read_body(dict(scope["headers"]), receive, 10)


@pytest.mark.parametrize("pieces", [(b"",), (b"0123456789",), (b"01234", b"", b"56789"), (b"0", b"")])
async def test_whole(pieces: tuple[bytes, ...]) -> None:
    assert await read(Pieces(*pieces)) == b"".join(pieces)


async def test_one_piece_is_not_copied() -> None:
    piece = bytes(bytearray(b"0123456789"))
    assert await read(Pieces(piece)) is piece


@pytest.mark.parametrize("length", [b"11", b"9223372036854775808", b"9" * 5_000])
async def test_a_length_above_the_limit_is_refused_unread(length: bytes) -> None:
    receive = Pieces(b"x")
    with pytest.raises(BodyTooLarge):
        await read(receive, (b"content-length", length))
    assert receive.received == 0


@pytest.mark.parametrize("pieces", [(b"0" * 11,), (b"0" * 6, b"1" * 5), (b"0" * 6, b"1" * 5, b"2" * 1_000)])
async def test_more_than_the_limit(pieces: tuple[bytes, ...]) -> None:
    receive = Pieces(*pieces)
    with pytest.raises(BodyTooLarge):
        await read(receive)
    assert receive.received <= 2, "no more is read than it takes to know"


@pytest.mark.parametrize("pieces", [(), (b"0",), (b"0", b"1")])
async def test_cut_off(pieces: tuple[bytes, ...]) -> None:
    """B13"""
    with pytest.raises(BodyIncomplete):
        await read(Pieces(*pieces, whole=False))


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"identity, gzip", b"br", b"\xff"])
async def test_compressed(coding: bytes) -> None:
    receive = Pieces(b"x")
    with pytest.raises(UnsupportedEncoding):
        await read(receive, (b"content-encoding", coding))
    assert receive.received == 0


@pytest.mark.parametrize("coding", [b"identity", b" Identity ", b""])
async def test_not_compressed(coding: bytes) -> None:
    assert await read(Pieces(b"x"), (b"content-encoding", coding)) == b"x"
