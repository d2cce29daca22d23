"""The steps of a store that are the same on one server and on a cluster: those that touch a single key."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Final

from shared.clock import SystemClock
from shared.core import upstream_list
from shared.core.errors import StoreRefused
from shared.core.lifecycle import TRANSITIONS
from shared.core.record import (
    ACKNOWLEDGED,
    HANDED_OVER,
    HEADER_BYTES,
    PAUSED,
    UNDELIVERED,
    BadRecord,
    unpack,
    unpack_header,
)
from shared.core.roll_call import Roll
from shared.redis.link import COMMAND_DEADLINE_S
from shared.store import instance_scripts, schema, scripts
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
    from shared.redis.cluster_commands import ClusterCommands
    from shared.redis.commands import Commands, Script
    from shared.redis.connection import Argument

# A value of this size or more travels on the second connection: it takes both sides a millisecond.
BULK_FROM_BYTES: Final = 256 * 1024
# What a reader asks for before it knows the size of a record: all of a small result, and little of a large one. That is
# then read whole and not continued, since the record may change between two reads.
_FIRST_LOOK_BYTES: Final = 32 * 1024
_EPOCHS: Final = 2**21
# Renewed by every read; it ends some time after the gateway has stopped.
_ROLL_TTL_MS: Final = 24 * 3600 * 1000
# Four leases of the default length: longer than any worker goes without looking into its inbox.
_INBOX_TTL_MS: Final = 120_000


class AnyServerStore:
    """The shared part of the stores on Redis. A subclass makes the connections and adds the steps of several keys."""

    # The command that publishes a message.
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
        session_ttl_s: float = 3900.0,
        transitions: Transitions = TRANSITIONS,
    ) -> None:
        """Prepare a store without connecting. Raises `ConfigError` for a URL that is invalid or of another kind."""
        self._keys = Keys(key_prefix)
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        self._deadline_s = deadline_s
        self._session_ttl_ms = schema.ms(session_ttl_s)
        self._transitions = transitions
        self._start_clock = scripts.start_clock(transitions)
        self._announcements = Announcements(self._keys, self._publish, linger_s)
        self._commands, self._bulk = self._make_commands(url)

    def _make_commands(self, url: str) -> tuple[Commands | ClusterCommands, Commands | ClusterCommands]:
        """Return where commands go, and where those with large values go."""
        raise NotImplementedError

    # -- samples ------------------------------------------------------------------------------------------------

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        attempt = claim.attempt.to_bytes(2, "big")
        mark = PAUSED if paused else UNDELIVERED
        self._commands.post_script(scripts.MARK_PAUSED, [self._keys.sample(key)], claim.owner, attempt, mark)

    async def limit_bytes(self, key: SampleKey) -> int:
        return int(await self._commands.run(scripts.LIMIT_BYTES, [self._keys.sample(key)]))

    async def read(self, key: SampleKey) -> Record | None:
        name = self._keys.sample(key)
        data = await self._first_bytes(name, _FIRST_LOOK_BYTES)
        if len(data) == _FIRST_LOOK_BYTES:
            data = await self._bulk.call("GET", name)
        return unpack(data) if data else None

    async def read_header(self, key: SampleKey) -> Header | None:
        try:
            data = await self._first_bytes(self._keys.sample(key), HEADER_BYTES)
            return unpack_header(data) if data else None
        except BadRecord:
            return None

    async def _first_bytes(self, name: str, size_bytes: int) -> bytes:
        """Return the start of a record. Raises `BadRecord` if the key holds another type."""
        try:
            data: bytes = await self._commands.call("GETRANGE", name, "0", str(size_bytes - 1))
        except StoreRefused as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise BadRecord("not a sample record: a key of another type") from None
        return data

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._sum(self._start_clock, keys, schema.ms(ttl_s), HANDED_OVER)

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._sum(self._start_clock, keys, schema.ms(ttl_s), ACKNOWLEDGED)

    async def unread(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        raise NotImplementedError

    async def _sum(self, script: Script, keys: Sequence[SampleKey], *arguments: Argument) -> int:
        """Run a script on the records of all `keys` and return the sum of its replies."""
        raise NotImplementedError

    # -- completion logs and waking -----------------------------------------------------------------------------

    def announce(self, session_key: str, seq_id: int) -> None:
        self._announcements.announce(session_key, seq_id)

    async def watch(self, session_key: str) -> None:
        await self._announcements.watch(session_key)

    def unwatch(self, session_key: str) -> None:
        self._announcements.unwatch(session_key)

    # -- sessions -----------------------------------------------------------------------------------------------

    async def touch_session(self, session_id: str, now_ms: int, *, needs_room: bool = False) -> SessionInfo:
        script = scripts.TOUCH_SESSION_IF_ROOM if needs_room else scripts.TOUCH_SESSION
        found = await self._commands.run(script, [self._keys.session(session_id)], now_ms, self._session_ttl_ms)
        seen_before, finished, seen = found
        return SessionInfo(schema.session_state(seen_before, finished), int(seen))

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        keys = [self._keys.session(session_id)]
        return bool(await self._commands.run(scripts.FINISH_SESSION, keys, now_ms, self._session_ttl_ms))

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]:
        calls = [self._commands.call("HMGET", self._keys.session(name), "seen", "finished") for name in session_ids]
        return [
            SessionInfo(schema.session_state(seen, finished), int(seen or 0))
            for seen, finished in await asyncio.gather(*calls)
        ]

    async def sessions_of(self, owner_tag: str) -> list[str]:
        found = await self._commands.call("SMEMBERS", self._keys.sessions_of(owner_tag))
        return [name.decode() for name in found]

    async def enter_session(self, owner_tag: str, session_id: str) -> None:
        name = self._keys.sessions_of(owner_tag)
        await self._commands.call("SADD", name, session_id)
        self._commands.post("PEXPIRE", name, self._session_ttl_ms)

    async def drop_sessions(self, owner_tag: str, session_ids: Sequence[str]) -> None:
        if session_ids:
            await self._commands.call("SREM", self._keys.sessions_of(owner_tag), *session_ids)

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        name = self._keys.clones(session_key)
        added = await self._commands.call("SADD", name, clone_id)
        self._commands.post("PEXPIRE", name, self._session_ttl_ms)
        return bool(added)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def watch_lease(self, owner: str) -> LeaseView:
        held, age_s = await self._commands.run(instance_scripts.WATCH_LEASE, [self._keys.lease(owner)])
        return LeaseView(bool(held), float(age_s))

    async def note_refill(self, owner: str, *, window_s: float) -> None:
        await self._commands.run(instance_scripts.NOTE_REFILL, [self._keys.refills], owner, schema.ms(window_s))

    async def refill_left_s(self) -> float:
        left_ms: int = await self._commands.run(instance_scripts.REFILL_LEFT, [self._keys.refills])
        return left_ms / 1000

    async def server_run(self) -> bytes:
        run_id: bytes = await self._commands.run(instance_scripts.SERVER_RUN, [self._keys.roll])
        return run_id

    async def answer_roll(self, owner: str, run: bytes) -> bool:
        return bool(await self._commands.run(instance_scripts.ANSWER_ROLL, [self._keys.roll], owner, run, _ROLL_TTL_MS))

    async def read_roll(self) -> Roll:
        found = await self._commands.run(instance_scripts.READ_ROLL, [self._keys.roll], _ROLL_TTL_MS)
        return Roll(*(frozenset(owner.decode() for owner in owners) for owners in found))

    async def leave_roll(self, owner: str) -> None:
        await self._commands.run(instance_scripts.LEAVE_ROLL, [self._keys.roll], owner, _ROLL_TTL_MS)

    async def report_unfetched(self, owner: str, report: bytes, *, ttl_s: float) -> list[bytes]:
        keys = [self._keys.unfetched]
        return list(await self._commands.run(instance_scripts.REPORT_UNFETCHED, keys, owner, report, schema.ms(ttl_s)))

    # -- messages between workers -------------------------------------------------------------------------------

    async def send_control(self, owner: str, message: bytes) -> None:
        keys = [self._keys.inbox(owner)]
        channel = self._keys.control(owner)
        await self._commands.run(scripts.SEND_CONTROL, keys, channel, message, _INBOX_TTL_MS, self._publish)

    async def take_inbox(self, owner: str) -> list[bytes]:
        found = await self._commands.call("LPOP", self._keys.inbox(owner), "1000")
        return list(found or ())

    async def broadcast(self, message: bytes) -> None:
        await self._commands.call(self._publish, self._keys.control_all, message)

    # -- what the workers agree on ------------------------------------------------------------------------------

    async def read_upstreams(self) -> UpstreamList | None:
        data = await self._commands.call("GET", self._keys.upstreams)
        return upstream_list.unpack(data) if data is not None else None

    async def offer_upstreams(self, offered: UpstreamList) -> UpstreamList:
        data = upstream_list.pack(offered)
        return upstream_list.unpack(await self._commands.run(scripts.OFFER_UPSTREAMS, [self._keys.upstreams], data))

    async def take_lock(self, name: str, holder: str, *, ttl_s: float) -> bool:
        return bool(await self._commands.run(scripts.TAKE_LOCK, [self._keys.lock(name)], holder, schema.ms(ttl_s)))

    async def release_lock(self, name: str, holder: str) -> None:
        await self._commands.run(scripts.RELEASE_LOCK, [self._keys.lock(name)], holder)

    def _epoch(self) -> int:
        # This takes a fifth of the time of `randrange`.
        return 1 + int(self._rng.random() * (_EPOCHS - 1))
