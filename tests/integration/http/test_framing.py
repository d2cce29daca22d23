"""What a request may look like on the wire, and that a mistake is the client's: answered, closed, and not logged."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Final

import pytest

from shared.http.head import HttpLimits
from tests.integration.http.edge_server import refusal_in, request, serving, status_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD: Final = b"POST /echo HTTP/1.1\r\nHost: h\r\n"
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SEED: Final = 20_817

REFUSED: Final = {
    "length and coding": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "the same length twice": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "list of lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "signed length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "endless length": HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "coding before chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare LF everywhere": b"GET /echo HTTP/1.1\nHost: h\n\n",
    "bare LF after a header": b"GET /echo HTTP/1.1\r\nHost: h\nA: b\r\n\r\n",
    "bare LF at the end": b"GET /echo HTTP/1.1\r\nHost: h\r\n\n",
    "bare CR": b"GET /echo HTTP/1.1\r\nHost: h\rA: b\r\n\r\n",
    "folded header": b"GET /echo HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n",
    "space before the colon": b"GET /echo HTTP/1.1\r\nHost : h\r\n\r\n",
    "space before the first header": b"GET /echo HTTP/1.1\r\n Host: h\r\n\r\n",
    "header without a name": b"GET /echo HTTP/1.1\r\n: v\r\n\r\n",
    "header without a colon": b"GET /echo HTTP/1.1\r\nHost\r\n\r\n",
    "NUL in a header": b"GET /echo HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    "NUL in the URL": b"GET /echo\x00 HTTP/1.1\r\nHost: h\r\n\r\n",
    "raw bytes in the URL": b"GET /\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n",
    "lower-case method": b"get /echo HTTP/1.1\r\nHost: h\r\n\r\n",
    "absolute URL without a path": b"GET http://h HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT": b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0": b"GET /echo HTTP/2.0\r\nHost: h\r\n\r\n",
    "HTTP/0.9": b"GET /echo\r\n\r\n",
    "upgrade with a body": HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    "chunk size not hexadecimal": CHUNKED + b"xyz\r\n",
    "chunk size with prefix": CHUNKED + b"0x3\r\nabc\r\n",
    "negative chunk size": CHUNKED + b"-1\r\n",
    "endless chunk size": CHUNKED + b"f" * 20 + b"\r\n",
    "chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n",
    "chunk size ended by LF": CHUNKED + b"3\nabc\n0\n\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
}
TAKEN: Final = {
    "absolute URL": (b"GET http://elsewhere/echo?x=1 HTTP/1.1\r\nHost: h\r\n", b""),
    "empty lines before": (b"\r\n\r\nGET /echo HTTP/1.1\r\nHost: h\r\n", b""),
    "high bytes in a header": (b"GET /echo HTTP/1.1\r\nHost: h\r\nA: \xff\xfe\r\n", b""),
    "upgrade without a body": (b"GET /echo HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: h2c\r\n", b""),
    "coding in capitals": (HEAD + b"Transfer-Encoding: CHUNKED\r\n", b"3;ext=1\r\nabc\r\n0\r\n\r\n"),
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """B13: a client's mistake is nobody's log line."""
    caplog.set_level(logging.DEBUG)
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20], ids=["byte by byte", "whole"])
async def test_refused(what: str, piece_bytes: int) -> None:
    """A13"""
    data = REFUSED[what]
    async with serving() as served:
        client = await served.connect()
        for start in range(0, len(data), piece_bytes):
            await client.send(data[start : start + piece_bytes])
        status, _ = refusal_in(await client.read_to_end())
        assert 400 <= status < 500
        client.close()
        await until(lambda: not served.edge.open, "the connection is closed")
        assert not served.app.bodies


@pytest.mark.parametrize("what", TAKEN)
async def test_taken(what: str) -> None:
    head, body = TAKEN[what]
    async with serving() as served:
        client = await served.connect()
        await client.send(head + b"\r\n" + body)
        # A second request shows that the first has ended where it should.
        await client.send(request("POST", "/echo", b"next"))
        replies = await client.read_until(b"next")
        assert replies.count(b"HTTP/1.1 200") == 2
        assert [scope["path"] for scope in served.app.scopes] == ["/echo", "/echo"]
        client.close()


async def test_trailers_do_not_become_headers() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(CHUNKED + b"3\r\nabc\r\n0\r\nX-Api-Key: stolen\r\n\r\n")
        assert status_of(await client.read_until(b"abc")) == 200
        assert b"x-api-key" not in dict(served.app.scopes[0]["headers"])
        client.close()


async def test_random_bytes() -> None:
    """A13: refused or simply closed, whatever is sent, with and without a plausible beginning."""
    noise = random.Random(SEED)
    async with serving() as served:
        for turn in range(200):
            beginning = (b"", b"GET ", b"POST /echo HTTP/1.1\r\n", CHUNKED)[turn % 4]
            client = await served.connect()
            await client.send(beginning + noise.randbytes(noise.randrange(1, 400)) + b"\r\n\r\n")
            client.sock.shutdown(1)
            reply = await client.read_to_end()
            assert not reply or 400 <= refusal_in(reply)[0] < 500, f"seed {SEED}, turn {turn}"
            client.close()


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_refusal_waits_for_the_replies_before_it(what: str, waiting: int) -> None:
    """Whatever is refused behind a request that is being answered, and behind one that waits: their replies first."""
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold") * (1 + waiting) + REFUSED[what])
        await until(lambda: served.app.bodies, "the first is being answered")
        served.app.release.set()
        *answers, rest = (await client.read_to_end()).split(b"held")
        assert [status_of(answer) for answer in answers] == [200] * (1 + waiting)
        assert 400 <= refusal_in(rest)[0] < 500
        assert served.app.lost == 0
        client.close()


async def test_a_broken_body_behind_a_reply_never_reaches_the_application() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold") + CHUNKED + b"zz\r\n")
        await until(lambda: served.app.bodies, "the first is being answered")
        served.app.release.set()
        answer, _, rest = (await client.read_to_end()).partition(b"held")
        assert (status_of(answer), refusal_in(rest)[0]) == (200, 400)
        assert len(served.app.scopes) == 1
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"".join(request("POST", "/echo", b"<%03d>" % n) for n in range(100)))
        replies = await client.read_until(b"<099>")
        places = [replies.index(b"<%03d>" % n) for n in range(100)]
        assert places == sorted(places)
        client.close()


async def test_too_many_pipelined_requests() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold") * 5_000)
        await until(lambda: served.app.bodies, "the first is being answered")
        served.app.release.set()
        replies = await client.read_to_end()
        assert replies.count(b"HTTP/1.1 200") == 1 + HttpLimits().pipelined
        assert refusal_in(replies[replies.rindex(b"HTTP/1.1") :])[0] == 400
        client.close()
