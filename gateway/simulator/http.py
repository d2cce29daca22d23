"""The least HTTP/1.1 server that a simulated vLLM needs: one request at a time per connection, idle ones closed.

It shares the machine with the gateway under test, so it costs as little as Python allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import httptools

_PHRASES: Final = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 429: b"Too Many Requests", 500: b"Error"}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: str


@dataclass(frozen=True, slots=True)
class HttpReply:
    """`cut_at`: send only so many bytes of head and body together, then reset."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None


class Reset(Exception):
    """Drop the connection without a word."""


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


class HttpConnection(asyncio.Protocol):
    """`handler` runs as a task per request, cancelled when the client goes away, as vLLM does."""

    def __init__(self, handler: Handler, open_connections: set[HttpConnection], keep_alive_s: float) -> None:
        self._handler = handler
        self._open = open_connections
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._open.add(self)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if peer else ""
        self._wait_for_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._stop_idling()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> None:
        """A half-close ends the request too; returning None closes the rest."""

    def data_received(self, data: bytes) -> None:
        self._stop_idling()
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
        self._task = self._loop.create_task(self._answer(request, keep_alive))

    async def _answer(self, request: HttpRequest, keep_alive: bool) -> None:
        try:
            reply = await self._handler(request)
        except Reset:
            self._transport.abort()
            return
        self._send(reply, keep_alive)

    def _send(self, reply: HttpReply, keep_alive: bool) -> None:
        whole = _encode(reply, keep_alive)
        if reply.cut_at is not None:
            # Closing, not resetting: what was sent so far must be read before the end is.
            self._transport.write(whole[: reply.cut_at])
            self._transport.close()
            return
        self._transport.write(whole)
        if keep_alive:
            self._wait_for_next()
        else:
            self._transport.close()

    def _wait_for_next(self) -> None:
        self._idle = self._loop.call_later(self._keep_alive_s, self._transport.close)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def stop(self) -> None:
        self._transport.abort()


def head_of(reply: HttpReply, keep_alive: bool) -> bytes:
    lines = [
        b"HTTP/1.1 %d %s" % (reply.status, _PHRASES.get(reply.status, b"Status")),
        b"server: uvicorn",
        b"content-length: %d" % len(reply.body),
        b"content-type: " + reply.content_type.encode(),
    ]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in reply.headers.items()]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _encode(reply: HttpReply, keep_alive: bool) -> bytes:
    return head_of(reply, keep_alive) + reply.body
