"""What each key holds of the store: the results that nobody has fetched yet, over all workers.

A worker counts what it settled itself (`UnfetchedResults`). At each turn of the housekeeping it reports its count by
key to the store, reads the counts of the others, and looks at the store's memory. To find out what other workers
delivered, it looks at the clocks of some records in the store. Between two turns a worker knows only its own part of
what is new, and assumes that the others settle as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.admission import StoreLoad, refuse_unfetched
from shared.loop.slices import batches

if TYPE_CHECKING:
    from shared.core.admission import Rejection
    from shared.core.callers import Caller
    from shared.store.contract import Store
    from workers.samples.expiry import UnfetchedResults

# Records whose clocks are looked at in one turn.
_CHECKED_PER_TURN: Final = 10_000
# A cluster is asked for each by itself.
_CHECKED_AT_ONCE: Final = 200
# Below this part of the store's memory nothing is looked for that others delivered.
_CHECK_FROM: Final = 1 / 2


class StoreShare:
    """Know how full the store is, and who fills it."""

    def __init__(self, unfetched: UnfetchedResults) -> None:
        self._unfetched = unfetched
        self._others: dict[str, int] = {}
        self._workers = 1
        self._used_bytes = self._max_bytes = self._settled_bytes = 0

    def refuse(self, caller: Caller) -> Rejection | None:
        """Return why a sample of this caller is refused, or None if the store has room for its result."""
        if not self._max_bytes:
            return None
        grown_bytes = (self._unfetched.settled_bytes - self._settled_bytes) * self._workers
        tag, here = ids.owner_tag(caller.secret), self._unfetched.by_key
        held_bytes = here.get(tag, 0) + self._others.get(tag, 0)
        keys = len(here.keys() | self._others.keys() | {tag})
        return refuse_unfetched(StoreLoad(self._used_bytes + grown_bytes, self._max_bytes, held_bytes, keys))

    async def update(self, store: Store, owner: str, report_ttl_s: float) -> None:
        """Exchange counts with the other workers and look at the store's memory. Raise `StoreError`."""
        info = await store.info()
        self._used_bytes, self._max_bytes = info.used_bytes, info.max_bytes
        self._settled_bytes = self._unfetched.settled_bytes
        if self._unfetched.is_half_full or info.used_bytes > info.max_bytes * _CHECK_FROM:
            await self._check(store)
        report = pack(self._unfetched.by_key)
        others = [unpack(report) for report in await store.report_unfetched(owner, report, ttl_s=report_ttl_s)]
        self._workers = len(others) + 1
        self._others = {}
        for counted in others:
            for tag, held_bytes in counted.items():
                self._others[tag] = self._others.get(tag, 0) + held_bytes

    async def _check(self, store: Store) -> None:
        """Forget what other workers delivered."""
        for checked in batches(self._unfetched.next_to_check(_CHECKED_PER_TURN), _CHECKED_AT_ONCE):
            for key in set(checked).difference(await store.unread(checked)):
                self._unfetched.take(key)


def pack(by_key: dict[str, int]) -> bytes:
    """Return a report. What belongs to no key is left out."""
    return " ".join(f"{tag}={held_bytes}" for tag, held_bytes in by_key.items() if tag).encode()


def unpack(report: bytes) -> dict[str, int]:
    """Return the bytes by key of a report; whatever no version of this gateway wrote is left out."""
    pairs = (word.partition(b"=") for word in report.split())
    return {tag.decode("ascii", "replace"): int(text) for tag, _, text in pairs if text.isdigit() and len(text) < 19}
