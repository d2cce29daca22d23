"""State that all client connections of one address share: limits, the drain flag, and the deadlines."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from shared.loop.watchlist import Watchlist

if TYPE_CHECKING:
    from shared.http.head import HttpLimits

# Deadlines are tens of seconds, so a second late is early enough.
SWEEP_S = 1.0
# Closing one connection costs about 20 us; a batch stays well below what the loop may stall.
SWEEP_BATCH = 500
# The pause between two batches when one was not enough.
NEXT_BATCH_S = 0.02


class Watched(Protocol):
    """A connection as the sweep sees it. Each method is called after the connection was taken off that watchlist."""

    def idle_overdue(self) -> None: ...

    def arrival_overdue(self, now_s: float) -> None: ...

    def reader_overdue(self, now_s: float) -> None: ...

    def linger_overdue(self) -> None: ...

    def announce_close(self) -> None: ...


class Edge:
    """Limits and deadlines of all connections of one address."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.draining = False
        self.open: set[Watched] = set()
        # Between requests; also before the first.
        self.idle: Watchlist[Watched] = Watchlist(limits.keep_alive_s)
        # A request has begun and is not whole yet.
        self.arriving: Watchlist[Watched] = Watchlist(limits.head_s)
        # Reply bytes wait for the client to read.
        self.unread: Watchlist[Watched] = Watchlist(limits.unread_s)
        # Answered and closing; waiting for the client's end.
        self.lingering: Watchlist[Watched] = Watchlist(limits.linger_s)
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()

    def __repr__(self) -> str:
        waits = f"{len(self.idle)} idle, {len(self.arriving)} arriving, {len(self.unread)} unread"
        return f"<Edge {len(self.open)} open: {waits}, {len(self.lingering)} lingering{', draining' * self.draining}>"

    def add(self, item: Watched, loop: asyncio.AbstractEventLoop) -> None:
        """Take a new connection, which waits for its first request. The deadlines are looked at while any is open."""
        self.open.add(item)
        self.idle.add(item, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(SWEEP_S, self._tick, loop)

    def forget(self, item: Watched) -> None:
        """Drop a connection that has ended."""
        self.open.discard(item)
        for watchlist in (self.idle, self.arriving, self.unread, self.lingering):
            watchlist.discard(item)
        if not self.open:
            self._all_closed.set()

    def start_draining(self) -> None:
        """Have every reply carry `Connection: close` from now on, those to requests already in flight too."""
        self.draining = True
        for item in list(self.open):
            item.announce_close()

    async def wait_all_closed(self, at_most_s: float) -> None:
        """Wait until no connection is left. New ones must not be accepted any more."""
        if not self.open:
            return
        self._all_closed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._all_closed.wait()

    def sweep(self, now_s: float) -> bool:
        """End what is overdue at `now_s` (the loop's time); return whether more than one batch was."""
        idle = self.idle.take_overdue(now_s, SWEEP_BATCH)
        arriving = self.arriving.take_overdue(now_s, SWEEP_BATCH)
        unread = self.unread.take_overdue(now_s, SWEEP_BATCH)
        lingering = self.lingering.take_overdue(now_s, SWEEP_BATCH)
        for item in idle:
            item.idle_overdue()
        for item in arriving:
            item.arrival_overdue(now_s)
        for item in unread:
            item.reader_overdue(now_s)
        for item in lingering:
            item.linger_overdue()
        return SWEEP_BATCH in (len(idle), len(arriving), len(unread), len(lingering))

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        more = self.sweep(loop.time())
        if self.open:
            self._timer = loop.call_later(NEXT_BATCH_S if more else SWEEP_S, self._tick, loop)
