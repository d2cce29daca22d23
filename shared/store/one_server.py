"""The store on one Redis or Valkey server. `contract.py` says what it promises, `scripts.py` has the atomic steps.

A worker has three connections, however many samples are in flight: for commands, for large values (so that a result of
megabytes does not delay the small ones behind it), and for subscriptions. Where sentinels name the server, each
connection asks them. A master that takes over has another run id, so a failover looks like a restart: what was not yet
replicated is gone, and the workers refill it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Final

from shared.core.errors import ConfigError, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import pack, unpack_header
from shared.redis.address import RedisAddress, SentinelAddress, parse_url
from shared.redis.commands import Commands, Subscriptions
from shared.redis.link import Link
from shared.redis.login import Sentinels
from shared.store import instance_scripts, schema, scripts
from shared.store.any_server import BULK_FROM_BYTES, AnyServerStore
from shared.store.contract import Settled
from shared.store.schema import key_of, member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header
    from shared.redis.commands import Script
    from shared.redis.connection import Argument, RedisConnection
    from shared.redis.link import Server
    from shared.store.contract import LogPage, StoreInfo, StoreListener

_BATCH: Final = 500
SETTLED: Final = (Settled.WRITTEN, Settled.REPEATED, Settled.REFUSED, Settled.RESTORED)


class RedisStore(AnyServerStore):
    """The store on one server, whose URL may name sentinels."""

    _commands: Commands
    _bulk: Commands

    def _make_commands(self, url: str) -> tuple[Commands, Commands]:
        self._begin = scripts.begin(self._transitions)
        self._settle = scripts.settle(self._transitions)
        self._settle_when_full = scripts.settle(self._transitions, scripts.EVEN_WHEN_FULL)
        self._reap = scripts.reap(self._transitions)
        address = parse_url(url)
        match address:
            case SentinelAddress():
                self._server: Server = Sentinels(address)
            case RedisAddress():
                self._server = address
            case _:
                raise ConfigError("--redis-url: redis+cluster:// needs the cluster's store")
        self._link = self._make_link("commands")
        self._bulk_link = self._make_link("bulk")
        self._subscriptions = Subscriptions(self._announcements.on_message, self._announcements.on_gap)
        self._push_link = self._make_link("push", self._subscriptions)
        return Commands(self._link), Commands(self._bulk_link)

    def __repr__(self) -> str:
        return f"<RedisStore {self._server.shown} {self._link.connection}>"

    def _make_link(self, purpose: str, subscriptions: Subscriptions | None = None) -> Link:
        def on_up(connection: RedisConnection) -> None:
            # Cut connections to another server: what a new master announces does not arrive on the old one.
            for link in (self._link, self._bulk_link, self._push_link):
                other = link.connection
                if other is not None and other.run_id != connection.run_id:
                    other.cut("another server is the master now")
            if subscriptions is not None:
                subscriptions.on_up(connection)

        return Link(
            self._server,
            f"gateway-{purpose}",
            clock=self._clock,
            rng_unit=self._rng.random,
            deadline_s=self._deadline_s,
            on_up=on_up,
            on_push=subscriptions.on_push if subscriptions is not None else None,
        )

    @property
    def commands(self) -> int:
        return self._commands.sent + self._bulk.sent

    @property
    def connected_since_s(self) -> float | None:
        return self._link.connected_since_s

    @property
    def restarted_s(self) -> float | None:
        return self._link.restarted_s

    async def open(self, listener: StoreListener, owner: str) -> None:
        await self._link.open()
        info = schema.parse_info(await self._commands.call("INFO", "server"))
        schema.check_version(info, self._server.shown)
        if schema.store_info(info).mode == "cluster":
            raise StoreRefused(f"Redis at {self._server.shown} is a node of a cluster; use redis+cluster://")
        await self._bulk_link.open()
        await self._push_link.open()
        await self._announcements.open(listener, owner, self._subscriptions, self._commands)

    async def close(self) -> None:
        await self._announcements.close()
        for link in (self._push_link, self._bulk_link, self._link):
            await link.close()

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        keys, name = [self._keys.sample(key), self._keys.open_set(claim.owner)], member(key)
        found = await self._commands.run(self._begin, keys, pack(State.PENDING, claim), name)
        return unpack_header(found) if found else None

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        log = self._keys.log(key.session_key, key.clone_id)
        keys = [self._keys.sample(key), self._keys.open_set(claim.owner), log]
        name, entry = member(key), schema.log_entry(key, state, len(payload), now_ms)
        ttl_ms, epoch, record = schema.ms(ttl_s), self._epoch(), pack(state, claim, payload)
        commands = self._bulk if len(payload) >= BULK_FROM_BYTES else self._commands
        script = self._settle if state is State.READY else self._settle_when_full
        return SETTLED[await commands.run(script, keys, record, ttl_ms, name, entry, epoch)]

    async def _sum(self, script: Script, keys: Sequence[SampleKey], *arguments: Argument) -> int:
        total = 0
        for first in range(0, len(keys), _BATCH):
            names = [self._keys.sample(key) for key in keys[first : first + _BATCH]]
            total += await self._commands.run(script, names, *arguments)
        return total

    async def unread(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        found: list[SampleKey] = []
        for first in range(0, len(keys), _BATCH):
            batch = keys[first : first + _BATCH]
            flags = await self._commands.run(scripts.ARE_UNREAD, [self._keys.sample(key) for key in batch])
            found += compress(batch, flags)
        return found

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        connection = self._link.connection
        run = schema.run_number(connection.run_id) if connection is not None else 0
        epoch, n = divmod(cursor, 2**schema.SEQ_BITS)
        name = self._keys.log(session_key, clone_id)
        reply = await self._commands.run(scripts.READ_LOG, [name], epoch ^ run, n, limit)
        if self._link.connection is not connection:
            # The script had to be loaded, and another server than the first may have answered.
            raise StoreUnavailable("the connection was lost", maybe_done=False)
        return schema.log_page(reply, cursor, run)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        keys = [self._keys.lease(owner), self._keys.instances]
        return bool(await self._commands.run(instance_scripts.RENEW_LEASE, keys, owner, schema.ms(ttl_s)))

    async def release_lease(self, owner: str) -> None:
        keys = [self._keys.lease(owner), self._keys.instances, self._keys.open_set(owner)]
        await self._commands.run(instance_scripts.RELEASE_LEASE, keys, owner)

    async def lapsed_owners(self) -> list[str]:
        before, _, after = self._keys.lease("*").partition("*")
        found = await self._commands.run(instance_scripts.LAPSED_OWNERS, [self._keys.instances], before, after)
        return [owner.decode() for owner in found]

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        ttl_ms = schema.ms(ttl_s)
        keys = [self._keys.open_set(owner), self._keys.instances, self._keys.lease(owner)]
        while True:
            left, *members = await self._commands.run(
                self._reap, keys, self._keys.prefix, owner, ttl_ms, now_ms, self._epoch(), limit
            )
            # A batch may hold only entries that were not the owner's: go on with the next.
            if members or not left:
                return [key_of(name.decode()) for name in members]

    # -- the rest -----------------------------------------------------------------------------------------------

    async def info(self) -> StoreInfo:
        info = schema.store_info(schema.parse_info(await self._commands.call("INFO", *schema.INFO_SECTIONS)))
        return replace(info, mode="sentinel") if isinstance(self._server, Sentinels) else info
