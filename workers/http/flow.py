"""uvicorn's flow control, and for how long it did not read: that time is the application's, not the client's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class TimedFlow(FlowControl):
    """`monotonic_s`: the clock of the deadlines, which is the loop's."""

    def __init__(self, transport: asyncio.Transport, monotonic_s: Callable[[], float]) -> None:
        super().__init__(transport)
        self._monotonic_s = monotonic_s
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
