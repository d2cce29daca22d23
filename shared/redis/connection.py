"""One connection to a Redis server: commands out, replies in order, and every pending command failed when it is lost.

All commands of one event-loop turn leave in one write, which is why a command costs only microseconds on both sides.
Commands that come before a write is answered wait for its answer, for two milliseconds at most, and leave together, as
small segments do in TCP (Nagle, RFC 896): a busy loop has a few commands in each turn, and waking the server costs it
as much as executing five of them.

A reply always belongs to the command at the head of the queue. A cancelled caller leaves its entry in the queue, and
the reply to it is dropped, so no reply ever reaches another caller.
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
# The server is up but cannot serve now: it starts, is a replica, fails over, cannot save, or has no room for clients.
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
    """Report that another node of the cluster has the key; with `asking` for this command only, as its slot moves."""

    def __init__(self, text: str) -> None:
        super().__init__("this Redis is a node of a cluster; use redis+cluster://")
        kind, _, where = text.split(" ")[:3]
        host, _, port = where.rpartition(":")
        self.asking = kind == "ASK"
        self.host = host
        self.port = int(port)


def error_of(reply: Exception) -> StoreError:
    """Return the error that a `hiredis.ReplyError` stands for; the command was not executed."""
    text = str(reply)
    if _REDIRECT.match(text):
        return Redirected(text)
    # A script's failure repeats the inner error in the middle of its own.
    if text.startswith(_FULL) or "OOM command not allowed" in text:
        return StoreFull("Redis is full (maxmemory)")
    if text.startswith(_NOT_NOW):
        return StoreUnavailable(f"Redis cannot at the moment: {text}", maybe_done=False)
    return StoreRefused(f"Redis refuses: {text}")


Argument = bytes | str | int

# An argument of this size or more goes to the transport as it is, instead of being copied into the command.
_SCATTER_FROM_BYTES: Final = 16 * 1024
# Below this, the commands of a turn are joined to one piece: a piece costs more than the copy.
_JOIN_BELOW_BYTES: Final = 64 * 1024
# The longest wait of a command for the answer to the previous write: longer than a nearby server takes.
_HELD_AT_MOST_S: Final = 0.002
_NO_REPLY: Final = object()


class RedisConnection(asyncio.Protocol):
    """A connection. `on_push` gets replies that no command waits for; `lost` gets the reason for its end."""

    def __init__(self, on_push: Callable[[Any], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_NO_REPLY)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._out: list[bytes] = []
        # An upper bound of `queued_bytes`: grows with each command, and is corrected with each write.
        self.queued_at_most = 0
        # The number of replies so far, and the number that is reached when everything written has been answered.
        self._answered = 0
        self._answered_when_free = 0
        self._held: asyncio.TimerHandle | None = None
        # The loop's time at which the first command of this turn was sent.
        self._turn_s = 0.0
        self._on_push = on_push
        # The server process, as it named itself at the login.
        self.run_id = b""
        self._probed_s: float | None = None
        self.lost: asyncio.Future[str] = self._loop.create_future()

    def __repr__(self) -> str:
        state = "lost" if self.lost.done() else "up"
        return f"<RedisConnection {state}, {len(self._pending)} pending, {self.queued_bytes} bytes queued>"

    @property
    def queued_bytes(self) -> int:
        """The bytes that the server has not taken yet."""
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return sum(map(len, self._out)) + written

    def is_full(self, max_queued_bytes: int) -> bool:
        """Return whether `max_queued_bytes` already wait for the server."""
        if self.queued_at_most >= max_queued_bytes:
            self.queued_at_most = self.queued_bytes
        return self.queued_at_most >= max_queued_bytes

    def oldest_pending_s(self) -> float | None:
        """Return the loop's time at which the command at the head of the queue was sent."""
        return self._pending[0][1] if self._pending else None

    def ask(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply. An error reply is a value too: a `hiredis.ReplyError`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.lost.done():
            future.set_exception(StoreUnavailable("the connection is gone", maybe_done=False))
            return future
        self._write(encode(arguments))
        self._pending.append((future, self._turn_s))
        return future

    def send(self, *arguments: Argument) -> None:
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
        """Ask a connection without pending commands for a sign of life; return the loop's time since when none came."""
        if self._probed_s is None:
            self._probed_s = self._loop.time()
            self.send("PING")
        return self._probed_s

    def cut(self, why: str) -> None:
        """Drop the connection now, and fail every pending command."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(why)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # always a stream's
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._probed_s = None
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NO_REPLY:
                if not self._pending:
                    if self._on_push is not None:
                        self._on_push(reply)
                    elif isinstance(reply, hiredis.ReplyError):
                        # Sent unasked, before the server closes: its number of clients is at the limit.
                        self._lose(str(reply))
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
            # After the callers that were answered have run: their next commands leave in the same write.
            self._loop.call_soon(self._flush)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection was lost: {exc}" if exc else "the server closed the connection")

    # -- internals

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
                # A caller that was cancelled meanwhile does not read it.
                future.exception()


def encode(arguments: tuple[Argument, ...]) -> Sequence[bytes]:
    """Return a command as the pieces to write; each large argument is a piece of its own, uncopied."""
    for argument in arguments:
        if isinstance(argument, bytes) and len(argument) >= _SCATTER_FROM_BYTES:
            break
    else:
        return (hiredis.pack_command(arguments),)  # type: ignore[arg-type]
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return parts
