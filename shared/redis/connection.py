"""Redis' error replies to our errors: one table, by the first word of what it says.

One connection to a Redis server: commands out, replies in order, everything pending failed when it is lost.

All commands of one event-loop turn leave in one write, which is what makes a command cost microseconds on both sides.
What comes while a write is not answered waits for its answer, for two milliseconds at most, and leaves together (as
small segments do in TCP; Nagle, RFC 896): a busy loop has a few commands in each turn, and to be woken costs the server
as much as five of them.
A reply belongs to the command at the head of the queue, always: a caller that was cancelled leaves its place in the
queue behind, and its reply is dropped when it comes. So no reply ever reaches anybody else.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import hiredis

from shared.core.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NO_SCRIPT: Final = "NOSCRIPT"
READ_ONLY: Final = "READONLY"
_REDIRECT: Final = re.compile(r"(MOVED|ASK) [0-9]+ [^ ]*:[0-9]{1,5}(?: |$)")
_FULL: Final = ("OOM",)
# The server is there, and cannot at the moment: it starts, is a replica, fails over, cannot save, has no room.
_NOT_NOW: Final = (
    "LOADING",
    "MASTERDOWN",
    READ_ONLY,
    "TRYAGAIN",
    "CLUSTERDOWN",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
    "ERR max number of clients",
)


class Redirected(StoreRefused):
    """A cluster's node answers that a key is elsewhere. `asking`: this once only, its slot is on the move."""

    def __init__(self, text: str) -> None:
        super().__init__("this Redis is a node of a cluster; use redis+cluster://")
        kind, _, where = text.split(" ")[:3]
        host, _, port = where.rpartition(":")
        self.asking = kind == "ASK"
        self.host = host
        self.port = int(port)


def error_of(reply: Exception) -> StoreError:
    """The error behind a `hiredis.ReplyError`; a command that was refused was not executed."""
    text = str(reply)
    if _REDIRECT.match(text):
        return Redirected(text)
    if text.startswith(_FULL):
        return StoreFull("Redis is full (maxmemory)")
    # A script's failure repeats the inner error in the middle of its own.
    if "OOM command not allowed" in text:
        return StoreFull("Redis is full (maxmemory)")
    if text.startswith(_NOT_NOW):
        return StoreUnavailable(f"Redis cannot at the moment: {text}", maybe_done=False)
    return StoreRefused(f"Redis refuses: {text}")


Argument = bytes | str | int

# An argument from this size on is handed to the transport as it is, instead of being copied into the command.
_SCATTER_FROM_BYTES: Final = 16 * 1024
# What a turn sends is joined to one piece below this: a piece costs more than the copy.
_JOIN_BELOW_BYTES: Final = 64 * 1024
# How long a command waits for the answer to the write before it: longer than a server nearby takes.
_HELD_AT_MOST_S: Final = 0.002
_NO_REPLY: Final = object()


class Connection(asyncio.Protocol):
    """`on_push` gets the replies that nobody asked for; `on_lost` is called once, when the connection is gone."""

    def __init__(self, on_push: Callable[[Any], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_NO_REPLY)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._out: list[bytes] = []
        # What the server has not taken yet, at most: counted with each command, and looked at with each write.
        self.queued_at_most = 0
        # How many replies there were, and how many there are when what was written has been answered.
        self._answered = 0
        self._answered_when_free = 0
        self._held: asyncio.TimerHandle | None = None
        # When the first command of this turn was sent, by the loop's clock.
        self._turn_s = 0.0
        self._on_push = on_push
        # Which server process this is, as it told at the login.
        self.run_id = b""
        self._probed_s: float | None = None
        self.lost: asyncio.Future[str] = self._loop.create_future()

    def __repr__(self) -> str:
        state = "lost" if self.lost.done() else "up"
        return f"<Connection {state}, {len(self._pending)} pending, {self.queued_bytes} bytes queued>"

    @property
    def queued_bytes(self) -> int:
        """What the server has not taken yet."""
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return sum(map(len, self._out)) + written

    def is_full(self, max_queued_bytes: int) -> bool:
        """Whether so much waits for the server already."""
        if self.queued_at_most >= max_queued_bytes:
            self.queued_at_most = self.queued_bytes
        return self.queued_at_most >= max_queued_bytes

    def oldest_pending_s(self) -> float | None:
        """The loop's time at which the command at the head of the queue was sent."""
        return self._pending[0][1] if self._pending else None

    def ask(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Send a command; the future is its reply, a `hiredis.ReplyError` as a value included."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.lost.done():
            future.set_exception(StoreUnavailable("the connection is gone", maybe_done=False))
            return future
        self._write(encode(arguments))
        self._pending.append((future, self._turn_s))
        return future

    def tell(self, *arguments: Argument) -> None:
        """Send a command whose replies are pushes (SUBSCRIBE)."""
        self._write(encode(arguments))

    def _write(self, parts: Sequence[bytes]) -> None:
        if not self._out:
            self._turn_s = self._loop.time()
            if self._answered >= self._answered_when_free:
                self._loop.call_soon(self._flush)
            else:
                self._held = self._loop.call_later(_HELD_AT_MOST_S, self._flush)
        self._out += parts
        for part in parts:
            self.queued_at_most += len(part)

    def probe(self) -> float:
        """Ask for a sign of life, where nothing is ever pending; the loop's time since when none has come."""
        if self._probed_s is None:
            self._probed_s = self._loop.time()
            self.tell("PING")
        return self._probed_s

    def cut(self, why: str) -> None:
        """Drop the connection now, with all that is pending."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(why)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._probed_s = None
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NO_REPLY:
                if not self._pending:
                    self._take_unasked(reply)
                    continue
                future, _ = self._pending.popleft()
                self._answered += 1
                if not future.done():
                    future.set_result(reply)
        except hiredis.ProtocolError as error:
            self.cut(f"the server does not speak Redis' protocol: {error}")
        if self._held is not None and self._answered >= self._answered_when_free:
            self._held.cancel()
            self._held = None
            # Behind those who were answered: what they send next leaves with it.
            self._loop.call_soon(self._flush)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection was lost: {exc}" if exc else "the server closed the connection")

    # -- inside

    def _take_unasked(self, reply: Any) -> None:
        if self._on_push is not None:
            self._on_push(reply)
        elif isinstance(reply, hiredis.ReplyError):
            # Said unasked, before closing: the number of clients is at its limit.
            self._lose(str(reply))

    def _flush(self) -> None:
        out, self._out, self._held = self._out, [], None
        transport = self._transport
        if not out or transport is None or transport.is_closing():
            return
        self._answered_when_free = self._answered + len(self._pending)
        if self.queued_at_most < _JOIN_BELOW_BYTES:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)
        self.queued_at_most = transport.get_write_buffer_size()

    def _lose(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        if self._held is not None:
            self._held.cancel()
        pending, self._pending = self._pending, deque()
        for future, _ in pending:
            if not future.done():
                future.set_exception(StoreUnavailable(why, maybe_done=True))
                # A caller that went away between sending and now does not read it.
                future.exception()


def encode(arguments: tuple[Argument, ...]) -> Sequence[bytes]:
    """A command as the pieces to write; large arguments are pieces of their own, uncopied."""
    for argument in arguments:
        if isinstance(argument, bytes) and len(argument) >= _SCATTER_FROM_BYTES:
            return _scattered(arguments)
    return (hiredis.pack_command(arguments),)  # type: ignore[arg-type]


def _scattered(arguments: tuple[Argument, ...]) -> list[bytes]:
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return parts
