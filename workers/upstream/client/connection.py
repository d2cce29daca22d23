"""One connection to an upstream: one exchange at a time, and as much of HTTP/1.1 as a client of vLLM needs.

    IDLE --start--> BUSY --whole reply--> IDLE, or closed when either side does not want to keep it
                      \\--lost, broken off, cancelled--> closed

httptools parses: it refuses what is not HTTP and knows chunks and lengths. This module decides what the end of a reply
means. An idle connection on which anything arrives is closed, since no request is waiting for it.

The kernel writes into a buffer that all connections share, and the parser copies the pieces of the body out of it. A
long body with a Content-Length gets memory of its own: the rest of it is read straight into place, past the parser. A
large allocation costs no memory before it is written, so an upstream that announces a length and sends nothing gains
nothing. Memory that grows piece by piece would cost half as much CPU as parsing for a reply of 20 MB, in page faults.
"""

from __future__ import annotations

import asyncio
import io
import select
from typing import TYPE_CHECKING, Any, Final

import httptools

from shared.core.faults import BreakKind
from workers.upstream.client.port import MOST_INTERIM_REPLIES, Broken, Reply

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


class BodyBuffer:
    """Hold `size_bytes` that are written through `view`.

    A large one takes memory page by page as it is written, so an announced size alone takes none.
    """

    def __init__(self, size_bytes: int) -> None:
        # BytesIO has the only reference to these bytes, so it writes them in place and returns them uncopied.
        self._bytes = io.BytesIO(bytes(size_bytes))
        self.view: memoryview = self._bytes.getbuffer()

    def whole(self) -> bytes:
        """Return what was written and release `view`. Nothing is copied unless other views exist."""
        self.view.release()
        return self._bytes.getvalue()


# The longest head of a reply. llhttp has no bound of its own; routers add a dozen headers at most.
_HEAD_BYTES: Final = 64 * 1024
# A chunk costs some sixty bytes of memory and a callback, whatever its length. From this many on, they must be longer
# than that on average; routers send kilobytes.
_FEW_PARTS: Final = 16 * 1024
_LEAST_MEAN_PART_BYTES: Final = 64
# From this size on, the request's body is written apart from its head, which saves a copy.
_SCATTER_FROM_BYTES: Final = 32 * 1024
# From this size on, a body with a Content-Length is read in place.
_IN_PLACE_FROM_BYTES: Final = 32 * 1024
_NO_HEADERS: Final[dict[str, str]] = {}
_NOTHING: Final = memoryview(bytearray())


class UpstreamConnection(asyncio.BufferedProtocol):
    """One connection of the own client; see the module."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scratch: memoryview,
        limit_bytes: int,
        on_lost: Callable[[UpstreamConnection], None],
        on_progress: Callable[[UpstreamConnection], None] | None = None,
    ) -> None:
        """Read at most `limit_bytes` of a body, and call `on_lost` once, when the connection has ended.

        `on_progress` is called after each read that does not end the reply.
        `scratch` is the read buffer that all connections of the loop share; nothing stays in it beyond a callback.
        """
        self._loop = loop
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._transport: asyncio.Transport | None = None
        # Kept here because the transport does not expose its socket.
        self.socket: socket.socket | None = None
        self._unread: select.poll | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._keeps_alive = True
        # The body that is read in place, and where its next bytes go.
        self._place: BodyBuffer | None = None
        self._missing = _NOTHING
        self._parser: Any = httptools.HttpResponseParser(self)
        self._interim_replies = 0
        self._begin()

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "idle" if self._reply is None else "busy"
        return f"<UpstreamConnection {state}>"

    # -- for the client

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the reply was read to its end and both sides keep the connection."""
        return self._keeps_alive and self._reply is None and self.is_open

    def has_unread_bytes(self) -> bool:
        """Return whether the kernel holds bytes, or the end of the connection, that the loop has not seen."""
        if self._unread is None:
            assert self.socket is not None
            self._unread = select.poll()
            self._unread.register(self.socket, select.POLLIN)
        # Takes a third of the time of a `recv`, whose usual answer is an exception.
        return bool(self._unread.poll(0))

    def start(self, head: bytes, body: bytes) -> asyncio.Future[Reply]:
        """Send a request and return the future of its reply, which may raise `Broken`."""
        assert self._transport is not None
        assert self._reply is None
        self._begin()
        self._interim_replies = 0
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._reply = reply
        if len(body) < _SCATTER_FROM_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return reply

    def fail(self, broken: Broken) -> None:
        """End the exchange with `broken`, and close the connection."""
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(broken)
        self.abort()

    def abort(self) -> None:
        """Close at once, whatever is still unsent. vLLM aborts the generation when it notices."""
        self._keeps_alive = False
        if self._transport is not None:
            self._transport.abort()

    def distrust(self) -> None:
        """Do not use the connection for another request; close it now if it is idle."""
        self._keeps_alive = False
        if self._reply is None:
            self.abort()

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._place is not None:
            self._leave_place_if_full()
        return self._missing or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._reply is None:
            # Nobody asked for it: it would be taken for the reply to the next request.
            self.abort()
        elif self._missing:
            # Even an empty view of the body would keep it alive.
            self._missing = self._missing[nbytes:] or _NOTHING
            if not self._missing:
                # The transport holds a view until this callback returns; until then the body would have to be copied.
                self._loop.call_soon(self._leave_place_if_full)
        else:
            self._parse(self._scratch[:nbytes])
        if self._reply is not None and self._on_progress is not None:
            self._on_progress(self)

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
            if not self._head_is_whole:
                # A header without end never reaches `on_header`, and costs more with each read.
                self._unfinished_head_bytes += len(data)
                self._bound_head(self._unfinished_head_bytes)
        except httptools.HttpParserError as error:
            self.fail(Broken(BreakKind.NOT_HTTP, str(error)))
        except httptools.HttpParserUpgrade:
            # Not a subclass of HttpParserError. After a 101 the connection speaks another protocol.
            self.fail(Broken(BreakKind.NOT_HTTP, "it switched protocols, which nobody asked for"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._leave_place_if_full()
        if self._reply is not None:
            if exc is None and self._ends_with_the_connection():
                self._finish(whole=True)
            else:
                kind = BreakKind.BODY_CUT if self._head_is_whole else BreakKind.RESET_BEFORE_STATUS
                self.fail(Broken(kind, str(exc) if exc is not None else ""))
        self._place, self._missing = None, _NOTHING
        # The parser holds our methods, which is a reference cycle.
        self._parser = None
        self._on_lost(self)

    # -- parser callbacks

    def on_message_begin(self) -> None:
        if self._reply is None:
            # A second reply to one request.
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._bound_head(self._head_bytes)
        self._headers.append((name, value))

    def _bound_head(self, size_bytes: int) -> None:
        if size_bytes > _HEAD_BYTES:
            self.fail(Broken(BreakKind.NOT_HTTP, "the reply's headers are too long"))

    def on_headers_complete(self) -> None:
        self._head_is_whole = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._limit_bytes:
            self._keeps_alive = False
            self._finish(whole=False)
        elif len(self._parts) > _FEW_PARTS and self._body_bytes < _LEAST_MEAN_PART_BYTES * len(self._parts):
            self.fail(Broken(BreakKind.NOT_HTTP, "the reply's body comes in too many small chunks"))
        elif self._body_bytes >= _IN_PLACE_FROM_BYTES:
            self._read_in_place()

    def on_message_complete(self) -> None:
        if 100 <= self._parser.get_status_code() < 200:
            # An interim reply; the real one follows.
            self._interim_replies += 1
            if self._interim_replies > MOST_INTERIM_REPLIES:
                self.fail(Broken(BreakKind.NOT_HTTP, "too many interim replies"))
            self._begin()
            return
        self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive() and self._is_sent()
        self._finish(whole=True)

    # -- the rest of a long body

    def _read_in_place(self) -> None:
        """Read the rest of the body in place, if its length is known and there is more to come."""
        headers = self._decoded_headers()
        length = int(headers.get("content-length", 0)) if "transfer-encoding" not in headers else 0
        if self._body_bytes < length <= self._limit_bytes:
            self._place = BodyBuffer(length)
            self._place.view[: self._body_bytes] = b"".join(self._parts)
            self._missing = self._place.view[self._body_bytes :]

    def _leave_place_if_full(self) -> None:
        place = self._place
        if place is None or self._missing:
            return
        self._place = None
        self._parts[:] = (place.whole(),)
        self.on_message_complete()
        # The old parser still waits for the bytes that went past it.
        self._parser = httptools.HttpResponseParser(self)

    # -- inside

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._unfinished_head_bytes = 0
        self._head_is_whole = False
        self._parts: list[bytes] = []
        self._body_bytes: int = 0
        self._place, self._missing = None, _NOTHING

    def _is_sent(self) -> bool:
        """Return whether the whole request went out. A server may refuse it before; the rest is not worth sending."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def _finish(self, *, whole: bool) -> None:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            return
        status = self._parser.get_status_code()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        reply.set_result(Reply(status, body, _NO_HEADERS if status == 200 else self._decoded_headers(), whole))

    def _decoded_headers(self) -> dict[str, str]:
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers}

    def _ends_with_the_connection(self) -> bool:
        """Return whether the end of the connection ends the body, as in HTTP/1.0. Any other body was cut."""
        headers = self._decoded_headers()
        return self._head_is_whole and "content-length" not in headers and "transfer-encoding" not in headers
