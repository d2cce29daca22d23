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
from typing import TYPE_CHECKING, Final

from shared.loop.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Record


# Behind the deadline of a poll; the SDK is patient for 45 s, and the longest timeout is 30 s.
_LATE_AT_MOST_S: Final = 0.05


class Wake(Enum):
    LOOK = "look"  # something may have settled: read the store
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"  # the client has gone away
    DRAIN = "drain"  # this worker stops: send the client elsewhere


class Waiter:
    """One sleeping poll. Wakes at most once; `rearm` makes it sleep again with the same deadline."""

    __slots__ = ("_future", "_latched", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[Wake | Record] = loop.create_future()
        # Timeout, loss and drain are final: they must not be forgotten by a rearm.
        self._latched: Wake | None = None

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

    def timed_out(self) -> None:
        self.end(Wake.TIMEOUT)

    def client_gone(self) -> None:
        self.end(Wake.CLIENT_GONE)

    def wait(self) -> asyncio.Future[Wake | Record]:
        """To be awaited: what it is woken with."""
        return self._future

    def rearm(self) -> None:
        """Sleep again, before looking: a wake-up that comes during the look is kept."""
        self._future = self._loop.create_future()
        if self._latched is not None:
            self._future.set_result(self._latched)

    @property
    def ended(self) -> Wake | None:
        return self._latched


class _Patience:
    """Polls that all sleep for the same time at most: their deadlines are in the order in which they came, and one
    timer, for the first of them, does for all. A timer for each costs more than all else that it takes to sleep.
    """

    __slots__ = ("_loop", "_timeout_s", "_timer", "deadlines_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        # In the loop's time. Who has timed out is here until it is forgotten, like everybody else.
        self.deadlines_s: dict[Waiter, float] = {}

    def add(self, waiter: Waiter) -> None:
        self.deadlines_s[waiter] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        overdue: list[Waiter] = []
        for waiter, deadline_s in self.deadlines_s.items():
            if deadline_s > now_s:
                self._timer = self._loop.call_at(max(deadline_s, now_s + _LATE_AT_MOST_S), self._look)
                break
            overdue.append(waiter)
        in_slices(Waiter.timed_out, overdue)


class Waiters:
    """All sleeping polls of one worker."""

    def __init__(self) -> None:
        # Kept: asking for it is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._samples: dict[tuple[str, int], list[Waiter]] = {}
        # By their timeout, which is the operator's: another one since a reload is another entry.
        self._patience: dict[float, _Patience] = {}
        # Each with a timer of its own: the client says how long, and there is one for each sampling session.
        self._logs: defaultdict[str, dict[Waiter, asyncio.TimerHandle]] = defaultdict(dict)
        self._draining = False

    def __len__(self) -> int:
        return sum(map(len, self._groups()))

    def sample_waiter(self, key: SampleKey, timeout_s: float) -> Waiter:
        waiter = self._new()
        patience = self._patience.get(timeout_s)
        if patience is None:
            patience = self._patience[timeout_s] = _Patience(self._loop, timeout_s)
        patience.add(waiter)
        waiting = self._samples.get(key)
        if waiting is None:
            self._samples[key] = [waiter]
        else:
            waiting.append(waiter)
        return waiter

    def log_waiter(self, session_key: str, timeout_s: float) -> Waiter:
        waiter = self._new()
        self._logs[session_key][waiter] = self._loop.call_later(timeout_s, waiter.timed_out)
        return waiter

    def forget_sample(self, key: SampleKey, waiter: Waiter) -> None:
        for patience in self._patience.values():
            patience.deadlines_s.pop(waiter, None)
        waiting = self._samples.get(key)
        if waiting is None:
            return
        waiting.remove(waiter)
        if not waiting:
            del self._samples[key]

    def forget_log(self, session_key: str, waiter: Waiter) -> None:
        waiting = self._logs.get(session_key, {})
        timer = waiting.pop(waiter, None)
        if timer is not None:
            timer.cancel()
        if not waiting:
            self._logs.pop(session_key, None)

    def settled(self, key: SampleKey, record: Record | None) -> bool:
        """A sample settled in this worker; `record` spares the polls that wait here a read. Whether any did."""
        what = Wake.LOOK if record is None else record
        waiting = self._samples.get(key, ())
        for waiter in waiting:
            waiter.wake(what)
        self._wake_log(key.session_key)
        return bool(waiting)

    def announced(self, session_key: str, seq_ids: Sequence[int]) -> None:
        """Another worker says that these settled."""
        for seq_id in seq_ids:
            for waiter in self._samples.get((session_key, seq_id), ()):
                waiter.wake(Wake.LOOK)
        self._wake_log(session_key)

    def look_again(self) -> None:
        """Announcements may have been lost: everybody reads the store."""
        in_slices(lambda waiter: waiter.wake(Wake.LOOK), self._all())

    def send_back(self) -> None:
        """Answer every sleeping poll "try again"; those that come later sleep as ever."""
        in_slices(lambda waiter: waiter.end(Wake.DRAIN), self._all())

    def drain(self) -> None:
        """Send every sleeping poll, and every one that comes from now on, to another worker at once."""
        self._draining = True
        self.send_back()

    def _new(self) -> Waiter:
        waiter = Waiter(self._loop)
        if self._draining:
            waiter.end(Wake.DRAIN)
        return waiter

    def _groups(self) -> Iterable[Collection[Waiter]]:
        yield from (patience.deadlines_s for patience in self._patience.values())
        yield from self._logs.values()

    def _all(self) -> list[Waiter]:
        return [waiter for group in self._groups() for waiter in group]

    def _wake_log(self, session_key: str) -> None:
        for waiter in self._logs.get(session_key, ()):
            waiter.wake(Wake.LOOK)
