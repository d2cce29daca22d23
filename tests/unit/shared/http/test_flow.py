"""How long reading was paused, by a clock that the test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shared.clock import ManualClock
from shared.http.peer import Flow

if TYPE_CHECKING:
    import asyncio


class Transport:
    def __init__(self) -> None:
        self.is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


async def test_only_the_time_in_which_nothing_is_read_counts() -> None:
    clock, transport = ManualClock(), Transport()
    flow = Flow(cast("asyncio.Transport", transport), clock.monotonic_s)
    begun_s = clock.monotonic_s()
    for _ in range(3):
        clock.advance(5.0)
        flow.pause_reading()
        flow.pause_reading()
        clock.advance(2.0)
        assert not transport.is_reading
        flow.resume_reading()
        flow.resume_reading()
    assert transport.is_reading
    assert flow.paused_s(clock.monotonic_s()) == 6.0
    flow.pause_reading()
    clock.advance(4.0)
    assert flow.paused_s(clock.monotonic_s()) == 10.0
    assert clock.monotonic_s() - begun_s == 25.0
