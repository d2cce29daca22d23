"""What a worker does by the clock: its lease, its sessions, its upstreams, the samples of the dead.

One task per duty, owned by the worker. A duty that fails is logged once per kind of trouble and tried again at its
next turn: the store being away is a state, not an event.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import suppress
from itertools import starmap
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.roll_call import RollCall, there_message
from shared.loop.slices import batches
from shared.store.contract import SessionState, Settled
from shared.store.recovery import REFILL_S, reap
from workers.samples import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from shared.config import Settings
    from shared.core.model import SampleKey
    from shared.core.record import Claim
    from workers.parts import WorkerParts
    from workers.samples.live import LiveSample

log = logging.getLogger(__name__)

# architecture.md: a lease is renewed every 5 s.
RENEW_EVERY_S: Final = 5.0
RETRY_EVERY_S: Final = 0.5
PROBE_EVERY_S: Final = 2.0
MODELS_EVERY_S: Final = 30.0
# Commands of one duty that are sent in one turn of the loop: 15 ms of it.
_AT_ONCE: Final = 200
# Batches that wait for their answers together. The turns of a busy loop are long: a refill must not take too many.
_BATCHES_AHEAD: Final = 5


class Housekeeping:
    def __init__(
        self, parts: WorkerParts, owner: str, settings: Settings, rng_unit: Callable[[], float] = random.random
    ) -> None:
        self._parts = parts
        self._rng_unit = rng_unit
        self._owner = owner
        self._lease_s = settings.lease_s
        # One that fails, or comes late, must not end the lease.
        self._renew_every_s = min(RENEW_EVERY_S, settings.lease_s / 3)
        self._session_timeout_ms = round(settings.session_timeout_s * 1000)
        self._undelivered_ttl_s = settings.undelivered_ttl_s
        self._troubled: set[str] = set()
        self._held_lease = False
        self._restart_seen_s: float | None = None
        self._must_refill = False
        self._roll = RollCall(owner, settings.lease_s)
        self._hurry = asyncio.Event()
        self._renewed_s = float("-inf")
        self._tended_s = float("-inf")
        parts.dispatcher.on_loss = self.doubt

    def duties(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        """Endless coroutines, one per duty; whoever starts them owns and cancels them."""
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
            # What was kept for a store that is away is wanted there as soon as it is back.
            await _wait(self._hurry, self._renew_every_s if tended and not self._roll.awaited else RETRY_EVERY_S)
            self._hurry.clear()

    def hurry(self) -> None:
        """The store is back after a loss: tend to it now."""
        self._hurry.set()

    def doubt(self) -> None:
        """Something that must be in the store was not: look now whether the lease is, but not again and again."""
        if self._parts.clock.monotonic_s() - self._tended_s >= RETRY_EVERY_S:
            self._hurry.set()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(PROBE_EVERY_S))
            await self._try("probe", self._parts.pool.probe)

    async def _learn_models(self) -> None:
        while True:
            # Until an upstream has answered once, nothing can be sampled: ask often.
            every_s = MODELS_EVERY_S if self._parts.pool.catalogue.known else PROBE_EVERY_S
            await _wait(self._parts.pool.changed, self._jittered(every_s))
            await self._try("models", self._parts.pool.learn_models)

    def _jittered(self, seconds: float) -> float:
        """Within a quarter: workers that started together must not ask together for ever."""
        return seconds * (0.75 + 0.5 * self._rng_unit())

    async def tend_store(self) -> None:
        """One turn: lease, inbox, list of upstreams, sessions, reaping. Raises `StoreError`."""
        self._parts.dispatcher.just_settled.drop_stale(self._parts.clock.monotonic_s())
        await self._renew()
        with suppress(StoreError):
            # On a cluster it may be on a node that is away, and the other duties on those that are not.
            await self._look_at_roll()
        for message in await self._parts.store.take_inbox(self._owner):
            self.on_control(message)
        await self._parts.published.sync()
        await self._write_signs_of_life()
        await self._end_dead_sessions()
        await self._count_expiring()
        await self._reap_lapsed()

    def on_control(self, message: bytes) -> None:
        match messages.parse(message):
            case messages.Cancel(key):
                self._parts.dispatcher.cancel(key)
            case messages.Finish(session_id):
                self._parts.sessions.mark_finished(session_id)
                self._parts.dispatcher.end_session(session_id)
            case messages.Lost():
                self.doubt()
            case messages.Upstreams():
                self._parts.published.look()
            case messages.There(owner):
                self._roll.is_there(owner)
                self._hurry_if_awaited(owner)
            case messages.Gone(owner):
                self._hurry_if_awaited(owner)
                self._roll.is_gone(owner)

    def _hurry_if_awaited(self, owner: str) -> None:
        if owner in self._roll.awaited:
            self._hurry.set()

    async def _renew(self) -> None:
        clock, store = self._parts.clock, self._parts.store
        self._tended_s = clock.monotonic_s()
        held = await store.renew_lease(self._owner, ttl_s=self._lease_s)
        lost = self._held_lease and not held
        restarted_s = store.restarted_s
        if lost or restarted_s != self._restart_seen_s:
            log.warning("the store may have lost data: what this worker knows is entered again")
            # Noted before it is tried: the lease is back with this turn, the samples only when all are entered.
            self._must_refill = True
            self._roll.begin(clock.monotonic_s())
            self._parts.dispatcher.expect_refill(self._lease_s)
            self._parts.dispatcher.meet_restart(restarted_s)
        elif not self._held_lease:
            # What ran before this worker was there may be on its way into the store.
            self._parts.dispatcher.expect_refill(await store.refill_left_s())
        # A lease that lapsed may be this worker's own fault; one that is gone before its time is everybody's loss.
        flushed = lost and clock.monotonic_s() - self._renewed_s < self._lease_s
        self._renewed_s = clock.monotonic_s()
        joins = not self._held_lease
        self._held_lease = True
        self._restart_seen_s = restarted_s
        if flushed:
            await store.broadcast(messages.lost_message())
        if self._must_refill:
            await self._refill_and_tell(REFILL_S if flushed else 0.0)
        elif joins:
            await self._answer_roll(await store.server_run())

    async def _refill_and_tell(self, others_need_s: float) -> None:
        """Others may begin later, and have as much to tell: who asks meanwhile is told to wait."""
        began_s = self._parts.clock.monotonic_s()
        run = await self._parts.store.server_run()
        await self._parts.store.note_refill(self._owner, window_s=self._lease_s)
        await self._refill()
        await self._answer_roll(run)
        self._must_refill = False
        now_s = self._parts.clock.monotonic_s()
        window_s = max(now_s - began_s, others_need_s)
        self._parts.dispatcher.expect_refill(self._roll.has_told(now_s, window_s))
        await self._parts.store.note_refill(self._owner, window_s=max(window_s, REFILL_S))

    async def _answer_roll(self, run: bytes) -> None:
        """All that this worker runs is in the server of `run`. Raises `StoreUnavailable` when that is gone again."""
        if not await self._parts.store.answer_roll(self._owner, run):
            self._must_refill = True
            raise StoreUnavailable("the store was restarted once more", maybe_done=False)
        await self._parts.store.broadcast(there_message(self._owner))

    async def _look_at_roll(self) -> None:
        """Others that have not told yet what they run are waited for; see `shared/core/roll_call.py`."""
        roll = await self._parts.store.read_roll()
        if self._owner not in roll.answered:
            # Lost once more, or struck off by somebody who took this worker for dead.
            self._must_refill = True
            self._hurry.set()
        left_s = self._roll.look(roll, self._parts.clock.monotonic_s())
        if left_s is not None:
            self._parts.dispatcher.expect_refill(left_s)

    async def _refill(self) -> None:
        """A store that was emptied learns what runs, so that its polls find it pending instead of gone, and what is
        lost: the results that nobody fetched yet. Where nothing was lost, none of this changes anything.
        """
        # One whose begin was never answered may be another's: it is begun again when all have told (dispatcher.py).
        begun = [running for running in self._parts.dispatcher.all_running() if running.is_begun]
        await _each(map(self._enter_again, begun))
        await _each(starmap(self._orphan_if_missing, self._parts.unfetched.claims()))

    async def _enter_again(self, running: LiveSample) -> None:
        await self._parts.store.begin(running.key, running.claim)
        if self._parts.dispatcher.running(running.key) is not running:
            # It settled meanwhile: what was written then is first, and begin changed nothing. But had the store lost
            # that too, nobody would run what we have just entered.
            await self._orphan_if_missing(running.key, running.claim)

    async def _orphan_if_missing(self, key: SampleKey, claim: Claim) -> None:
        settled = await self._parts.store.settle(
            key, claim, State.ORPHANED, b"", ttl_s=self._undelivered_ttl_s, now_ms=self._parts.clock.wall_ms()
        )
        if settled in (Settled.WRITTEN, Settled.RESTORED):
            self._parts.store.announce(key.session_key, key.seq_id)

    async def _write_signs_of_life(self) -> None:
        noted = self._parts.sessions.take_noted()
        try:
            # Not one after the other: the lease waits for them.
            await _each(map(self._write_sign_of_life, noted))
        except StoreError:
            self._parts.sessions.return_noted(noted)
            raise

    async def _write_sign_of_life(self, session_id: str) -> None:
        await self._parts.sessions.touch(session_id)

    async def _end_dead_sessions(self) -> None:
        """Finished sessions whose message was lost, and those that have been silent for too long."""
        for session_ids in batches(self._parts.dispatcher.session_ids(), _AT_ONCE):
            await self._end_dead_among(session_ids)

    async def _end_dead_among(self, session_ids: list[str]) -> None:
        infos = await self._parts.store.session_infos(session_ids)
        for session_id, info in zip(session_ids, infos, strict=True):
            self._parts.sessions.learn(session_id, info)
            if info.state is SessionState.FINISHED or self._is_silent(info.seen_ms):
                if ended := self._parts.dispatcher.end_session(session_id):
                    log.info("session is over: its running samples are ended", extra={"samples": ended})

    def _is_silent(self, seen_ms: int) -> bool:
        """Time without the store does not count against a session: nobody could write its signs of life."""
        since_s = self._parts.store.connected_since_s
        if since_s is None or not seen_ms:
            return False
        connected_ms = (self._parts.clock.monotonic_s() - since_s) * 1000
        silent_ms = self._parts.clock.wall_ms() - seen_ms
        return min(silent_ms, connected_ms) > self._session_timeout_ms

    async def _count_expiring(self) -> None:
        """Results whose time is about to end unread: counted while the store can still tell."""
        margin_s = min(2 * RENEW_EVERY_S, self._undelivered_ttl_s / 2)
        then_s = self._parts.clock.monotonic_s() - (self._undelivered_ttl_s - margin_s)
        for due in batches(self._parts.unfetched.take_settled_before(then_s), _AT_ONCE):
            self._parts.counters.expired_undelivered += await self._parts.store.count_unread(due)

    async def _reap_lapsed(self) -> None:
        """End the samples of instances that hold no lease; not before everybody had a lease's time to renew."""
        since_s = self._parts.store.connected_since_s
        if since_s is None or self._parts.clock.monotonic_s() - since_s < self._lease_s:
            return
        for owner in await self._parts.store.lapsed_owners():
            if owner != self._owner:
                reaped = await reap(self._parts.store, owner, self._undelivered_ttl_s, self._parts.clock)
                self._parts.counters.orphaned += reaped

    async def _try(self, duty: str, act: Callable[[], Awaitable[None]]) -> bool:
        """Whether it was done."""
        try:
            await act()
        except StoreError as error:
            if duty not in self._troubled:
                log.warning("duty waits for the store", extra={"duty": duty, "error": str(error)})
            self._troubled.add(duty)
        except Exception:
            # A duty is a task boundary: one bad turn must not end the lease.
            log.exception("duty failed", extra={"duty": duty})
        else:
            self._troubled.discard(duty)
            return True
        return False


async def _each(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Do all of these, a batch more in each turn of the loop; raises the first error when the last of them has ended.

    What comes after a batch with an error is not begun.
    """
    ahead: deque[asyncio.Task[BaseException | None]] = deque()
    error: BaseException | None = None
    try:
        for batch in batches(calls, _AT_ONCE):
            ahead.append(asyncio.create_task(_first_error(batch)))
            await asyncio.sleep(0)
            if len(ahead) >= _BATCHES_AHEAD and (error := await ahead.popleft()):
                break
        while ahead:
            later = await ahead.popleft()
            error = error or later
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    if error is not None:
        raise error


async def _first_error(calls: list[Coroutine[None, None, None]]) -> BaseException | None:
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return next((outcome for outcome in outcomes if outcome is not None), None)


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()
