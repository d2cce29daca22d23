"""What this worker settled and nobody is known to have fetched: small ids, never results.

They serve twice. When the store lost its data, these are the samples whose results are gone: they are announced as
orphaned, so that their clients come, get their 410, and submit again. And shortly before their time is up, those that
are still unread are counted: results that nobody will ever fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.core.model import SampleKey
    from shared.core.record import Claim

# 400 bytes each. Beyond it the oldest are forgotten: a wipe then leaves their clients to the SDK's own patience.
REMEMBERED_MAX: Final = 65_536


class Settlements:
    """In the order of settling. Times are monotonic seconds."""

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._most = most
        self._settled: dict[SampleKey, tuple[float, Claim]] = {}

    def __len__(self) -> int:
        return len(self._settled)

    def add(self, key: SampleKey, claim: Claim, now_s: float) -> None:
        self._settled[key] = (now_s, claim)
        if len(self._settled) > self._most:
            del self._settled[next(iter(self._settled))]

    def handed_over(self, key: SampleKey) -> float | None:
        """When it was settled, for the first that hands it over here; None for what was settled elsewhere."""
        settled = self._settled.pop(key, None)
        return settled[0] if settled is not None else None

    def fetched(self, keys: Iterable[SampleKey]) -> None:
        """They were acknowledged here."""
        for key in keys:
            self._settled.pop(key, None)

    def claims(self) -> list[tuple[SampleKey, Claim]]:
        return [(key, claim) for key, (_, claim) in self._settled.items()]

    def take_settled_before(self, then_s: float) -> list[SampleKey]:
        """Those that were settled before `then_s`; they are not remembered any longer."""
        due: list[SampleKey] = []
        for key, (settled_s, _) in self._settled.items():
            if settled_s >= then_s:
                break
            due.append(key)
        for key in due:
            del self._settled[key]
        return due
