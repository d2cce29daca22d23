"""What each side of a passed request sees: the allow-lists on real sockets, keys, redirects, untouched bodies."""

from __future__ import annotations

import json
import logging
import zlib
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.core.callers import ApiKey
from tests.integration.passthrough.passage import Passage, asking, body_of, head_of, training_passage
from tests.integration.passthrough.raw_upstream import IMPOSSIBLE, Exchange, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY: Final = "tml-client"
KEYS: Final = (ApiKey("client", sha256(KEY.encode()).hexdigest()),)
PATH: Final = "/api/v1/forward_backward"
# A zstd frame as it came off the wire: nobody on the way may look into it.
ZSTD: Final = bytes.fromhex("28b52ffd2403190000616263") + b"\x00\xff\x1b"


@pytest.fixture
async def passage() -> AsyncIterator[Passage]:
    async with training_passage() as passage:
        yield passage


class Kept:
    """Keeps the bodies, and answers what it is told to."""

    def __init__(self, answer: bytes) -> None:
        self.bodies: list[bytes] = []
        self.answer = answer

    async def __call__(self, exchange: Exchange) -> None:
        self.bodies.append(await exchange.whole_body())
        await exchange.say(self.answer)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_method_path_and_query_are_kept_as_they_were_written(passage: Passage, method: str) -> None:
    path = "/api/v1/training_runs/a%3Atrain:0/checkpoints/weights/a%20b?limit=3&x=%2F..&empty="
    assert head_of(await passage.ask(asking(method, path)))[":status"] == "200"
    assert passage.upstream.last.line == f"{method} /prefix{path} HTTP/1.1"


async def test_a_head_has_no_body(passage: Passage) -> None:
    passage.upstream.handler = Kept(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    answered = await passage.ask(asking("HEAD", "/api/v1/training_runs"))
    assert head_of(answered)["content-length"] == "1000"
    assert body_of(answered) == b""


async def test_a_compressed_body_is_not_touched(passage: Passage) -> None:
    kept = passage.upstream.handler = Kept(reply())
    headers = ("Content-Encoding: zstd", "Content-Type: application/x-protobuf", "X-Stainless-Retry-Count: 0")
    assert head_of(await passage.ask(asking("POST", PATH, *headers, body=ZSTD)))[":status"] == "200"
    assert kept.bodies == [ZSTD]
    seen = passage.upstream.last
    assert seen.header("content-encoding") == "zstd"
    assert seen.header("content-type") == "application/x-protobuf"
    assert seen.header("x-stainless-retry-count") == "0"


async def test_a_compressed_reply_is_not_touched(passage: Passage) -> None:
    packed = zlib.compress(b"{}" * 1000)
    passage.upstream.handler = Kept(reply("200 OK", packed, "Content-Encoding: deflate"))
    answered = await passage.ask(asking("GET", "/api/v1/checkpoints", "Accept-Encoding: deflate"))
    assert passage.upstream.last.header("accept-encoding") == "deflate"
    assert head_of(answered)["content-encoding"] == "deflate"
    assert body_of(answered) == packed


async def test_only_listed_headers_travel(passage: Passage) -> None:
    passage.upstream.handler = Kept(reply("200 OK", b"{}", "Set-Cookie: a=1", "Server: s", "X-Should-Retry: false"))
    answered = await passage.ask(
        asking(
            "GET", "/api/v1/sessions", "Cookie: c=1", "X-Forwarded-For: 1.2.3.4", "X-Tinker-Request-Type: X", "TE: x"
        )
    )
    names = {name for name, _ in passage.upstream.last.headers}
    assert names == {"host", "x-tinker-request-type"}
    assert passage.upstream.last.header("host") == passage.upstream.url.removeprefix("http://")
    assert set(head_of(answered)) == {":status", "content-length", "x-should-retry", "connection"}


@pytest.mark.parametrize("what", IMPOSSIBLE)
async def test_a_reply_that_no_client_can_be_sent_is_a_502(
    passage: Passage, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy before us would take a 101 for the beginning of a tunnel, and what follows for anything at all."""
    passage.upstream.handler = Kept(IMPOSSIBLE[what])
    client = await passage.connect()
    await client.send(asking("POST", PATH, body=b"{}").replace(b"Connection: close\r\n", b""))
    await client.send(asking("GET", "/api/v1/healthz"))
    answered = await client.read_to_end()
    assert [word[:3] for word in answered.split(b"HTTP/1.1 ")[1:]] == [b"502", b"200"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    client.close()


async def test_a_redirect_is_the_clients_to_follow(passage: Passage) -> None:
    passage.upstream.handler = Kept(reply("302 Found", b"", "Location: https://storage.example/a?sig=1"))
    answered = head_of(await passage.ask(asking("GET", "/api/v1/training_runs/r/checkpoints/weights/1/archive")))
    assert (answered[":status"], answered["location"]) == ("302", "https://storage.example/a?sig=1")
    passage.upstream.handler = Kept(reply("307 Moved", b"", f"Location: {passage.upstream.url}/prefix/api/v1/x"))
    assert head_of(await passage.ask(asking("GET", "/api/v1/audit")))["location"] == "/api/v1/x"
    assert len(passage.upstream.exchanges) == 2


@pytest.mark.parametrize(
    ("options", "seen"),
    [({}, None), ({"api_key": "tml-operator"}, "tml-operator"), ({"forward_key": True}, KEY)],
)
async def test_which_key_the_trainer_gets_is_the_operators_choice(options: dict[str, Any], seen: str | None) -> None:
    async with training_passage(api_keys=KEYS, **options) as passage:
        await passage.ask(asking("GET", "/api/v1/sessions", f"X-API-Key: {KEY}"))
        assert passage.upstream.last.header("x-api-key") == seen


async def test_a_stranger_reaches_nothing() -> None:
    async with training_passage(api_keys=KEYS) as passage:
        for headers in ((), ("X-API-Key: tml-wrong",)):
            assert head_of(await passage.ask(asking("POST", PATH, *headers, body=b"x")))[":status"] == "401"
        assert passage.upstream.exchanges == []


@pytest.mark.parametrize("path", ["/api/v1/../admin", "/api/v1/%2e%2e/admin", "/api/v1/a%2f..%2f..%2fadmin"])
async def test_no_path_leads_out_of_the_api(passage: Passage, path: str) -> None:
    answered = await passage.ask(asking("GET", path))
    assert head_of(answered)[":status"] == "400"
    assert passage.upstream.exchanges == []


async def test_what_is_ours_never_gets_there(passage: Passage) -> None:
    for method, path in [("GET", "/api/v1/healthz"), ("POST", "/api/v1/telemetry"), ("GET", "/other"), ("GET", "/api")]:
        await passage.ask(asking(method, path))
    assert passage.upstream.exchanges == []


async def test_an_error_without_a_length_is_given_one(passage: Passage) -> None:
    """The SDK takes a 400 without a Content-Length for a proxy's glitch, and repeats it."""
    chunked = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n" + b'{"detail":"bad"}\r\n0\r\n\r\n'
    passage.upstream.handler = Kept(chunked)
    answered = await passage.ask(asking("POST", PATH, body=b"x"))
    assert head_of(answered)["content-length"] == "16"
    assert json.loads(body_of(answered)) == {"detail": "bad"}


async def test_a_trainer_that_is_away_is_a_503_and_one_that_breaks_a_502(passage: Passage) -> None:
    async def hang_up(exchange: Exchange) -> None:
        await exchange.whole_body()
        exchange.writer.transport.abort()

    passage.upstream.handler = hang_up
    answered = await passage.ask(asking("POST", PATH, body=b"x"))
    assert head_of(answered)[":status"] == "502"
    assert len(passage.upstream.exchanges) == 1
    await passage.upstream.stop()
    answered = await passage.ask(asking("POST", PATH, body=b"x"))
    assert head_of(answered)[":status"] == "503"
    detail = json.loads(body_of(answered))["detail"]
    assert "training server" in detail and "127.0.0.1" not in detail
