"""A minimal HTTP/1.1 server for the simulated vLLM: one request at a time per connection, idle connections closed.

It shares the machine with the gateway under test, so it is written to cost little CPU.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools

if TYPE_CHECKING:
    from gateway.simulator.stats import Traffic

_log = logging.getLogger(__name__)

_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
# SO_LINGER with 0 s: closing discards unsent data and sends the peer a reset.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: str


@dataclass(frozen=True, slots=True)
class HttpReply:
    """One reply. `cut_at`: send only that many bytes of head and body, then close. `stream` replaces the body."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    stream: AsyncIterator[bytes] | None = None


class Dropped(Exception):
    """Close the connection without a reply, as the death of a process does."""


class Reset(Dropped):
    """Close the connection with a TCP reset, as a proxy or an overloaded machine does."""


_LAST_CHUNK: Final = b"0\r\n\r\n"

Handler = Callable[[HttpRequest], Awaitable[HttpReply]]

_BROKEN: Final = HttpReply(500, b'{"error":{"message":"","type":"InternalServerError","param":null,"code":500}}')


class HttpConnection(asyncio.Protocol):
    """One client connection. `handler` runs as one task per request, cancelled if the client leaves, as in vLLM."""

    def __init__(
        self, handler: Handler, open_connections: set[HttpConnection], keep_alive_s: float, traffic: Traffic
    ) -> None:
        self._handler = handler
        self._open = open_connections
        self._keep_alive_s = keep_alive_s
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # always a stream's
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._open.add(self)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if peer else ""
        self._wait_for_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> None:
        """Treat a half-close as the end of the request: returning None closes the connection."""

    def data_received(self, data: bytes) -> None:
        self._traffic.received_bytes += len(data)
        # The timer keeps running and finds the connection busy, which is cheaper than a new timer per request.
        self._idle_since_s = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = HttpRequest(
            self._parser.get_method().decode(),
            httptools.parse_url(self._url).path.decode(),
            self._headers,
            b"".join(self._body),
            self._peer,
        )
        keep_alive = self._parser.should_keep_alive()
        self._task = self._loop.create_task(self._answer(request, keep_alive, self._task))

    async def _answer(self, request: HttpRequest, keep_alive: bool, before: asyncio.Task[None] | None) -> None:
        """Answer one request after the task `before`, so that pipelined requests are answered in order."""
        if before is not None:
            await before
            self._idle_since_s = None
        try:
            reply = await self._handler(request)
            if reply.stream is not None:
                # The head at once and a chunk per piece; `_send` writes the last chunk.
                self._write(head_of(reply, keep_alive=True))
                async for piece in reply.stream:
                    self._write(b"%x\r\n%b\r\n" % (len(piece), piece))
        except Dropped as dropped:
            if isinstance(dropped, Reset):
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        except Exception:
            _log.exception("the simulator failed at %s %s", request.method, request.path)
            self._send(_BROKEN, keep_alive)
        else:
            self._send(reply, keep_alive)

    def _write(self, data: bytes) -> None:
        self._traffic.sent_bytes += len(data)
        self._transport.write(data)

    def _send(self, reply: HttpReply, keep_alive: bool) -> None:
        whole = _LAST_CHUNK if reply.stream is not None else head_of(reply, keep_alive) + reply.body
        self._traffic.sent_bytes += len(whole)
        if reply.cut_at is not None:
            # Close rather than reset, so that the peer reads these bytes before the end.
            self._transport.write(whole[: reply.cut_at])
            self._transport.close()
            return
        self._transport.write(whole)
        if keep_alive:
            self._wait_for_next()
        else:
            self._transport.close()

    def _wait_for_next(self) -> None:
        self._idle_since_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._keep_alive_s, self._close_when_idle)

    def _close_when_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since_s is None:
            return
        left_s = self._idle_since_s + self._keep_alive_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._close_when_idle)
        else:
            self._transport.close()

    def stop(self) -> asyncio.Task[None] | None:
        """Drop the connection, and return the task that is still to be awaited, if any."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task


def head_of(reply: HttpReply, keep_alive: bool) -> bytes:
    lines = [
        b"HTTP/1.1 %d %s" % (reply.status, _PHRASES.get(reply.status, b"Status")),
        b"server: uvicorn",
        b"transfer-encoding: chunked" if reply.stream is not None else b"content-length: %d" % len(reply.body),
        b"content-type: " + reply.content_type.encode(),
    ]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in reply.headers.items()]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"
