"""The load client's HTTP: bytes split anywhere, the SDK's pools, and what counts as no reply."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from gateway.bench.load.transport import (
    MAX_IDLE_PER_OBJECT,
    MAX_IN_FLIGHT_PER_OBJECT,
    ConnectionPool,
    GatewayAddress,
    NoReply,
    parse_address,
)
from gateway.simulator.stats import Traffic
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

REQUEST = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[ConnectionPool]:
    """Yield a pool to a server that handles each request with `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = ConnectionPool(GatewayAddress("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)


def saying(
    data: bytes, piece_bytes: int = 0
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        step = piece_bytes or len(data) or 1
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


@pytest.mark.parametrize("piece_bytes", [0, 1, 7])
async def test_a_reply_is_the_same_however_its_bytes_arrive(piece_bytes: int) -> None:
    async with answering(saying(REPLY, piece_bytes)) as pool:
        for _ in range(2):
            reply = await pool.send(REQUEST, DEADLINE_S)
            assert (reply.status, reply.body, reply.content_type) == (200, b"hello", "application/json")
        assert pool.connections_opened == 1
        assert pool.traffic == Traffic(2 * len(REQUEST), 2 * len(REPLY))


async def test_a_reply_without_a_positive_length_says_so() -> None:
    async with answering(saying(CHUNKED)) as pool:
        reply = await pool.send(REQUEST, DEADLINE_S)
        assert (reply.body, reply.has_length) == (b"hello", False)
    async with answering(saying(EMPTY)) as pool:
        assert not (await pool.send(REQUEST, DEADLINE_S)).has_length
    async with answering(saying(REPLY)) as pool:
        assert (await pool.send(REQUEST, DEADLINE_S)).has_length


async def test_a_connection_that_the_server_ends_is_not_used_again() -> None:
    async with answering(saying(LAST)) as pool:
        await pool.send(REQUEST, DEADLINE_S)
        await pool.send(REQUEST, DEADLINE_S)
        assert pool.connections_opened == 2


@pytest.mark.parametrize("cut", [0, 10, len(REPLY) - 1])
async def test_a_reply_that_is_cut_is_no_reply(cut: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY[:cut])
        await writer.drain()
        raise ConnectionResetError

    async with answering(answer) as pool:
        with pytest.raises(NoReply):
            await pool.send(REQUEST, DEADLINE_S)


async def test_something_that_is_not_http_is_no_reply() -> None:
    async with answering(saying(b"SSH-2.0-OpenSSH\r\n\r\n")) as pool:
        with pytest.raises(NoReply, match="not HTTP"):
            await pool.send(REQUEST, DEADLINE_S)


async def test_silence_is_no_reply_after_the_read_timeout() -> None:
    async with answering(saying(b"")) as pool:
        with pytest.raises(NoReply, match=r"nothing read for 0\.05 s"):
            await pool.send(REQUEST, 0.05)


async def test_a_refused_connection_is_no_reply() -> None:
    async with answering(saying(REPLY)) as pool:
        pass
    with pytest.raises(NoReply, match="cannot connect"):
        await pool.send(REQUEST, DEADLINE_S)


async def test_a_cancelled_request_closes_its_connection() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        gone.set()

    async with answering(answer) as pool:
        request = asyncio.create_task(pool.send(REQUEST, DEADLINE_S))
        await arrived.wait()
        request.cancel()
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        await asyncio.wait([request])
        assert request.cancelled()


async def test_two_idle_connections_are_kept_per_client_object_of_fifty() -> None:
    everybody = asyncio.Barrier(MAX_IN_FLIGHT_PER_OBJECT + 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await everybody.wait()
        writer.write(REPLY)

    async with answering(answer) as pool:
        for burst in range(2):
            await asyncio.gather(*(pool.send(REQUEST, DEADLINE_S) for _ in range(MAX_IN_FLIGHT_PER_OBJECT + 1)))
            # 51 requests are 50 of one object and 1 of another, which keep 2 connections and 1.
            kept = (MAX_IDLE_PER_OBJECT + 1) * burst
            assert pool.connections_opened == (MAX_IN_FLIGHT_PER_OBJECT + 1) * (burst + 1) - kept


async def test_a_dropped_reply_leaves_nothing_behind() -> None:
    async with answering(saying(REPLY)) as pool:
        await pool.send_and_drop(REQUEST)
        assert (await pool.send(REQUEST, DEADLINE_S)).status == 200
        assert pool.requests_sent == 2


def test_targets() -> None:
    assert parse_address("http://127.0.0.1:8000") == GatewayAddress("127.0.0.1", 8000)
    assert parse_address("http://h/prefix/", "127.0.1.1") == GatewayAddress("h", 80, "/prefix", "127.0.1.1")
    assert parse_address("http://[::1]:9").authority == "[::1]:9"


@pytest.mark.parametrize("url", ["https://h", "h:8000", "", "unix:///x"])
def test_what_the_client_cannot_reach_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT") as caught:
        parse_address(url)
    # Only an https:// address gets the advice on TLS.
    assert ("behind the TLS proxy" in str(caught.value)) == url.startswith("https:")
