"""Who took a reply, who has left a held request, and how connections end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared.http.exchange import exchange_in
from tests.integration.http.edge_server import MIB, request, serving, status_of
from tests.waiting import DEADLINE_S, until


async def test_a_reply_that_is_read_is_delivered() -> None:
    async with serving() as served:
        client = await served.connect()
        for path, size_bytes in (("/small", 4), ("/big", 8 * MIB)):
            await client.send(request("GET", path))
            data = b""
            while len(data.partition(b"\r\n\r\n")[2]) < size_bytes:
                data += await client.read(MIB)
        await until(lambda: served.app.delivered == [True, True], "delivered")
        assert len({id(exchange_in(scope).peer) for scope in served.app.scopes}) == 1, "one connection was used again"
        client.close()


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_client_that_left_before_the_reply(ending: str) -> None:
    """A2: nothing was delivered, and the held request is told at once."""
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold"))
        await until(lambda: served.app.bodies, "held")
        getattr(client, ending)()
        await until(lambda: served.app.lost == 1, "the application is told")
        served.app.release.set()
        await until(lambda: served.app.delivered == [False], "not delivered")
        assert served.app.lost == 1


@pytest.mark.parametrize("pipelined", [0, 1])
@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_held_request_whose_client_left_is_no_forgotten_reply(
    ending: str, pipelined: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A2: the handler is woken before the transport reports the end, and returns without a reply."""
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/leave") * (1 + pipelined))
        await until(lambda: served.app.bodies, "held")
        getattr(client, ending)()
        await until(lambda: served.app.lost, "the application is told")
        await until(lambda: not served.edge.open, "the connection has ended")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_leaves_behind_a_large_body_is_noticed() -> None:
    """The body's last read is above the mark at which reading pauses; it must go on to see the end."""
    body = bytes(200 * 1024)
    async with serving() as served:
        client = await served.connect()
        await client.send(request("POST", "/hold", b"", f"Content-Length: {len(body)}"))
        await until(lambda: served.app.scopes, "the application waits for the body")
        await client.send(body)
        await until(lambda: served.app.bodies, "held")
        client.close()
        await until(lambda: served.app.lost == 1, "the application is told")


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_large_reply_whose_reader_goes_away(ending: str) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/big"))
        assert await client.read()
        await until(lambda: served.edge.unread, "the rest waits")
        getattr(client, ending)()
        await until(lambda: served.app.delivered == [False], "not delivered")


async def test_a_reader_that_half_closes_counts_as_gone() -> None:
    """It may still read, but an end is all that a client that left shows, too: we keep the result."""
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/big"))
        await until(lambda: served.edge.unread, "the reply waits")
        ours = exchange_in(served.app.scopes[0]).peer
        client.sock.shutdown(socket.SHUT_WR)
        await until(lambda: not ours.connected, "noticed")
        await client.read_to_end()
        await until(lambda: served.app.delivered == [False], "not delivered")
        client.close()


async def test_a_last_reply_is_delivered_too() -> None:
    """Our own close, announced, is not the client's leaving."""
    async with serving() as served:
        for path, size_bytes in (("/small", 4), ("/big", 8 * MIB)):
            reply = await served.exchange(request("GET", path, b"", "Connection: close"))
            assert len(reply.partition(b"\r\n\r\n")[2]) == size_bytes
        await until(lambda: served.app.delivered == [True, True], "delivered")


async def test_replies_while_draining_announce_the_close() -> None:
    async with serving() as served:
        held, idle = await served.connect(), await served.connect()
        await held.send(request("GET", "/hold"))
        await idle.send(request("POST", "/echo", b"one"))
        assert b"connection: close" not in await idle.read_until(b"one")
        await until(lambda: served.app.scopes[0]["path"] == "/hold", "held")
        served.edge.start_draining()
        await idle.send(request("POST", "/echo", b"two"))
        served.app.release.set()
        for client in (held, idle):
            reply = await client.read_to_end()
            assert status_of(reply) == 200 and b"connection: close\r\n" in reply
            client.close()
        await until(lambda: served.app.delivered == [True], "delivered")


async def test_stopping_answers_what_is_in_flight() -> None:
    """B12"""
    async with serving() as served:
        held, idle, late, half = [await served.connect() for _ in range(4)]
        split = request("POST", "/echo", b"half")
        await half.send(split[:20])
        await held.send(request("GET", "/hold"))
        await idle.send(request("POST", "/echo", b"one"))
        await idle.read_until(b"one")
        await until(
            lambda: len(served.app.scopes) == 2 and len(served.edge.open) == 4 and served.edge.arriving,
            "all are connected",
        )
        stopping = asyncio.create_task(served.server.stop(DEADLINE_S))
        await until(lambda: served.edge.draining, "stopping")
        # Accepted before, says what it wants only now.
        await late.send(request("POST", "/echo", b"late"))
        assert (await late.read_to_end()).endswith(b"late")
        assert await idle.read_to_end() == b""
        await half.send(split[20:])
        assert (await half.read_to_end()).endswith(b"half")
        assert not stopping.done()
        served.app.release.set()
        assert (await held.read_to_end()).endswith(b"held")
        await stopping
        for client in (held, idle, late, half):
            client.close()
