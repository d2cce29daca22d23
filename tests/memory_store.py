"""A store in one process' memory, for tests: the same contract, a clock that the test moves, and no server.

`MemoryServer` holds the data and stands for a Redis; each owner has a `MemoryStore` on it, as each worker has a
connection to Redis. It applies the table of `shared/core/lifecycle.py` literally, and the contract suite compares the
scripts of Redis with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from shared.core.errors import StoreError, StoreFull
from shared.core.lifecycle import SETTLED, SETTLING, TRANSITIONS, Event, State, after, allows
from shared.core.record import Header, Record
from shared.core.roll_call import Roll
from shared.store.contract import LeaseView, LogEntry, LogPage, SessionInfo, SessionState, Settled, StoreInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from shared.clock import ManualClock
    from shared.core.lifecycle import Transitions
    from shared.core.model import SampleKey
    from shared.core.record import Claim
    from shared.core.upstream_list import UpstreamList
    from shared.store.contract import StoreListener


# A cursor is `epoch * 2**32 + n`.
_CURSOR_BITS: Final = 32


@dataclass(slots=True)
class Stored:
    """One sample. `expires_s` is None while it is PENDING; `counted` means counted as handed over."""

    header: Header
    payload: bytes
    expires_s: float | None
    acknowledged: bool = False
    counted: bool = False


@dataclass(slots=True)
class Log:
    """One completion log: entries with their wall-clock time in ms, after the first `trimmed` were dropped."""

    epoch: int
    expires_s: float
    trimmed: int = 0
    entries: list[tuple[int, LogEntry]] = field(default_factory=list)


@dataclass(slots=True)
class MemoryServer:
    """The data that several owners share. `max_bytes` is the largest result it takes; 0 means no limit."""

    clock: ManualClock
    rng: Random
    samples: dict[SampleKey, Stored] = field(default_factory=dict)
    logs: dict[tuple[str, int], Log] = field(default_factory=dict)
    open_sets: defaultdict[str, set[SampleKey]] = field(default_factory=lambda: defaultdict(set))
    leases: dict[str, float] = field(default_factory=dict)
    refills: dict[str, float] = field(default_factory=dict)
    instances: set[str] = field(default_factory=set)
    roll: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    run: int = 1
    inboxes: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    sessions: dict[str, SessionInfo] = field(default_factory=dict)
    sessions_of: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    clones: set[tuple[str, int]] = field(default_factory=set)
    upstreams: UpstreamList | None = None
    locks: dict[str, tuple[str, float]] = field(default_factory=dict)  # (holder, until)
    stores: list[MemoryStore] = field(default_factory=list)
    restarted_s: float | None = None
    max_bytes: int = 0
    # Takes nothing that needs room.
    is_full: bool = False
    # Its memory as `info` shows it; 0 means no limit.
    memory_bytes: int = 0
    reports: dict[str, tuple[float, bytes]] = field(default_factory=dict)

    def wipe(self) -> None:
        """Lose everything, like a server that restarted empty."""
        self.flush()
        self.run += 1
        self.restarted_s = self.clock.monotonic_s()

    def flush(self) -> None:
        """Lose everything, like a server that keeps running after a FLUSHALL."""
        for mapping in (self.samples, self.logs, self.open_sets, self.leases, self.refills, self.inboxes):
            mapping.clear()
        for container in (self.sessions, self.sessions_of, self.instances, self.roll, self.gone, self.clones):
            container.clear()
        self.locks.clear()
        self.upstreams = None


class MemoryStore:
    """One owner's connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer, transitions: Transitions = TRANSITIONS) -> None:
        self._server = server
        self._transitions = transitions
        self._clock = server.clock
        self._restarted_before_s = server.restarted_s
        self._listener: StoreListener | None = None
        self._owner = ""
        self._watched: defaultdict[str, int] = defaultdict(int)
        self._announced: defaultdict[str, list[int]] = defaultdict(list)
        self.connected_since_s: float | None = server.clock.monotonic_s()
        self.commands = 0
        # A test sets these to make calls fail, before or after they did their work.
        self.fail_before: StoreError | None = None
        self.fail_after: StoreError | None = None

    @property
    def restarted_s(self) -> float | None:
        found_s = self._server.restarted_s
        return found_s if found_s != self._restarted_before_s else None

    async def open(self, listener: StoreListener, owner: str) -> None:
        self._listener, self._owner = listener, owner
        self._server.stores.append(self)

    async def close(self) -> None:
        if self in self._server.stores:
            self._server.stores.remove(self)

    async def _enter(self) -> None:
        self.commands += 1
        await asyncio.sleep(0)
        if self.fail_before is not None:
            raise self.fail_before

    def _require_room(self) -> None:
        if self._server.is_full:
            raise StoreFull("the store is full")

    def _leave(self) -> None:
        if self.fail_after is not None:
            raise self.fail_after

    # -- samples

    def _stored(self, key: SampleKey) -> Stored | None:
        stored = self._server.samples.get(key)
        if stored is not None and stored.expires_s is not None and stored.expires_s <= self._clock.monotonic_s():
            del self._server.samples[key]
            return None
        return stored

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        await self._enter()
        self._require_room()
        stored = self._stored(key)
        state = stored.header.state if stored is not None else State.GONE
        begins = allows(state, Event.BEGIN, self._transitions)
        if begins:
            self._server.samples[key] = Stored(Header(State.PENDING, claim), b"", None)
        if begins or (stored is not None and state is State.PENDING and stored.header.claim.owner == claim.owner):
            self._server.open_sets[claim.owner].add(key)
        self._leave()
        return stored.header if stored is not None and not begins else None

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        await self._enter()
        settled = self._settle(key, claim, state, payload, ttl_s, now_ms)
        self._leave()
        return settled

    def _settle(self, key: SampleKey, claim: Claim, state: State, payload: bytes, ttl_s: float, now_ms: int) -> Settled:
        stored = self._stored(key)
        before, mine = State.GONE, True
        if stored is not None:
            before = stored.header.state
            mine = (stored.header.claim.owner, stored.header.claim.attempt) == (claim.owner, claim.attempt)
        if not mine or not allows(before, SETTLING[state], self._transitions):
            handed_over = after(state, Event.HANDED_OVER, self._transitions)
            return Settled.REPEATED if mine and before in (state, handed_over) else Settled.REFUSED
        if state is State.READY and 0 < self._server.max_bytes < len(payload):
            raise StoreFull("the store is full")
        self._server.samples[key] = Stored(Header(state, claim), payload, self._clock.monotonic_s() + ttl_s)
        self._server.open_sets[claim.owner].discard(key)
        entry = LogEntry(key.seq_id, state is State.READY, len(payload) if state is State.READY else 0)
        self._append(key, entry, ttl_s, now_ms)
        return Settled.WRITTEN if stored is not None else Settled.RESTORED

    async def limit_bytes(self, key: SampleKey) -> int:
        await self._enter()
        return self._server.max_bytes

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        self.commands += 1
        stored = self._stored(key)
        if stored is not None and stored.header.state is State.PENDING and stored.header.claim == claim:
            stored.header = msgspec.structs.replace(stored.header, paused=paused)

    async def read(self, key: SampleKey) -> Record | None:
        await self._enter()
        stored = self._stored(key)
        return Record(stored.header, memoryview(stored.payload)) if stored is not None else None

    async def read_header(self, key: SampleKey) -> Header | None:
        record = await self.read(key)
        return record.header if record is not None else None

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        await self._enter()
        return sum(self._start_clock(key, ttl_s, acknowledged=False) for key in keys)

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        await self._enter()
        return sum(self._start_clock(key, ttl_s, acknowledged=True) for key in keys)

    async def unread(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        await self._enter()
        found = [(key, self._stored(key)) for key in keys]
        return [
            key
            for key, stored in found
            if stored is not None and stored.header.state in SETTLED and not stored.header.handed_over
        ]

    def _start_clock(self, key: SampleKey, ttl_s: float, *, acknowledged: bool) -> bool:
        stored = self._stored(key)
        if stored is None or stored.header.state not in SETTLED:
            return False
        if stored.acknowledged if acknowledged else stored.counted:
            return False
        state = after(stored.header.state, Event.HANDED_OVER, self._transitions)
        stored.header = msgspec.structs.replace(stored.header, state=state, handed_over=True)
        stored.acknowledged = stored.acknowledged or acknowledged
        stored.counted = stored.counted or not acknowledged
        due_s = self._clock.monotonic_s() + ttl_s
        stored.expires_s = min(stored.expires_s, due_s) if stored.expires_s is not None else due_s
        return True

    # -- logs and waking

    def _append(self, key: SampleKey, entry: LogEntry, ttl_s: float, now_ms: int) -> None:
        name = (key.session_key, key.clone_id)
        log = self._log(name)
        if log is None:
            log = self._server.logs[name] = Log(self._server.rng.randrange(1, 2**21), 0.0)
        log.entries.append((now_ms, entry))
        log.expires_s = self._clock.monotonic_s() + ttl_s
        while len(log.entries) > 1 and log.entries[0][0] < now_ms - ttl_s * 1000:
            del log.entries[0]
            log.trimmed += 1

    def _log(self, name: tuple[str, int]) -> Log | None:
        log = self._server.logs.get(name)
        if log is not None and log.expires_s <= self._clock.monotonic_s():
            del self._server.logs[name]
            return None
        return log

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        await self._enter()
        log = self._log((session_key, clone_id))
        if log is None:
            return LogPage([], 0)
        epoch, n = divmod(cursor, 1 << _CURSOR_BITS)
        head = log.trimmed + len(log.entries)
        known = epoch == log.epoch and 1 <= n <= head
        start = max(n - log.trimmed, 0) if known else 0
        entries = [entry for _, entry in log.entries[start : start + limit]]
        end = log.trimmed + start + len(entries)
        return LogPage(entries, (log.epoch << _CURSOR_BITS) + end if entries else cursor)

    def announce(self, session_key: str, seq_id: int) -> None:
        if not self._announced:
            asyncio.get_running_loop().call_soon(self._publish)
        self._announced[session_key].append(seq_id)

    def _publish(self) -> None:
        announced, self._announced = self._announced, defaultdict(list)
        for session_key, seq_ids in announced.items():
            for store in self._server.stores:
                if store._listener is not None and store._watched.get(session_key):
                    store._listener.on_announcement(session_key, tuple(seq_ids))

    async def watch(self, session_key: str) -> None:
        await self._enter()
        self._watched[session_key] += 1

    def unwatch(self, session_key: str) -> None:
        self._watched[session_key] -= 1

    # -- sessions

    async def touch_session(self, session_id: str, now_ms: int, *, needs_room: bool = False) -> SessionInfo:
        await self._enter()
        if needs_room:
            self._require_room()
        found = self._server.sessions.get(session_id, SessionInfo(SessionState.UNKNOWN, 0))
        info = replace(found, seen_ms=max(found.seen_ms, now_ms))
        kept = SessionState.ALIVE if found.state is SessionState.UNKNOWN else found.state
        self._server.sessions[session_id] = replace(info, state=kept)
        return info

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        await self._enter()
        found = self._server.sessions.get(session_id, SessionInfo(SessionState.UNKNOWN, now_ms))
        self._server.sessions[session_id] = replace(found, state=SessionState.FINISHED)
        return found.state is not SessionState.FINISHED

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]:
        await self._enter()
        unknown = SessionInfo(SessionState.UNKNOWN, 0)
        return [self._server.sessions.get(session_id, unknown) for session_id in session_ids]

    async def sessions_of(self, owner_tag: str) -> list[str]:
        await self._enter()
        return list(self._server.sessions_of[owner_tag])

    async def enter_session(self, owner_tag: str, session_id: str) -> None:
        await self._enter()
        self._require_room()
        self._server.sessions_of[owner_tag].add(session_id)

    async def drop_sessions(self, owner_tag: str, session_ids: Sequence[str]) -> None:
        await self._enter()
        self._server.sessions_of[owner_tag].difference_update(session_ids)

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        await self._enter()
        self._require_room()
        new = (session_key, clone_id) not in self._server.clones
        self._server.clones.add((session_key, clone_id))
        return new

    # -- ownership

    def _holds_lease(self, owner: str) -> bool:
        return self._server.leases.get(owner, 0.0) > self._clock.monotonic_s()

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        await self._enter()
        held = self._holds_lease(owner)
        self._server.leases[owner] = self._clock.monotonic_s() + ttl_s
        self._server.instances.add(owner)
        return held

    async def release_lease(self, owner: str) -> None:
        await self._enter()
        self._server.leases.pop(owner, None)
        if not self._server.open_sets[owner]:
            self._server.instances.discard(owner)

    async def watch_lease(self, owner: str) -> LeaseView:
        await self._enter()
        started_s = self._server.restarted_s
        age_s = self._clock.monotonic_s() - started_s if started_s is not None else float("inf")
        return LeaseView(self._holds_lease(owner), age_s)

    async def note_refill(self, owner: str, *, window_s: float) -> None:
        await self._enter()
        self._server.refills[owner] = self._clock.monotonic_s() + window_s

    async def refill_left_s(self) -> float:
        await self._enter()
        return max(max(self._server.refills.values(), default=0.0) - self._clock.monotonic_s(), 0.0)

    async def server_run(self) -> bytes:
        await self._enter()
        return b"%d" % self._server.run

    async def answer_roll(self, owner: str, run: bytes) -> bool:
        await self._enter()
        if run != b"%d" % self._server.run:
            return False
        self._server.roll.add(owner)
        self._server.gone.discard(owner)
        return True

    async def read_roll(self) -> Roll:
        await self._enter()
        return Roll(frozenset(self._server.roll), frozenset(self._server.gone))

    async def leave_roll(self, owner: str) -> None:
        await self._enter()
        self._server.roll.discard(owner)
        self._server.gone.add(owner)

    async def lapsed_owners(self) -> list[str]:
        await self._enter()
        return [owner for owner in self._server.instances if not self._holds_lease(owner)]

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        await self._enter()
        reaped: list[SampleKey] = []
        for key in sorted(self._server.open_sets[owner])[:limit]:
            self._server.open_sets[owner].discard(key)
            stored = self._stored(key)
            if stored is not None and stored.header.claim.owner == owner:
                done = self._settle(key, stored.header.claim, State.ORPHANED, b"", ttl_s, now_ms)
                reaped += [key] if done is Settled.WRITTEN else []
        if self._server.open_sets[owner]:
            return reaped or await self.reap(owner, ttl_s=ttl_s, now_ms=now_ms, limit=limit)
        if not self._holds_lease(owner):
            self._server.instances.discard(owner)
        return reaped

    async def report_unfetched(self, owner: str, report: bytes, *, ttl_s: float) -> list[bytes]:
        await self._enter()
        now_s, reports = self._clock.monotonic_s(), self._server.reports
        reports[owner] = (now_s, report)
        return [found for name, (at_s, found) in reports.items() if name != owner and now_s - at_s <= ttl_s]

    # -- messages between workers

    async def send_control(self, owner: str, message: bytes) -> None:
        await self._enter()
        self._server.inboxes[owner].append(message)
        self._deliver(message, owner)

    async def take_inbox(self, owner: str) -> list[bytes]:
        await self._enter()
        return self._server.inboxes.pop(owner, [])

    async def broadcast(self, message: bytes) -> None:
        await self._enter()
        self._deliver(message, None)

    def _deliver(self, message: bytes, owner: str | None) -> None:
        for store in self._server.stores:
            if store._listener is not None and owner in (None, store._owner):
                store._listener.on_control(message)

    # -- what the workers agree on

    async def read_upstreams(self) -> UpstreamList | None:
        await self._enter()
        return self._server.upstreams

    async def offer_upstreams(self, offered: UpstreamList) -> UpstreamList:
        await self._enter()
        kept = self._server.upstreams
        if kept is None or kept.version < offered.version:
            kept = self._server.upstreams = offered
        self._leave()
        return kept

    async def take_lock(self, name: str, holder: str, *, ttl_s: float) -> bool:
        await self._enter()
        held_by, until_s = self._server.locks.get(name, ("", 0.0))
        now_s = self._clock.monotonic_s()
        taken = held_by == holder or until_s <= now_s
        if taken:
            self._server.locks[name] = (holder, now_s + ttl_s)
        self._leave()
        return taken

    async def release_lock(self, name: str, holder: str) -> None:
        await self._enter()
        if self._server.locks.get(name, ("", 0.0))[0] == holder:
            del self._server.locks[name]

    # -- the rest

    async def info(self) -> StoreInfo:
        await self._enter()
        used_bytes = sum(len(stored.payload) for stored in self._server.samples.values())
        return StoreInfo("memory", "memory", used_bytes, self._server.memory_bytes, "noeviction")
