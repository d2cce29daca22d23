"""What each API key has used, by its name in the keys file, over all workers including those that ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.admin.accumulator import Accumulator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shared.channel import KeyStatus, Status


@dataclass(frozen=True, slots=True)
class KeyView:
    """The use of a key. The `in_flight` values are current; the others count since the gateway started."""

    name: str
    in_flight: int
    in_flight_bytes: int
    samples: int
    rejected: int


class KeyLedger:
    """Counts by key. A count never falls while its name stays in the keys file."""

    def __init__(self) -> None:
        self._samples = Accumulator()
        self._rejected = Accumulator()

    def update(self, serial: int, keys: Iterable[KeyStatus]) -> None:
        """Take in what a process reports; its counts start with the process."""
        reported = list(keys)
        self._samples.update(serial, {key.name: key.samples for key in reported})
        self._rejected.update(serial, {key.name: key.rejected for key in reported})

    def forget(self, serial: int) -> None:
        """Drop a process that has ended; its share of the counts stays."""
        self._samples.forget(serial)
        self._rejected.forget(serial)

    def views(self, names: Iterable[str], statuses: Sequence[Status]) -> tuple[KeyView, ...]:
        """Return a view for each of `names`, the keys in the file; revoked keys are not shown."""
        held: dict[str, list[KeyStatus]] = {}
        for key in (key for status in statuses for key in status.keys):
            held.setdefault(key.name, []).append(key)
        return tuple(
            KeyView(
                name,
                in_flight=sum(key.in_flight for key in held.get(name, ())),
                in_flight_bytes=sum(key.in_flight_bytes for key in held.get(name, ())),
                samples=self._samples.count(name),
                rejected=self._rejected.count(name),
            )
            for name in names
        )
