"""Commands and subscriptions on a cluster: each key and each channel on the node that owns its slot."""

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


# One while a slot moves, and one more for each move meanwhile; nodes that point at each other must not loop forever.
_REDIRECTIONS: Final = 5


class ClusterCommands:
    """Send each command to the node that has its key: that of a command comes first, that of a script is `keys[0]`."""

    def __init__(self, shards: Shards, *, bulk: bool = False) -> None:
        self._shards = shards
        self._bulk = bulk

    async def call(self, *arguments: Argument) -> Any:
        """Return the reply. Raises `StoreError`."""
        return await self._send(str(arguments[1]), lambda node, asking: node.call(*arguments, asking=asking))

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Return the script's reply. All `keys` must be of one slot. Raises `StoreError`."""
        return await self._send(keys[0], lambda node, asking: node.run(script, keys, *arguments, asking=asking))

    def post(self, *arguments: Argument) -> None:
        """Send without waiting for the reply; do nothing if the key's node is down."""
        try:
            self._node_of(str(arguments[1])).post(*arguments)
        except StoreUnavailable:
            self._shards.refresh_soon()

    def post_script(self, script: Script, keys: Sequence[str], *arguments: Argument) -> None:
        """Post a script; do nothing if the key's node is down."""
        try:
            self._node_of(keys[0]).post_script(script, keys, *arguments)
        except StoreUnavailable:
            self._shards.refresh_soon()

    async def _send(self, key: str, send: Callable[[Commands, bool], Awaitable[Any]]) -> Any:
        """Send to the owner of the key, and to each node that a redirection names."""
        try:
            node, asking = self._node_of(key), False
            for _ in range(1 + _REDIRECTIONS):
                try:
                    return await send(node, asking)
                except Redirected as redirected:
                    node, asking = self._commands_of(self._shards.follow(redirected)), redirected.asking
        except StoreUnavailable:
            self._shards.refresh_soon()
            raise
        raise StoreUnavailable("the cluster redirects this key again and again", maybe_done=False)

    def _node_of(self, key: str) -> Commands:
        return self._commands_of(self._shards.owner(slot_of(key)))

    def _commands_of(self, shard: Shard) -> Commands:
        return shard.bulk if self._bulk else shard.commands


class ClusterChannels:
    """Subscribe to each sharded channel on the node that owns its slot, and move it with the slot."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._homes: dict[str, Shard] = {}

    async def subscribe(self, channel: str) -> None:
        """Return when messages arrive. Raises `StoreUnavailable`."""
        home = self._homes.get(channel)
        if home is None:
            home = self._homes[channel] = self._shards.owner(slot_of(channel))
        await home.subscriptions.subscribe(channel)

    def unsubscribe(self, channel: str) -> None:
        home = self._homes.pop(channel, None)
        if home is not None:
            home.subscriptions.unsubscribe(channel)

    def follow_slots(self) -> None:
        """Move the channels whose slots have changed their owner."""
        for channel, home in self._homes.items():
            owner = self._shards.known_owner(slot_of(channel))
            if owner is not None and owner is not home:
                home.subscriptions.unsubscribe(channel)
                owner.subscriptions.take_over(channel)
                self._homes[channel] = owner
