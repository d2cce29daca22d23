"""What the store costs a worker: CPU of this process per command and per sample, on a private server of its own.

    python benchmarks/store_roundtrip.py [--rounds 5] [--size-bytes 200]

CPU is `time.process_time`; the least of the rounds is the cost without neighbours, the median what was seen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import uvloop

from gateway.embedded_redis import EmbeddedRedis
from shared.config import MIB
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

CALLERS = 64
CALLS_EACH = 100
OWNER = "benchmark-000000"
TTL_S = 60.0


class Silent:
    """A listener for what nobody waits for."""

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        pass

    def on_gap(self) -> None:
        pass

    def on_control(self, message: bytes) -> None:
        pass


def show(line: str) -> None:
    sys.stdout.write(line + "\n")


class Rounds:
    """CPU and commands of one kind of work, done by `CALLERS` callers at once."""

    def __init__(self, store: RedisStore, rounds: int) -> None:
        self._store = store
        self._rounds = rounds

    async def measure(self, name: str, work: Callable[[int], Awaitable[object]]) -> None:
        await self._once(work, 0)
        commands_before = self._store.commands
        costs_us = [await self._once(work, number) for number in range(1, self._rounds + 1)]
        commands = (self._store.commands - commands_before) / (self._rounds * CALLERS * CALLS_EACH)
        median_us = statistics.median(costs_us)
        show(f"{name:28} {min(costs_us):7.1f} {median_us:7.1f} us, {commands:.2f} commands")

    async def _once(self, work: Callable[[int], Awaitable[object]], number: int) -> float:
        first = number * CALLERS * CALLS_EACH

        async def caller(start: int) -> None:
            for offset in range(CALLS_EACH):
                await work(start + offset)

        began_s = time.process_time()
        await asyncio.gather(*(caller(first + index * CALLS_EACH) for index in range(CALLERS)))
        cost_us = (time.process_time() - began_s) * 1e6 / (CALLERS * CALLS_EACH)
        await self._make_room()
        return cost_us

    async def _make_room(self) -> None:
        info = await self._store.info()
        if info.used_bytes > info.max_bytes // 4:
            await self._store._line.call("FLUSHDB")


async def measure(url: str, rounds: int, size_bytes: int) -> None:
    store = RedisStore(url, "bench", rng=Random(1))
    await store.open(Silent(), OWNER)
    payload = bytes(size_bytes)
    claim = Claim(OWNER, 1, 1, bytes(16))

    async def sample(number: int) -> None:
        key = SampleKey("session", number)
        await store.begin(key, claim)
        await store.settle(key, claim, State.READY, payload, ttl_s=TTL_S, now_ms=time.time_ns() // 1_000_000)
        store.announce(key.session_key, key.seq_id)
        await store.read(key)
        await store.mark_retrieved([key], ttl_s=TTL_S)

    of = Rounds(store, rounds)
    show(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    show(f"{CALLERS} callers, {size_bytes} bytes, {(await store.info()).version}, UNIX socket")
    show(f"{'':28} {'least':>7} {'median':>7}")
    await of.measure("SET", lambda number: store._line.call("SET", f"bench:v:{number % 64}", payload))
    await of.measure("GET", lambda number: store._line.call("GET", f"bench:v:{number % 64}"))
    await of.measure("begin, settle, read, mark", sample)
    await store.close()


async def run(rounds: int, size_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        server = EmbeddedRedis(Path(run_dir), 2048 * MIB)
        try:
            await measure(await server.start(), rounds, size_bytes)
        finally:
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-bytes", type=int, default=200)
    options = parser.parse_args()
    uvloop.run(run(options.rounds, options.size_bytes))


if __name__ == "__main__":
    main()
