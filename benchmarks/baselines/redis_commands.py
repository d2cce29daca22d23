"""The steps of a sample through redis-py: the same commands and scripts as the store's, with its connection pool."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import UnixDomainSocketConnection

from shared.core.lifecycle import TRANSITIONS, State
from shared.core.record import HANDED_OVER, HEADER_BYTES, pack
from shared.store import schema, scripts

if TYPE_CHECKING:
    from pathlib import Path

    from shared.core.model import SampleKey
    from shared.core.record import Claim

_BEGIN = scripts.begin(TRANSITIONS)
_SETTLE = scripts.settle(TRANSITIONS)
_START_CLOCK = scripts.start_clock(TRANSITIONS)


class RedisCommands:
    """One awaited call per command, over at most `connections` connections to a server on a UNIX socket."""

    def __init__(self, path: Path, connections: int) -> None:
        pool: Any = BlockingConnectionPool(
            connection_class=UnixDomainSocketConnection, path=str(path), max_connections=connections
        )
        self._pool = pool
        self._redis: Any = Redis(connection_pool=pool)
        self._keys = schema.Keys("baseline")

    async def open(self) -> None:
        """Load the scripts, so that no call has to send a source."""
        for script in (_BEGIN, _SETTLE, _START_CLOCK):
            await self._redis.script_load(script.source)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()

    async def sample(self, key: SampleKey, claim: Claim, payload: bytes, ttl_ms: int, now_ms: int) -> bytes:
        """Begin, settle with `payload`, announce, read and start the clock; return what was read."""
        record, open_set, name = self._keys.sample(key), self._keys.open_set(claim.owner), schema.member(key)
        log = self._keys.log(key.session_key, key.clone_id)
        entry = schema.log_entry(key, State.READY, len(payload), now_ms)
        settled = pack(State.READY, claim, payload)
        await self._call("EVALSHA", _BEGIN.name, 2, record, open_set, pack(State.PENDING, claim), name)
        await self._call("EVALSHA", _SETTLE.name, 3, record, open_set, log, settled, ttl_ms, name, entry, 1)
        await self._call("PUBLISH", self._keys.announcement(key.session_key), key.seq_id)
        read: bytes = await self._call("GETRANGE", record, 0, 32 * 1024 - 1)
        await self._call("EVALSHA", _START_CLOCK.name, 1, record, ttl_ms, HANDED_OVER)
        return read[HEADER_BYTES:]

    async def _call(self, *arguments: bytes | str | int) -> Any:
        return await self._redis.execute_command(*arguments)


class PipelinedRedisCommands(RedisCommands):
    """All commands of one event-loop turn in one pipeline; while one is under way, commands wait for the next."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 1)
        self._waiting: list[tuple[tuple[bytes | str | int, ...], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def _call(self, *arguments: bytes | str | int) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, reply))
        if self._task is None:
            self._task = asyncio.create_task(self._send_all())
        return await reply

    async def _send_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            pipeline = self._redis.pipeline(transaction=False)
            for arguments, _ in waiting:
                pipeline.execute_command(*arguments)
            replies = await pipeline.execute(raise_on_error=False)
            for (_, future), reply in zip(waiting, replies, strict=True):
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        self._task = None
