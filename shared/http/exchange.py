r"""The hot routes' requests, from the parser to their endpoint and back, without ASGI's messages between them.

A sample is two such requests, and what ASGI puts around one (an event, a message for each step of a body and of a
reply, the checks of both) costs more than parsing it. What is taken here is the plain case, which is what an SDK sends:
a POST over plain HTTP/1.1 with a length that fits into one read, on a connection with nothing else under way. All else
goes the way of every other request. Both ways lead to one endpoint, which decides who calls before a body is read.

    head --admitted--> body --whole--> in the lane (shared/loop/turns.py) --its turn--> answered
       \--refused: answered at once, and the body is thrown away

uvicorn's cycle of one request and its reply, with a reply that is written at once.

An ASGI reply comes in two messages, which uvicorn writes apart: two system calls, two segments, and a client that wakes
up for a head without a body. A whole reply is one message here, announced to the application as an extension.

Sending a whole reply, and finding out whether the client was there to take it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from shared.config import KIB
from shared.core.errors import GatewayError
from shared.http.peer import connection

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping

    from starlette.types import ASGIApp, Scope, Send

    from shared.http.connection import GatewayProtocol
    from shared.http.peer import Connection


# From here on a copy of the body costs more than the second buffer of a scattered write.
SCATTER_FROM_BYTES: Final = 16 * KIB


class Reply(Protocol):
    """A whole reply. `on_delivered` is called when the client was still there after the last byte."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes | memoryview: ...

    @property
    def content_type(self) -> bytes: ...

    @property
    def on_delivered(self) -> Callable[[], None] | None: ...


class Direct(Protocol):
    """What answers without ASGI. `caller` is its own business, but for a `digest`: whose turn it takes."""

    def admit(self, headers: Mapping[bytes, bytes]) -> Any:
        """The caller, before the body is read. Raises `GatewayError` for who, or what, is refused unread."""
        ...

    def refused(self, error: GatewayError, path: str) -> Reply: ...

    async def answered(self, request: DirectCycle) -> Reply | ASGIApp:
        """The reply, a refusal included; or the application that sends it, where it is no whole one."""
        ...

    def client_left(self, path: str) -> None:
        """The client was gone before it was its turn."""
        ...


class Standing(Protocol):
    """What has its reply ready, whoever asks."""

    def reply(self) -> Reply: ...


class DirectCycle:
    """One request and its reply; to the protocol what a `GatewayCycle` is."""

    __slots__ = (
        "_endpoint",
        "_parts",
        "_protocol",
        "_task",
        "_told",
        "_url",
        "caller",
        "headers",
        "keep_alive",
        "response_complete",
        "response_started",
    )
    # A body of one read is never too far ahead of its handler.
    unread_bytes = 0

    def __init__(
        self,
        protocol: GatewayProtocol,
        endpoint: Direct,
        url: bytes,
        told: list[tuple[bytes, bytes]],
        keep_alive: bool,
    ) -> None:
        """`told`: the headers as they came."""
        self._protocol = protocol
        self._endpoint = endpoint
        self._url = url
        self._told = told
        self._parts: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self.keep_alive = keep_alive
        self.response_started = False
        self.response_complete = False
        self.headers: dict[bytes, bytes] = dict(told)
        self.caller: Any = None

    # -- for the endpoint

    @property
    def connection(self) -> Connection:
        return self._protocol.connection

    @property
    def path(self) -> str:
        return self._url.decode("ascii")

    @property
    def body(self) -> bytes:
        """All of it."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def scope(self) -> Scope:
        """As ASGI would have told of it: for the few that pass a request on."""
        return self._protocol.scope_of(b"POST", "1.1", self._url, self._told)

    # -- for the protocol

    @property
    def disconnected(self) -> bool:
        return not self._protocol.connection.connected

    def admit(self) -> None:
        try:
            self.caller = self._endpoint.admit(self.headers)
        except GatewayError as error:
            self._protocol.note_at_once()
            self._write(self._endpoint.refused(error, self.path), is_early=True)

    def add(self, part: bytes) -> None:
        self._parts.append(part)

    def whole(self) -> None:
        """The body is."""
        lane = self._protocol.lane
        assert lane is not None
        lane.enter(self.caller.digest, self._start)

    def retract(self) -> None:
        """What came after the head is no body: `disconnected` says that nothing is to be written."""

    def end(self) -> None:
        """The connection has ended."""
        if self._task is None and not self.response_complete:
            self._endpoint.client_left(self.path)

    def _start(self) -> bool:
        if self.disconnected:
            return False
        protocol = self._protocol
        self._task = protocol.loop.create_task(self._run())
        # Who stops the server waits for it.
        protocol.tasks.add(self._task)
        return True

    async def _run(self) -> None:
        protocol = self._protocol
        try:
            reply = await self._endpoint.answered(self)
            # A connection keeps its last request until the next one: thousands that are idle would keep their prompts.
            self._parts.clear()
            if callable(reply):
                await self._handed_on().run_asgi(reply)  # type: ignore[arg-type] # typed dicts
                return
            if protocol.flow.write_paused:
                # What was said before on this connection is still unread.
                await protocol.flow.drain()
            if self.disconnected:
                return
            self._write(reply)
            if reply.on_delivered is not None and await protocol.connection.drained():
                reply.on_delivered()
        except BaseException:
            # The server stops; or a defect, which asyncio reports. Nobody may wait for a reply that does not come.
            if not self.response_started:
                protocol.transport.close()
            raise
        finally:
            assert self._task is not None
            protocol.tasks.discard(self._task)

    def _handed_on(self) -> GatewayCycle:
        """Its reply comes in parts."""
        protocol = self._protocol
        cycle = protocol.as_asgi(self.scope(), keep_alive=self.keep_alive)
        if protocol.cycle is self:
            # Else there is a newer one, whose body may be arriving.
            protocol.cycle = cycle
        return cycle

    def _write(self, reply: Reply, *, is_early: bool = False) -> None:
        """`is_early`: the body may not be whole yet."""
        self.response_started = True
        write_reply(self._protocol.transport, reply, keep_alive=self.keep_alive)
        self.response_complete = True
        if not self.keep_alive:
            if is_early:
                self._protocol.end_within_body()
            else:
                self._protocol.transport.close()
        self._protocol.on_response_complete()


def write_reply(transport: asyncio.Transport, reply: Reply, *, keep_alive: bool) -> None:
    """All of it. Who does not keep the connection has to end it."""
    body = reply.body
    opening = _opening(reply.status, reply.content_type)
    ending = b"" if keep_alive else b"connection: close\r\n"
    if len(body) < SCATTER_FROM_BYTES:
        transport.write(b"".join((b"%b%d\r\n%b\r\n" % (opening, len(body), ending), body)))
    else:
        transport.writelines((b"%b%d\r\n%b\r\n" % (opening, len(body), ending), body))


@lru_cache(maxsize=64)
def _opening(status: int, content_type: bytes) -> bytes:
    """Of a head, up to the length. Both are our own: there are a dozen pairs."""
    return b"%bcontent-type: %b\r\ncontent-length: " % (STATUS_LINE[status], content_type)


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


# uvloop's TLS encrypts one write into one buffer of the TCP transport, however large, and never says how much of it is
# left. In pieces of its high-water mark no more than one of them is out of sight; the copy is the encryption's anyway.
_TLS_PIECE_BYTES: Final = 64 * KIB


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """One reply with its length. The headers may be another server's: uvicorn looks at each."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


async def send_whole(
    scope: Scope, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """As `send_response`, in one write where the server beneath can do that. The headers must be our own."""
    if WHOLE_REPLY in scope.get("extensions", ()):
        await send({"type": WHOLE_REPLY, "status": status, "headers": headers, "body": body})
    else:
        await send_response(send, status, headers, body)


async def deliver(
    scope: Scope, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> bool:
    """`send_whole`, then whether the client was still connected when the last byte had left our hands.

    See watch.py for what that can and cannot mean.
    """
    client = connection(scope)
    if not client.connected:
        return False
    if scope.get("scheme") == "https" and len(body) > _TLS_PIECE_BYTES:
        await _send_in_pieces(send, status, headers, memoryview(body))
    else:
        await send_whole(scope, send, status, headers, body)
    return await client.drained()


async def _send_in_pieces(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: memoryview) -> None:
    """As `send_response`; waits for the client before each piece."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", length)]})
    for start in range(0, len(body), _TLS_PIECE_BYTES):
        end = start + _TLS_PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})
