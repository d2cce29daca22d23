"""Break workers, Redis and the upstream at the times of a chaos plan, and start them again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from gateway.bench.watch.chaos import STALL_S, Break, ChaosFault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from gateway.bench.installation import OwnRedis
    from gateway.bench.watch.chaos import Planned

    # The document of the admin address's /status, or None if it does not answer.
    Status = Callable[[], Awaitable[dict[str, Any] | None]]

_LOOK_S: Final = 0.05
# A slot that is not ready by then will not become ready.
_READY_WITHIN_S: Final = 60.0


class Breaker:
    """Carry out a chaos plan. `restart_upstream` kills the upstream and starts a new one on its port."""

    def __init__(
        self,
        plan: Sequence[Planned],
        redis: OwnRedis,
        restart_upstream: Callable[[], Awaitable[None]],
        status: Status,
        rng: Random,
    ) -> None:
        self._plan = plan
        self._redis = redis
        self._restart_upstream = restart_upstream
        self._status = status
        self._rng = rng
        self._one_redis_fault = asyncio.Lock()
        self._one_upstream_fault = asyncio.Lock()
        self.breaks: list[Break] = []

    async def run(self) -> None:
        """Run the plan from the first sample on, until killed workers are ready again. Raises `StartError`."""
        started_s = time.monotonic()
        tasks = [asyncio.create_task(self._do(planned, started_s)) for planned in self._plan]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _do(self, planned: Planned, started_s: float) -> None:
        await asyncio.sleep(max(started_s + planned.at_s - time.monotonic(), 0.0))
        match planned.fault:
            case ChaosFault.KILL_WORKER:
                await self._kill_worker()
            case ChaosFault.KILL_UPSTREAM:
                await self._outage(planned.fault, self._one_upstream_fault, self._restart_upstream)
            case _:
                await self._outage(planned.fault, self._one_redis_fault, lambda: self._break_redis(planned.fault))

    async def _outage(self, fault: ChaosFault, lock: asyncio.Lock, act: Callable[[], Awaitable[None]]) -> None:
        """Run `act` and record it; a second fault of the same server waits until the first one is over."""
        async with lock:
            began_s = time.monotonic()
            await act()
            self.breaks.append(Break(fault, began_s, time.monotonic()))

    async def _break_redis(self, fault: ChaosFault) -> None:
        if fault is ChaosFault.STALL_REDIS:
            await self._redis.stall(STALL_S)
        else:
            await self._redis.restart(keep_data=fault is ChaosFault.RESTART_REDIS)

    async def _kill_worker(self) -> None:
        workers = await self._workers()
        alive = [worker for worker in workers if worker.get("pid")]
        if not alive:
            return
        victim = self._rng.choice(alive)
        killed_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        ready_s: float | None = None
        try:
            ready_s = await self._until_ready(victim["slot"], victim["pid"])
        finally:
            self.breaks.append(Break(ChaosFault.KILL_WORKER, killed_s, killed_s, ready_s, victim.get("in_flight", 0)))

    async def _until_ready(self, slot: int, old_pid: int) -> float | None:
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline_s:
            for worker in await self._workers():
                if worker["slot"] == slot and worker["state"] == "ready" and worker["pid"] != old_pid:
                    return time.monotonic()
            await asyncio.sleep(_LOOK_S)
        return None

    async def _workers(self) -> list[dict[str, Any]]:
        status = await self._status()
        return list((status or {}).get("workers") or ())
