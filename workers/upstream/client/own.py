"""Our own adapter of the client port, and the default: an HTTP/1.1 client that does what forwarding needs, no more.

aiohttp's client costs 2.5 to 2.9 times as much CPU (docs/performance.md), a fifth of a whole small sample's. Questions
about upstreams and what is passed through go by aiohttp. All take their sockets from the connector's factory.

A connection counts against the limits from before it is opened until it has ended. A request that finds no room waits:
each origin has a queue of its own, in which keys take turns, and a connection that becomes free goes to the queue
before it becomes idle. Where the limit on all connections keeps an origin waiting, another origin closes an idle
connection for it, or gives up one of its share; a free place goes to the origins in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

from shared.core.faults import BreakKind
from shared.loop.turns import FairQueue
from shared.loop.watchlist import Watchlist
from workers.upstream.client.connection import UpstreamConnection
from workers.upstream.client.port import Broken

if TYPE_CHECKING:
    from workers.upstream.client.dial import Dialler
    from workers.upstream.client.port import Exchange, Origin, Reply

# How often deadlines are checked, as a share of the shortest of them: a keep-alive of 4 s ends before vLLM's 5.0 s.
_SWEEPS_PER_DEADLINE: Final = 8
_SWEEP_AT_MOST_S: Final = 1.0
_SWEPT_AT_ONCE: Final = 500
# Read in one system call, except for long bodies, which are read in place.
_READ_BYTES: Final = 256 * 1024


class _Pool:
    """The connections to one origin."""

    __slots__ = ("idle", "open", "origin", "waiting")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        # Counts connections that are being opened, too.
        self.open = 0
        # The loop's time at which each became idle, the oldest first.
        self.idle: dict[UpstreamConnection, float] = {}
        # Each future gets a connection, or None for the right to open one.
        self.waiting: FairQueue[asyncio.Future[UpstreamConnection | None]] = FairQueue()


class OwnClient:
    """Implements `UpstreamClient`."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        limit: int,
        limit_per_origin: int,
        keep_alive_s: float,
        read_timeout_s: float,
        attempt_timeout_s: float,
        largest_reply_bytes: int,
    ) -> None:
        """Open connections within the limits; 0 is no limit.

        `read_timeout_s` bounds the silence of an upstream, `attempt_timeout_s` a request until its reply ends.
        """
        self._dialler = dialler
        self._limit = limit
        self._limit_per_origin = limit_per_origin
        self._keep_alive_s = keep_alive_s
        self._largest_reply_bytes = largest_reply_bytes
        self._loop = asyncio.get_running_loop()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        # In the order in which they get the next place that the limit on all connections leaves.
        self._pools: OrderedDict[Origin, _Pool] = OrderedDict()
        self._open = 0
        # Those that were closed for another origin and have not ended yet.
        self._making_room: set[UpstreamConnection] = set()
        self._connections: set[UpstreamConnection] = set()
        self._reading: Watchlist[UpstreamConnection] = Watchlist(read_timeout_s)
        self._attempts: Watchlist[UpstreamConnection] = Watchlist(attempt_timeout_s)
        self._sweep_s = min(
            _SWEEP_AT_MOST_S, min(keep_alive_s, read_timeout_s, attempt_timeout_s) / _SWEEPS_PER_DEADLINE
        )
        self._sweeper: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        idle = sum(len(pool.idle) for pool in self._pools.values())
        waiting = sum(len(pool.waiting) for pool in self._pools.values())
        return f"<OwnClient {self._open} open, {idle} idle, {waiting} waiting>"

    async def send(self, origin: Origin, head: bytes, body: bytes, exchange: Exchange) -> Reply:
        """Send one request and return its reply; see `UpstreamClient`."""
        pool = self._pools.get(origin) or self._pools.setdefault(origin, _Pool(origin))
        connection = self._idle(pool) or await self._opened(pool, exchange.key_digest)
        reply = connection.start(head, body)
        exchange.sent(reply, connection)
        now_s = self._loop.time()
        self._reading.add(connection, now_s)
        self._attempts.add(connection, now_s)
        self._sweep_later()
        try:
            received = await reply
            if (why := exchange.refusal(received)) is not None:
                connection.abort()
                raise Broken(BreakKind.ANOTHERS_REPLY, why)
            return received
        finally:
            self._reading.discard(connection)
            self._attempts.discard(connection)
            self._give_back(pool, connection)

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.fail(Broken(BreakKind.RESET_BEFORE_STATUS, "the gateway stops"))

    # -- getting a connection

    def _idle(self, pool: _Pool) -> UpstreamConnection | None:
        """Return the connection that was used last, so that the others may age until they are closed."""
        now_s = self._loop.time()
        while pool.idle:
            connection, since_s = pool.idle.popitem()
            # A POST that meets a closing connection is lost, and a reply that nobody asked for would be taken for the
            # next one: worth a system call.
            if now_s - since_s < self._keep_alive_s and connection.is_open and not connection.has_unread_bytes():
                return connection
            connection.abort()
        return None

    async def _opened(self, pool: _Pool, key_digest: bytes) -> UpstreamConnection:
        if pool.waiting or not self._has_room(pool):
            handed = await self._handed(pool, key_digest)
            if handed is not None:
                return handed
        else:
            self._count(pool, 1)
        try:
            connection = await self._dialler.dial(pool.origin, partial(self._make, pool), key_digest)
            if not connection.is_open:
                raise Broken(BreakKind.CLOSED_BEFORE_WRITE)
        except BaseException:
            self._freed(pool)
            raise
        # From here on `_lost` gives its place back.
        self._connections.add(connection)
        return connection

    async def _handed(self, pool: _Pool, key_digest: bytes) -> UpstreamConnection | None:
        """Wait for a connection that is given back; return None for the right to open one instead."""
        while True:
            waiter: asyncio.Future[UpstreamConnection | None] = self._loop.create_future()
            pool.waiting.add(key_digest, waiter)
            self._close_idle()
            try:
                connection = await waiter
            except asyncio.CancelledError:
                pool.waiting.discard(key_digest, waiter)
                if waiter.done() and not waiter.cancelled():
                    # It was given in the same turn of the loop as we were cancelled: pass it on.
                    if (given := waiter.result()) is not None:
                        self._give_back(pool, given)
                    else:
                        self._freed(pool)
                raise
            if connection is None or connection.is_open:
                return connection

    def _make(self, pool: _Pool) -> UpstreamConnection:
        lost = partial(self._lost, pool)
        return UpstreamConnection(self._loop, self._scratch, self._largest_reply_bytes, lost, self._progressed)

    def _progressed(self, connection: UpstreamConnection) -> None:
        self._reading.add(connection, self._loop.time())

    # -- giving it back

    def _give_back(self, pool: _Pool, connection: UpstreamConnection) -> None:
        if not connection.is_reusable:
            # `_lost` frees its place.
            connection.abort()
        elif self._owes_place(pool):
            self._make_room(pool, connection)
        elif (waiter := _first(pool.waiting)) is not None:
            waiter.set_result(connection)
        else:
            pool.idle[connection] = self._loop.time()
            self._sweep_later()

    def _lost(self, pool: _Pool, connection: UpstreamConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._making_room.discard(connection)
            pool.idle.pop(connection, None)
            self._freed(pool)

    def _freed(self, pool: _Pool) -> None:
        """Give a free place to a request that waits for this origin, or for another if the common limit held it up."""
        self._count(pool, -1)
        for other in self._pools.values() if self._limit else (pool,):
            if self._has_room(other) and (waiter := _first(other.waiting)) is not None:
                self._count(other, 1)
                waiter.set_result(None)
                self._pools.move_to_end(other.origin)
                # A request held up by its origin's limit may be held up by the common limit now.
                self._close_idle()
                return

    def _has_room(self, pool: _Pool) -> bool:
        return (not self._limit or self._open < self._limit) and self._own_room(pool) > 0

    def _own_room(self, pool: _Pool) -> int:
        """Return how many places the limit of its origin leaves."""
        return self._limit_per_origin - pool.open if self._limit_per_origin else 1 + len(pool.waiting)

    # -- between origins, where the limit on all connections is reached

    def _close_idle(self) -> None:
        """Close the oldest idle connection if another origin waits for nothing but its place."""
        if not self._limit or self._open < self._limit:
            return
        with_idle = [pool for pool in self._pools.values() if pool.idle]
        oldest = min(with_idle, key=lambda pool: next(iter(pool.idle.values())), default=None)
        if oldest is not None and self._owes_place(oldest):
            self._make_room(oldest, next(iter(oldest.idle)))

    def _owes_place(self, pool: _Pool) -> bool:
        """Return whether others wait for more places than are becoming free and `pool` has more than its share.

        A pool without a queue owes all that others want. One with a queue owes as many as make both even, and at least
        one to an origin that has none.
        """
        if not self._limit or self._open < self._limit:
            return False
        owed = 0
        for other in self._pools.values():
            if other is not pool and other.waiting:
                wanted = min(len(other.waiting), self._own_room(other))
                share = max(int(not other.open), (pool.open - other.open) // 2) if pool.waiting else wanted
                owed += max(0, min(wanted, share))
        return owed > len(self._making_room)

    def _make_room(self, pool: _Pool, connection: UpstreamConnection) -> None:
        pool.idle.pop(connection, None)
        self._making_room.add(connection)
        self._pools.move_to_end(pool.origin)
        connection.abort()

    def _count(self, pool: _Pool, change: int) -> None:
        pool.open += change
        self._open += change

    # -- deadlines

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now_s = self._loop.time()
        for connection in self._reading.take_overdue(now_s, _SWEPT_AT_ONCE):
            connection.fail(Broken(BreakKind.READ_TIMEOUT))
        for connection in self._attempts.take_overdue(now_s, _SWEPT_AT_ONCE):
            connection.fail(Broken(BreakKind.READ_TIMEOUT, "--attempt-timeout is over"))
        for pool in self._pools.values():
            self._close_aged(pool, now_s)
        if self._reading or any(pool.idle for pool in self._pools.values()):
            self._sweep_later()

    def _close_aged(self, pool: _Pool, now_s: float) -> None:
        while pool.idle:
            connection = next(iter(pool.idle))
            # It must not become too old before the next sweep.
            if now_s - pool.idle[connection] < self._keep_alive_s - self._sweep_s:
                return
            del pool.idle[connection]
            connection.abort()


def _first(
    waiting: FairQueue[asyncio.Future[UpstreamConnection | None]],
) -> asyncio.Future[UpstreamConnection | None] | None:
    """Take the next request that still waits."""
    while waiting:
        waiter = waiting.take()
        if not waiter.done():
            return waiter
    return None
