"""One live attempt, one terminal state: a sample's life where nothing goes wrong, its duplicates, its early ends."""

from __future__ import annotations

import asyncio

import pytest

from shared.core.errors import BadRequest, Overloaded, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import Record
from shared.loop.slices import SLICE
from tests.waiting import until
from tests.worker_bench import (
    AWAY,
    OTHER_OWNER,
    OWNER,
    REPLY_LOST,
    WorkerBench,
    session,
    spec,
)
from workers.samples.live import Ending, Pace, Phase
from workers.samples.waiters import Wake

KEY = session().key(1)
LONG_S = 3600.0


@pytest.fixture
async def bench() -> WorkerBench:
    return WorkerBench()


# -- the ordinary life ---------------------------------------------------------------------------------------------


async def test_a_sample_is_begun_executed_settled_and_announced(bench: WorkerBench) -> None:
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    await bench.started()
    assert bench.state(KEY) is State.PENDING
    assert bench.dispatcher.in_flight == 1
    bench.executor.finish(KEY)
    record = await waiter.woken
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
    assert not waiter.woken.done()
    assert bench.store.announced == []
    bench.store.gate.set()
    await waiter.woken
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


# -- duplicates ----------------------------------------------------------------------------------------------------


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
    await until(lambda: KEY in bench.dispatcher.samples)
    waiter = bench.waiters.sample_waiter(KEY, LONG_S)
    bench.store.gate.set()
    await submission
    assert await waiter.woken is Wake.LOOK
    assert KEY not in bench.dispatcher.samples


@pytest.mark.parametrize("first", ["ours", "another's", "not known"])
async def test_duplicates_that_come_while_it_begins_learn_what_it_learns(bench: WorkerBench, first: str) -> None:
    """A6: more than one of them, and one that goes away meanwhile."""
    if first == "another's":
        await WorkerBench(bench.server, OTHER_OWNER).submit()
    bench.store.gate = asyncio.Event()
    submissions = [asyncio.create_task(bench.submit()) for _ in range(4)]
    await until(lambda: bench.dispatcher.in_flight == 1)
    await asyncio.sleep(0)
    submissions[2].cancel()
    await asyncio.sleep(0)
    bench.store.fail_after = AWAY if first == "not known" else None
    bench.store.gate.set()
    outcomes = await asyncio.gather(*submissions, return_exceptions=True)
    assert isinstance(outcomes.pop(2), asyncio.CancelledError)
    assert outcomes == [AWAY if first == "not known" else None] * 3
    assert bench.counters.duplicates_suppressed == {"ours": 2, "another's": 3, "not known": 0}[first]
    assert bench.dispatcher.in_flight == (1 if first == "ours" else 0)
    await bench.dispatcher.close()


async def test_a_duplicate_does_not_outwait_the_store() -> None:
    bench = WorkerBench(pace=Pace(duplicate_waits_s=0.001))
    bench.store.gate = asyncio.Event()
    first = asyncio.create_task(bench.submit())
    await until(lambda: bench.dispatcher.in_flight == 1)
    with pytest.raises(Overloaded):
        await bench.submit()
    bench.store.gate.set()
    await first
    assert bench.dispatcher.in_flight == 1
    await bench.dispatcher.close()


# -- ending early --------------------------------------------------------------------------------------------------


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
    tasks = [sample.task for sample in bench.dispatcher.samples.values()]
    assert bench.dispatcher.end_session(session().session_id) == many
    assert sum(task is not None and task.cancelling() for task in tasks) == SLICE
    await bench.dispatcher.wait_idle()
    assert bench.counters.stale == many


async def test_a_sample_that_completes_before_it_is_interrupted_keeps_its_result(bench: WorkerBench) -> None:
    await bench.started()
    running = bench.dispatcher.samples.get(KEY)
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
