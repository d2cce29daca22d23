"""Results that settled here a moment ago, for polls that come just behind them.

A sample that takes a few milliseconds has settled before its poll arrives, which then would watch its session and read
the store for what this worker still has in hand. Results only: what asks for a new submission must not outlive it. The
store stays the truth; here is no more than a few seconds' and a few megabytes' worth, and each is handed out once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.lifecycle import State

if TYPE_CHECKING:
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
