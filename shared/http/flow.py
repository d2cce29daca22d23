"""Flow control of one connection, and for how long it did not read: that time is the application's, not the client's.

As uvicorn's, which makes an event for each connection. Here one is made by the first that finds the client behind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedFlow(FlowControl):
    """`monotonic_s`: the clock of the deadlines, which is the loop's."""

    def __init__(self, transport: asyncio.Transport, monotonic_s: Callable[[], float]) -> None:
        self._transport = transport
        self._monotonic_s = monotonic_s
        self.read_paused = False
        self.write_paused = False
        self._writable: asyncio.Event | None = None
        self._paused_s = 0.0
        self._since_s = 0.0

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._since_s = self._monotonic_s()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._paused_s += self._monotonic_s() - self._since_s
        super().resume_reading()

    def paused_s(self, now_s: float) -> float:
        """How long reading was paused since the connection began."""
        return self._paused_s + (now_s - self._since_s if self.read_paused else 0.0)

    async def drain(self) -> None:
        """Until the client has read enough, or has gone."""
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
