"""The store: the state that all workers of all hosts share.

One protocol, two stores on Redis (`one_server.py`, `cluster.py`) and one in memory for tests, and one suite that holds
all three to the same contract (`tests/contract/`). The store decides nothing: it applies the table of
`shared/core/lifecycle.py` atomically next to the data, keeps clocks, and wakes the polls that wait.

Callers rely on four promises:

- `begin` is first-writer-wins. It puts the sample into the owner's open set before the record, or together with it, so
  that every PENDING sample can be reaped.
- `settle` is first-terminal-wins, fenced by owner and attempt, and idempotent: repeating it after a lost reply is safe.
  The payload is readable and the completion is logged before it is announced (`announce` comes after).
- No read extends a clock. `mark_retrieved` and `acknowledge` only shorten what is left.
- Every call ends within the store's own deadline, with its result or a `StoreError`. A call that is cancelled disturbs
  no other call.
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
    """The outcome of a `settle`."""

    WRITTEN = "written"
    RESTORED = "restored"  # written, though there was no record: the store has lost it
    REPEATED = "repeated"  # the same claim had settled it before, in the same state: the reply was lost
    REFUSED = "refused"  # another terminal state or another owner came first; nothing changed


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of a completion log. `size_bytes` is the size of the payload; it is 0 unless the sample is READY."""

    seq_id: int
    finished: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogPage:
    """The entries after a cursor and the cursor after them, which without entries is the given one, or 0 if stale.

    A cursor is `epoch * 2**32 + n`, below 2**53; every new log and every start of the server has another epoch. A
    cursor of another epoch, or past the end, reads as 0. Otherwise it stays the same while nothing is new: the SDK
    would poll without pause if it moved. `unreadable` counts lines that no gateway wrote, which are left out.
    """

    entries: list[LogEntry]
    cursor: int
    unreadable: int = 0


class SessionState(Enum):
    """The state of a client's session."""

    UNKNOWN = "unknown"
    ALIVE = "alive"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the store knows it."""

    state: SessionState
    seen_ms: int  # wall clock of the last sign of life; 0 when unknown


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease, and for how many whole seconds the server that keeps it has been running."""

    held: bool
    server_age_s: float


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The figures of a server for `/status`, `/readyz` and `gateway check`. `max_bytes` is 0 without a limit.

    `received_bytes` and `sent_bytes` count the traffic with all clients of the server since it started.
    """

    mode: str  # "standalone", "sentinel", "cluster", "memory"
    version: str
    used_bytes: int
    max_bytes: int
    policy: str
    received_bytes: int = 0
    sent_bytes: int = 0
    clock_us: int = 0  # the server's wall clock; 0 if it does not report it


class StoreListener(Protocol):
    """The receiver of messages in a worker. Its methods run on the event loop; they must not block or raise."""

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        """Handle samples of a watched sampling session that have settled."""
        ...

    def on_gap(self) -> None:
        """Read again everything awaited: a subscription was cut and is back, and messages may have been lost."""
        ...

    def on_control(self, message: bytes) -> None:
        """Handle a message for this worker (`send_control`) or for all (`broadcast`)."""
        ...


class Store(Protocol):
    """The contract, see above. All methods raise `StoreError` only."""

    async def open(self, listener: StoreListener, owner: str) -> None:
        """Connect, and subscribe to the messages for `owner`. Raises if the first attempt fails."""
        ...

    async def close(self) -> None:
        """Fail every pending call and close every connection. Idempotent."""
        ...

    @property
    def connected_since_s(self) -> float | None:
        """The monotonic time at which the command connection came up; None while it is down."""
        ...

    @property
    def restarted_s(self) -> float | None:
        """The monotonic time at which the server was last found to be another one than before, or None.

        Its data may be gone, or an older state may be back.
        """
        ...

    @property
    def commands(self) -> int:
        """The number of commands sent; a script counts as one."""
        ...

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        """Enter a sample as PENDING and return None, or return the header that was there first and change nothing.

        If the record names this very owner and attempt, a reply was lost: the caller knows whether it already runs the
        sample. A sample that was not begun is not left in the owner's open set.
        """
        ...

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        """Set the terminal state of a sample that `claim` owns, and log it in the log of its session and clone.

        A missing sample, in a store that was wiped, is written like a PENDING one. The sample leaves the owner's open
        set. Log entries older than `ttl_s` are trimmed in passing. Nobody is woken: see `announce`. A full store
        refuses only results (`StoreFull`); it takes other endings, so that polls get them.
        """
        ...

    async def limit_bytes(self, key: SampleKey) -> int:
        """Return the memory limit of the server that keeps this sample; 0 if there is none."""
        ...

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        """Note on a PENDING record of this claim whether it waits for an upstream; leave any other record alone.

        Best effort: it never raises and does not wait, since a store that hangs must not delay an attempt. Later calls
        of this store see it.
        """
        ...

    async def read(self, key: SampleKey) -> Record | None:
        """Return header and payload, or None if there is no record (GONE)."""
        ...

    async def read_header(self, key: SampleKey) -> Header | None:
        """Return the header only, or None if there is no record that a gateway wrote."""
        ...

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        """Start the retrieved clock of these settled samples, whose replies were handed over, unless it runs already.

        Returns how many were handed over for the first time, including samples whose acknowledgement was quicker than
        this call. A clock that leaves less than `ttl_s` is not extended.
        """
        ...

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        """Shorten the time to live of these samples, which the client has, to `ttl_s`; skip PENDING and missing ones.

        Returns how many were shortened for the first time.
        """
        ...

    async def unread(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        """Return those of these that are settled and were neither handed over nor acknowledged."""
        ...

    # -- completion logs and waking -----------------------------------------------------------------------------

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        """Return up to `limit` completions after `cursor`, oldest first."""
        ...

    def announce(self, session_key: str, seq_id: int) -> None:
        """Inform every worker that watches this session, once per event-loop turn. Best effort; never raises."""
        ...

    async def watch(self, session_key: str) -> None:
        """Return when announcements of this session arrive. Calls nest: each needs its own `unwatch`."""
        ...

    def unwatch(self, session_key: str) -> None:
        """Undo one `watch`. The subscription may remain for a few seconds, for the next poll."""
        ...

    # -- sessions -----------------------------------------------------------------------------------------------

    async def touch_session(self, session_id: str, now_ms: int, *, needs_room: bool = False) -> SessionInfo:
        """Record a sign of life, and create the session if it is unknown. A finished session stays finished.

        Returns the state as it was before, with the new `seen_ms`. The record is kept for the store's `session_ttl_s`
        after the last call. With `needs_room`, raises `StoreFull` and changes nothing if the store is full.
        """
        ...

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        """Finish a session; return True to the first caller that does."""
        ...

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]:
        """Return what is known of each session, in the given order."""
        ...

    async def sessions_of(self, owner_tag: str) -> list[str]:
        """Return the sessions entered for an API key, including ended ones that were not dropped yet."""
        ...

    async def enter_session(self, owner_tag: str, session_id: str) -> None:
        """Count a session for an API key."""
        ...

    async def drop_sessions(self, owner_tag: str, session_ids: Sequence[str]) -> None:
        """Stop counting these sessions."""
        ...

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        """Reserve a clone number of the sampling session; return False if it was taken."""
        ...

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        """Take or renew the lease of a worker instance. Returns False if it was new, had lapsed, or was wiped."""
        ...

    async def release_lease(self, owner: str) -> None:
        """Give up the lease of a worker that stops; open samples that it leaves can be reaped at once."""
        ...

    async def lapsed_owners(self) -> list[str]:
        """Return the known instances that hold no lease."""
        ...

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        """ORPHAN up to `limit` open samples of `owner`, and return them for `announce`.

        An entry whose record is settled or names another owner just leaves the set. On a cluster a settled record of
        this owner may not have been logged yet: it is logged now, and its sample is returned too. When the set is
        empty, the instance is forgotten and [] is returned.
        """
        ...

    async def watch_lease(self, owner: str) -> LeaseView:
        """Look at a lease without renewing it."""
        ...

    async def note_refill(self, owner: str, *, window_s: float) -> None:
        """Note that for at most `window_s` from now `owner` enters again what the store lost, or others may."""
        ...

    async def refill_left_s(self) -> float:
        """Return how long the longest window of `note_refill` still lasts; 0 without one."""
        ...

    async def server_run(self) -> bytes:
        """Return the run id of the server, which changes with a restart or failover; on a cluster, of one server."""
        ...

    async def answer_roll(self, owner: str, run: bytes) -> bool:
        """Note that `owner` has entered everything it runs. Returns False if `run` is no longer the server's run id."""
        ...

    async def read_roll(self) -> Roll:
        """Return which instances have answered the present server, and which are gone."""
        ...

    async def leave_roll(self, owner: str) -> None:
        """Note that `owner` runs nothing any more."""
        ...

    async def report_unfetched(self, owner: str, report: bytes, *, ttl_s: float) -> list[bytes]:
        """Keep what `owner` reports of its unfetched results for `ttl_s`, and return the reports of the others."""
        ...

    # -- messages between workers -------------------------------------------------------------------------------

    async def send_control(self, owner: str, message: bytes) -> None:
        """Leave a message for a worker and wake it; the message stays for a few lease times unless it is taken.

        Messages may arrive in another order than they were sent.
        """
        ...

    async def take_inbox(self, owner: str) -> list[bytes]:
        """Take the messages left for this worker. A message may arrive both here and at `on_control`."""
        ...

    async def broadcast(self, message: bytes) -> None:
        """Send a message to every worker that is connected now; it is not kept."""
        ...

    # -- what the workers agree on ------------------------------------------------------------------------------

    async def read_upstreams(self) -> UpstreamList | None:
        """Return the published list, or None if there is none or it was lost."""
        ...

    async def offer_upstreams(self, offered: UpstreamList) -> UpstreamList:
        """Keep the later of this list and the present one, by version, and return it."""
        ...

    async def take_lock(self, name: str, holder: str, *, ttl_s: float) -> bool:
        """Take or renew a lock for `ttl_s`; return False if another holder has it."""
        ...

    async def release_lock(self, name: str, holder: str) -> None:
        """Release a lock; do nothing if another holder has it by now."""
        ...

    # -- the rest -----------------------------------------------------------------------------------------------

    async def info(self) -> StoreInfo:
        """Return the figures of the server, or of the masters of a cluster together."""
        ...
