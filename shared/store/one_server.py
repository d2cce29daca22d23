"""The store on one Redis or Valkey server. See `base.py` for the contract, `scripts.py` for the atomic steps.

Three connections a worker, however many samples are in flight: commands, large values (so that a result of megabytes
does not hold up the small ones behind it), and subscriptions. Where sentinels name the server, each connection asks
them; a master that takes over has a run id of its own, which is how a failover shows as a restart: what was not yet
replicated is gone, and the workers refill it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shared.core.errors import ConfigError, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import pack, pack_header
from shared.redis.address import RedisAddress, SentinelAddress, parse_url
from shared.redis.commands import Commands, Subscriptions
from shared.redis.link import Link
from shared.redis.login import Sentinels
from shared.store import schema, scripts
from shared.store.any_server import BULK_FROM_BYTES, ServedStore
from shared.store.contract import Settled
from shared.store.schema import key_of, member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header
    from shared.redis.commands import Script
    from shared.redis.connection import Argument, Connection
    from shared.redis.link import Server
    from shared.store.contract import LogPage, StoreInfo, StoreListener

_BATCH: Final = 500
SETTLED: Final = (Settled.WRITTEN, Settled.REPEATED, Settled.REFUSED, Settled.RESTORED)


class RedisStore(ServedStore):
    _line: Commands
    _bulk: Commands

    def _lines(self, url: str) -> tuple[Commands, Commands]:
        self._begin = scripts.begin(self._transitions)
        self._settle = scripts.settle(self._transitions)
        self._settle_when_full = scripts.settle(self._transitions, scripts.EVEN_WHEN_FULL)
        self._reap = scripts.reap(self._transitions)
        self._place = _place(url)
        self._link = self._make_link("commands")
        self._bulk_link = self._make_link("bulk")
        self._subscriptions = Subscriptions(self._wakes.on_message, self._wakes.on_gap)
        self._push_link = self._make_link("push", self._subscriptions)
        return Commands(self._link), Commands(self._bulk_link)

    def __repr__(self) -> str:
        return f"<RedisStore {self._place.shown} {self._link.connection}>"

    def _make_link(self, purpose: str, subscriptions: Subscriptions | None = None) -> Link:
        def on_up(connection: Connection) -> None:
            self._leave_others(connection)
            if subscriptions is not None:
                subscriptions.on_up(connection)

        return Link(
            self._place,
            f"gateway-{purpose}",
            clock=self._clock,
            rng_unit=self._rng.random,
            deadline_s=self._deadline_s,
            on_up=on_up,
            on_push=subscriptions.on_push if subscriptions is not None else None,
        )

    def _leave_others(self, connection: Connection) -> None:
        """All lines lead to one server: announcements made on a new master are not heard on the old one."""
        for link in (self._link, self._bulk_link, self._push_link):
            other = link.connection
            if other is not None and other.run_id != connection.run_id:
                other.cut("another server is the master now")

    @property
    def connected_since_s(self) -> float | None:
        return self._link.connected_since_s

    @property
    def restarted_s(self) -> float | None:
        return self._link.restarted_s

    async def open(self, listener: StoreListener, owner: str) -> None:
        self._wakes.listen(listener, self._subscriptions)
        await self._link.open()
        info = schema.parse_info(await self._line.call("INFO", "server"))
        schema.check_version(info, self._place.shown)
        if schema.store_info(info).mode == "cluster":
            raise StoreRefused(f"Redis at {self._place.shown} is a node of a cluster; use redis+cluster://")
        await self._bulk_link.open()
        await self._push_link.open()
        await self._wakes.hear_control(owner)

    async def close(self) -> None:
        await self._wakes.close()
        for link in (self._push_link, self._bulk_link, self._link):
            await link.close()

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        keys = [self._keys.sample(key), self._keys.open_set(claim.owner)]
        found = await self._line.run(self._begin, keys, pack_header(State.PENDING, claim), member(key))
        return schema.header_of(found) if found else None

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        commands = self._bulk if len(payload) >= BULK_FROM_BYTES else self._line
        code = await commands.run(
            self._settle if state is State.READY else self._settle_when_full,
            [self._keys.sample(key), self._keys.open_set(claim.owner), self._keys.log(key.session_key, key.clone_id)],
            pack(state, claim, payload),
            schema.ms(ttl_s),
            member(key),
            schema.log_entry(key, state, len(payload), now_ms),
            self._epoch(),
        )
        return SETTLED[code]

    async def _sum(self, script: Script, keys: Sequence[SampleKey], *arguments: Argument) -> int:
        total = 0
        for first in range(0, len(keys), _BATCH):
            total += await self._line.run(script, self._keys.samples(keys[first : first + _BATCH]), *arguments)
        return total

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        connection = self._link.connection
        run = schema.run_number(connection.run_id) if connection is not None else 0
        epoch, n = divmod(cursor, 2**schema.SEQ_BITS)
        name = self._keys.log(session_key, clone_id)
        reply = await self._line.run(scripts.READ_LOG, [name], epoch ^ run, n, limit)
        if self._link.connection is not connection:
            # A script that had to be taught may have been answered by another server than the first.
            raise StoreUnavailable("the connection was lost", maybe_done=False)
        return schema.log_page(reply, cursor, run)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        keys = [self._keys.lease(owner), self._keys.instances]
        return bool(await self._line.run(scripts.RENEW_LEASE, keys, owner, schema.ms(ttl_s)))

    async def release_lease(self, owner: str) -> None:
        keys = [self._keys.lease(owner), self._keys.instances, self._keys.open_set(owner)]
        await self._line.run(scripts.RELEASE_LEASE, keys, owner)

    async def lapsed_owners(self) -> list[str]:
        before, _, after = self._keys.lease("*").partition("*")
        found = await self._line.run(scripts.LAPSED_OWNERS, [self._keys.instances], before, after)
        return [owner.decode() for owner in found]

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        ttl_ms = schema.ms(ttl_s)
        keys = [self._keys.open_set(owner), self._keys.instances, self._keys.lease(owner)]
        while True:
            left, *members = await self._line.run(
                self._reap, keys, self._keys.prefix, owner, ttl_ms, now_ms, self._epoch(), limit
            )
            # A batch of nothing but entries that were not the owner's is no reason to stop.
            if members or not left:
                return [key_of(name.decode()) for name in members]

    # -- the rest -----------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        await self._line.call("PING")

    async def info(self) -> StoreInfo:
        info = schema.store_info(schema.parse_info(await self._line.call("INFO", *schema.INFO_SECTIONS)))
        return replace(info, mode="sentinel") if isinstance(self._place, Sentinels) else info


def _place(url: str) -> Server:
    match parse_url(url):
        case SentinelAddress() as address:
            return Sentinels(address)
        case RedisAddress() as address:
            return address
    raise ConfigError("--redis-url: redis+cluster:// needs the cluster's store")
