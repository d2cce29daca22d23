"""Commands to whichever node has the key: `any_server.CommandPort` on a cluster.

Sharded channels: each is heard on the node that owns its slot, and moves with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shared.core.errors import StoreUnavailable
from shared.redis.cluster import slot_of
from shared.redis.connection import Redirected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.redis.cluster import Shard, Shards
    from shared.redis.commands import Commands, Script
    from shared.redis.connection import Argument


# One while a slot moves, one more for each move meanwhile; a loop of nodes that point at each other ends.
_REDIRECTIONS: Final = 5


class ClusterLine:
    def __init__(self, shards: Shards, *, bulk: bool = False) -> None:
        self._shards = shards
        self._bulk = bulk

    @property
    def commands(self) -> int:
        """Of both lines: the shards count them."""
        return self._shards.commands

    async def call(self, *arguments: Argument) -> Any:
        """Raises `StoreError`."""
        try:
            return await self._line_of(str(arguments[1])).call(*arguments)
        except Redirected as redirected:
            return await self._follow(redirected, lambda line, asking: line.call(*arguments, asking=asking))
        except StoreUnavailable:
            self._shards.doubt()
            raise

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """`keys` are of one slot. Raises `StoreError`."""
        try:
            return await self._line_of(keys[0]).run(script, keys, *arguments)
        except Redirected as redirected:
            return await self._follow(
                redirected, lambda line, asking: line.run(script, keys, *arguments, asking=asking)
            )
        except StoreUnavailable:
            self._shards.doubt()
            raise

    def post(self, *arguments: Argument) -> None:
        """Nothing when the key's node is away."""
        try:
            self._line_of(str(arguments[1])).post(*arguments)
        except StoreUnavailable:
            self._shards.doubt()

    def post_script(self, script: Script, keys: Sequence[str], *arguments: Argument) -> None:
        """As `post`."""
        try:
            self._line_of(keys[0]).post_script(script, keys, *arguments)
        except StoreUnavailable:
            self._shards.doubt()

    async def _follow(self, redirected: Redirected, send: Callable[[Commands, bool], Awaitable[Any]]) -> Any:
        for _ in range(_REDIRECTIONS):
            try:
                return await send(self._of(self._shards.follow(redirected)), redirected.asking)
            except Redirected as again:
                redirected = again
        raise StoreUnavailable("the cluster moves this key about", maybe_done=False)

    def _line_of(self, key: str) -> Commands:
        return self._of(self._shards.owner(slot_of(key)))

    def _of(self, shard: Shard) -> Commands:
        return shard.bulk if self._bulk else shard.line


class ClusterChannels:
    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._homes: dict[str, Shard] = {}

    async def subscribe(self, channel: str) -> None:
        """Returns when messages are heard. Raises `StoreUnavailable`."""
        home = self._homes.get(channel)
        if home is None:
            home = self._homes[channel] = self._shards.owner(slot_of(channel))
        await home.subscriptions.subscribe(channel)

    def hears(self, channel: str) -> bool:
        """Whether `subscribe` would return at once."""
        home = self._homes.get(channel)
        return home is not None and home.subscriptions.hears(channel)

    def unsubscribe(self, channel: str) -> None:
        home = self._homes.pop(channel, None)
        if home is not None:
            home.subscriptions.unsubscribe(channel)

    def follow_slots(self) -> None:
        """After the map of the cluster has changed."""
        for channel, home in self._homes.items():
            owner = self._shards.known_owner(slot_of(channel))
            if owner is not None and owner is not home:
                home.subscriptions.unsubscribe(channel)
                owner.subscriptions.take_over(channel)
                self._homes[channel] = owner
