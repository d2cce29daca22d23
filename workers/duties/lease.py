"""Renew a worker's lease in the store, and refill a store that lost its data.

A worker whose lease is gone before its time, or whose store was restarted, enters again everything that it knows: the
samples that it runs, and that the results it had settled are lost. Until every other worker has done the same, a record
that is missing says nothing (`shared/core/roll_call.py`).
"""

from __future__ import annotations

import asyncio
import logging
from itertools import starmap
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import Value
from shared.core.roll_call import RollCall, there_message
from shared.loop.slices import run_in_batches
from shared.store.contract import Settled
from shared.store.recovery import REFILL_S
from workers.samples import messages

if TYPE_CHECKING:
    from shared.config import Settings
    from shared.core.model import SampleKey
    from shared.core.record import Claim
    from workers.parts import WorkerParts
    from workers.samples.live import LiveSample

log = logging.getLogger(__name__)


class DutyPace(Value, frozen=True):
    """The times and sizes of the duties; tests hand in other values.

    `at_once`: the commands that one duty sends in one turn of the loop; 200 take 15 ms of it. `batches_ahead`: the
    batches that wait for their replies together. A busy loop takes long turns, and a refill must not need too many.
    """

    renew_every_s: float = 5.0
    retry_every_s: float = 0.5
    probe_every_s: float = 2.0
    models_every_s: float = 30.0
    at_once: int = 200
    batches_ahead: int = 5


STANDARD_PACE: Final = DutyPace()


class Lease:
    """Renew the lease of `owner`, and refill a store that lost data.

    `hurry` is set when the next turn must not wait.
    """

    def __init__(self, parts: WorkerParts, owner: str, settings: Settings, pace: DutyPace) -> None:
        self._parts = parts
        self._owner = owner
        self._lease_s = settings.lease_s
        self._undelivered_ttl_s = settings.undelivered_ttl_s
        self._pace = pace
        self.hurry = asyncio.Event()
        self._roll = RollCall(owner, settings.lease_s)
        self._is_held = False
        self._must_refill = False
        self._restart_seen_s: float | None = None
        self._tended_s = float("-inf")
        self._renewed_s = float("-inf")

    @property
    def awaits_others(self) -> bool:
        """Whether other workers have yet to enter what they run."""
        return bool(self._roll.awaited)

    def doubt(self) -> None:
        """Look soon whether the lease is there, because a record that must be there is not; but not again and again."""
        if self._parts.clock.monotonic_s() - self._tended_s >= self._pace.retry_every_s:
            self.hurry.set()

    def on_there(self, owner: str) -> None:
        """Note that `owner` has entered everything that it runs."""
        self._roll.is_there(owner)
        if owner in self._roll.awaited:
            self.hurry.set()

    def on_gone(self, owner: str) -> None:
        """Note that `owner` no longer runs anything."""
        if owner in self._roll.awaited:
            self.hurry.set()
        self._roll.is_gone(owner)

    async def renew(self) -> None:
        """Renew the lease, and refill the store if it lost data. Raise `StoreError`."""
        clock, store = self._parts.clock, self._parts.store
        self._tended_s = clock.monotonic_s()
        joins = not self._is_held
        lost = not await store.renew_lease(self._owner, ttl_s=self._lease_s) and not joins
        restarted_s = store.restarted_s
        if lost or restarted_s != self._restart_seen_s:
            log.warning("the store may have lost data: what this worker knows is entered again")
            # Noted before it is tried: the lease is back with this turn, the samples only when all are entered.
            self._must_refill = True
            self._roll.begin(clock.monotonic_s())
            self._parts.dispatcher.expect_refill(self._lease_s)
            self._parts.dispatcher.meet_restart(restarted_s)
        elif joins:
            # Samples of other workers, from before this one was there, may be on their way into the store.
            self._parts.dispatcher.expect_refill(await store.refill_left_s())
        # A lease that lapsed may be this worker's own fault. One that is gone before its time is everybody's loss.
        flushed = lost and clock.monotonic_s() - self._renewed_s < self._lease_s
        self._renewed_s = clock.monotonic_s()
        self._is_held = True
        self._restart_seen_s = restarted_s
        if flushed:
            await store.broadcast(messages.LOST_MESSAGE)
        if self._must_refill:
            await self._refill(REFILL_S if flushed else 0.0)
        elif joins:
            await self._answer_roll(await store.server_run())

    async def look_at_roll(self) -> None:
        """Find out which workers have not yet entered what they run. Raise `StoreError`."""
        roll = await self._parts.store.read_roll()
        if self._owner not in roll.answered:
            # The data was lost once more, or somebody took this worker for dead and removed it.
            self._must_refill = True
            self.hurry.set()
        left_s = self._roll.look(roll, self._parts.clock.monotonic_s())
        if left_s is not None:
            self._parts.dispatcher.expect_refill(left_s)

    # -- refilling ----------------------------------------------------------------------------------------------

    async def _refill(self, others_need_s: float) -> None:
        """Enter again what this worker knows; until all workers had time for that, new submissions must wait.

        The running samples are entered, so that their polls find them pending instead of gone, and the results that
        nobody has fetched are entered as orphaned. Where nothing was lost, this changes nothing.

        `others_need_s`: other workers may begin this much later, and have as much to enter.
        """
        clock, store = self._parts.clock, self._parts.store
        began_s = clock.monotonic_s()
        run = await store.server_run()
        await store.note_refill(self._owner, window_s=self._lease_s)
        # A sample whose begin was never answered may be another worker's: the dispatcher begins it again later.
        begun = [sample for sample in self._parts.dispatcher.samples.values() if sample.is_begun]
        at_once, ahead = self._pace.at_once, self._pace.batches_ahead
        await run_in_batches(map(self._enter_again, begun), at_once, ahead)
        await run_in_batches(starmap(self._orphan_if_missing, self._parts.unfetched.claims()), at_once, ahead)
        await self._answer_roll(run)
        self._must_refill = False
        now_s = clock.monotonic_s()
        window_s = max(now_s - began_s, others_need_s)
        self._parts.dispatcher.expect_refill(self._roll.entered_all(now_s, window_s))
        await store.note_refill(self._owner, window_s=max(window_s, REFILL_S))

    async def _answer_roll(self, run: bytes) -> None:
        """Report that everything this worker runs is in this run of the server.

        Raise `StoreUnavailable` if the server was restarted again.
        """
        if not await self._parts.store.answer_roll(self._owner, run):
            self._must_refill = True
            raise StoreUnavailable("the store was restarted once more", maybe_done=False)
        await self._parts.store.broadcast(there_message(self._owner))

    async def _enter_again(self, sample: LiveSample) -> None:
        await self._parts.store.begin(sample.key, sample.claim)
        if self._parts.dispatcher.samples.get(sample.key) is not sample:
            # It settled meanwhile. If its ending is in the store, begin changed nothing. If the store lost that too,
            # nobody runs what we have just entered.
            await self._orphan_if_missing(sample.key, sample.claim)

    async def _orphan_if_missing(self, key: SampleKey, claim: Claim) -> None:
        store, now_ms = self._parts.store, self._parts.clock.wall_ms()
        settled = await store.settle(key, claim, State.ORPHANED, b"", ttl_s=self._undelivered_ttl_s, now_ms=now_ms)
        if settled in (Settled.WRITTEN, Settled.RESTORED):
            store.announce(key.session_key, key.seq_id)
