"""The workers' counters, added up over restarts. A total never falls, whether a worker dies or starts anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Accumulator:
    """Totals by name. What one process reports only ever adds to them by how much it grew."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._last: dict[int, dict[str, float]] = {}

    def update(self, serial: int, values: Mapping[str, float]) -> None:
        """The current values of a process that counts from its own start."""
        last = self._last.setdefault(serial, {})
        for name, value in values.items():
            grown = value - last.get(name, 0)
            self.add(name, max(grown, 0))
            last[name] = max(value, last.get(name, 0))

    def add(self, name: str, more: float) -> None:
        """What happened outside of the workers."""
        self.totals[name] = self.totals.get(name, 0) + more

    def forget(self, serial: int) -> None:
        """The process has ended; its share of the totals stays."""
        self._last.pop(serial, None)

    def count(self, name: str) -> int:
        return int(self.totals.get(name, 0))
