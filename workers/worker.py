"""One worker from start to end: build what the handlers share, serve, obey the supervisor, drain.

open     store, upstreams, housekeeping; then "ready"
serve    until an order to drain, or the supervisor is gone
drain    polls answered at once, samples end or are ORPHANED at the deadline, connections closed; exit 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
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
from workers.duties.duties import Housekeeping
from workers.duties.loop_lag import LoopLag
from workers.parts import Live, UpstreamSide, WorkerParts
from workers.passing.openai import OpenAiProxy
from workers.passing.training_server import TrainingServer
from workers.samples.dispatcher import Dispatcher
from workers.samples.expiry import DeliveryExpiry
from workers.samples.quota import KeyUsage
from workers.samples.recent_results import UnfetchedResults
from workers.samples.sessions import Sessions
from workers.samples.waiters import Waiters
from workers.upstream.connector import make_session, make_training_session

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from shared.config import Settings, WorkerConfig
    from workers.samples.live import LiveSample
    from workers.supervision import Supervision

log = logging.getLogger(__name__)

# After the samples have ended, their polls come back once more to other workers; ours only finish sending.
_LAST_REPLIES_S: Final = 5.0
# Clients keep a connection for their next request this long (httpx, so the SDK, 5 s): one that is used again within it
# is answered, and told to close; one that is not is dropped by both sides.
_OLD_CONNECTIONS_S: Final = 6.0
_OPEN_RETRY_S: Final = 1.0
# Exit code of a worker that cannot go on; the supervisor starts another one.
_BROKEN: Final = 1
# How many new objects are looked through at a time, in a millisecond or two; those that stayed are looked through once
# more, the next time, and then not before there are tens of millions of new ones. What a sample and a connection leave
# is freed without the collector: all it can find is what is in flight, and each look at that holds up the loop.
_GC_THRESHOLDS: Final = (10_000, 0, 2_500)


class Worker:
    """Everything of one process. Also what the store tells its news to (`StoreListener`)."""

    def __init__(self, config: WorkerConfig, listener: socket.socket, supervision: Supervision) -> None:
        settings = config.settings
        self._config = config
        self._supervision = supervision
        self._counters = Counters()
        self._clock = SystemClock()
        self._lag = LoopLag()
        self._waiters = Waiters()
        self._store = make_store(config.redis_url, settings.key_prefix, clock=self._clock)
        self._passed_http = make_session(settings, config.source_ip)
        self._trainer = _trainer(settings, config.source_ip)
        self._upstreams = UpstreamSide(config, self._store, self._counters, self._clock, self._mark_paused)
        unfetched = UnfetchedResults()
        keyring = Keyring(settings.api_keys)
        self._key_usage = KeyUsage(settings.workers, shared=keyring.shared)
        self._dispatcher = Dispatcher(
            self._store,
            self._upstreams.executes,
            self._waiters,
            self._counters,
            self._clock,
            config.instance,
            settings,
            unfetched,
            self._key_usage,
        )
        self._parts = WorkerParts(
            live=Live(settings, keyring),
            store=self._store,
            dispatcher=self._dispatcher,
            waiters=self._waiters,
            sessions=Sessions(self._store, self._clock),
            pool=self._upstreams.pool,
            published=self._upstreams.published,
            adapters=self._upstreams.adapters,
            expiry=DeliveryExpiry(self._store, settings, self._counters, unfetched, self._clock),
            unfetched=unfetched,
            counters=self._counters,
            clock=self._clock,
            random_bytes=os.urandom,
            openai=self._openai(settings),
            trainer=self._trainer,
        )
        self._housekeeping = Housekeeping(self._parts, config.instance, settings)
        self._edge = Edge(HttpLimits(keep_alive_s=settings.keep_alive_s))
        app = PublicApp(self._parts)
        self._server = PublicServer(
            app,
            listener,
            self._edge,
            backlog=settings.backlog,
            access_log=settings.access_log,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            direct=app.direct,
            standing=app.standing,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _openai(self, settings: Settings) -> OpenAiProxy:
        wait_s = settings.upstream_wait_s
        return OpenAiProxy(self._upstreams.pool, self._passed_http, self._counters, self._clock, wait_s, random.random)

    def _mark_paused(self, running: LiveSample, paused: bool) -> None:
        """A store that is away has no word of it: the poll elsewhere then just says "still running"."""
        self._store.mark_paused(running.key, running.claim, paused=paused)

    # -- what the store tells -----------------------------------------------------------------------------------

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        self._waiters.announced(session_key, seq_ids)

    def on_gap(self) -> None:
        self._housekeeping.hurry()
        self._waiters.look_again()

    def on_control(self, message: bytes) -> None:
        self._housekeeping.on_control(message)

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until told otherwise; the process' exit code."""
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
        self._supervision.tell(channel.Ready(tuple(self._upstreams.pool.catalogue.base_models())))
        await asyncio.wait({orders, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        broken = self._broken_duty()
        if broken is not None:
            # Without its lease, or without reports, a worker does harm: another one takes the slot.
            log.critical("a duty ended, the worker gives up", exc_info=broken)
            orders.cancel()
        elif (order := await orders) is not None:
            await self._drain(order)
        self._waiters.drain()
        self._send_back_training()
        await self._server.stop(_LAST_REPLIES_S)
        await self._close()
        return 0 if broken is None else _BROKEN

    def _broken_duty(self) -> BaseException | None:
        """Why a duty, which is endless, has ended; None while all go on."""
        ended = next((task for task in self._tasks if task.done()), None)
        return (ended.exception() or RuntimeError("it returned")) if ended is not None else None

    async def _opened(self, orders: asyncio.Task[channel.Drain | None]) -> bool:
        """Whether it can serve; False when it is to stop, or its supervisor is gone, before the store has answered.

        Raises `StoreRefused`.
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
                # Replaced while the store is away: queued connections wait for it in the slot's socket.
                log.warning("store does not answer yet", extra={"error": str(error)})
                await asyncio.sleep(_OPEN_RETRY_S)
        with suppress(StoreError):  # then the first turn of the housekeeping follows the list
            await self._upstreams.published.sync()
        await self._upstreams.pool.learn_models()
        for duty in [*self._housekeeping.duties(), self._lag.run, self._report]:
            self._tasks.append(asyncio.create_task(duty()))

    async def _obey(self) -> channel.Drain | None:
        """Follow orders until one is to drain; None when the supervisor is gone."""
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
        self._key_usage.shared = keyring.shared
        self._dispatcher.reconfigure(settings)
        revoked = self._dispatcher.end_revoked(keyring.knows)
        log.info("configuration was read again", extra={"samples_of_revoked_keys": revoked})

    async def _drain(self, order: channel.Drain) -> None:
        log.info("draining", extra={"in_flight": self._dispatcher.in_flight})
        self._edge.start_draining()
        if order.replaced:
            # Another worker serves the slot: send every poll there. A submission that still comes over an old
            # connection is taken, until there is none: a 429 would slow the whole client down for ten seconds.
            self._server.stop_accepting()
            self._waiters.drain()
            self._send_back_training()
        else:
            # The last of its slot. Polls are sent back once, and are then held as ever until the samples have ended:
            # "try again" at once, and again, would make the SDK spin.
            self._dispatcher.drain()
            self._waiters.send_back()
            self._send_back_training()
        await self._wait_drained(order)
        self._dispatcher.drain()
        if orphaned := self._dispatcher.orphan_all():
            log.warning("drain is over: the rest is submitted again elsewhere", extra={"orphaned": orphaned})
        await self._wait_idle_at_most(_LAST_REPLIES_S)

    async def _wait_idle(self, order: channel.Drain) -> None:
        """Until the last sample has ended; one that is replaced takes those that old connections still bring."""
        await self._dispatcher.wait_idle()
        if order.replaced:
            await self._edge.wait_all_closed(_OLD_CONNECTIONS_S)
            await self._dispatcher.wait_idle()

    async def _wait_drained(self, order: channel.Drain) -> None:
        """Until every sample has ended, the deadline, or the end of the supervisor.

        A later order to drain replaces this one. Results that end with the supervisor's own Redis are handed out until
        it says that all were fetched.
        """
        idle = asyncio.create_task(self._wait_idle(order))
        next_order = asyncio.create_task(self._supervision.next_order())
        try:
            while True:
                waiting = {next_order} if idle.done() else {next_order, idle}
                done, _ = await asyncio.wait(waiting, timeout=order.deadline_s, return_when=asyncio.FIRST_COMPLETED)
                if not done or (idle.done() and not self._keeps_results(order)):
                    return
                if next_order.done():
                    again = next_order.result()
                    if again is None or (idle.done() and isinstance(again, channel.Drain)):
                        return
                    if isinstance(again, channel.Drain):
                        order = again
                    elif isinstance(again, channel.Reload):
                        # A key that is revoked is revoked on every process, on those that are being replaced too.
                        self._reload(again.settings)
                    next_order = asyncio.create_task(self._supervision.next_order())
        finally:
            idle.cancel()
            next_order.cancel()
            await asyncio.gather(idle, next_order, return_exceptions=True)

    def _send_back_training(self) -> None:
        if self._trainer is not None:
            self._trainer.send_back()

    def _keeps_results(self, order: channel.Drain) -> bool:
        return not order.replaced and self._config.settings.redis_url is None

    async def _wait_idle_at_most(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            log.warning("store does not take the last endings", extra={"in_flight": self._dispatcher.in_flight})

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._dispatcher.close()
        await self._leave_store()
        await self._upstreams.close()
        await self._passed_http.close()
        if self._trainer is not None:
            await self._trainer.close()
        await self._store.close()
        self._supervision.tell(self.status())  # what was counted since the last one
        await self._supervision.close()

    async def _leave_store(self) -> None:
        """Write the last clocks and give the lease back: what is left of ours is then reaped at once."""
        try:
            async with asyncio.timeout(_LAST_REPLIES_S):
                await self._parts.expiry.flush()
                await self._store.release_lease(self._config.instance)
                await leave(self._store, self._config.instance)
        except (StoreError, TimeoutError) as error:
            log.debug("store was left without a word", extra={"error": str(error)})

    async def _report(self) -> None:
        while True:
            self._supervision.tell(self.status())
            await asyncio.sleep(channel.STATUS_INTERVAL_S)

    def status(self) -> channel.Status:
        self._counters.store_commands = self._store.commands
        return channel.Status(
            in_flight=self._dispatcher.in_flight,
            in_flight_bytes=self._dispatcher.in_flight_bytes,
            loop_lag_ms_p99=round(self._lag.p99_ms(), 3),
            loop_lag_ms_max=round(self._lag.max_ms(), 3),
            store_connected=self._store.connected_since_s is not None,
            sessions=len(self._parts.sessions),
            upstreams=self._upstreams.pool.statuses(),
            counters=self._counters.snapshot(),
            draining=self._dispatcher.draining,
            paused=self._upstreams.executor.paused,
            passed_in_flight=self._dispatcher.quota.passed_in_flight
            + (self._trainer.in_flight if self._trainer else 0),
            stages=self._counters.stages.snapshot(),
            keys=self._key_usage.statuses(key.name for key in self._parts.live.settings.api_keys or ()),
            missing_models=self._upstreams.pool.missing_models(),
        )


def _settle_garbage_collection() -> None:
    """What start-up made is never garbage; and what is in flight should not be looked through every 700 objects.

    With Python's defaults the collector took a ninth of a busy worker's time, and more with more in flight; with 50,000
    at a time, its looks were the longest turns of the loop: 20 to 30 ms while 4,096 samples came.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _trainer(settings: Settings, source_ip: str | None) -> TrainingServer | None:
    if settings.training_upstream is None:
        return None
    session = make_training_session(settings, source_ip)
    key, forward = settings.training_api_key, settings.training_forward_key
    return TrainingServer(settings.training_upstream, session, api_key=key, forward_key=forward)
