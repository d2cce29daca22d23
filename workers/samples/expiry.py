"""Follow results from their settling to their end in the store: which are not fetched yet, and when they expire.

A reply that was delivered starts the record's retrieved clock; an acknowledgement shortens what is left of it. Neither
is worth a round trip of its own, and neither does harm if it comes a little late. So they are gathered, written many at
a time a moment later, and never lost to a store that is away.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError, StoreRefused
from shared.core.model import Value
from shared.core.record import Claim
from shared.log import Throttle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from shared.clock import Clock
    from shared.config import Settings
    from shared.core.model import SampleKey
    from shared.counters import Counters
    from shared.store.contract import Store

log = logging.getLogger(__name__)

# 230 bytes each. Above this number the oldest are forgotten: if the store then loses its data, their clients wait until
# the SDK's own timeout.
REMEMBERED_MAX: Final = 65_536
# When it was settled, the claim, whose it is and its size, in one object of 104 bytes. As separate objects they would
# take more than twice as much, and what other workers delivered stays for up to the whole undelivered time.
_SETTLED: Final = struct.Struct("=dHI16s16sI16s")
# What a result costs the store besides its payload: its header, its name, its entry in the log.
_RECORD_BYTES: Final = 256
# What was forgotten too early still counts; it is gathered by the time that it was settled.
_FORGOTTEN_EVERY_S: Final = 60.0
_LOG_EVERY_S: Final = 30.0
_BATCH: Final = 500


class UnfetchedResults:
    """The ids, without results, of what this worker settled and nobody is known to have fetched.

    They serve three times. When the store has lost its data, the results of these samples are gone: they are announced
    as orphaned, so that their clients come, get their 410, and submit again. And shortly before their time is up, those
    still unread are counted as results that nobody will ever fetch. And their bytes count for their API keys.

    They are in the order of settling. Times are monotonic seconds.
    """

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._most = most
        self._settled: dict[SampleKey, bytes] = {}
        # In bytes, by `ids.owner_tag`.
        self.by_key: dict[str, int] = {}
        self.settled_bytes = 0
        self._forgotten: deque[tuple[float, dict[str, int]]] = deque()
        self._looked_at = 0

    def __len__(self) -> int:
        return len(self._settled)

    def add(self, key: SampleKey, claim: Claim, now_s: float, owner_tag: str = "", payload_bytes: int = 0) -> None:
        self.take(key)
        size_bytes = payload_bytes + _RECORD_BYTES
        digest, owner, tag = claim.digest, claim.owner.encode(), owner_tag.encode()
        self._settled[key] = _SETTLED.pack(now_s, claim.attempt, claim.n, digest, owner, size_bytes, tag)
        self._count(owner_tag, size_bytes)
        self.settled_bytes += size_bytes
        if len(self._settled) > self._most:
            self._forget_oldest()

    def _count(self, owner_tag: str, more_bytes: int) -> None:
        left_bytes = self.by_key.get(owner_tag, 0) + more_bytes
        if left_bytes > 0:
            self.by_key[owner_tag] = left_bytes
        else:
            self.by_key.pop(owner_tag, None)

    def _forget_oldest(self) -> None:
        settled_s, *_, size_bytes, tag = _SETTLED.unpack(self._settled.pop(next(iter(self._settled))))
        if not self._forgotten or settled_s >= self._forgotten[-1][0] + _FORGOTTEN_EVERY_S:
            self._forgotten.append((settled_s, {}))
        by_key, owner_tag = self._forgotten[-1][1], _text(tag)
        by_key[owner_tag] = by_key.get(owner_tag, 0) + size_bytes

    def take(self, key: SampleKey) -> float | None:
        """Forget a sample that was fetched, and return when it was settled; None if it was settled elsewhere."""
        settled = self._settled.pop(key, None)
        if settled is None:
            return None
        at_s, *_, size_bytes, tag = _SETTLED.unpack(settled)
        self._count(_text(tag), -size_bytes)
        return float(at_s)

    def claims(self) -> Iterator[tuple[SampleKey, Claim]]:
        """Yield those that are remembered when the first one is asked for."""
        for key, settled in list(self._settled.items()):
            _, attempt, n, digest, owner, *_ = _SETTLED.unpack(settled)
            yield key, Claim(owner.decode(), attempt, n, digest)

    def keys(self) -> list[SampleKey]:
        return list(self._settled)

    def take_settled_before(self, then_s: float) -> list[SampleKey]:
        """Forget the samples that were settled before `then_s`, and return them."""
        due: list[SampleKey] = []
        for key, settled in self._settled.items():
            if _SETTLED.unpack(settled)[0] >= then_s:
                break
            due.append(key)
        for key in due:
            self.take(key)
        while self._forgotten and self._forgotten[0][0] + _FORGOTTEN_EVERY_S < then_s:
            for owner_tag, size_bytes in self._forgotten.popleft()[1].items():
                self._count(owner_tag, -size_bytes)
        return due

    def next_to_check(self, most: int) -> list[SampleKey]:
        """Return up to `most` that other workers may have delivered, in turn."""
        if self._looked_at >= len(self._settled):
            self._looked_at = 0
        found = list(islice(self._settled, self._looked_at, self._looked_at + most))
        self._looked_at += len(found)
        return found

    @property
    def is_half_full(self) -> bool:
        return len(self._settled) > self._most // 2


def _text(tag: bytes) -> str:
    return tag.rstrip(b"\0").decode()


class ExpiryPace(Value, frozen=True):
    """When the clocks of deliveries are written; tests hand in other values.

    `gather_s`: long enough to gather a burst into one command, far below the clocks themselves (30 s and more).
    `retry_s`: the pause before a store that did not answer is asked again. `pending_max`: while the store is away, this
    many deliveries are kept for it, to bound memory; others keep the longer clock.
    """

    gather_s: float = 0.05
    retry_s: float = 1.0
    pending_max: int = 100_000


STANDARD_PACE: Final = ExpiryPace()


class DeliveryExpiry:
    """Start the clocks of results that were delivered or acknowledged."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        counters: Counters,
        unfetched: UnfetchedResults,
        clock: Clock,
        pace: ExpiryPace = STANDARD_PACE,
    ) -> None:
        self._store = store
        self._clock = clock
        self._unfetched = unfetched
        self._retrieved_ttl_s = settings.retrieved_ttl_s
        self._acked_ttl_s = settings.acked_ttl_s
        self._counters = counters
        self._pace = pace
        self._retrieved: list[SampleKey] = []
        self._acked: list[SampleKey] = []
        self._wanted = asyncio.Event()
        self._throttle = Throttle(_LOG_EVERY_S)

    def handed_over(self, key: SampleKey) -> None:
        """Note that the last byte of a result went to its client."""
        settled_s = self._unfetched.take(key)
        if settled_s is not None:
            self._counters.stages.delivery.add(self._clock.monotonic_s() - settled_s)
        if len(self._retrieved) < self._pace.pending_max:
            self._retrieved.append(key)
        self._wanted.set()

    def acknowledged(self, keys: list[SampleKey]) -> None:
        """Note that the client says that it has these results."""
        for key in keys:
            self._unfetched.take(key)
        if keys and len(self._acked) < self._pace.pending_max:
            self._acked.extend(keys)
            self._wanted.set()

    async def run(self) -> None:
        """Write what is pending until cancelled; the worker owns this task."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(self._pace.gather_s)
            self._wanted.clear()
            try:
                await self.flush()
            except StoreError:
                self._wanted.set()
                await asyncio.sleep(self._pace.retry_s)

    async def flush(self) -> None:
        """Write everything that is pending. What could not be written stays. Raise `StoreError`."""
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
        """Return how many clocks were written: none if the store refuses, so that what comes later is not held up.

        The results that it refuses keep their longer clock.
        """
        try:
            return await written
        except StoreRefused as error:
            not_logged = self._throttle.allow("refused", self._clock.monotonic_s())
            if not_logged is not None:
                log.error("store refuses to start clocks", extra={"error": str(error), "not_logged": not_logged})
            return 0
