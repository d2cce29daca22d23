"""Measure how many samples this machine can hold at once: all submitted, none generated, every client waiting.

    python benchmarks/outstanding.py --samples 131072 --session-poll
    python benchmarks/outstanding.py --samples 131072 --workers 8 --client-processes 8 --max-connections 2000

The simulated vLLM holds the requests that reach it; the others wait in the workers for an upstream connection. When all
samples are in flight, the script prints memory and open files, releases everything, and checks every result. With one
poll per sample, each sample has a connection to a worker: use enough workers and client processes to keep each of them
below its limit of open files. Each poll is answered with "try again" after 30 s and repeated.

Exit code 1 if anything is lost or wrong, or if not all samples were in flight at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import aiohttp
from rich.console import Console

from benchmarks.tables import say
from gateway.bench.installation import running_stack
from gateway.bench.report.report import exit_code
from gateway.bench.run import against, print_report
from gateway.bench.scenario import resolve
from gateway.bench.watch import procfs
from gateway.bench.watch.watch import probed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gateway.bench.installation import Deployment
    from gateway.bench.report.outcome import Run

MIB = 1024 * 1024
LOOK_S = 1.0
# Admission counts 16 KiB and the prompt for each sample.
BYTES_RESERVED_EACH = 32 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # The gateway, a child process, reads its flags from the environment.
    with patch.dict(os.environ, limits(options)):
        return asyncio.run(hold_and_release(options))


def limits(options: argparse.Namespace) -> dict[str, str]:
    """Return the gateway's flags as environment variables.

    The kernel does not spread connections evenly, so each worker may hold all samples, not only its share.
    """
    flags = {
        "GATEWAY_MAX_IN_FLIGHT": options.samples,
        "GATEWAY_MAX_IN_FLIGHT_BYTES": options.samples * BYTES_RESERVED_EACH,
        "GATEWAY_MAX_CONNECTIONS": options.max_connections,
    }
    return {name: str(value) for name, value in flags.items() if value is not None}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--session-poll", action="store_true")
    parser.add_argument("--max-connections", type=int, help="upstream connections of each worker; default: automatic")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds after which the samples are released")
    return parser.parse_args(arguments)


async def hold_and_release(options: argparse.Namespace) -> int:
    scenario = resolve(
        None,
        {
            "samples": options.samples,
            "concurrency": options.samples,
            "workers": options.workers,
            "client_processes": options.client_processes,
            "session_poll": options.session_poll,
            "vllm_mode": "instant",
            # Nothing ends while all is held, and bench ends a run after ten generations and three minutes of that.
            "gen_seconds": options.deadline / 10,
            "seed": 1,
        },
    )
    console = Console()
    async with running_stack(scenario) as deployment, _operator(deployment) as operator:
        await operator.hold()
        run = asyncio.create_task(against(scenario, deployment, console))
        try:
            reached = await _wait_until_in_flight(operator, options.samples, options.deadline, run)
        finally:
            await operator.release()
        report = (await run).report
    print_report(report, console)
    return exit_code(report) or int(not reached)


async def _wait_until_in_flight(operator: Operator, samples: int, deadline_s: float, run: asyncio.Task[Run]) -> bool:
    """Wait until all samples are in flight or the deadline passes; print and return what was reached."""
    began_s = time.monotonic()
    while True:
        workers = await operator.workers()
        in_flight: int = sum(worker["in_flight"] for worker in workers)
        waited_s = time.monotonic() - began_s
        if in_flight >= samples or waited_s > deadline_s or run.done():
            say(shown(workers, in_flight, waited_s))
            return in_flight >= samples
        await asyncio.sleep(LOOK_S)


def shown(workers: Sequence[dict[str, Any]], in_flight: int, after_s: float) -> str:
    usages = [usage for worker in workers if (usage := procfs.usage(worker["pid"])) is not None]
    sizes = ", ".join(f"{usage.rss_bytes / MIB:,.0f} MiB and {usage.fds:,} open files" for usage in usages)
    return f"{in_flight:,} in flight after {after_s:.0f} s; workers: {sizes}"


class Operator:
    """The control paths of the gateway and of the simulated vLLM."""

    def __init__(self, session: aiohttp.ClientSession, admin_url: str, simulator_url: str) -> None:
        self._session = session
        self._admin_url = admin_url
        self._simulator_url = simulator_url

    async def hold(self) -> None:
        """Hold all requests from now on, once the gateway has probed its upstream."""
        while True:
            if probed(await self._status()):
                break
            await asyncio.sleep(LOOK_S)
        await self._ask("POST", "/_sim/faults", [{"kind": "hold"}])

    async def release(self) -> None:
        await self._ask("DELETE", "/_sim/faults")
        await self._ask("POST", "/_sim/release")

    async def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._status())["workers"]
        return found

    async def _status(self) -> dict[str, Any]:
        async with self._session.get(f"{self._admin_url}/status") as response:
            status: dict[str, Any] = await response.json()
            return status

    async def _ask(self, method: str, path: str, document: Any = None) -> None:
        async with self._session.request(method, self._simulator_url + path, json=document) as response:
            response.raise_for_status()


@asynccontextmanager
async def _operator(deployment: Deployment) -> AsyncIterator[Operator]:
    assert deployment.admin_url is not None and deployment.simulator_url is not None
    async with aiohttp.ClientSession() as session:
        yield Operator(session, deployment.admin_url, deployment.simulator_url)


if __name__ == "__main__":
    sys.exit(main())
