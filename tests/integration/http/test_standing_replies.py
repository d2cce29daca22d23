"""What always has the same reply: given as soon as the request is read, and otherwise like any other."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shared.http.head import HttpLimits
from tests.integration.http.edge_server import Application, Served, request, serving_app, status_of
from tests.integration.http.test_direct import read_replies
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.http.exchange import Exchange

HEALTH = request("GET", "/health")
FINE = b"fine"
# A reply that is written in a turn is out at its end; the first turn accepts.
TURNS = 3


class Health:
    def __init__(self) -> None:
        self.asked = 0

    def admit(self, exchange: Exchange) -> None:
        self.asked += 1
        exchange.reply(200, b"text/plain", FINE)


@dataclass
class Bench:
    served: Served
    app: Application
    health: Health


@asynccontextmanager
async def standing() -> AsyncIterator[Bench]:
    app, health = Application(), Health()
    async with serving_app(app, hot={(b"GET", b"/health"): health}) as served:
        try:
            yield Bench(served, app, health)
        finally:
            app.release.set()


async def test_it_is_answered_without_the_application() -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(HEALTH)
        told = await read_replies(client, 1)
        assert (status_of(told), told.endswith(FINE), bench.health.asked) == (200, True, 1)
        assert bench.app.scopes == []
        client.close()


async def test_a_new_connection_has_its_reply_within_a_few_turns() -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(HEALTH)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert client.sock.recv(1000).endswith(FINE)
        client.close()


async def test_a_connection_is_kept_and_used_by_either_way() -> None:
    async with standing() as bench:
        client = await bench.served.connect()
        for number in range(3):
            await client.send(HEALTH)
            assert (await read_replies(client, 1)).endswith(FINE)
            await client.send(request("POST", "/echo", b"%d" % number))
            assert (await read_replies(client, 1)).endswith(b"%d" % number)
        assert (bench.health.asked, bench.app.bodies) == (3, [b"0", b"1", b"2"])
        client.close()


@pytest.mark.parametrize("data", [request("GET", "/health", b"", "Connection: close"), b"GET /health HTTP/1.0\r\n\r\n"])
async def test_a_connection_that_is_not_kept_ends(data: bytes) -> None:
    async with standing() as bench:
        told = await bench.served.exchange(data)
        assert b"connection: close" in told and told.endswith(FINE)
        await until(lambda: not bench.served.edge.open, "closed")


async def test_while_the_server_drains_connections_end() -> None:
    async with standing() as bench:
        bench.served.edge.start_draining()
        assert b"connection: close" in await bench.served.exchange(HEALTH)


@pytest.mark.parametrize("behind", [HEALTH, request("POST", "/echo", b"{}")], ids=["the same", "another"])
async def test_what_was_sent_behind_a_last_reply_is_no_request(behind: bytes) -> None:
    async with standing() as bench:
        bench.served.edge.start_draining()
        client = bench.served.connect_saying(HEALTH + behind)
        assert (await client.read_to_end()).count(b"HTTP/1.1 ") == 1
        await until(lambda: not bench.served.edge.open, "closed")
        assert (bench.health.asked, bench.app.scopes) == (1, [])
        client.close()


async def test_a_last_reply_is_not_lost_with_what_was_sent_behind_it() -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(request("GET", "/health", b"", "Connection: close") + bytes(40_000))
        assert (await client.read_to_the_goodbye()).endswith(FINE)
        client.close()


async def test_it_waits_for_the_requests_before_it_and_not_for_those_behind() -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(HEALTH + request("POST", "/hold", b"1") + HEALTH)
        assert (await read_replies(client, 1)).endswith(FINE)
        await until(lambda: bench.app.bodies == [b"1"], "held")
        assert bench.health.asked == 1
        bench.app.release.set()
        told = await read_replies(client, 2)
        assert told.count(b"HTTP/1.1 200") == 2
        client.close()


@pytest.mark.parametrize("data", [request("HEAD", "/health"), request("GET", "/health?a")], ids=["method", "query"])
async def test_what_is_asked_otherwise_goes_to_the_application(data: bytes) -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(data)
        await until(lambda: len(bench.app.bodies) == 1, "the application has it")
        assert bench.health.asked == 0
        client.close()


@pytest.mark.parametrize(
    ("data", "keeps"),
    [
        (request("GET", "/health", b"{}"), True),
        (request("GET", "/health", b"", "Content-Length: 2", "Expect: 100-continue"), False),
        (b"GET /health HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", False),
    ],
    ids=["body", "asks", "chunked"],
)
async def test_a_body_is_not_waited_for(data: bytes, keeps: bool) -> None:
    """Where its end would have to be looked for, or may never come, the connection ends."""
    async with standing() as bench:
        client = bench.served.connect_saying(data)
        if keeps:
            await client.send(HEALTH)
            assert (await read_replies(client, 2)).endswith(FINE)
        else:
            told = await client.read_to_the_goodbye()
            assert b"connection: close" in told and told.endswith(FINE)
        assert bench.app.scopes == []
        client.close()


async def test_what_speaks_against_a_head_speaks_against_this_one() -> None:
    async with standing() as bench:
        told = await bench.served.exchange(request("GET", "/health", b"", "X-Long: " + "x" * 100_000))
        assert (status_of(told), bench.health.asked) == (431, 0)


async def test_a_flood_in_one_turn_is_refused_as_by_asgi() -> None:
    async with standing() as bench:
        client = bench.served.connect_saying(HEALTH * 300)
        told = await client.read_to_end()
        most = HttpLimits().pipelined
        assert (told.count(b"HTTP/1.1 200"), told.count(b"HTTP/1.1 400"), bench.health.asked) == (most, 1, most)
        client.close()


async def test_who_asks_and_does_not_read_is_not_answered_for_ever() -> None:
    async with standing() as bench:
        client = await bench.served.connect()
        # Several reads' worth. What is pipelined behind an unread reply waits, and its number is limited.
        sending = asyncio.create_task(client.send(HEALTH * 200_000))
        await until(lambda: bench.health.asked > 0 and (sending.done() or not bench.served.edge.open), "refused")
        for connection in bench.served.edge.open:
            assert connection.transport.get_write_buffer_size() < 1024 * 1024  # type: ignore[attr-defined]
        await client.read_to_end()
        await sending
        client.close()
