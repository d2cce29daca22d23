"""Limit how much of one kind of work is done in one turn of the event loop, and take API keys in turn.

Thousands of generations that end at once are thousands of tasks that become ready in the same turn. Each takes a
fraction of a millisecond; run one after the other they keep the loop from everything else for seconds: health,
heartbeats, and the worker's own reports, without which the supervisor kills it. Here only so many run in a turn, and
the rest wait for the next ones, between which the loop looks at its sockets and timers.

What waits is in a `FairQueue`. A key with a thousand items in it makes another key wait for one of them, not for all.
Within a key it is first come, first served; with one key it is a plain queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


T = TypeVar("T")
R = TypeVar("R")


class FairQueue(Generic[T]):
    """A queue in which keys take turns. A key is the `Caller.digest` of whose work it is.

    Items are hashable, and each is queued at most once. All steps take the same time however long the queue is: a plain
    dict would search for its first item among those that were there before.
    """

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # In the order of their next turns; a key without items is not here.
        self._lines: OrderedDict[bytes, OrderedDict[T, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key_digest: bytes, item: T) -> None:
        """Queue `item` behind the others of its key. A key that had none comes after the next turn of all others."""
        line = self._lines.get(key_digest)
        if line is None:
            line = self._lines[key_digest] = OrderedDict()
        self._count += item not in line
        line[item] = None

    def take(self) -> T:
        """Remove the next item and return it. Raises `IndexError` when there is none."""
        if not self._count:
            raise IndexError("the queue is empty")
        key_digest, line = next(iter(self._lines.items()))
        item, _ = line.popitem(last=False)
        self._count -= 1
        if line:
            self._lines.move_to_end(key_digest)
        else:
            del self._lines[key_digest]
        return item

    def discard(self, key_digest: bytes, item: T) -> None:
        """Remove `item`, which costs its key no turn. Do nothing when `item` is not queued."""
        line = self._lines.get(key_digest)
        if line is None or item not in line:
            return
        del line[item]
        self._count -= 1
        if not line:
            del self._lines[key_digest]


class TurnLimit:
    """A limit on the running event loop: `per_turn` may run between two looks at the sockets. It may be changed."""

    def __init__(self, per_turn: int) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self.per_turn = per_turn
        self._left = per_turn
        self._renewing = False
        self._waiting: FairQueue[Callable[[], bool]] = FairQueue()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def enter(self, key_digest: bytes, start: Callable[[], bool]) -> None:
        """Call `start`: at once while this turn has room, else in a later turn.

        `start` must not raise, and returns whether there was still something to start: what is over takes no room.
        """
        if self.try_take():
            start()
        else:
            self._waiting.add(key_digest, start)

    def try_take(self) -> bool:
        """Take room in this turn if it has any, and return whether it had. Nothing waits while it has."""
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._renew)
        if self._left:
            self._left -= 1
            return True
        return False

    async def wait(self, key_digest: bytes = b"") -> None:
        """Return at once while this turn has room, else in a later turn.

        Where every sample passes, call `try_take` first: a coroutine that waits for nothing costs five times that.
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

    async def run(self, steps: Generator[None, None, R], key_digest: bytes) -> R:
        """Run `steps` to the end and return its result. Each step after the first waits for its turn.

        Made for long work: however many bodies are long, only a few of their steps are run in a turn of the loop.
        """
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result: R = done.value
                return result
            await self.wait(key_digest)

    def _renew(self) -> None:
        """Begin a new turn, and let in as many of the waiting as it has room for."""
        self._left = self.per_turn
        try:
            while self._waiting and self._left:
                # What starts may enter again, and waits for the next turn if this one is full by then.
                self._left -= 1
                if not self._waiting.take()():
                    self._left += 1
        finally:
            # Whatever breaks, the others have their turns: without them a worker answers nothing more.
            self._renewing = self._left < self.per_turn
            if self._renewing:
                self._loop.call_soon(self._renew)


def _wake(waiter: asyncio.Future[None]) -> bool:
    if waiter.done():
        return False
    waiter.set_result(None)
    return True
