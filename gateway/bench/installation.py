"""A whole installation on free ports for one run: a simulated vLLM, the gateway, and a Redis.

The gateway starts its embedded Redis. With `--chaos` the run starts a Redis of its own instead, which can be restarted,
emptied and stalled while the gateway uses it.
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

_START_S: Final = 60.0
_STOP_S: Final = 10.0
_REDIS_START_S: Final = 10.0
_REDIS_STOP_S: Final = 5.0
_REDIS_POLL_S: Final = 0.01
# At the end of a run every result has been fetched or never will be, so the gateway has nothing to drain for.
_DRAIN_S: Final = 1.0
# Share of the simulated vLLM's file descriptors that the connections of all workers may use together.
_SIMULATOR_FILES: Final = 0.95
_URL: Final = re.compile(r"https?://[^\s,;)\"']+")
_KEPT_IN: Final = re.compile(r"results in (.+?), admin")
_ADMIN_URL: Final = re.compile(r"admin\W+(https?://[^\s,;)\"']+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The addresses and processes of an installation; None for what is absent or unknown.

    `kept_in` describes where results are kept, for the report.
    """

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
        """Return the process of the run's own Redis; the watch finds the gateway's embedded one by itself."""
        return self.breakable.redis.running_pid if self.breakable is not None else None


@dataclass(frozen=True, slots=True)
class Breakable:
    """The servers that a run may break, because it started them."""

    redis: OwnRedis
    upstream: SimulatedUpstream


@asynccontextmanager
async def running_stack(scenario: Scenario) -> AsyncIterator[Deployment]:
    """Start everything, and leave no process and no file behind. Raises `StartError` with the child's own output."""
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
        ready = await gateway.start(_START_S)
        url = _url_in(ready, gateway.name)
        breakable = Breakable(redis, upstream) if redis is not None else None
        yield Deployment(url, admin_url_in(ready), upstream.url, gateway.pid, kept_in(ready), breakable, upstream)
    finally:
        await asyncio.shield(_stop_all(gateway, upstream, redis, run_dir))


async def _stop_all(gateway: Child | None, upstream: SimulatedUpstream, redis: OwnRedis | None, run_dir: Path) -> None:
    """Stop the gateway first, so that it does not log the loss of what it uses."""
    if gateway is not None:
        await gateway.stop(_STOP_S)
    if redis is not None:
        await redis.stop()
    await upstream.stop()
    shutil.rmtree(run_dir, ignore_errors=True)


# -- the simulated vLLM


class SimulatedUpstream:
    """The process of the simulated vLLM. Its `url` survives `restart`."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._child = Child("the simulated vLLM", simulator_command(scenario))
        self.url = ""

    @property
    def running_pid(self) -> int | None:
        return self._child.running_pid

    async def start(self) -> None:
        self.url = _url_in(await self._child.start(_START_S), self._child.name)

    async def restart(self) -> None:
        """Kill it with all its generations, and start a new one on the same port. Raises `StartError`."""
        await self._child.kill()
        port = int(self.url.rpartition(":")[2])
        self._child = Child(self._child.name, simulator_command(self._scenario, port))
        await self._child.start(_START_S)

    async def stop(self) -> None:
        await self._child.stop(_STOP_S)


def simulator_command(scenario: Scenario, port: int = 0) -> list[str]:
    command = [sys.executable, "-m", "gateway", "simulate-vllm", "--port", str(port), "--mode", scenario.vllm_mode]
    command += ["--gen-seconds", f"{scenario.gen_seconds:g}"]
    command += ["--processes", str(scenario.simulator_processes)]
    # With several processes the kernel decides how many requests each gets, so no size can be set.
    if scenario.vllm_mode == "barrier" and scenario.simulator_processes == 1:
        command += ["--barrier-size", str(min(scenario.concurrency, scenario.samples))]
    if scenario.max_num_seqs is not None:
        command += ["--max-num-seqs", str(scenario.max_num_seqs)]
    context_tokens = scenario.prompt_tokens + scenario.max_tokens
    if context_tokens > SimulatorConfig().max_model_len:
        command += ["--max-model-len", str(context_tokens)]
    return command


# -- the gateway


def gateway_command(scenario: Scenario, simulator_url: str, run_dir: Path, redis_url: str | None = None) -> list[str]:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--upstream", simulator_url, "--workers", str(scenario.workers), "--run-dir", str(run_dir)]
    command += ["--drain-timeout", f"{_DRAIN_S:g}", "--log-level", "warning"]
    if redis_url is not None:
        command += ["--redis-url", redis_url]
    if scenario.client == "sdk" and scenario.session_poll is False:
        # The SDK uses the session poll whenever the gateway offers it.
        command += ["--session-poll", "off"]
    if scenario.source_ips is not None:
        command += ["--source-ips", scenario.source_ips]
    if (limit := upstream_connections(scenario, kernel.raise_fd_limit(), kernel.ephemeral_ports())) is not None:
        command += ["--max-connections", str(limit)]
    return command


def upstream_connections(scenario: Scenario, open_files: int, port_range: tuple[int, int]) -> int | None:
    """Return the `--max-connections` of a worker if the simulated vLLM has too few file descriptors, else None.

    A server without free descriptors accepts a connection and closes it at once, the gateway retries, and the run would
    measure that. A barrier needs all its connections, so it gets no limit.
    """
    available = int(open_files * _SIMULATOR_FILES) * scenario.simulator_processes // scenario.workers
    sharing = scenario.workers if scenario.source_ips is None else 1
    default = ports.connection_limit(port_range, 1, sharing, open_files)
    return available if available < default and scenario.vllm_mode != "barrier" else None


# -- what the first line of a process says


def admin_url_in(ready: str) -> str | None:
    match = _ADMIN_URL.search(ready)
    return match[1].rstrip("/.") if match else None


def kept_in(ready: str) -> str | None:
    match = _KEPT_IN.search(ready)
    return match[1] if match else None


def _url_in(ready: str, name: str) -> str:
    match = _URL.search(ready)
    if match is None:
        raise StartError(f"{name} printed {ready!r} where its address was expected")
    return match[0].rstrip("/.")


# -- Redis


class OwnRedis:
    """A Redis server on a UNIX socket in `directory`, whose path must be short. Its `url` survives restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._child: Child | None = None

    @property
    def running_pid(self) -> int | None:
        return self._child.running_pid if self._child is not None else None

    async def start(self) -> None:
        """Return when it answers. Raises `StartError`."""
        options = ["--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._directory)]
        # At this log level the first line says that the server is starting, and no more.
        options += ["--save", "", "--appendonly", "no", "--loglevel", "notice", "--maxmemory-policy", "noeviction"]
        self._child = Child("the run's Redis", [find_server(), *options])
        await self._child.start(_REDIS_START_S)
        deadline_s = time.monotonic() + _REDIS_START_S
        # A server that is loading its data answers with an error.
        while not (await self._ask(b"PING")).startswith(b"+PONG"):
            if time.monotonic() > deadline_s:
                raise StartError(f"the run's Redis does not answer: {self._child.output}")
            await asyncio.sleep(_REDIS_POLL_S)

    async def restart(self, *, keep_data: bool) -> None:
        """Kill it as a crash would, and start it again with the data of a moment before, or empty."""
        if keep_data:
            await self._ask(b"SAVE")
        assert self._child is not None
        await self._child.kill()
        if not keep_data:
            (self._directory / "dump.rdb").unlink(missing_ok=True)
        await self.start()

    async def stall(self, seconds: float) -> None:
        """Stop the process for a while: its connections stay open and nobody gets an answer."""
        assert self._child is not None
        pid = self._child.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(_REDIS_STOP_S)

    async def _ask(self, command: bytes) -> bytes:
        """Send one command and return the first line of the reply, or nothing if no server answers."""
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
