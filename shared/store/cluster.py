"""The store on a Redis or Valkey cluster: each step of `one_server.py` as steps of one slot each, in a safe order.

    begin    open set, record        an entry without a record of its owner does no harm: the reaper drops it
    settle   record, log, open set   the entry leaves last: the reaper of a dead owner finds there whatever is half
                                     done; a living owner repeats `settle`, which logs nothing a second time
    reap     record, log, open set   several may reap at once: each step may be repeated
    lease    instances, lease        every owner that holds a lease, or has an open sample, is known

Messages are sharded (SPUBLISH): those about a sampling session go through the node that has its log. They cost the
other nodes nothing, and are lost only with a connection to that node, which counts as a gap. A channel moves with its
slot, which counts as a gap too. A worker has three connections to each master.

A log is searched for an entry only if that may be there already, and only so far back: after a very long log an entry
may be there twice. Clients skip what they know; a cursor of another epoch also gives them everything twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shared.core.errors import ConfigError, StoreError, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.record import HEADER_BYTES, pack, unpack_header
from shared.redis.address import ClusterAddress, parse_url
from shared.redis.cluster import Shards
from shared.redis.cluster_commands import ClusterChannels, ClusterCommands
from shared.redis.commands import Subscriptions
from shared.store import cluster_scripts as scripts
from shared.store import schema
from shared.store.any_server import BULK_FROM_BYTES, AnyServerStore
from shared.store.contract import Settled
from shared.store.one_server import SETTLED
from shared.store.schema import key_of, member
from shared.store.scripts import ARE_UNREAD, EVEN_WHEN_FULL

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from shared.core.model import SampleKey
    from shared.core.record import Claim, Header
    from shared.redis.commands import Script
    from shared.redis.connection import Argument
    from shared.store.contract import LogPage, StoreInfo, StoreListener

T = TypeVar("T")

# How many of a log's newest entries are searched for one that may be there already: about 100 us of the server's time.
_LOOK_BACK: Final = 512


class ClusterStore(AnyServerStore):
    """The store on a cluster."""

    _publish = "SPUBLISH"

    def _make_commands(self, url: str) -> tuple[ClusterCommands, ClusterCommands]:
        address = parse_url(url)
        if not isinstance(address, ClusterAddress):
            raise ConfigError("--redis-url: the cluster's store needs redis+cluster://")
        self._begin_record = scripts.begin_record(self._transitions)
        self._settle_record = scripts.settle_record(self._transitions)
        self._settle_record_when_full = scripts.settle_record(self._transitions, EVEN_WHEN_FULL)
        self._reap_record = scripts.reap_record(self._transitions)
        self._shards = Shards(
            address,
            self._clock,
            self._rng,
            self._deadline_s,
            make_subscriptions=lambda: Subscriptions(
                self._announcements.on_message, self._announcements.on_gap, sharded=True
            ),
            on_change=lambda: self._channels.follow_slots(),
        )
        self._channels = ClusterChannels(self._shards)
        return ClusterCommands(self._shards), ClusterCommands(self._shards, bulk=True)

    def __repr__(self) -> str:
        return f"<ClusterStore {self._shards.shown}>"

    @property
    def commands(self) -> int:
        return self._shards.sent

    @property
    def connected_since_s(self) -> float | None:
        return self._shards.connected_since_s

    @property
    def restarted_s(self) -> float | None:
        return self._shards.restarted_s

    async def open(self, listener: StoreListener, owner: str) -> None:
        await self._shards.open()
        info = await self._shards.any_up().commands.call("INFO", "server")
        schema.check_version(schema.parse_info(info), self._shards.shown)
        await self._announcements.open(listener, owner, self._channels, self._commands)

    async def close(self) -> None:
        await self._announcements.close()
        await self._shards.close()

    # -- samples ------------------------------------------------------------------------------------------------

    async def begin(self, key: SampleKey, claim: Claim) -> Header | None:
        entry = (self._keys.open_set(claim.owner), member(key))
        added = await self._commands.call("SADD", *entry)
        try:
            record = pack(State.PENDING, claim)
            found = await self._commands.run(self._begin_record, [self._keys.sample(key)], record)
        except StoreError as error:
            if added and not (isinstance(error, StoreUnavailable) and error.maybe_done):
                self._commands.post("SREM", *entry)
            raise
        if not found:
            return None
        header = unpack_header(found)
        # An entry of our own that was there before belongs to a `settle` that has not finished.
        if header.claim.owner != claim.owner or (added and header.state is not State.PENDING):
            await self._commands.call("SREM", *entry)
        return header

    async def settle(
        self, key: SampleKey, claim: Claim, state: State, payload: bytes, *, ttl_s: float, now_ms: int
    ) -> Settled:
        commands = self._bulk if len(payload) >= BULK_FROM_BYTES else self._commands
        record = pack(state, claim, payload)
        name = self._keys.sample(key)
        script = self._settle_record if state is State.READY else self._settle_record_when_full
        settled = SETTLED[await commands.run(script, [name], record, schema.ms(ttl_s))]
        ended: tuple[State, int] | None = (state, len(payload))
        if settled is Settled.REFUSED:
            # It ended in another state, perhaps long ago; but a shard that lost its data may have a younger log.
            ended = _ended(await self._commands.run(scripts.OWN_RECORD, [name], claim.owner))
        if ended is not None:
            await self._log(key, *ended, ttl_s, now_ms, _LOOK_BACK if settled is not Settled.WRITTEN else 0)
            await self._commands.call("SREM", self._keys.open_set(claim.owner), member(key))
        return settled

    async def _log(
        self, key: SampleKey, state: State, size_bytes: int, ttl_s: float, now_ms: int, look_back: int
    ) -> None:
        await self._commands.run(
            scripts.LOG,
            [self._keys.log(key.session_key, key.clone_id)],
            schema.log_entry(key, state, size_bytes, now_ms),
            self._epoch(),
            schema.ms(ttl_s),
            look_back,
        )

    async def _sum(self, script: Script, keys: Sequence[SampleKey], *arguments: Argument) -> int:
        if len(keys) == 1:
            # The usual case, which needs no task.
            single: int = await self._commands.run(script, [self._keys.sample(keys[0])], *arguments)
            return single
        return sum(await _all(self._commands.run(script, [self._keys.sample(key)], *arguments) for key in keys))

    async def unread(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        flags = await _all(self._commands.run(ARE_UNREAD, [self._keys.sample(key)]) for key in keys)
        return [key for key, (is_unread,) in zip(keys, flags, strict=True) if is_unread]

    async def read_log(self, session_key: str, clone_id: int, cursor: int, *, limit: int) -> LogPage:
        epoch, n = divmod(cursor, 2**schema.SEQ_BITS)
        name = self._keys.log(session_key, clone_id)
        return schema.log_page(await self._commands.run(scripts.READ_LOG, [name], epoch, n, limit), cursor)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def renew_lease(self, owner: str, *, ttl_s: float) -> bool:
        await self._commands.run(scripts.ADD_INSTANCE, [self._keys.instances], owner)
        return bool(await self._commands.run(scripts.TAKE_LEASE, [self._keys.lease(owner)], schema.ms(ttl_s)))

    async def release_lease(self, owner: str) -> None:
        await self._commands.call("DEL", self._keys.lease(owner))
        await self._forget_retired(owner)

    async def _forget_retired(self, owner: str) -> None:
        """Forget an owner without lease and open samples. One that takes a lease now is known again at its renewal."""
        if await self._commands.run(scripts.IS_RETIRED, [self._keys.lease(owner), self._keys.open_set(owner)]):
            await self._commands.call("SREM", self._keys.instances, owner)

    async def lapsed_owners(self) -> list[str]:
        owners = [owner.decode() for owner in await self._commands.call("SMEMBERS", self._keys.instances)]
        held = await _all(self._commands.call("EXISTS", self._keys.lease(owner)) for owner in owners)
        return [owner for owner, holds in zip(owners, held, strict=True) if not holds]

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 500) -> list[SampleKey]:
        open_set = self._keys.open_set(owner)
        while members := await self._commands.call("SRANDMEMBER", open_set, limit):
            keys = [key_of(name.decode()) for name in members]
            outcomes = await asyncio.gather(
                *(self._reap_one(owner, key, ttl_s, now_ms) for key in keys), return_exceptions=True
            )
            done = [key for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome, bool)]
            if not done:
                raise _first_error(outcomes)
            await self._commands.call("SREM", open_set, *map(member, done))
            await self._forget_retired(owner)
            ended = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is True]
            # Samples on a node that is down are left for the next call, so that those that ended are announced first.
            if ended:
                return ended
        await self._forget_retired(owner)
        return []

    async def _reap_one(self, owner: str, key: SampleKey, ttl_s: float, now_ms: int) -> bool:
        """End and log one sample; return False if it was not the owner's. The owner may have ended it itself."""
        found = await self._commands.run(self._reap_record, [self._keys.sample(key)], owner, schema.ms(ttl_s))
        ended = _ended(found)
        if ended is None:
            return False
        await self._log(key, *ended, ttl_s, now_ms, _LOOK_BACK)
        return True

    # -- the rest -----------------------------------------------------------------------------------------------

    async def info(self) -> StoreInfo:
        """Return the memory and traffic of all masters together, and the most harmful of their policies."""
        replies = await _all(shard.commands.call("INFO", *schema.INFO_SECTIONS) for shard in self._shards.masters)
        infos = [schema.store_info(schema.parse_info(reply)) for reply in replies]
        policies = {info.policy: None for info in infos}
        return replace(
            infos[0],
            mode="cluster",
            used_bytes=sum(info.used_bytes for info in infos),
            max_bytes=sum(info.max_bytes for info in infos) if all(info.max_bytes for info in infos) else 0,
            policy=next((policy for policy in policies if policy not in ("", "noeviction")), infos[0].policy),
            received_bytes=sum(info.received_bytes for info in infos),
            sent_bytes=sum(info.sent_bytes for info in infos),
        )


def _ended(found: Any) -> tuple[State, int] | None:
    """Return state and payload size of a record that has ended, from the reply of a script."""
    if found is None:
        return None
    state = State(found[0].decode())
    return (state, found[1] - HEADER_BYTES) if state is not State.PENDING else None


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. When the last call has ended, raise the first error if there was one."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    if len(results) < len(outcomes):
        raise _first_error(outcomes)
    return results


def _first_error(outcomes: Iterable[object]) -> BaseException:
    return next(outcome for outcome in outcomes if isinstance(outcome, BaseException))
