"""Every sample that this worker runs, from the claim to the one terminal state.

    submit   claim (in memory, before any await) -> begin (store) -> a task per sample
    run      execute (upstream, again as often as retry.py allows) -> settle (store, until it is written) -> wake

Three rules:

- A claim is made before the first await, so that a duplicate that lands here meanwhile finds it.
- A `begin` whose reply was lost may have made this worker the owner. It is repeated until the outcome is known: a
  PENDING record whose owner does not run it would never end.
- Cancelling ends the execution, never the settling. Whoever comes second (a cancel, a result) finds the sample
  settled and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core.errors import BadRequest, StoreError, StoreFull, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import Category, Failure
from shared.core.record import Claim, Header, Record
from shared.core.retry import REFUSALS_MOST
from shared.store.contract import Settled
from shared.store.recovery import is_refilling
from shared.wire.sdk.calls import failure_body
from workers.samples.live import Ending, LiveSample, Phase, end_all
from workers.samples.quota import Quota
from workers.samples.recent_results import FreshResults
from workers.samples.settling import STORE_RETRY_FIRST_S, STORE_RETRY_LONGEST_S, Settler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shared.clock import Clock
    from shared.config import Settings
    from shared.core.callers import Caller
    from shared.core.model import SampleKey, SampleSpec, SamplingSession
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.samples.live import Executes
    from workers.samples.quota import KeyUsage
    from workers.samples.recent_results import UnfetchedResults
    from workers.samples.waiters import Waiters
    from workers.upstream.catalogue import Target

log = logging.getLogger(__name__)

# A worker instance claims a sample once; what is executed again within the claim keeps it.
_FIRST_ATTEMPT: Final = 1
# After a write was refused for lack of memory, new samples are refused this long before Redis is asked again.
_FULL_FOR_S: Final = 1.0
# What a sample costs this worker besides its prompt: task, futures, the connection to the upstream.
_SAMPLE_OVERHEAD_BYTES: Final = 16 * 1024

CANCELLED_BY_CLIENT: Final = Failure("the sample was cancelled by the client", Category.USER)


class Dispatcher:
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
        key_usage: KeyUsage,
    ) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._executor = executor
        self._waiters = waiters
        self._counters = counters
        self._note_accepting, self._note_storing = counters.stages.accept.add, counters.stages.store.add
        self._clock = clock
        self.owner = owner
        # Told when a record was not there that must be.
        self.on_loss: Callable[[], None] = lambda: None
        self._unfetched = unfetched
        self._settler = Settler(store, clock, settings.undelivered_ttl_s, self._hold, self._note_full)
        self.quota = Quota(key_usage, counters, settings)
        self.just_settled = FreshResults(settings.undelivered_ttl_s)
        self._running: dict[SampleKey, LiveSample] = {}
        self._by_session: dict[str, set[LiveSample]] = {}
        self._full_until_s = 0.0
        self._refilled_until_s = 0.0
        self._restart_met_s = store.restarted_s

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def in_flight_bytes(self) -> int:
        return self.quota.in_flight_bytes

    @property
    def draining(self) -> bool:
        return self.quota.draining

    def running(self, key: SampleKey) -> LiveSample | None:
        return self._running.get(key)

    def all_running(self) -> Iterable[LiveSample]:
        return list(self._running.values())

    def session_ids(self) -> list[str]:
        """The client sessions of what runs."""
        return list(self._by_session)

    def reconfigure(self, settings: Settings) -> None:
        self.quota.reconfigure(settings)

    @property
    def refilling(self) -> bool:
        """Whether what the store does not know may still be on its way to it."""
        return self._is_refilling(self._clock.monotonic_s())

    def _is_refilling(self, now_s: float) -> bool:
        restarted_s = self._store.restarted_s
        is_met = restarted_s == self._restart_met_s
        if not is_met or now_s < self._refilled_until_s:
            return True
        return restarted_s is not None and is_refilling(self._store, self._clock)

    def meet_restart(self, restarted_s: float | None) -> None:
        """That restart of the store is being dealt with; until then it counts as being refilled."""
        self._restart_met_s = restarted_s

    def expect_refill(self, within_s: float) -> None:
        """The store is being told again what runs, for `within_s` from now at most."""
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
    ) -> None:
        """Own this sample, or find that it is a duplicate of one that is owned. Returns when it is safe to promise.

        Raises `BadRequest` (another payload under this seq_id), `Overloaded`, `StoreError`.
        """
        key = session.key(seq_id)
        running = self._running.get(key)
        if running is None:
            now_s = self._clock.monotonic_s()
            running = self._claim(session, key, spec, target, caller, now_s)
            running.trace = trace
            first = await self._begin(running, now_s)
        else:
            first = await running.known()
        if first is not None:
            self._accept_duplicate(first, spec)

    def _claim(
        self,
        session: SamplingSession,
        key: SampleKey,
        spec: SampleSpec,
        target: Target,
        caller: Caller,
        now_s: float,
    ) -> LiveSample:
        held_bytes = spec.size_bytes + _SAMPLE_OVERHEAD_BYTES
        full = now_s < self._full_until_s
        holding = self.quota.take(caller, held_bytes, store_full=full, store_refilling=self._is_refilling(now_s))
        claim = Claim(self.owner, _FIRST_ATTEMPT, spec.num_samples, spec.digest)
        running = LiveSample(session, key, spec, claim, target, held_bytes, holding)
        # No await between the look and this line: the second of two equal submissions finds the first.
        self._running[key] = running
        of_session = self._by_session.get(session.session_id)
        if of_session is None:
            of_session = self._by_session[session.session_id] = set()
        of_session.add(running)
        return running

    async def _begin(self, running: LiveSample, asked_s: float) -> Header | None:
        """Enter it into the store and start it; the header of who was first when that was not us."""
        try:
            first = await self._store.begin(running.key, running.claim)
        except StoreUnavailable as error:
            self.quota.count_rejection("store", running.holding.tally)
            if error.maybe_done:
                running.task = asyncio.create_task(self._begin_until_known(running))
            else:
                self._abandon(running, error)
            raise
        except StoreError as error:
            if isinstance(error, StoreFull):
                self._note_full()
            self.quota.count_rejection("store", running.holding.tally)
            self._abandon(running, error)
            raise
        except asyncio.CancelledError:
            # The handler is gone, the command may be on its way: the sample is looked after all the same.
            running.task = asyncio.create_task(self._begin_until_known(running))
            raise
        self._note_accepting(self._clock.monotonic_s() - asked_s)
        return self._begun(running, first)

    def _begun(self, running: LiveSample, first: Header | None) -> Header | None:
        if first is not None and not self._is_ours(first, running):
            running.was_first(first)
            self._disown(running)
            return first
        running.is_begun = True
        running.was_first(None)
        self._counters.begun += 1
        running.holding.tally.samples += 1
        running.task = self._loop.create_task(self._run(running))
        return None

    async def _begin_until_known(self, running: LiveSample) -> None:
        """The reply to `begin` was lost. Only when the store tells who is first is it known whether to run it."""
        pause_s = STORE_RETRY_FIRST_S
        refusals = 0
        while True:
            try:
                # What lost the reply may have lost the data: whoever was first must be heard first.
                first = await self._begin_unless_refilling(running)
            except StoreError as error:
                refusals += isinstance(error, StoreRefused)
                if refusals >= REFUSALS_MOST:
                    # Nobody has its promise. Sent again it is recognised as ours, and runs.
                    self._abandon(running, error)
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, STORE_RETRY_LONGEST_S)
            else:
                self._begun(running, first)
                return

    async def _begin_unless_refilling(self, running: LiveSample) -> Header | None:
        if self.refilling:
            raise StoreUnavailable("the store is being refilled", maybe_done=False)
        return await self._store.begin(running.key, running.claim)

    def _is_ours(self, first: Header, running: LiveSample) -> bool:
        """A record of this very claim: the begin before it was done, and its reply was lost."""
        return first.state is State.PENDING and first.claim == running.claim

    def _accept_duplicate(self, first: Header, spec: SampleSpec) -> None:
        if first.claim.digest != spec.digest:
            raise BadRequest("this seq_id was used before in this sampling session, with another request")
        self._counters.duplicates_suppressed += 1

    # -- the sample's task --------------------------------------------------------------------------------------

    async def _run(self, running: LiveSample) -> None:
        try:
            ending = await self._execute(running)
            ended_s = self._clock.monotonic_s()
            ending, settled = await self._settler.settle(running, ending)
            settled_s = self._clock.monotonic_s()
            self._note_storing(settled_s - ended_s)
            self._tell(running, ending, settled, settled_s)
        finally:
            self._release(running)

    async def _execute(self, running: LiveSample) -> Ending:
        if (stop := running.ending()) is not None:
            return stop
        running.phase = Phase.EXECUTING
        try:
            return await self._executor.execute(running)
        except asyncio.CancelledError:
            if (stop := running.ending()) is None:
                raise
            _swallow_cancellation()
            return stop
        except Exception:
            # A task boundary: whatever broke, the client is owed an end.
            log.exception("sample broke", extra={"request_id": running.request_id})
            return Ending.failed(Failure("the gateway failed on this sample; its log says why", Category.SERVER))
        finally:
            running.phase = Phase.SETTLING

    def _tell(self, running: LiveSample, ending: Ending, settled: Settled | None, settled_s: float) -> None:
        """Tell who waits, here and elsewhere. `settled`: None when the store takes no ending of it at all."""
        key = running.key
        if settled is Settled.REFUSED and running.stop is None:
            self._counters.results_late += 1
            self._waiters.settled(key, None)
            return
        self._counters.result_bytes += len(ending.payload)
        self._count_ending(ending.state)
        if settled is Settled.RESTORED:
            self.on_loss()
        if settled is not None:
            self._unfetched.add(key, running.claim, settled_s)
            self._store.announce(key.session_key, key.seq_id)
        if settled is Settled.REFUSED:
            # Its result may have been written after all, before it was cancelled: whoever waits must look.
            self._waiters.settled(key, None)
            return
        record = Record(Header(ending.state, running.claim), memoryview(ending.payload))
        if not self._waiters.settled(key, record) and settled is not None:
            self.just_settled.keep(key, record, settled_s)

    # -- ending samples from outside ----------------------------------------------------------------------------

    def cancel(self, key: SampleKey) -> bool:
        """The client does not want it any more. True when it ends for that."""
        running = self._running.get(key)
        return running is not None and running.end_early(Ending(State.CANCELLED, failure_body(CANCELLED_BY_CLIENT)))

    def end_session(self, session_id: str) -> int:
        """Its session was finished, or fell silent: end all it runs. Returns how many."""
        return end_all(self._by_session.get(session_id, ()), State.STALE)

    def end_revoked(self, knows: Callable[[bytes], bool]) -> int:
        """End what runs for keys that are no longer known: nobody may fetch it. Returns how many."""
        return end_all([running for running in self.all_running() if not knows(running.holding.digest)], State.STALE)

    def drain(self) -> None:
        """Take nothing more; what runs goes on."""
        self.quota.draining = True

    def orphan_all(self) -> int:
        """The drain deadline: the SDK submits what still runs again, elsewhere. Returns how many."""
        return end_all(self.all_running(), State.ORPHANED)

    async def wait_idle(self) -> None:
        await self.quota.wait_idle()

    async def close(self) -> None:
        """Give up every task without settling: the store is closing, the reaper does the rest."""
        tasks = [running.task for running in self.all_running() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in self.all_running():
            # Its task was cancelled before its first step, or it has none yet.
            self._release(running)

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _hold(self, running: LiveSample, more_bytes: int) -> None:
        running.held_bytes += more_bytes
        self.quota.grow(running.holding, more_bytes)

    def _release(self, running: LiveSample) -> None:
        if self._running.get(running.key) is running:
            del self._running[running.key]
            self._forget_of_session(running)
            self.quota.release(running.holding, running.held_bytes)

    def _forget_of_session(self, running: LiveSample) -> None:
        session_id = running.session.session_id
        of_session = self._by_session[session_id]
        of_session.remove(running)
        if not of_session:
            del self._by_session[session_id]

    def _abandon(self, running: LiveSample, error: StoreError) -> None:
        """It was never begun, and will not be."""
        running.not_known(error)
        self._disown(running)

    def _disown(self, running: LiveSample) -> None:
        """It is not ours after all: polls that relied on us to wake them must look for themselves."""
        self._release(running)
        self._waiters.settled(running.key, None)

    def _note_full(self) -> None:
        self._full_until_s = self._clock.monotonic_s() + _FULL_FOR_S

    def _count_ending(self, state: State) -> None:
        if state is State.READY:
            self._counters.completed += 1
            return
        name = _ENDINGS[state]
        setattr(self._counters, name, getattr(self._counters, name) + 1)


_ENDINGS: Final = {
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.STALE: "stale",
    State.ORPHANED: "orphaned",
}


def _swallow_cancellation() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
