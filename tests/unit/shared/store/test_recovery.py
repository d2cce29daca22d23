"""The samples of an instance that is gone are ended and announced; several may reap at once."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shared.clock import ManualClock
from shared.core.errors import StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.recovery import reap
from tests.memory_store import MemoryServer
from tests.worker_bench import AWAY, OTHER_OWNER, OWNER, GatedStore

THEIRS = Claim(OTHER_OWNER, 1, 1, bytes(16))


class Bench:
    def __init__(self) -> None:
        self.server = MemoryServer(ManualClock(), Random(7))
        self.store = GatedStore(self.server)

    async def leave(self, count: int) -> list[SampleKey]:
        keys = [SampleKey("session", seq_id) for seq_id in range(count)]
        await self.store.renew_lease(OTHER_OWNER, ttl_s=0.0)
        for key in keys:
            await self.store.begin(key, THEIRS)
        return keys

    async def reap(self) -> int:
        return await reap(self.store, OTHER_OWNER, 60.0, self.server.clock)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_more_than_one_batch_is_ended_and_announced(bench: Bench) -> None:
    keys = await bench.leave(1200)
    assert await bench.reap() == 1200
    assert sorted(bench.store.announced) == keys
    assert {stored.header.state for stored in bench.server.samples.values()} == {State.ORPHANED}
    assert OTHER_OWNER not in bench.server.instances


async def test_what_had_settled_or_is_anothers_is_left_alone(bench: Bench) -> None:
    keys = await bench.leave(3)
    await bench.store.settle(keys[0], THEIRS, State.READY, b"x", ttl_s=60.0, now_ms=0)
    bench.server.open_sets[OTHER_OWNER].add(keys[0])
    bench.server.samples.pop(keys[1])
    await bench.store.begin(keys[1], Claim(OWNER, 1, 1, bytes(16)))
    assert await bench.reap() == 1
    states = [bench.server.samples[key].header.state for key in keys]
    assert states == [State.READY, State.PENDING, State.ORPHANED]


async def test_each_sample_is_ended_by_one_of_those_who_reap(bench: Bench) -> None:
    keys = await bench.leave(1200)
    counts = await asyncio.gather(*(bench.reap() for _ in range(4)))
    assert sum(counts) == 1200
    assert sorted(bench.store.announced) == keys


async def test_a_store_that_goes_away_is_told(bench: Bench) -> None:
    await bench.leave(1)
    bench.store.fail_before = AWAY
    with pytest.raises(StoreUnavailable):
        await bench.reap()
