"""A bound on how much of one kind of work is done in one turn of the event loop.

Thousands of generations that end at once are thousands of tasks that become ready in the same turn. Each takes a
fraction of a millisecond; run one after the other they keep the loop from everything else for seconds: health,
heartbeats, the worker's own reports, for whose absence it is killed. Here only so many go on in a turn, and the rest
wait for the next ones, between which the loop looks at its sockets and timers. Of those who wait, keys go in turn.
"""

from __future__ import annotations

import asyncio

from shared.core.fair_line import FairLine


class Turns:
    """Of the running event loop. `per_turn`: how many may go on between two looks at the sockets."""

    def __init__(self, per_turn: int) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._per_turn = per_turn
        self._left = per_turn
        self._renewing = False
        self._waiting: FairLine[asyncio.Future[None]] = FairLine()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def try_take(self) -> bool:
        """Whether this turn has room, which is then taken. Nobody waits while it has."""
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._renew)
        if self._left:
            self._left -= 1
            return True
        return False

    async def take(self, party: bytes = b"") -> None:
        """Returns at once while this turn has room; else in a later turn.

        `party`: who waits for whom, as of `FairLine`. On the way of every sample `try_take` is asked first: a coroutine
        that waits for nothing costs five times as much.
        """
        if self.try_take():
            return
        waiter = self._loop.create_future()
        self._waiting.add(party, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.discard(party, waiter)
            raise

    def _renew(self) -> None:
        """A new turn, for those who wait. Who was cancelled meanwhile takes no room."""
        self._left = self._per_turn
        while self._waiting and self._left:
            waiter = self._waiting.take()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        self._renewing = self._left < self._per_turn
        if self._renewing:
            self._loop.call_soon(self._renew)
