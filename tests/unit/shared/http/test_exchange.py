"""An exchange between a parser and an application: the bytes of replies, what comes in order, and whole bodies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from shared.http.exchange import exchange_in
from shared.http.reply import send_response
from tests.exchanges import FakeCarrier, request_bytes, service_of
from tests.waiting import until

if TYPE_CHECKING:
    from shared.http.exchange import Exchange

HEADERS = [(b"content-type", b"application/json")]


async def begun(method: str = "GET", *, keep_alive: bool = True) -> tuple[Exchange, FakeCarrier]:
    """An exchange whose application does nothing until the test is over."""

    async def app(*_: Any) -> None:
        await asyncio.Event().wait()

    carrier = FakeCarrier(service_of(app))
    carrier.feed(request_bytes(method, "/", []))
    assert carrier.exchange is not None
    carrier.exchange.keep_alive = keep_alive
    return carrier.exchange, carrier


def lines(carrier: FakeCarrier) -> list[bytes]:
    return sorted(carrier.transport.written.partition(b"\r\n\r\n")[0].split(b"\r\n"))


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 100_000])
@pytest.mark.parametrize("status", [200, 408, 429])
async def test_a_reply_in_one_write_says_what_one_in_parts_says(
    method: str, keep_alive: bool, body: bytes, status: int
) -> None:
    whole, ours = await begun(method, keep_alive=keep_alive)
    parts, theirs = await begun(method, keep_alive=keep_alive)
    whole.reply(status, b"application/json", memoryview(body))
    await send_response(parts.send, status, HEADERS, body)
    assert lines(ours) == lines(theirs)
    for carrier in (ours, theirs):
        assert carrier.transport.written.partition(b"\r\n\r\n")[2] == (body if method == "POST" else b"")
        assert carrier.completed.is_set()
        for task in carrier.service.tasks:
            task.cancel()
    assert len(ours.transport.writes) == 1


async def test_nothing_is_written_for_a_client_that_has_left() -> None:
    exchange, carrier = await begun()
    carrier.peer.lose(broken=True)
    exchange.reply(200, b"text/plain", b"{}")
    await send_response(exchange.send, 200, [], b"{}")
    assert carrier.transport.writes == []


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    exchange, carrier = await begun()
    carrier.flow.pause_writing()
    sending = asyncio.create_task(send_response(exchange.send, 200, [], b"{}"))
    await asyncio.sleep(0)
    assert carrier.transport.writes == []
    carrier.flow.resume_writing()
    await sending
    assert carrier.completed.is_set()


async def test_one_request_has_one_reply() -> None:
    exchange, _ = await begun()
    exchange.reply(200, b"text/plain", b"{}")
    with pytest.raises(RuntimeError, match="already"):
        exchange.reply(200, b"text/plain", b"{}")
    with pytest.raises(RuntimeError, match="out of order"):
        await send_response(exchange.send, 200, [], b"{}")


@pytest.mark.parametrize("header", [(b"a b", b"1"), (b"a", b"1\r\nb: 2"), (b"a", b"\x00")])
async def test_a_header_that_is_not_https_is_not_written(header: tuple[bytes, bytes]) -> None:
    exchange, carrier = await begun()
    with pytest.raises(RuntimeError):
        await send_response(exchange.send, 200, [header], b"{}")
    assert carrier.transport.writes == []


@pytest.mark.parametrize("length", [b"1", b"3"])
async def test_a_body_that_is_not_as_long_as_was_said_is_a_defect(length: bytes) -> None:
    exchange, _ = await begun()
    await exchange.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    with pytest.raises(RuntimeError, match="longer or shorter"):
        await exchange.send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("status", [204, 304])
async def test_a_reply_without_a_body_may_have_had_a_length(status: int) -> None:
    """Another server's 304 says how long the body would be."""
    exchange, carrier = await begun()
    await exchange.send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"9")]})
    await exchange.send({"type": "http.response.body", "body": b"123456789"})
    assert carrier.completed.is_set()
    assert carrier.transport.written.endswith(b"\r\n\r\n")
    assert (b"content-length: 9" in carrier.transport.written) == (status == 304)


async def test_a_reply_without_a_length_comes_in_chunks() -> None:
    exchange, carrier = await begun()
    await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"ab", b"", b"c"):
        await exchange.send({"type": "http.response.body", "body": part, "more_body": True})
    await exchange.send({"type": "http.response.body"})
    head, _, body = carrier.transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


async def test_an_application_receives_its_body_and_then_that_it_is_answered() -> None:
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        await send_response(send, 200, [], b"")
        received.append(await receive())
        assert exchange_in(scope).complete

    carrier = FakeCarrier(service_of(app))
    carrier.feed(request_bytes("POST", "/", [], b"body"))
    await until(lambda: len(received) == 2)
    assert received == [{"type": "http.request", "body": b"body", "more_body": False}, {"type": "http.disconnect"}]
