"""The masters of a cluster and the slots that each of them owns.

One task keeps the map up to date: it asks any node that answers, from time to time and as soon as the map may be wrong
(a command was redirected, a connection broke). A node that owns no slot and is down is forgotten. Commands fail for a
slot that has no known owner, or whose owner is down; those of other slots continue.
"""

from __future__ import annotations

import asyncio
import logging
from binascii import crc_hqx
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hiredis

from shared.core.errors import GatewayError, StoreRefused, StoreUnavailable
from shared.redis import login
from shared.redis.commands import Commands
from shared.redis.link import CONNECT_TIMEOUT_S, Link
from shared.system_error import system_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from random import Random

    from shared.clock import Clock
    from shared.redis.address import ClusterAddress, RedisAddress
    from shared.redis.commands import Subscriptions
    from shared.redis.connection import Redirected, RedisConnection


SLOTS: Final = 16384


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The slots from `first` to `last` inclusive and the address of their master."""

    first: int
    last: int
    host: str
    port: int


def slot_of(key: str) -> int:
    """Return the slot of a key: that of the text between its first braces if there is any, else of the whole key."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return crc_hqx((tag if opened and closed and tag else key).encode(), 0) % SLOTS


def parse_slots(reply: Any, asked_host: str) -> list[SlotRange]:
    """Read a reply to CLUSTER SLOTS. A node that does not know its own address has that of the host we asked."""
    return [
        SlotRange(int(first), int(last), (master[0] or b"").decode().strip("?") or asked_host, int(master[1]))
        for first, last, master, *_ in reply
    ]


log = logging.getLogger(__name__)

# A change shows as a redirection or a lost connection; this is for slots that no command uses.
_ASK_EVERY_S: Final = 15.0
# While a master is down, so that its successor is found soon.
_ASK_AGAIN_S: Final = 0.25
# Many commands report a change at once, and one answer serves them all.
_LEAST_PAUSE_S: Final = 0.05


class Shard:
    """A node with `commands`, `bulk` for those with large values, and `subscriptions` to the channels of its slots."""

    def __init__(
        self,
        address: RedisAddress,
        make_link: Callable[[RedisAddress, str, Subscriptions | None], Link],
        subscriptions: Subscriptions,
    ) -> None:
        self.address = address
        self.subscriptions = subscriptions
        self.link = make_link(address, "commands", None)
        bulk_link = make_link(address, "bulk", None)
        self._links = (self.link, bulk_link, make_link(address, "push", subscriptions))
        self.commands = Commands(self.link)
        self.bulk = Commands(bulk_link)

    @property
    def up(self) -> bool:
        return self.link.connected_since_s is not None

    @property
    def sent(self) -> int:
        """The number of commands sent to this node."""
        return self.commands.sent + self.bulk.sent

    async def open(self) -> None:
        """Connect; keep trying in the background if the node is down. Raises `StoreRefused`."""
        for link in self._links:
            try:
                await link.open()
            except StoreUnavailable:
                link.start()

    def start(self) -> None:
        for link in self._links:
            link.start()

    async def close(self) -> None:
        for link in self._links:
            await link.close()


class Shards:
    """The nodes of a cluster. `make_subscriptions` is called for each node, `on_change` when a slot has a new owner."""

    def __init__(
        self,
        address: ClusterAddress,
        clock: Clock,
        rng: Random,
        deadline_s: float,
        make_subscriptions: Callable[[], Subscriptions],
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._clock = clock
        self._rng = rng
        self._deadline_s = deadline_s
        self._make_subscriptions = make_subscriptions
        self._on_change = on_change
        self._shards: dict[tuple[str, int], Shard] = {}
        self._owners: list[Shard | None] = [None] * SLOTS
        self.masters: set[Shard] = set()
        self._sent_by_closed = 0
        self._masters_changed_s: float | None = None
        self._may_be_wrong = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        return self._address.shown

    @property
    def sent(self) -> int:
        """The number of commands sent to all nodes so far."""
        return self._sent_by_closed + sum(shard.sent for shard in self._shards.values())

    @property
    def connected_since_s(self) -> float | None:
        """The monotonic time since which all masters have been connected; None while one is not."""
        since_s = [shard.link.connected_since_s for shard in self.masters]
        known = [one_s for one_s in since_s if one_s is not None]
        return max(known) if known and len(known) == len(since_s) else None

    @property
    def restarted_s(self) -> float | None:
        """The last time at which a master turned out to be another server, at its old address or a new one."""
        times_s = [self._masters_changed_s, *(shard.link.restarted_s for shard in self.masters)]
        return max((one_s for one_s in times_s if one_s is not None), default=None)

    async def open(self) -> None:
        """Connect to all masters. Raises `StoreError` if no node knows the map."""
        self._assign(await self._ask_any())
        await asyncio.gather(*(shard.open() for shard in self.masters))
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.gather(*(shard.close() for shard in self._shards.values()))

    def owner(self, slot: int) -> Shard:
        """Return the node that owns a slot. Raises `StoreUnavailable` if there is none."""
        shard = self._owners[slot]
        if shard is None:
            self.refresh_soon()
            raise StoreUnavailable("this part of the cluster is down", maybe_done=False)
        return shard

    def known_owner(self, slot: int) -> Shard | None:
        """Return the node that owns a slot, or None."""
        return self._owners[slot]

    def any_up(self) -> Shard:
        """Return any connected master. Raises `StoreUnavailable` if there is none."""
        up = [shard for shard in self.masters if shard.up]
        if not up:
            raise StoreUnavailable("the cluster is down", maybe_done=False)
        return self._rng.choice(up)

    def follow(self, redirected: Redirected) -> Shard:
        """Return the node that a redirection names; start to connect to it if it is new."""
        if not redirected.asking:
            self.refresh_soon()
        shard = self._shard(redirected.host or self._address.seeds[0].host or "", redirected.port)
        shard.start()
        return shard

    def refresh_soon(self) -> None:
        """Ask for the map again, because it may be wrong."""
        self._may_be_wrong.set()

    # -- internals

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_LEAST_PAUSE_S)
            try:
                async with asyncio.timeout(_ASK_EVERY_S if self.connected_since_s is not None else _ASK_AGAIN_S):
                    await self._may_be_wrong.wait()
            except TimeoutError:
                pass
            self._may_be_wrong.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            self._assign(await self._ask_any())
        except GatewayError as error:
            log.debug("no node of the cluster reports its slots", extra={"error": str(error)})
        for key, shard in list(self._shards.items()):
            if shard in self.masters:
                shard.start()
            elif not shard.up:
                del self._shards[key]
                self._sent_by_closed += shard.sent
                await shard.close()

    def _assign(self, ranges: list[SlotRange]) -> None:
        owners: list[Shard | None] = [None] * SLOTS
        for found in ranges:
            shard = self._shard(found.host, found.port)
            owners[found.first : found.last + 1] = [shard] * (found.last - found.first + 1)
        masters = {shard for shard in owners if shard is not None}
        if self.masters and masters - self.masters:
            log.warning("the cluster has another master", extra={"store": self.shown})
            self._masters_changed_s = self._clock.monotonic_s()
        changed = owners != self._owners
        self._owners, self.masters = owners, masters
        if changed:
            self._on_change()

    def _shard(self, host: str, port: int) -> Shard:
        shard = self._shards.get((host, port))
        if shard is None:
            shard = self._shards[host, port] = Shard(
                self._address.node(host, port), self._make_link, self._make_subscriptions()
            )
        return shard

    def _make_link(self, address: RedisAddress, purpose: str, subscriptions: Subscriptions | None) -> Link:
        def on_up(connection: RedisConnection) -> None:
            connection.lost.add_done_callback(lambda _: self.refresh_soon())
            if subscriptions is not None:
                subscriptions.on_up(connection)

        return Link(
            address,
            f"gateway-{purpose}",
            clock=self._clock,
            rng_unit=self._rng.random,
            deadline_s=self._deadline_s,
            on_up=on_up,
            on_push=subscriptions.on_push if subscriptions is not None else None,
        )

    async def _ask_any(self) -> list[SlotRange]:
        """Return the map from the first node that knows it. Raises the last `StoreError` if none does."""
        trouble: StoreUnavailable | None = None
        for ask in self._questions():
            try:
                if ranges := await ask():
                    return ranges
            except StoreUnavailable as error:
                trouble = error
        raise trouble or StoreUnavailable(f"no node of {self.shown} knows an owner of any slot", maybe_done=False)

    def _questions(self) -> list[Callable[[], Coroutine[None, None, list[SlotRange]]]]:
        """Return the ways to ask: connected nodes first, then the addresses of the URL."""
        up = [shard for shard in self._shards.values() if shard.up]
        self._rng.shuffle(up)
        return [
            *(partial(_ask_shard, shard) for shard in up),
            *(partial(_ask_seed, one) for one in self._address.seeds),
        ]


async def _ask_shard(shard: Shard) -> list[SlotRange]:
    return parse_slots(await shard.commands.call("CLUSTER", "SLOTS"), shard.address.host or "")


async def _ask_seed(seed: RedisAddress) -> list[SlotRange]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = await login.dial(seed, "gateway-topology")
    except (OSError, TimeoutError) as error:
        text = system_reason(error) or "no answer"
        raise StoreUnavailable(f"Redis at {seed.shown} cannot be reached: {text}", maybe_done=False) from None
    try:
        reply = await connection.ask("CLUSTER", "SLOTS")
    finally:
        connection.cut("the node was asked")
    if isinstance(reply, hiredis.ReplyError):
        raise StoreRefused(f"Redis at {seed.shown} is not a node of a cluster ({reply}); use redis://")
    return parse_slots(reply, seed.host or "")
