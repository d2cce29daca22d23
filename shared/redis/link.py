"""A connection that comes back: log in, watch the oldest command, reconnect with a growing pause.

The address is looked up before each connection: a fixed server has one, sentinels name the current master. One task
owns the link from `open` or `start` to `close`. `on_up` is called with each new connection; the futures of waiting
commands and subscriptions fail when it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from shared.core.errors import GatewayError, StoreUnavailable
from shared.redis.login import dial
from shared.system_error import system_reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.redis.address import RedisAddress
    from shared.redis.connection import RedisConnection

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
# A server that takes longer to answer counts as down: cut the connection, fail what waits, connect again.
COMMAND_DEADLINE_S: Final = 10.0
_CHECK_EVERY_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.05
# All workers wait until the slowest has reconnected (`store/recovery.py`), and a refused connection costs next to
# nothing, so the pause stays short.
_LONGEST_PAUSE_S: Final = 0.5


class Server(Protocol):
    """The server that a link connects to. `shown` is its name in logs and messages."""

    @property
    def shown(self) -> str: ...

    async def locate(self) -> RedisAddress:
        """Return the address to connect to now; called before each connection. Raises `StoreError` and `OSError`."""
        ...


class Link:
    """Keep a connection to `server`. `rng_unit` draws from [0, 1), so that workers do not all reconnect at once."""

    def __init__(
        self,
        server: Server,
        name: str,
        *,
        clock: Clock,
        rng_unit: Callable[[], float],
        deadline_s: float = COMMAND_DEADLINE_S,
        on_up: Callable[[RedisConnection], None] | None = None,
        on_push: Callable[[Any], None] | None = None,
    ) -> None:
        self._server = server
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
        self.connection: RedisConnection | None = None

    @property
    def connected_since_s(self) -> float | None:
        """Monotonic time of the login; None as soon as the connection is lost."""
        connection = self.connection
        return None if connection is None or connection.lost.done() else self._since_s

    async def open(self) -> None:
        """Connect for the first time. Raises `StoreUnavailable`, or `StoreRefused` for a wrong password."""
        if self._task is None:
            connection = await self._connect()
            self._task = asyncio.create_task(self._keep(connection))

    def start(self) -> None:
        """Connect in the background, however long it takes; do nothing if the link is open already."""
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
            self.connection = None

    def found_replica(self, why: str) -> None:
        """Reconnect because the server takes no writes: a master that sentinels had named was demoted."""
        if self._must_be_master and self.connection is not None:
            self.connection.cut(why)

    async def _keep(self, connection: RedisConnection | None) -> None:
        try:
            connection = connection or await self._reconnect()
            while True:
                why = await self._watch(connection)
                self.connection = None
                log.warning("store connection lost", extra={"store": self._server.shown, "why": why})
                connection = await self._reconnect()
                log.info("store connection is back", extra={"store": self._server.shown})
        finally:
            self.connection = None
            if connection is not None:
                connection.cut("the store was closed")

    async def _watch(self, connection: RedisConnection) -> str:
        """Wait until the connection is lost, cut it if its oldest command is overdue, and return the reason."""
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while not connection.lost.done():
            await asyncio.wait([connection.lost], timeout=_CHECK_EVERY_S)
            now_s = loop.time()
            # After a delay of our own loop, the answers that arrived meanwhile have not been read yet.
            on_time = now_s - checked_s < 2 * _CHECK_EVERY_S
            if on_time and self._is_overdue(connection, now_s):
                connection.cut(f"the server did not answer for {self._deadline_s:g} s")
            checked_s = now_s
        return connection.lost.result()

    def _is_overdue(self, connection: RedisConnection, now_s: float) -> bool:
        oldest_s = connection.oldest_pending_s()
        if oldest_s is None and self._on_push is not None:
            # Nothing is ever pending on a connection of subscriptions: a dead one looks like a quiet one.
            oldest_s = connection.probe()
        return oldest_s is not None and now_s - oldest_s > self._deadline_s

    async def _reconnect(self) -> RedisConnection:
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s * (0.5 + 0.5 * self._rng_unit()))
            try:
                return await self._connect()
            except GatewayError as error:
                # Not only `StoreError`: a TLS file may be missing while it is being replaced.
                log.debug("store does not take a connection", extra={"error": str(error)})
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _connect(self) -> RedisConnection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                address = await self._server.locate()
                connection = await dial(address, self._name, self._on_push)
        except (OSError, TimeoutError) as error:
            text = system_reason(error) or "no answer"
            raise StoreUnavailable(
                f"Redis at {self._server.shown} cannot be reached: {text}", maybe_done=False
            ) from None
        self._must_be_master = address.must_be_master
        self.connection = connection
        self._since_s = self._clock.monotonic_s()
        # A server process draws its run id when it starts; after a mere loss of the connection it is the same one.
        if self._run_id not in (None, connection.run_id):
            self.restarted_s = self._since_s
        self._run_id = connection.run_id
        if self._on_up is not None:
            self._on_up(connection)
        return connection
