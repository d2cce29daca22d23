"""The boundary: who calls, the whole body, one reply with its length, what is counted, and what was delivered.

An endpoint is found in the table of hot paths or by Starlette, and does the same.
"""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shared.config import Settings
from shared.core.callers import ApiKey, Keyring
from shared.core.errors import BadRequest, Overloaded, ReplyBroken
from shared.counters import Counters
from shared.http.peer import Connection
from tests.exchanges import Answered, FakeCarrier, request_bytes, service_of
from tests.waiting import until
from workers.api import replies
from workers.api.endpoint import Endpoint, FixedReply, OpenAiEndpoint
from workers.api.replies import Reply, Streamed
from workers.parts import Live

if TYPE_CHECKING:
    from shared.http.request import Request

PATH = "/x"
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KEYS = Keyring([ApiKey("a", sha256(b"tml-a").hexdigest())])


class Handler:
    """Keeps the request, answers as the test says."""

    def __init__(self, outcome: Reply | Streamed | Exception | None = None) -> None:
        self.outcome = outcome or replies.ok(b'{"fine":true}')
        self.seen: list[Request] = []

    async def __call__(self, request: Request) -> Reply | Streamed:
        self.seen.append(request)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture(params=["hot", "routed"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Bench:
    """One endpoint behind the edge, found in the table of hot paths or by Starlette."""

    def __init__(self, handler: Handler, way: str, keyring: Keyring | None = None, **more: Any) -> None:
        kind = more.pop("kind", Endpoint)
        self.counters = Counters()
        live = Live(Settings(), keyring or Keyring(None))
        endpoint = kind(handler, live, self.counters, 100, **more)
        starlette = Starlette(routes=[Route("/x", endpoint, methods=["POST"]), Route("/of/{name}", endpoint)])
        hot = {(b"POST", PATH.encode()): endpoint} if way == "hot" else {}
        self.service = service_of(starlette, hot)

    def carrier(self, peer: Connection | None = None) -> FakeCarrier:
        return FakeCarrier(self.service, peer)

    async def ask(self, body: bytes = b"{}", peer: Connection | None = None, **headers: str) -> Answered:
        carrier = self.carrier(peer)
        listed = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        carrier.feed(request_bytes("POST", PATH, listed, body))
        return await carrier.answered()


def head_of(length: int | None, *headers: bytes) -> bytes:
    framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    return b"\r\n".join([b"POST /x HTTP/1.1", b"host: h", framing, *headers, b"", b""])


async def test_a_reply_has_its_length_and_type(way: str) -> None:
    answered = await Bench(Handler(), way).ask()
    assert answered.status == 200
    assert answered.headers == {"content-type": "application/json", "content-length": "13"}
    assert answered.body == b'{"fine":true}'


async def test_the_handler_gets_the_whole_body_the_caller_and_what_is_accepted(way: str) -> None:
    handler = Handler()
    bench = Bench(handler, way, KEYS)
    carrier = bench.carrier()
    carrier.feed(head_of(3, b"x-api-key: tml-a", b"accept: application/x-protobuf", b"traceparent: " + TRACE) + b"ab")
    assert not handler.seen
    carrier.feed(b"c")
    await carrier.answered()
    (request,) = handler.seen
    assert (request.body, request.caller.name, request.accept) == (b"abc", "a", b"application/x-protobuf")
    assert request.connection is carrier.peer
    assert request.trace == TRACE.decode()
    assert request.scope()["raw_path"] == b"/x"


async def test_a_route_gives_the_parameters_of_its_path() -> None:
    handler = Handler()
    carrier = Bench(handler, "routed").carrier()
    carrier.feed(b"GET /of/value HTTP/1.1\r\nhost: h\r\n\r\n")
    await carrier.answered()
    assert handler.seen[0].path == {"name": "value"}


async def test_a_stranger_is_turned_away_before_its_body_is_read(way: str) -> None:
    handler = Handler()
    carrier = Bench(handler, way, KEYS).carrier()
    carrier.feed(head_of(3, b"x-api-key: tml-wrong"))
    answered = await carrier.answered()
    assert answered.status == 401
    assert not handler.seen
    assert b"tml-wrong" not in answered.body


@pytest.mark.parametrize(
    "headers",
    [
        (b"x-api-key: tml-a", b"x-api-key: tml-a"),
        (b"x-api-key: tml-b", b"X-API-Key: tml-a"),
        (b"x-api-key: tml-a", b"authorization: Bearer tml-a", b"authorization: Bearer tml-b"),
    ],
)
@pytest.mark.parametrize("kind", [Endpoint, OpenAiEndpoint])
async def test_who_may_be_two_is_nobody(way: str, kind: type[Endpoint], headers: tuple[bytes, ...]) -> None:
    carrier = Bench(Handler(), way, KEYS, kind=kind).carrier()
    carrier.feed(head_of(0, *headers))
    assert (await carrier.answered()).status == 401


async def test_a_key_that_is_not_ascii_is_only_a_wrong_key(way: str) -> None:
    assert (await Bench(Handler(), way, KEYS).ask(x_api_key="k\xe9\xff")).status == 401


async def test_a_public_endpoint_asks_for_no_key(way: str) -> None:
    assert (await Bench(Handler(), way, KEYS, public=True).ask()).status == 200


@pytest.mark.parametrize("chunks", [(101,), (60, 60)])
async def test_a_body_above_the_limit_is_refused_with_words(way: str, chunks: tuple[int, ...]) -> None:
    handler = Handler()
    carrier = Bench(handler, way).carrier()
    carrier.feed(head_of(None))
    await asyncio.sleep(0)
    for size in chunks:
        carrier.feed(b"%x\r\n%b\r\n" % (size, b"x" * size))
    answered = await carrier.answered()
    assert answered.status == 413
    assert answered.headers["connection"] == "close"
    assert "--max-body-bytes" in json.loads(answered.body)["detail"]
    assert not handler.seen


@pytest.mark.parametrize(("header", "status"), [(b"content-encoding: gzip", 415), (b"content-encoding: identity", 200)])
async def test_a_compressed_body_is_refused(way: str, header: bytes, status: int) -> None:
    carrier = Bench(Handler(), way).carrier()
    carrier.feed(head_of(2, header) + b"{}")
    assert (await carrier.answered()).status == status


async def test_a_declared_length_above_the_limit_is_refused_unread(way: str) -> None:
    carrier = Bench(Handler(), way).carrier()
    carrier.feed(head_of(101))
    assert (await carrier.answered()).status == 413


async def test_an_upload_that_is_cut_off_reaches_no_handler_and_gets_no_reply(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B13: nothing is logged above debug."""
    handler = Handler()
    bench = Bench(handler, way)
    carrier = bench.carrier()
    carrier.feed(head_of(100) + b"ha")
    await until(lambda: bench.counters.http_requests == 1)
    carrier.peer.lose(broken=True)
    assert carrier.exchange is not None
    carrier.exchange.end()
    await until(lambda: bench.counters.http_client_errors == 1)
    assert not handler.seen
    assert not carrier.transport.writes
    assert not [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]


async def test_an_error_raised_on_purpose_is_a_reply_and_no_line_in_the_log(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Handler(BadRequest("seq_id is missing")), way)
    answered = await bench.ask()
    assert (answered.status, answered.json) == (400, {"detail": "seq_id is missing"})
    counters = bench.counters
    assert (counters.http_requests, counters.http_client_errors, counters.http_server_errors) == (1, 1, 0)
    assert not caplog.records


async def test_an_error_nobody_expected_is_logged_and_not_shown(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """A13"""
    bench = Bench(Handler(ZeroDivisionError("inside")), way)
    answered = await bench.ask()
    assert answered.status == 429
    assert bench.counters.rejected_unexpected == 1
    assert b"inside" not in answered.body
    assert caplog.records[0].exc_info is not None


async def test_no_upstream_yet_is_counted_as_such(way: str) -> None:
    for reason, counted in (("upstream", 1), ("in_flight", 0)):
        bench = Bench(Handler(Overloaded(reason, "later")), way)
        await bench.ask()
        assert bench.counters.rejected_upstream == counted


async def test_try_again_is_no_mistake_of_the_clients(way: str) -> None:
    bench = Bench(Handler(Reply(408, b"{}")), way)
    await bench.ask()
    assert bench.counters.http_client_errors == 0


async def test_a_streamed_reply_is_counted_by_its_status(way: str) -> None:
    async def run(send: Any) -> None:
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body"})

    bench = Bench(Handler(Streamed(run)), way)
    assert (await bench.ask()).status == 502
    assert bench.counters.http_server_errors == 1


async def test_a_streamed_reply_that_breaks_off_is_cut(way: str) -> None:
    async def run(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ReplyBroken("in the middle")

    bench = Bench(Handler(Streamed(run)), way)
    carrier = bench.carrier()
    carrier.feed(head_of(0))
    await until(lambda: not carrier.peer.connected)
    assert (bench.counters.http_server_errors, carrier.completed.is_set()) == (1, False)


class Leaving(Connection):
    """A client that goes after the first byte."""

    async def drained(self) -> bool:
        self.lose(broken=True)
        return await super().drained()


async def test_what_was_delivered_is_told_and_what_was_not_is_not(way: str) -> None:
    """A2"""
    delivered: list[str] = []
    bench = Bench(Handler(Reply(200, b"x" * 10, on_delivered=lambda: delivered.append("told"))), way)
    await bench.ask()
    assert delivered == ["told"]
    gone = Connection()
    gone.lose(broken=True)
    await bench.ask(peer=gone)
    await bench.ask(peer=Leaving())
    assert delivered == ["told"]


async def test_a_fixed_reply_is_written_with_the_head() -> None:
    counters = Counters()
    carrier = FakeCarrier(service_of(hot={(b"GET", b"/health"): FixedReply(replies.ok(b"fine"), counters)}))
    carrier.feed(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
    assert carrier.transport.written.endswith(b"fine")
    assert counters.http_requests == 1
