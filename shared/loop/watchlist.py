"""Deadlines without timers.

A timer per request costs more than parsing it. All waits of one kind are equally long, so a dict in the order of
insertion is already a queue in the order of deadlines: one coarse sweep looks at its front and stops at the first
entry that still has time. The cost depends on what is overdue, not on what is open; a held long poll is in no queue.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Watchlist(Generic[T]):
    """Hold what must be over within `patience_s` of being added. Times are seconds of one monotonic clock."""

    __slots__ = ("_since_s", "patience_s")

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._since_s: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, item: T) -> bool:
        return item in self._since_s

    def add(self, item: T, now_s: float) -> None:
        """Start (or restart) the wait for `item`. `now_s` never goes back between calls."""
        self._since_s.pop(item, None)
        self._since_s[item] = now_s

    def discard(self, item: T) -> None:
        self._since_s.pop(item, None)

    def take_overdue(self, now_s: float, most: int) -> list[T]:
        """Remove up to `most` overdue items and return them, the longest overdue first."""
        overdue: list[T] = []
        for item, since_s in self._since_s.items():
            if now_s - since_s < self.patience_s or len(overdue) == most:
                break
            overdue.append(item)
        for item in overdue:
            del self._since_s[item]
        return overdue
