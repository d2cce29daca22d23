"""The client's connection as a handler may see it.

`connection(scope)` finds it in an ASGI scope. A long poll registers a callback instead of a task that awaits
`receive()`, so that 10,000 held polls are 10,000 callbacks and not 10,000 more tasks.

What can be known: that the kernel has taken the last byte, and that until then neither an end nor a reset of the
client's side had arrived. What cannot: whether the client's kernel has acknowledged those bytes, whether its program
has read them, or that a machine lost its power a second ago. Over TLS the bytes are handed to the record layer, whose
own transport may still hold up to its high-water mark; and the client's goodbye may be seen before our last byte is
known to be out, so that a reply which closes the connection can count as not delivered. That errs on the side of
keeping the result.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from uvicorn.protocols.http.flow_control import FlowControl

EXTENSION = "gateway.connection"


class Connection:
    """One client connection. This base serves where there is no socket (an ASGI test client)."""

    __slots__ = ("_lost_callbacks", "broken", "connected")

    def __init__(self) -> None:
        self.connected = True
        # The client ended it, or was cut off: bytes may not have reached it. Never set by our own orderly close.
        self.broken = False
        self._lost_callbacks: list[Callable[[], None]] = []

    def add_lost_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, synchronously, when the connection is gone: at once if it already is.

        The callback must be short and must not raise.
        """
        if self.connected:
            self._lost_callbacks.append(callback)
        else:
            callback()

    def remove_lost_callback(self, callback: Callable[[], None]) -> None:
        """Takes back one registration of `callback`; does nothing when there is none (any more)."""
        if callback in self._lost_callbacks:
            self._lost_callbacks.remove(callback)

    def lose(self, *, broken: bool) -> None:
        """Marks the connection as gone and tells those who asked. The first call decides."""
        if not self.connected:
            return
        self.connected = False
        self.broken = broken
        callbacks, self._lost_callbacks = self._lost_callbacks, []
        for callback in callbacks:
            callback()

    async def cut(self) -> None:
        """Ends the connection at once: its reply can be neither finished nor taken back."""
        self.lose(broken=True)

    async def drained(self) -> bool:
        """Waits until every byte written so far is out of our hands; whether the client was there to take them."""
        return not self.broken


class SocketConnection(Connection):
    """A connection with a transport beneath it."""

    __slots__ = ("_closed", "_flow", "_high_water_bytes", "_is_closed", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, high_water_bytes: int) -> None:
        super().__init__()
        self._transport = transport
        self._flow = flow
        self._high_water_bytes = high_water_bytes
        self._is_closed = False
        self._closed: asyncio.Future[None] | None = None

    async def cut(self) -> None:
        await super().cut()
        self._transport.abort()
        # uvicorn must have heard of it when its application returns, or it reports a reply that was forgotten.
        if not self._is_closed:
            self._closed = asyncio.get_running_loop().create_future()
            await self._closed

    def closed(self) -> None:
        """The transport has ended, and uvicorn knows."""
        self._is_closed = True
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

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
        """Lowers the marks to zero for once, so that the transport reports when its buffer is empty."""
        self._transport.set_write_buffer_limits(high=0)
        try:
            # connection_lost sets this event, too.
            await self._flow.drain()
        finally:
            if self.connected:
                self._transport.set_write_buffer_limits(high=self._high_water_bytes)


def connection(scope: MutableMapping[str, Any]) -> Connection:
    """The connection that `scope` came in on; without our protocol beneath, one that stays connected."""
    extensions: dict[str, Any] = scope.setdefault("extensions", {})
    found = extensions.get(EXTENSION)
    if not isinstance(found, Connection):
        found = extensions[EXTENSION] = Connection()
    return found
