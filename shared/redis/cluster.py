"""Which slot of a cluster a key belongs to, and how a cluster tells whose a slot is. Pure.

The masters of a cluster, and whose each slot is.

One task keeps the map: it asks any node that answers, every so often, and at once when there is doubt (a command was
sent elsewhere, a connection broke). A node that owned nothing and is away is forgotten. A slot that nobody tells an
owner of, or whose owner is away, has no line: its commands fail, those of other slots go on.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from random import Random

    from shared.clock import Clock
    from shared.redis.address import ClusterAddress, RedisAddress
    from shared.redis.commands import Subscriptions
    from shared.redis.connection import Connection, Redirected


SLOTS: Final = 16384


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots from `first` to `last` inclusive, and where their master is."""

    first: int
    last: int
    host: str
    port: int


def slot_of(key: str) -> int:
    """The slot of a key: of what stands between its first braces, where there is something, else of all of it."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return crc_hqx((tag if opened and closed and tag else key).encode(), 0) % SLOTS


def parse_slots(reply: Any, asked_host: str) -> list[SlotRange]:
    """The reply to CLUSTER SLOTS. A node that does not know its own address is where it was asked."""
    return [
        SlotRange(int(first), int(last), (master[0] or b"").decode().strip("?") or asked_host, int(master[1]))
        for first, last, master, *_ in reply
    ]


log = logging.getLogger(__name__)

# A change shows as a redirection or a lost connection; this is for what nobody touches.
_ASK_EVERY_S: Final = 15.0
# While a master is away: how soon its successor is found.
_ASK_AGAIN_S: Final = 0.25
# Many commands doubt at once: they are one question.
_LEAST_PAUSE_S: Final = 0.05


class Shard:
    """One node: `line` for commands, `bulk` for those with large values, `subscriptions` of its slots' channels."""

    def __init__(
        self,
        address: RedisAddress,
        make_link: Callable[[RedisAddress, str, Subscriptions | None], Link],
        subscriptions: Subscriptions,
    ) -> None:
        self.address = address
        self.subscriptions = subscriptions
        self.link = make_link(address, "commands", None)
        self._bulk_link = make_link(address, "bulk", None)
        self._push_link = make_link(address, "push", subscriptions)
        self.line = Commands(self.link)
        self.bulk = Commands(self._bulk_link)

    @property
    def up(self) -> bool:
        return self.link.connected_since_s is not None

    @property
    def _links(self) -> tuple[Link, ...]:
        return (self.link, self._bulk_link, self._push_link)

    async def open(self) -> None:
        """Raises `StoreRefused`; a node that is away is waited for in the background."""
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
    """`make_subscriptions` is called for every node, `on_change` when slots have other owners than before."""

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
        self._masters: set[Shard] = set()
        self._closed_commands = 0
        self._masters_changed_s: float | None = None
        self._doubt = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        return self._address.shown

    @property
    def masters(self) -> list[Shard]:
        """Those that own slots."""
        return list(self._masters)

    @property
    def commands(self) -> int:
        return self._closed_commands + sum(shard.line.commands + shard.bulk.commands for shard in self._all())

    @property
    def connected_since_s(self) -> float | None:
        """Since when all masters have been connected."""
        since_s = [shard.link.connected_since_s for shard in self._masters]
        known = [one_s for one_s in since_s if one_s is not None]
        return max(known) if known and len(known) == len(since_s) else None

    @property
    def restarted_s(self) -> float | None:
        """When a master last turned out to be another server than before, at its old address or a new one."""
        times_s = [self._masters_changed_s, *(shard.link.restarted_s for shard in self._masters)]
        return max((one_s for one_s in times_s if one_s is not None), default=None)

    async def open(self) -> None:
        """Raises `StoreError` when no node tells the map."""
        self._assign(await self._ask_any())
        await asyncio.gather(*(shard.open() for shard in self._masters))
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.gather(*(shard.close() for shard in self._all()))

    def owner(self, slot: int) -> Shard:
        """Raises `StoreUnavailable` for a slot that has none."""
        shard = self._owners[slot]
        if shard is None:
            self.doubt()
            raise StoreUnavailable("this part of the cluster is away", maybe_done=False)
        return shard

    def known_owner(self, slot: int) -> Shard | None:
        return self._owners[slot]

    def any_up(self) -> Shard:
        """Raises `StoreUnavailable` when there is none."""
        up = [shard for shard in self._masters if shard.up]
        if not up:
            raise StoreUnavailable("the cluster is away", maybe_done=False)
        return self._rng.choice(up)

    def follow(self, redirected: Redirected) -> Shard:
        """The node that a command was sent to; one that was unknown is there a moment later."""
        if not redirected.asking:
            self.doubt()
        shard = self._shard(redirected.host or self._seed.host or "", redirected.port)
        shard.start()
        return shard

    def doubt(self) -> None:
        """What is known may be wrong: ask."""
        self._doubt.set()

    # -- inside

    @property
    def _seed(self) -> RedisAddress:
        return self._address.seeds[0]

    def _all(self) -> Iterable[Shard]:
        return list(self._shards.values())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_LEAST_PAUSE_S)
            try:
                async with asyncio.timeout(_ASK_EVERY_S if self.connected_since_s is not None else _ASK_AGAIN_S):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            self._doubt.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            self._assign(await self._ask_any())
        except GatewayError as error:
            log.debug("no node of the cluster tells its slots", extra={"error": str(error)})
        for key, shard in list(self._shards.items()):
            if shard in self._masters:
                shard.start()
            elif not shard.up:
                del self._shards[key]
                self._closed_commands += shard.line.commands + shard.bulk.commands
                await shard.close()

    def _assign(self, ranges: list[SlotRange]) -> None:
        owners: list[Shard | None] = [None] * SLOTS
        for found in ranges:
            shard = self._shard(found.host, found.port)
            owners[found.first : found.last + 1] = [shard] * (found.last - found.first + 1)
        masters = {shard for shard in owners if shard is not None}
        if self._masters and masters - self._masters:
            log.warning("the cluster has another master", extra={"store": self.shown})
            self._masters_changed_s = self._clock.monotonic_s()
        changed = owners != self._owners
        self._owners, self._masters = owners, masters
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
        def on_up(connection: Connection) -> None:
            connection.lost.add_done_callback(lambda _: self.doubt())
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
        """Raises `StoreError`: the last one's, or that the cluster has no slots yet."""
        trouble: StoreUnavailable | None = None
        for ask in self._questions():
            try:
                if ranges := await ask():
                    return ranges
            except StoreUnavailable as error:
                trouble = error
        raise trouble or StoreUnavailable(f"no node of {self.shown} knows an owner of any slot", maybe_done=False)

    def _questions(self) -> list[Callable[[], Coroutine[None, None, list[SlotRange]]]]:
        """Those that answer before those that may not."""
        up = [shard for shard in self._all() if shard.up]
        self._rng.shuffle(up)
        return [
            *(partial(_ask_shard, shard) for shard in up),
            *(partial(_ask_seed, one) for one in self._address.seeds),
        ]


async def _ask_shard(shard: Shard) -> list[SlotRange]:
    return parse_slots(await shard.line.call("CLUSTER", "SLOTS"), shard.address.host or "")


async def _ask_seed(seed: RedisAddress) -> list[SlotRange]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = await login.dial(seed, "gateway-topology")
    except (OSError, TimeoutError) as error:
        text = str(error) or "no answer"
        raise StoreUnavailable(f"Redis at {seed.shown} cannot be reached: {text}", maybe_done=False) from None
    try:
        reply = await connection.ask("CLUSTER", "SLOTS")
    finally:
        connection.cut("the node was asked")
    if isinstance(reply, hiredis.ReplyError):
        raise StoreRefused(f"Redis at {seed.shown} is no node of a cluster ({reply}); use redis://")
    return parse_slots(reply, seed.host or "")
