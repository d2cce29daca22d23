"""What each API key has asked for, by the operator's name for it: over all workers, those that ended included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.admin.accumulator import Accumulator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shared.channel import KeyStatus, Status


@dataclass(frozen=True, slots=True)
class KeyView:
    """`in_flight` is of now, and of the workers that serve the slots; the others count since the gateway started."""

    name: str
    in_flight: int
    in_flight_bytes: int
    samples: int
    rejected: int


class KeyLedger:
    """No count falls while its name stays in the file of keys."""

    def __init__(self) -> None:
        self._samples = Accumulator()
        self._rejected = Accumulator()

    def update(self, serial: int, keys: Iterable[KeyStatus]) -> None:
        """What a process tells that counts from its own start."""
        told = list(keys)
        self._samples.update(serial, {key.name: key.samples for key in told})
        self._rejected.update(serial, {key.name: key.rejected for key in told})

    def forget(self, serial: int) -> None:
        """The process has ended; its share of the counts stays."""
        self._samples.forget(serial)
        self._rejected.forget(serial)

    def views(self, names: Iterable[str], statuses: Sequence[Status]) -> tuple[KeyView, ...]:
        """One for each of `names`, the keys of the file: whoever is taken out of it is shown no more."""
        held: dict[str, list[KeyStatus]] = {}
        for key in (key for status in statuses for key in status.keys):
            held.setdefault(key.name, []).append(key)
        return tuple(self._view(name, held.get(name, ())) for name in names)

    def _view(self, name: str, held: Iterable[KeyStatus]) -> KeyView:
        here = list(held)
        return KeyView(
            name,
            in_flight=sum(key.in_flight for key in here),
            in_flight_bytes=sum(key.in_flight_bytes for key in here),
            samples=self._samples.count(name),
            rejected=self._rejected.count(name),
        )
