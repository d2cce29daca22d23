"""What becomes of samples while the store is away, full, refuses or forgets: one terminal state, nothing left over."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from shared.core.errors import Overloaded, StoreError, StoreFull, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import Record
from shared.store.recovery import REFILL_S
from tests.garbage import garbage
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, REPLY_LOST, WorkerBench, session
from workers.samples.live import Ending, LiveSample, Phase
from workers.samples.waiters import Wake

if TYPE_CHECKING:
    from shared.core.model import SampleKey
    from shared.core.record import Claim
    from shared.store.contract import Settled


KEY = session().key(1)
LONG_S = 3600.0


@pytest.fixture
async def bench() -> WorkerBench:
    return WorkerBench()


async def test_a_begin_whose_reply_was_lost_is_repeated_until_it_is_known(bench: WorkerBench) -> None:
    """The client must send it again, and what may have been entered runs and ends."""
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
    assert await waiter.woken is Wake.LOOK
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


async def test_what_failed_leaves_nothing_for_the_garbage_collector(bench: WorkerBench) -> None:
    with garbage() as found:
        bench.store.fail_before = StoreUnavailable("away", maybe_done=False)
        await asyncio.gather(bench.submit(), bench.submit(), return_exceptions=True)
        bench.store.fail_before = None
        await bench.started()
        bench.store.fail_before = StoreUnavailable("away", maybe_done=False)
        bench.executor.finish(KEY)
        before = bench.store.commands
        await until(lambda: bench.store.commands >= before + 3)
        bench.store.fail_before = None
        await bench.dispatcher.wait_idle()
    assert not [item for item in found if isinstance(item, StoreError | LiveSample)]


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
    assert [key for key, _ in bench.unfetched.claims()] == [KEY]


async def test_while_a_restarted_store_is_refilled_new_samples_are_refused(bench: WorkerBench) -> None:
    """C3: one that is sent again may be running on a worker that has not said so yet."""
    bench.server.wipe()
    bench.clock.advance(REFILL_S)
    with pytest.raises(Overloaded, match="refilled"):
        await bench.submit()
    bench.dispatcher.meet_restart(bench.store.restarted_s)
    await bench.started()


async def test_a_restart_that_was_met_is_waited_out_all_the_same(bench: WorkerBench) -> None:
    """C3: others are as far a moment later."""
    bench.server.wipe()
    bench.dispatcher.meet_restart(bench.store.restarted_s)
    with pytest.raises(Overloaded, match="refilled"):
        await bench.submit()
    bench.clock.advance(REFILL_S)
    await bench.started()
    await bench.dispatcher.close()


async def test_a_late_result_of_an_orphaned_sample_is_dropped(bench: WorkerBench) -> None:
    """The first terminal state wins; polls here look."""
    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    assert await bench.store.reap(OWNER, ttl_s=60.0, now_ms=0) == [KEY]
    bench.executor.finish(KEY)
    assert await waiter.woken is Wake.LOOK
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
    record = await waiter.woken
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
    """Polls that wait here get the outcome; the reaper ends the record."""

    async def refuse(*_: object, **__: object) -> Settled:
        raise REFUSED

    await bench.started()
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    monkeypatch.setattr(bench.store, "settle", refuse)
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    record = await waiter.woken
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
    held = bench.dispatcher.quota.in_flight_bytes
    bench.store.fail_before = trouble
    bench.executor.finish(KEY, Ending(State.READY, bytes(5000)))
    running = bench.dispatcher.samples.get(KEY)
    assert running is not None
    await until(lambda: running.phase is Phase.WAITING)
    assert bench.dispatcher.cancel(KEY)
    await until(lambda: bench.dispatcher.quota.in_flight_bytes < held + 1000)
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
    running = bench.dispatcher.samples.get(KEY)
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
    assert await waiter.woken is Wake.LOOK
    assert bench.state(KEY) is State.READY
    assert bench.store.announced == [KEY]
    await bench.dispatcher.wait_idle()
