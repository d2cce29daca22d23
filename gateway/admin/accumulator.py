"""The workers' counters, added up over restarts. A total never falls when a worker dies or restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Accumulator:
    """Totals by name. A process adds to a total by how much its own value grew."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._last: dict[int, dict[str, float]] = {}

    def update(self, serial: int, values: Mapping[str, float]) -> None:
        """Take in the current values of a process, which count from its own start."""
        last = self._last.setdefault(serial, {})
        for name, value in values.items():
            grown = value - last.get(name, 0)
            self.add(name, max(grown, 0))
            last[name] = max(value, last.get(name, 0))

    def add(self, name: str, more: float) -> None:
        """Add what happened outside of the workers."""
        self.totals[name] = self.totals.get(name, 0) + more

    def forget(self, serial: int) -> None:
        """Drop a process that has ended; its share of the totals stays."""
        self._last.pop(serial, None)

    def count(self, name: str) -> int:
        return int(self.totals.get(name, 0))
