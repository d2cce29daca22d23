"""A small application behind the real edge on port 0, and clients that are plain sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.http.edge import Edge
from shared.http.exchange import exchange_in
from shared.http.head import HttpLimits
from shared.http.reply import send_response
from shared.http.server import PublicServer
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from shared.core.errors import GatewayError
    from shared.http.exchange import Exchange, HotEntry

MIB = 1024 * 1024


def now_s() -> float:
    """The loop's time. What a deadline is counted from is not earlier, however long the test is held up after it."""
    return asyncio.get_running_loop().time()


@dataclass
class Said:
    """A reply."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    on_delivered: Callable[[], None] | None = None


async def whole_body(receive: Receive) -> bytes | None:
    """None when the client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += bytes(message["body"])
        if not message["more_body"]:
            return body


class Application:
    """Answers by path: `/echo`, `/big` (8 MiB, delivered), `/small` (delivered), `/hold` (until released), `/early`,
    `/leave` (until the client leaves, and then nothing).
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.incomplete = 0
        self.delivered: list[bool] = []
        self.release = asyncio.Event()
        self.lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/early":
            await send_response(send, 413, [], b"too large")
            return
        body = await whole_body(receive)
        if body is None:
            self.incomplete += 1
            return
        self.bodies.append(body)
        exchange = exchange_in(scope)
        if scope["path"] == "/leave":
            await self._left(exchange)
            self.lost += 1
        elif scope["path"] in ("/big", "/small", "/hold"):
            await self._deliver(exchange, scope["path"])
        else:
            await send_response(send, 200, [], body)

    async def _left(self, exchange: Exchange) -> None:
        left = asyncio.Event()
        exchange.peer.add_lost_callback(left.set)
        await left.wait()

    async def _deliver(self, exchange: Exchange, path: str) -> None:
        if path == "/hold":
            exchange.peer.add_lost_callback(self._count_lost)
            await self.release.wait()
        delivering = Delivering(Said(200, bytes(8 * MIB) if path == "/big" else b"held"))
        exchange.collect(delivering, 64 * MIB)
        await exchange.respond()
        self.delivered.append(delivering.delivered)

    def _count_lost(self) -> None:
        self.lost += 1


class Delivering:
    """A `Responder` that notes whether its reply was delivered."""

    in_turns = False

    def __init__(self, reply: Said) -> None:
        self._reply = reply
        self.delivered = False
        reply.on_delivered = self._note

    def _note(self) -> None:
        self.delivered = True

    async def answer(self, exchange: Exchange, body: bytes) -> Said:
        return self._reply

    def refuse(self, exchange: Exchange, error: GatewayError) -> None:
        raise AssertionError("nothing is refused here")

    def client_left(self, exchange: Exchange) -> None:
        pass


@dataclass
class Served:
    edge: Edge
    server: PublicServer
    port: int

    def sweep_after(self, seconds: float, since_s: float | None = None) -> None:
        """What the sweep would do `seconds` from now, or from `since_s` (the loop's time)."""
        self.edge.sweep((now_s() if since_s is None else since_s) + seconds)

    async def connect(self) -> Client:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return Client(sock)

    def connect_saying(self, data: bytes) -> Client:
        """The bytes are there before the server hears of the connection: nothing else runs meanwhile."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.sendall(data)
        sock.setblocking(False)
        return Client(sock)

    async def exchange(self, data: bytes) -> bytes:
        """Everything that the server says to `data`, until it closes."""
        client = await self.connect()
        try:
            await client.send(data)
            return await client.read_to_end()
        finally:
            client.close()


@dataclass
class ServedApplication(Served):
    app: Application


class Client:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> bool:
        """Whether the server took it all."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._loop.sock_sendall(self.sock, data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def read(self, size_bytes: int = 65536) -> bytes:
        """Some bytes; none when the server has closed or reset the connection."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._loop.sock_recv(self.sock, size_bytes)
        except ConnectionResetError:
            return b""

    async def read_until(self, ending: bytes) -> bytes:
        data = b""
        while not data.endswith(ending):
            piece = await self.read()
            assert piece, f"closed after {data[-200:]!r}"
            data += piece
        return data

    async def read_to_end(self) -> bytes:
        data = b""
        while piece := await self.read():
            data += piece
        return data

    async def read_to_the_goodbye(self) -> bytes:
        """As `read_to_end`. Raises `ConnectionResetError` where the connection does not end in order."""
        data = b""
        async with asyncio.timeout(DEADLINE_S):
            while piece := await self._loop.sock_recv(self.sock, 65536):
                data += piece
        return data

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@asynccontextmanager
async def serving(
    limits: HttpLimits | None = None, *, tls_files: tuple[str, str] | None = None
) -> AsyncIterator[ServedApplication]:
    """`tls_files` are the paths of a certificate and its key."""
    application = Application()
    async with serving_app(application, limits, tls_files=tls_files) as served:
        try:
            yield ServedApplication(served.edge, served.server, served.port, application)
        finally:
            application.release.set()


@asynccontextmanager
async def serving_app(
    app: ASGIApp,
    limits: HttpLimits | None = None,
    *,
    tls_files: tuple[str, str] | None = None,
    hot: Mapping[tuple[bytes, bytes], HotEntry] | None = None,
) -> AsyncIterator[Served]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    edge = Edge(limits or HttpLimits())
    tls_cert, tls_key = tls_files or (None, None)
    server = PublicServer(app, listener, edge, backlog=1024, tls_cert=tls_cert, tls_key=tls_key, hot=hot)
    await server.start()
    try:
        yield Served(edge, server, listener.getsockname()[1])
    finally:
        server.stop_accepting()
        await until(lambda: edge.sweep(float("inf")) or not edge.open, "all connections closed")
        listener.close()


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: h", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def refusal_in(reply: bytes) -> tuple[int, str]:
    """Status and detail of a refusal that is well formed, closes, and is the last thing said."""
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines and b"content-type: application/json" in lines, reply
    assert b"content-length: %d" % len(body) in lines, reply
    detail = json.loads(body)["detail"]
    assert isinstance(detail, str) and detail
    return status_of(reply), detail
