"""Telling and hearing: announcements of settled samples, coalesced per turn, and messages for workers."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.store.contract import StoreListener
    from shared.store.schema import Keys

# A poll that comes back at once finds its subscription still there.
LINGER_S: Final = 5.0


class Channels(Protocol):
    async def subscribe(self, channel: str) -> None:
        """Returns when messages are heard. Raises `StoreUnavailable`."""
        ...

    def hears(self, channel: str) -> bool:
        """Whether `subscribe` would return at once."""
        ...

    def unsubscribe(self, channel: str) -> None: ...


class Announcements:
    """`publish` sends a message to a channel without waiting. What is heard comes in by `on_message` and `on_gap`."""

    def __init__(self, keys: Keys, publish: Callable[[str, bytes], None], linger_s: float) -> None:
        self._keys = keys
        self._publish = publish
        self._linger_s = linger_s
        self._listener: StoreListener | None = None
        self._channels: Channels | None = None
        self._announcements: defaultdict[str, list[int]] = defaultdict(list)
        self._watched: defaultdict[str, int] = defaultdict(int)
        self._lingering: dict[str, asyncio.TimerHandle] = {}

    def listen(self, listener: StoreListener, channels: Channels) -> None:
        """Before anything else."""
        self._listener = listener
        self._channels = channels

    async def hear_control(self, owner: str) -> None:
        """Raises `StoreUnavailable`."""
        await self._subscribe(self._keys.control(owner))
        await self._subscribe(self._keys.control_all)

    async def _subscribe(self, channel: str) -> None:
        assert self._channels is not None
        await self._channels.subscribe(channel)

    async def close(self) -> None:
        for timer in self._lingering.values():
            timer.cancel()
        self._lingering.clear()
        # One turn more for announcements that are on their way out.
        await asyncio.sleep(0)

    def announce(self, session_key: str, seq_id: int) -> None:
        if not self._announcements:
            asyncio.get_running_loop().call_soon(self._publish_all)
        self._announcements[session_key].append(seq_id)

    def _publish_all(self) -> None:
        announcements, self._announcements = self._announcements, defaultdict(list)
        for session_key, seq_ids in announcements.items():
            message = struct.pack(f">{len(seq_ids)}q", *seq_ids)
            self._publish(self._keys.announcement(session_key), message)

    def watch_heard(self, session_key: str) -> bool:
        """Watch a session whose announcements are heard already, as they are for all of its polls but the first.

        False when they are not; nothing is counted then.
        """
        assert self._channels is not None
        timer = self._lingering.get(session_key)
        wanted = timer is not None or self._watched.get(session_key, 0) > 0
        if not wanted or not self._channels.hears(self._keys.announcement(session_key)):
            return False
        if timer is not None:
            timer.cancel()
            del self._lingering[session_key]
        self._watched[session_key] += 1
        return True

    async def watch(self, session_key: str) -> None:
        self._watched[session_key] += 1
        timer = self._lingering.pop(session_key, None)
        if timer is not None:
            timer.cancel()
        try:
            await self._subscribe(self._keys.announcement(session_key))
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
        assert self._channels is not None
        self._channels.unsubscribe(self._keys.announcement(session_key))

    def on_message(self, channel: bytes, message: bytes) -> None:
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
        """Messages may have been lost."""
        if self._listener is not None:
            self._listener.on_gap()
