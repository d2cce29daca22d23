"""The client behind a connection, as a handler may see it: whether it is there, and takes what it is sent.

A long poll registers a callback instead of a task that awaits `receive()`, so that 10,000 held polls are 10,000
callbacks and not 10,000 more tasks.

What can be known: that the kernel has taken the last byte, and that until then neither an end nor a reset of the
client's side had arrived. What cannot: whether the client's kernel has acknowledged those bytes, whether its program
has read them, or that a machine lost its power a second ago. Over TLS the bytes are handed to the record layer, whose
own transport may still hold up to its high-water mark; and the client's goodbye may be seen before our last byte is
known to be out, so that a reply which closes the connection can count as not delivered. That errs on the side of
keeping the result.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


class Connection:
    """One client connection. This base serves where there is no socket beneath (tests)."""

    __slots__ = ("_lost_callbacks", "broken", "connected")

    def __init__(self) -> None:
        self.connected = True
        # The client ended it, or was cut off: bytes may not have reached it. Never set by our own orderly close.
        self.broken = False
        self._lost_callbacks: list[Callable[[], None]] = []

    def add_lost_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, synchronously, when the connection is gone: at once if it already is.

        The callback must be short and must not raise.
        """
        if self.connected:
            self._lost_callbacks.append(callback)
        else:
            callback()

    def remove_lost_callback(self, callback: Callable[[], None]) -> None:
        """Remove one registration of `callback`, if there is one."""
        if callback in self._lost_callbacks:
            self._lost_callbacks.remove(callback)

    def lose(self, *, broken: bool) -> None:
        """Mark the connection as gone and call the registered callbacks. Only the first call counts."""
        if not self.connected:
            return
        self.connected = False
        self.broken = broken
        callbacks, self._lost_callbacks = self._lost_callbacks, []
        for callback in callbacks:
            callback()

    def cut(self) -> None:
        """End the connection at once. What the client has not read by now was not delivered."""
        self.lose(broken=True)

    async def drained(self) -> bool:
        """Wait until every byte written so far has been sent; return whether the client was there to take them."""
        return not self.broken


class SocketConnection(Connection):
    """A connection with a transport beneath it."""

    __slots__ = ("_flow", "_high_water_bytes", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: Flow, high_water_bytes: int) -> None:
        super().__init__()
        self._transport = transport
        self._flow = flow
        self._high_water_bytes = high_water_bytes

    def cut(self) -> None:
        super().cut()
        self._transport.abort()

    async def drained(self) -> bool:
        # uvloop writes at the end of the loop's turn, and learns of a reset by that write or in the next poll.
        await asyncio.sleep(0)
        if self.connected and self._transport.is_closing():
            # Closed by us or broken by the client: connection_lost, already scheduled, says which.
            await asyncio.sleep(0)
        if self.connected and self._transport.get_write_buffer_size():
            await self._emptied()
        return not self.broken

    async def _emptied(self) -> None:
        """Lower the marks to zero for once, so that the transport reports when its buffer is empty."""
        self._transport.set_write_buffer_limits(high=0)
        try:
            # connection_lost sets this event, too.
            await self._flow.drain()
        finally:
            if self.connected:
                self._transport.set_write_buffer_limits(high=self._high_water_bytes)


class Flow:
    """Flow control of one connection, and for how long it did not read: that time is ours, not the client's.

    `monotonic_s` is the clock of the deadlines, which is the loop's.
    """

    def __init__(self, transport: asyncio.Transport, monotonic_s: Callable[[], float]) -> None:
        self._transport = transport
        self._monotonic_s = monotonic_s
        self.read_paused = False
        self.write_paused = False
        # Made by the first that finds the client behind.
        self._writable: asyncio.Event | None = None
        self._paused_s = 0.0
        self._since_s = 0.0

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._since_s = self._monotonic_s()
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._paused_s += self._monotonic_s() - self._since_s
            self._transport.resume_reading()

    def paused_s(self, now_s: float) -> float:
        """Return how long reading was paused since the connection began."""
        return self._paused_s + (now_s - self._since_s if self.read_paused else 0.0)

    async def drain(self) -> None:
        """Wait until the client has read enough, or has gone."""
        if self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None


def read_now(transport: asyncio.Transport, descriptor: int | None, most_bytes: int) -> bytes:
    """Return what has arrived already on a connection without TLS; nothing where that is not known."""
    try:
        if descriptor is None:
            connected: socket.socket | None = transport.get_extra_info("socket")
            if connected is None:
                return b""
            descriptor = connected.fileno()
        return os.read(descriptor, most_bytes)
    except OSError:
        # Nothing yet; or broken, which the loop's own read finds out too.
        return b""
