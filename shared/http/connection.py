"""uvicorn's httptools protocol, with the bounds that it lacks.

uvicorn runs the application and sends what it says. What is ours:

- **Limits while parsing.** httptools keeps a header to itself until the next one begins, so besides counting what it
  hands over we bound what it swallows without handing anything over.
- **Framing.** httptools refuses most of what smuggles (Content-Length with Transfer-Encoding, repeated lengths, bare
  LF, folded lines). It lets pass: codings before `chunked`, a coding that it refuses only after the application was
  started, trailers (which uvicorn appends to the headers of the running request), HTTP/0.9 and 2.0, and the body of a
  request that asks for an upgrade, which it then reads as the next request.
- **Deadlines.** See deadlines.py. They replace uvicorn's keep-alive timer, which outlives a connection that was reset.
- **Refusals** are JSON, wait for their turn when an earlier request is still being answered, and are followed by a
  lingering close so that the client can read them. Nobody logs them.
- **Direct requests.** Those of the hot routes do without ASGI: see direct.py.

A request is in one phase at a time:

    BETWEEN --first byte--> HEAD --headers whole--> BODY --whole--> BETWEEN
                              \\----------- refused -----------> REFUSED (input is discarded until the end)
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.config import KIB
from shared.http import head
from shared.http.exchange import WHOLE_REPLY, DirectCycle, GatewayCycle, write_reply
from shared.http.flow import TimedFlow
from shared.http.head import Refusal
from shared.http.peer import EXTENSION, SocketConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from starlette.types import Scope

    from shared.http.edge import Edge
    from shared.http.exchange import Direct, Standing
    from shared.loop.turns import TurnLimit

TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
# Names that decide something while the headers still arrive.
EXPECT = b"expect"
TRANSFER_ENCODING = b"transfer-encoding"
CONTENT_LENGTH = b"content-length"
DECISIVE = frozenset({EXPECT, TRANSFER_ENCODING, CONTENT_LENGTH})
# ": " and the line's end.
HEADER_OVERHEAD_BYTES = 4
# A length of so many is too long in any case, and as a number dear to read.
_LENGTH_DIGITS = 10
# A small request, most of them with all of their body.
_EARLY_BYTES = 16 * KIB
# What the loop reads at once.
_LATER_BYTES = 256 * KIB
# What transports begin with.
_HIGH_WATER_BYTES = 64 * KIB
# What uvicorn makes anew for each connection.
_OWN = frozenset({"parser", "pipeline"})


class Ended(Exception):
    """The last reply was given: what the client has sent behind that request is no request any more."""


class Phase(Enum):
    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"
    REFUSED = "refused"


# To look a member up costs five times as much as a name of the module's, and these are looked at for each header.
_BETWEEN, _HEAD, _BODY, _REFUSED = Phase


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. Its class is made by `protocol_class`, which sets `edge`, `direct` and `lane`."""

    edge: ClassVar[Edge]
    direct: ClassVar[Mapping[tuple[bytes, bytes], Direct]]
    standing: ClassVar[Mapping[tuple[bytes, bytes], Standing]]
    lane: ClassVar[TurnLimit | None]
    # What uvicorn sets in each instance, and is the same in all.
    _is_common_known: ClassVar[bool] = False

    # Of a connection on which nothing has happened.
    cycle: GatewayCycle | DirectCycle | None = None  # type: ignore[assignment]
    # Of the connection; None where uvloop has to be asked for it, which costs an object and a system call.
    descriptor: int | None = None
    _phase = _BETWEEN
    _refusal: bytes | None = None
    _head_bytes = 0
    _body_bytes = 0
    _has_body = False
    _length: bytes | None = None
    _is_small_read = False
    # Its last reply was given before the body of its request was whole.
    _ends = False
    # Whether each header is to be looked at: in a head that may become too long, and in a trailer.
    _looks = True
    _at_once = 0
    _discarded_bytes = 0
    _arriving_since_s = 0.0
    _paused_before_s = 0.0
    _progress = (0, 0, 0)
    _quiet_bytes = 0
    _unread_bytes = 0

    # -- the connection

    def __init__(self, *arguments: Any, **named: Any) -> None:
        if self._is_common_known:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.pipeline = deque()
            return
        super().__init__(*arguments, **named)
        # It looks up two loggers and sets thirty attributes for each connection, at the price of parsing a request.
        # The class belongs to one server (`protocol_class`): what is no connection's own moves there.
        for name in vars(self).keys() - _OWN:
            value = vars(self).pop(name)
            # A function (the application may be one) would become a method.
            setattr(type(self), name, staticmethod(value) if hasattr(value, "__get__") else value)
        type(self)._is_common_known = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        if self.access_log:
            super().connection_made(transport)
        else:
            # uvicorn asks the kernel for both addresses, which nothing but an access log shows.
            self.connections.add(self)
            self.transport = transport
            self.scheme = "https" if self.config.is_ssl else "http"
        high_water_bytes = self.edge.limits.write_buffer_bytes
        if high_water_bytes != _HIGH_WATER_BYTES:
            transport.set_write_buffer_limits(high=high_water_bytes)
        self.flow: TimedFlow = TimedFlow(transport, self.loop.time)
        self.connection = SocketConnection(transport, self.flow, high_water_bytes)
        self.edge.open.add(self)
        self.edge.watch(self.edge.idle, self, self.loop)
        if self.scheme == "http":
            self._read_early()

    def _read_early(self) -> None:
        """A new connection's request has mostly come with it. To wait until the loop says so costs a turn of it, which
        takes tens of milliseconds when the machine is busy: half the time of a short request.
        """
        descriptor = self.descriptor
        try:
            if descriptor is None:
                connected: socket.socket | None = self.transport.get_extra_info("socket")
                if connected is None:
                    return
                descriptor = connected.fileno()
            data = os.read(descriptor, _EARLY_BYTES)
        except OSError:
            # Not here yet; or broken, which the loop's own read finds out too.
            return
        if not data:
            # The loop's own read meets the end again.
            return
        try:
            self.data_received(data)
        except BaseException:
            # uvloop ends a connection whose read fails, but not one whose beginning does.
            self._cut()
            raise
        if self.flow.read_paused:
            self.loop.call_soon(self._pause_again)
        elif len(data) == _EARLY_BYTES and self.transport.is_closing():
            # Closed over what is unread, the connection would be reset, and the last reply might be lost with it.
            with suppress(OSError):
                os.read(descriptor, _LATER_BYTES)

    def _pause_again(self) -> None:
        """uvloop has begun to read after `_read_early` had paused it."""
        if self.flow.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.forget(self)
        self.connection.lose(broken=exc is not None)
        self.connections.discard(self)
        if self.cycle is not None:
            self.cycle.end()
            # It knows us: garbage in a circle costs a third of a connection to find.
            self.cycle = None
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
        # It holds our methods: a cycle for each connection.
        self.parser = None  # type: ignore[assignment]
        self.connection.closed()

    def eof_received(self) -> None:
        self.connection.lose(broken=True)

    def shutdown(self) -> None:
        """The server is stopping. A request whose head is on its way is still answered."""
        if self._phase is not _HEAD:
            super().shutdown()
            if self.transport.is_closing():
                self._watch_closing()

    def announce_close(self) -> None:
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # -- bytes in

    def data_received(self, data: bytes) -> None:
        if self._phase is _REFUSED:
            self._discard(len(data))
            return
        self._is_small_read = len(data) <= self.edge.small_read_bytes
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if self.transport.is_closing():
                # Nothing is left to be told.
                self._phase = _REFUSED
            else:
                self._refuse(head.refusal_of(error))
        else:
            if self._phase is not _BETWEEN:
                self._note_arrival(len(data))

    def _feed(self, data: bytes | memoryview) -> None:
        """Feeds the parser; a request for an upgrade is an ordinary request, and what follows it is the next one."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            else:
                return

    def _note_arrival(self, size_bytes: int) -> None:
        """A request that is not whole after this read: starts its deadline, bounds what the parser holds of it."""
        if self not in self.edge.arriving:
            self._look_from_now_on()
            self._arriving_since_s = self.loop.time()
            self._paused_before_s = self.flow.paused_s(self._arriving_since_s)
            self.edge.watch(self.edge.arriving, self, self.loop)
        progress = (len(self.url), len(self.headers), self._body_bytes)
        if progress != self._progress:
            self._progress = progress
            self._quiet_bytes = 0
            return
        self._quiet_bytes += size_bytes
        if self._quiet_bytes > self.edge.limits.head_bytes:
            self._refuse(self._too_large())

    def _discard(self, size_bytes: int) -> None:
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > self.edge.limits.discard_bytes:
            self._cut()

    # -- parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.edge.idle.discard(self)
        self._phase = _HEAD
        self._looks = not self._is_small_read
        self._head_bytes = 0
        self._has_body = False
        self._length = None
        # What the last request had come to says nothing of this one, even where the figures are equal.
        self._progress = (0, 0, 0)
        self._quiet_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self.edge.limits.url_bytes:
            limit = self.edge.limits.url_bytes
            raise Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, f"The URL is longer than {limit} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._looks and not self._takes(name, value):
            return
        name = name.lower()
        if name in DECISIVE:
            self._decisive_header(name, value)
        self.headers.append((name, value))

    def _takes(self, name: bytes, value: bytes) -> bool:
        """Raises `Refusal` when there is too much of a head."""
        size_bytes = len(name) + len(value) + HEADER_OVERHEAD_BYTES
        self._head_bytes += size_bytes
        limits = self.edge.limits
        if size_bytes > limits.header_bytes or self._head_bytes > limits.head_bytes:
            raise self._too_large()
        if self._phase is _BODY:
            # A trailer: nothing here reads one, and it must not change the headers of a request that already runs.
            return False
        if len(self.headers) == limits.header_count:
            raise self._too_large()
        return True

    def _look_from_now_on(self) -> None:
        """A head of which one small read was the beginning."""
        if not self._looks and self._phase is _HEAD:
            self._looks = True
            self._head_bytes = sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in self.headers)

    def _decisive_header(self, name: bytes, value: bytes) -> None:
        if name == EXPECT:
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == CONTENT_LENGTH:
            self._has_body = value.strip(b"0") != b""
            self._length = value
        else:
            self._has_body = True
            if value.lower() != b"chunked":
                raise Refusal(HTTPStatus.BAD_REQUEST, "The only Transfer-Encoding that is taken is chunked.")

    def _too_large(self) -> Refusal:
        limits = self.edge.limits
        bounds = f"{limits.header_count} headers, {limits.header_bytes} bytes in one and {limits.head_bytes} in all"
        return Refusal(TOO_LARGE, f"The request's headers are too large: at most {bounds}.")

    def on_headers_complete(self) -> None:
        version = self._check_head()
        method = self.parser.get_method()
        keep_alive = version != "1.0" and not self.edge.draining and self.parser.should_keep_alive()
        is_first = self.cycle is None or self.cycle.response_complete
        endpoint = self.direct.get((method, self.url)) if is_first else None
        if endpoint is not None and self._is_plain(version):
            self._begin_body()
            self.cycle = direct = DirectCycle(self, endpoint, self.url, self.headers, keep_alive)
            direct.admit()
            return
        standing = self.standing.get((method, self.url)) if is_first else None
        if standing is not None and self._is_bare():
            self.note_at_once()
            self._begin_body()
            # Over before it has begun: nothing is left to be awaited, broken off or told.
            self.cycle = None
            write_reply(self.transport, standing.reply(), keep_alive=keep_alive)
            if not keep_alive:
                self.transport.close()
            self.on_response_complete()
            return
        scope = self.scope_of(method, version, self.url, self.headers)
        self._begin_body()
        self.cycle = cycle = self.as_asgi(scope, keep_alive=keep_alive)
        if is_first:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def note_at_once(self) -> None:
        """One more request is answered as it is parsed. A read may hold thousands, and in one turn the loop reads on
        and on: there are no more of them in a turn than may wait for theirs.
        """
        if not self._at_once:
            self.loop.call_soon(self._renew)
        self._at_once += 1
        if self._at_once > self.edge.limits.pipelined:
            raise self._too_many()

    def _renew(self) -> None:
        """A new turn."""
        self._at_once = 0

    def _begin_body(self) -> None:
        self._phase = _BODY
        self._looks = True
        self._body_bytes = 0

    def scope_of(self, method: bytes, version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> Scope:
        """ASGI's. Raises httptools' error when `url` is none."""
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": headers,
            "state": self.app_state.copy(),
            "extensions": {EXTENSION: self.connection, WHOLE_REPLY: {}},
        }
        head.place(scope, url)  # type: ignore[arg-type] # a typed dict
        return scope

    def _is_plain(self, version: str) -> bool:
        """A body of one read, whose length is told, and nothing to be asked or noted about it."""
        length = self._length
        return (
            version == "1.1"
            and length is not None
            and len(length) < _LENGTH_DIGITS
            and 0 < int(length) <= self.edge.limits.unread_body_bytes
            and not self.expect_100_continue
            and self.scheme == "http"
            and not self.access_log
        )

    def _is_bare(self) -> bool:
        """A head and nothing else, from a client that reads and asks nothing about a body."""
        return (
            not self._has_body and not self.expect_100_continue and not self.flow.write_paused and not self.access_log
        )

    def as_asgi(self, scope: Scope, *, keep_alive: bool) -> GatewayCycle:
        """The request, for an application."""
        return GatewayCycle(
            scope,
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            asyncio.Event(),
            self.expect_100_continue,
            keep_alive,
            self.on_response_complete,
            end_within_body=self.end_within_body,
        )

    def _check_head(self) -> str:
        """The request's HTTP version, when nothing speaks against its head."""
        if len(self.headers) > self.edge.limits.header_count:
            raise self._too_large()
        version: str = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refusal(HTTPStatus.BAD_REQUEST, f"The HTTP version is {version}, it must be 1.1 or 1.0.")
        if version == "1.0":
            # Interim replies came with 1.1: an older client would take one for the reply.
            self.expect_100_continue = False
        if self._has_body and self.parser.should_upgrade():
            raise Refusal(HTTPStatus.BAD_REQUEST, "A request with a body cannot ask for an upgrade of the protocol.")
        if len(self.pipeline) >= self.edge.limits.pipelined:
            raise self._too_many()
        return version

    def _too_many(self) -> Refusal:
        limit = self.edge.limits.pipelined
        return Refusal(HTTPStatus.BAD_REQUEST, f"More than {limit} pipelined requests wait for their turn.")

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        assert cycle is not None
        self._body_bytes += len(body)
        if cycle.response_complete:
            self._discard(len(body))
            return
        cycle.add(body)
        if cycle.unread_bytes > self.edge.limits.unread_body_bytes:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        cycle = self.cycle
        self._phase = _BETWEEN
        self.edge.arriving.discard(self)
        if cycle is None or cycle.response_complete:
            if self._ends or self.transport.is_closing():
                self.transport.close()
                raise Ended
            self._wait_for_next()
            return
        cycle.whole()
        if not self.pipeline:
            # Paused reading is resumed by the next receive(), which a handler that has its whole body does not call: a
            # client that leaves would not be noticed.
            self._read_on()

    # -- after a reply

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._watch_closing()
            return
        self._read_on()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._reply_and_close(self._refusal)
        elif self._phase is _BETWEEN:
            self._wait_for_next()
        elif self._phase is _BODY and self.expect_100_continue:
            # Nobody can tell whether the client will still send the body that it asked about.
            self.transport.close()
            self._watch_closing()

    def end_within_body(self) -> None:
        """The last reply is written, and more of its request's body may come.

        To close over bytes that are still unread is to reset the connection, and the reply may be lost with it.
        """
        self._ends = True
        self._end_our_side()

    def _read_on(self) -> None:
        if self.flow.read_paused:
            self.flow.resume_reading()

    def _wait_for_next(self) -> None:
        self._discarded_bytes = 0
        self.edge.watch(self.edge.idle, self, self.loop)

    # -- refusing

    def _refuse(self, reason: Refusal) -> None:
        """Answers what cannot be understood any further; whatever else arrives is thrown away."""
        phase, self._phase = self._phase, _REFUSED
        self.edge.arriving.discard(self)
        self.edge.idle.discard(self)
        if phase is _BODY and not self._retract():
            self._cut()
            return
        self._refusal = head.encode(reason)
        if self.cycle is None or self.cycle.response_complete or self.cycle.disconnected:
            self._reply_and_close(self._refusal)

    def _retract(self) -> bool:
        """Takes the request whose body is broken back from the application; whether a refusal can still be sent."""
        if self.pipeline:
            # It was waiting for its turn: the newest of the queue. The one before it decides when the reply goes out.
            self.pipeline.popleft()
            return True
        assert self.cycle is not None
        if self.cycle.response_started:
            return False
        self.cycle.retract()
        self.connection.lose(broken=True)
        return True

    def _reply_and_close(self, reply: bytes) -> None:
        """Sends the refusal, ends our side, and leaves the client a moment to read it."""
        self._refusal = None
        self.transport.write(reply)
        self._end_our_side()

    def _end_our_side(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            # TLS has no half-close.
            self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A close is over when the client has read what is buffered and, over TLS, has said goodbye."""
        self.edge.idle.discard(self)
        self.edge.watch(self.edge.lingering, self, self.loop)

    def _cut(self) -> None:
        """Ends the connection without its last bytes. What is unread was not delivered: abort alone does not say."""
        self.connection.lose(broken=True)
        self.transport.abort()

    # -- flow control: readers that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.edge.unread.discard(self)

    def _watch_reader(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self.edge.watch(self.edge.unread, self, self.loop)

    # -- deadlines, called by the sweep

    def idle_overdue(self) -> None:
        if self.transport.get_write_buffer_size():
            # Its last reply is still unread after the whole keep-alive time.
            self._cut()
        else:
            self.transport.close()
            self._watch_closing()

    def arrival_overdue(self, now_s: float) -> None:
        # While we do not read (a body that is passed on slowly, an earlier request that is still being answered) the
        # time is not the client's.
        paused_s = self.flow.paused_s(now_s) - self._paused_before_s
        arriving_s = now_s - self._arriving_since_s - paused_s
        if not self.flow.read_paused and (self._phase is _HEAD or arriving_s >= self._body_allowed_s()):
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive whole in time."))
            return
        self.edge.watch(self.edge.arriving, self, self.loop)

    def _body_allowed_s(self) -> float:
        limits = self.edge.limits
        return limits.body_grace_s + self._body_bytes / limits.least_bytes_per_s

    def reader_overdue(self, now_s: float) -> None:
        limits = self.edge.limits
        taken_bytes = self._unread_bytes - self.transport.get_write_buffer_size()
        if taken_bytes < limits.least_bytes_per_s * limits.unread_s:
            self._cut()
        else:
            self._watch_reader()

    def linger_overdue(self) -> None:
        if not self.transport.get_write_buffer_size():
            self._cut()
            return
        # A last reply that is not read yet has the time that any other has.
        if self not in self.edge.unread:
            self._watch_reader()
        self.edge.watch(self.edge.lingering, self, self.loop)


def protocol_class(
    edge: Edge,
    direct: Mapping[tuple[bytes, bytes], Direct] | None = None,
    standing: Mapping[tuple[bytes, bytes], Standing] | None = None,
    lane: TurnLimit | None = None,
) -> type[GatewayProtocol]:
    """The protocol bound to `edge`: uvicorn makes the instances, and has no way to hand anything over.

    `direct`: what is answered without ASGI, by method and target, in its turn of `lane`; `standing`: what is answered
    as soon as it is read. A class serves one server.
    """
    bound = {"edge": edge, "direct": direct or {}, "standing": standing or {}, "lane": lane}
    return type("BoundProtocol", (GatewayProtocol,), bound)
