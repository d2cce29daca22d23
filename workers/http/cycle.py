"""uvicorn's cycle of one request and its reply, with a reply that is written at once.

An ASGI reply comes in two messages, which uvicorn writes apart: two system calls, two segments, and a client that wakes
up for a head without a body. A whole reply is one message here, announced to the application as an extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from workers.http.direct import SCATTER_FROM_BYTES
from workers.http.watch import connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The key in a scope's `extensions`, and the type of the message: status, headers (Content-Length left out), body.
WHOLE_REPLY: Final = "gateway.whole_reply"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class GatewayCycle(RequestResponseCycle):
    """`unread_bytes`: of the body, what has arrived and was not received yet."""

    _told_of_the_end = False

    def __init__(self, *arguments: Any, end_within_body: Callable[[], None]) -> None:
        """`end_within_body` is called after a last reply that does not wait for all of the body."""
        super().__init__(*arguments)
        self._end_within_body = end_within_body
        self._connection = connection(self.scope)  # type: ignore[arg-type] # a typed dict
        self._parts: list[bytes] = []
        self.unread_bytes = 0

    @property
    def disconnected(self) -> bool:
        """As soon as the connection is known to be lost: a handler that is woken by that returns before the transport
        reports it, and uvicorn would take its silence for a forgotten reply. uvicorn also tells none but the newest of
        several pipelined requests.
        """
        return self._told_of_the_end or not self._connection.connected

    @disconnected.setter
    def disconnected(self, value: bool) -> None:
        self._told_of_the_end = value

    def add(self, part: bytes) -> None:
        """More of the body has arrived."""
        self._parts.append(part)
        self.unread_bytes += len(part)
        self.message_event.set()

    def whole(self) -> None:
        """The body is."""
        self.more_body = False
        self.message_event.set()

    def retract(self) -> None:
        """What came after the head is no body: the handler is told that the client has gone."""
        self.disconnected = True
        self.message_event.set()

    def end(self) -> None:
        """The connection has ended."""
        if not self.response_complete:
            self.disconnected = True
        self.message_event.set()

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self.unread_bytes = [], 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if message["type"] != WHOLE_REPLY:
            await super().send(message)
            return
        headers, body = message["headers"], message["body"]
        if self.access_log or self.scope["method"] == "HEAD":
            # Neither is in a hurry.
            length = (b"content-length", b"%d" % len(body))
            start = {"type": "http.response.start", "status": message["status"], "headers": [*headers, length]}
            await super().send(start)  # type: ignore[arg-type] # an event, spelled out
            await super().send({"type": "http.response.body", "body": body, "more_body": False})
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self._write(message["status"], headers, body)

    def _write(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview) -> None:
        """The headers' names and values are our own: nothing from a client or an upstream is among them."""
        if self.response_started:
            raise RuntimeError("a reply was already begun")
        self.response_started = True
        self.waiting_for_100_continue = False
        told = b"".join([b"%b: %b\r\n" % header for header in headers])
        ending = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        head = b"%b%bcontent-length: %d\r\n%b" % (STATUS_LINE[status], told, len(body), ending)
        if len(body) < SCATTER_FROM_BYTES:
            self.transport.write(b"".join((head, body)))
        else:
            self.transport.writelines((head, body))
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            (self._end_within_body if self.more_body else self.transport.close)()
        self.on_response()
