"""What one worker holds in flight, in total and by API key: samples, requests that are passed on, buffers and polls.

Whether one more is admitted is decided in `shared/core/admission.py`. This module keeps the figures that are compared
there with a worker's limits, a key's limits and a key's share, and the figures that operators see.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shared.channel import KeyStatus
from shared.core import ids
from shared.core.admission import ALONE, Limits, Load, Tenancy, admit, admit_buffer, refuse_poll, worker_part
from shared.core.callers import NO_LIMITS
from shared.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shared.config import Settings
    from shared.core.admission import Rejection
    from shared.core.callers import Caller
    from shared.counters import Counters
    from workers.samples.store_share import StoreShare


# After the store refused a write for lack of memory, new samples are refused this long before Redis is asked again.
_FULL_FOR_S: Final = 1.0
_REJECTIONS: Final = {
    "in_flight": "rejected_in_flight",
    "bytes": "rejected_bytes",
    "draining": "rejected_draining",
    "key": "rejected_key",
    "share": "rejected_share",
}


class Quota:
    """Count what this worker holds, and refuse what is too much.

    While `draining`, everything new is refused. Until `store_full_until_s`, samples are refused.
    """

    def __init__(self, counters: Counters, settings: Settings, store_share: StoreShare) -> None:
        self._counters = counters
        self.store_share = store_share
        self.key_usage = KeyUsage(settings.workers)
        self.reconfigure(settings)
        self._held = 0
        self.in_flight_bytes = 0
        # Those of `in_flight_bytes` that are bodies and replies.
        self.buffered_bytes = 0
        self.passed_in_flight = 0
        self.draining = False
        self.store_full_until_s = 0.0
        self.idle = asyncio.Event()
        self.idle.set()

    def reconfigure(self, settings: Settings) -> None:
        self._limits = Limits(settings.max_in_flight, settings.max_in_flight_bytes)
        self.key_usage.shared = len(settings.api_keys or ()) > 1

    def take(
        self, caller: Caller, held_bytes: int, *, store_full: bool = False, store_refilling: bool = False
    ) -> Holding:
        """Count one more, and return what has to be given back with `release`. Raise `Overloaded` if it is too much.

        `store_full`, `store_refilling`: for a sample, which needs the store.
        """
        load = Load(self._held, self.in_flight_bytes, store_full, self.draining, store_refilling)
        self._require(caller, admit(load, self._limits, held_bytes, self.key_usage.tenancy(caller)))
        self._held += 1
        self.in_flight_bytes += held_bytes
        self.idle.clear()
        return self.key_usage.take(caller, held_bytes)

    def grow(self, holding: Holding, more_bytes: int) -> None:
        """Count `more_bytes` (fewer, if negative) for something that was taken."""
        holding.in_flight_bytes += more_bytes
        self.in_flight_bytes += more_bytes

    def release(self, holding: Holding, held_bytes: int) -> None:
        self.key_usage.release(holding, held_bytes)
        self._held -= 1
        self.in_flight_bytes -= held_bytes
        if not self._held:
            self.idle.set()

    @contextmanager
    def beside(self, caller: Caller, held_bytes: int) -> Iterator[None]:
        """Count a request that is passed on, while it lasts. Raise `Overloaded` if it is too much.

        It counts like a sample, but leaves nothing in the store.
        """
        holding = self.take(caller, held_bytes)
        self.passed_in_flight += 1
        try:
            yield
        finally:
            self.passed_in_flight -= 1
            self.release(holding, held_bytes)

    def require_store_share(self, caller: Caller) -> None:
        """Raise `Overloaded` if the results of this caller that nobody has fetched fill more than its share."""
        if self.key_usage.shared:
            self._require(caller, self.store_share.refuse(caller))

    def require_memory(self, caller: Caller, held_bytes: int = 0, more_bytes: int = 0) -> None:
        """Raise `Overloaded` if a request that holds `held_bytes` may not hold `more_bytes` beside them."""
        load = Load(self._held, self.in_flight_bytes, buffered_bytes=self.buffered_bytes)
        tenancy = self.key_usage.tenancy(caller)
        self._require(caller, admit_buffer(load, self._limits, held_bytes, more_bytes, tenancy))

    def count_memory(self, caller: Caller, more_bytes: int) -> None:
        """Count `more_bytes` (fewer, if negative) of what is held of a body or a reply."""
        self.buffered_bytes += more_bytes
        self.in_flight_bytes += more_bytes
        self.key_usage.buffer(caller, more_bytes)

    @contextmanager
    def polling(self, caller: Caller) -> Iterator[None]:
        """Count a poll while it is held. Raise `Overloaded` if this key has too many."""
        polls, digest = self.key_usage.polls, caller.digest
        held, most = polls.get(digest, 0), caller.limits.max_in_flight
        self._require(caller, refuse_poll(held, self._limits.max_in_flight if most is None else most))
        polls[digest] = held + 1
        try:
            yield
        finally:
            polls[digest] -= 1
            if not polls[digest]:
                del polls[digest]

    def _require(self, caller: Caller, rejection: Rejection | None) -> None:
        if rejection is not None:
            self.count_rejection(rejection.reason, self.key_usage.tally(caller))
            raise Overloaded(rejection.reason, rejection.message)

    def note_store_full(self, now_s: float) -> None:
        """Refuse samples for a moment: the store has no memory left."""
        self.store_full_until_s = now_s + _FULL_FOR_S

    def count_rejection(self, reason: str, tally: Tally) -> None:
        tally.rejected += 1
        name = _REJECTIONS.get(reason, "rejected_store")
        setattr(self._counters, name, getattr(self._counters, name) + 1)


@dataclass(eq=False, slots=True)
class Tally:
    """Count the samples begun and the requests refused for one key name."""

    name: str = ""
    samples: int = 0
    rejected: int = 0


@dataclass(eq=False, slots=True)
class Holding:
    """Count what one key, given by its `Caller.digest`, has in flight: `in_flight_bytes` with `buffered_bytes`."""

    digest: bytes
    tally: Tally = field(default_factory=Tally)
    in_flight: int = 0
    in_flight_bytes: int = 0
    owner_tag: str = ""
    buffered_bytes: int = 0


class KeyUsage:
    """Count by key. A key's limits are divided among `workers`; `shared` is true if several keys are configured."""

    def __init__(self, workers: int, *, shared: bool = False) -> None:
        self.workers = workers
        self.shared = shared
        # Only keys that hold something: their number decides what a share is.
        self._holdings: dict[bytes, Holding] = {}
        # Held polls by `Caller.digest`.
        self.polls: dict[bytes, int] = {}
        # By the operator's names; there are as many as the keys file has ever held.
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
            buffered_bytes=holding.buffered_bytes if holding else 0,
        )

    def take(self, caller: Caller, size_bytes: int) -> Holding:
        """Count one more for this caller, and return what has to be given back with `release`."""
        holding = self._holding(caller)
        holding.in_flight += 1
        holding.in_flight_bytes += size_bytes
        return holding

    def release(self, holding: Holding, size_bytes: int) -> None:
        holding.in_flight -= 1
        holding.in_flight_bytes -= size_bytes
        self._forget_empty(holding)

    def buffer(self, caller: Caller, more_bytes: int) -> None:
        """Count `more_bytes` (fewer, if negative) of this caller's bodies and replies."""
        holding = self._holding(caller)
        holding.in_flight_bytes += more_bytes
        holding.buffered_bytes += more_bytes
        self._forget_empty(holding)

    def _holding(self, caller: Caller) -> Holding:
        holding = self._holdings.get(caller.digest)
        if holding is None:
            tag = ids.owner_tag(caller.secret)
            holding = self._holdings[caller.digest] = Holding(caller.digest, self.tally(caller), owner_tag=tag)
        return holding

    def _forget_empty(self, holding: Holding) -> None:
        if not holding.in_flight and not holding.buffered_bytes:
            del self._holdings[holding.digest]

    def tally(self, caller: Caller) -> Tally:
        return self._tallies.get(caller.name) or self._tallies.setdefault(caller.name, Tally(caller.name))

    def statuses(self, names: Iterable[str]) -> tuple[KeyStatus, ...]:
        """Return the status of each of `names` that has asked for anything."""
        return tuple(self._status(tally) for name in names if (tally := self._tallies.get(name)) is not None)

    def _status(self, tally: Tally) -> KeyStatus:
        # A name has more than one holding for a while after it was given another key.
        held = [holding for holding in self._holdings.values() if holding.tally is tally]
        in_flight = sum(holding.in_flight for holding in held)
        in_flight_bytes = sum(holding.in_flight_bytes for holding in held)
        return KeyStatus(tally.name, in_flight, in_flight_bytes, tally.samples, tally.rejected)
