"""The store: what every worker of every host shares.

One protocol, three implementations (`redis.py`, `cluster.py`, `memory.py`), one contract suite (`tests/contract/`).
The store decides nothing: it applies `shared/core/lifecycle.py` atomically next to the data, keeps clocks, and wakes
who waits.

Four promises that callers build on:

- `begin` is first-writer-wins. It enters the sample into the owner's open set before (or together with) the record, so
  that no PENDING is ever without somebody who reaps it.
- `settle` is first-terminal-wins, fenced by owner and attempt, and idempotent: repeating it after a lost reply is safe.
  The payload is readable, and the completion logged, before anybody is told (`announce` comes after).
- No read extends a clock. `mark_retrieved` and `acknowledge` only ever shorten what is left.
- Every call ends: with its result, or with a `StoreError` within the store's own deadline. A call that is cancelled
  disturbs no other call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.core.lifecycle import State
    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header, Record
    from shared.core.roll_call import Roll
    from shared.core.upstream_list import UpstreamList


class Settled(Enum):
    """What became of a `settle`."""

    WRITTEN = "written"
    RESTORED = "restored"  # written, and there was no record: the store has lost what was begun
    REPEATED = "repeated"  # this very claim had settled it before, in the same state: a lost reply
    REFUSED = "refused"  # another terminal state, or another owner, was first; nothing changed


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a completion log. `size_bytes` is the payload's, 0 unless the sample is READY."""

    seq_id: int
    finished: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogPage:
    """What came after a cursor. With no entries the cursor is the one that was asked with, or 0 if that is stale.

    A cursor is `epoch * 2**32 + n`, below 2**53, where the epoch is another one for every log that begins and every
    start of the server. A cursor of another epoch, or past the head, reads as 0. Otherwise it stands still while
    nothing is new (the SDK spins if not).
    """

    entries: list[LogEntry]
    cursor: int


class SessionState(Enum):
    UNKNOWN = "unknown"
    ALIVE = "alive"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    state: SessionState
    seen_ms: int  # wall clock of the last sign of life; 0 when unknown


@dataclass(frozen=True, slots=True)
class LeaseView:
    """`server_age_s`: for how long the server that keeps it has been running, in whole seconds."""

    held: bool
    server_age_s: float


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """For `/status`, `/readyz` and `gateway check`. `max_bytes` is 0 when unlimited.

    `received_bytes`, `sent_bytes`: all that clients of the server have sent and got since it started.
    """

    mode: str  # "standalone", "sentinel", "cluster", "memory"
    version: str
    used_bytes: int
    max_bytes: int
    policy: str
    received_bytes: int = 0
    sent_bytes: int = 0
    clock_us: int = 0  # the server's wall clock; 0 where it is not told


class StoreListener(Protocol):
    """What a worker hears from the store. Called on the event loop; must not block and must not raise."""

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        """These samples of a watched sampling session have settled."""
        ...

    def on_gap(self) -> None:
        """Messages may have been lost (a subscription was cut and is back): look again at everything awaited."""
        ...

    def on_control(self, message: bytes) -> None:
        """A message for this worker (`send_control`) or for all (`broadcast`)."""
        ...


class Store(Protocol):
    """See the module's docstring. All methods raise `StoreError` only."""

    async def open(self, listener: StoreListener, owner: str) -> None:
        """Connect, load scripts, subscribe to control messages for `owner`. Raises when the first attempt fails."""
        ...

    async def close(self) -> None:
        """Fail what is pending, close every connection. Idempotent."""
        ...

    @property
    def connected_since_s(self) -> float | None:
        """Monotonic time since when the command connection has been up; None while it is down."""
        ...

    @property
    def restarted_s(self) -> float | None:
        """Monotonic time at which the server was last found to be another one than before; None: never.

        What it kept may be gone, or an older state may be back.
        """
        ...

    @property
    def commands(self) -> int:
        """How many commands were sent; a script counts as one."""
        ...

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        """Enter a sample as PENDING. None: begun. Otherwise the header of what was there first, and nothing changed.

        When the record there names this very owner and attempt (a lost reply), that header is returned: the caller
        knows whether it runs the sample already. An owner that did not begin it is not left in its own open set.
        """
        ...

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        """Set the one terminal state of a sample that `claim` owns, and log it in its (session, clone)'s log.

        A sample that is not there at all (a wiped store) is written like a PENDING one. The sample leaves the owner's
        open set. Log entries older than `ttl_s` are trimmed in passing. Nobody is woken: see `announce`. A full store
        refuses results only (`StoreFull`): an ending without one is taken, so that who waits hears of it.
        """
        ...

    async def limit_bytes(self, key: SampleKey) -> int:
        """The memory limit of the server that keeps this sample; 0 when there is none."""
        ...

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        """Say on a PENDING record of this claim whether an upstream takes it; on any other record, nothing.

        Best effort, never raises, and waits for nothing: a store that hangs must hold up no attempt. Seen by what is
        asked of this store afterwards.
        """
        ...

    async def read(self, key: SampleKey) -> Record | None:
        """Header and payload; None when there is nothing (GONE)."""
        ...

    async def read_header(self, key: SampleKey) -> Header | None: ...

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        """Replies were handed over: start the retrieved clock of those settled samples whose clock had not started.

        Returns how many were handed over for the first time; one that was acknowledged before (the client is quicker
        than our counting) is among them. A clock that leaves less than `ttl_s` is not extended.
        """
        ...

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        """The client has these: shorten what is left to `ttl_s`; PENDING and missing ones are passed over.

        Returns how many were shortened for the first time.
        """
        ...

    async def count_unread(self, keys: Sequence[SampleKey]) -> int:
        """How many of these are settled, and were neither handed over nor acknowledged."""
        ...

    # -- completion logs and waking -----------------------------------------------------------------------------

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        """Up to `limit` completions after `cursor`, oldest first."""
        ...

    def announce(self, session_key: str, seq_id: int) -> None:
        """Tell every worker that watches this session; coalesced per event-loop turn, best effort, never raises."""
        ...

    async def watch(self, session_key: str) -> None:
        """Hear announcements of this session from the moment this returns. Nested calls count."""
        ...

    def unwatch(self, session_key: str) -> None:
        """Undo one `watch`. The subscription may linger a few seconds, for the next poll."""
        ...

    # -- sessions -----------------------------------------------------------------------------------------------

    async def touch_session(self, session_id: str, now_ms: int) -> SessionInfo:
        """A sign of life; creates what is missing. Returns the state as it was found, with `seen_ms` updated.

        A finished session stays finished.
        """
        ...

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        """True for the first to finish it."""
        ...

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]: ...

    async def sessions_of(self, owner_tag: str) -> list[str]:
        """The sessions that were entered for a key, those that ended since too, until they are dropped."""
        ...

    async def enter_session(self, owner_tag: str, session_id: str) -> None: ...

    async def drop_sessions(self, owner_tag: str, session_ids: Sequence[str]) -> None: ...

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        """True when nobody had reserved this clone number of the sampling session."""
        ...

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        """Take or renew a worker instance's lease. False when it was not there: first time, lapsed, or a wipe."""
        ...

    async def release_lease(self, owner: str) -> None:
        """The worker stops and has no open samples left, or leaves them to be reaped at once."""
        ...

    async def lapsed_owners(self) -> list[str]:
        """Instances that are known and hold no lease."""
        ...

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        """ORPHAN up to `limit` open samples of `owner`; returns them, for `announce`.

        An entry whose record names another owner, or is settled, just leaves the set. On a cluster a settled record of
        this owner may not have been logged yet: that is done then, and the sample is returned, too. When the set is
        empty the instance is forgotten, and [] returned.
        """
        ...

    async def watch_lease(self, owner: str) -> LeaseView:
        """A look at a lease, without renewing it."""
        ...

    async def note_refill(self, owner: str, *, window_s: float) -> None:
        """`owner` tells the store again what it lost, or others may still, for `window_s` from now at most."""
        ...

    async def refill_left_s(self) -> float:
        """How long the longest of the windows of `note_refill` still lasts; 0 when there is none."""
        ...

    async def server_run(self) -> bytes:
        """What tells the server from what it was before a restart or a failover; on a cluster, one of its servers."""
        ...

    async def answer_roll(self, owner: str, run: bytes) -> bool:
        """`owner` has entered all that it runs. False when the server is not that of `run` (any more)."""
        ...

    async def read_roll(self) -> Roll:
        """What the server that is there now knows of the instances."""
        ...

    async def leave_roll(self, owner: str) -> None:
        """`owner` runs nothing any more."""
        ...

    # -- messages between workers -------------------------------------------------------------------------------

    async def send_control(self, owner: str, message: bytes) -> None:
        """Leave a message for a worker and wake it; it stays until taken or a few lease times are over.

        Messages that were sent one after the other may be heard the other way round.
        """
        ...

    async def take_inbox(self, owner: str) -> list[bytes]:
        """What was left for this worker and not yet taken; a message may arrive both ways."""
        ...

    async def broadcast(self, message: bytes) -> None:
        """Tell every worker now; not kept."""
        ...

    # -- what the workers agree on ------------------------------------------------------------------------------

    async def read_upstreams(self) -> UpstreamList | None:
        """The published list; None when there is none, or it was lost."""
        ...

    async def offer_upstreams(self, offered: UpstreamList) -> UpstreamList:
        """Keep the later of this list and the one that is there, by version; returns the one that is there then."""
        ...

    async def take_lock(self, name: str, holder: str, *, ttl_s: float) -> bool:
        """True when `holder` has the lock from now on for `ttl_s`; taking what one holds begins that time anew."""
        ...

    async def release_lock(self, name: str, holder: str) -> None:
        """Let others take it; of a lock that somebody else has by now, nothing."""
        ...

    # -- the rest -----------------------------------------------------------------------------------------------

    async def ping(self) -> None: ...

    async def info(self) -> StoreInfo: ...
