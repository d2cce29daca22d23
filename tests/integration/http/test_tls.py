"""Over TLS the transport beneath the record layer is out of sight; who took a reply must be known all the same."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Final

import pytest

from tests.integration.http.edge_server import MIB, Served, refusal_in, request, serving
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

BIG_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8388608\r\n\r\n"


class TlsClient:
    """A blocking client, used from a thread: what it does not read stays unread."""

    def __init__(self, port: int, cert: str) -> None:
        context = ssl.create_default_context(cafile=cert)
        plain = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self.sock = context.wrap_socket(plain, server_hostname="localhost")

    def ask(self, data: bytes, size_bytes: int) -> bytes:
        """At least `size_bytes` of the reply, or all of it."""
        self.sock.sendall(data)
        reply = b""
        while len(reply) < size_bytes and (piece := self.sock.recv(65536)):
            reply += piece
        return reply


@pytest.fixture
def closing() -> Iterator[list[TlsClient]]:
    clients: list[TlsClient] = []
    yield clients
    for client in clients:
        client.sock.close()


async def ask(served: Served, cert: str, closing: list[TlsClient], data: bytes, size_bytes: int) -> bytes:
    client = await asyncio.to_thread(TlsClient, served.port, cert)
    closing.append(client)
    return await asyncio.to_thread(client.ask, data, size_bytes)


async def test_a_large_reply_that_is_read(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    async with serving(tls_files=tls_files) as served:
        reply = await ask(served, tls_files[0], closing, request("GET", "/big"), 8 * MIB + len(BIG_HEAD))
        assert reply == BIG_HEAD + bytes(8 * MIB)
        await until(lambda: served.app.delivered == [True], "delivered")


async def test_a_reader_that_goes_away(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    async with serving(tls_files=tls_files) as served:
        await ask(served, tls_files[0], closing, request("GET", "/big"), 100)
        closing.pop().sock.close()
        await until(lambda: served.app.delivered == [False], "not delivered")


async def test_a_reader_that_does_not_read(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    """B16"""
    async with serving(tls_files=tls_files) as served:
        await ask(served, tls_files[0], closing, request("GET", "/big"), 0)
        await until(lambda: served.edge.unread, "the reply waits")
        served.sweep_after(61.0)
        await until(lambda: served.app.delivered == [False] and not served.edge.open, "cut")


async def test_an_idle_client_that_does_not_say_goodbye(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    async with serving(tls_files=tls_files) as served:
        await ask(served, tls_files[0], closing, request("GET", "/small"), 10)
        await until(lambda: served.edge.idle, "idle")
        served.sweep_after(76.0)
        assert len(served.edge.lingering) == 1
        served.sweep_after(6.0)
        await until(lambda: not served.edge.open, "cut")


async def test_stopping_does_not_wait_for_a_goodbye(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    """A loop cannot be closed over a TLS connection that is half shut down: it waits for ever."""
    async with serving(tls_files=tls_files) as served:
        await ask(served, tls_files[0], closing, request("GET", "/small"), 10)
        await until(lambda: served.edge.idle, "idle")
        await served.server.stop(5.0)
        await until(lambda: not served.edge.open, "cut")


async def test_a_refusal(tls_files: tuple[str, str], closing: list[TlsClient]) -> None:
    async with serving(tls_files=tls_files) as served:
        reply = await ask(served, tls_files[0], closing, b"get / HTTP/1.1\r\n\r\n", MIB)
        assert refusal_in(reply)[0] == 400
