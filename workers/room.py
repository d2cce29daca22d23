"""What one worker holds for its callers, and whether it takes more: samples, and requests that are passed on.

What is admitted is decided in `shared/core/admission.py`; here are the figures that it compares.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from shared.core.admission import Limits, Load, admit
from shared.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.config import Settings
    from shared.counters import Counters
    from workers.keyring import Caller
    from workers.tenants import Holding, Tally, Tenants

_REJECTIONS: Final = {
    "in_flight": "rejected_in_flight",
    "bytes": "rejected_bytes",
    "draining": "rejected_draining",
    "key": "rejected_key",
    "share": "rejected_share",
}


class Room:
    """`draining`: nothing more is taken."""

    def __init__(self, tenants: Tenants, counters: Counters, settings: Settings) -> None:
        self._tenants = tenants
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
        """Room for one more; give what is returned back with `release`. Raises `Overloaded`."""
        load = Load(self._held, self.in_flight_bytes, store_full, self.draining, store_refilling)
        rejection = admit(load, self._limits, held_bytes, self._tenants.tenancy(caller))
        if rejection is not None:
            self.count_rejection(rejection.reason, self._tenants.tally(caller))
            raise Overloaded(rejection.reason, rejection.message)
        self._held += 1
        self.in_flight_bytes += held_bytes
        self._idle.clear()
        return self._tenants.take(caller, held_bytes)

    def grow(self, holding: Holding, more_bytes: int) -> None:
        """What was taken has become larger, or smaller."""
        holding.in_flight_bytes += more_bytes
        self.in_flight_bytes += more_bytes

    def release(self, holding: Holding, held_bytes: int) -> None:
        self._tenants.release(holding, held_bytes)
        self._held -= 1
        self.in_flight_bytes -= held_bytes
        if not self._held:
            self._idle.set()

    @contextmanager
    def beside(self, caller: Caller, held_bytes: int) -> Iterator[None]:
        """Room for a request that is passed on: it counts like a sample, and leaves nothing in the store.

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
