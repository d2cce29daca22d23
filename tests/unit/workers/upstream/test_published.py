"""Whose list of upstreams counts: the latest that was published, else that of the flags."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shared.clock import ManualClock
from shared.core.errors import StoreUnavailable
from shared.core.upstream_list import UpstreamList
from tests.memory_store import MemoryServer, MemoryStore
from tests.waiting import until
from tests.worker_bench import AWAY
from workers.upstream.published import PublishedUpstreams

FLAGS = ("http://flag-a", "http://flag-b")


class FakePool:
    """Keep the lists that it was given."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.lists: list[tuple[str, ...]] = []

    def replace(self, urls: tuple[str, ...]) -> None:
        self.lists.append(urls)


class CountingStore(MemoryStore):
    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.looks = 0

    async def read_upstreams(self) -> UpstreamList | None:
        self.looks += 1
        return await super().read_upstreams()


class Bench:
    def __init__(self, look_again_after_s: float = 0.0) -> None:
        self.server = MemoryServer(ManualClock(), Random(7))
        self.store = CountingStore(self.server)
        self.pool = FakePool()
        self.published = PublishedUpstreams(self.store, self.pool, FLAGS, look_again_after_s)  # type: ignore[arg-type] # all that it needs of a pool

    async def publish(self, version: int, *urls: str) -> None:
        await self.store.offer_upstreams(UpstreamList(version, urls))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_without_a_published_list_nothing_changes(bench: Bench) -> None:
    await bench.published.sync()
    assert bench.pool.lists == []


async def test_each_new_list_is_followed_once(bench: Bench) -> None:
    for version in (5, 6):
        await bench.publish(version, f"http://{version}")
        await bench.published.sync()
        await bench.published.sync()
    assert bench.pool.lists == [("http://5",), ("http://6",)]


async def test_an_empty_list_hands_back_to_the_flags(bench: Bench) -> None:
    await bench.publish(1, "http://published")
    await bench.published.sync()
    await bench.publish(2)
    await bench.published.sync()
    assert bench.pool.lists == [("http://published",), FLAGS]


async def test_the_log_says_which_list_applies_and_nothing_to_a_worker_that_starts_with_the_flags(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "workers.upstream.published")
    await bench.publish(1)
    await bench.published.sync()
    assert caplog.messages == []
    await bench.publish(2, "http://published")
    await bench.published.sync()
    await bench.publish(3)
    await bench.published.sync()
    assert caplog.messages == [
        "the published list replaces the --upstream flags",
        "the published list is gone; the --upstream flags apply",
    ]


async def test_an_answer_that_is_older_than_what_is_known_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.publish(2, "http://new")
    await bench.published.sync()

    async def late(_: UpstreamList) -> UpstreamList:
        return UpstreamList(1, ("http://old",))

    monkeypatch.setattr(bench.store, "offer_upstreams", late)
    await bench.published.sync()
    assert bench.pool.lists == [("http://new",)]


async def test_a_thousand_broken_exchanges_are_one_look() -> None:
    """A trainer restarts vLLM elsewhere and publishes the address: who meets the old one looks there."""
    bench = Bench(look_again_after_s=3600.0)
    run = asyncio.create_task(bench.published.run())
    await bench.publish(1, "http://moved")
    for _ in range(1000):
        bench.pool.broken.set()
    await until(lambda: bench.pool.lists)
    bench.pool.broken.set()
    assert bench.store.looks == 1
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize("error", [AWAY, StoreUnavailable("lost", maybe_done=True)])
async def test_a_store_that_is_away_does_not_end_the_duty(bench: Bench, error: StoreUnavailable) -> None:
    bench.store.fail_before = error
    run = asyncio.create_task(bench.published.run())
    bench.published.look()
    await until(lambda: bench.store.looks)
    bench.store.fail_before = None
    await bench.publish(1, "http://new")
    bench.published.look()
    await until(lambda: bench.pool.lists == [("http://new",)])
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
