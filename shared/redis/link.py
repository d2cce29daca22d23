"""A connection that comes back: log in, watch the oldest command, reconnect with a growing pause.

Where it leads is asked anew each time: a fixed server says itself, sentinels name the master of the moment. One task
owns it from `open` or `start` to `close`. What depends on the connection (waiting commands, subscriptions) is told of
its coming by `on_up`, and learns of its going from the futures that fail.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from shared.core.errors import GatewayError, StoreUnavailable
from shared.redis.login import dial

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.redis.address import RedisAddress
    from shared.redis.connection import Connection

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
# An answer that takes longer is a server that is not there: cut, fail what waits, connect anew.
COMMAND_DEADLINE_S: Final = 10.0
_CHECK_EVERY_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.05
# All workers wait until the slowest has come back (refill.py). A connection that is refused costs next to nothing.
_LONGEST_PAUSE_S: Final = 0.5


class Server(Protocol):
    """Where a link leads. `shown` is for logs and messages."""

    @property
    def shown(self) -> str: ...

    async def locate(self) -> RedisAddress:
        """The server to connect to now; asked before each connection. Raises `StoreError` and `OSError`."""
        ...


class Link:
    """`rng_unit` gives random numbers in [0, 1): workers must not come back all at once."""

    def __init__(
        self,
        place: Server,
        name: str,
        *,
        clock: Clock,
        rng_unit: Callable[[], float],
        deadline_s: float = COMMAND_DEADLINE_S,
        on_up: Callable[[Connection], None] | None = None,
        on_push: Callable[[Any], None] | None = None,
    ) -> None:
        self._place = place
        self._name = name
        self._clock = clock
        self._rng_unit = rng_unit
        self._deadline_s = deadline_s
        self._on_up = on_up
        self._on_push = on_push
        self._task: asyncio.Task[None] | None = None
        self._since_s = 0.0
        self._run_id: bytes | None = None
        self._must_be_master = False
        self.restarted_s: float | None = None
        self.connection: Connection | None = None

    @property
    def connected_since_s(self) -> float | None:
        """Monotonic; None from the moment at which the connection is lost."""
        connection = self.connection
        return None if connection is None or connection.lost.done() else self._since_s

    async def open(self) -> None:
        """The first connection. Raises `StoreUnavailable`, or `StoreRefused` for a wrong password."""
        if self._task is None:
            connection = await self._connect()
            self._task = asyncio.create_task(self._keep(connection))

    def start(self) -> None:
        """Connect in the background, for as long as that takes; nothing when it is open already."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(None))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self.connection is not None:
            # The task was cancelled before its first step.
            self.connection.cut("the store was closed")
            self._down()

    def found_replica(self, why: str) -> None:
        """The server takes no writes. One that was found by asking has been demoted: ask again, for the new master."""
        if self._must_be_master and self.connection is not None:
            self.connection.cut(why)

    async def _keep(self, connection: Connection | None) -> None:
        try:
            connection = connection or await self._reconnect()
            while True:
                why = await self._watch(connection)
                self._down()
                log.warning("store connection lost", extra={"store": self._place.shown, "why": why})
                connection = await self._reconnect()
                log.info("store connection is back", extra={"store": self._place.shown})
        finally:
            self._down()
            if connection is not None:
                connection.cut("the store was closed")

    async def _watch(self, connection: Connection) -> str:
        """Until it is lost, by itself or because its oldest command is overdue; why."""
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while not connection.lost.done():
            await asyncio.wait([connection.lost], timeout=_CHECK_EVERY_S)
            now_s = loop.time()
            # A loop that was held up itself has not yet looked at the answers that came meanwhile.
            on_time = now_s - checked_s < 2 * _CHECK_EVERY_S
            if on_time and self._is_overdue(connection, now_s):
                connection.cut(f"the server did not answer for {self._deadline_s:g} s")
            checked_s = now_s
        return connection.lost.result()

    def _is_overdue(self, connection: Connection, now_s: float) -> bool:
        oldest_s = connection.oldest_pending_s()
        if oldest_s is None and self._on_push is not None:
            # Nothing is ever pending on a line of subscriptions: a dead one looks like a quiet one.
            oldest_s = connection.probe()
        return oldest_s is not None and now_s - oldest_s > self._deadline_s

    async def _reconnect(self) -> Connection:
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s * (0.5 + 0.5 * self._rng_unit()))
            try:
                return await self._connect()
            except GatewayError as error:
                # Not the store's own errors alone: a TLS file may be missing while it is replaced.
                log.debug("store does not take a connection", extra={"error": str(error)})
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                address = await self._place.locate()
                connection = await dial(address, self._name, self._on_push)
        except (OSError, TimeoutError) as error:
            text = str(error) or "no answer"
            raise StoreUnavailable(
                f"Redis at {self._place.shown} cannot be reached: {text}", maybe_done=False
            ) from None
        self._must_be_master = address.must_be_master
        self.connection = connection
        self._since_s = self._clock.monotonic_s()
        self._recognise(connection.run_id)
        if self._on_up is not None:
            self._on_up(connection)
        return connection

    def _recognise(self, run_id: bytes) -> None:
        """A server process draws its run id when it starts; a mere cut of the line shows the same one again."""
        if self._run_id is not None and run_id != self._run_id:
            self.restarted_s = self._since_s
        self._run_id = run_id

    def _down(self) -> None:
        self.connection = None
