"""The store on one Redis or Valkey server. See `base.py` for the contract, `scripts.py` for the atomic steps.

Three connections a worker, however many samples are in flight: commands, large values (so that a result of megabytes
does not hold up the small ones behind it), and subscriptions.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Final

from shared.clock import SystemClock
from shared.core.lifecycle import State
from shared.core.record import (
    ACKNOWLEDGED,
    HANDED_OVER,
    HEADER_BYTES,
    PAUSED,
    UNDELIVERED,
    BadRecord,
    pack,
    pack_header,
    unpack,
    unpack_header,
)
from shared.store import scripts
from shared.store.base import (
    LogEntry,
    LogPage,
    SessionInfo,
    SessionState,
    Settled,
    StoreInfo,
    StoreRefused,
)
from shared.store.keys import Keys, key_of, member
from shared.store.lines import CommandLine, Subscriptions
from shared.store.link import COMMAND_DEADLINE_S, Link
from shared.store.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header, Record
    from shared.store.base import StoreListener

# A value from here on travels on the second connection: it is a millisecond of both sides' time.
BULK_FROM_BYTES: Final = 256 * 1024
_BATCH: Final = 500
_EPOCHS: Final = 2**21
_SEQ_BITS: Final = 32
# A poll that comes back at once finds its subscription still there.
_LINGER_S: Final = 5.0
_SESSION_TTL_MS: Final = 24 * 3600 * 1000
# Four leases of the default length: longer than any worker goes without looking into its inbox.
_INBOX_TTL_MS: Final = 120_000
_OLDEST_REDIS: Final = (7, 0)
_SETTLED: Final = (Settled.WRITTEN, Settled.REPEATED, Settled.REFUSED)
_FINISHED: Final = "F"
_FAILED: Final = "X"


class RedisStore:
    def __init__(
        self,
        url: str,
        key_prefix: str = "gw",
        *,
        clock: Clock | None = None,
        rng: Random | None = None,
        deadline_s: float = COMMAND_DEADLINE_S,
        linger_s: float = _LINGER_S,
    ) -> None:
        """Raises `ConfigError` for a URL that is none."""
        self._address = parse_url(url)
        self._keys = Keys(key_prefix)
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        self._deadline_s = deadline_s
        self._linger_s = linger_s
        self._listener: StoreListener | None = None
        self._subscriptions = Subscriptions(self._on_message, self._on_gap)
        self._link = self._make_link("commands")
        self._bulk_link = self._make_link("bulk")
        self._push_link = self._make_link("push")
        self._line = CommandLine(self._link)
        self._bulk = CommandLine(self._bulk_link)
        self._announcements: defaultdict[str, list[int]] = defaultdict(list)
        self._watched: defaultdict[str, int] = defaultdict(int)
        self._lingering: dict[str, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<RedisStore {self._address.shown} {self._link.connection}>"

    def _make_link(self, purpose: str) -> Link:
        push = self._subscriptions if purpose == "push" else None
        return Link(
            self._address,
            f"gateway-{purpose}",
            clock=self._clock,
            rng_unit=self._rng.random,
            deadline_s=self._deadline_s,
            on_up=push.on_up if push else None,
            on_push=push.on_push if push else None,
        )

    @property
    def commands(self) -> int:
        """How many commands were sent; a script counts as one."""
        return self._line.commands + self._bulk.commands

    @property
    def connected_since_s(self) -> float | None:
        return self._link.connected_since_s

    @property
    def restarted_s(self) -> float | None:
        return self._link.restarted_s

    async def open(self, listener: StoreListener, owner: str) -> None:
        self._listener = listener
        await self._link.open()
        await self._check_version()
        await self._bulk_link.open()
        await self._push_link.open()
        await self._subscriptions.subscribe(self._keys.control(owner))
        await self._subscriptions.subscribe(self._keys.control_all)

    async def close(self) -> None:
        for timer in self._lingering.values():
            timer.cancel()
        self._lingering.clear()
        # One turn more for announcements that are on their way out.
        await asyncio.sleep(0)
        for link in (self._push_link, self._bulk_link, self._link):
            await link.close()

    async def _check_version(self) -> None:
        info = _parse_info(await self._line.call("INFO", "server"))
        version = info.get("redis_version", "")
        if "valkey_version" in info or _version(version) >= _OLDEST_REDIS:
            return
        raise StoreRefused(f"Redis at {self._address.shown} is version {version}; 7.0 or newer, or Valkey, is needed")

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        keys = [self._keys.sample(key), self._keys.open_set(claim.owner)]
        header = pack_header(State.PENDING, claim)
        found = await self._line.run(scripts.BEGIN, keys, member(key), header, claim.owner)
        return _header(found) if found is not None else None

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        ttl_ms = _ms(ttl_s)
        line = self._bulk if len(payload) >= BULK_FROM_BYTES else self._line
        code = await line.run(
            scripts.SETTLE,
            [self._keys.sample(key), self._keys.open_set(claim.owner), self._keys.log(key.session_key, key.clone_id)],
            member(key),
            claim.owner,
            claim.attempt.to_bytes(2, "big"),
            pack(state, claim, payload),
            ttl_ms,
            _entry(key, state, len(payload)),
            self._epoch(),
            now_ms,
            now_ms - ttl_ms,
        )
        return _SETTLED[code]

    async def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        attempt = claim.attempt.to_bytes(2, "big")
        mark = PAUSED if paused else UNDELIVERED
        await self._line.run(scripts.MARK_PAUSED, [self._keys.sample(key)], claim.owner, attempt, mark)

    async def read(self, key: SampleKey) -> Record | None:
        name = self._keys.sample(key)
        data = await self._line.call("GETRANGE", name, "0", str(BULK_FROM_BYTES - 1))
        if len(data) == BULK_FROM_BYTES:
            data = await self._bulk.call("GET", name)
        if not data:
            return None
        try:
            return unpack(data)
        except BadRecord as error:
            raise StoreRefused(str(error)) from error

    async def read_header(self, key: SampleKey) -> Header | None:
        data = await self._line.call("GETRANGE", self._keys.sample(key), "0", str(HEADER_BYTES - 1))
        return _header(data) if data else None

    async def mark_retrieved(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._start_clocks(keys, ttl_s, HANDED_OVER)

    async def acknowledge(self, keys: Sequence[SampleKey], *, ttl_s: float) -> int:
        return await self._start_clocks(keys, ttl_s, ACKNOWLEDGED)

    async def count_unread(self, keys: Sequence[SampleKey]) -> int:
        counts = [
            await self._line.run(scripts.COUNT_UNREAD, self._keys.samples(keys[first : first + _BATCH]))
            for first in range(0, len(keys), _BATCH)
        ]
        return sum(counts)

    async def _start_clocks(self, keys: Sequence[SampleKey], ttl_s: float, clock: bytes) -> int:
        started = 0
        for first in range(0, len(keys), _BATCH):
            names = self._keys.samples(keys[first : first + _BATCH])
            started += await self._line.run(scripts.START_CLOCK, names, _ms(ttl_s), clock)
        return started

    # -- completion logs and waking -----------------------------------------------------------------------------

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        epoch, n = divmod(cursor, 2**_SEQ_BITS)
        name = self._keys.log(session_key, clone_id)
        reply = await self._line.run(scripts.READ_LOG, [name], epoch, n, limit)
        if not reply:
            return LogPage([], 0)
        known, flat = reply
        if not flat:
            return LogPage([], cursor if known == b"1" else 0)
        entries = [_parse_entry(entry) for entry in flat[1::2]]
        return LogPage(entries, _cursor(flat[-2]))

    def announce(self, session_key: str, seq_id: int) -> None:
        if not self._announcements:
            asyncio.get_running_loop().call_soon(self._publish)
        self._announcements[session_key].append(seq_id)

    def _publish(self) -> None:
        announcements, self._announcements = self._announcements, defaultdict(list)
        for session_key, seq_ids in announcements.items():
            message = struct.pack(f">{len(seq_ids)}q", *seq_ids)
            self._line.post("PUBLISH", self._keys.announcement(session_key), message)

    async def watch(self, session_key: str) -> None:
        self._watched[session_key] += 1
        timer = self._lingering.pop(session_key, None)
        if timer is not None:
            timer.cancel()
        try:
            await self._subscriptions.subscribe(self._keys.announcement(session_key))
        except BaseException:
            self.unwatch(session_key)
            raise

    def unwatch(self, session_key: str) -> None:
        self._watched[session_key] -= 1
        if self._watched[session_key] > 0:
            return
        del self._watched[session_key]
        loop = asyncio.get_running_loop()
        self._lingering[session_key] = loop.call_later(self._linger_s, self._forget, session_key)

    def _forget(self, session_key: str) -> None:
        self._lingering.pop(session_key, None)
        self._subscriptions.unsubscribe(self._keys.announcement(session_key))

    def _on_message(self, channel: bytes, message: bytes) -> None:
        listener = self._listener
        if listener is None:
            return
        name = channel.decode()
        if name.startswith(self._keys.announcements):
            session_key = name[len(self._keys.announcements) :]
            listener.on_announcement(session_key, struct.unpack(f">{len(message) // 8}q", message))
        else:
            listener.on_control(message)

    def _on_gap(self) -> None:
        if self._listener is not None:
            self._listener.on_gap()

    # -- sessions -----------------------------------------------------------------------------------------------

    async def touch_session(self, session_id: str, now_ms: int) -> SessionInfo:
        found = await self._line.run(scripts.TOUCH_SESSION, [self._keys.session(session_id)], now_ms, _SESSION_TTL_MS)
        seen_before, finished, seen = found
        return SessionInfo(_session_state(seen_before, finished), int(seen))

    async def finish_session(self, session_id: str, now_ms: int) -> bool:
        keys = [self._keys.session(session_id)]
        return bool(await self._line.run(scripts.FINISH_SESSION, keys, now_ms, _SESSION_TTL_MS))

    async def session_infos(self, session_ids: Sequence[str]) -> list[SessionInfo]:
        calls = [self._line.call("HMGET", self._keys.session(name), "seen", "finished") for name in session_ids]
        return [
            SessionInfo(_session_state(seen, finished), int(seen or 0))
            for seen, finished in await asyncio.gather(*calls)
        ]

    async def reserve_clone(self, session_key: str, clone_id: int) -> bool:
        name = self._keys.clones(session_key)
        added = await self._line.call("SADD", name, clone_id)
        self._line.post("PEXPIRE", name, _SESSION_TTL_MS)
        return bool(added)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        keys = [self._keys.lease(owner), self._keys.instances]
        return bool(await self._line.run(scripts.RENEW_LEASE, keys, owner, _ms(ttl_s)))

    async def release_lease(self, owner: str) -> None:
        keys = [self._keys.lease(owner), self._keys.instances, self._keys.open_set(owner)]
        await self._line.run(scripts.RELEASE_LEASE, keys, owner)

    async def lapsed_owners(self) -> list[str]:
        found = await self._line.run(scripts.LAPSED_OWNERS, [self._keys.instances], self._keys.leases)
        return [owner.decode() for owner in found]

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        ttl_ms = _ms(ttl_s)
        keys = [self._keys.open_set(owner), self._keys.instances, self._keys.lease(owner)]
        while True:
            left, *members = await self._line.run(
                scripts.REAP, keys, self._keys.prefix, owner, ttl_ms, now_ms, now_ms - ttl_ms, self._epoch(), limit
            )
            # A batch of nothing but entries that were not the owner's is no reason to stop.
            if members or not left:
                return [key_of(name.decode()) for name in members]

    # -- messages between workers -------------------------------------------------------------------------------

    async def send_control(self, owner: str, message: bytes) -> None:
        keys = [self._keys.inbox(owner)]
        await self._line.run(scripts.SEND_CONTROL, keys, self._keys.control(owner), message, _INBOX_TTL_MS)

    async def take_inbox(self, owner: str) -> list[bytes]:
        found = await self._line.call("LPOP", self._keys.inbox(owner), "1000")
        return list(found or ())

    async def broadcast(self, message: bytes) -> None:
        await self._line.call("PUBLISH", self._keys.control_all, message)

    # -- the rest -----------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        await self._line.call("PING")

    async def info(self) -> StoreInfo:
        info = _parse_info(await self._line.call("INFO", "everything"))
        product = "Valkey" if "valkey_version" in info else "Redis"
        return StoreInfo(
            mode=info.get("server_mode", info.get("redis_mode", "standalone")),
            version=f"{product} {info.get('valkey_version', info.get('redis_version', '?'))}",
            used_bytes=int(info.get("used_memory", 0)),
            max_bytes=int(info.get("maxmemory", 0)),
            policy=info.get("maxmemory_policy", ""),
        )

    def _epoch(self) -> int:
        return self._rng.randrange(1, _EPOCHS)


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)


def _header(data: bytes) -> Header:
    try:
        return unpack_header(data)
    except BadRecord as error:
        raise StoreRefused(str(error)) from error


def _entry(key: SampleKey, state: State, size_bytes: int) -> str:
    if state is State.READY:
        return f"{_FINISHED} {key.seq_id} {size_bytes}"
    return f"{_FAILED} {key.seq_id} 0"


def _parse_entry(data: bytes) -> LogEntry:
    kind, seq_id, size_bytes = data.decode().split(" ")
    return LogEntry(int(seq_id), kind == _FINISHED, int(size_bytes))


def _cursor(stream_id: bytes) -> int:
    """The cursor after an entry: n counts from 1, so that 0 means "from the start"."""
    epoch, n = stream_id.decode().split("-")
    return (int(epoch) << _SEQ_BITS) + int(n) + 1


def _session_state(seen: bytes | None, finished: bytes | None) -> SessionState:
    if finished:
        return SessionState.FINISHED
    return SessionState.ALIVE if seen else SessionState.UNKNOWN


def _parse_info(data: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in data.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
