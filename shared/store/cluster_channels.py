"""Sharded channels: each is heard on the node that owns its slot, and moves with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.store.slots import slot_of

if TYPE_CHECKING:
    from shared.store.shards import Shard, Shards


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
