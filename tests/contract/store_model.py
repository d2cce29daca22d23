"""The store's contract as plain data without I/O; the stateful test compares stores with it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shared.core.lifecycle import SETTLED, SETTLING, Event, State, after, allows
from shared.core.record import Header
from shared.store.contract import LogEntry, Settled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Claim

LogName = tuple[str, int]


@dataclass
class Sample:
    """One life of a sample, which ends when the sample expires or is wiped."""

    header: Header
    life: int
    payload: bytes = b""
    expires_s: float | None = None
    acknowledged: bool = False
    counted: bool = False  # as handed over


@dataclass
class Log:
    """`trimmable`: how many entries, from the first on, may have been dropped for their age."""

    epoch: int
    expires_s: float = 0.0
    entries: list[tuple[int, LogEntry]] = field(default_factory=list)
    trimmable: int = 0


@dataclass
class Model:
    now_s: float = 0.0
    samples: dict[SampleKey, Sample] = field(default_factory=dict)
    logs: dict[LogName, Log] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    instances: set[str] = field(default_factory=set)
    # The seq_ids accepted for each log since it began: each must be logged as often as it is here.
    accepted: defaultdict[LogName, list[int]] = field(default_factory=lambda: defaultdict(list))
    # The samples that an owner runs, and entries that a crash between two steps left behind.
    open_sets: defaultdict[str, set[SampleKey]] = field(default_factory=lambda: defaultdict(set))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def jump(self, seconds: float) -> None:
        self.now_s += seconds
        gone = [key for key, found in self.samples.items() if (found.expires_s or self.now_s + 1) <= self.now_s]
        for key in gone:
            del self.samples[key]
        for name in [name for name, log in self.logs.items() if log.expires_s <= self.now_s]:
            del self.logs[name]
            self._forget_ended(name)
        for owner in [owner for owner, until_s in self.leases.items() if until_s <= self.now_s]:
            del self.leases[owner]

    def _forget_ended(self, name: LogName) -> None:
        """Drop what an expired log reported; samples that still run will be in the next log."""
        running = {key.seq_id for key in self.pending() if (key.session_key, key.clone_id) == name}
        self.accepted[name] = [seq_id for seq_id in set(self.accepted[name]) if seq_id in running]

    def wipe(self) -> None:
        for container in (self.samples, self.logs, self.leases, self.accepted, self.open_sets):
            container.clear()
        self.instances.clear()

    def pending(self, owner: str | None = None) -> set[SampleKey]:
        return {
            key
            for key, found in self.samples.items()
            if found.header.state is State.PENDING and owner in (None, found.header.claim.owner)
        }

    # -- samples

    def header(self, key: SampleKey) -> Header | None:
        found = self.samples.get(key)
        return found.header if found is not None else None

    def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        found = self.samples.get(key)
        if found is None:
            self._enter(key, Header(State.PENDING, claim))
        elif found.header.state is State.PENDING and found.header.claim.owner == claim.owner:
            self.open_sets[claim.owner].add(key)
        return found.header if found is not None else None

    def _enter(self, key: SampleKey, header: Header) -> Sample:
        self.accepted[key.session_key, key.clone_id].append(key.seq_id)
        entered = self.samples[key] = Sample(header, next(self._numbers))
        if header.state is State.PENDING:
            self.open_sets[header.claim.owner].add(key)
        return entered

    def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        found = self.samples.get(key)
        if found is not None:
            was = found.header
            mine = (was.claim.owner, was.claim.attempt) == (claim.owner, claim.attempt)
            if mine and (was.state is state or (was.state, state) == (State.RETRIEVED, State.READY)):
                return Settled.REPEATED
            if not mine or not allows(was.state, SETTLING[state]):
                return Settled.REFUSED
            self._end(key, found, state, payload, ttl_s, now_ms)
            return Settled.WRITTEN
        self._end(key, self._enter(key, Header(state, claim)), state, payload, ttl_s, now_ms)
        return Settled.RESTORED

    def _end(self, key: SampleKey, found: Sample, state: State, payload: bytes, ttl_s: float, now_ms: int) -> None:
        found.header, found.payload = Header(state, found.header.claim), payload
        found.expires_s = self.now_s + ttl_s
        self.open_sets[found.header.claim.owner].discard(key)
        name = (key.session_key, key.clone_id)
        log = self.logs.get(name)
        if log is None:
            log = self.logs[name] = Log(next(self._numbers))
        cut_ms = now_ms - ttl_s * 1000
        while log.trimmable < len(log.entries) and log.entries[log.trimmable][0] < cut_ms:
            log.trimmable += 1
        ready = state is State.READY
        log.entries.append((now_ms, LogEntry(key.seq_id, ready, len(payload) if ready else 0)))
        log.expires_s = self.now_s + ttl_s

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        found = self.samples.get(key)
        if found is not None and found.header.state is State.PENDING and found.header.claim == claim:
            found.header = msgspec.structs.replace(found.header, paused=paused)

    def start_clocks(self, keys: Sequence[SampleKey], ttl_s: float, *, acknowledged: bool) -> int:
        return sum(self._start_clock(key, ttl_s, acknowledged) for key in keys)

    def _start_clock(self, key: SampleKey, ttl_s: float, acknowledged: bool) -> bool:
        found = self.samples.get(key)
        if found is None or found.expires_s is None:
            return False
        if found.acknowledged if acknowledged else found.counted:
            return False
        state = after(found.header.state, Event.HANDED_OVER)
        found.header = msgspec.structs.replace(found.header, state=state, handed_over=True)
        found.acknowledged = found.acknowledged or acknowledged
        found.counted = found.counted or not acknowledged
        found.expires_s = min(found.expires_s, self.now_s + ttl_s)
        return True

    def unread(self, keys: Iterable[SampleKey]) -> int:
        headers = [self.header(key) for key in keys]
        return sum(header is not None and header.state in SETTLED and not header.handed_over for header in headers)

    # -- ownership

    def renew(self, owner: str, ttl_s: float) -> bool:
        held = owner in self.leases
        self.leases[owner] = self.now_s + ttl_s
        self.instances.add(owner)
        return held

    def release(self, owner: str) -> None:
        self.leases.pop(owner, None)
        if not self.open_sets[owner]:
            self.instances.discard(owner)

    def lapsed(self) -> set[str]:
        return self.instances - self.leases.keys()

    def reaped(self, owner: str, keys: Sequence[SampleKey], left: set[SampleKey], *, ttl_s: float, now_ms: int) -> None:
        """Take over that the store ended these samples, in this order, and has not looked at `left` yet."""
        assert set(keys) <= self.pending(owner), f"{owner} does not run all of {keys}"
        assert left <= self.open_sets[owner]
        for key in keys:
            self._end(key, self.samples[key], State.ORPHANED, b"", ttl_s, now_ms)
        self.open_sets[owner] = set(left)
        if not left and owner not in self.leases:
            self.instances.discard(owner)
