"""Every sample that this worker runs, from the claim to its one terminal state.

    submit   claim (in memory, before any await) -> begin (store) -> a task per sample
    run      execute (upstream, again as often as retry.py allows) -> settle (store, until it is written) -> wake

Three rules:

- A claim is made before the first await, so that a duplicate that arrives here meanwhile finds it.
- A `begin` whose reply was lost may have made this worker the owner. It is repeated until the outcome is known: a
  PENDING record whose owner does not run the sample would never end.
- Cancelling ends the execution, never the settling. Whichever comes second (a cancel, a result) finds the sample
  settled and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.errors import BadRequest, StoreError, StoreFull, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import Category, Failure
from shared.core.record import Claim, Header, Record
from shared.core.retry import REFUSALS_MOST
from shared.store.contract import Settled
from shared.store.recovery import is_refilling
from shared.wire.sdk.calls import failure_body
from workers.samples.live import STANDARD_PACE, Ending, LiveSample, Phase, end_all
from workers.samples.quota import Quota
from workers.samples.settling import Settler
from workers.samples.store_share import StoreShare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.clock import Clock
    from shared.config import Settings
    from shared.core.callers import Caller
    from shared.core.model import SampleKey, SampleSpec, SamplingSession
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.samples.expiry import UnfetchedResults
    from workers.samples.live import Executes, Pace
    from workers.samples.waiters import Waiters
    from workers.upstream.catalogue import Target

log = logging.getLogger(__name__)

# A worker instance claims a sample once. Executing it again within the claim keeps the number.
_FIRST_ATTEMPT: Final = 1
# What a sample costs this worker besides its prompt: a task, futures, the connection to the upstream.
_SAMPLE_OVERHEAD_BYTES: Final = 16 * 1024

CANCELLED_BY_CLIENT: Final = Failure("the sample was cancelled by the client", Category.USER)
_GATEWAY_FAILED: Final = Failure("the gateway failed on this sample; its log says why", Category.SERVER)


class Dispatcher:
    """Run samples. `samples` holds those that this worker runs; others only read it.

    `on_loss` is called when a record that must be in the store is not there.
    """

    def __init__(
        self,
        store: Store,
        executor: Executes,
        waiters: Waiters,
        counters: Counters,
        clock: Clock,
        owner: str,
        settings: Settings,
        unfetched: UnfetchedResults,
        on_loss: Callable[[], None],
        pace: Pace = STANDARD_PACE,
    ) -> None:
        # Kept, because asking for the running loop is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._executor = executor
        self._waiters = waiters
        self._counters = counters
        self._note_accepting, self._note_storing = counters.stages.accept.add, counters.stages.store.add
        self._clock = clock
        self.owner = owner
        self.on_loss: Final = on_loss
        self._unfetched = unfetched
        self._undelivered_ttl_s = settings.undelivered_ttl_s
        self._pace = pace
        self.quota = Quota(counters, settings, StoreShare(unfetched))
        self._settler = Settler(self._write, store, self.quota, clock, pace)
        self.samples: dict[SampleKey, LiveSample] = {}
        self._by_session: dict[str, set[LiveSample]] = {}
        self._refilled_until_s = 0.0
        self._restart_met_s = store.restarted_s

    @property
    def in_flight(self) -> int:
        return len(self.samples)

    def session_ids(self) -> list[str]:
        """Return the client sessions of the samples that run."""
        return list(self._by_session)

    def is_refilling(self, now_s: float) -> bool:
        """Return whether a record that the store does not know may still be on its way to it."""
        restarted_s = self._store.restarted_s
        if restarted_s != self._restart_met_s or now_s < self._refilled_until_s:
            return True
        return restarted_s is not None and is_refilling(self._store, self._clock)

    def meet_restart(self, restarted_s: float | None) -> None:
        """Note that this restart of the store is being dealt with; an unknown one counts as a refill under way."""
        self._restart_met_s = restarted_s

    def expect_refill(self, within_s: float) -> None:
        """Note that running samples are being entered into the store again, for at most `within_s` from now."""
        self._refilled_until_s = self._clock.monotonic_s() + within_s

    # -- submission ---------------------------------------------------------------------------------------------

    async def submit(
        self,
        session: SamplingSession,
        seq_id: int,
        spec: SampleSpec,
        target: Target,
        caller: Caller,
        trace: str | None = None,
    ) -> LiveSample:
        """Own this sample, or find that it duplicates one that is owned; return when it is safe to promise the result.

        Raise `BadRequest` (another payload was sent under this seq_id), `Overloaded`, `StoreError`.
        """
        key = session.key(seq_id)
        sample = self.samples.get(key)
        if sample is None:
            now_s = self._clock.monotonic_s()
            sample = self._claim(session, key, spec, target, caller, trace, now_s)
            first = await self._begin(sample, now_s)
        else:
            first = await sample.first_header(self._pace.duplicate_waits_s)
        if first is not None:
            if first.claim.digest != spec.digest:
                raise BadRequest("this seq_id was used before in this sampling session, with another request")
            self._counters.duplicates_suppressed += 1
        return sample

    def _claim(
        self,
        session: SamplingSession,
        key: SampleKey,
        spec: SampleSpec,
        target: Target,
        caller: Caller,
        trace: str | None,
        now_s: float,
    ) -> LiveSample:
        held_bytes = spec.size_bytes + _SAMPLE_OVERHEAD_BYTES
        request_id = ids.request_id(session, key.seq_id)
        self.quota.require_store_share(caller)
        store_full = now_s < self.quota.store_full_until_s
        refilling = self.is_refilling(now_s)
        holding = self.quota.take(caller, held_bytes, store_full=store_full, store_refilling=refilling)
        claim = Claim(self.owner, _FIRST_ATTEMPT, spec.num_samples, spec.digest)
        sample = LiveSample(session, key, request_id, spec, claim, target, held_bytes, holding, trace)
        # No await between the lookup in `submit` and this line: the second of two equal submissions finds the first.
        self.samples[key] = sample
        of_session = self._by_session.get(session.session_id)
        if of_session is None:
            of_session = self._by_session[session.session_id] = set()
        of_session.add(sample)
        return sample

    async def _begin(self, sample: LiveSample, asked_s: float) -> Header | None:
        """Enter the sample into the store and start it. Return the header that was there first, if it is not ours."""
        try:
            first = await self._store.begin(sample.key, sample.claim)
        except StoreError as error:
            self.quota.count_rejection("store", sample.holding.tally)
            if isinstance(error, StoreFull):
                self.quota.note_store_full(self._clock.monotonic_s())
            if isinstance(error, StoreUnavailable) and error.maybe_done:
                sample.task = asyncio.create_task(self._begin_until_known(sample))
            else:
                self._abandon(sample, error)
            raise
        except asyncio.CancelledError:
            # The handler is gone, but the command may be on its way: look after the sample all the same.
            sample.task = asyncio.create_task(self._begin_until_known(sample))
            raise
        self._note_accepting(self._clock.monotonic_s() - asked_s)
        return self._begun(sample, first)

    def _begun(self, sample: LiveSample, first: Header | None) -> Header | None:
        # A record of this very claim was made by an earlier `begin` whose reply was lost.
        if first is not None and first.state is State.PENDING and first.claim == sample.claim:
            first = None
        if sample.awaited is not None:
            sample.awaited.set_result(first)
        if first is not None:
            self._drop(sample)
            return first
        sample.is_begun = True
        self._counters.begun += 1
        sample.holding.tally.samples += 1
        sample.task = self._loop.create_task(self._run(sample))
        return None

    async def _begin_until_known(self, sample: LiveSample) -> None:
        """Repeat a `begin` whose reply was lost: only when the store says who was first is it known who runs it."""
        pause_s = self._pace.store_retry_first_s
        refusals = 0
        while True:
            try:
                if self.is_refilling(self._clock.monotonic_s()):
                    # What lost the reply may have lost the data: the first claim must be entered again first.
                    raise StoreUnavailable("the store is being refilled", maybe_done=False)
                first = await self._store.begin(sample.key, sample.claim)
            except StoreError as error:
                refusals += isinstance(error, StoreRefused)
                if refusals >= REFUSALS_MOST:
                    # Nobody was promised a result. Sent again, the submission is recognised as ours, and runs.
                    self._abandon(sample, error)
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, self._pace.store_retry_longest_s)
            else:
                self._begun(sample, first)
                return

    # -- the sample's task --------------------------------------------------------------------------------------

    async def _run(self, sample: LiveSample) -> None:
        try:
            ending = await self._execute(sample)
            ended_s = self._clock.monotonic_s()
            sample.held_bytes += len(ending.payload)
            self.quota.grow(sample.holding, len(ending.payload))
            settled: Settled | None
            try:
                settled = await self._write(sample, ending)
            except StoreError as error:
                ending, settled = await self._settler.persist(sample, ending, error)
            settled_s = self._clock.monotonic_s()
            self._note_storing(settled_s - ended_s)
            self._publish(sample, ending, settled, settled_s)
        finally:
            self._release(sample)

    async def _execute(self, sample: LiveSample) -> Ending:
        if (stop := sample.stop) is not None:
            return stop
        sample.phase = Phase.EXECUTING
        try:
            return await self._executor.execute(sample)
        except asyncio.CancelledError:
            if (stop := sample.stop) is None:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return stop
        except Exception:
            # A task boundary: the client must get an ending, whatever went wrong.
            log.exception("sample broke", extra={"request_id": sample.request_id})
            return Ending.failed(_GATEWAY_FAILED)
        finally:
            sample.phase = Phase.SETTLING

    def _write(self, sample: LiveSample, ending: Ending) -> Awaitable[Settled]:
        """Return an attempt to write the ending, which raises `StoreError` when awaited."""
        return self._store.settle(
            sample.key,
            sample.claim,
            ending.state,
            ending.payload,
            ttl_s=self._undelivered_ttl_s,
            now_ms=self._clock.wall_ms(),
        )

    def _publish(self, sample: LiveSample, ending: Ending, settled: Settled | None, settled_s: float) -> None:
        """Count the ending and wake the polls that wait for it, here and at other workers.

        `settled` is None if the store took no ending of this sample.
        """
        key = sample.key
        if settled is Settled.REFUSED and sample.stop is None:
            self._counters.results_late += 1
            self._waiters.settled(key, None)
            return
        self._counters.result_bytes += len(ending.payload)
        name = _COUNTERS[ending.state]
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        if settled is Settled.RESTORED:
            self.on_loss()
        if settled is not None:
            self._unfetched.add(key, sample.claim, settled_s, sample.holding.owner_tag, len(ending.payload))
            self._store.announce(key.session_key, key.seq_id)
        if settled is Settled.REFUSED:
            # The result may have been written before the sample was cancelled: polls must look.
            self._waiters.settled(key, None)
            return
        record = Record(Header(ending.state, sample.claim), memoryview(ending.payload))
        if not self._waiters.settled(key, record) and settled is not None:
            self._waiters.just_settled.keep(key, record, settled_s)

    # -- ending samples from outside ----------------------------------------------------------------------------

    def cancel(self, key: SampleKey) -> bool:
        """End the sample because the client no longer wants it; return whether it ends for that reason."""
        sample = self.samples.get(key)
        return sample is not None and sample.end_early(Ending(State.CANCELLED, failure_body(CANCELLED_BY_CLIENT)))

    def end_session(self, session_id: str) -> int:
        """End all samples of a session that was finished or fell silent; return how many."""
        return end_all(self._by_session.get(session_id, ()), State.STALE)

    def end_revoked(self, knows: Callable[[bytes], bool]) -> int:
        """End the samples of keys that are no longer known, since nobody may fetch them; return how many."""
        return end_all([sample for sample in self.samples.values() if not knows(sample.holding.digest)], State.STALE)

    def drain(self) -> None:
        """Accept nothing more. Running samples go on."""
        self.quota.draining = True

    def orphan_all(self) -> int:
        """Orphan what still runs at the drain deadline, so that the SDK submits it elsewhere; return how many."""
        return end_all(list(self.samples.values()), State.ORPHANED)

    async def wait_idle(self) -> None:
        await self.quota.idle.wait()

    async def close(self) -> None:
        """Cancel every task without settling: the store is closing, and the reaper does the rest."""
        tasks = [sample.task for sample in self.samples.values() if sample.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sample in list(self.samples.values()):
            # Its task was cancelled before its first step, or it has none yet.
            self._release(sample)

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _release(self, sample: LiveSample) -> None:
        if self.samples.get(sample.key) is not sample:
            return
        del self.samples[sample.key]
        session_id = sample.session.session_id
        of_session = self._by_session[session_id]
        of_session.remove(sample)
        if not of_session:
            del self._by_session[session_id]
        self.quota.release(sample.holding, sample.held_bytes)

    def _drop(self, sample: LiveSample) -> None:
        """Forget a sample that is not ours after all; polls that relied on us to wake them must look."""
        self._release(sample)
        self._waiters.settled(sample.key, None)

    def _abandon(self, sample: LiveSample, error: StoreError) -> None:
        """Forget a sample that was never begun and will not be."""
        sample.begin_failed(error)
        self._drop(sample)


_COUNTERS: Final = {
    State.READY: "completed",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.STALE: "stale",
    State.ORPHANED: "orphaned",
}
