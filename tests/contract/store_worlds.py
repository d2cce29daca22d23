"""Servers of both kinds, which the stateful test wipes, inspects and moves forward in time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

import hiredis

from shared.clock import ManualClock
from shared.store.one_server import RedisStore
from shared.store.schema import Keys, key_of, member
from tests.memory_store import MemoryServer, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.core.model import SampleKey
    from shared.store.contract import Store
    from tests.redis_server import RedisServer

# A jump of the clock, like that of a server that was asleep.
_JUMP: Final = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 and left_ms <= tonumber(ARGV[1]) then redis.call('DEL', key) end
  if left_ms > tonumber(ARGV[1]) then redis.call('PEXPIRE', key, left_ms - ARGV[1]) end
end
"""
_PEEK: Final = """
local lives, open = {}, {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ':s:*')) do
  lives[#lives + 1] = string.sub(key, #ARGV[1] + 4)
  lives[#lives + 1] = redis.call('PTTL', key)
end
for n = 2, #ARGV, 2 do open[#open + 1] = {ARGV[n], redis.call('SMEMBERS', ARGV[n + 1])} end
return {lives, open}
"""
_NAMES: Final = Keys("gw")


@dataclass
class Peek:
    """The contents of a server. `left_s` is None for a record that does not expire."""

    left_s: dict[SampleKey, float | None]
    open_sets: dict[str, set[SampleKey]]


class World(Protocol):
    def make_store(self) -> Store: ...

    def jump(self, seconds: int) -> None: ...

    def wipe(self) -> None: ...

    def peek(self, owners: Iterable[str]) -> Peek: ...

    def enter_open_set(self, owner: str, key: SampleKey) -> None:
        """Leave the entry of a worker that died between the two steps of a begin."""
        ...


class MemoryWorld:
    def __init__(self) -> None:
        self._clock = ManualClock()
        self._server = MemoryServer(self._clock, Random(1))

    def make_store(self) -> Store:
        return MemoryStore(self._server)

    def jump(self, seconds: int) -> None:
        self._clock.advance(seconds)

    def wipe(self) -> None:
        self._server.wipe()

    def peek(self, owners: Iterable[str]) -> Peek:
        now_s = self._clock.monotonic_s()
        lives = {
            key: stored.expires_s - now_s if stored.expires_s is not None else None
            for key, stored in self._server.samples.items()
        }
        left_s = {key: life_s for key, life_s in lives.items() if life_s is None or life_s > 0}
        return Peek(left_s, {owner: set(self._server.open_sets[owner]) for owner in owners})

    def enter_open_set(self, owner: str, key: SampleKey) -> None:
        self._server.open_sets[owner].add(key)


class RedisWorld:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._stores = 0
        self.wipe()

    def make_store(self) -> Store:
        self._stores += 1
        return RedisStore(self._server.url, rng=Random(self._stores))

    def jump(self, seconds: int) -> None:
        self._ask("EVAL", _JUMP, "0", str(seconds * 1000))

    def wipe(self) -> None:
        self._ask("FLUSHALL")
        self._ask("SCRIPT", "FLUSH")

    def peek(self, owners: Iterable[str]) -> Peek:
        named = [word for owner in owners for word in (owner, _NAMES.open_set(owner))]
        lives, open_sets = self._ask("EVAL", _PEEK, "0", _NAMES.prefix, *named)
        left_s = {
            key_of(name.decode()): left_ms / 1000 if left_ms >= 0 else None
            for name, left_ms in zip(lives[::2], lives[1::2], strict=True)
        }
        return Peek(left_s, {owner.decode(): {key_of(one.decode()) for one in names} for owner, names in open_sets})

    def enter_open_set(self, owner: str, key: SampleKey) -> None:
        self._ask("SADD", _NAMES.open_set(owner), member(key))

    def _ask(self, *words: str) -> Any:
        reader = hiredis.Reader()
        reader.feed(self._server.command(*words))
        reply = reader.gets()
        assert not isinstance(reply, hiredis.ReplyError), reply
        return reply
