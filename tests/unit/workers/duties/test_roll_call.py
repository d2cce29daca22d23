"""A store that was emptied, and workers of which one is slow to tell it again what it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from shared.store.recovery import REFILL_S, reap
from tests.app_bench import AppBench
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, REPLY_LOST, SOON

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header
    from shared.core.roll_call import Roll


@pytest.fixture
async def slow() -> AsyncIterator[AppBench]:
    """Runs sample 1."""
    made = await AppBench().open()
    await made.housekeeping.tend_store()
    yield made
    await made.close()


@pytest.fixture
async def quick(slow: AppBench) -> AsyncIterator[AppBench]:
    """Has noticed, and has nothing to tell; far more time than usual has passed since."""
    made = await AppBench(slow.server, OTHER_OWNER).open()
    await made.housekeeping.tend_store()
    assert (await slow.asample()).status == 200
    slow.server.wipe()
    await made.housekeeping.tend_store()
    made.clock.advance(REFILL_S + 1.0)
    yield made
    await made.close()


def count_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Count the pauses of begins whose outcome is not known."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay_s: float) -> None:
        pauses.extend([delay_s] * (delay_s == SOON.store_retry_first_s))
        await sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", counted)
    return pauses


def count_begins(worker: AppBench, monkeypatch: pytest.MonkeyPatch) -> list[SampleKey]:
    begun: list[SampleKey] = []
    begin = worker.store.begin

    async def counted(key: SampleKey, claim: Claim) -> Header | None:
        begun.append(key)
        return await begin(key, claim)

    monkeypatch.setattr(worker.store, "begin", counted)
    return begun


async def test_a_submission_that_is_sent_again_waits_until_the_slow_one_has_told(
    slow: AppBench, quick: AppBench
) -> None:
    """C7: taken at once, it would run a second time."""
    assert (await quick.asample()).status == 429
    await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    assert (await quick.asample()).status == 200
    assert quick.counters.duplicates_suppressed == 1
    assert quick.dispatcher.in_flight == 0


async def test_whoever_comes_last_waits_for_nobody(slow: AppBench, quick: AppBench) -> None:
    await slow.housekeeping.tend_store()
    slow.clock.advance(REFILL_S)
    assert not slow.dispatcher.is_refilling(slow.clock.monotonic_s())


async def test_a_begin_whose_reply_was_lost_with_the_data_waits_as_well(
    slow: AppBench, quick: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: another may have been first, and was about to be named."""
    pauses = count_pauses(monkeypatch)
    await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    quick.clock.advance(REFILL_S)
    quick.store.fail_after = REPLY_LOST
    assert (await quick.asample()).status == 429
    slow.server.wipe()
    quick.store.fail_after = None
    begins = count_begins(quick, monkeypatch)
    await quick.housekeeping.tend_store()
    quick.clock.advance(REFILL_S + 1.0)
    pauses.clear()
    await until(lambda: len(pauses) > 3)
    assert not begins
    await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    await until(lambda: begins and not quick.dispatcher.in_flight)
    assert not quick.executor.started


async def test_a_poll_is_held_meanwhile(slow: AppBench, quick: AppBench) -> None:
    assert quick.dispatcher.is_refilling(quick.clock.monotonic_s())
    await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    assert not quick.dispatcher.is_refilling(quick.clock.monotonic_s())


async def test_one_that_died_is_not_waited_for_once_it_is_reaped(slow: AppBench, quick: AppBench) -> None:
    assert (await quick.asample()).status == 429
    await reap(quick.store, OWNER, 60.0, quick.clock)
    await quick.housekeeping.tend_store()
    assert (await quick.asample()).status == 200
    assert quick.dispatcher.in_flight == 1


async def test_one_that_died_while_nobody_heard_of_it_is_not_waited_for_either(
    slow: AppBench, quick: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its subscription is not back yet when the reaper tells."""
    with monkeypatch.context() as patch:
        patch.setattr(quick, "on_control", lambda _: None)
        await reap(quick.store, OWNER, 60.0, quick.clock)
    await quick.housekeeping.tend_store()
    assert (await quick.asample()).status == 200


async def test_one_that_never_comes_back_is_waited_for_as_long_as_its_lease(slow: AppBench, quick: AppBench) -> None:
    quick.clock.advance(quick.settings.lease_s)
    assert not quick.dispatcher.is_refilling(quick.clock.monotonic_s())


async def test_a_store_that_is_emptied_while_it_is_told_is_told_again(
    slow: AppBench, quick: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: without a command that failed in between."""
    begin = slow.store.begin

    async def begin_before_the_wipe(*arguments: object) -> object:
        done = await begin(*arguments)  # type: ignore[arg-type] # passed on as they came
        slow.server.wipe()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(slow.store, "begin", begin_before_the_wipe)
        with pytest.raises(type(AWAY)):
            await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    assert (await quick.asample()).status == 429
    await slow.housekeeping.tend_store()
    await quick.housekeeping.tend_store()
    quick.clock.advance(REFILL_S)
    assert (await quick.asample()).status == 200
    assert quick.counters.duplicates_suppressed == 1


async def test_a_roll_that_cannot_be_read_holds_up_no_other_duty(
    slow: AppBench, quick: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster one node may be away, and the others there."""

    async def away() -> Roll:
        raise AWAY

    monkeypatch.setattr(quick.store, "read_roll", away)
    await quick.store.send_control(OTHER_OWNER, b"finish gws-nobody")
    await quick.housekeeping.tend_store()
    assert await quick.store.take_inbox(OTHER_OWNER) == []
    assert quick.dispatcher.is_refilling(quick.clock.monotonic_s())


async def test_a_worker_that_was_taken_for_dead_answers_again(slow: AppBench) -> None:
    await slow.store.leave_roll(OWNER)
    await slow.housekeeping.tend_store()
    assert not (await slow.store.read_roll()).answered
    await slow.housekeeping.tend_store()
    assert (await slow.store.read_roll()).answered == {OWNER}
