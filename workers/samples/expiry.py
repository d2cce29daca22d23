"""Starting the clocks of what was delivered: many at a time, a moment later, and never lost to a store that is away.

A reply that was handed over starts the retrieved clock; an acknowledgement shortens what is left. Neither is worth a
round trip of its own on the way to the client, and neither does harm when it comes a little late.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError, StoreRefused
from shared.log import Throttle

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from shared.clock import Clock
    from shared.config import Settings
    from shared.core.model import SampleKey
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.samples.recent_results import UnfetchedResults

log = logging.getLogger(__name__)

# Long enough to gather a burst into one command, far below the clocks themselves (30 s and more).
_GATHER_S: Final = 0.05
_RETRY_S: Final = 1.0
_LOG_EVERY_S: Final = 30.0
_BATCH: Final = 500
# While the store is away, deliveries beyond this many keep the longer clock: memory stays bounded.
_PENDING_MAX: Final = 100_000


class DeliveryExpiry:
    def __init__(
        self, store: Store, settings: Settings, counters: Counters, unfetched: UnfetchedResults, clock: Clock
    ) -> None:
        self._store = store
        self._clock = clock
        self._unfetched = unfetched
        self._retrieved_ttl_s = settings.retrieved_ttl_s
        self._acked_ttl_s = settings.acked_ttl_s
        self._counters = counters
        self._retrieved: list[SampleKey] = []
        self._acked: list[SampleKey] = []
        self._wanted = asyncio.Event()
        self._damping = Throttle(_LOG_EVERY_S)

    def handed_over(self, key: SampleKey) -> None:
        settled_s = self._unfetched.handed_over(key)
        if settled_s is not None:
            self._counters.stages.delivery.add(self._clock.monotonic_s() - settled_s)
        if len(self._retrieved) < _PENDING_MAX:
            self._retrieved.append(key)
        self._wanted.set()

    def acknowledged(self, keys: list[SampleKey]) -> None:
        self._unfetched.fetched(keys)
        if keys and len(self._acked) < _PENDING_MAX:
            self._acked.extend(keys)
            self._wanted.set()

    async def run(self) -> None:
        """Until cancelled; the worker owns this task."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_GATHER_S)
            self._wanted.clear()
            try:
                await self.flush()
            except StoreError:
                self._wanted.set()
                await asyncio.sleep(_RETRY_S)

    async def flush(self) -> None:
        """Write all that is pending. What could not be written stays. Raises `StoreError`."""
        while self._retrieved:
            batch = self._retrieved[:_BATCH]
            started = self._store.mark_retrieved(batch, ttl_s=self._retrieved_ttl_s)
            self._counters.delivered += await self._unless_refused(started)
            del self._retrieved[: len(batch)]
        while self._acked:
            batch = self._acked[:_BATCH]
            shortened = self._store.acknowledge(batch, ttl_s=self._acked_ttl_s)
            self._counters.acknowledged += await self._unless_refused(shortened)
            del self._acked[: len(batch)]

    async def _unless_refused(self, written: Awaitable[int]) -> int:
        """What the store refuses keeps its longer clock: tried for ever, it would hold up all that comes after it."""
        try:
            return await written
        except StoreRefused as error:
            held_back = self._damping.allow("refused", self._clock.monotonic_s())
            if held_back is not None:
                log.error("store refuses to start clocks", extra={"error": str(error), "not_logged": held_back})
            return 0
