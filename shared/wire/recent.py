"""What was worked out lately, by what it was worked out from."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps from `most` to twice as many values. What is asked for stays; of the rest the oldest go, half at a time.

    Who fills it with what nobody asks for again displaces others only if he adds `most` between two of their uses.
    """

    __slots__ = ("_most", "_new", "_old")

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._new.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._new) >= self._most:
            self._old, self._new = self._new, {}
        self._new[key] = value
