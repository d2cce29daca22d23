"""Measure what a flood by one key does to the latency of another: a quiet key alone, then beside a flood (case E4).

    python -m benchmarks.fairness
    python -m benchmarks.fairness --slots 0 --flood-limit 128

A real gateway with two keys stands in front of a simulated vLLM that runs `--slots` generations at once, of
`--gen-seconds` each. The gateway gets the same number as --max-connections, so samples wait in the gateway. With
`--slots 0` nothing waits, and the flood needs a limit of its own (`--flood-limit`) so that it does not use up the
machine's CPU. The quiet key keeps a few samples in flight, which are measured. The flood has more callers than the
workers admit samples, and reacts to a 429 as the SDK does.

Exit code 1 if the quiet key's p99 is more than twice its value alone, if one of its samples failed, or if the flood was
never refused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import aiohttp

from benchmarks.tables import say
from gateway.bench.driver import drive
from gateway.bench.installation import running_stack
from gateway.bench.report.report import verdicts
from gateway.bench.run import offered_model
from gateway.bench.scenario import resolve
from gateway.settings.keys_file import new_entry
from shared.core.callers import NO_LIMITS, KeyLimits
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gateway.bench.installation import Deployment
    from gateway.bench.report.report import Report
    from gateway.bench.scenario import Scenario

QUIET, FLOOD = "tml-quiet", "tml-flood"
# The limit of case E4.
MOST_TIMES_IDLE: Final = 2.0
_WORKERS: Final = 2
_LOOK_S: Final = 0.2
_FLOODED_WITHIN_S: Final = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    return asyncio.run(measure(parse(arguments)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400, help="of the quiet key, alone and beside the flood")
    parser.add_argument("--quiet", type=int, default=8, help="samples that the quiet key has in flight")
    parser.add_argument("--flood", type=int, default=3_000, help="callers of the other key")
    parser.add_argument("--flood-limit", type=int, help="max-in-flight of the other key; default: none")
    parser.add_argument("--max-in-flight", type=int, default=1_024, help="of each of the two workers")
    parser.add_argument("--slots", type=int, default=64, help="generations at once; 0: any number")
    parser.add_argument("--gen-seconds", type=float, default=0.5)
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.toml"
        limited = KeyLimits(max_in_flight=options.flood_limit)
        keys.write_text(new_entry("quiet", QUIET, NO_LIMITS) + new_entry("flood", FLOOD, limited))
        keys.chmod(0o600)
        # The gateway, a child process, reads its flags from the environment.
        with patch.dict(os.environ, flags(options, keys)):
            return await beside_a_flood(options)


async def beside_a_flood(options: argparse.Namespace) -> int:
    async with running_stack(scenario(options, options.samples, options.quiet)) as deployment:
        alone = await quiet(options, deployment)
        async with flooded(options, deployment):
            beside = await quiet(options, deployment)
            status = await status_of(deployment)
    return report_on(alone, beside, refused(status))


def flags(options: argparse.Namespace, keys: Path) -> dict[str, str]:
    """Return the gateway's flags as environment variables."""
    variables = {"GATEWAY_API_KEYS_FILE": str(keys), "GATEWAY_MAX_IN_FLIGHT": str(options.max_in_flight)}
    if options.slots:
        variables["GATEWAY_MAX_CONNECTIONS"] = str(options.slots // _WORKERS)
    return variables


def scenario(options: argparse.Namespace, samples: int, concurrency: int) -> Scenario:
    given = {
        "samples": samples,
        "concurrency": concurrency,
        "workers": _WORKERS,
        "vllm_mode": "latency",
        "gen_seconds": options.gen_seconds,
        "max_num_seqs": options.slots or None,
        "seed": 1,
    }
    return resolve(None, given)


async def quiet(options: argparse.Namespace, deployment: Deployment) -> Report:
    return await run(scenario(options, options.samples, options.quiet), deployment, QUIET)


@asynccontextmanager
async def flooded(options: argparse.Namespace, deployment: Deployment) -> AsyncIterator[None]:
    """Run the flood until the end of the block, which begins once the first of its samples is refused."""
    # More samples than it can draw while the quiet key is measured.
    flood = asyncio.create_task(run(scenario(options, 1_000_000, options.flood), deployment, FLOOD))
    try:
        until_s = time.monotonic() + _FLOODED_WITHIN_S
        while True:
            if refused(await status_of(deployment)) or time.monotonic() > until_s or flood.done():
                break
            await asyncio.sleep(_LOOK_S)
        yield
    finally:
        flood.cancel()
        # Its client is stopped in mid-run and reports that.
        with suppress(asyncio.CancelledError, StartError):
            await flood


async def run(wanted: Scenario, deployment: Deployment, key: str) -> Report:
    model = await offered_model(deployment.url, key)
    # The simulated vLLM counts both keys together, so each run is judged by its own results only.
    mine = replace(deployment, simulator_url=None)
    return (await drive(wanted, mine, model, key, verify=True, show=lambda progress: None)).report


async def status_of(deployment: Deployment) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{deployment.admin_url}/status") as response:
        found: dict[str, Any] = await response.json()
        return found


def refused(status: dict[str, Any]) -> int:
    return sum(count for name, count in status["counters"].items() if name.startswith("rejected_"))


def report_on(alone: Report, beside: Report, refusals: int) -> int:
    for name, report in (("alone", alone), ("beside the flood", beside)):
        assert report.latency_s is not None
        at = report.latency_s
        say(f"{name:>16}: p50 {at.p50:.3f} s, p99 {at.p99:.3f} s, longest {at.max:.3f} s")
    assert alone.latency_s is not None
    assert beside.latency_s is not None
    times = beside.latency_s.p99 / alone.latency_s.p99
    say(f"p99 is {times:.2f} times the idle value; the flood was refused {refusals:,} times")
    wrong = [*verdicts(alone), *verdicts(beside)]
    for line in wrong:
        say(line)
    return int(bool(wrong) or times > MOST_TIMES_IDLE or not refusals)


if __name__ == "__main__":
    sys.exit(main())
