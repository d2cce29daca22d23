"""Watch a gateway from outside while it is under load: health, processes, its own counters, the simulator's.

The watch runs in the driver, beside the load clients and never in them. Figures that cannot be had (a remote gateway,
no admin address) stay None.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from gateway.bench.watch import procfs
from gateway.bench.watch.usage import MachineLedger, UsageLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.bench.installation import Deployment
    from gateway.bench.watch.procfs import ProcessUsage

# Names that the process of the embedded server may have.
_REDIS_SERVERS: Final = ("valkey-server", "redis-server")
_LOOK_S: Final = 0.5
_HEALTHZ_S: Final = 0.05
_PROBED_S: Final = 10.0
_PROBED_AGAIN_S: Final = 0.1
# Longer than the interval of the workers' reports (1 s) and of the supervisor's INFO to Redis.
_COUNTERS_S: Final = 2.2
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0)


@dataclass(slots=True)
class Observations:
    """Everything the watch saw. `first_*`, `last_*`: /status and the simulator's stats before and after the load."""

    workers: UsageLedger = field(default_factory=UsageLedger)
    redis: UsageLedger = field(default_factory=UsageLedger)
    clients: UsageLedger = field(default_factory=UsageLedger)
    simulators: UsageLedger = field(default_factory=UsageLedger)
    # Part of the run, but of no figure: the supervisor and the bench itself.
    aside: UsageLedger = field(default_factory=UsageLedger)
    machine: MachineLedger = field(default_factory=lambda: MachineLedger(procfs.cpus()))
    healthz_ms: list[float] = field(default_factory=list)
    # Monotonic time at which each probe of `healthz_ms` was sent.
    healthz_at_s: list[float] = field(default_factory=list)
    healthz_failures: int = 0
    # For each unanswered probe: when it was sent, and how long the watch waited.
    healthz_unanswered_s: list[tuple[float, float]] = field(default_factory=list)
    first_listen_overflows: int | None = None
    last_listen_overflows: int | None = None
    loop_lag_ms_p99: list[float] = field(default_factory=list)
    loop_lag_ms_max: float | None = None
    redis_peak_bytes: int | None = None
    first_status: dict[str, Any] | None = None
    last_status: dict[str, Any] | None = None
    first_stats: dict[str, Any] | None = None
    last_stats: dict[str, Any] | None = None
    # The stats of each killed simulator, read just before the kill.
    ended_stats: list[dict[str, Any]] = field(default_factory=list)

    def take_status(self, status: dict[str, Any], at_s: float = 0.0) -> None:
        self.first_status = status if self.first_status is None else self.first_status
        self.last_status = status
        workers = status.get("workers") or []
        self.workers.look(_usages(worker.get("pid") for worker in workers), at_s)
        self.loop_lag_ms_p99 += [lag for worker in workers if (lag := worker.get("loop_lag_ms_p99")) is not None]
        largest = [lag for worker in workers if (lag := worker.get("loop_lag_ms_max")) is not None]
        if largest:
            self.loop_lag_ms_max = max([*largest, self.loop_lag_ms_max or 0.0])
        self._take_redis(status.get("redis") or {})

    def take_counters(self, status: dict[str, Any] | None) -> None:
        """Take the counters that stand after the load; processes and lag are no longer sampled."""
        if status is not None:
            self.last_status = status
            self._take_redis(status.get("redis") or {})

    def take_processes(self, pids: Pids, at_s: float) -> None:
        self.redis.look(_usages(pids.redis), at_s)
        self.clients.look(_usages(pids.clients), at_s)
        self.simulators.look(_usages(pids.simulators), at_s)
        self.aside.look(_usages(pids.aside), at_s)
        self.machine.look(procfs.machine_busy_seconds(), at_s)
        self.last_listen_overflows = procfs.listen_overflows()
        if self.first_listen_overflows is None:
            self.first_listen_overflows = self.last_listen_overflows

    def take_health(self, at_s: float, took_s: float, *, answered: bool) -> None:
        if answered:
            self.healthz_at_s.append(at_s)
            self.healthz_ms.append(took_s * 1e3)
        else:
            self.healthz_failures += 1
            self.healthz_unanswered_s.append((at_s, took_s))

    def _take_redis(self, redis: dict[str, Any]) -> None:
        if isinstance(used := redis.get("used_bytes"), int):
            self.redis_peak_bytes = max(self.redis_peak_bytes or 0, used)


@dataclass(frozen=True, slots=True)
class Pids:
    """The processes of one moment by what they are; the workers' come from /status."""

    redis: list[int]
    clients: list[int]
    simulators: list[int]
    aside: list[int]


class Watch:
    """Watch from `start` until `stop`. Owns its tasks and its HTTP session.

    `client_pids` returns the load clients that are running at that moment.
    """

    def __init__(self, deployment: Deployment, client_pids: Callable[[], list[int]] = list) -> None:
        self.observations = Observations()
        self._deployment = deployment
        self._client_pids = client_pids
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        # A new connection for each request, so that SO_REUSEPORT spreads the probes over all workers.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        await self._until_probed()
        await self._look()
        await self._look_at_simulator()
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self._probe_health())]

    async def stop(self) -> None:
        """Take the last look. Raises whatever made an earlier look fail, since its figures are missing."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            async with self._session:
                await self._look()
                await self._look_at_simulator()
                if self._deployment.admin_url is not None:
                    # Workers report their counters once a second, and Redis is asked as seldom.
                    await asyncio.sleep(_COUNTERS_S)
                    self.observations.take_counters(await self.status())
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        if (admin := self._deployment.admin_url) and (status := await self._get_json(f"{admin}/status")):
            self.observations.take_status(status, time.monotonic())
        self.observations.take_processes(self._pids(), time.monotonic())

    def _pids(self) -> Pids:
        supervisor, simulator = self._deployment.gateway_pid, self._deployment.simulator_pid()
        own_redis = self._deployment.own_redis_pid()
        embedded = [] if supervisor is None else procfs.children_named(supervisor, _REDIS_SERVERS)
        return Pids(
            redis=embedded if own_redis is None else [*embedded, own_redis],
            clients=self._client_pids(),
            simulators=[] if simulator is None else [simulator, *procfs.children(simulator)],
            aside=[os.getpid()] if supervisor is None else [os.getpid(), supervisor],
        )

    async def _look_at_simulator(self) -> None:
        # Only before and after the load: the stats list request ids, so the document can be large.
        if (simulator := self._deployment.simulator_url) and (stats := await self._get_json(f"{simulator}/_sim/stats")):
            seen = self.observations
            seen.first_stats, seen.last_stats = stats if seen.first_stats is None else seen.first_stats, stats

    async def simulator_ends(self) -> None:
        """Keep the simulator's counts, which are lost when it is killed."""
        if (simulator := self._deployment.simulator_url) and (stats := await self._get_json(f"{simulator}/_sim/stats")):
            self.observations.ended_stats.append(stats)

    async def status(self) -> dict[str, Any] | None:
        """Return the admin address's /status, or None if it does not answer."""
        admin = self._deployment.admin_url
        return await self._get_json(f"{admin}/status") if admin is not None else None

    async def _until_probed(self) -> None:
        """Wait until the gateway has probed its upstreams, so that those requests do not count as load."""
        admin, deadline_s = self._deployment.admin_url, time.monotonic() + _PROBED_S
        while admin is not None and time.monotonic() < deadline_s:
            status = await self._get_json(f"{admin}/status")
            if status is None or probed(status):
                return
            await asyncio.sleep(_PROBED_AGAIN_S)

    async def _probe_health(self) -> None:
        url = f"{self._deployment.url}/api/v1/healthz"
        while True:
            started_s = time.monotonic()
            answer = await self._get_json(url)
            self.observations.take_health(started_s, time.monotonic() - started_s, answered=answer is not None)
            await asyncio.sleep(_HEALTHZ_S)

    async def _get_json(self, url: str) -> dict[str, Any] | None:
        assert self._session is not None
        try:
            async with self._session.get(url) as response:
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return body if response.status == 200 and isinstance(body, dict) else None


def probed(status: Mapping[str, Any]) -> bool:
    """Return whether /status lists upstreams and the gateway has checked the logprobs of each."""
    upstreams = status.get("upstreams") or ()
    return bool(upstreams) and all(upstream.get("logprobs_scale") is not None for upstream in upstreams)


def _usages(pids: Any) -> dict[int, ProcessUsage]:
    return {pid: usage for pid in pids if isinstance(pid, int) and (usage := procfs.usage(pid)) is not None}
