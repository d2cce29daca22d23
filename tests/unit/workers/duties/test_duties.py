"""Duties by the clock: messages, sessions, reaping, the list of upstreams. Turns and the clock are moved by hand."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.core.errors import StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import Claim
from shared.core.upstream_list import PUBLISHED, UpstreamList
from tests.housekeeping_bench import Bench
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, SESSION_ID, session
from workers.duties.duties import Housekeeping
from workers.duties.lease import DutyPace
from workers.samples.messages import cancel_message, finish_message

KEY = session().key(1)
FOREIGN = Claim(OTHER_OWNER, 1, 1, bytes(16))


@pytest.fixture
async def bench() -> Bench:
    return Bench()


# -- messages and sessions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease_s", "every_s"), [(30.0, 5.0), (15.0, 5.0), (3.0, 1.0)])
async def test_a_lease_outlasts_a_renewal_that_fails(bench: Bench, lease_s: float, every_s: float) -> None:
    settings = msgspec.structs.replace(bench.settings, lease_s=lease_s)
    made = Housekeeping(bench.housekeeping._parts, OWNER, settings)
    assert made._renew_every_s == every_s


async def test_messages_that_were_left_are_obeyed(bench: Bench) -> None:
    await bench.alive()
    bench.server.inboxes[OWNER] += [b"\xff nonsense", cancel_message(KEY)]
    await bench.turn()
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED


async def test_the_news_that_a_session_is_finished_ends_its_samples(bench: Bench) -> None:
    await bench.alive()
    bench.housekeeping.on_control(finish_message(SESSION_ID))
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.STALE
    assert not await bench.sessions.touch(SESSION_ID)


async def test_a_finish_whose_message_was_lost_is_noticed(bench: Bench) -> None:
    await bench.alive()
    await bench.store.finish_session(SESSION_ID, bench.clock.wall_ms())
    await bench.turn()
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.STALE


async def test_a_session_that_fell_silent_ends_its_samples(bench: Bench) -> None:
    """D7"""
    await bench.alive()
    await bench.turn()
    bench.clock.advance(300.0)
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    bench.clock.advance(0.1)
    await bench.turn()
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.STALE


async def test_a_poll_keeps_its_session_alive(bench: Bench) -> None:
    await bench.alive()
    for _ in range(5):
        bench.clock.advance(200.0)
        bench.sessions.note(SESSION_ID)
        await bench.turn()
    assert bench.state(KEY) is State.PENDING
    await bench.dispatcher.close()


async def test_time_without_the_store_does_not_count_against_a_session(bench: Bench) -> None:
    await bench.alive()
    await bench.turn()
    bench.clock.advance(1000.0)
    bench.store.connected_since_s = bench.clock.monotonic_s()
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    bench.store.connected_since_s = None
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    await bench.dispatcher.close()


async def test_signs_of_life_that_could_not_be_written_are_written_later(bench: Bench) -> None:
    await bench.turn()
    bench.sessions.note(SESSION_ID)

    async def cut(*_: object, **__: object) -> None:
        raise AWAY

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "touch_session", cut)
        with pytest.raises(StoreUnavailable):
            await bench.turn()
    await bench.turn()
    assert SESSION_ID in bench.server.sessions


async def test_many_signs_of_life_are_written_together(bench: Bench) -> None:
    """The lease does not wait for ten thousand round trips."""
    for number in range(100):
        bench.sessions.note(f"gws-{number}")
    bench.store.gate = asyncio.Event()
    writing = asyncio.create_task(bench.housekeeping._write_signs_of_life())
    await until(lambda: bench.store.commands == 100)
    bench.store.gate.set()
    await writing
    assert len(bench.server.sessions) == 100


# -- the samples of the dead ---------------------------------------------------------------------------------------


async def leave_behind(bench: Bench) -> None:
    """A sample of an instance whose lease has lapsed."""
    await bench.store.renew_lease(OTHER_OWNER, ttl_s=0.0)
    await bench.store.begin(KEY, FOREIGN)


async def test_nobody_reaps_before_a_lease_after_the_connection_came_back(bench: Bench) -> None:
    await leave_behind(bench)
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    bench.clock.advance(30.0)
    bench.store.connected_since_s = bench.clock.monotonic_s()
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    bench.clock.advance(30.0)
    await bench.turn()
    assert bench.state(KEY) is State.ORPHANED
    assert bench.store.announced == [KEY]
    assert bench.counters.orphaned == 1
    assert OTHER_OWNER not in bench.server.instances


async def test_those_who_hold_a_lease_are_left_alone(bench: Bench) -> None:
    await leave_behind(bench)
    bench.clock.advance(30.0)
    await bench.store.renew_lease(OTHER_OWNER, ttl_s=30.0)
    await bench.turn()
    assert bench.state(KEY) is State.PENDING


async def test_a_worker_does_not_reap_itself(bench: Bench) -> None:
    """Its own lease lapsed while it was stalled; what it runs goes on."""
    await bench.turn()
    await bench.alive()
    bench.clock.advance(120.0)
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_results_that_expire_unread_are_counted_once(bench: Bench) -> None:
    await bench.turn()
    await bench.alive()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    bench.clock.advance(bench.settings.undelivered_ttl_s - 10.0)
    await bench.turn()
    assert bench.counters.expired_undelivered == 0
    bench.clock.advance(1.0)
    await bench.turn()
    await bench.turn()
    assert bench.counters.expired_undelivered == 1


# -- the list of upstreams -----------------------------------------------------------------------------------------


async def test_a_published_list_is_followed_and_told_to_a_store_that_lost_it(bench: Bench) -> None:
    published = UpstreamList(1, ("http://new",))
    await bench.turn()
    assert bench.pool.lists == []
    await bench.store.offer_upstreams(published)
    await bench.turn()
    await bench.turn()
    assert bench.pool.lists == [("http://new",)]
    bench.server.wipe()
    await bench.turn()
    assert bench.server.upstreams == published
    assert bench.pool.lists == [("http://new",)]


async def test_a_message_makes_a_worker_read_the_list_at_once(bench: Bench) -> None:
    run = asyncio.create_task(bench.published.run())
    await bench.store.offer_upstreams(UpstreamList(1, ("http://new",)))
    assert bench.pool.lists == []
    bench.housekeeping.on_control(PUBLISHED)
    await until(lambda: bench.pool.lists)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_models_of_new_upstreams_are_learned_at_once(bench: Bench) -> None:
    learn = asyncio.create_task(bench.housekeeping._learn_models())
    await until(lambda: bench.waits_for_a_change())
    assert bench.pool.listings == 0
    bench.pool.replace(("http://new",))
    await until(lambda: bench.pool.listings == 1)
    learn.cancel()
    await asyncio.gather(learn, return_exceptions=True)


# -- the duties themselves -----------------------------------------------------------------------------------------


async def test_a_duty_that_fails_is_tried_again() -> None:
    bench = Bench(duty_pace=DutyPace(retry_every_s=0.001, probe_every_s=0.001, models_every_s=0.001))
    bench.store.fail_before = AWAY
    tasks = [asyncio.create_task(duty()) for duty in bench.housekeeping.duties()]
    await until(lambda: bench.store.commands >= 3 and bench.pool.probes >= 3 and bench.pool.listings >= 1)
    assert OWNER not in bench.server.leases
    bench.store.fail_before = None
    await until(lambda: OWNER in bench.server.leases)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_store_is_tended_at_once_when_it_is_back(bench: Bench) -> None:
    """C3: polls wait for the refill."""
    task = asyncio.create_task(bench.housekeeping.duties()[0]())
    await until(lambda: OWNER in bench.server.leases)
    bench.server.wipe()
    bench.housekeeping.lease.hurry.set()
    await until(lambda: OWNER in bench.server.leases)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_store_that_stays_away_is_one_line_in_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.store.fail_before = AWAY
    for _ in range(5):
        await bench.housekeeping._try("store", bench.turn)
    assert len(caplog.records) == 1
    bench.store.fail_before = None
    await bench.housekeeping._try("store", bench.turn)
    bench.store.fail_before = AWAY
    await bench.housekeeping._try("store", bench.turn)
    assert len(caplog.records) == 2
