"""The steps of a sample as redis-py offers them: one awaited call per command, over its connection pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import UnixDomainSocketConnection

if TYPE_CHECKING:
    from pathlib import Path


class RedisCommands:
    """Against a server on a UNIX socket, over at most `connections` connections."""

    def __init__(self, path: Path, connections: int) -> None:
        pool: Any = BlockingConnectionPool(
            connection_class=UnixDomainSocketConnection, path=str(path), max_connections=connections
        )
        self._pool = pool
        self._redis: Any = Redis(connection_pool=pool)

    async def sample(self, session: str, number: int, payload: bytes, ttl_ms: int) -> bytes:
        """Claim, settle with `payload`, announce, and read back."""
        redis, key = self._redis, f"baseline:s:{session}:{number}"
        await redis.sadd("baseline:open", key)
        await redis.set(key, b"P", nx=True)
        await redis.set(key, payload, px=ttl_ms)
        await redis.xadd(f"baseline:l:{session}", {"n": number}, maxlen=10_000, approximate=True)
        await redis.srem("baseline:open", key)
        await redis.publish(f"baseline:a:{session}", number)
        read: bytes = await redis.get(key)
        await redis.pexpire(key, ttl_ms)
        return read

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()
