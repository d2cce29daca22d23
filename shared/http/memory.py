"""What one request and its reply hold in memory, counted as their caller's.

A body counts from its first read until its handler has answered, and a reply until the client's kernel has taken its
last byte. What is small is not counted: the request itself, its task and its connection cost more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from shared.config import KIB
from shared.core.callers import ANONYMOUS

if TYPE_CHECKING:
    import asyncio

    from shared.core.callers import Caller
    from shared.http.peer import Flow

SMALL_BYTES: Final = 4 * KIB


class Memory(Protocol):
    """Counts what all requests hold, by their callers."""

    def require_memory(self, caller: Caller, held_bytes: int, more_bytes: int) -> None:
        """Raise `GatewayError` if a request that holds `held_bytes` may not hold `more_bytes` beside them."""

    def count_memory(self, caller: Caller, more_bytes: int) -> None:
        """Count `more_bytes`, which are negative when they are given back."""


class Holder:
    """Parts of a body, and how many bytes are held. `caller` is set by who admits the request."""

    caller: Caller = ANONYMOUS
    # The body so far, and those of its bytes that nobody has asked for, counted on the wire.
    _body_bytes = 0
    _unread_bytes = 0
    _held_bytes = 0
    _parts: list[bytes]
    # None where every body and reply is small: the admin address.
    _memory: Memory | None

    @property
    def body(self) -> bytes:
        """What has arrived of the body."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def hold_reply(self, size_bytes: int) -> None:
        """Count a reply instead of the body. Raises `GatewayError` if its caller holds too much already."""
        if size_bytes > SMALL_BYTES or self._held_bytes:
            self._give_up()
            self._hold(size_bytes)

    def _hold(self, size_bytes: int) -> None:
        """Count what is held now. Raises `GatewayError` if it may not be."""
        if size_bytes > SMALL_BYTES and self._memory is not None:
            self._memory.require_memory(self.caller, self._held_bytes, size_bytes - self._held_bytes)
            self._count(size_bytes)

    def _count(self, size_bytes: int) -> None:
        """Count what is held now. Nothing is refused: what is passed through is bounded by pausing."""
        if size_bytes != self._held_bytes and self._memory is not None:
            self._memory.count_memory(self.caller, size_bytes - self._held_bytes)
            self._held_bytes = size_bytes

    async def _drain(self, flow: Flow, transport: asyncio.Transport) -> None:
        """Wait until the client has read enough. What waits for it counts meanwhile, beside all that arrives."""
        memory, unread_bytes = self._memory, transport.get_write_buffer_size()
        if memory is None or not unread_bytes:
            await flow.drain()
            return
        memory.count_memory(self.caller, unread_bytes)
        try:
            await flow.drain()
        finally:
            memory.count_memory(self.caller, -unread_bytes)

    def _give_up(self) -> None:
        """Hold nothing any more."""
        self._parts.clear()
        self._count(0)
