"""Results that settled here a moment ago, for polls that come just behind them.

A sample that takes a few milliseconds has settled before its poll arrives, which then would watch its session and read
the store for what this worker still has in hand. Results only: what asks for a new submission must not outlive it. The
store stays the truth; here is no more than a few seconds' and a few megabytes' worth, and each is handed out once.

What this worker settled and nobody is known to have fetched: small ids, never results.

They serve twice. When the store lost its data, these are the samples whose results are gone: they are announced as
orphaned, so that their clients come, get their 410, and submit again. And shortly before their time is up, those that
are still unread are counted: results that nobody will ever fetch.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from shared.core.lifecycle import State
from shared.core.record import Claim

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shared.core.model import SampleKey
    from shared.core.record import Record


_READY: Final = State.READY
# Two seconds of what a worker settles at its fastest.
_MOST: Final = 2_048
_LARGEST_BYTES: Final = 4 * 1024
# A poll follows its promise at once, or was held up so long that a look into the store does not matter.
_FRESH_S: Final = 5.0


class FreshResults:
    """In the order of settling. Times are monotonic seconds."""

    def __init__(self, ttl_s: float, most: int = _MOST) -> None:
        """`ttl_s`: how long the store keeps them; nothing is handed out after that."""
        self._fresh_s = min(ttl_s, _FRESH_S)
        self._most = most
        self._results: dict[SampleKey, tuple[float, Record]] = {}

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: SampleKey, record: Record, now_s: float) -> None:
        """Nobody has come for it yet."""
        if record.header.state is not _READY or len(record.payload) > _LARGEST_BYTES:
            return
        self._results[key] = (now_s, record)
        if len(self._results) > self._most:
            del self._results[next(iter(self._results))]

    def take(self, key: SampleKey, now_s: float) -> Record | None:
        """It is gone then: who comes again for it is answered from the store."""
        kept = self._results.pop(key, None)
        return kept[1] if kept is not None and now_s - kept[0] < self._fresh_s else None

    def drop_stale(self, now_s: float) -> None:
        """Give back what is too old to be handed out."""
        while self._results:
            key, (settled_s, _) = next(iter(self._results.items()))
            if now_s - settled_s < self._fresh_s:
                return
            del self._results[key]


# 215 bytes each. Beyond it the oldest are forgotten: a wipe then leaves their clients to the SDK's own patience.
REMEMBERED_MAX: Final = 65_536
# When it was settled and the claim, in one object of 80 bytes: as objects of their own they have 115 more, and what
# other workers handed over stays for the whole undelivered time.
_SETTLED: Final = struct.Struct("=dHI16s16s")


class UnfetchedResults:
    """In the order of settling. Times are monotonic seconds."""

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._most = most
        self._settled: dict[SampleKey, bytes] = {}

    def __len__(self) -> int:
        return len(self._settled)

    def add(self, key: SampleKey, claim: Claim, now_s: float) -> None:
        self._settled[key] = _SETTLED.pack(now_s, claim.attempt, claim.n, claim.digest, claim.owner.encode())
        if len(self._settled) > self._most:
            del self._settled[next(iter(self._settled))]

    def handed_over(self, key: SampleKey) -> float | None:
        """When it was settled, for the first that hands it over here; None for what was settled elsewhere."""
        settled = self._settled.pop(key, None)
        return _settled_s(settled) if settled is not None else None

    def fetched(self, keys: Iterable[SampleKey]) -> None:
        """They were acknowledged here."""
        for key in keys:
            self._settled.pop(key, None)

    def claims(self) -> Iterator[tuple[SampleKey, Claim]]:
        """All that are remembered when the first is asked for."""
        for key, settled in list(self._settled.items()):
            yield key, _claim(settled)

    def keys(self) -> list[SampleKey]:
        return list(self._settled)

    def take_settled_before(self, then_s: float) -> list[SampleKey]:
        """Those that were settled before `then_s`; they are not remembered any longer."""
        due: list[SampleKey] = []
        for key, settled in self._settled.items():
            if _settled_s(settled) >= then_s:
                break
            due.append(key)
        for key in due:
            del self._settled[key]
        return due


def _settled_s(settled: bytes) -> float:
    at_s: float = _SETTLED.unpack(settled)[0]
    return at_s


def _claim(settled: bytes) -> Claim:
    _, attempt, n, digest, owner = _SETTLED.unpack(settled)
    return Claim(owner.decode(), attempt, n, digest)
