"""One worker with its duties by the clock; its turns are taken by hand."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from shared.core.callers import ANONYMOUS, Keyring
from tests.worker_bench import OWNER, SESSION_ID, WorkerBench, openai_of
from workers.duties.duties import Housekeeping
from workers.duties.lease import STANDARD_PACE, DutyPace
from workers.parts import Live, WorkerParts
from workers.samples.expiry import DeliveryExpiry
from workers.samples.sessions import Sessions
from workers.upstream.catalogue import Catalogue, Served
from workers.upstream.published import PublishedUpstreams

if TYPE_CHECKING:
    from tests.memory_store import MemoryServer


class FakePool:
    """Counts its turns; the first ones break."""

    def __init__(self) -> None:
        self.catalogue = Catalogue((), "{run_id}")
        self.catalogue.replace([Served("sim/tiny", None, 4096)])
        self.probes = 0
        self.listings = 0
        self.broken = asyncio.Event()
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
    def __init__(
        self, server: MemoryServer | None = None, owner: str = OWNER, duty_pace: DutyPace = STANDARD_PACE
    ) -> None:
        super().__init__(server, owner, lease_s=30.0, session_timeout_s=300.0)
        self.sessions = Sessions(self.store, self.clock, self.settings.session_timeout_s)
        self.pool = FakePool()
        self.published = PublishedUpstreams(self.store, self.pool, ("http://flag",))  # type: ignore[arg-type] # as below
        parts = WorkerParts(
            live=Live(self.settings, Keyring(())),
            store=self.store,
            dispatcher=self.dispatcher,
            executor=self.executor,  # type: ignore[arg-type] # no duty asks for it
            waiters=self.waiters,
            sessions=self.sessions,
            pool=self.pool,  # type: ignore[arg-type] # only its duties are asked for
            published=self.published,
            adapters=None,  # type: ignore[arg-type] # no duty asks for them
            expiry=DeliveryExpiry(self.store, self.settings, self.counters, self.unfetched, self.clock),
            unfetched=self.unfetched,
            counters=self.counters,
            clock=self.clock,
            random_bytes=Random(7).randbytes,
            openai=openai_of(self.pool, self.clock),  # type: ignore[arg-type]
        )
        self.housekeeping = Housekeeping(parts, owner, self.settings, pace=duty_pace)

    def on_loss(self) -> None:
        self.housekeeping.lease.doubt()

    def is_refilling(self) -> bool:
        return self.dispatcher.is_refilling(self.clock.monotonic_s())

    def sleeps(self) -> bool:
        """Between two turns of the store's duty."""
        return bool(self.housekeeping.lease.hurry._waiters)

    def waits_for_a_change(self) -> bool:
        return bool(self.pool.changed._waiters)

    async def turn(self) -> None:
        await self.housekeeping.tend_store()

    async def alive(self, seq_id: int = 1) -> None:
        """A running sample of a session that has shown a sign of life."""
        await self.sessions.require_alive(SESSION_ID, ANONYMOUS)
        await self.started(seq_id)
