"""A line in which parties take turns: whoever has a thousand in it makes another wait for one of them, not for all.

Within a party it is first come, first served. With one party it is a plain queue.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Parties are told apart by bytes: the `Caller.digest` of whose work it is.

    Items are hashable, and each is in the line once. All steps take the same time however long the line is: a plain
    dict would look for its first item among those that were there before.
    """

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # In the order of their next turns; a party that has nobody in the line is not here.
        self._lines: OrderedDict[bytes, OrderedDict[T, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, party: bytes, item: T) -> None:
        """At the end of its party's line. A party that had nobody comes after all others' next turn, once."""
        line = self._lines.get(party)
        if line is None:
            line = self._lines[party] = OrderedDict()
        line[item] = None
        self._count += 1

    def take(self) -> T:
        """Removes and returns the next. Raises `IndexError` when there is none."""
        if not self._count:
            raise IndexError("the line is empty")
        party, line = next(iter(self._lines.items()))
        item, _ = line.popitem(last=False)
        self._count -= 1
        if line:
            self._lines.move_to_end(party)
        else:
            del self._lines[party]
        return item

    def discard(self, party: bytes, item: T) -> None:
        """`party` gives `item` up, which costs it no turn. One that is not in the line (any more) is none's loss."""
        line = self._lines.get(party)
        if line is None or item not in line:
            return
        del line[item]
        self._count -= 1
        if not line:
            del self._lines[party]
