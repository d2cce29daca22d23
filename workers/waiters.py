"""Who waits for which sample, and who waits for anything new in a sampling session.

A long poll is one `Waiter`: a future that the first of four parties resolves - the sample settling here, an
announcement from another worker, the poll's deadline, or the client going away. No task is made per poll.

The rule that loses nothing: register the waiter, make sure that announcements arrive (`Store.watch`), and only then
look. Whatever settles after the look wakes the waiter; whatever settled before is seen by it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING

from workers.slicing import in_slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Record


class Wake(Enum):
    LOOK = "look"  # something may have settled: read the store
    TIMEOUT = "timeout"
    LOST = "lost"  # the client has gone away
    DRAIN = "drain"  # this worker stops: send the client elsewhere


class Waiter:
    """One sleeping poll. Wakes at most once; `rearm` makes it sleep again with the same deadline."""

    __slots__ = ("_future", "_latched", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._future: asyncio.Future[Wake | Record] = loop.create_future()
        # Timeout, loss and drain are final: they must not be forgotten by a rearm.
        self._latched: Wake | None = None
        self._timer = loop.call_later(timeout_s, self.end, Wake.TIMEOUT)

    def wake(self, what: Wake | Record) -> None:
        if not self._future.done():
            self._future.set_result(what)

    def end(self, why: Wake) -> None:
        """Wake for good; the first final reason stays."""
        if self._latched is None:
            self._latched = why
        self.wake(why)

    def wake_in(self, delay_s: float) -> None:
        """Look again after a while: the store did not answer, and the client must not be told so."""
        self._loop.call_later(delay_s, self.wake, Wake.LOOK)

    def client_lost(self) -> None:
        self.end(Wake.LOST)

    async def wait(self) -> Wake | Record:
        return await self._future

    def rearm(self) -> None:
        """Sleep again, before looking: a wake-up that comes during the look is kept."""
        self._future = self._loop.create_future()
        if self._latched is not None:
            self._future.set_result(self._latched)

    @property
    def ended(self) -> Wake | None:
        return self._latched

    def close(self) -> None:
        self._timer.cancel()


class Waiters:
    """All sleeping polls of one worker."""

    def __init__(self) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._samples: defaultdict[str, dict[int, list[Waiter]]] = defaultdict(dict)
        self._logs: defaultdict[str, set[Waiter]] = defaultdict(set)
        self._all: set[Waiter] = set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._all)

    def sample_waiter(self, key: SampleKey, timeout_s: float) -> Waiter:
        waiter = self._new(timeout_s)
        self._samples[key.session_key].setdefault(key.seq_id, []).append(waiter)
        return waiter

    def log_waiter(self, session_key: str, timeout_s: float) -> Waiter:
        waiter = self._new(timeout_s)
        self._logs[session_key].add(waiter)
        return waiter

    def forget_sample(self, key: SampleKey, waiter: Waiter) -> None:
        waiter.close()
        self._all.discard(waiter)
        by_seq = self._samples.get(key.session_key)
        waiting = by_seq.get(key.seq_id) if by_seq is not None else None
        if by_seq is None or waiting is None:
            return
        waiting.remove(waiter)
        if not waiting:
            del by_seq[key.seq_id]
        if not by_seq:
            del self._samples[key.session_key]

    def forget_log(self, session_key: str, waiter: Waiter) -> None:
        waiter.close()
        self._all.discard(waiter)
        waiting = self._logs.get(session_key)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._logs[session_key]

    def settled(self, key: SampleKey, record: Record | None) -> None:
        """A sample settled in this worker; `record` spares the polls that wait here a read."""
        what = Wake.LOOK if record is None else record
        for waiter in self._waiting_for(key.session_key, (key.seq_id,)):
            waiter.wake(what)
        self._wake_log(key.session_key)

    def announced(self, session_key: str, seq_ids: Sequence[int]) -> None:
        """Another worker says that these settled."""
        for waiter in self._waiting_for(session_key, seq_ids):
            waiter.wake(Wake.LOOK)
        self._wake_log(session_key)

    def look_again(self) -> None:
        """Announcements may have been lost: everybody reads the store."""
        in_slices(lambda waiter: waiter.wake(Wake.LOOK), list(self._all))

    def send_back(self) -> None:
        """Answer every sleeping poll "try again"; those that come later sleep as ever."""
        in_slices(lambda waiter: waiter.end(Wake.DRAIN), list(self._all))

    def drain(self) -> None:
        """Send every sleeping poll, and every one that comes from now on, to another worker at once."""
        self._draining = True
        self.send_back()

    def _new(self, timeout_s: float) -> Waiter:
        waiter = Waiter(self._loop, timeout_s)
        self._all.add(waiter)
        if self._draining:
            waiter.end(Wake.DRAIN)
        return waiter

    def _waiting_for(self, session_key: str, seq_ids: Iterable[int]) -> Iterable[Waiter]:
        by_seq = self._samples.get(session_key)
        if by_seq is None:
            return
        for seq_id in seq_ids:
            yield from by_seq.get(seq_id, ())

    def _wake_log(self, session_key: str) -> None:
        for waiter in self._logs.get(session_key, ()):
            waiter.wake(Wake.LOOK)
