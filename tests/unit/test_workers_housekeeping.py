"""Duties by the clock: lease, inbox, sessions, refill, reaping. Turns are taken by hand; the clock moves by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest

from shared.core.errors import Overloaded
from shared.core.lifecycle import State
from shared.core.record import Claim
from shared.core.upstream_list import PUBLISHED, UpstreamList
from shared.store.base import StoreFull, StoreUnavailable
from shared.store.refill import REFILL_S
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, SESSION_ID, WorkerBench, engines_of, session
from workers import housekeeping as module
from workers.clocks import DeliveryClocks
from workers.control import cancel_message, finish_message
from workers.deps import Deps, Live
from workers.housekeeping import Housekeeping
from workers.keyring import Keyring
from workers.models import Catalogue, Served
from workers.registry import Registry
from workers.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Header
    from shared.store.memory_server import MemoryServer

KEY = session().key(1)
FOREIGN = Claim(OTHER_OWNER, 1, 1, bytes(16))


class FakePool:
    """Counts its turns; the first ones break."""

    def __init__(self) -> None:
        self.catalogue = Catalogue((), "{run_id}")
        self.catalogue.replace([Served("sim/tiny", None, 4096)])
        self.probes = 0
        self.listings = 0
        self.changed = asyncio.Event()
        self.lists: list[tuple[str, ...]] = []

    async def probe(self) -> None:
        self.probes += 1
        if self.probes < 3:
            raise RuntimeError("broken")

    async def learn_models(self) -> None:
        self.changed.clear()
        self.listings += 1

    def replace(self, urls: tuple[str, ...]) -> None:
        self.lists.append(urls)
        self.changed.set()


class Bench(WorkerBench):
    def __init__(self, server: MemoryServer | None = None, owner: str = OWNER) -> None:
        super().__init__(server, owner, lease_s=30.0, session_timeout_s=300.0)
        self.sessions = Sessions(self.store, self.clock)
        self.pool = FakePool()
        self.registry = Registry(self.store, self.pool, ("http://flag",))  # type: ignore[arg-type] # as below
        deps = Deps(
            live=Live(self.settings, Keyring(())),
            store=self.store,
            dispatcher=self.dispatcher,
            waiters=self.waiters,
            sessions=self.sessions,
            pool=self.pool,  # type: ignore[arg-type] # only its duties are asked for
            registry=self.registry,
            adapters=None,  # type: ignore[arg-type] # no duty asks for them
            clocks=DeliveryClocks(self.store, self.settings, self.counters, self.settlements, self.clock),
            settlements=self.settlements,
            counters=self.counters,
            clock=self.clock,
            random_bytes=Random(7).randbytes,
            engines=engines_of(self.pool, self.clock),  # type: ignore[arg-type]
        )
        self.housekeeping = Housekeeping(deps, owner, self.settings)

    def is_refilling(self) -> bool:
        return self.dispatcher.refilling

    def sleeps(self) -> bool:
        """Between two turns of the store's duty."""
        return bool(self.housekeeping._hurry._waiters)  # type: ignore[attr-defined] # of asyncio.Event

    def waits_for_a_change(self) -> bool:
        return bool(self.pool.changed._waiters)  # type: ignore[attr-defined] # of asyncio.Event

    async def turn(self) -> None:
        await self.housekeeping.tend_store()

    async def alive(self, seq_id: int = 1) -> None:
        """A running sample of a session that has shown a sign of life."""
        await self.sessions.require_alive(SESSION_ID)
        await self.started(seq_id)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


# -- the lease, and a store that lost its data ------------------------------------------------------------------------


async def test_a_lease_is_held_from_the_first_turn_on(bench: Bench) -> None:
    await bench.turn()
    assert bench.server.leases[OWNER] == bench.clock.monotonic_s() + 30.0
    bench.clock.advance(5.0)
    await bench.turn()
    assert bench.server.leases[OWNER] == bench.clock.monotonic_s() + 30.0


async def test_a_wiped_store_is_told_what_runs(bench: Bench) -> None:
    """C7"""
    await bench.turn()
    await bench.alive()
    bench.server.wipe()
    assert bench.state(KEY) is None
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    assert KEY in bench.server.open_sets[OWNER]
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_a_wiped_store_is_told_of_many_in_batches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: and not of sixteen thousand in one turn of the loop."""
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    monkeypatch.setattr(module, "_BATCHES_AHEAD", 2)
    await bench.turn()
    keys = [session().key(seq_id) for seq_id in range(1, 21)]
    for key in keys:
        await bench.alive(key.seq_id)
    bench.server.wipe()
    under_way = UnderWay(bench.store.begin)
    monkeypatch.setattr(bench.store, "begin", under_way)
    await bench.turn()
    assert under_way.most == 6
    assert {bench.state(key) for key in keys} == {State.PENDING}
    for key in keys:
        bench.executor.finish(key)
    await bench.dispatcher.wait_idle()


@pytest.mark.parametrize("broken", [1, 4, 9])
async def test_a_refill_that_broke_off_is_begun_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """C7: nothing is left half entered, and no task is left behind."""
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    await bench.turn()
    keys = [session().key(seq_id) for seq_id in range(1, 10)]
    for key in keys:
        await bench.alive(key.seq_id)
    bench.server.wipe()
    begin = bench.store.begin

    async def begin_or_break(key: SampleKey, claim: Claim) -> Header | None:
        if key.seq_id == broken:
            raise AWAY
        return await begin(key, claim)

    tasks = len(asyncio.all_tasks())
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "begin", begin_or_break)
        with pytest.raises(StoreUnavailable):
            await bench.turn()
    assert len(asyncio.all_tasks()) == tasks
    assert bench.is_refilling()
    await bench.turn()
    assert {bench.state(key) for key in keys} == {State.PENDING}
    for key in keys:
        bench.executor.finish(key)
    await bench.dispatcher.wait_idle()


class UnderWay:
    """How many calls there were at the same time, at most."""

    def __init__(self, call: Callable[..., Awaitable[Header | None]]) -> None:
        self._call = call
        self._now = self.most = 0

    async def __call__(self, key: SampleKey, claim: Claim) -> Header | None:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            for _ in range(10):  # turns of the loop that the store takes to answer
                await asyncio.sleep(0)
            return await self._call(key, claim)
        finally:
            self._now -= 1


async def test_a_wiped_store_is_told_which_results_are_lost(bench: Bench) -> None:
    """C7: their clients come, get their 410, and submit again."""
    await bench.turn()
    await bench.alive()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    bench.server.wipe()
    bench.store.announced.clear()
    await bench.turn()
    assert bench.state(KEY) is State.ORPHANED
    assert bench.store.announced == [KEY]


async def test_a_refill_that_was_cut_off_is_made_up_for(bench: Bench) -> None:
    """The lease is back before the samples are: that it is held does not mean that they are known."""
    await bench.turn()
    await bench.alive()
    bench.clock.advance(31.0)
    bench.server.samples.clear()
    bench.server.open_sets.clear()

    async def cut(*_: object) -> None:
        raise AWAY

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "begin", cut)
        with pytest.raises(StoreUnavailable):
            await bench.turn()
    assert bench.state(KEY) is None
    await bench.turn()
    assert bench.state(KEY) is State.PENDING
    await bench.dispatcher.close()


async def test_samples_are_refused_until_what_ran_is_entered_again_and_for_as_long_after(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: however long it takes, but no longer than a lease."""
    await bench.turn()
    await bench.alive()
    bench.server.wipe()
    enter = bench.store.begin

    async def slow(key: SampleKey, claim: Claim) -> Header | None:
        bench.clock.advance(REFILL_S + 1.0)
        assert bench.is_refilling()
        return await enter(key, claim)

    monkeypatch.setattr(bench.store, "begin", slow)
    await bench.turn()
    bench.clock.advance(REFILL_S)
    assert bench.is_refilling()
    bench.clock.advance(1.0)
    assert not bench.is_refilling()
    await bench.dispatcher.close()


async def test_a_refill_that_never_succeeds_stops_nobody_beyond_a_lease(bench: Bench) -> None:
    """C3"""
    await bench.turn()
    await bench.alive()
    bench.server.wipe()

    async def full(*_: object) -> None:
        raise StoreFull("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "begin", full)
        for _ in range(3):
            with pytest.raises(StoreFull):
                await bench.turn()
            assert bench.is_refilling()
            bench.clock.advance(10.0)
    assert not bench.is_refilling()
    await bench.dispatcher.close()


async def test_one_cut_in_a_refill_leaves_no_task_behind(bench: Bench) -> None:
    await bench.turn()
    for seq_id in range(1, 4):
        await bench.alive(seq_id)
    bench.server.wipe()
    begin, gate = bench.store.begin, asyncio.Event()

    async def first_is_cut(key: object, claim: Claim) -> object:
        if key == KEY:
            raise AWAY
        await gate.wait()
        return await begin(key, claim)  # type: ignore[arg-type] # passed on as it came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "begin", first_is_cut)
        turn = asyncio.create_task(bench.turn())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not turn.done()
        gate.set()
        with pytest.raises(StoreUnavailable):
            await turn
    await bench.turn()
    assert {bench.state(session().key(seq_id)) for seq_id in range(1, 4)} == {State.PENDING}
    await bench.dispatcher.close()


async def test_a_sample_that_settles_during_the_refill_is_not_left_pending(bench: Bench) -> None:
    await bench.turn()
    await bench.alive()
    bench.server.wipe()
    begin = bench.store.begin

    async def slow(*arguments: object) -> object:
        bench.executor.finish(KEY)
        await bench.dispatcher.wait_idle()
        bench.server.samples.clear()
        return await begin(*arguments)  # type: ignore[arg-type] # passed on as they came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "begin", slow)
        await bench.turn()
    assert bench.state(KEY) is State.ORPHANED


@dataclass
class Told:
    """Passes on what one worker tells the others."""

    housekeeping: Housekeeping

    def on_control(self, message: bytes) -> None:
        self.housekeeping.on_control(message)

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None: ...

    def on_gap(self) -> None: ...


async def test_an_emptied_store_is_noticed_when_something_settles_and_all_workers_are_told() -> None:
    """C7: FLUSHALL without a restart; not at the next renewal, but as soon as anything shows it."""
    bench = Bench()
    other = Bench(bench.server, OTHER_OWNER)
    for one in (bench, other):
        await one.store.open(Told(one.housekeeping), one.owner)
        await one.turn()
    await bench.alive(1)
    await bench.alive(2)
    await other.alive(3)
    duties = [asyncio.create_task(one.housekeeping.duties()[0]()) for one in (bench, other)]
    await until(lambda: bench.sleeps() and other.sleeps())
    bench.clock.advance(module.RETRY_EVERY_S)
    bench.server.flush()
    bench.executor.finish(KEY)
    await until(lambda: {bench.state(session().key(seq_id)) for seq_id in (2, 3)} == {State.PENDING})
    assert bench.state(KEY) is State.READY
    await until(lambda: bench.sleeps() and other.sleeps())
    assert bench.is_refilling()
    bench.clock.advance(REFILL_S)
    assert not bench.is_refilling()
    for duty in duties:
        duty.cancel()
    await asyncio.gather(*duties, return_exceptions=True)
    await bench.dispatcher.close()
    await other.dispatcher.close()


async def test_a_lease_that_lapsed_by_itself_is_no_news_for_the_others(bench: Bench) -> None:
    other = Bench(bench.server, OTHER_OWNER)
    await other.store.open(Told(other.housekeeping), OTHER_OWNER)
    await bench.turn()
    bench.clock.advance(31.0)
    await bench.turn()
    assert not other.housekeeping._hurry.is_set()
    bench.clock.advance(1.0)
    bench.server.flush()
    await bench.turn()
    assert other.housekeeping._hurry.is_set()


async def test_doubts_are_looked_into_now_and_then(bench: Bench) -> None:
    """A store that throws records away by its own policy must not keep the housekeeping busy."""
    await bench.turn()
    bench.dispatcher.on_loss()
    assert not bench.housekeeping._hurry.is_set()
    bench.clock.advance(module.RETRY_EVERY_S)
    bench.dispatcher.on_loss()
    assert bench.housekeeping._hurry.is_set()


async def test_a_worker_that_is_started_during_a_refill_takes_nothing_new_until_it_is_over(bench: Bench) -> None:
    """C3"""
    await bench.store.note_refill(OTHER_OWNER, window_s=7.0)
    await bench.turn()
    with pytest.raises(Overloaded, match="refilled"):
        await bench.submit()
    bench.clock.advance(7.0)
    await bench.alive()
    await bench.dispatcher.close()


# -- messages and sessions --------------------------------------------------------------------------------------------


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

    async def cut(*_: object) -> None:
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


# -- the samples of the dead ------------------------------------------------------------------------------------------


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


# -- the list of upstreams --------------------------------------------------------------------------------------------


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
    run = asyncio.create_task(bench.registry.run())
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


# -- the duties themselves --------------------------------------------------------------------------------------------


async def test_a_duty_that_fails_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_EVERY_S", "PROBE_EVERY_S", "MODELS_EVERY_S"):
        monkeypatch.setattr(module, name, 0.001)
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
    bench.housekeeping.hurry()
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
