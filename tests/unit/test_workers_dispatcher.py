"""One live attempt, one terminal state, nothing left behind: whatever the store and the clients do."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from shared.config import Settings
from shared.core.errors import BadRequest, Overloaded
from shared.core.lifecycle import State
from shared.core.record import Record
from shared.store.base import StoreError, StoreFull, StoreRefused, StoreUnavailable
from shared.store.refill import REFILL_S
from tests.worker_bench import (
    AWAY,
    DONE,
    OTHER_OWNER,
    OWNER,
    REPLY_LOST,
    WorkerBench,
    session,
    spec,
    until,
)
from workers import dispatcher, settling
from workers.running import Ending, Phase
from workers.slicing import SLICE
from workers.waiters import Wake

if TYPE_CHECKING:
    from shared.core.model import SampleKey
    from shared.core.record import Claim
    from shared.store.base import Settled

KEY = session().key(1)
LONG_S = 3600.0


@pytest.fixture(autouse=True)
def store_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatcher, settling):
        monkeypatch.setattr(module, "STORE_RETRY_FIRST_S", 0.001)
        monkeypatch.setattr(module, "STORE_RETRY_LONGEST_S", 0.001)


@pytest.fixture
async def bench() -> WorkerBench:
    return WorkerBench()


# -- the ordinary life ------------------------------------------------------------------------------------------------


async def test_a_sample_is_begun_executed_settled_and_announced(bench: WorkerBench) -> None:
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    await bench.started()
    assert bench.state(KEY) is State.PENDING
    assert bench.dispatcher.in_flight == 1
    bench.executor.finish(KEY)
    record = await waiter.wait()
    assert isinstance(record, Record)
    assert bytes(record.payload) == b"result"
    assert bench.state(KEY) is State.READY
    assert bench.store.announced == [KEY]
    assert bench.holds_nothing()
    assert (bench.counters.begun, bench.counters.completed) == (1, 1)


async def test_the_result_is_readable_before_anybody_is_told(bench: WorkerBench) -> None:
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    await bench.started()
    bench.store.gate = asyncio.Event()
    bench.executor.finish(KEY)
    await until(lambda: bench.store.commands == 2)
    assert not waiter._future.done()
    assert bench.store.announced == []
    bench.store.gate.set()
    await waiter.wait()
    assert bench.state(KEY) is State.READY


async def test_undelivered_results_live_as_long_as_they_are_told_to() -> None:
    bench = WorkerBench(undelivered_ttl_s=12.0)
    await bench.started()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.server.samples[KEY].expires_s == bench.clock.monotonic_s() + 12.0


async def test_an_executor_that_breaks_fails_the_sample_without_telling_why_in_public(bench: WorkerBench) -> None:
    await bench.started()
    bench.executor.crash(KEY, RuntimeError("secret words"))
    await bench.dispatcher.wait_idle()
    stored = bench.server.samples[KEY]
    assert stored.header.state is State.FAILED
    assert b"secret" not in stored.payload
    assert b'"category":"server"' in stored.payload
    assert bench.holds_nothing()


# -- duplicates -------------------------------------------------------------------------------------------------------


async def test_a_duplicate_while_begin_is_in_flight_is_one_sample(bench: WorkerBench) -> None:
    """A6, A14: the second submission finds the first before the store has answered."""
    bench.store.gate = asyncio.Event()
    both = [asyncio.create_task(bench.submit()) for _ in range(2)]
    await until(lambda: bench.store.commands == 1)
    bench.store.gate.set()
    await asyncio.gather(*both)
    await until(lambda: bench.executor.started)
    assert bench.executor.started == [KEY]
    assert bench.store.commands == 1
    assert bench.counters.duplicates_suppressed == 1
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()


async def test_a_duplicate_of_what_runs_and_of_what_has_ended(bench: WorkerBench) -> None:
    """A6"""
    await bench.started()
    await bench.submit()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    await bench.submit()
    assert bench.executor.started == [KEY]
    assert bench.state(KEY) is State.READY
    assert bench.counters.duplicates_suppressed == 2
    assert bench.holds_nothing()


@pytest.mark.parametrize("ended", [False, True])
async def test_another_payload_under_a_used_seq_id_is_refused(bench: WorkerBench, ended: bool) -> None:
    """A18: nothing of the first is in the message."""
    await bench.started()
    if ended:
        bench.executor.finish(KEY)
        await bench.dispatcher.wait_idle()
    with pytest.raises(BadRequest, match="used before") as caught:
        await bench.submit(wanted=spec([1]))
    assert "10" not in str(caught.value)
    assert bench.executor.started == [KEY]
    assert bench.dispatcher.in_flight == (0 if ended else 1)


async def test_two_workers_race_and_one_runs_it(bench: WorkerBench) -> None:
    """A6: whoever the store says was first."""
    other = WorkerBench(bench.server, OTHER_OWNER)
    await asyncio.gather(bench.submit(), other.submit())
    await until(lambda: bench.executor.started or other.executor.started)
    assert len(bench.executor.started + other.executor.started) == 1
    first, second = (bench, other) if bench.executor.started else (other, bench)
    assert second.holds_nothing()
    assert second.counters.duplicates_suppressed == 1
    first.executor.finish(KEY)
    await first.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_polls_that_relied_on_this_worker_look_for_themselves_when_it_was_not_first(bench: WorkerBench) -> None:
    await WorkerBench(bench.server, OTHER_OWNER).submit()
    bench.store.gate = asyncio.Event()
    submission = asyncio.create_task(bench.submit())
    await until(lambda: bench.dispatcher.running(KEY) is not None)
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    bench.store.gate.set()
    await submission
    assert await waiter.wait() is Wake.LOOK
    assert bench.dispatcher.running(KEY) is None


async def test_a_duplicate_does_not_outwait_the_store(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_DUPLICATE_WAITS_S", 0.001)
    bench.store.gate = asyncio.Event()
    first = asyncio.create_task(bench.submit())
    await until(lambda: bench.dispatcher.in_flight == 1)
    with pytest.raises(Overloaded):
        await bench.submit()
    bench.store.gate.set()
    await first
    assert bench.dispatcher.in_flight == 1
    await bench.dispatcher.close()


# -- a store that is away ---------------------------------------------------------------------------------------------


async def test_a_begin_whose_reply_was_lost_is_repeated_until_it_is_known(bench: WorkerBench) -> None:
    """The client is told to send it again, and what may have been entered runs and ends."""
    bench.store.fail_after = REPLY_LOST
    with pytest.raises(StoreUnavailable):
        await bench.submit()
    assert bench.state(KEY) is State.PENDING
    assert not bench.executor.started
    bench.store.fail_after = None
    await until(lambda: bench.executor.started == [KEY])
    await bench.submit()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY
    assert bench.executor.started == [KEY]
    assert bench.counters.begun == 1
    assert bench.holds_nothing()


async def test_a_begin_whose_reply_was_lost_may_have_come_second(bench: WorkerBench) -> None:
    other = WorkerBench(bench.server, OTHER_OWNER)
    await other.submit()
    bench.store.fail_after = REPLY_LOST
    with pytest.raises(StoreUnavailable):
        await bench.submit()
    bench.store.fail_after = None
    await bench.dispatcher.wait_idle()
    assert not bench.executor.started
    assert bench.holds_nothing()
    await other.dispatcher.close()


async def test_a_begin_that_was_never_sent_leaves_nothing_behind(bench: WorkerBench) -> None:
    bench.store.fail_before = AWAY
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    with pytest.raises(StoreUnavailable):
        await bench.submit()
    assert bench.holds_nothing()
    assert await waiter.wait() is Wake.LOOK
    assert bench.counters.rejected_store == 1
    bench.store.fail_before = None
    await bench.started()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()


async def test_duplicates_of_a_begin_that_failed_fail_as_well(bench: WorkerBench) -> None:
    bench.store.fail_before = AWAY
    results = await asyncio.gather(bench.submit(), bench.submit(), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results), results
    assert bench.holds_nothing()


async def test_a_submission_whose_handler_was_cancelled_is_looked_after(bench: WorkerBench) -> None:
    bench.store.gate = asyncio.Event()
    submission = asyncio.create_task(bench.submit())
    await until(lambda: bench.store.commands == 1)
    submission.cancel()
    await asyncio.gather(submission, return_exceptions=True)
    assert submission.cancelled()
    bench.store.gate.set()
    await until(lambda: bench.executor.started == [KEY])
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY
    assert bench.holds_nothing()


async def test_a_result_waits_here_while_the_store_is_away(bench: WorkerBench) -> None:
    await bench.started()
    bench.store.fail_before = AWAY
    bench.executor.finish(KEY)
    before = bench.store.commands
    await until(lambda: bench.store.commands >= before + 3)
    assert bench.state(KEY) is State.PENDING
    assert bench.dispatcher.in_flight == 1
    bench.store.fail_before = None
    await bench.dispatcher.wait_idle()
    assert bench.server.samples[KEY].payload == b"result"
    assert bench.counters.completed == 1


async def test_a_settle_whose_reply_was_lost_counts_once(bench: WorkerBench) -> None:
    await bench.started()
    bench.store.fail_after = REPLY_LOST
    bench.executor.finish(KEY)
    await until(lambda: bench.state(KEY) is State.READY)
    bench.store.fail_after = None
    await bench.dispatcher.wait_idle()
    assert bench.store.announced == [KEY]
    assert bench.counters.completed == 1
    assert len(bench.server.logs[KEY.session_key, 0].entries) == 1


async def test_what_was_settled_is_remembered_in_case_the_store_loses_it(bench: WorkerBench) -> None:
    """C7: its id, not its result."""
    await bench.started()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert [key for key, _ in bench.settlements.claims()] == [KEY]


async def test_while_a_restarted_store_is_refilled_new_samples_are_refused(bench: WorkerBench) -> None:
    """C3: one that is sent again may be running on a worker that has not said so yet."""
    bench.server.wipe()
    with pytest.raises(Overloaded, match="refilled"):
        await bench.submit()
    bench.clock.advance(REFILL_S)
    await bench.started()
    await bench.dispatcher.close()


async def test_a_late_result_of_an_orphaned_sample_is_dropped(bench: WorkerBench) -> None:
    """The first terminal state wins; polls here are told to look."""
    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    assert await bench.store.reap(OWNER, ttl_s=60.0, now_ms=0) == [KEY]
    bench.executor.finish(KEY)
    assert await waiter.wait() is Wake.LOOK
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.ORPHANED
    assert bench.counters.completed == 0
    assert bench.store.announced == []
    assert bench.holds_nothing()


async def test_a_full_store_refuses_new_samples_for_a_while_without_being_asked(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5"""

    async def full(*_: object) -> None:
        raise StoreFull("OOM")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "begin", full)
        with pytest.raises(StoreFull):
            await bench.submit()
    assert bench.holds_nothing()
    with pytest.raises(Overloaded, match="full"):
        await bench.submit()
    assert bench.store.commands == 0
    assert bench.counters.rejected_store == 2
    bench.clock.advance(1.0)
    await bench.started()
    await bench.dispatcher.close()


async def test_a_result_that_the_store_can_never_take_fails_and_keeps_nobody_out(bench: WorkerBench) -> None:
    """C5"""
    bench.server.max_bytes = 2**20
    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    bench.executor.finish(KEY, Ending(State.READY, bytes(2**20 + 1)))
    record = await waiter.wait()
    assert isinstance(record, Record)
    assert record.header.state is bench.state(KEY) is State.FAILED
    failure = json.loads(bytes(record.payload))
    assert failure["category"] == "server"
    assert "1.0 MiB" in failure["error"]
    assert (bench.counters.failed, bench.counters.completed) == (1, 0)
    await bench.dispatcher.wait_idle()
    await bench.started(2)
    await bench.dispatcher.close()


async def test_a_result_that_may_fit_later_waits_while_the_store_is_full(bench: WorkerBench) -> None:
    """C5"""
    bench.store.fail_before = StoreFull("OOM")
    with pytest.raises(StoreFull):
        await bench.submit()
    bench.store.fail_before = None
    bench.clock.advance(1.0)
    await bench.started()
    bench.server.max_bytes = 3
    bench.executor.finish(KEY)
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 3)
    with pytest.raises(Overloaded, match="full"):
        await bench.submit(2)
    bench.server.max_bytes = 0
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY
    assert bench.holds_nothing()


REFUSED = StoreRefused("NOPERM this user has no permissions")


async def test_a_result_that_the_store_refuses_again_and_again_fails(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once, not once a try."""
    settle = bench.store.settle

    async def refuse_results(key: SampleKey, claim: Claim, state: State, *more: Any, **named: Any) -> Settled:
        if state is State.READY:
            raise REFUSED
        return await settle(key, claim, state, *more, **named)

    monkeypatch.setattr(bench.store, "settle", refuse_results)
    await bench.started()
    bench.executor.finish(KEY, Ending(State.READY, bytes(5000)))
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.FAILED
    assert b"refuses" in bench.server.samples[KEY].payload
    assert [record.message for record in caplog.records] == ["store refuses the ending of a sample"]
    assert bench.holds_nothing()


async def test_a_sample_of_which_the_store_takes_no_ending_at_all_is_let_go(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits here is told; the reaper ends the record."""

    async def refuse(*_: object, **__: object) -> Settled:
        raise REFUSED

    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    monkeypatch.setattr(bench.store, "settle", refuse)
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    record = await waiter.wait()
    assert isinstance(record, Record)
    assert record.header.state is State.FAILED
    assert bench.state(KEY) is State.PENDING
    assert bench.store.announced == []
    assert bench.holds_nothing()


async def test_a_begin_that_is_refused_again_and_again_is_given_up(bench: WorkerBench) -> None:
    bench.store.fail_after = REPLY_LOST
    with pytest.raises(StoreUnavailable):
        await bench.submit()
    bench.store.fail_after, bench.store.fail_before = None, REFUSED
    await bench.dispatcher.wait_idle()
    assert bench.holds_nothing()
    bench.store.fail_before = None
    await bench.started()
    await bench.dispatcher.close()


@pytest.mark.parametrize("trouble", [AWAY, StoreFull("OOM"), REFUSED], ids=["away", "full", "refused"])
async def test_a_result_that_waits_for_the_store_can_be_cancelled(bench: WorkerBench, trouble: StoreError) -> None:
    await bench.started()
    held = bench.dispatcher.in_flight_bytes
    bench.store.fail_before = trouble
    bench.executor.finish(KEY, Ending(State.READY, bytes(5000)))
    running = bench.dispatcher.running(KEY)
    assert running is not None
    await until(lambda: running.phase is Phase.WAITING)
    assert bench.dispatcher.cancel(KEY)
    await until(lambda: bench.dispatcher.in_flight_bytes < held + 1000)
    bench.store.fail_before = None
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED
    assert bench.store.announced == [KEY]
    assert (bench.counters.cancelled, bench.counters.completed) == (1, 0)
    assert bench.holds_nothing()


async def test_a_session_that_ends_takes_its_waiting_results_with_it_and_a_drain_does_not(bench: WorkerBench) -> None:
    await bench.started()
    bench.store.fail_before = AWAY
    bench.executor.finish(KEY)
    running = bench.dispatcher.running(KEY)
    assert running is not None
    await until(lambda: running.phase is Phase.WAITING)
    assert bench.dispatcher.orphan_all() == 0
    assert bench.dispatcher.end_session(session().session_id) == 1
    bench.store.fail_before = None
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.STALE


async def test_a_cancel_after_a_result_whose_reply_was_lost_comes_too_late_and_all_are_told(bench: WorkerBench) -> None:
    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    bench.store.fail_after = REPLY_LOST
    bench.executor.finish(KEY)
    await until(lambda: bench.state(KEY) is State.READY)
    assert bench.dispatcher.cancel(KEY)
    bench.store.fail_after = None
    assert await waiter.wait() is Wake.LOOK
    assert bench.state(KEY) is State.READY
    assert bench.store.announced == [KEY]
    await bench.dispatcher.wait_idle()


# -- ending early -----------------------------------------------------------------------------------------------------


async def test_a_cancel_before_it_executes_ends_it_unexecuted(bench: WorkerBench) -> None:
    bench.store.gate = asyncio.Event()
    submission = asyncio.create_task(bench.submit())
    await until(lambda: bench.dispatcher.in_flight == 1)
    assert bench.dispatcher.cancel(KEY)
    bench.store.gate.set()
    await submission
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED
    assert not bench.executor.started
    assert bench.holds_nothing()


async def test_a_cancel_while_it_executes_interrupts_the_execution(bench: WorkerBench) -> None:
    await bench.started()
    assert bench.dispatcher.cancel(KEY)
    assert not bench.dispatcher.cancel(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.executor.interrupted == [KEY]
    stored = bench.server.samples[KEY]
    assert stored.header.state is State.CANCELLED
    assert b'"category":"user"' in stored.payload
    assert bench.counters.cancelled == 1
    assert bench.holds_nothing()


async def test_a_cancel_in_the_same_turn_as_the_result_still_cancels(bench: WorkerBench) -> None:
    await bench.started()
    bench.executor.finish(KEY)
    assert bench.dispatcher.cancel(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED
    assert (bench.counters.cancelled, bench.counters.completed) == (1, 0)


async def test_a_cancel_while_it_settles_changes_nothing(bench: WorkerBench) -> None:
    await bench.started()
    bench.store.gate = asyncio.Event()
    bench.executor.finish(KEY)
    await until(lambda: bench.store.commands == 2)
    assert not bench.dispatcher.cancel(KEY)
    bench.store.gate.set()
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY
    assert bench.counters.cancelled == 0


async def test_a_session_that_ends_takes_its_samples_with_it_and_no_other(bench: WorkerBench) -> None:
    elsewhere = session(number=0, session_id="gws-" + "x" * 32)
    await bench.started(1)
    await bench.started(2)
    await bench.submit(1, of=elsewhere)
    await until(lambda: len(bench.executor.started) == 3)
    assert bench.dispatcher.end_session(session().session_id) == 2
    assert bench.dispatcher.end_session(session().session_id) == 0
    await until(lambda: bench.dispatcher.in_flight == 1)
    assert bench.state(session().key(1)) is bench.state(session().key(2)) is State.STALE
    assert bench.state(elsewhere.key(1)) is State.PENDING
    bench.executor.finish(elsewhere.key(1))
    await bench.dispatcher.wait_idle()
    assert bench.counters.stale == 2


async def test_a_large_session_ends_slice_by_slice(bench: WorkerBench) -> None:
    """To cancel all that a silent client runs, in one turn, holds up everybody else."""
    many = 2 * SLICE + 1
    for seq_id in range(1, many + 1):
        await bench.submit(seq_id)
    await until(lambda: len(bench.executor.started) == many)
    tasks = [running.task for running in bench.dispatcher.all_running()]
    assert bench.dispatcher.end_session(session().session_id) == many
    assert sum(task is not None and task.cancelling() for task in tasks) == SLICE
    await bench.dispatcher.wait_idle()
    assert bench.counters.stale == many


async def test_a_sample_that_completes_before_it_is_interrupted_keeps_its_result(bench: WorkerBench) -> None:
    await bench.started()
    running = bench.dispatcher.running(KEY)
    assert running is not None
    assert running.decide(Ending(State.STALE))
    bench.executor.finish(KEY)
    await until(lambda: running.phase is not Phase.EXECUTING)
    running.interrupt()
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_at_the_drain_deadline_what_runs_is_orphaned(bench: WorkerBench) -> None:
    """B12"""
    await bench.started()
    bench.dispatcher.drain()
    assert bench.dispatcher.orphan_all() == 1
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.ORPHANED
    assert bench.store.announced == [KEY]
    assert bench.counters.orphaned == 1


async def test_closing_leaves_samples_pending_for_the_reaper(bench: WorkerBench) -> None:
    await bench.started()
    await bench.dispatcher.close()
    assert bench.state(KEY) is State.PENDING
    assert KEY in bench.server.open_sets[OWNER]
    assert bench.holds_nothing()


async def test_closing_while_the_store_is_away_ends(bench: WorkerBench) -> None:
    bench.store.fail_after = REPLY_LOST
    with pytest.raises(StoreUnavailable):
        await bench.submit()
    await bench.dispatcher.close()
    assert bench.holds_nothing()


# -- limits -----------------------------------------------------------------------------------------------------------


async def test_a_draining_worker_takes_nothing_new_but_knows_what_it_has(bench: WorkerBench) -> None:
    await bench.started()
    bench.dispatcher.drain()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "draining"
    assert bench.counters.rejected_draining == 1
    await bench.submit()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_samples_in_flight_are_limited() -> None:
    """E3: 429 at the cap, and room again when one ends."""
    bench = WorkerBench(max_in_flight=1)
    await bench.started()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "in_flight"
    assert bench.counters.rejected_in_flight == 1
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    await bench.started(2)
    await bench.dispatcher.close()


async def test_bytes_in_flight_are_limited_and_a_reload_may_change_that() -> None:
    bench = WorkerBench(max_in_flight_bytes=1)
    await bench.started()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "bytes"
    assert bench.counters.rejected_bytes == 1
    bench.dispatcher.reconfigure(Settings())
    await bench.started(2)
    await bench.dispatcher.close()
    assert bench.holds_nothing()


async def test_prompts_and_unwritten_results_are_accounted_for(bench: WorkerBench) -> None:
    await bench.submit(1, spec(range(1000)))
    held = bench.dispatcher.in_flight_bytes
    assert held >= len(spec(range(1000)).prompt)
    await until(lambda: bench.executor.started)
    bench.store.fail_before = AWAY
    bench.executor.finish(KEY, Ending(State.READY, bytes(5000)))
    await until(lambda: bench.dispatcher.in_flight_bytes == held + 5000)
    bench.store.fail_before = None
    await bench.dispatcher.wait_idle()
    assert bench.holds_nothing()


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_held_after_any_mixture_of_trouble(seed: int) -> None:
    """Random submissions, failures of the store, cancels and results; in the end all is settled or was never begun."""
    rng, bench = Random(seed), WorkerBench()
    submissions: list[asyncio.Task[None]] = []
    for _ in range(200):
        bench.store.fail_before = AWAY if rng.random() < 0.2 else None
        bench.store.fail_after = REPLY_LOST if rng.random() < 0.2 else None
        seq_id = rng.randrange(40)
        match rng.randrange(4):
            case 0 | 1:
                submissions.append(asyncio.create_task(bench.submit(seq_id)))
            case 2:
                bench.dispatcher.cancel(session().key(seq_id))
            case 3 if submissions:
                rng.choice(submissions).cancel()
        for key in rng.sample(sorted(bench.executor._ends), min(2, len(bench.executor._ends))):
            if not bench.executor._ends[key].done():
                bench.executor.finish(key, DONE)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    bench.store.fail_before = bench.store.fail_after = None
    results = await asyncio.gather(*submissions, return_exceptions=True)
    unexpected = [
        result
        for result in results
        if result is not None and not isinstance(result, (StoreError, asyncio.CancelledError))
    ]
    assert not unexpected, unexpected
    async with asyncio.timeout(10):
        while bench.dispatcher.in_flight:
            for key in [key for key, end in bench.executor._ends.items() if not end.done()]:
                bench.executor.finish(key)
            await asyncio.sleep(0.001)
    assert bench.holds_nothing()
    assert not bench.server.open_sets[OWNER]
    assert len(bench.executor.started) == len(set(bench.executor.started))
    assert State.PENDING not in {stored.header.state for stored in bench.server.samples.values()}
