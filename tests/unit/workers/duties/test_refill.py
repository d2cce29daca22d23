"""The lease, and a store that lost its data: everything that runs is entered before any poll learns that it is gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shared.core.errors import Overloaded, StoreFull, StoreUnavailable
from shared.core.lifecycle import State
from shared.store.recovery import REFILL_S
from tests.housekeeping_bench import Bench
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, session
from workers.duties.lease import DutyPace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header
    from workers.duties.duties import Housekeeping


KEY = session().key(1)
PACE = DutyPace()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


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


async def test_a_wiped_store_is_told_of_many_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: and not of sixteen thousand in one turn of the loop."""
    bench = Bench(duty_pace=DutyPace(at_once=3, batches_ahead=2))
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
async def test_a_refill_that_broke_off_is_begun_anew(monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    """C7: nothing is left half entered, and no task is left behind."""
    bench = Bench(duty_pace=DutyPace(at_once=3))
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
class OtherWorkers:
    """Pass messages of one worker to another."""

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
        await one.store.open(OtherWorkers(one.housekeeping), one.owner)
        await one.turn()
    await bench.alive(1)
    await bench.alive(2)
    await other.alive(3)
    duties = [asyncio.create_task(one.housekeeping.duties()[0]()) for one in (bench, other)]
    await until(lambda: bench.sleeps() and other.sleeps())
    bench.clock.advance(PACE.retry_every_s)
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
    await other.store.open(OtherWorkers(other.housekeeping), OTHER_OWNER)
    await bench.turn()
    bench.clock.advance(31.0)
    await bench.turn()
    assert not other.housekeeping.lease.hurry.is_set()
    bench.clock.advance(1.0)
    bench.server.flush()
    await bench.turn()
    assert other.housekeeping.lease.hurry.is_set()


async def test_doubts_are_looked_into_now_and_then(bench: Bench) -> None:
    """A store that throws records away by its own policy must not keep the housekeeping busy."""
    await bench.turn()
    bench.on_loss()
    assert not bench.housekeeping.lease.hurry.is_set()
    bench.clock.advance(PACE.retry_every_s)
    bench.on_loss()
    assert bench.housekeeping.lease.hurry.is_set()


async def test_a_worker_that_is_started_during_a_refill_takes_nothing_new_until_it_is_over(bench: Bench) -> None:
    """C3"""
    await bench.store.note_refill(OTHER_OWNER, window_s=7.0)
    await bench.turn()
    with pytest.raises(Overloaded, match="refilled"):
        await bench.submit()
    bench.clock.advance(7.0)
    await bench.alive()
    await bench.dispatcher.close()
