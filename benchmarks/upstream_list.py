"""Measure how long a published list of upstreams takes to reach every worker of every host.

    python -m benchmarks.upstream_list --changes 20
    python -m benchmarks.upstream_list --pause 0      one change right after the other

Two gateways with two workers each share one Redis and run a small load of OpenAI completions; each worker has its own
source IP. `PUT /upstreams` at one gateway changes the list from one simulated vLLM to another and back. A change has
arrived when the new vLLM has counted a completion from each of the four workers. So the figure includes the PUT itself
and the wait for the next completion of the slowest worker. Exit code 1 if a change took more than a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tests.redis_server import RedisServer
from tests.system.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.stack import Gateway, Simulator

SOURCE_IPS: Final = (("127.0.0.2", "127.0.0.3"), ("127.0.0.4", "127.0.0.5"))
PROMISED_S: Final = 1.0
_CALLERS_PER_HOST: Final = 6
_PAUSE_S: Final = 0.01
_LOOK_S: Final = 0.005
_GIVE_UP_S: Final = 30.0
_ASKED: Final = {"model": "sim/tiny", "prompt": [10], "max_tokens": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between a change's arrival and the next")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = RedisServer()
        stack.callback(redis.stop)
        fleet = stack.enter_context(Fleet(directory, redis.url))
        upstreams = [fleet.start_upstream() for _ in range(2)]
        hosts = [fleet.start_host("--source-ips", ",".join(ips)) for ips in SOURCE_IPS]
        took_s = asyncio.run(measure(upstreams, hosts, options.changes, options.pause))
    return report_on(took_s)


async def measure(
    upstreams: Sequence[Simulator], hosts: Sequence[Gateway], changes: int, pause_s: float
) -> list[float]:
    # A new connection for each request, so that the kernel spreads them over the workers.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        callers = [group.create_task(call(session, host)) for host in hosts for _ in range(_CALLERS_PER_HOST)]
        # Both upstreams are listed at the start, so the first change shows nothing.
        await change(session, hosts[0], upstreams[1])
        took_s = []
        for number in range(changes):
            await asyncio.sleep(pause_s)
            took_s.append(await change(session, hosts[0], upstreams[number % 2]))
        for caller in callers:
            caller.cancel()
    return took_s


async def call(session: aiohttp.ClientSession, host: Gateway) -> None:
    """Send completions until cancelled."""
    while True:
        async with session.post(f"{host.url}/v1/completions", json=_ASKED) as response:
            response.raise_for_status()
            await response.read()
        await asyncio.sleep(_PAUSE_S)


async def change(session: aiohttp.ClientSession, host: Gateway, to: Simulator) -> float:
    """Publish `to`, and return the seconds until all workers have used it."""
    before = await asked_by(session, to)
    began_s = time.monotonic()
    async with session.put(f"{host.admin_url}/upstreams", json=[to.url]) as response:
        response.raise_for_status()
    while True:
        now = await asked_by(session, to)
        passed_s = time.monotonic() - began_s
        if all(now.get(ip, 0) > before.get(ip, 0) for ips in SOURCE_IPS for ip in ips) or passed_s > _GIVE_UP_S:
            return passed_s
        await asyncio.sleep(_LOOK_S)


async def asked_by(session: aiohttp.ClientSession, simulator: Simulator) -> dict[str, int]:
    """Return the simulator's completions by source address."""
    async with session.get(f"{simulator.url}/_sim/stats") as response:
        stats: dict[str, Any] = await response.json()
    found: dict[str, int] = stats["by_source_ip"]
    return found


def report_on(took_s: Sequence[float]) -> int:
    ordered = sorted(took_s)
    p90 = ordered[-(-len(ordered) * 9 // 10) - 1]
    sys.stdout.write(
        f"{len(ordered)} changes reached 4 workers of 2 hosts: median {statistics.median(ordered) * 1000:.0f} ms,"
        f" p90 {p90 * 1000:.0f} ms, longest {ordered[-1] * 1000:.0f} ms, shortest {ordered[0] * 1000:.0f} ms\n"
    )
    return int(ordered[-1] > PROMISED_S)


if __name__ == "__main__":
    sys.exit(main())
