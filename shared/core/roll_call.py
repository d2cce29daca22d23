"""Who must have told a store that lost data what it runs, before anybody believes that what is missing is gone.

A submission that is sent again to a store that was emptied may be running on a worker that has not entered it again.
How long that worker takes is its own affair: its loop may be busy for seconds. So it is waited for by name. Every
worker answers the roll of each server it finds (`Store.answer_roll`) once all it runs is entered there; those who had
answered the server before are waited for, until they answer this one, are known to be gone, or a lease is over: who
has not come back by then is reaped.

A worker does not know all others by name: those that began after its last look are given as long as it took itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# What is broadcast to the workers, before the owner's name.
THERE: Final = b"there "
GONE: Final = b"gone "


def there_message(owner: str) -> bytes:
    """`owner` has answered the roll."""
    return THERE + owner.encode()


def gone_message(owner: str) -> bytes:
    """`owner` runs nothing any more."""
    return GONE + owner.encode()


class Roll(NamedTuple):
    """What the server that is there now knows: who has answered it, and who is gone since it is there."""

    answered: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()


class RollCall:
    """One worker's view of the others. Times are monotonic seconds."""

    def __init__(self, owner: str, lease_s: float) -> None:
        self._owner = owner
        self._lease_s = lease_s
        self._peers: frozenset[str] = frozenset()
        self._awaited: frozenset[str] = frozenset()
        self._until_s = float("-inf")
        # Whether what `look` returns once nobody is awaited is still to be told.
        self._waits_for_unnamed = False
        self._unnamed_until_s = float("-inf")

    @property
    def awaited(self) -> frozenset[str]:
        return self._awaited

    def begin(self, now_s: float) -> None:
        """The store has lost data."""
        self._awaited |= self._peers
        self._until_s = now_s + self._lease_s
        self._waits_for_unnamed = True

    def has_told(self, now_s: float, unnamed_need_s: float) -> float:
        """All that this worker runs is entered: for how long what is missing may still be on its way.

        `unnamed_need_s`: how long others take that are not known by name, but may have as much to tell.
        """
        self._unnamed_until_s = now_s + unnamed_need_s
        return max(unnamed_need_s, self.left_s(now_s))

    def look(self, roll: Roll, now_s: float) -> float | None:
        """For how long what is missing may still be on its way, not above 0 when that is over; None: as told before."""
        self._strike_off(roll, now_s)
        if self._awaited:
            return self.left_s(now_s)
        if not self._waits_for_unnamed:
            return None
        self._waits_for_unnamed = False
        return self._unnamed_until_s - now_s

    def _strike_off(self, roll: Roll, now_s: float) -> None:
        """Whoever died while nobody could be told of it is known by `roll.gone`."""
        if self._owner not in roll.answered:
            # It has lost its data once more, or is another one: nothing that it says of others counts.
            return
        self._awaited -= roll.answered | roll.gone
        if self.left_s(now_s) == 0.0:
            self._awaited = frozenset()
            self._peers = roll.answered - {self._owner}

    def is_there(self, owner: str) -> None:
        """It has answered the server, for the first time or again."""
        if owner != self._owner:
            self._peers |= {owner}

    def is_gone(self, owner: str) -> None:
        """It runs nothing any more."""
        self._peers -= {owner}
        self._awaited -= {owner}

    def left_s(self, now_s: float) -> float:
        """How much longer the awaited may be waited for; 0 when there are none."""
        return max(self._until_s - now_s, 0.0) if self._awaited else 0.0
