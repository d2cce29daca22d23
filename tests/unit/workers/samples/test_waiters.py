"""Sleeping polls: woken by the first of settling, announcement, deadline, loss and drain; nothing is missed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim, Header, Record
from shared.loop.slices import SLICE
from workers.samples.waiters import Waiter, Waiters, Wake

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = SampleKey("session", 7)
OTHER = SampleKey("session", 8)
RECORD = Record(Header(State.READY, Claim("0123456789abcdef", 1, 1, bytes(16))), memoryview(b"x"))
LONG_S = TTL_S = 3600.0


async def test_a_sample_that_settles_here_hands_its_record_to_all_who_wait() -> None:
    waiters = Waiters(TTL_S)
    first, second, other = (waiters.sample_waiter(key, LONG_S) for key in (KEY, KEY, OTHER))
    waiters.settled(KEY, RECORD)
    assert await first.woken is RECORD
    assert await second.woken is RECORD
    assert not other.woken.done()
    for key, waiter in ((KEY, first), (KEY, second), (OTHER, other)):
        waiters.forget_sample(key, waiter)
    assert len(waiters) == 0
    assert not waiters._samples


async def test_an_announcement_wakes_only_those_it_names_and_the_sessions_log() -> None:
    waiters = Waiters(TTL_S)
    named, unnamed = waiters.sample_waiter(KEY, LONG_S), waiters.sample_waiter(OTHER, LONG_S)
    log, elsewhere = waiters.log_waiter("session", LONG_S), waiters.log_waiter("elsewhere", LONG_S)
    waiters.announced("session", [7])
    assert await named.woken is Wake.LOOK
    assert await log.woken is Wake.LOOK
    assert not unnamed.woken.done()
    assert not elsewhere.woken.done()


async def test_a_wake_up_that_comes_during_the_look_is_kept() -> None:
    """rearm comes before the look: what settles while we read is not slept through."""
    waiters = Waiters(TTL_S)
    waiter = waiters.sample_waiter(KEY, LONG_S)
    waiters.announced("session", [7])
    await waiter.woken
    waiter.rearm()
    waiters.announced("session", [7])
    assert await waiter.woken is Wake.LOOK


@pytest.mark.parametrize("kind", ["sample", "log"])
async def test_the_deadline_is_kept_over_rearms(kind: str) -> None:
    waiters = Waiters(TTL_S)
    waiter = waiters.sample_waiter(KEY, 0.0) if kind == "sample" else waiters.log_waiter("session", 0.0)
    assert await waiter.woken is Wake.TIMEOUT
    waiter.rearm()
    assert await waiter.woken is Wake.TIMEOUT
    assert waiter.ended is Wake.TIMEOUT


async def test_the_first_final_reason_stays() -> None:
    waiter = Waiter(asyncio.get_running_loop())
    waiter.client_gone()
    waiter.end(Wake.DRAIN)
    assert waiter.ended is Wake.CLIENT_GONE


async def test_draining_ends_those_who_sleep_and_those_who_come() -> None:
    waiters = Waiters(TTL_S)
    before = waiters.sample_waiter(KEY, LONG_S)
    waiters.drain()
    after = waiters.log_waiter("session", LONG_S)
    assert await before.woken is Wake.DRAIN
    assert await after.woken is Wake.DRAIN
    assert before.ended is after.ended is Wake.DRAIN


async def test_a_gap_makes_everybody_look() -> None:
    """C4: a subscription was cut; what was announced meanwhile is lost."""
    waiters = Waiters(TTL_S)
    sample, log = waiters.sample_waiter(KEY, LONG_S), waiters.log_waiter("other", LONG_S)
    waiters.look_again()
    assert await sample.woken is Wake.LOOK
    assert await log.woken is Wake.LOOK


@pytest.mark.parametrize(("call", "why"), [(Waiters.look_again, Wake.LOOK), (Waiters.drain, Wake.DRAIN)])
async def test_everybody_is_woken_but_not_all_in_one_turn(call: Callable[[Waiters], None], why: Wake) -> None:
    """C4, B12: sixteen thousand polls that look, or leave, at once hold up the loop for a second."""
    waiters = Waiters(TTL_S)
    sleeping = [waiters.sample_waiter(SampleKey("session", seq_id), LONG_S) for seq_id in range(3 * SLICE)]
    call(waiters)
    assert sum(waiter.woken.done() for waiter in sleeping) == SLICE
    assert [await waiter.woken for waiter in sleeping] == [why] * len(sleeping)


async def test_a_poll_that_has_gone_before_its_turn_comes_is_no_obstacle() -> None:
    waiters = Waiters(TTL_S)
    sleeping = [waiters.sample_waiter(KEY, LONG_S) for _ in range(2 * SLICE)]
    waiters.look_again()
    gone = next(waiter for waiter in sleeping if not waiter.woken.done())
    waiters.forget_sample(KEY, gone)
    sleeping.remove(gone)
    assert {await waiter.woken for waiter in sleeping} == {Wake.LOOK}


class Time:
    """An event loop's time and timers, which move when a test says so."""

    def __init__(self, waiters: Waiters) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self._loop = asyncio.get_running_loop()
        waiters._loop = self  # type: ignore[assignment] # three of its methods are asked for

    def time(self) -> float:
        return self.now_s

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def call_later(self, delay_s: float, call: Callable[[], object]) -> object:
        return self.call_at(self.now_s + delay_s, call)

    def call_at(self, when_s: float, call: Callable[[], object]) -> object:
        self.timers.append((when_s, call))
        return object()

    def pass_until(self, then_s: float) -> None:
        while due := [timer for timer in self.timers if timer[0] <= then_s]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_s = max(self.now_s, first[0])
            first[1]()
        self.now_s = then_s


async def test_each_poll_sleeps_until_its_own_deadline_with_one_timer_for_all() -> None:
    waiters = Waiters(TTL_S)
    time = Time(waiters)
    first = waiters.sample_waiter(KEY, 30.0)
    time.pass_until(10.0)
    second, gone = waiters.sample_waiter(KEY, 30.0), waiters.sample_waiter(OTHER, 30.0)
    assert len(time.timers) == 1
    waiters.forget_sample(OTHER, gone)
    time.pass_until(29.9)
    assert first.ended is None
    time.pass_until(30.0)
    assert (first.ended, second.ended) == (Wake.TIMEOUT, None)
    time.pass_until(39.9)
    assert second.ended is None
    time.pass_until(40.1)
    assert (second.ended, gone.ended) == (Wake.TIMEOUT, None)
    for waiter in (first, second):
        waiters.forget_sample(KEY, waiter)
    assert (len(waiters), time.timers) == (0, [])


async def test_a_timeout_that_a_reload_shortened_does_not_wait_for_longer_ones() -> None:
    waiters = Waiters(TTL_S)
    time = Time(waiters)
    before, after = waiters.sample_waiter(KEY, 30.0), waiters.sample_waiter(KEY, 5.0)
    time.pass_until(5.0)
    assert (before.ended, after.ended) == (None, Wake.TIMEOUT)
    time.pass_until(30.0)
    assert before.ended is Wake.TIMEOUT


async def test_polls_that_end_together_do_so_a_slice_in_each_turn() -> None:
    """B12"""
    waiters = Waiters(TTL_S)
    time = Time(waiters)
    sleeping = [waiters.sample_waiter(SampleKey("session", seq_id), 30.0) for seq_id in range(2 * SLICE)]
    time.pass_until(30.0)
    assert sum(waiter.ended is not None for waiter in sleeping) == SLICE
    assert len(waiters) == len(sleeping), "until each has gone"
    assert [await waiter.woken for waiter in sleeping] == [Wake.TIMEOUT] * len(sleeping)
