"""What one worker holds for its callers, and whether it takes more: samples, and requests that are passed on.

What is admitted is decided in `shared/core/admission.py`; here are the figures that it compares.

What each API key holds of this worker: the figures that admission compares with the key's limits and share, and
those that operators see.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shared.channel import KeyStatus
from shared.core.admission import ALONE, Limits, Load, Tenancy, admit, worker_part
from shared.core.callers import NO_LIMITS
from shared.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shared.config import Settings
    from shared.core.callers import Caller
    from shared.counters import Counters


_REJECTIONS: Final = {
    "in_flight": "rejected_in_flight",
    "bytes": "rejected_bytes",
    "draining": "rejected_draining",
    "key": "rejected_key",
    "share": "rejected_share",
}


class Quota:
    """`draining`: nothing more is taken."""

    def __init__(self, key_usage: KeyUsage, counters: Counters, settings: Settings) -> None:
        self._key_usage = key_usage
        self._counters = counters
        self.reconfigure(settings)
        self._held = 0
        self.in_flight_bytes = 0
        self.passed_in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def reconfigure(self, settings: Settings) -> None:
        self._limits = Limits(settings.max_in_flight, settings.max_in_flight_bytes)

    def take(
        self, caller: Caller, held_bytes: int, *, store_full: bool = False, store_refilling: bool = False
    ) -> Holding:
        """Quota for one more; give what is returned back with `release`. Raises `Overloaded`."""
        load = Load(self._held, self.in_flight_bytes, store_full, self.draining, store_refilling)
        rejection = admit(load, self._limits, held_bytes, self._key_usage.tenancy(caller))
        if rejection is not None:
            self.count_rejection(rejection.reason, self._key_usage.tally(caller))
            raise Overloaded(rejection.reason, rejection.message)
        self._held += 1
        self.in_flight_bytes += held_bytes
        self._idle.clear()
        return self._key_usage.take(caller, held_bytes)

    def grow(self, holding: Holding, more_bytes: int) -> None:
        """What was taken has become larger, or smaller."""
        holding.in_flight_bytes += more_bytes
        self.in_flight_bytes += more_bytes

    def release(self, holding: Holding, held_bytes: int) -> None:
        self._key_usage.release(holding, held_bytes)
        self._held -= 1
        self.in_flight_bytes -= held_bytes
        if not self._held:
            self._idle.set()

    @contextmanager
    def beside(self, caller: Caller, held_bytes: int) -> Iterator[None]:
        """Quota for a request that is passed on: it counts like a sample, and leaves nothing in the store.

        Raises `Overloaded`.
        """
        holding = self.take(caller, held_bytes)
        self.passed_in_flight += 1
        try:
            yield
        finally:
            self.passed_in_flight -= 1
            self.release(holding, held_bytes)

    def count_rejection(self, reason: str, tally: Tally) -> None:
        tally.rejected += 1
        name = _REJECTIONS.get(reason, "rejected_store")
        setattr(self._counters, name, getattr(self._counters, name) + 1)

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass(eq=False, slots=True)
class Tally:
    """What the callers of one name have asked for: samples that were begun, and requests that were refused."""

    name: str = ""
    samples: int = 0
    rejected: int = 0


@dataclass(eq=False, slots=True)
class Holding:
    """The samples in flight of one key, by its `Caller.digest`."""

    digest: bytes
    tally: Tally = field(default_factory=Tally)
    in_flight: int = 0
    in_flight_bytes: int = 0


class KeyUsage:
    """`workers`: among how many a key's limits are divided. `shared`: whether several keys are configured."""

    def __init__(self, workers: int, *, shared: bool) -> None:
        self.workers = workers
        self.shared = shared
        self._holdings: dict[bytes, Holding] = {}
        # By the operator's names, of which there are as many as the file of keys ever held.
        self._tallies: dict[str, Tally] = {}

    def tenancy(self, caller: Caller) -> Tenancy:
        if not self.shared and caller.limits is NO_LIMITS:
            return ALONE
        holding = self._holdings.get(caller.digest)
        return Tenancy(
            in_flight=holding.in_flight if holding else 0,
            in_flight_bytes=holding.in_flight_bytes if holding else 0,
            max_in_flight=worker_part(caller.limits.max_in_flight, self.workers),
            max_in_flight_bytes=worker_part(caller.limits.max_in_flight_bytes, self.workers),
            active_keys=len(self._holdings) + (holding is None),
            shared=self.shared,
        )

    def take(self, caller: Caller, size_bytes: int) -> Holding:
        """One more sample of this caller; give what is returned to `release`."""
        holding = self._holdings.get(caller.digest)
        if holding is None:
            holding = self._holdings[caller.digest] = Holding(caller.digest, self.tally(caller))
        holding.in_flight += 1
        holding.in_flight_bytes += size_bytes
        return holding

    def tally(self, caller: Caller) -> Tally:
        return self._tallies.get(caller.name) or self._tallies.setdefault(caller.name, Tally(caller.name))

    def statuses(self, names: Iterable[str]) -> tuple[KeyStatus, ...]:
        """Of those of `names` that have asked for anything."""
        return tuple(self._status(tally) for name in names if (tally := self._tallies.get(name)) is not None)

    def _status(self, tally: Tally) -> KeyStatus:
        # More than one for a while when the name has got another key.
        held = [holding for holding in self._holdings.values() if holding.tally is tally]
        in_flight = sum(holding.in_flight for holding in held)
        in_flight_bytes = sum(holding.in_flight_bytes for holding in held)
        return KeyStatus(tally.name, in_flight, in_flight_bytes, tally.samples, tally.rejected)

    def release(self, holding: Holding, size_bytes: int) -> None:
        holding.in_flight -= 1
        holding.in_flight_bytes -= size_bytes
        if not holding.in_flight:
            # Only keys that hold something are here: their number is what shares are counted by.
            del self._holdings[holding.digest]
