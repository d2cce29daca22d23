"""Requests that wait for their turn, before anything is made for them but what arrived.

Requests come in crowds: thousands of connections that become readable in the same turn of the event loop. To start them
all at once keeps the loop from everything else; to start a few in each turn costs those that wait a place in a line.
Keys go in turn.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.core.fair_line import FairLine

if TYPE_CHECKING:
    from collections.abc import Callable


class Lane:
    """Of the running event loop. `per_turn`: how many are started between two looks at the sockets."""

    def __init__(self, per_turn: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._per_turn = per_turn
        self._left = per_turn
        self._renewing = False
        self._waiting: FairLine[Callable[[], None]] = FairLine()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, party: bytes, start: Callable[[], None]) -> None:
        """Calls `start`: at once while this turn has room and nobody waits, else in a later turn.

        `party`: who waits for whom, as of `FairLine`. `start` must not raise.
        """
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._renew)
        if self._left:
            self._left -= 1
            start()
        else:
            self._waiting.add(party, start)

    def _renew(self) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.take()()
        self._renewing = self._left < self._per_turn
        if self._renewing:
            self._loop.call_soon(self._renew)
