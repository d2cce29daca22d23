"""Do what a worker does at regular times: its lease, its sessions, its upstreams, the samples of dead workers.

There is one task per duty, owned by the worker. A duty that fails is logged once per kind of trouble, and tried again
at its next turn: a store that is away is a state, not an event.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError
from shared.loop.slices import batches, run_in_batches
from shared.store.contract import SessionState
from shared.store.recovery import reap
from workers.duties.lease import STANDARD_PACE, DutyPace, Lease
from workers.samples import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from shared.config import Settings
    from workers.parts import WorkerParts

log = logging.getLogger(__name__)

# Twenty looks a second cost 0.1 % of a core and see every stall that a client could feel.
_LAG_TICK_S: Final = 0.05
# One minute of looks, which is what /status and /livez show.
_LAG_LOOKS: Final = 1200


class Housekeeping:
    """Hold the duties of one worker."""

    def __init__(
        self,
        parts: WorkerParts,
        owner: str,
        settings: Settings,
        rng_unit: Callable[[], float] = random.random,
        pace: DutyPace = STANDARD_PACE,
    ) -> None:
        self._parts = parts
        self._rng_unit = rng_unit
        self._owner = owner
        self._lease_s = settings.lease_s
        self._pace = pace
        # A renewal that fails, or comes late, must not end the lease.
        self._renew_every_s = min(pace.renew_every_s, settings.lease_s / 3)
        self._session_timeout_ms = round(settings.session_timeout_s * 1000)
        self._undelivered_ttl_s = settings.undelivered_ttl_s
        self._troubled: set[str] = set()
        self.lease = Lease(parts, owner, settings, pace)

    def duties(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        """Return endless coroutines, one per duty. The caller starts, owns and cancels them."""
        return [
            self._tend_store,
            self._probe,
            self._learn_models,
            self._parts.expiry.run,
            self._parts.published.run,
        ]

    async def _tend_store(self) -> None:
        while True:
            tended = await self._try("store", self.tend_store)
            # What was kept for a store that is away is needed there as soon as it is back.
            is_calm = tended and not self.lease.awaits_others
            await _wait(self.lease.hurry, self._renew_every_s if is_calm else self._pace.retry_every_s)
            self.lease.hurry.clear()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(self._pace.probe_every_s))
            await self._try("probe", self._parts.pool.probe)

    async def _learn_models(self) -> None:
        while True:
            # Until an upstream has answered once, nothing can be sampled: ask often.
            is_known = self._parts.pool.catalogue.known
            every_s = self._pace.models_every_s if is_known else self._pace.probe_every_s
            await _wait(self._parts.pool.changed, self._jittered(every_s))
            await self._try("models", self._parts.pool.learn_models)

    def _jittered(self, seconds: float) -> float:
        """Vary by a quarter, so that workers that started together do not ask together forever."""
        return seconds * (0.75 + 0.5 * self._rng_unit())

    async def tend_store(self) -> None:
        """Take one turn: lease, inbox, list of upstreams, sessions, reaping. Raise `StoreError`."""
        self._parts.waiters.just_settled.drop_stale(self._parts.clock.monotonic_s())
        await self.lease.renew()
        with suppress(StoreError):
            # On a cluster the roll may be on a node that is away, and the other duties on nodes that are not.
            await self.lease.look_at_roll()
        for message in await self._parts.store.take_inbox(self._owner):
            self.on_control(message)
        await self._parts.published.sync()
        await self._write_signs_of_life()
        await self._end_dead_sessions()
        await self._count_expiring()
        await self._reap_lapsed()
        if (quota := self._parts.dispatcher.quota).key_usage.shared:
            await quota.store_share.update(self._parts.store, self._owner, self._lease_s)

    def on_control(self, message: bytes) -> None:
        """Do what a message from another worker asks for."""
        match messages.parse(message):
            case messages.Cancel(key):
                self._parts.dispatcher.cancel(key)
            case messages.Finish(session_id):
                self._parts.sessions.mark_finished(session_id)
                self._parts.dispatcher.end_session(session_id)
            case messages.Lost():
                self.lease.doubt()
            case messages.Upstreams():
                self._parts.published.look()
            case messages.There(owner):
                self.lease.on_there(owner)
            case messages.Gone(owner):
                self.lease.on_gone(owner)

    async def _write_signs_of_life(self) -> None:
        noted = self._parts.sessions.take_noted()
        try:
            # Many at a time, because the next renewal of the lease waits for them.
            await run_in_batches(map(self._parts.sessions.touch, noted), self._pace.at_once, self._pace.batches_ahead)
        except StoreError:
            self._parts.sessions.return_noted(noted)
            raise

    async def _end_dead_sessions(self) -> None:
        """End the samples of sessions that were silent for too long, or finished by a message that was lost."""
        for session_ids in batches(self._parts.dispatcher.session_ids(), self._pace.at_once):
            infos = await self._parts.store.session_infos(session_ids)
            for session_id, info in zip(session_ids, infos, strict=True):
                self._parts.sessions.learn(session_id, info)
                is_over = info.state is SessionState.FINISHED or self._is_silent(info.seen_ms)
                if is_over and (ended := self._parts.dispatcher.end_session(session_id)):
                    log.info("session is over: its running samples are ended", extra={"samples": ended})

    def _is_silent(self, seen_ms: int) -> bool:
        """Return whether a session gave no sign of life for too long.

        Time without the store does not count against it, because nobody could write its signs of life.
        """
        since_s = self._parts.store.connected_since_s
        if since_s is None or not seen_ms:
            return False
        connected_ms = (self._parts.clock.monotonic_s() - since_s) * 1000
        silent_ms = self._parts.clock.wall_ms() - seen_ms
        return min(silent_ms, connected_ms) > self._session_timeout_ms

    async def _count_expiring(self) -> None:
        """Count the results that are about to expire unread, while the store still has them."""
        margin_s = min(2 * self._pace.renew_every_s, self._undelivered_ttl_s / 2)
        then_s = self._parts.clock.monotonic_s() - (self._undelivered_ttl_s - margin_s)
        for due in batches(self._parts.unfetched.take_settled_before(then_s), self._pace.at_once):
            self._parts.counters.expired_undelivered += len(await self._parts.store.unread(due))

    async def _reap_lapsed(self) -> None:
        """End the samples of instances that hold no lease, once everybody had the length of a lease to renew it."""
        since_s = self._parts.store.connected_since_s
        if since_s is None or self._parts.clock.monotonic_s() - since_s < self._lease_s:
            return
        for owner in await self._parts.store.lapsed_owners():
            if owner != self._owner:
                reaped = await reap(self._parts.store, owner, self._undelivered_ttl_s, self._parts.clock)
                self._parts.counters.orphaned += reaped

    async def _try(self, duty: str, act: Callable[[], Awaitable[None]]) -> bool:
        """Take one turn of a duty, and return whether it succeeded."""
        try:
            await act()
        except StoreError as error:
            if duty not in self._troubled:
                log.warning("duty waits for the store", extra={"duty": duty, "error": str(error)})
            self._troubled.add(duty)
        except Exception:
            # A duty is a task boundary: one failed turn must not end the lease.
            log.exception("duty failed", extra={"duty": duty})
        else:
            self._troubled.discard(duty)
            return True
        return False


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()


class LoopLag:
    """Measure how late timers fire: the number that shows whether a worker still answers in time."""

    def __init__(self, tick_s: float = _LAG_TICK_S) -> None:
        self._tick_s = tick_s
        self._late_ms: deque[float] = deque(maxlen=_LAG_LOOKS)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._tick_s
            await asyncio.sleep(self._tick_s)
            self._late_ms.append(max(loop.time() - due_s, 0.0) * 1000)

    def p99_ms(self) -> float:
        late_ms = sorted(self._late_ms)
        return late_ms[int(len(late_ms) * 0.99)] if late_ms else 0.0

    def max_ms(self) -> float:
        return max(self._late_ms, default=0.0)
