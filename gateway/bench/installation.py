"""A Redis of the run's own, which can be restarted with its data, emptied and stopped while the gateway uses it.

A whole installation on free ports for the time of one run: simulated vLLM, gateway, embedded Redis.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.bench.child import Child
from gateway.machine import kernel
from gateway.machine.embedded_redis import find_server
from gateway.simulator.config import SimulatorConfig
from shared.core import ports
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.bench.scenario import Scenario


_REDIS_START_S: Final = 10.0
_REDIS_STOP_S: Final = 5.0
_POLL_S: Final = 0.01


class OwnRedis:
    """On a UNIX socket in `directory`, whose path must be short. `url` stays the same over restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def running_pid(self) -> int | None:
        return self._child.running_pid if self._child is not None else None

    async def start(self) -> None:
        """Returns when it answers. Raises `StartError`."""
        self._child = Child("the run's Redis", self._command())
        await self._child.start(_REDIS_START_S)
        deadline_s = time.monotonic() + _REDIS_START_S
        # A server that loads its data answers, too, but not with this.
        while not (await self._ask(b"PING")).startswith(b"+PONG"):
            if time.monotonic() > deadline_s:
                raise StartError(f"the run's Redis does not answer: {self._child.words}")
            await asyncio.sleep(_POLL_S)

    async def restart(self, *, keep_data: bool) -> None:
        """Killed, as by a crash, and started again: with what it had a moment before, or empty."""
        if keep_data:
            await self._ask(b"SAVE")
        assert self._child is not None
        await self._child.kill()
        if not keep_data:
            (self._directory / "dump.rdb").unlink(missing_ok=True)
        await self.start()

    async def stall(self, seconds: float) -> None:
        """It keeps its connections and answers nobody."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self.pid, signal.SIGCONT)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(_REDIS_STOP_S)

    def _command(self) -> list[str]:
        options = ["--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._directory)]
        # Its first line at this level says no more than that it runs.
        options += ["--save", "", "--appendonly", "no", "--loglevel", "notice", "--maxmemory-policy", "noeviction"]
        return [find_server(), *options]

    async def _ask(self, command: bytes) -> bytes:
        """The first line of the reply; empty when there is nobody."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            return b""
        try:
            writer.write(command + b"\r\n")
            return await reader.readline()
        except OSError:
            return b""
        finally:
            writer.close()


_GATEWAY_START_S: Final = 60.0
# Every result has been fetched, or never will be: there is nothing to drain for.
_DRAIN_S: Final = 1.0
_GATEWAY_STOP_S: Final = 10.0
# Of the simulated vLLM's file descriptors, what the workers' connections may take together.
_SIMULATOR_FILES: Final = 0.95
_URL: Final = re.compile(r"https?://[^\s,;)\"']+")
_KEPT_IN: Final = re.compile(r"results in (.+?), admin")
_ADMIN_URL: Final = re.compile(r"admin\W+(https?://[^\s,;)\"']+)", re.IGNORECASE)


class SimulatedUpstream:
    """The simulated vLLM's process. `url` stays the same over `restart`."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._child = Child("the simulated vLLM", simulator_command(scenario))
        self.url = ""

    @property
    def running_pid(self) -> int | None:
        return self._child.running_pid

    async def start(self) -> None:
        self.url = _url_in(await self._child.start(_GATEWAY_START_S), self._child.name)

    async def restart(self) -> None:
        """Killed with all that it generates, and started anew. Raises `StartError`."""
        await self._child.kill()
        port = int(self.url.rpartition(":")[2])
        self._child = Child(self._child.name, simulator_command(self._scenario, port))
        await self._child.start(_GATEWAY_START_S)

    async def stop(self) -> None:
        await self._child.stop(_GATEWAY_STOP_S)


@dataclass(frozen=True, slots=True)
class Breakable:
    """What a run may break, since it has started it itself."""

    redis: OwnRedis
    upstream: SimulatedUpstream


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a run finds everything; None: not there, or not known. `kept_in`: where results are, in words."""

    url: str
    admin_url: str | None = None
    simulator_url: str | None = None
    gateway_pid: int | None = None
    kept_in: str | None = None
    breakable: Breakable | None = None
    upstream: SimulatedUpstream | None = None

    def simulator_pid(self) -> int | None:
        return self.upstream.running_pid if self.upstream is not None else None

    def own_redis_pid(self) -> int | None:
        """Of the run's own server; the gateway's is not ours to know."""
        return self.breakable.redis.running_pid if self.breakable is not None else None


@asynccontextmanager
async def running_stack(scenario: Scenario) -> AsyncIterator[Deployment]:
    """Starts everything, and leaves nothing running nor lying about. Raises `StartError` with the child's own words."""
    run_dir = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
    upstream = SimulatedUpstream(scenario)
    redis = OwnRedis(run_dir) if scenario.chaos else None
    gateway: Child | None = None
    try:
        await upstream.start()
        if redis is not None:
            await redis.start()
        command = gateway_command(scenario, upstream.url, run_dir, redis.url if redis is not None else None)
        gateway = Child("the gateway", command)
        line = await gateway.start(_GATEWAY_START_S)
        url = _url_in(line, gateway.name)
        breakable = Breakable(redis, upstream) if redis is not None else None
        yield Deployment(url, admin_url_in(line), upstream.url, gateway.pid, kept_in(line), breakable, upstream)
    finally:
        await asyncio.shield(_stop_all(gateway, upstream, redis, run_dir))


def simulator_command(scenario: Scenario, port: int = 0) -> list[str]:
    command = [sys.executable, "-m", "gateway", "simulate-vllm", "--port", str(port), "--mode", scenario.vllm_mode]
    command += ["--gen-seconds", f"{scenario.gen_seconds:g}"]
    command += ["--processes", str(scenario.simulator_processes)]
    # Which of several processes gets how many is the kernel's choice.
    if scenario.vllm_mode == "barrier" and scenario.simulator_processes == 1:
        command += ["--barrier-size", str(min(scenario.concurrency, scenario.samples))]
    if scenario.max_num_seqs is not None:
        command += ["--max-num-seqs", str(scenario.max_num_seqs)]
    context_tokens = scenario.prompt_tokens + scenario.max_tokens
    if context_tokens > SimulatorConfig().max_model_len:
        command += ["--max-model-len", str(context_tokens)]
    return command


def gateway_command(scenario: Scenario, simulator_url: str, run_dir: Path, redis_url: str | None = None) -> list[str]:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--upstream", simulator_url, "--workers", str(scenario.workers), "--run-dir", str(run_dir)]
    command += ["--drain-timeout", f"{_DRAIN_S:g}", "--log-level", "warning"]
    if redis_url is not None:
        command += ["--redis-url", redis_url]
    if scenario.client == "sdk" and scenario.session_poll is False:
        # The SDK takes what it is offered.
        command += ["--session-poll", "off"]
    if scenario.source_ips is not None:
        command += ["--source-ips", scenario.source_ips]
    if (most := upstream_connections(scenario, kernel.raise_fd_limit(), kernel.ephemeral_ports())) is not None:
        command += ["--max-connections", str(most)]
    return command


def upstream_connections(scenario: Scenario, open_files: int, port_range: tuple[int, int]) -> int | None:
    """What a worker may open, where all of them together would open more than the simulated vLLM can hold.

    A server without descriptors takes a connection and closes it at once, and the gateway tries again and again: a run
    would measure that. None where there is room for what the gateway takes by itself, and where a barrier needs all.
    """
    room = int(open_files * _SIMULATOR_FILES) * scenario.simulator_processes // scenario.workers
    sharing = scenario.workers if scenario.source_ips is None else 1
    by_itself = ports.connection_limit(port_range, 1, sharing, open_files)
    return room if room < by_itself and scenario.vllm_mode != "barrier" else None


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


async def _stop_all(gateway: Child | None, upstream: SimulatedUpstream, redis: OwnRedis | None, run_dir: Path) -> None:
    """The gateway before what it uses, so that it has nothing to complain of."""
    if gateway is not None:
        await gateway.stop(_GATEWAY_STOP_S)
    if redis is not None:
        await redis.stop()
    await upstream.stop()
    shutil.rmtree(run_dir, ignore_errors=True)
