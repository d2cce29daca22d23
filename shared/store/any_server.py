"""What a store does on one server and on a cluster alike: every step that touches a single key."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

from shared.clock import SystemClock
from shared.core import upstream_list
from shared.core.lifecycle import TRANSITIONS
from shared.core.record import ACKNOWLEDGED, HANDED_OVER, HEADER_BYTES, PAUSED, UNDELIVERED
from shared.core.roll_call import Roll
from shared.redis.link import COMMAND_DEADLINE_S
from shared.store import schema, scripts
from shared.store.announcements import LINGER_S, Announcements
from shared.store.contract import LeaseView, SessionInfo
from shared.store.schema import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.core.lifecycle import Transitions
    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header, Record
    from shared.core.upstream_list import UpstreamList
    from shared.redis.commands import Script
    from shared.redis.connection import Argument

# A value from here on travels on the second connection: it is a millisecond of both sides' time.
BULK_FROM_BYTES: Final = 256 * 1024
# What a reader asks for before it knows the size of a record: all of a small result, and little of a large one. That is
# then read whole and not continued, since the record may change between two reads.
_FIRST_LOOK_BYTES: Final = 32 * 1024
_EPOCHS: Final = 2**21
_SESSION_TTL_MS: Final = 24 * 3600 * 1000
# Renewed by every look at it; it ends some time after the gateway has.
_ROLL_TTL_MS: Final = 24 * 3600 * 1000
# Four leases of the default length: longer than any worker goes without looking into its inbox.
_INBOX_TTL_MS: Final = 120_000


class CommandPort(Protocol):
    """Where commands go. The key of a command stands first, that of a script is the first of `keys`."""

    @property
    def commands(self) -> int: ...

    async def call(self, *arguments: Argument) -> Any: ...

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any: ...

    def post(self, *arguments: Argument) -> None: ...

    def post_script(self, script: Script, keys: Sequence[str], *arguments: Argument) -> None: ...


class ServedStore:
    """Methods are those of `base.Store`. A subclass says where its lines lead and how a message is sent."""

    # The command that sends a message.
    _publish = "PUBLISH"

    def __init__(
        self,
        url: str,
        key_prefix: str = "gw",
        *,
        clock: Clock | None = None,
        rng: Random | None = None,
        deadline_s: float = COMMAND_DEADLINE_S,
        linger_s: float = LINGER_S,
        transitions: Transitions = TRANSITIONS,
    ) -> None:
        """Connects to nothing yet. Raises `ConfigError` for a URL that is none, or that of another kind of store."""
        self._keys = Keys(key_prefix)
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        self._deadline_s = deadline_s
        self._transitions = transitions
        self._start_clock = scripts.start_clock(transitions)
        self._wakes = Announcements(self._keys, self._send, linger_s)
        self._line, self._bulk = self._lines(url)

    def _lines(self, url: str) -> tuple[CommandPort, CommandPort]:
        """For commands, and for those with large values."""
        raise NotImplementedError

    def _send(self, channel: str, message: bytes) -> None:
        self._line.post(self._publish, channel, message)

    @property
    def commands(self) -> int:
        return self._line.commands + self._bulk.commands

    # -- samples ------------------------------------------------------------------------------------------------

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        attempt = claim.attempt.to_bytes(2, "big")
        mark = PAUSED if paused else UNDELIVERED
        self._line.post_script(scripts.MARK_PAUSED, [self._keys.sample(key)], claim.owner, attempt, mark)

    async def limit_bytes(self, key: SampleKey) -> int:
        return int(await self._line.run(scripts.LIMIT_BYTES, [self._keys.sample(key)]))

    async def read(self, key: SampleKey) -> Record | None:
        name = self._keys.sample(key)
        data = await self._line.call("GETRANGE", name, "0", str(_FIRST_LOOK_BYTES - 1))
        if len(data) == _FIRST_LOOK_BYTES:
            data = await self._bulk.call("GET", name)
        return schema.record_of(data)

    async def read_header(self, key: SampleKey) -> Header | None:
        data = await self._line.call("GETRANGE", self._keys.sample(key), "0", str(HEADER_BYTES - 1))
        return schema.header_of(data) if data else None

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._sum(self._start_clock, keys, schema.ms(ttl_s), HANDED_OVER)

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._sum(self._start_clock, keys, schema.ms(ttl_s), ACKNOWLEDGED)

    async def count_unread(self, keys: Sequence[SampleKey]) -> int:
        return await self._sum(scripts.COUNT_UNREAD, keys)

    async def _sum(self, script: Script, keys: Sequence[SampleKey], *arguments: Argument) -> int:
        """Run a script over the records of all `keys`; the sum of its replies."""
        raise NotImplementedError

    # -- completion logs and waking -----------------------------------------------------------------------------

    def announce(self, session_key: str, seq_id: int) -> None:
        self._wakes.announce(session_key, seq_id)

    async def watch(self, session_key: str) -> None:
        if not self._wakes.watch_heard(session_key):
            await self._wakes.watch(session_key)

    def unwatch(self, session_key: str) -> None:
        self._wakes.unwatch(session_key)

    # -- sessions -----------------------------------------------------------------------------------------------

    async def touch_session(self, session_id: str, now_ms: int) -> SessionInfo:
        found = await self._line.run(scripts.TOUCH_SESSION, [self._keys.session(session_id)], now_ms, _SESSION_TTL_MS)
        seen_before, finished, seen = found
        return SessionInfo(schema.session_state(seen_before, finished), int(seen))

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        keys = [self._keys.session(session_id)]
        return bool(await self._line.run(scripts.FINISH_SESSION, keys, now_ms, _SESSION_TTL_MS))

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]:
        calls = [self._line.call("HMGET", self._keys.session(name), "seen", "finished") for name in session_ids]
        return [
            SessionInfo(schema.session_state(seen, finished), int(seen or 0))
            for seen, finished in await asyncio.gather(*calls)
        ]

    async def sessions_of(self, owner_tag: str) -> list[str]:
        found = await self._line.call("SMEMBERS", self._keys.sessions_of(owner_tag))
        return [name.decode() for name in found]

    async def enter_session(self, owner_tag: str, session_id: str) -> None:
        name = self._keys.sessions_of(owner_tag)
        await self._line.call("SADD", name, session_id)
        self._line.post("PEXPIRE", name, _SESSION_TTL_MS)

    async def drop_sessions(self, owner_tag: str, session_ids: Sequence[str]) -> None:
        if session_ids:
            await self._line.call("SREM", self._keys.sessions_of(owner_tag), *session_ids)

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        name = self._keys.clones(session_key)
        added = await self._line.call("SADD", name, clone_id)
        self._line.post("PEXPIRE", name, _SESSION_TTL_MS)
        return bool(added)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def watch_lease(self, owner: str) -> LeaseView:
        held, age_s = await self._line.run(scripts.WATCH_LEASE, [self._keys.lease(owner)])
        return LeaseView(bool(held), float(age_s))

    async def note_refill(self, owner: str, *, window_s: float) -> None:
        await self._line.run(scripts.NOTE_REFILL, [self._keys.refills], owner, schema.ms(window_s))

    async def refill_left_s(self) -> float:
        left_ms: int = await self._line.run(scripts.REFILL_LEFT, [self._keys.refills])
        return left_ms / 1000

    async def server_run(self) -> bytes:
        run_id: bytes = await self._line.run(scripts.SERVER_RUN, [self._keys.roll])
        return run_id

    async def answer_roll(self, owner: str, run: bytes) -> bool:
        return bool(await self._line.run(scripts.ANSWER_ROLL, [self._keys.roll], owner, run, _ROLL_TTL_MS))

    async def read_roll(self) -> Roll:
        found = await self._line.run(scripts.READ_ROLL, [self._keys.roll], _ROLL_TTL_MS)
        return Roll(*(frozenset(owner.decode() for owner in owners) for owners in found))

    async def leave_roll(self, owner: str) -> None:
        await self._line.run(scripts.LEAVE_ROLL, [self._keys.roll], owner, _ROLL_TTL_MS)

    # -- messages between workers -------------------------------------------------------------------------------

    async def send_control(self, owner: str, message: bytes) -> None:
        keys = [self._keys.inbox(owner)]
        channel = self._keys.control(owner)
        await self._line.run(scripts.SEND_CONTROL, keys, channel, message, _INBOX_TTL_MS, self._publish)

    async def take_inbox(self, owner: str) -> list[bytes]:
        found = await self._line.call("LPOP", self._keys.inbox(owner), "1000")
        return list(found or ())

    async def broadcast(self, message: bytes) -> None:
        await self._line.call(self._publish, self._keys.control_all, message)

    # -- what the workers agree on ------------------------------------------------------------------------------

    async def read_upstreams(self) -> UpstreamList | None:
        data = await self._line.call("GET", self._keys.upstreams)
        return schema.upstreams(data) if data is not None else None

    async def offer_upstreams(self, offered: UpstreamList) -> UpstreamList:
        data = upstream_list.pack(offered)
        return schema.upstreams(await self._line.run(scripts.OFFER_UPSTREAMS, [self._keys.upstreams], data))

    async def take_lock(self, name: str, holder: str, *, ttl_s: float) -> bool:
        return bool(await self._line.run(scripts.TAKE_LOCK, [self._keys.lock(name)], holder, schema.ms(ttl_s)))

    async def release_lock(self, name: str, holder: str) -> None:
        await self._line.run(scripts.RELEASE_LOCK, [self._keys.lock(name)], holder)

    def _epoch(self) -> int:
        # A fifth of what `randrange` takes.
        return 1 + int(self._rng.random() * (_EPOCHS - 1))
