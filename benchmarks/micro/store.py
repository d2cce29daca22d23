"""Measure what a sample costs in the store: begin, settle, announce, read and mark as retrieved, on private servers.

64 callers at once, as on a busy worker; results of 200 bytes. The servers' CPU and the number of commands are notes,
since they do not belong to this process.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from benchmarks.baselines import notes_on_missing
from benchmarks.turns import Case, Contender, Figure, Findings, Plan, WrongResult, measure
from gateway.bench.watch import procfs
from gateway.supervision.backing import NullListener
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.cluster import ClusterStore
from shared.store.one_server import RedisStore
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from benchmarks.baselines.redis_commands import RedisCommands

    OneSample = Callable[[int], Awaitable[None]]

CALLERS = 64
CALLS_EACH = 100
# A session keeps its log on one node of a cluster; sixteen sessions are spread over all three.
SESSIONS = 16
MASTERS = 3
TTL_S = 60.0
PAYLOAD = bytes(200)
CLAIM = Claim("benchmark-000000", 1, 1, bytes(16))


class Load:
    """Work by `CALLERS` callers that each do one sample after another; no sample is done twice."""

    def __init__(self, sample: OneSample) -> None:
        self._sample = sample
        self.done = 0

    async def __call__(self, calls: int) -> None:
        numbers = iter(range(self.done, self.done + calls))

        async def caller() -> None:
            for number in numbers:
                await self._sample(number)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        self.done += calls


async def store(plan: Plan) -> Findings:
    """Measure one server, over a UNIX socket and over TCP, and a cluster."""
    found = await over_unix_socket(plan)
    with _one(tcp=True) as server:
        await _measure("store sample over TCP", server.url, [server], plan, found)
    with _cluster() as cluster:
        await _measure(f"store sample on a cluster of {MASTERS}", cluster.url, cluster.masters, plan, found)
    return found


async def over_unix_socket(plan: Plan) -> Findings:
    """Measure one server over a UNIX socket, beside redis-py if it is installed."""
    found = Findings()
    with _one(tcp=False) as server:
        await _measure("store sample over a UNIX socket", server.url, [server], plan, found)
    return found


async def _measure(name: str, url: str, servers: Sequence[RedisServer], plan: Plan, found: Findings) -> None:
    ours = (ClusterStore if url.startswith("redis+cluster:") else RedisStore)(url, "bench", rng=Random(1))
    await ours.open(NullListener(), CLAIM.owner)
    load, calls = Load(_our_sample(ours)), plan.calls(CALLERS * CALLS_EACH)
    try:
        beside = url.startswith("unix:")
        missing = notes_on_missing(name, "redis") if beside else []
        found.notes += [await _note(name, ours, load, servers, calls), *missing]
        if beside and not missing:
            found.figures += await _beside_redis_py(name, load, servers[0], calls, plan.rounds)
        else:
            found.figures += await measure(Case(name, calls, [Contender("gateway", load)]), plan.rounds)
    finally:
        await ours.close()


async def _beside_redis_py(name: str, load: Load, server: RedisServer, calls: int, rounds: int) -> list[Figure]:
    from benchmarks.baselines.redis_commands import PipelinedRedisCommands, RedisCommands

    path = Path(server.url.removeprefix("unix://"))
    async with AsyncExitStack() as stack:
        contenders = [Contender("gateway", load)]
        for theirs, baseline in (
            ("redis-py, pipelined once a turn", PipelinedRedisCommands(path)),
            ("redis-py, a call per command", RedisCommands(path, CALLERS)),
        ):
            stack.push_async_callback(baseline.close)
            await baseline.open()
            contenders.append(Contender(theirs, Load(_their_sample(baseline))))
        return await measure(Case(name, calls, contenders), rounds)


async def _note(
    name: str, ours: RedisStore | ClusterStore, load: Load, servers: Sequence[RedisServer], calls: int
) -> str:
    commands, cpu_s = ours.commands, _cpu_s(servers)
    await load(calls)
    commands_each, cpu_us = (ours.commands - commands) / calls, (_cpu_s(servers) - cpu_s) * 1e6 / calls
    return f"{name}: {commands_each:.1f} commands and {cpu_us:.0f} us of the servers' CPU each"


def _our_sample(ours: RedisStore | ClusterStore) -> OneSample:
    async def sample(number: int) -> None:
        key = SampleKey(f"session-{number % SESSIONS}", number)
        await ours.begin(key, CLAIM)
        await ours.settle(key, CLAIM, State.READY, PAYLOAD, ttl_s=TTL_S, now_ms=time.time_ns() // 1_000_000)
        ours.announce(key.session_key, key.seq_id)
        record = await ours.read(key)
        if record is None or record.payload != PAYLOAD:
            raise WrongResult(f"the store returned a wrong record for sample {number}")
        await ours.mark_retrieved([key], ttl_s=TTL_S)

    return sample


def _their_sample(baseline: RedisCommands) -> OneSample:
    async def sample(number: int) -> None:
        key, now_ms = SampleKey(f"session-{number % SESSIONS}", number), time.time_ns() // 1_000_000
        if await baseline.sample(key, CLAIM, PAYLOAD, int(TTL_S * 1000), now_ms) != PAYLOAD:
            raise WrongResult(f"redis-py returned a wrong record for sample {number}")

    return sample


def _cpu_s(servers: Sequence[RedisServer]) -> float:
    found = [procfs.usage(server.pid) for server in servers]
    return sum(usage.cpu_seconds for usage in found if usage is not None)


@contextmanager
def _one(*, tcp: bool) -> Iterator[RedisServer]:
    server = RedisServer(tcp=tcp)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def _cluster() -> Iterator[RedisCluster]:
    cluster = RedisCluster(MASTERS)
    try:
        yield cluster
    finally:
        cluster.stop()
