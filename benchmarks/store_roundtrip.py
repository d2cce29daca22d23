"""What the store costs: CPU of a worker and of the servers per command and per sample, on private servers of its own.

    python benchmarks/store_roundtrip.py [--rounds 5] [--size-bytes 200] [--masters N | --tcp]

With `--masters N` the servers are a cluster of so many nodes on loopback TCP; `--tcp` has one there, too. CPU of the
worker is `time.process_time`; the least of the rounds is the cost without neighbours, the median what was seen.
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
from shared.store.cluster import ClusterStore
from shared.store.redis import RedisStore
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

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


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds, user and system, that these processes have used."""
    used = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids)
    return sum(int(ticks) for pair in used for ticks in pair) / os.sysconf("SC_CLK_TCK")


class Rounds:
    """CPU and commands of one kind of work, done by `CALLERS` callers at once."""

    def __init__(self, store: RedisStore | ClusterStore, rounds: int, server_pids: Sequence[int]) -> None:
        self._store = store
        self._rounds = rounds
        self._server_pids = server_pids

    async def measure(self, name: str, work: Callable[[int], Awaitable[object]]) -> None:
        await self._once(work, 0)
        commands_before, servers_before_s = self._store.commands, cpu_s(self._server_pids)
        costs_us = [await self._once(work, number) for number in range(1, self._rounds + 1)]
        calls = self._rounds * CALLERS * CALLS_EACH
        commands = (self._store.commands - commands_before) / calls
        servers_us = (cpu_s(self._server_pids) - servers_before_s) * 1e6 / calls
        median_us = statistics.median(costs_us)
        show(f"{name:28} {min(costs_us):7.1f} {median_us:7.1f} us {servers_us:7.1f} us, {commands:.2f} commands")

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
        if info.max_bytes and info.used_bytes > info.max_bytes // 4:
            await self._store._line.call("FLUSHDB")


def make_store(url: str) -> RedisStore | ClusterStore:
    kind = ClusterStore if url.startswith("redis+cluster:") else RedisStore
    return kind(url, "bench", rng=Random(1))


async def measure(url: str, pids: Sequence[int], rounds: int, size_bytes: int) -> None:
    store = make_store(url)
    await store.open(Silent(), OWNER)
    payload = bytes(size_bytes)
    claim = Claim(OWNER, 1, 1, bytes(16))

    async def sample(number: int) -> None:
        # Sixteen sessions, as one keeps its log on one node of a cluster.
        key = SampleKey(f"session-{number % 16}", number)
        await store.begin(key, claim)
        await store.settle(key, claim, State.READY, payload, ttl_s=TTL_S, now_ms=time.time_ns() // 1_000_000)
        store.announce(key.session_key, key.seq_id)
        await store.read(key)
        await store.mark_retrieved([key], ttl_s=TTL_S)

    of = Rounds(store, rounds, pids)
    show(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    info = await store.info()
    show(
        f"{CALLERS} callers, {size_bytes} bytes, {info.version}, {info.mode}, {len(pids)} servers, {url.split(':')[0]}"
    )
    show(f"{'':28} {'least':>7} {'median':>7} {'servers':>10}")
    await of.measure("SET", lambda number: store._line.call("SET", f"bench:v:{number % 64}", payload))
    await of.measure("GET", lambda number: store._line.call("GET", f"bench:v:{number % 64}"))
    await of.measure("begin, settle, read, mark", sample)
    await store.close()


async def run_embedded(rounds: int, size_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        server = EmbeddedRedis(Path(run_dir), 2048 * MIB)
        try:
            url = await server.start()
            assert server.pid is not None
            await measure(url, [server.pid], rounds, size_bytes)
        finally:
            await server.stop()


async def run_cluster(masters: int, rounds: int, size_bytes: int) -> None:
    cluster = RedisCluster(masters)
    try:
        await measure(cluster.url, [node.pid for node in cluster.masters], rounds, size_bytes)
    finally:
        cluster.stop()


async def run_tcp(rounds: int, size_bytes: int) -> None:
    server = RedisServer(tcp=True)
    try:
        await measure(server.url, [server.pid], rounds, size_bytes)
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-bytes", type=int, default=200)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--masters", type=int, default=0)
    kind.add_argument("--tcp", action="store_true")
    options = parser.parse_args()
    if options.masters:
        uvloop.run(run_cluster(options.masters, options.rounds, options.size_bytes))
    elif options.tcp:
        uvloop.run(run_tcp(options.rounds, options.size_bytes))
    else:
        uvloop.run(run_embedded(options.rounds, options.size_bytes))


if __name__ == "__main__":
    main()
