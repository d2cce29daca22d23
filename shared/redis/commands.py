"""The two uses of a link: commands with one reply each, and subscriptions."""

from __future__ import annotations

import asyncio
from collections import Counter
from hashlib import sha1
from typing import TYPE_CHECKING, Any, Final

import hiredis

from shared.core.errors import StoreUnavailable
from shared.redis.connection import NO_SCRIPT, READ_ONLY, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.redis.connection import Argument, RedisConnection
    from shared.redis.link import Link

# The most that may wait for a slow server before callers are refused, to bound a worker's memory: 16,000 small samples.
MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024


class Script:
    """A Lua script and the name that Redis gives it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = sha1(source.encode(), usedforsecurity=False).hexdigest()


class Commands:
    """Send commands over one link and return their replies. `sent` counts them; a script counts as one."""

    def __init__(self, link: Link, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._link = link
        self._max_queued_bytes = max_queued_bytes
        self.sent = 0

    async def call(self, *arguments: Argument, asking: bool = False) -> Any:
        """Return the reply. Pass `asking` if the key's slot is moving to this cluster node. Raises `StoreError`."""
        return self._checked(await self._ask(arguments, asking))

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument, asking: bool = False) -> Any:
        """Return the script's reply; load the script first if the server does not know it. Raises `StoreError`."""
        reply = await self._ask(("EVALSHA", script.name, str(len(keys)), *keys, *arguments), asking)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(NO_SCRIPT):
            reply = await self._ask(("EVAL", script.source, str(len(keys)), *keys, *arguments), asking)
        return self._checked(reply)

    def post(self, *arguments: Argument) -> None:
        """Send without waiting for the reply; do nothing without a connection or when too much is queued."""
        connection = self._link.connection
        if connection is None or connection.lost.done():
            return
        if not connection.is_full(self._max_queued_bytes):
            self.sent += 1
            connection.ask(*arguments)

    def post_script(self, script: Script, keys: Sequence[str], *arguments: Argument) -> None:
        """Post a script, with its source: no caller would notice that the server does not know it."""
        self.post("EVAL", script.source, str(len(keys)), *keys, *arguments)

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith(READ_ONLY):
                self._link.found_replica(str(reply))
            raise error_of(reply)
        return reply

    def _ask(self, arguments: tuple[Argument, ...], asking: bool) -> asyncio.Future[Any]:
        connection = self._link.connection
        if connection is None:
            raise StoreUnavailable("Redis is down", maybe_done=False)
        if connection.is_full(self._max_queued_bytes):
            raise StoreUnavailable("too many bytes already wait for Redis", maybe_done=False)
        self.sent += 1
        if asking:
            # It applies to the next command on this connection only.
            connection.ask("ASKING")
        return connection.ask(*arguments)


class Subscriptions:
    """Subscribe to channels over one link, and again after each reconnect.

    `on_message` gets (channel, payload). `on_gap` is called when all channels are subscribed again after a loss.
    `sharded` channels belong to the slots of one cluster node, which ends them itself when a slot moves away.
    """

    def __init__(
        self, on_message: Callable[[bytes, bytes], None], on_gap: Callable[[], None], *, sharded: bool = False
    ) -> None:
        self._on_message = on_message
        self._on_gap = on_gap
        self._enter, self._leave = ("SSUBSCRIBE", "SUNSUBSCRIBE") if sharded else ("SUBSCRIBE", "UNSUBSCRIBE")
        self._connection: RedisConnection | None = None
        self._wanted: set[str] = set()
        self._confirmed: dict[str, asyncio.Future[None]] = {}
        self._awaited_after_loss: set[str] = set()
        self._leaving: Counter[str] = Counter()
        self._lost_before = False

    def on_up(self, connection: RedisConnection) -> None:
        """Subscribe to every channel again; the gap ends when the last one is confirmed."""
        self._connection = connection
        connection.lost.add_done_callback(self._on_down)
        for channel in self._wanted:
            # One at a time: sharded channels belong to different slots.
            connection.send(self._enter, channel)
        if self._lost_before:
            self._awaited_after_loss = set(self._wanted)
            if not self._wanted:
                self._on_gap()

    def on_push(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            self._reconnect(f"the server refuses a subscription: {reply}")
        if not isinstance(reply, list) or len(reply) != 3:
            return
        kind, channel, payload = reply
        if kind in (b"message", b"smessage"):
            self._on_message(channel, payload)
        elif kind in (b"subscribe", b"ssubscribe"):
            self._confirm(channel.decode())
        elif kind in (b"unsubscribe", b"sunsubscribe"):
            left = channel.decode()
            if left in self._leaving:
                self._leaving -= Counter([left])  # drops counts of zero
            elif left in self._wanted:
                self._reconnect("a slot with subscriptions has moved")

    def _reconnect(self, why: str) -> None:
        """Drop the connection so that waiters fail; reconnecting subscribes to everything again."""
        if self._connection is not None:
            self._connection.cut(why)

    def take_over(self, channel: str) -> None:
        """Subscribe to a channel of another node, as if the connection to that node had been lost."""
        self._wanted.add(channel)
        self._awaited_after_loss.add(channel)
        if self._connection is not None:
            self._connection.send(self._enter, channel)

    async def subscribe(self, channel: str) -> None:
        """Return when messages arrive. Raises `StoreUnavailable` without a connection, or when it is lost."""
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            if self._connection is None:
                raise StoreUnavailable("Redis is down", maybe_done=False)
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
            confirmed.add_done_callback(_mark_retrieved)
            self._wanted.add(channel)
            self._connection.send(self._enter, channel)
        if not confirmed.done():
            await asyncio.shield(confirmed)
        else:
            confirmed.result()

    def unsubscribe(self, channel: str) -> None:
        self._wanted.discard(channel)
        confirmed = self._confirmed.pop(channel, None)
        if confirmed is not None and not confirmed.done():
            confirmed.set_exception(StoreUnavailable("the subscription was cancelled", maybe_done=False))
        if self._connection is not None:
            self._leaving[channel] += 1
            self._connection.send(self._leave, channel)
        self._stop_awaiting(channel)

    def _confirm(self, channel: str) -> None:
        confirmed = self._confirmed.get(channel)
        if confirmed is None and channel in self._wanted:
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
        self._stop_awaiting(channel)

    def _stop_awaiting(self, channel: str) -> None:
        """Note that the channel is subscribed again or no longer wanted; the last one ends the gap."""
        if channel in self._awaited_after_loss:
            self._awaited_after_loss.discard(channel)
            if not self._awaited_after_loss:
                self._on_gap()

    def _on_down(self, lost: asyncio.Future[str]) -> None:
        """Fail all who wait for a confirmation; the channels stay wanted."""
        self._connection = None
        self._lost_before = True
        self._leaving.clear()
        confirmed, self._confirmed = self._confirmed, {}
        for future in confirmed.values():
            if not future.done():
                future.set_exception(StoreUnavailable(lost.result(), maybe_done=False))


def _mark_retrieved(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
