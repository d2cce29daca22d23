"""One worker from start to end: open, serve, follow the supervisor's orders, drain, close.

open     store, upstreams, housekeeping; then "ready"
serve    until an order to drain, or until the supervisor is gone
drain    polls are answered at once, samples end or are ORPHANED at the deadline, connections are closed; exit 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shared import channel
from shared.clock import SystemClock
from shared.core.callers import Keyring
from shared.core.errors import StoreError, StoreRefused
from shared.counters import Counters
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from shared.http.server import PublicServer
from shared.store.open import make_store
from shared.store.recovery import leave
from workers.api.app import PublicApp
from workers.duties.duties import Housekeeping, LoopLag
from workers.parts import build_parts

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from shared.config import Settings, WorkerConfig
    from workers.supervision import Supervision

log = logging.getLogger(__name__)

# After the samples have ended, their polls come back once more to other workers; ours only finish sending.
_LAST_REPLIES_S: Final = 5.0
# Clients keep a connection for their next request this long (httpx, and so the SDK, 5 s). A connection that is used
# again within it is answered and closed; any other is dropped by both sides.
_OLD_CONNECTIONS_S: Final = 6.0
_OPEN_RETRY_S: Final = 1.0
# The exit code of a worker that cannot go on; the supervisor starts another one.
_BROKEN: Final = 1
# The garbage collector looks at this many new objects at a time, in a millisecond or two. Those that survive are looked
# at once more the next time, and then not before there are tens of millions of new ones. What a sample and a connection
# leave is freed without the collector: all it can find is in flight, and each look at that holds up the loop.
_GC_THRESHOLDS: Final = (10_000, 0, 2_500)


class Worker:
    """Everything of one process. It is also the store's listener (`StoreListener`)."""

    def __init__(self, config: WorkerConfig, listener: socket.socket, supervision: Supervision) -> None:
        settings = config.settings
        self._config = config
        self._supervision = supervision
        self._counters = Counters()
        clock = SystemClock()
        self._lag = LoopLag()
        self._store = make_store(
            config.redis_url, settings.key_prefix, clock=clock, session_ttl_s=settings.session_ttl_s
        )
        self._parts = build_parts(config, self._store, self._counters, clock, self._on_loss)
        self._dispatcher = self._parts.dispatcher
        self._housekeeping = Housekeeping(self._parts, config.instance, settings)
        self._edge = Edge(HttpLimits(keep_alive_s=settings.keep_alive_s))
        app = PublicApp(self._parts)
        self._server = PublicServer(
            app.starlette,
            listener,
            self._edge,
            backlog=settings.backlog,
            access_log=settings.access_log,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            hot=app.hot,
            memory=self._dispatcher.quota,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _on_loss(self) -> None:
        self._housekeeping.lease.doubt()

    # -- what the store reports ---------------------------------------------------------------------------------

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        self._parts.waiters.announced(session_key, seq_ids)

    def on_gap(self) -> None:
        self._housekeeping.lease.hurry.set()
        self._parts.waiters.look_again()

    def on_control(self, message: bytes) -> None:
        self._housekeeping.on_control(message)

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until there is an order or a reason to stop, and return the exit code of the process."""
        orders = asyncio.create_task(self._obey())
        try:
            opened = await self._opened(orders)
        except StoreRefused as error:
            orders.cancel()
            self._supervision.tell(channel.Failed(str(error)))
            await self._close()
            return 3
        if not opened:
            await self._close()
            return 0
        _settle_garbage_collection()
        await self._server.start()
        self._supervision.tell(channel.Ready(tuple(self._parts.pool.catalogue.base_models())))
        await asyncio.wait({orders, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        # No duty should end. Without its lease, or without its reports, a worker does harm: another takes the slot.
        ended = next((task for task in self._tasks if task.done()), None)
        broken = (ended.exception() or RuntimeError("it returned")) if ended is not None else None
        if broken is not None:
            log.critical("a duty ended, the worker gives up", exc_info=broken)
            orders.cancel()
        elif (order := await orders) is not None:
            await self._drain(order)
        self._parts.waiters.drain()
        self._send_back_training()
        await self._server.stop(_LAST_REPLIES_S)
        await self._close()
        return 0 if broken is None else _BROKEN

    async def _opened(self, orders: asyncio.Task[channel.Drain | None]) -> bool:
        """Open, and return whether the worker can serve. Raise `StoreRefused`.

        It cannot if an order to stop comes, or the supervisor is gone, before the store has answered.
        """
        opening = asyncio.create_task(self._open())
        await asyncio.wait({opening, orders}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            await opening
            return True
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return False

    async def _open(self) -> None:
        while True:
            try:
                await self._store.open(self, self._config.instance)
                break
            except StoreRefused:
                raise
            except StoreError as error:
                # The worker was replaced while the store is away. Queued connections wait in the slot's socket.
                log.warning("store does not answer yet", extra={"error": str(error)})
                await asyncio.sleep(_OPEN_RETRY_S)
        with suppress(StoreError):  # the first turn of the housekeeping tries again
            await self._parts.published.sync()
        await self._parts.pool.learn_models()
        for duty in [*self._housekeeping.duties(), self._lag.run, self._report]:
            self._tasks.append(asyncio.create_task(duty()))

    async def _obey(self) -> channel.Drain | None:
        """Follow orders until one is to drain, and return it; None if the supervisor is gone."""
        while True:
            match await self._supervision.next_order():
                case channel.Drain() as order:
                    return order
                case channel.Reload(settings=settings):
                    self._reload(settings)
                case None:
                    log.warning("supervisor is gone: stopping")
                    return None

    def _reload(self, settings: Settings) -> None:
        keyring = Keyring(settings.api_keys)
        self._parts.live.settings = settings
        self._parts.live.keyring = keyring
        self._dispatcher.quota.reconfigure(settings)
        # Polls first: those of a key that is gone get a 401, and not the end of their samples.
        self._parts.waiters.end_revoked(keyring.knows)
        if self._parts.trainer is not None:
            self._parts.trainer.end_revoked(keyring.knows)
        revoked = self._dispatcher.end_revoked(keyring.knows)
        log.info("the configuration was read again", extra={"samples_of_revoked_keys": revoked})

    async def _drain(self, order: channel.Drain) -> None:
        log.info("draining", extra={"in_flight": self._dispatcher.in_flight})
        self._edge.start_draining()
        if order.replaced:
            # Another worker serves the slot: send every poll there. Submissions that still come over old connections
            # are accepted, because a 429 would slow the whole client down for ten seconds.
            self._server.stop_accepting()
            self._parts.waiters.drain()
            self._send_back_training()
        else:
            # The last worker of its slot. Polls are sent back once, and then held as before until the samples have
            # ended: "try again" at once, again and again, would make the SDK spin.
            self._dispatcher.drain()
            self._parts.waiters.send_back()
            self._send_back_training()
        await self._wait_drained(order)
        self._dispatcher.drain()
        if orphaned := self._dispatcher.orphan_all():
            log.warning("drain is over: the rest is submitted again elsewhere", extra={"orphaned": orphaned})
        try:
            async with asyncio.timeout(_LAST_REPLIES_S):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            log.warning("store does not take the last endings", extra={"in_flight": self._dispatcher.in_flight})

    async def _wait_idle(self, order: channel.Drain) -> None:
        """Wait until the last sample has ended, of those too that old connections still bring to a replaced worker."""
        await self._dispatcher.wait_idle()
        if order.replaced:
            await self._edge.wait_all_closed(_OLD_CONNECTIONS_S)
            await self._dispatcher.wait_idle()

    async def _wait_drained(self, order: channel.Drain) -> None:
        """Wait for the end of every sample, for the deadline, or for the end of the supervisor.

        A later order to drain replaces this one. Results that end with the supervisor's own Redis are handed out until
        it says that all were fetched.
        """
        idle = asyncio.create_task(self._wait_idle(order))
        next_order = asyncio.create_task(self._supervision.next_order())
        try:
            while True:
                waiting = {next_order} if idle.done() else {next_order, idle}
                done, _ = await asyncio.wait(waiting, timeout=order.deadline_s, return_when=asyncio.FIRST_COMPLETED)
                keeps_results = not order.replaced and self._config.settings.redis_url is None
                if not done or (idle.done() and not keeps_results):
                    return
                if next_order.done():
                    again = next_order.result()
                    if again is None or (idle.done() and isinstance(again, channel.Drain)):
                        return
                    if isinstance(again, channel.Drain):
                        order = again
                    elif isinstance(again, channel.Reload):
                        # A revoked key is revoked in every process, in those that are being replaced too.
                        self._reload(again.settings)
                    next_order = asyncio.create_task(self._supervision.next_order())
        finally:
            idle.cancel()
            next_order.cancel()
            await asyncio.gather(idle, next_order, return_exceptions=True)

    def _send_back_training(self) -> None:
        if self._parts.trainer is not None:
            self._parts.trainer.send_back()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._dispatcher.close()
        await self._leave_store()
        await self._parts.resources.aclose()
        await self._store.close()
        self._supervision.tell(self.status())  # what was counted since the last one
        await self._supervision.close()

    async def _leave_store(self) -> None:
        """Write the last clocks and return the lease, so that what is left of ours is reaped at once."""
        try:
            async with asyncio.timeout(_LAST_REPLIES_S):
                await self._parts.expiry.flush()
                await self._store.release_lease(self._config.instance)
                await leave(self._store, self._config.instance)
        except (StoreError, TimeoutError) as error:
            log.debug("store was left without returning the lease", extra={"error": str(error)})

    async def _report(self) -> None:
        while True:
            self._supervision.tell(self.status())
            await asyncio.sleep(channel.STATUS_INTERVAL_S)

    def status(self) -> channel.Status:
        self._counters.store_commands = self._store.commands
        quota, trainer = self._dispatcher.quota, self._parts.trainer
        return channel.Status(
            in_flight=self._dispatcher.in_flight,
            in_flight_bytes=quota.in_flight_bytes,
            loop_lag_ms_p99=round(self._lag.p99_ms(), 3),
            loop_lag_ms_max=round(self._lag.max_ms(), 3),
            store_connected=self._store.connected_since_s is not None,
            sessions=len(self._parts.sessions),
            upstreams=self._parts.pool.statuses(),
            counters=self._counters.snapshot(),
            draining=quota.draining,
            paused=self._parts.executor.paused,
            passed_in_flight=quota.passed_in_flight + (trainer.in_flight if trainer is not None else 0),
            stages=self._counters.stages.snapshot(),
            keys=quota.key_usage.statuses(key.name for key in self._parts.live.settings.api_keys or ()),
            missing_models=self._parts.pool.missing_models(),
        )


def _settle_garbage_collection() -> None:
    """Exclude what start-up made from garbage collection, and collect the rest less often.

    With Python's defaults, a collection every 700 objects, the collector took a ninth of a busy worker's time, and more
    with more in flight. With one every 50,000, its looks were the longest turns of the loop: 20 to 30 ms while 4,096
    samples came.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
