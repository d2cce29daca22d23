"""One connection to an upstream: at most one exchange at a time, HTTP/1.1 as far as a client of vLLM needs it.

    IDLE --start--> BUSY --whole reply--> IDLE, or closed when either side does not want to keep it
                      \\--lost, broken off, cancelled--> closed

httptools parses (it refuses what is not HTTP, and knows chunks and lengths); what is ours is what a reply's end means.
An idle connection on which anything arrives is closed: there is nobody to whom it could belong.

The kernel writes into a buffer that all connections share, and the parser copies the body's pieces out of it. A long
body whose length was told gets memory of its own: what is left of it is read straight into its place, past the parser,
which has nothing to say about it. A length is only a promise: the kernel gives that memory as it is written.

The C library interrupts the process for a microsecond or two at each page that is touched for the first time; for a
reply of 20 MB that is half as much as parsing it. So a large body gets its memory at once, at full length.
"""

from __future__ import annotations

import asyncio
import io
import select
from typing import TYPE_CHECKING, Any, Final

import httptools

from shared.core.faults import BreakKind
from workers.upstream.client.port import Broken, Reply

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


class BodyBuffer:
    """Of `size_bytes`, to be written through `view`.

    A large one becomes memory page by page as it is written: a size that is only told takes none.
    """

    def __init__(self, size_bytes: int) -> None:
        # Nobody else has these bytes, so they are written in place, and are what `whole` returns.
        self._bytes = io.BytesIO(bytes(size_bytes))
        self.view: memoryview = self._bytes.getbuffer()

    def whole(self) -> bytes:
        """What was written, uncopied if no view is left anywhere. It is the end of `view`."""
        self.view.release()
        return self._bytes.getvalue()


# Of a reply. llhttp sets no bound of its own; routers add a dozen headers at most.
_HEAD_BYTES: Final = 64 * 1024
# From here on the body is written apart from the head, which spares a copy of it.
_SCATTER_FROM_BYTES: Final = 32 * 1024
# A longer body is read into its place, if it tells its length.
_IN_PLACE_FROM_BYTES: Final = 32 * 1024
_NO_HEADERS: Final[dict[str, str]] = {}
_NOTHING: Final = memoryview(bytearray())


class UpstreamConnection(asyncio.BufferedProtocol):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scratch: memoryview,
        limit_bytes: int,
        on_lost: Callable[[UpstreamConnection], None],
    ) -> None:
        """`scratch`: where reads go, of the loop's connections together: none keeps anything there beyond its turn.
        `limit_bytes`: the longest body that is read. `on_lost` is called once, when the connection has ended.
        """
        self._loop = loop
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        # Of the transport, which does not let it be looked into.
        self.socket: socket.socket | None = None
        self._news: select.poll | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._keeps_alive = True
        # Of a body that is read in place, and where its next bytes go.
        self._place: BodyBuffer | None = None
        self._missing = _NOTHING
        self._parser: Any = httptools.HttpResponseParser(self)
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
        """The reply was read to its end, and both sides keep the connection."""
        return self._keeps_alive and self._reply is None and self.is_open

    def has_news(self) -> bool:
        """Whether the kernel holds something for it that the loop has not seen: on an idle connection, its end."""
        if self._news is None:
            assert self.socket is not None
            self._news = select.poll()
            self._news.register(self.socket, select.POLLIN)
        # A third of what a `recv` takes, whose usual answer is an exception.
        return bool(self._news.poll(0))

    def start(self, head: bytes, body: bytes) -> asyncio.Future[Reply]:
        """Send a request; the future is its reply, or raises `Broken`."""
        assert self._transport is not None
        assert self._reply is None
        self._begin()
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._reply = reply
        if len(body) < _SCATTER_FROM_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return reply

    def fail(self, broken: Broken) -> None:
        """End the exchange with `broken`, and the connection."""
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(broken)
        self.abort()

    def abort(self) -> None:
        """Close at once, whatever is still unsent: vLLM gives the generation up when it notices."""
        self._keeps_alive = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._place is not None:
            self._leave_place_if_full()
        return self._missing or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._reply is None:
            # Nobody has asked: it could only be taken for the reply to the next request.
            self.abort()
        elif self._missing:
            self._arrived_in_place(nbytes)
        else:
            self._parse(self._scratch[:nbytes])

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(Broken(BreakKind.NOT_HTTP, str(error)))
        except httptools.HttpParserUpgrade:
            # No kin of the other; after a 101 the connection speaks something else.
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
        # The parser holds our methods: a cycle for each connection.
        self._parser = None
        self._on_lost(self)

    # -- parser callbacks

    def on_message_begin(self) -> None:
        if self._reply is None:
            # A second reply to one request.
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _HEAD_BYTES:
            self.fail(Broken(BreakKind.NOT_HTTP, "the reply's headers are too long"))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_is_whole = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._limit_bytes:
            self._keeps_alive = False
            self._finish(whole=False)
        elif self._body_bytes >= _IN_PLACE_FROM_BYTES:
            self._read_in_place()

    def on_message_complete(self) -> None:
        if 100 <= self._parser.get_status_code() < 200:
            # An interim reply; the real one follows.
            self._begin()
            return
        self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive() and self._is_sent()
        self._finish(whole=True)

    # -- the rest of a long body

    def _read_in_place(self) -> None:
        """From the next read on, if the body's length is known and there is more to come."""
        told = self._told_headers()
        length = int(told.get("content-length", 0)) if "transfer-encoding" not in told else 0
        if self._body_bytes < length <= self._limit_bytes:
            self._place = BodyBuffer(length)
            self._place.view[: self._body_bytes] = b"".join(self._parts)
            self._missing = self._place.view[self._body_bytes :]

    def _arrived_in_place(self, size_bytes: int) -> None:
        # Even of no length a view of it would keep the body alive.
        self._missing = self._missing[size_bytes:] or _NOTHING
        if not self._missing:
            # Until this read is over the transport holds a view, and the body would have to be copied.
            self._loop.call_soon(self._leave_place_if_full)

    def _leave_place_if_full(self) -> None:
        place = self._place
        if place is None or self._missing:
            return
        self._place = None
        self._parts[:] = (place.whole(),)
        self.on_message_complete()
        # It would wait for the bytes that went past it.
        self._parser = httptools.HttpResponseParser(self)

    # -- inside

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._head_is_whole = False
        self._parts: list[bytes] = []
        self._body_bytes: int = 0
        self._place, self._missing = None, _NOTHING

    def _is_sent(self) -> bool:
        """A reply may come before the request is out, to refuse it: the rest is then not worth sending."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def _finish(self, *, whole: bool) -> None:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            return
        status = self._parser.get_status_code()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        reply.set_result(Reply(status, body, _NO_HEADERS if status == 200 else self._told_headers(), whole))

    def _told_headers(self) -> dict[str, str]:
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers}

    def _ends_with_the_connection(self) -> bool:
        """HTTP/1.0's way of marking a body's end; a body with a length, or in chunks, was cut."""
        told = self._told_headers()
        return self._head_is_whole and "content-length" not in told and "transfer-encoding" not in told
