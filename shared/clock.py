"""Clocks, which are passed as arguments so that tests control the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two readings of time that the product uses."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; for deadlines."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; for times that other hosts compare with their own clock."""
        ...


class SystemClock:
    """The clock of the operating system."""

    # The function itself: it is called a dozen times for each sample, and a Python frame costs more than the reading.
    monotonic_s = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when a test says so."""

    def __init__(self, monotonic_s: float = 1_000.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._monotonic_s = monotonic_s
        self._wall_ms = wall_ms

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_ms(self) -> int:
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        self._monotonic_s += seconds
        self._wall_ms += round(seconds * 1000)
