"""Clocks of what was delivered: gathered, started once, never lost to a store that is away."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from shared.clock import ManualClock
from shared.config import Settings
from shared.core.errors import StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.counters import Counters
from tests.memory_store import MemoryServer, MemoryStore
from tests.waiting import until
from tests.worker_bench import AWAY, OWNER
from workers.samples.expiry import DeliveryExpiry, ExpiryPace, UnfetchedResults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SETTINGS = Settings(undelivered_ttl_s=3600.0, retrieved_ttl_s=300.0, acked_ttl_s=30.0)


class Bench:
    def __init__(self, pending_max: int = 100_000) -> None:
        self.server = MemoryServer(ManualClock(), Random(7))
        self.store = MemoryStore(self.server)
        self.counters = Counters()
        self.unfetched = UnfetchedResults()
        pace = ExpiryPace(gather_s=0.001, retry_s=0.001, pending_max=pending_max)
        self.expiry = DeliveryExpiry(self.store, SETTINGS, self.counters, self.unfetched, self.server.clock, pace)

    async def settled(self, count: int) -> list[SampleKey]:
        keys = [SampleKey("session", seq_id) for seq_id in range(count)]
        for key in keys:
            claim = Claim(OWNER, 1, 1, bytes(16))
            await self.store.settle(key, claim, State.READY, b"x", ttl_s=SETTINGS.undelivered_ttl_s, now_ms=0)
        self.store.commands = 0
        return keys

    def left_s(self, key: SampleKey) -> float:
        expires_s = self.server.samples[key].expires_s
        assert expires_s is not None
        return expires_s - self.server.clock.monotonic_s()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.expiry.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_hand_over_starts_the_retrieved_clock_and_an_acknowledgement_shortens_it(bench: Bench) -> None:
    (key,) = await bench.settled(1)
    bench.expiry.handed_over(key)
    await bench.expiry.flush()
    assert bench.left_s(key) == 300.0
    bench.expiry.acknowledged([key])
    await bench.expiry.flush()
    assert bench.left_s(key) == 30.0
    assert (bench.counters.delivered, bench.counters.acknowledged) == (1, 1)


async def test_what_was_fetched_need_not_be_remembered_for_a_wipe(bench: Bench) -> None:
    keys = await bench.settled(3)
    for key in keys:
        bench.unfetched.add(key, Claim(OWNER, 1, 1, bytes(16)), 0.0)
    bench.expiry.handed_over(keys[0])
    bench.expiry.acknowledged(keys[1:2])
    assert [key for key, _ in bench.unfetched.claims()] == keys[2:]


async def test_no_clock_is_extended(bench: Bench) -> None:
    (key,) = await bench.settled(1)
    bench.expiry.handed_over(key)
    await bench.expiry.flush()
    bench.server.clock.advance(100.0)
    bench.expiry.handed_over(key)
    await bench.expiry.flush()
    assert bench.left_s(key) == 200.0
    assert bench.counters.delivered == 1


async def test_a_burst_is_one_command(bench: Bench) -> None:
    keys = await bench.settled(200)
    async with bench.running():
        for key in keys:
            bench.expiry.handed_over(key)
        await until(lambda: bench.counters.delivered == 200)
    assert bench.store.commands == 1


async def test_a_large_burst_goes_in_batches(bench: Bench) -> None:
    keys = await bench.settled(1100)
    for key in keys:
        bench.expiry.handed_over(key)
    await bench.expiry.flush()
    assert bench.store.commands == 3
    assert {bench.left_s(key) for key in keys} == {300.0}
    bench.expiry.acknowledged(keys)
    await bench.expiry.flush()
    assert bench.store.commands == 6
    assert {bench.left_s(key) for key in keys} == {30.0}


async def test_nothing_is_lost_while_the_store_is_away(bench: Bench) -> None:
    (key,) = await bench.settled(1)
    bench.store.fail_before = AWAY
    async with bench.running():
        bench.expiry.handed_over(key)
        await until(lambda: bench.store.commands >= 3)
        bench.store.fail_before = None
        await until(lambda: bench.counters.delivered == 1)
    assert bench.left_s(key) == 300.0


async def test_flushing_into_a_store_that_is_away_raises_and_keeps(bench: Bench) -> None:
    (key,) = await bench.settled(1)
    bench.expiry.handed_over(key)
    bench.store.fail_before = AWAY
    with pytest.raises(StoreUnavailable):
        await bench.expiry.flush()
    bench.store.fail_before = None
    await bench.expiry.flush()
    assert bench.counters.delivered == 1


async def test_what_the_store_refuses_holds_up_nothing_that_comes_after_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once; what was refused keeps its longer clock."""
    refused, later = await bench.settled(2)
    bench.store.fail_before = StoreRefused("WRONGTYPE")
    for _ in range(3):
        bench.expiry.handed_over(refused)
        bench.expiry.acknowledged([refused])
        await bench.expiry.flush()
    bench.store.fail_before = None
    bench.expiry.handed_over(later)
    await bench.expiry.flush()
    assert (bench.left_s(refused), bench.left_s(later)) == (3600.0, 300.0)
    assert bench.counters.delivered == 1
    assert [record.message for record in caplog.records] == ["store refuses to start clocks"]


async def test_what_waits_for_the_store_is_bounded() -> None:
    """C6: beyond the bound, results keep the longer clock."""
    bench = Bench(pending_max=2)
    keys = await bench.settled(5)
    for key in keys:
        bench.expiry.handed_over(key)
    await bench.expiry.flush()
    assert [bench.left_s(key) for key in keys] == [300.0] * 2 + [3600.0] * 3


async def test_what_was_never_settled_has_no_clock(bench: Bench) -> None:
    bench.expiry.handed_over(SampleKey("session", 1))
    bench.expiry.acknowledged([])
    await bench.expiry.flush()
    assert bench.counters.delivered == 0
    assert bench.store.commands == 1
