"""One suite for every store: the fixture `bench` makes stores of several owners on one server of each kind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from shared.clock import ManualClock
from shared.core.lifecycle import TRANSITIONS
from shared.store.cluster import ClusterStore
from shared.store.one_server import RedisStore
from tests.contract.samples import SESSION_TTL_S
from tests.memory_store import MemoryServer, MemoryStore
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer, running_redis
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from shared.core.lifecycle import Transitions
    from shared.store.contract import Store


@dataclass
class Heard:
    """A listener that keeps what it heard; `await heard.until(condition)` waits until that holds."""

    announced: list[tuple[str, int]] = field(default_factory=list)
    controls: list[bytes] = field(default_factory=list)
    gaps: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        self.announced += [(session_key, seq_id) for seq_id in seq_ids]
        self._changed.set()

    def on_gap(self) -> None:
        self.gaps += 1
        self._changed.set()

    def on_control(self, message: bytes) -> None:
        self.controls.append(message)
        self._changed.set()

    async def until(self, condition: Any) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not after {DEADLINE_S:g} s; heard so far: {self}") from None


class Bench:
    """One shared server of any kind, and stores of several owners on it."""

    def __init__(self, redis: RedisServer | RedisCluster | None) -> None:
        self.redis = redis
        self.clock = ManualClock()
        self.memory = MemoryServer(self.clock, Random(7))
        self._stores: list[Store] = []

    async def store(self, owner: str, listener: Heard | None = None, transitions: Transitions = TRANSITIONS) -> Store:
        made = self._made(transitions)
        await made.open(listener or Heard(), owner)
        self._stores.append(made)
        return made

    def _made(self, transitions: Transitions) -> Store:
        rng = Random(len(self._stores))
        match self.redis:
            case RedisServer(url=url):
                return RedisStore(url, rng=rng, linger_s=0.05, session_ttl_s=SESSION_TTL_S, transitions=transitions)
            case RedisCluster(url=url):
                return ClusterStore(url, rng=rng, linger_s=0.05, session_ttl_s=SESSION_TTL_S, transitions=transitions)
        return MemoryStore(self.memory, transitions)

    async def ttl_s(self, name: str) -> float:
        """Return the seconds left of a sample's record: -1 if it does not expire, -2 if there is none."""
        if self.redis is None:
            for key, stored in self.memory.samples.items():
                if f"gw:s:{key.session_key}:{key.seq_id}" == name:
                    return stored.expires_s - self.clock.monotonic_s() if stored.expires_s is not None else -1
            return -2
        return self._redis_ttl_s(name)

    def _redis_ttl_s(self, name: str) -> float:
        assert self.redis is not None
        left_ms = int(self.redis.command("PTTL", name)[1:].strip())
        return left_ms / 1000 if left_ms >= 0 else left_ms

    def lock_ttl_s(self, name: str) -> float:
        """Return for how much longer a lock is held."""
        if self.redis is None:
            return self.memory.locks[name][1] - self.clock.monotonic_s()
        return self._redis_ttl_s(f"gw:k:{name}")

    def let_lock_lapse(self, name: str) -> None:
        """End a lock, as if its time had passed."""
        if self.redis is None:
            del self.memory.locks[name]
        else:
            assert self.redis.command("DEL", f"gw:k:{name}") == b":1\r\n"

    def forget(self, name: str) -> None:
        """Let a sample's record or a log expire now."""
        if self.redis is None:
            _, kind, session_key, number = name.split(":")
            container: Any = self.memory.samples if kind == "s" else self.memory.logs
            container.pop((session_key.strip("{}"), int(number)))
        else:
            assert self.redis.command("DEL", name) == b":1\r\n"

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    cluster = RedisCluster()
    yield cluster
    cluster.stop()


@pytest.fixture(params=[None, "redis_server", "redis_cluster"], ids=["memory", "redis", "cluster"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    kind = request.param
    redis = (
        None if kind == "memory" else request.getfixturevalue("redis_server" if kind == "redis" else "redis_cluster")
    )
    if redis is not None:
        redis.command("FLUSHALL")
    made = Bench(redis)
    yield made
    await made.close()
