"""A line in which parties take turns: whoever has a thousand in it makes another wait for one of them, not for all.

Within a key_digest it is first come, first served. With one key_digest it is a plain queue.

A bound on how much of one kind of work is done in one turn of the event loop.

Thousands of generations that end at once are thousands of tasks that become ready in the same turn. Each takes a
fraction of a millisecond; run one after the other they keep the loop from everything else for seconds: health,
heartbeats, the worker's own reports, for whose absence it is killed. Here only so many go on in a turn, and the rest
wait for the next ones, between which the loop looks at its sockets and timers. Of those who wait, keys go in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Parties are told apart by bytes: the `Caller.digest` of whose work it is.

    Items are hashable, and each is in the line once. All steps take the same time however long the line is: a plain
    dict would look for its first item among those that were there before.
    """

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # In the order of their next turns; a key_digest that has nobody in the line is not here.
        self._lines: OrderedDict[bytes, OrderedDict[T, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key_digest: bytes, item: T) -> None:
        """At the end of its key_digest's line. A key_digest that had nobody comes after all others' next turn, once."""
        line = self._lines.get(key_digest)
        if line is None:
            line = self._lines[key_digest] = OrderedDict()
        line[item] = None
        self._count += 1

    def take(self) -> T:
        """Removes and returns the next. Raises `IndexError` when there is none."""
        if not self._count:
            raise IndexError("the line is empty")
        key_digest, line = next(iter(self._lines.items()))
        item, _ = line.popitem(last=False)
        self._count -= 1
        if line:
            self._lines.move_to_end(key_digest)
        else:
            del self._lines[key_digest]
        return item

    def discard(self, key_digest: bytes, item: T) -> None:
        """Give `item` up, which costs `key_digest` no turn. Do nothing when `item` is not queued."""
        line = self._lines.get(key_digest)
        if line is None or item not in line:
            return
        del line[item]
        self._count -= 1
        if not line:
            del self._lines[key_digest]


class TurnLimit:
    """Of the running event loop. `per_turn`: how many may go on between two looks at the sockets, from the next on."""

    def __init__(self, per_turn: int) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self.per_turn = per_turn
        self._left = per_turn
        self._renewing = False
        self._waiting: FairQueue[Callable[[], bool]] = FairQueue()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, key_digest: bytes, start: Callable[[], bool]) -> None:
        """Calls `start`: at once while this turn has room, else in a later turn.

        `key_digest`: who waits for whom, as of `FairQueue`. `start` must not raise, and tells whether there was still
        something to start: who has gone takes no room.
        """
        if self.try_take():
            start()
        else:
            self._waiting.add(key_digest, start)

    def try_take(self) -> bool:
        """Whether this turn has room, which is then taken. Nobody waits while it has."""
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._renew)
        if self._left:
            self._left -= 1
            return True
        return False

    async def wait(self, key_digest: bytes = b"") -> None:
        """Returns at once while this turn has room; else in a later turn.

        On the way of every sample `try_take` is asked first: a coroutine that waits for nothing costs five times that.
        """
        if self.try_take():
            return
        waiter = self._loop.create_future()
        wake = partial(_wake, waiter)
        self._waiting.add(key_digest, wake)
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.discard(key_digest, wake)
            raise

    def _renew(self) -> None:
        """A new turn, for those who wait."""
        self._left = self.per_turn
        while self._waiting and self._left:
            # What starts may want to enter, and waits for the next turn where this one is full with it.
            self._left -= 1
            if not self._waiting.take()():
                self._left += 1
        self._renewing = self._left < self.per_turn
        if self._renewing:
            self._loop.call_soon(self._renew)


def _wake(waiter: asyncio.Future[None]) -> bool:
    if waiter.done():
        return False
    waiter.set_result(None)
    return True
