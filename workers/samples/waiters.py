"""Polls that wait: for one sample, or for anything new in a sampling session; and results that just missed their poll.

A long poll is one `Waiter`: a future that the first of four events resolves. These are the sample that settles here,
an announcement from another worker, the poll's deadline, and a client that goes away. No task is made per poll.

The rule that loses nothing: register the waiter, make sure that announcements arrive (`Store.watch`), and only then
look. Whatever settles after the look wakes the waiter; the look sees whatever settled before.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from shared.core.lifecycle import State
from shared.loop.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Record


# Behind the deadline of a poll. The SDK waits for 45 s, and the longest timeout is 30 s.
_LATE_AT_MOST_S: Final = 0.05


class Wake(Enum):
    LOOK = "look"  # something may have settled: read the store
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"
    DRAIN = "drain"  # this worker stops: send the client elsewhere
    REVOKED = "revoked"  # the key of this poll is not accepted any more


class Waiter:
    """A sleeping poll. Await `woken` for what it is woken with; `rearm` makes it sleep again until its deadline.

    `digest` is its caller's (`Caller.digest`).
    """

    __slots__ = ("_loop", "digest", "ended", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop, digest: bytes = b"") -> None:
        self._loop = loop
        self.digest = digest
        self.woken: asyncio.Future[Wake | Record] = loop.create_future()
        # All but "look" is final: `rearm` must not forget it.
        self.ended: Wake | None = None

    def wake(self, what: Wake | Record) -> None:
        if not self.woken.done():
            self.woken.set_result(what)

    def end(self, why: Wake) -> None:
        """Wake for good; the first final reason stays."""
        if self.ended is None:
            self.ended = why
        self.wake(why)

    def client_gone(self) -> None:
        self.end(Wake.CLIENT_GONE)

    def wake_in(self, delay_s: float) -> None:
        """Look again after a while: the store did not answer, and the client must not see that."""
        self._loop.call_later(delay_s, self.wake, Wake.LOOK)

    def rearm(self) -> None:
        """Sleep again. Call this before looking, so that a wake-up during the look is kept."""
        self.woken = self._loop.create_future()
        if self.ended is not None:
            self.woken.set_result(self.ended)


class _Deadlines:
    """The deadlines of polls with the same timeout.

    They are in the order of arrival, so one timer, for the first of them, serves all. A timer for each would cost more
    than everything else that a sleeping poll needs.
    """

    __slots__ = ("_loop", "_timeout_s", "_timer", "by_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        # In the loop's time. A poll that has timed out stays here until it is forgotten, like all others.
        self.by_waiter: dict[Waiter, float] = {}

    def add(self, waiter: Waiter) -> None:
        self.by_waiter[waiter] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        overdue: list[Waiter] = []
        for waiter, deadline_s in self.by_waiter.items():
            if deadline_s > now_s:
                self._timer = self._loop.call_at(max(deadline_s, now_s + _LATE_AT_MOST_S), self._look)
                break
            overdue.append(waiter)
        in_slices(partial(Waiter.end, why=Wake.TIMEOUT), overdue)


def _everybody(_: bytes) -> bool:
    return True


class Waiters:
    """The sleeping polls of one worker. `just_settled` holds results that settled a moment before their poll."""

    def __init__(self, undelivered_ttl_s: float) -> None:
        # Kept, because asking for the running loop is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self.just_settled = JustSettled(undelivered_ttl_s)
        self._samples: dict[tuple[str, int], list[Waiter]] = {}
        # By timeout, which is the operator's: another one since a reload is another entry.
        self._deadlines: dict[float, _Deadlines] = {}
        # Each with a timer of its own: the client says how long, and there is one for each sampling session.
        self._logs: defaultdict[str, dict[Waiter, asyncio.TimerHandle]] = defaultdict(dict)
        self._draining = False
        self._knows: Callable[[bytes], bool] = _everybody

    def __len__(self) -> int:
        return sum(map(len, self._groups()))

    def sample_waiter(self, key: SampleKey, timeout_s: float, digest: bytes = b"") -> Waiter:
        waiter = self._new(digest)
        deadlines = self._deadlines.get(timeout_s)
        if deadlines is None:
            deadlines = self._deadlines[timeout_s] = _Deadlines(self._loop, timeout_s)
        deadlines.add(waiter)
        waiting = self._samples.get(key)
        if waiting is None:
            self._samples[key] = [waiter]
        else:
            waiting.append(waiter)
        return waiter

    def log_waiter(self, session_key: str, timeout_s: float, digest: bytes = b"") -> Waiter:
        waiter = self._new(digest)
        self._logs[session_key][waiter] = self._loop.call_later(timeout_s, waiter.end, Wake.TIMEOUT)
        return waiter

    def forget_sample(self, key: SampleKey, waiter: Waiter) -> None:
        for deadlines in self._deadlines.values():
            deadlines.by_waiter.pop(waiter, None)
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
        """Wake the polls for a sample that settled in this worker, and return whether there were any.

        `record` spares them a read of the store.
        """
        what = Wake.LOOK if record is None else record
        waiting = self._samples.get(key, ())
        for waiter in waiting:
            waiter.wake(what)
        for waiter in self._logs.get(key.session_key, ()):
            waiter.wake(Wake.LOOK)
        return bool(waiting)

    def announced(self, session_key: str, seq_ids: Sequence[int]) -> None:
        """Wake the polls for samples that settled in another worker."""
        for seq_id in seq_ids:
            for waiter in self._samples.get((session_key, seq_id), ()):
                waiter.wake(Wake.LOOK)
        for waiter in self._logs.get(session_key, ()):
            waiter.wake(Wake.LOOK)

    def look_again(self) -> None:
        """Make every poll read the store: announcements may have been lost."""
        in_slices(partial(Waiter.wake, what=Wake.LOOK), self._all())

    def send_back(self) -> None:
        """Answer every sleeping poll "try again"; polls that come later sleep as before."""
        in_slices(partial(Waiter.end, why=Wake.DRAIN), self._all())

    def drain(self) -> None:
        """Send every sleeping poll, and every poll from now on, to another worker at once."""
        self._draining = True
        self.send_back()

    def end_revoked(self, knows: Callable[[bytes], bool]) -> None:
        """End the polls of callers that `knows` does not accept, those that come later included."""
        self._knows = knows
        revoked = [waiter for waiter in self._all() if not knows(waiter.digest)]
        in_slices(partial(Waiter.end, why=Wake.REVOKED), revoked)

    def _new(self, digest: bytes) -> Waiter:
        waiter = Waiter(self._loop, digest)
        if not self._knows(digest):
            # Its head came before the reload that revoked the key, and its body after that.
            waiter.end(Wake.REVOKED)
        if self._draining:
            waiter.end(Wake.DRAIN)
        return waiter

    def _groups(self) -> Iterable[Collection[Waiter]]:
        yield from (deadlines.by_waiter for deadlines in self._deadlines.values())
        yield from self._logs.values()

    def _all(self) -> list[Waiter]:
        return [waiter for group in self._groups() for waiter in group]


# Two seconds of what a worker settles at its fastest.
_MOST: Final = 2_048
_LARGEST_BYTES: Final = 4 * 1024
# A poll follows its promise at once, or was delayed so long that a look into the store does not matter.
_KEPT_S: Final = 5.0
_READY: Final = State.READY


class JustSettled:
    """Results that settled here a moment ago, for polls that come just behind them, in the order of settling.

    A sample that takes a few milliseconds has settled before its poll arrives, which would then watch its session and
    read from the store what this worker still has in hand. Only results are kept: what asks the client to submit again
    must not outlive that submission. The store stays the truth. Here are no more than a few seconds' and a few
    megabytes' worth, and each is handed out once. Times are monotonic seconds.
    """

    def __init__(self, ttl_s: float, most: int = _MOST) -> None:
        """Keep at most `most` results, and none for longer than `ttl_s`, which is how long the store keeps them."""
        self._kept_s = min(ttl_s, _KEPT_S)
        self._most = most
        self._results: dict[SampleKey, tuple[float, Record]] = {}

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: SampleKey, record: Record, now_s: float) -> None:
        """Keep a result that nobody waits for, if it is small."""
        if record.header.state is not _READY or len(record.payload) > _LARGEST_BYTES:
            return
        self._results[key] = (now_s, record)
        if len(self._results) > self._most:
            del self._results[next(iter(self._results))]

    def take(self, key: SampleKey, now_s: float) -> Record | None:
        """Remove the result and return it; a second poll reads the store."""
        kept = self._results.pop(key, None)
        return kept[1] if kept is not None and now_s - kept[0] < self._kept_s else None

    def drop_stale(self, now_s: float) -> None:
        """Remove what is too old to be handed out."""
        while self._results:
            key, (settled_s, _) = next(iter(self._results.items()))
            if now_s - settled_s < self._kept_s:
                return
            del self._results[key]
