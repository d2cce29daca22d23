"""The ASGI boundary: who calls, the whole body, one reply with its length, and whether it was delivered."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from shared.core.callers import ApiKey, Keyring
from shared.core.errors import BadRequest, Overloaded
from shared.counters import Counters
from shared.http.peer import EXTENSION, Connection
from workers.api import replies
from workers.api.endpoint import Endpoint
from workers.api.replies import Reply

if TYPE_CHECKING:
    from typing import Any

    from shared.http.request import Request

KEYS = Keyring([ApiKey("a", sha256(b"tml-a").hexdigest())])


class Exchange:
    """One request through an endpoint. `parts`: the body as it arrives; None stands for a client that goes away."""

    def __init__(self, parts: tuple[bytes | None, ...] = (b"{}",), **headers: str) -> None:
        self.parts = list(parts)
        self.connection = Connection()
        self.sent: list[dict[str, Any]] = []
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()],
            "extensions": {EXTENSION: self.connection},
        }

    async def receive(self) -> dict[str, Any]:
        part = self.parts.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(self.parts)}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(bytes(message.get("body", b"")) for message in self.sent[1:])


class Handler:
    """Keeps the request, answers as it was told to."""

    def __init__(self, outcome: Reply | Exception | None = None) -> None:
        self.outcome = outcome or replies.ok(b'{"fine":true}')
        self.seen: list[Request] = []

    async def __call__(self, request: Request) -> Reply:
        self.seen.append(request)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def exchanged(
    handler: Handler, exchange: Exchange, keyring: Keyring | None = None, counters: Counters | None = None, **more: Any
) -> Exchange:
    chosen = keyring or Keyring(None)
    endpoint = Endpoint(handler, lambda: chosen, counters or Counters(), lambda: 100, **more)
    await endpoint(exchange.scope, exchange.receive, exchange.send)
    return exchange


async def test_a_reply_has_its_length_and_type() -> None:
    done = await exchanged(Handler(), Exchange())
    assert done.status == 200
    assert done.headers == {b"content-type": b"application/json", b"content-length": b"13"}
    assert done.body == b'{"fine":true}'


async def test_the_handler_gets_the_whole_body_the_caller_and_what_is_accepted() -> None:
    handler = Handler()
    exchange = Exchange((b"ab", b"", b"c"), x_api_key="tml-a", accept="application/x-protobuf")
    exchange.scope["path_params"] = {"name": "value"}
    await exchanged(handler, exchange, KEYS)
    (request,) = handler.seen
    assert (request.body, request.caller.name, request.accept) == (b"abc", "a", b"application/x-protobuf")
    assert request.path == {"name": "value"}
    assert request.connection is exchange.connection


async def test_a_stranger_is_turned_away_before_its_body_is_read() -> None:
    handler, exchange = Handler(), Exchange((b"x",), x_api_key="tml-wrong")
    await exchanged(handler, exchange, KEYS)
    assert exchange.status == 401
    assert exchange.parts == [b"x"]
    assert not handler.seen
    assert b"tml-wrong" not in exchange.body


async def test_a_key_that_is_not_ascii_is_only_a_wrong_key() -> None:
    assert (await exchanged(Handler(), Exchange(x_api_key="k\xe9\xff"), KEYS)).status == 401


async def test_a_public_endpoint_asks_for_no_key() -> None:
    assert (await exchanged(Handler(), Exchange(), KEYS, public=True)).status == 200


@pytest.mark.parametrize("parts", [(b"x" * 101,), (b"x" * 60, b"x" * 60)])
async def test_a_body_above_the_limit_is_refused_with_words(parts: tuple[bytes, ...]) -> None:
    handler = Handler()
    done = await exchanged(handler, Exchange(parts))
    assert done.status == 413
    assert "--max-body-bytes" in json.loads(done.body)["detail"]
    assert not handler.seen


async def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    exchange = Exchange((b"x",), content_length="101")
    assert (await exchanged(Handler(), exchange)).status == 413
    assert exchange.parts == [b"x"]


async def test_a_compressed_body_is_refused() -> None:
    assert (await exchanged(Handler(), Exchange(content_encoding="gzip"))).status == 415


async def test_an_upload_that_is_cut_off_reaches_no_handler_and_gets_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    """B13: nothing is logged above debug."""
    handler, counters = Handler(), Counters()
    done = await exchanged(handler, Exchange((b"ha", None)), counters=counters)
    assert not handler.seen
    assert not done.sent
    assert counters.http_client_errors == 1
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


async def test_an_error_raised_on_purpose_is_a_reply_and_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    done = await exchanged(Handler(BadRequest("seq_id is missing")), Exchange(), counters=counters)
    assert done.status == 400
    assert json.loads(done.body) == {"detail": "seq_id is missing"}
    assert (counters.http_requests, counters.http_client_errors, counters.http_server_errors) == (1, 1, 0)
    assert not caplog.records


async def test_an_error_nobody_expected_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A13"""
    counters = Counters()
    done = await exchanged(Handler(ZeroDivisionError("inside")), Exchange(), counters=counters)
    assert done.status == 429
    assert counters.rejected_unexpected == 1
    assert b"inside" not in done.body
    assert caplog.records[0].exc_info is not None


async def test_no_upstream_yet_is_counted_as_such() -> None:
    counters = Counters()
    for reason in ("upstream", "in_flight"):
        await exchanged(Handler(Overloaded(reason, "later")), Exchange(), counters=counters)
    assert counters.rejected_upstream == 1


async def test_try_again_is_no_mistake_of_the_clients() -> None:
    counters = Counters()
    await exchanged(Handler(Reply(408, b"{}")), Exchange(), counters=counters)
    assert counters.http_client_errors == 0


async def test_what_was_delivered_is_told_and_what_was_not_is_not() -> None:
    """A2"""
    delivered: list[str] = []
    reply = Reply(200, b"x" * 10, on_delivered=lambda: delivered.append("told"))
    await exchanged(Handler(reply), Exchange())
    assert delivered == ["told"]
    gone = Exchange()
    gone.connection.lose(broken=True)
    await exchanged(Handler(reply), gone)
    assert delivered == ["told"]


async def test_a_client_that_goes_while_the_reply_is_sent_was_not_delivered_to() -> None:
    """A2"""
    delivered: list[str] = []
    exchange = Exchange()
    send = exchange.send

    async def going(message: Any) -> None:
        await send(message)
        exchange.connection.lose(broken=True)

    exchange.send = going  # type: ignore[method-assign] # a client that goes after the first byte
    await exchanged(Handler(Reply(200, b"x", on_delivered=lambda: delivered.append("told"))), exchange)
    assert delivered == []
