"""One client connection: bytes in, exchanges in order, deadlines, refusals, and its end.

The class is what uvicorn's `http` setting takes in place of its own protocol, which has no limit on headers, no
deadline for a request to arrive, and keeps connections that were reset.

Bytes go to a `RequestParser` (head.py), which calls `request_begins`, `body_arrives` and `request_ends`. For each
request there is an `Exchange` (exchange.py). Two of them matter here:

    _arriving    its body is not whole yet; None between requests and within a head
    _answering   the reply of this one is next. Requests behind it wait in `_pipeline`.

- **Deadlines** are kept in watchlists that all connections share (edge.py), never in timers of their own.
- **Refusals** of what is not HTTP are JSON, wait for the replies before them, and are followed by a lingering close so
  that the client can read them. They are the client's mistake, and nothing is logged.
- **Discarding.** After a refusal, and after an early reply to a chunked body, nothing is parsed: the rest is discarded,
  up to a limit in bytes on the wire. The next request comes after the rest of a body whose length is known.
- **Slow readers.** While replies wait in our buffers no other request is begun, and the least rate holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools
from uvicorn.protocols.utils import get_remote_addr

from shared.config import KIB
from shared.http.exchange import Exchange
from shared.http.head import Ended, Refusal, RequestParser, refusal_of
from shared.http.peer import Flow, SocketConnection, read_now

if TYPE_CHECKING:
    from shared.http.edge import Edge
    from shared.http.exchange import Service
    from shared.http.peer import Connection

# A small request, most of them with all of their body.
_EARLY_BYTES: Final = 16 * KIB
# What the loop reads at once.
_LATER_BYTES: Final = 256 * KIB
# Reading pauses behind so many waiting requests. It goes on behind fewer: a client that leaves would not be noticed.
_READ_AHEAD: Final = 16
# What transports begin with.
_HIGH_WATER_BYTES: Final = 64 * KIB


class EdgeConnection(asyncio.Protocol):
    """One client connection. `descriptor`: None where uvloop has to be asked for it, which costs a system call."""

    # Of a connection on which nothing has happened.
    client: tuple[str, int] | None = None
    _arriving: Exchange | None = None
    _answering: Exchange | None = None
    # Sent when the exchanges before it are complete.
    _refusal: bytes | None = None
    # Nothing is parsed any more.
    _discards = False
    # The last reply was given before the body of its request was whole.
    _ends = False
    _arrives_in_parts = False
    _answered_at_once = 0
    _discarded_bytes = 0
    _arriving_since_s = 0.0
    _paused_before_s = 0.0
    _unread_bytes = 0
    transport: asyncio.Transport
    flow: Flow
    peer: Connection

    def __init__(self, service: Service, edge: Edge, descriptor: int | None = None) -> None:
        self.service = service
        self.edge = edge
        self._descriptor = descriptor
        self._pipeline: deque[Exchange] = deque()
        self._parser = RequestParser(self, edge.limits)

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        self.transport = transport
        self.service.connections.add(self)
        if self.service.access_log:
            # Nothing else shows it, and asking is a system call.
            self.client = get_remote_addr(transport)
        high_water_bytes = self.edge.limits.write_buffer_bytes
        if high_water_bytes != _HIGH_WATER_BYTES:
            transport.set_write_buffer_limits(high=high_water_bytes)
        self.flow = Flow(transport, self.service.loop.time)
        self.peer = SocketConnection(transport, self.flow, high_water_bytes)
        self.edge.add(self, self.service.loop)
        if self.service.scheme == "http":
            self._read_early()

    def _read_early(self) -> None:
        """Read what came with the connection, as most first requests do.

        Until the loop reports it a turn passes, which takes tens of milliseconds on a busy machine.
        """
        data = read_now(self.transport, self._descriptor, _EARLY_BYTES)
        if not data:
            # Not here yet, or the end, which the loop's own read meets again.
            return
        try:
            self.data_received(data)
        except BaseException:
            # uvloop ends a connection whose read fails, but not one whose beginning does.
            self.peer.cut()
            raise
        if self.flow.read_paused:
            self.service.loop.call_soon(self._pause_again)
        elif len(data) == _EARLY_BYTES and self.transport.is_closing():
            # Closed over what is unread, the connection would be reset, and the last reply might be lost with it.
            read_now(self.transport, self._descriptor, _LATER_BYTES)

    def _pause_again(self) -> None:
        """Pause reading, which uvloop has begun after `_read_early` had paused it."""
        if self.flow.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.forget(self)
        self.peer.lose(broken=exc is not None)
        self.service.connections.discard(self)
        if self._answering is not None:
            self._answering.end()
        for exchange in self._pipeline:
            exchange.end()
        self._pipeline.clear()
        # They know us: garbage in a circle costs a third of a connection to find.
        self._answering = self._arriving = None
        self._parser.close()
        self.flow.resume_writing()

    def eof_received(self) -> None:
        self.peer.lose(broken=True)

    def shutdown(self) -> None:
        """Close when idle, because the server stops. A request whose head is on its way is still answered."""
        newest = self._newest()
        if newest is not None and not newest.complete:
            newest.keep_alive = False
        elif not self._parser.in_head:
            self.transport.close()
            self._watch_closing()

    def announce_close(self) -> None:
        """Have the reply to the newest request say that the connection ends."""
        newest = self._newest()
        if newest is not None:
            newest.keep_alive = False

    def _newest(self) -> Exchange | None:
        return self._pipeline[-1] if self._pipeline else self._answering

    # -- bytes in

    def data_received(self, data: bytes) -> None:
        if self._discards:
            self._discard(len(data))
            return
        try:
            self._parser.feed(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, Ended):
                self._discard(len(data))
            elif self.transport.is_closing():
                self._discards = True
            else:
                self._refuse(refusal_of(error))
        else:
            if self._arriving is not None or self._parser.in_head:
                self._note_arrival(len(data))

    def _note_arrival(self, size_bytes: int) -> None:
        """Start the deadline of a request that is not whole after this read, and bound what is held of it."""
        if not self._arrives_in_parts:
            self.edge.idle.discard(self)
            self._arriving_since_s = self.service.loop.time()
            self._paused_before_s = self.flow.paused_s(self._arriving_since_s)
            self.edge.arriving.add(self, self._arriving_since_s)
            self._arrives_in_parts = True
        if self._parser.is_stuck(size_bytes):
            self._refuse(self._parser.too_large())
        elif self._arriving and self._arriving.read_ahead(size_bytes) > self.edge.limits.unread_body_bytes:
            self.flow.pause_reading()

    def _discard(self, size_bytes: int) -> None:
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > self.edge.limits.discard_bytes:
            self.peer.cut()

    # -- requests, called by the parser

    def request_begins(self) -> None:
        self.edge.idle.discard(self)
        limit = self.edge.limits.pipelined
        if self._answered_at_once >= limit or len(self._pipeline) >= limit:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"More than {limit} pipelined requests wait for their turn.")
        keep_alive = not self.edge.draining and self._parser.keep_alive
        exchange = Exchange(self, self._parser, keep_alive=keep_alive)
        answering = self._answering
        if self._pipeline or self.flow.write_paused or (answering is not None and not answering.complete):
            # A target that is no URL is raised now, to whoever parses; those before it are answered first.
            exchange.scope()
            self._arriving = exchange
            self._pipeline.append(exchange)
            if len(self._pipeline) > _READ_AHEAD:
                self.flow.pause_reading()
            return
        self._arriving = self._answering = exchange
        exchange.begin()
        if exchange.complete:
            # A read may hold thousands of such requests: no more are answered in a turn than may wait in the pipeline.
            if not self._answered_at_once:
                self.service.loop.call_soon(self._begin_turn)
            self._answered_at_once += 1
        if self._discards:
            raise Ended

    def body_arrives(self, part: bytes) -> None:
        assert self._arriving is not None
        if self._arriving.complete:
            self._discard(len(part))
        else:
            self._arriving.add(part)
            if self._discards:
                raise Ended

    def request_ends(self) -> None:
        exchange, self._arriving = self._arriving, None
        assert exchange is not None
        if self._arrives_in_parts:
            self._arrives_in_parts = False
            self.edge.arriving.discard(self)
        if not exchange.complete:
            exchange.end_body()
            if not self._pipeline and self.flow.read_paused:
                # A handler that has its whole body asks for nothing more: a client that leaves would not be noticed.
                self.flow.resume_reading()
        elif self._ends or self.transport.is_closing():
            # What the client has sent behind that request is no request any more.
            self.transport.close()
            self._discards = True
            raise Ended
        else:
            self._wait_for_next()

    def _begin_turn(self) -> None:
        self._answered_at_once = 0

    # -- replies, called by exchanges

    def reply_complete(self) -> None:
        """Go on after a reply: end the connection, begin the next exchange, or wait for one."""
        exchange = self._answering
        assert exchange is not None
        if not exchange.keep_alive:
            if exchange.body_is_whole:
                self.transport.close()
            else:
                self._end_within_body(exchange)
        if self.transport.is_closing():
            self._watch_closing()
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._pipeline:
            self.service.loop.call_soon(self._begin_next)
        elif self._refusal is not None:
            self._send_refusal()
        elif self._arriving is None and not self._parser.in_head:
            self._wait_for_next()

    def _end_within_body(self, exchange: Exchange) -> None:
        """End our side after the last reply. A close over unread bytes would reset the connection, and lose it."""
        self._ends = True
        self._discards = exchange.is_chunked
        self.edge.arriving.discard(self)
        self._end_our_side()

    def _begin_next(self) -> None:
        """Begin the next exchange, a turn after the last: a hundred of them must not be answered in one turn."""
        answering = self._answering
        if not self._pipeline or self.flow.write_paused or answering is None or not answering.complete:
            return
        self._answering = exchange = self._pipeline.popleft()
        exchange.begin()
        if exchange.body_is_whole:
            self.flow.resume_reading()

    def _wait_for_next(self) -> None:
        self._discarded_bytes = 0
        self.edge.idle.add(self, self.service.loop.time())

    # -- refusing

    def _refuse(self, reason: Refusal) -> None:
        """Refuse what cannot be understood any further; whatever else arrives is discarded."""
        self._discards = True
        self.edge.arriving.discard(self)
        self.edge.idle.discard(self)
        if self._arriving is not None and not self._retract(self._arriving):
            self.peer.cut()
            return
        self._refusal = reason.encode()
        if not self._pipeline and (self._answering is None or self._answering.complete or self._answering.gone):
            self._send_refusal()

    def _retract(self, exchange: Exchange) -> bool:
        """Take back the request whose body is broken; return whether a refusal can still be sent."""
        self._arriving = None
        if self._pipeline:
            # It was waiting for its turn, as the newest. The one before it decides when the refusal goes out.
            self._pipeline.pop()
            return True
        if exchange.status:
            return False
        exchange.retracted = True
        exchange.end()
        self.peer.lose(broken=True)
        return True

    def _send_refusal(self) -> None:
        """Send the refusal, end our side, and leave the client a moment to read it."""
        assert self._refusal is not None
        self.transport.write(self._refusal)
        self._refusal = None
        self._end_our_side()

    def _end_our_side(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            # TLS has no half-close.
            self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Give the client time: a close is over when it has read what is buffered and, over TLS, has said goodbye."""
        self.edge.idle.discard(self)
        self.edge.lingering.add(self, self.service.loop.time())

    # -- readers that do not read, called by the transport

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self.edge.unread.discard(self)
        self._begin_next()

    def _watch_reader(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self.edge.unread.add(self, self.service.loop.time())

    # -- deadlines, called by the sweep

    def idle_overdue(self) -> None:
        if self.transport.get_write_buffer_size():
            # Its last reply is still unread after the whole keep-alive time.
            self.peer.cut()
        else:
            self.transport.close()
            self._watch_closing()

    def arrival_overdue(self, now_s: float) -> None:
        # While we do not read (a body that is passed on slowly, an earlier request that is still being answered) the
        # time is not the client's.
        paused_s = self.flow.paused_s(now_s) - self._paused_before_s
        limits = self.edge.limits
        allowed_s = limits.body_grace_s + self._parser.body_bytes / limits.least_bytes_per_s
        arriving_s = now_s - self._arriving_since_s - paused_s
        if not self.flow.read_paused and (self._parser.in_head or arriving_s >= allowed_s):
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive whole in time."))
            return
        self.edge.arriving.add(self, self.service.loop.time())

    def reader_overdue(self, now_s: float) -> None:
        limits = self.edge.limits
        taken_bytes = self._unread_bytes - self.transport.get_write_buffer_size()
        if taken_bytes < limits.least_bytes_per_s * limits.unread_s:
            self.peer.cut()
        else:
            self._watch_reader()

    def linger_overdue(self) -> None:
        if not self.transport.get_write_buffer_size():
            self.peer.cut()
            return
        # A last reply that is not read yet has the time that any other has.
        if self not in self.edge.unread:
            self._watch_reader()
        self.edge.lingering.add(self, self.service.loop.time())
