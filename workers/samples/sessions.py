"""Sampling sessions as this worker knows them: rebuilt from their ids, kept alive by what their clients do.

Nothing here is the truth. A sampling session is what its id says (`shared/core/ids.py`). Whether its client session is
alive is recorded in the store, and cached here between two turns of the housekeeping (`workers/duties/duties.py`),
which writes the signs of life that were noted in between.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.admission import refuse_session
from shared.core.errors import NotFound, Overloaded, SessionFinished
from shared.store.contract import SessionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.core.callers import Caller
    from shared.core.model import SamplingSession
    from shared.store.contract import SessionInfo, Store

# Parsing costs 10 us; the cache holds more sampling sessions than a worker sees in an hour, at 1 KB each.
_PARSED_MAX: Final = 20_000
# A session that nobody has used for this long is looked up again, which bounds the cache.
_FORGET_AFTER_S: Final = 600.0


@dataclass(slots=True)
class _Known:
    used_s: float
    looked_up: bool = False
    finished: bool = False


class Sessions:
    """The sampling sessions and client sessions that this worker has seen."""

    def __init__(self, store: Store, clock: Clock, parsed_max: int = _PARSED_MAX) -> None:
        self._store = store
        self._parsed_max = parsed_max
        self._clock = clock
        self._parsed: OrderedDict[tuple[str, bytes], SamplingSession] = OrderedDict()
        # Those unused for longest come first, so that forgetting looks at no others.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._noted: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, sampling_session_id: str, caller: Caller) -> SamplingSession | None:
        """Return the sampling session that the id describes, or None if it is not the caller's."""
        cache_key = (sampling_session_id, caller.secret)
        session = self._parsed.get(cache_key)
        if session is not None:
            return session
        session = ids.parse_sampling_session(sampling_session_id, caller.secret)
        if session is not None:
            self._parsed[cache_key] = session
            if len(self._parsed) > self._parsed_max:
                self._parsed.popitem(last=False)
        return session

    def get(self, sampling_session_id: str, caller: Caller) -> SamplingSession:
        """Return the sampling session of that id. Raise `NotFound` if it is not the caller's."""
        session = self.find(sampling_session_id, caller)
        if session is None:
            raise NotFound("there is no such sampling session")
        return session

    async def open(self, session_id: str, caller: Caller, timeout_s: float) -> None:
        """Begin a session of the caller, if its key may have one more at a time, counted over all hosts.

        Sessions that were finished, or gave no sign of life for `timeout_s`, do not count. Raise `Overloaded`,
        `StoreError`; a full store raises `StoreFull`.
        """
        await self.require_room(session_id)
        if caller.limits.max_sessions is None:
            return
        # Entered before it is counted, so that two that race for the last place see each other.
        tag = ids.owner_tag(caller.secret)
        await self._store.enter_session(tag, session_id)
        others = await self._living_others(tag, session_id, timeout_s)
        if rejection := refuse_session(others, caller.limits.max_sessions):
            await self._store.drop_sessions(tag, [session_id])
            raise Overloaded(rejection.reason, rejection.message)

    async def require_quota(self, caller: Caller, timeout_s: float) -> None:
        """Check that the caller may open a session that another server is about to make. Raise as `open` does.

        If several race for the last place, all get in: what that server has made cannot be taken back.
        """
        if caller.limits.max_sessions is not None:
            others = await self._living_others(ids.owner_tag(caller.secret), "", timeout_s)
            if rejection := refuse_session(others, caller.limits.max_sessions):
                raise Overloaded(rejection.reason, rejection.message)

    async def enter(self, session_id: str, caller: Caller) -> None:
        """Begin a session that another server has made. Raise `StoreError` if it could not be recorded."""
        await self.touch(session_id, needs_room=True)
        self.note(session_id)
        if caller.limits.max_sessions is not None:
            await self._store.enter_session(ids.owner_tag(caller.secret), session_id)

    async def _living_others(self, tag: str, session_id: str, timeout_s: float) -> int:
        names = [name for name in await self._store.sessions_of(tag) if name != session_id]
        infos = await self._store.session_infos(names)
        since_ms = self._clock.wall_ms() - timeout_s * 1000
        over = [
            name
            for name, info in zip(names, infos, strict=True)
            if info.state is not SessionState.ALIVE or info.seen_ms < since_ms
        ]
        await self._store.drop_sessions(tag, over)
        return len(names) - len(over)

    async def require_alive(self, session_id: str) -> None:
        """Note a sign of life of a session that is about to submit.

        Raise `SessionFinished`; raise `StoreError` if this worker sees the session for the first time and the store
        does not answer.
        """
        known = self.note(session_id)
        if not known.looked_up:
            await self.touch(session_id)
        if known.finished:
            raise SessionFinished("this session was finished")

    async def require_room(self, session_id: str) -> None:
        """Note a sign of life of a session that is new, or is about to have something new. Raise as `require_alive`.

        A full store raises `StoreFull`.
        """
        await self.touch(session_id, needs_room=True)
        if self.note(session_id).finished:
            raise SessionFinished("this session was finished")

    def note(self, session_id: str) -> _Known:
        """Note a sign of life that needs no answer, such as a poll."""
        known = self._known.get(session_id) or self._of(session_id)
        known.used_s = self._clock.monotonic_s()
        self._known.move_to_end(session_id)
        self._noted[session_id] = None
        return known

    async def touch(self, session_id: str, *, needs_room: bool = False) -> bool:
        """Write a sign of life to the store now; return whether the session is unfinished.

        Raise `StoreError`; with `needs_room` a full store raises `StoreFull`.
        """
        found = await self._store.touch_session(session_id, self._clock.wall_ms(), needs_room=needs_room)
        self.learn(session_id, found)
        return not self._of(session_id).finished

    def learn(self, session_id: str, info: SessionInfo) -> None:
        """Record what the store says about a session. Finished is final."""
        known = self._of(session_id)
        known.looked_up = True
        known.finished = known.finished or info.state is SessionState.FINISHED

    def mark_finished(self, session_id: str) -> None:
        self._of(session_id).finished = True

    def take_noted(self) -> list[str]:
        """Return the sessions with a sign of life since the last call, and forget those long unused."""
        noted, self._noted = list(self._noted), {}
        unused_since_s = self._clock.monotonic_s() - _FORGET_AFTER_S
        while self._known and next(iter(self._known.values())).used_s < unused_since_s:
            self._known.popitem(last=False)
        return noted

    def return_noted(self, session_ids: Sequence[str]) -> None:
        """Keep signs of life that could not be written for the next time."""
        for session_id in session_ids:
            self.note(session_id)

    def _of(self, session_id: str) -> _Known:
        known = self._known.get(session_id)
        if known is None:
            known = self._known[session_id] = _Known(self._clock.monotonic_s())
        return known
