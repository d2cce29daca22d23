"""Large requests one after another on one connection, each arriving in pieces of the same sizes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.http.connection import EdgeConnection
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from tests.exchanges import RecordingTransport, service_of
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PIECE = b"x" * (64 * 1024)
HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (2 * len(PIECE))


def connected(app: ASGIApp) -> tuple[EdgeConnection, RecordingTransport]:
    """A connection of `app`, and what is beneath it."""
    connection, transport = EdgeConnection(service_of(app), Edge(HttpLimits())), RecordingTransport()
    connection.connection_made(transport)
    return connection, transport


async def test_the_second_is_not_taken_for_headers_without_end() -> None:
    """What one request had come to when it was last looked at must not count as the next one's standstill."""
    answered = asyncio.Semaphore(0)

    async def read_whole(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        answered.release()

    connection, transport = connected(read_whole)
    for _ in range(3):
        connection.data_received(HEAD + PIECE)
        connection.data_received(PIECE)
        assert b"431" not in transport.written
        await asyncio.wait_for(answered.acquire(), DEADLINE_S)
    connection.connection_lost(None)
    assert transport.written.count(b"HTTP/1.1 204") == 3


async def test_reading_goes_on_behind_a_whole_body() -> None:
    """Where the last piece is large enough to pause reading, a client that leaves a held request is noticed still."""
    waiting, whole = asyncio.Event(), asyncio.Event()

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        waiting.set()
        while (await receive()).get("more_body"):
            pass
        whole.set()
        await receive()

    connection, transport = connected(hold)
    connection.data_received(HEAD)
    await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    connection.data_received(PIECE * 2)
    assert transport.reading
    await asyncio.wait_for(whole.wait(), DEADLINE_S)
    connection.connection_lost(None)
