"""Sampling sessions as this worker knows them: rebuilt from their ids, kept alive by what their clients do.

Nothing here is the truth. A sampling session is what its id says (`shared/core/ids.py`). Whether its client session is
alive is recorded in the store, and cached here between two turns of the housekeeping (`workers/duties/duties.py`),
which writes the signs of life that were noted in between.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.admission import refuse_session
from shared.core.errors import NotFound, Overloaded, SessionFinished, StoreFull
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
_FINISHED: Final = "this session was finished"


@dataclass(slots=True)
class _Known:
    used_s: float
    admitted_until_s: float = 0.0
    finished: bool = False


class Sessions:
    """The sampling sessions and client sessions that this worker has seen."""

    def __init__(self, store: Store, clock: Clock, timeout_s: float, parsed_max: int = _PARSED_MAX) -> None:
        self._store = store
        self._parsed_max = parsed_max
        self._clock = clock
        self._timeout_s = timeout_s
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

    def is_admitted(self, session_id: str) -> bool:
        """Return whether the session may be used here without counting it again."""
        known = self._known.get(session_id)
        return known is not None and self._clock.monotonic_s() < known.admitted_until_s

    async def is_recorded(self, session_id: str) -> bool:
        """Return whether any worker has admitted the session. Raise `StoreError`."""
        return (await self._store.session_infos([session_id]))[0].state is not SessionState.UNKNOWN

    async def admit(self, session_id: str, caller: Caller) -> None:
        """Count a session against its key's `max-sessions`, over all hosts, and record it.

        Sessions that were finished, or gave no sign of life for the session timeout, do not count. What is refused
        leaves no record. Raise `Overloaded`, `SessionFinished` and `StoreError`; a full store raises `StoreFull` unless
        the session is known there.
        """
        limit, tag = caller.limits.max_sessions, ids.owner_tag(caller.secret)
        is_counted = limit is None or session_id in await self._store.sessions_of(tag)
        if not is_counted:
            [info] = await self._store.session_infos([session_id])
            if info.state is SessionState.FINISHED:
                self.mark_finished(session_id)
                raise SessionFinished(_FINISHED)
            await self._require_quota(tag, session_id, limit)
        await self._record(session_id)
        if limit is not None:
            await self._store.enter_session(tag, session_id)
        if not is_counted:
            # Entered before it is counted again, so that two that race for the last place see each other.
            try:
                await self._require_quota(tag, session_id, limit)
            except Overloaded:
                await self._store.drop_sessions(tag, [session_id])
                raise
        # A limited one is counted again after a while, since it may have been dropped meanwhile, or lost by the store.
        for_s = self._timeout_s if limit is not None else math.inf
        self._of(session_id).admitted_until_s = self._clock.monotonic_s() + for_s

    async def _record(self, session_id: str) -> None:
        try:
            await self.touch(session_id, needs_room=True)
        except StoreFull:
            if not await self.is_recorded(session_id):
                raise
            await self.touch(session_id)

    async def require_quota(self, caller: Caller) -> None:
        """Check that the caller may open a session that another server is about to make. Raise as `admit` does.

        If several race for the last place, all get in: what that server has made cannot be taken back.
        """
        await self._require_quota(ids.owner_tag(caller.secret), "", caller.limits.max_sessions)

    async def _require_quota(self, tag: str, session_id: str, limit: int | None) -> None:
        if limit is not None and (rejection := refuse_session(await self._living_others(tag, session_id), limit)):
            raise Overloaded(rejection.reason, rejection.message)

    async def _living_others(self, tag: str, session_id: str) -> int:
        names = [name for name in await self._store.sessions_of(tag) if name != session_id]
        infos = await self._store.session_infos(names)
        since_ms = self._clock.wall_ms() - self._timeout_s * 1000
        over = [
            name
            for name, info in zip(names, infos, strict=True)
            if info.state is not SessionState.ALIVE or info.seen_ms < since_ms
        ]
        await self._store.drop_sessions(tag, over)
        return len(names) - len(over)

    async def require_alive(self, session_id: str, caller: Caller) -> None:
        """Note a sign of life of a session that is about to submit, and admit it if it is new here.

        Raise `SessionFinished`; raise as `admit` if this worker sees the session for the first time, or again after a
        while.
        """
        if not self.is_admitted(session_id):
            await self.admit(session_id, caller)
        if self.note(session_id).finished:
            raise SessionFinished(_FINISHED)

    async def require_room(self, session_id: str, caller: Caller) -> None:
        """Do as `require_alive` for a session that is about to have something new. A full store raises `StoreFull`."""
        await self.require_alive(session_id, caller)
        if not await self.touch(session_id, needs_room=True):
            raise SessionFinished(_FINISHED)

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
