"""Announcements of settled samples, coalesced per event-loop turn, and messages between workers."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shared.redis.cluster_commands import ClusterChannels, ClusterCommands
    from shared.redis.commands import Commands, Subscriptions
    from shared.store.contract import StoreListener
    from shared.store.schema import Keys

# Long enough for a poll that comes back at once to find its subscription still there.
LINGER_S: Final = 5.0


class Announcements:
    """Publish and hear messages. `on_message` and `on_gap` are called by the subscriptions."""

    def __init__(self, keys: Keys, publish: str, linger_s: float) -> None:
        self._keys = keys
        self._publish = publish
        self._linger_s = linger_s
        self._listener: StoreListener | None = None
        self._channels: Subscriptions | ClusterChannels | None = None
        self._commands: Commands | ClusterCommands | None = None
        self._seq_ids: defaultdict[str, list[int]] = defaultdict(list)
        self._watched: defaultdict[str, int] = defaultdict(int)
        self._lingering: dict[str, asyncio.TimerHandle] = {}

    async def open(
        self,
        listener: StoreListener,
        owner: str,
        channels: Subscriptions | ClusterChannels,
        commands: Commands | ClusterCommands,
    ) -> None:
        """Subscribe to the messages for `owner` and for all workers. Raises `StoreUnavailable`."""
        self._listener, self._channels, self._commands = listener, channels, commands
        await channels.subscribe(self._keys.control(owner))
        await channels.subscribe(self._keys.control_all)

    async def close(self) -> None:
        for timer in self._lingering.values():
            timer.cancel()
        self._lingering.clear()
        # One more turn, so that the announcements of this one are sent.
        await asyncio.sleep(0)

    def announce(self, session_key: str, seq_id: int) -> None:
        """Publish a settled sample, together with the others of this turn."""
        if not self._seq_ids:
            asyncio.get_running_loop().call_soon(self._publish_all)
        self._seq_ids[session_key].append(seq_id)

    def _publish_all(self) -> None:
        assert self._commands is not None
        announced, self._seq_ids = self._seq_ids, defaultdict(list)
        for session_key, seq_ids in announced.items():
            message = struct.pack(f">{len(seq_ids)}q", *seq_ids)
            self._commands.post(self._publish, self._keys.announcement(session_key), message)

    async def watch(self, session_key: str) -> None:
        """Count a watcher of the session, and return when its announcements arrive. Raises `StoreUnavailable`."""
        assert self._channels is not None
        self._watched[session_key] += 1
        timer = self._lingering.pop(session_key, None)
        if timer is not None:
            timer.cancel()
        try:
            await self._channels.subscribe(self._keys.announcement(session_key))
        except BaseException:
            self.unwatch(session_key)
            raise

    def unwatch(self, session_key: str) -> None:
        """Undo one `watch`; the last one ends the subscription a little later."""
        self._watched[session_key] -= 1
        if self._watched[session_key] > 0:
            return
        del self._watched[session_key]
        loop = asyncio.get_running_loop()
        self._lingering[session_key] = loop.call_later(self._linger_s, self._forget, session_key)

    def _forget(self, session_key: str) -> None:
        self._lingering.pop(session_key, None)
        assert self._channels is not None
        self._channels.unsubscribe(self._keys.announcement(session_key))

    def on_message(self, channel: bytes, message: bytes) -> None:
        """Pass a message on to the listener."""
        listener = self._listener
        if listener is None:
            return
        name = channel.decode()
        if name.startswith(self._keys.announcements):
            session_key = self._keys.announced(name)
            listener.on_announcement(session_key, struct.unpack(f">{len(message) // 8}q", message))
        else:
            listener.on_control(message)

    def on_gap(self) -> None:
        """Report to the listener that messages may have been lost."""
        if self._listener is not None:
            self._listener.on_gap()
