"""What a client has sent before its connection is taken: read at once, and like everything that comes later."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from shared.http import connection as protocol
from shared.http.head import HttpLimits
from shared.http.reply import send_response
from tests.integration.http.edge_server import request, serving, serving_app, status_of, whole_body
from tests.waiting import until

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.integration.http.edge_server import Client, Served

BODY = b"0123456789" * 20
CLOSING = request("POST", "/echo", BODY, "Connection: close")
# Of the body and of the head.
PIECES = (len(CLOSING) - 1, len(CLOSING) - len(BODY), 30, 1)


def connection_of(served: Served) -> protocol.EdgeConnection:
    (made,) = served.edge.open
    assert isinstance(made, protocol.EdgeConnection)
    return made


async def all_that_is_told(client: Client) -> bytes:
    try:
        return await client.read_to_end()
    finally:
        client.close()


@pytest.mark.parametrize("first", PIECES)
async def test_the_rest_is_read_as_it_comes(first: int) -> None:
    async with serving() as served:
        client = served.connect_saying(CLOSING[:first])
        await until(lambda: bool(served.edge.open), "taken")
        await client.send(CLOSING[first:])
        told = await all_that_is_told(client)
        assert (status_of(told), told.endswith(BODY)) == (200, True)
        assert served.app.bodies == [BODY]


async def test_a_whole_request() -> None:
    async with serving() as served:
        assert (await all_that_is_told(served.connect_saying(CLOSING))).endswith(BODY)
        assert served.app.bodies == [BODY]


async def test_more_than_is_read_early() -> None:
    body = bytes(range(256)) * 1024
    assert len(body) > protocol._EARLY_BYTES
    async with serving() as served:
        client = served.connect_saying(b"")
        await client.send(request("POST", "/echo", body, "Connection: close"))
        assert (await all_that_is_told(client)).endswith(body)


async def test_reading_is_paused_where_what_came_early_was_too_much() -> None:
    wanted, taken = asyncio.Event(), []

    async def reads_later(scope: Scope, receive: Receive, send: Send) -> None:
        await wanted.wait()
        taken.append(await whole_body(receive))
        await send_response(send, 200, [], b"")

    body = bytes(100_000)
    data = request("POST", "/", body, "Connection: close")
    async with serving_app(reads_later, HttpLimits(unread_body_bytes=1000)) as served:
        client = served.connect_saying(data[:10_000])
        await until(lambda: bool(served.edge.open), "taken")
        connection = connection_of(served)
        await until(lambda: not connection.transport.is_reading(), "reading is paused")
        wanted.set()
        await client.send(data[10_000:])
        assert status_of(await all_that_is_told(client)) == 200
        assert taken == [body]


async def test_pipelined_requests_that_came_early_are_answered_in_order() -> None:
    async with serving() as served:
        client = served.connect_saying(request("POST", "/hold", b"1") + request("POST", "/echo", b"2"))
        await until(lambda: served.app.bodies == [b"1"], "held")
        served.app.release.set()
        assert (await client.read_until(b"\r\n\r\n2")).count(b"HTTP/1.1 200") == 2
        client.close()


async def test_a_refusal_of_what_came_early() -> None:
    async with serving() as served:
        told = await all_that_is_told(served.connect_saying(b"\0\1\2\r\n\r\n"))
        assert status_of(told) == 400


async def test_a_defect_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: protocol.EdgeConnection, data: bytes) -> None:
        raise RuntimeError("a defect")

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    monkeypatch.setattr(protocol.EdgeConnection, "data_received", broken)
    async with serving() as served:
        assert await all_that_is_told(served.connect_saying(CLOSING)) == b""
        await until(lambda: not served.edge.open, "closed")
    assert [str(context["exception"]) for context in reported] == ["a defect"]


@pytest.mark.parametrize("data", [b"", b"POST /echo HTT", CLOSING], ids=["nothing", "half a head", "a request"])
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_who_has_left_before_is_forgotten(data: bytes, how: str) -> None:
    async with serving() as served:
        client = served.connect_saying(data)
        if how == "reset":
            client.reset()
        else:
            client.close()
        told = await all_that_is_told(served.connect_saying(CLOSING))
        assert status_of(told) == 200
        await until(lambda: not served.edge.open, "all are forgotten")


async def test_who_ends_its_side_is_told_apart_from_who_says_nothing_yet() -> None:
    async with serving() as served:
        silent, ended = served.connect_saying(b""), served.connect_saying(b"")
        ended.sock.shutdown(socket.SHUT_WR)
        assert await all_that_is_told(ended) == b""
        await until(lambda: len(served.edge.open) == 1, "the other one stays")
        await silent.send(CLOSING)
        assert status_of(await all_that_is_told(silent)) == 200


async def test_a_crowd_that_was_there_before_is_answered_whole() -> None:
    async with serving() as served:
        requests = [request("POST", "/echo", b"%d" % number, "Connection: close") for number in range(200)]
        clients = [served.connect_saying(data) for data in requests]
        told = await asyncio.gather(*map(all_that_is_told, clients))
        assert [reply.rpartition(b"\r\n\r\n")[2] for reply in told] == [b"%d" % number for number in range(200)]
