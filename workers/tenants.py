"""What each API key holds of this worker: the figures that admission compares with the key's limits and share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.config import NO_LIMITS
from shared.core.admission import ALONE, Tenancy, worker_part

if TYPE_CHECKING:
    from workers.keyring import Caller


@dataclass(eq=False, slots=True)
class Holding:
    """The samples in flight of one key, by its `Caller.digest`."""

    digest: bytes
    in_flight: int = 0
    in_flight_bytes: int = 0


class Tenants:
    """`workers`: among how many a key's limits are divided. `shared`: whether several keys are configured."""

    def __init__(self, workers: int, *, shared: bool) -> None:
        self.workers = workers
        self.shared = shared
        self._holdings: dict[bytes, Holding] = {}

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
            holding = self._holdings[caller.digest] = Holding(caller.digest)
        holding.in_flight += 1
        holding.in_flight_bytes += size_bytes
        return holding

    def release(self, holding: Holding, size_bytes: int) -> None:
        holding.in_flight -= 1
        holding.in_flight_bytes -= size_bytes
        if not holding.in_flight:
            # Only keys that hold something are here: their number is what shares are counted by.
            del self._holdings[holding.digest]
