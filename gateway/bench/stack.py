"""A whole installation on free ports for the time of one run: simulated vLLM, gateway, embedded Redis."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.bench.child import Child
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.bench.scenario import Scenario

_START_S: Final = 60.0
# Every result has been fetched, or never will be: there is nothing to drain for.
_DRAIN_S: Final = 1.0
_STOP_S: Final = 10.0
_URL: Final = re.compile(r"https?://[^\s,;)\"']+")
_KEPT_IN: Final = re.compile(r"results in (.+?), admin")
_ADMIN_URL: Final = re.compile(r"admin\W+(https?://[^\s,;)\"']+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a run finds everything; None: not there, or not known. `kept_in`: where results are, in words."""

    url: str
    admin_url: str | None = None
    simulator_url: str | None = None
    gateway_pid: int | None = None
    kept_in: str | None = None


@asynccontextmanager
async def running_stack(scenario: Scenario) -> AsyncIterator[Deployment]:
    """Starts everything, and leaves nothing running nor lying about. Raises `StartError` with the child's own words."""
    run_dir = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
    children: list[Child] = []
    try:
        simulator = Child("the simulated vLLM", simulator_command(scenario))
        children.append(simulator)
        simulator_url = _url_in(await simulator.start(_START_S), simulator.name)
        gateway = Child("the gateway", gateway_command(scenario, simulator_url, run_dir))
        children.append(gateway)
        line = await gateway.start(_START_S)
        url = _url_in(line, gateway.name)
        yield Deployment(url, admin_url_in(line), simulator_url, gateway.pid, kept_in(line))
    finally:
        await asyncio.shield(_stop_all(children, run_dir))


def simulator_command(scenario: Scenario) -> list[str]:
    command = [sys.executable, "-m", "gateway", "simulate-vllm", "--port", "0", "--mode", scenario.vllm_mode]
    command += ["--gen-seconds", f"{scenario.gen_seconds:g}"]
    if scenario.max_num_seqs is not None:
        command += ["--max-num-seqs", str(scenario.max_num_seqs)]
    return command


def gateway_command(scenario: Scenario, simulator_url: str, run_dir: Path) -> list[str]:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--upstream", simulator_url, "--workers", str(scenario.workers), "--run-dir", str(run_dir)]
    command += ["--drain-timeout", f"{_DRAIN_S:g}", "--log-level", "warning"]
    if scenario.source_ips is not None:
        command += ["--source-ips", scenario.source_ips]
    return command


def admin_url_in(line: str) -> str | None:
    match = _ADMIN_URL.search(line)
    return match[1].rstrip("/.") if match else None


def kept_in(line: str) -> str | None:
    match = _KEPT_IN.search(line)
    return match[1] if match else None


def _url_in(line: str, name: str) -> str:
    match = _URL.search(line)
    if match is None:
        raise StartError(f"{name} said {line!r} where its address was expected")
    return match[0].rstrip("/.")


async def _stop_all(children: list[Child], run_dir: Path) -> None:
    """The gateway before its upstream, so that it has nothing to complain of."""
    for child in reversed(children):
        await child.stop(_STOP_S)
    shutil.rmtree(run_dir, ignore_errors=True)
