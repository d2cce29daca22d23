"""What stands for a Redis in tests: the data that the stores of several owners share, in one process' memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from shared.clock import ManualClock
    from shared.core.model import SampleKey
    from shared.core.record import Header
    from shared.core.upstream_list import UpstreamList
    from shared.store.base import LogEntry, SessionInfo
    from shared.store.memory import MemoryStore


@dataclass(slots=True)
class Stored:
    header: Header
    payload: bytes
    expires_s: float | None
    acknowledged: bool = False
    counted: bool = False  # as handed over


@dataclass(slots=True)
class Log:
    epoch: int
    expires_s: float
    first: int = 0  # how many entries were trimmed
    entries: list[tuple[int, LogEntry]] = field(default_factory=list)  # (wall ms, entry)


@dataclass(slots=True)
class MemoryServer:
    """What the stores of several owners share. `down` makes every call fail, before or after it was done."""

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

    def wipe(self) -> None:
        """As a server that was restarted empty."""
        self.flush()
        self.run += 1
        self.restarted_s = self.clock.monotonic_s()

    def flush(self) -> None:
        """As FLUSHALL on a server that goes on running."""
        for container in (self.samples, self.logs, self.open_sets, self.leases, self.inboxes, self.sessions):
            container.clear()
        self.refills.clear()
        self.roll.clear()
        self.gone.clear()
        self.sessions_of.clear()
        self.instances.clear()
        self.clones.clear()
        self.locks.clear()
        self.upstreams = None
