r"""One request and its reply.

Theory of operation. A client connection (connection.py) parses bytes into requests and makes one `Exchange` for each.
There is one way in:

    head --> in the table of hot paths? --yes--> its entry ------------------------\
                 \--no--> the application, in a task; its router finds the endpoint -> Endpoint.admit(exchange)

    admitted --body whole--> a turn of the loop --> Endpoint.answer --> the reply, in one write --> on_delivered
        \--refused: the reply is written at once, and the body is discarded

`admit` decides by the head alone who calls and whether the body may come. A hot path is asked as soon as the head is
parsed, so nothing is kept or started for a stranger, and no task is made before the body is whole. What the router
finds is asked one turn later, and takes the same steps in the task of the router. A reply has one of two forms:

- whole: `reply`. One write for head and body: one system call and one segment.
- in parts: `send`, the ASGI messages of an application or of what is passed through.

An exchange never looks at bytes of another one. The connection decides which exchange is answered when, and what
happens to it afterwards (`Carrier.reply_complete`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from shared.core.errors import GatewayError
from shared.http.head import scope_of, too_large_body
from shared.http.memory import SMALL_BYTES, Holder
from shared.http.reply import TLS_PIECE_BYTES, Framing, log_access, opening, send_in_pieces, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from starlette.types import ASGIApp, Message, Scope

    from shared.http.head import RequestParser
    from shared.http.memory import Memory
    from shared.http.peer import Connection, Flow
    from shared.http.reply import WholeReply
    from shared.loop.turns import TurnLimit

log = logging.getLogger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_EXTENSION: Final = "gateway.exchange"


class HotEntry(Protocol):
    """An entry of the table of hot paths."""

    def admit(self, exchange: Exchange) -> None:
        """Write a reply at once, or call `exchange.collect`."""


class Responder(Protocol):
    """An endpoint: it answers requests whose body is whole."""

    # Requests come in crowds, and each waits for its turn of the loop.
    in_turns: bool

    async def answer(self, exchange: Exchange, body: bytes) -> WholeReply | None:
        """Return the reply, a refusal included; None when it was sent in parts or the client has gone."""

    def refuse(self, exchange: Exchange, error: GatewayError) -> None:
        """Write the reply to a body that turned out not to be acceptable."""

    def client_left(self, exchange: Exchange) -> None:
        """Note that the client was gone before its request was answered."""


@dataclass(slots=True)
class Service:
    """The application and the hot paths of one address. `hot`: by method and target, as in the request line."""

    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    turns: TurnLimit
    hot: Mapping[tuple[bytes, bytes], HotEntry] = field(default_factory=dict)
    scheme: str = "http"
    access_log: bool = False
    memory: Memory | None = None
    # Open connections, and requests under way: stopping the server waits for these.
    connections: set[Any] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Carrier(Protocol):
    """The client connection, as far as an exchange uses it."""

    service: Service
    transport: asyncio.Transport
    flow: Flow
    peer: Connection
    client: tuple[str, int] | None

    def reply_complete(self) -> None:
        """Go on after the last byte of a reply was written: that of the exchange that is being answered."""


class Exchange(Holder):
    """One request and its reply.

    `headers` as a mapping and `header_list` as they came; names are in lower case. The router sets `path_params`.
    """

    path_params: Mapping[str, str] = MappingProxyType({})
    # What came after the head is no body: nothing may be replied.
    retracted = False
    # Of the reply, once its head is written.
    status = 0
    complete = False
    _responder: Responder | None = None
    _limit_bytes: int | None = None
    # The last part of the body was received.
    _body_taken = False
    # It has entered the turns of the loop, which it does once: a request without a body is whole from the beginning.
    _entered = False
    _task: asyncio.Task[None] | None = None
    _news: asyncio.Event | None = None
    _framing: Framing | None = None

    def __init__(self, carrier: Carrier, head: RequestParser, *, keep_alive: bool) -> None:
        """Take over the head that the parser holds now."""
        self._carrier = carrier
        self._memory = carrier.service.memory
        self.peer = carrier.peer
        self.method = head.method
        self._url = head.url
        self._version = head.version
        self.headers = head.fields
        self.header_list = head.headers
        self.is_chunked = head.is_chunked
        self.expects_continue = head.expects_continue
        self.body_is_whole = not head.has_body
        self.keep_alive = keep_alive
        self._parts: list[bytes] = []

    # -- the request, for endpoints and handlers

    @property
    def path(self) -> str:
        return self._url.decode("ascii")

    @property
    def gone(self) -> bool:
        """Return whether there is nobody to reply to; known before the transport reports the end."""
        return self.retracted or not self.peer.connected

    def scope(self) -> Scope:
        """Return ASGI's description of the request. Raises httptools' error when the target is no URL."""
        scope = scope_of(self.method, self._url, self._version, self.header_list)
        scope["client"] = self._carrier.client
        scope["scheme"] = self._carrier.service.scheme
        scope["extensions"] = {_EXTENSION: self}
        return scope

    async def receive(self) -> Message:
        """Return ASGI's next message: more of the body, or that the client has gone or has its reply."""
        # The part before was held until now, by whoever passes it on.
        self._count(self._unread_bytes if self._unread_bytes > SMALL_BYTES else 0)
        self._ask_for_body()
        while not self.gone and not self.complete:
            if self._parts or (self.body_is_whole and not self._body_taken):
                body, self._parts, self._unread_bytes = self.body, [], 0
                # Whoever asks again after the last part waits for the end.
                self._body_taken = self.body_is_whole
                return {"type": "http.request", "body": body, "more_body": not self.body_is_whole}
            await self._wait()
        return {"type": "http.disconnect"}

    # -- its course

    def begin(self) -> None:
        """Start what answers it. Called when the exchanges before it on the connection are complete."""
        service = self._carrier.service
        entry = service.hot.get((self.method, self._url))
        if entry is not None:
            entry.admit(self)
        else:
            # A target that is no URL is raised now, to whoever parses.
            self._start(service.app, self.scope())

    def collect(self, responder: Responder, limit_bytes: int | None) -> None:
        """Have the request answered by `responder`, with a whole body up to the limit; None leaves it to `receive`."""
        self._responder = responder
        self._limit_bytes = limit_bytes
        if limit_bytes is None:
            return
        self._ask_for_body()
        if self._body_bytes > limit_bytes:
            self._refuse(too_large_body(limit_bytes))
        elif self._task is None and self.body_is_whole:
            self.end_body()
        else:
            self._hold_body()

    async def respond(self) -> None:
        """Answer what was collected, in the task of the router that has found the responder."""
        responder = self._responder
        if responder is None:
            return
        while not (self.body_is_whole or self._limit_bytes is None or self.complete or self.gone):
            await self._wait()
        if self.complete:
            return
        if self.gone:
            responder.client_left(self)
            return
        if responder.in_turns:
            await self._carrier.service.turns.wait(self.caller.digest)
        await self._answer(responder)

    def read_ahead(self, size_bytes: int) -> int:
        """Note a read, and return how many bytes nobody has asked for yet, counted on the wire."""
        if self.complete:
            return 0
        if self._limit_bytes is not None:
            self._hold_body()
            return 0
        self._unread_bytes += size_bytes
        if self._responder is not None:
            self._count(self._held_bytes + size_bytes)
        return self._unread_bytes

    def add(self, part: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(part)
        self._body_bytes += len(part)
        if self._limit_bytes is not None and self._body_bytes > self._limit_bytes:
            self._refuse(too_large_body(self._limit_bytes))
        if self._news is not None:
            self._news.set()

    def end_body(self) -> None:
        """Take note that the body is whole."""
        self.body_is_whole = True
        if self._limit_bytes is not None:
            self._hold_body()
        if self._news is not None:
            self._news.set()
        if self._task is None and self._responder is not None and not self._entered:
            self._entered = True
            self._carrier.service.turns.enter(self.caller.digest, self._start)

    def end(self) -> None:
        """Take note that the connection has ended, or what came after the head is no body: see `retracted`."""
        if self._news is not None:
            self._news.set()
        if self._task is None and self._responder is not None and not self.complete:
            self._responder.client_left(self)
            self._responder = None
            self._give_up()

    def _hold_body(self) -> None:
        try:
            self._hold(self._body_bytes)
        except GatewayError as error:
            self._refuse(error)

    def _refuse(self, error: GatewayError) -> None:
        """Reply to a body that may not come any further; the rest of it is discarded."""
        responder, self._responder = self._responder, None
        self._give_up()
        if responder is not None:
            responder.refuse(self, error)

    def _ask_for_body(self) -> None:
        if self.expects_continue and not self._carrier.transport.is_closing():
            self._carrier.transport.write(_CONTINUE)
        self.expects_continue = False
        if not self.body_is_whole and self._carrier.flow.read_paused:
            self._carrier.flow.resume_reading()

    async def _wait(self) -> None:
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()
        self._news.clear()

    # -- its task

    def _start(self, app: ASGIApp | None = None, scope: Scope | None = None) -> bool:
        """Make the task that answers; return whether there is still somebody to answer."""
        if self.gone:
            return False
        service = self._carrier.service
        self._task = task = service.loop.create_task(self._run(app, scope))
        service.tasks.add(task)
        return True

    async def _run(self, app: ASGIApp | None, scope: Scope | None) -> None:
        """Run `app`, or the responder of a hot path. Whatever breaks, the client does not wait for its reply."""
        try:
            if app is not None and scope is not None:
                await app(scope, self.receive, self.send)
            elif self._responder is not None:
                await self._answer(self._responder)
            if not self.complete and not self.gone:
                self._fail("the application ended without a whole reply", None)
        except Exception as error:
            self._fail("the application failed", error)
        except BaseException:
            # The server stops.
            self._carrier.transport.close()
            raise
        finally:
            self._give_up()
            if self._task is not None:
                self._carrier.service.tasks.discard(self._task)

    def _fail(self, what: str, error: Exception | None) -> None:
        log.error(what, exc_info=error, extra={"path": self.path})
        if self.status:
            self._carrier.transport.close()
            return
        self.keep_alive = False
        self.reply(500, b"text/plain; charset=utf-8", b"Internal Server Error")

    async def _answer(self, responder: Responder) -> None:
        # Without a limit the body is left to `receive`.
        reply = await responder.answer(self, self.body if self._limit_bytes is not None else b"")
        if reply is None or len(reply.body) <= SMALL_BYTES:
            # A connection keeps its last exchange until the next one: thousands that are idle would keep their prompts.
            self._give_up()
        if self._carrier.flow.write_paused:
            await self._drain(self._carrier.flow, self._carrier.transport)
        if reply is None:
            return
        if self._carrier.service.scheme == "https" and len(reply.body) > TLS_PIECE_BYTES:
            await send_in_pieces(self.send, reply)
        else:
            self.reply(reply.status, reply.content_type, reply.body)
        waits = self._held_bytes or reply.on_delivered is not None
        if waits and self.complete and await self.peer.drained() and reply.on_delivered is not None:
            reply.on_delivered()

    # -- its reply

    def reply(self, status: int, content_type: bytes, body: bytes | memoryview) -> None:
        """Write a whole reply. Its content type is our own: nothing of a client or an upstream is in it."""
        if self.gone:
            return
        head = b"%b%d\r\n%b\r\n" % (opening(status, content_type), len(body), self._begin_reply(status))
        write_whole(self._carrier.transport, head, b"" if self.method == b"HEAD" else body)
        self._complete()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Write one of ASGI's messages. Raises `RuntimeError` for one that may not follow the last."""
        if self._carrier.flow.write_paused and not self.gone:
            await self._drain(self._carrier.flow, self._carrier.transport)
        if self.gone:
            return
        framing = self._framing
        if message["type"] != ("http.response.body" if framing else "http.response.start") or self.complete:
            raise RuntimeError(f"an application sent {message['type']!r} out of order")
        if framing is None:
            status, headers = message["status"], message.get("headers", ())
            is_head_only, knows_chunks = self.method == b"HEAD", self._version == "1.1"
            framing = Framing(status, headers, is_head_only=is_head_only, knows_chunks=knows_chunks)
            if framing.closes:
                self.keep_alive = False
            self._carrier.transport.write(b"%b%b\r\n" % (framing.head, self._begin_reply(status)))
            self._framing = framing
            return
        is_last = not message.get("more_body", False)
        if framed := framing.frame(message.get("body", b""), is_last=is_last):
            self._carrier.transport.write(framed)
        if is_last:
            self._complete()

    def _begin_reply(self, status: int) -> bytes:
        """Note that a reply begins; return the header lines that say what becomes of the connection."""
        if self.status:
            raise RuntimeError("this request was already answered")
        self.status = status
        if (self.is_chunked or self.expects_continue) and not self.body_is_whole:
            # To find the end of a chunked body it would have to be parsed. And nobody can tell whether the client still
            # sends a body that it has only asked about.
            self.keep_alive = False
        carrier = self._carrier
        if carrier.service.access_log:
            log_access(self.scope(), status)
        return b"" if self.keep_alive else b"connection: close\r\n"

    def _complete(self) -> None:
        self.complete = True
        if self._news is not None:
            self._news.set()
        self._carrier.reply_complete()


def exchange_in(scope: Scope) -> Exchange:
    """Return the exchange that an ASGI scope was made for."""
    found: Exchange = scope["extensions"][_EXTENSION]
    return found
