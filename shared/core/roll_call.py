"""The roll call: which workers must enter their samples again, before a record that a store lost counts as gone.

A sample that is submitted again to an emptied store may be running on a worker that has not entered it yet, and that
worker's loop may be busy for seconds. So workers wait for each other by name. Every worker answers the roll of each
server it finds (`Store.answer_roll`) when it has entered everything it runs. The workers that had answered the previous
server are awaited until they answer the new one, are known to be gone, or a lease has passed: after that they are
reaped.

A worker does not know all others by name. It gives those that began after its last look as long as it took itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# The messages to all workers; the owner's name follows.
THERE: Final = b"there "
GONE: Final = b"gone "


def there_message(owner: str) -> bytes:
    """Return the message that `owner` has answered the roll."""
    return THERE + owner.encode()


def gone_message(owner: str) -> bytes:
    """Return the message that `owner` runs nothing any more."""
    return GONE + owner.encode()


class Roll(NamedTuple):
    """The owners that have answered the present server, and those that have gone since it started."""

    answered: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()


class RollCall:
    """Track the other workers from the view of one. Times are monotonic seconds."""

    def __init__(self, owner: str, lease_s: float) -> None:
        self._owner = owner
        self._lease_s = lease_s
        self._peers: frozenset[str] = frozenset()
        self._awaited: frozenset[str] = frozenset()
        self._until_s = float("-inf")
        # Set until `look` has returned the time for the unnamed workers, after the last awaited one.
        self._waits_for_unnamed = False
        self._unnamed_until_s = float("-inf")

    @property
    def awaited(self) -> frozenset[str]:
        """Return the owners that have not answered yet."""
        return self._awaited

    def begin(self, now_s: float) -> None:
        """Begin to wait for all known peers, because the store has lost data."""
        self._awaited |= self._peers
        self._until_s = now_s + self._lease_s
        self._waits_for_unnamed = True

    def entered_all(self, now_s: float, unnamed_need_s: float) -> float:
        """Return for how long missing records may still arrive, now that this worker has entered everything it runs.

        Workers that are not known by name, but may run as much, are expected to take `unnamed_need_s`.
        """
        self._unnamed_until_s = now_s + unnamed_need_s
        return max(unnamed_need_s, self.left_s(now_s))

    def look(self, roll: Roll, now_s: float) -> float | None:
        """Return for how long missing records may still arrive: 0 or less if that is over, None if nothing changed."""
        self._strike_off(roll, now_s)
        if self._awaited:
            return self.left_s(now_s)
        if not self._waits_for_unnamed:
            return None
        self._waits_for_unnamed = False
        return self._unnamed_until_s - now_s

    def _strike_off(self, roll: Roll, now_s: float) -> None:
        """Stop waiting for those that have answered or are gone; `roll.gone` has those whose message nobody got."""
        if self._owner not in roll.answered:
            # The server has lost its data again, or is another one: what it reports of others does not count.
            return
        self._awaited -= roll.answered | roll.gone
        if self.left_s(now_s) == 0.0:
            self._awaited = frozenset()
            self._peers = roll.answered - {self._owner}

    def is_there(self, owner: str) -> None:
        """Note that `owner` has answered the server, for the first time or again."""
        if owner != self._owner:
            self._peers |= {owner}

    def is_gone(self, owner: str) -> None:
        """Note that `owner` runs nothing any more."""
        self._peers -= {owner}
        self._awaited -= {owner}

    def left_s(self, now_s: float) -> float:
        """Return how much longer to wait for the awaited owners; 0 if there are none."""
        return max(self._until_s - now_s, 0.0) if self._awaited else 0.0
