"""The two ways in which a link is used: commands with a reply each, and subscriptions."""

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

    from shared.redis.connection import Argument, Connection
    from shared.redis.link import Link

# What may wait for a slow server before callers are refused: bounds a worker's memory, 16,000 small samples deep.
MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024


class Script:
    """A Lua script under the name that Redis gives it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = sha1(source.encode(), usedforsecurity=False).hexdigest()


class Commands:
    """Commands and their replies over one link. `commands` counts those that were sent, a script as one."""

    def __init__(self, link: Link, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._link = link
        self._max_queued_bytes = max_queued_bytes
        self.commands = 0

    async def call(self, *arguments: Argument, asking: bool = False) -> Any:
        """The reply. `asking`: the key's slot is on its way to this node of a cluster. Raises `StoreError`."""
        reply = await self._ask(arguments, asking)
        return self._checked(reply)

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument, asking: bool = False) -> Any:
        """The script's reply; a server that does not know it (any more) is taught it. Raises `StoreError`."""
        reply = await self._ask(("EVALSHA", script.name, str(len(keys)), *keys, *arguments), asking)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(NO_SCRIPT):
            reply = await self._ask(("EVAL", script.source, str(len(keys)), *keys, *arguments), asking)
        return self._checked(reply)

    def post(self, *arguments: Argument) -> None:
        """Send without waiting, best effort; nothing when there is no connection."""
        connection = self._link.connection
        if connection is None or connection.lost.done():
            return
        if not connection.is_full(self._max_queued_bytes):
            self.commands += 1
            connection.ask(*arguments)

    def post_script(self, script: Script, keys: Sequence[str], *arguments: Argument) -> None:
        """As `post`. With its source: nobody would hear that the server does not know it."""
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
            raise StoreUnavailable("Redis is away", maybe_done=False)
        if connection.is_full(self._max_queued_bytes):
            raise StoreUnavailable("too much waits for Redis already", maybe_done=False)
        self.commands += 1
        if asking:
            # Holds for the one command after it, on the same connection.
            connection.ask("ASKING")
        return connection.ask(*arguments)


class Subscriptions:
    """Channels over one link, kept over reconnects.

    `on_message` gets (channel, payload); `on_gap` is called when all channels are heard again after a loss. `sharded`
    channels are those of the slots of one cluster node, which ends them itself when a slot leaves it.
    """

    def __init__(
        self, on_message: Callable[[bytes, bytes], None], on_gap: Callable[[], None], *, sharded: bool = False
    ) -> None:
        self._on_message = on_message
        self._on_gap = on_gap
        self._enter, self._leave = ("SSUBSCRIBE", "SUNSUBSCRIBE") if sharded else ("SUBSCRIBE", "UNSUBSCRIBE")
        self._connection: Connection | None = None
        self._wanted: set[str] = set()
        self._confirmed: dict[str, asyncio.Future[None]] = {}
        self._awaited_after_loss: set[str] = set()
        self._leaving: Counter[str] = Counter()
        self._lost_before = False

    def on_up(self, connection: Connection) -> None:
        """Ask for every channel again; the gap is over when the last one is confirmed."""
        self._connection = connection
        connection.lost.add_done_callback(self._on_down)
        for channel in self._wanted:
            # One at a time: sharded ones are of different slots.
            connection.tell(self._enter, channel)
        if self._lost_before:
            self._awaited_after_loss = set(self._wanted)
            if not self._wanted:
                self._on_gap()

    def on_push(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            self._give_up(f"the server refuses a subscription: {reply}")
        if not isinstance(reply, list) or len(reply) != 3:
            return
        kind, channel, payload = reply
        if kind in (b"message", b"smessage"):
            self._on_message(channel, payload)
        elif kind in (b"subscribe", b"ssubscribe"):
            self._confirm(channel.decode())
        elif kind in (b"unsubscribe", b"sunsubscribe"):
            self._left(channel.decode())

    def _left(self, channel: str) -> None:
        if channel in self._leaving:
            self._leaving -= Counter([channel])  # drops what has come to nothing
        elif channel in self._wanted:
            self._give_up("a slot with subscriptions has moved")

    def _give_up(self, why: str) -> None:
        """Who waits must not wait for ever; all is asked for again."""
        if self._connection is not None:
            self._connection.cut(why)

    def take_over(self, channel: str) -> None:
        """Hear what another line heard until now, as if that line had been lost."""
        self._wanted.add(channel)
        self._awaited_after_loss.add(channel)
        if self._connection is not None:
            self._connection.tell(self._enter, channel)

    def hears(self, channel: str) -> bool:
        """Whether messages are heard now: `subscribe` would return at once."""
        confirmed = self._confirmed.get(channel)
        return confirmed is not None and confirmed.done() and confirmed.exception() is None

    async def subscribe(self, channel: str) -> None:
        """Returns when messages are heard. Raises `StoreUnavailable` when there is no connection, or it is lost."""
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            if self._connection is None:
                raise StoreUnavailable("Redis is away", maybe_done=False)
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
            confirmed.add_done_callback(_mark_retrieved)
            self._wanted.add(channel)
            self._connection.tell(self._enter, channel)
        if not confirmed.done():
            await asyncio.shield(confirmed)
        else:
            confirmed.result()

    def unsubscribe(self, channel: str) -> None:
        self._wanted.discard(channel)
        confirmed = self._confirmed.pop(channel, None)
        if confirmed is not None and not confirmed.done():
            confirmed.set_exception(StoreUnavailable("the subscription was given up", maybe_done=False))
        if self._connection is not None:
            self._leaving[channel] += 1
            self._connection.tell(self._leave, channel)
        self._no_longer_awaited(channel)

    def _confirm(self, channel: str) -> None:
        confirmed = self._confirmed.get(channel)
        if confirmed is None and channel in self._wanted:
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
        self._no_longer_awaited(channel)

    def _no_longer_awaited(self, channel: str) -> None:
        """It is heard again, or nobody wants it any more; the gap is over with the last one."""
        if channel in self._awaited_after_loss:
            self._awaited_after_loss.discard(channel)
            if not self._awaited_after_loss:
                self._on_gap()

    def _on_down(self, lost: asyncio.Future[str]) -> None:
        """Who waits for a confirmation fails; the channels stay wanted."""
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
