"""`gateway serve` and `gateway check` with a real Redis; the upstream is not there, which neither may mind at start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from gateway.machine.embedded_redis import EmbeddedRedis
from tests.integration.gateway_process import ROOT, GatewayProcess, alive
from tests.redis_server import RedisServer
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.slow


@asynccontextmanager
async def redis_server(directory: Path, **configuration: str) -> AsyncIterator[str]:
    """The URL of a server on a UNIX socket, with these settings changed."""
    server = EmbeddedRedis(directory, 64 << 20)
    url = await server.start()
    try:
        async with Redis.from_url(url) as client:
            for name, value in configuration.items():
                await client.config_set(name.replace("_", "-"), value)
        yield url
    finally:
        await server.stop()


def refused(tmp_path: Path, redis_url: str) -> str:
    """The one line that a start with exit code 3 ends with."""
    with GatewayProcess(tmp_path, module="gateway", flags=("--redis-url", redis_url)) as gateway:
        assert gateway.exit_code() == 3
        assert gateway.output == ""
        line = gateway.errors.splitlines()[-1]
        assert line.startswith("gateway: ")
        assert "Traceback" not in gateway.errors
        return line


def test_an_unreachable_redis_stops_the_start(tmp_path: Path) -> None:
    """B10"""
    line = refused(tmp_path, "redis://:hunter2@127.0.0.1:1/0")
    assert line.count("redis://127.0.0.1:1/0") == 1
    assert "hunter2" not in line


async def test_a_wrong_password_stops_the_start(tmp_path: Path) -> None:
    """B10"""
    async with redis_server(tmp_path, requirepass="right") as url:
        line = refused(tmp_path, url.replace("unix://", "unix://:wrong-one@"))
        assert "password" in line.lower() or "WRONGPASS" in line
        assert "wrong-one" not in line


async def test_an_evicting_redis_stops_the_start(tmp_path: Path) -> None:
    """C5"""
    async with redis_server(tmp_path, maxmemory_policy="allkeys-lru") as url:
        assert "maxmemory-policy allkeys-lru" in refused(tmp_path, url)


def redis_pid(gateway: GatewayProcess, but: int | None = None) -> int:
    """The embedded server is the gateway's only child that is not Python. Waits for another than `but`."""

    def look() -> int | None:
        children = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(gateway.popen.pid)], capture_output=True)
        pids = (int(line.split()[0]) for line in children.stdout.decode().splitlines() if "python" not in line)
        return next((pid for pid in pids if pid != but and alive(pid)), None)

    return eventually(look, "an embedded server")


def test_the_embedded_redis_is_replaced_when_it_dies_and_ends_with_the_gateway(tmp_path: Path) -> None:
    """C3"""
    with GatewayProcess(tmp_path, module="gateway", workers=1, flags=("--redis-memory", "64MiB")) as gateway:
        assert "results in the embedded Redis (64.0 MiB, in memory only)" in gateway.ready_line()
        first, worker = redis_pid(gateway), gateway.pids()[0]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: gateway.logged("the embedded Redis died"), "its death is noticed")
        second = redis_pid(gateway, but=first)
        eventually(lambda: gateway.get("/status")["workers"][0]["store_connected"], "the worker is connected again")
        assert gateway.pids() == [worker]
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_code() == 0
        assert not alive(second)
        assert not list(tmp_path.glob("gateway-*"))


def test_a_killed_gateway_leaves_no_process_behind(tmp_path: Path) -> None:
    """A20"""
    with GatewayProcess(tmp_path, module="gateway", workers=1) as gateway:
        left = [redis_pid(gateway), *gateway.pids()] if gateway.ready_line() else []
        gateway.signal(signal.SIGKILL)
        eventually(lambda: not any(alive(pid) for pid in left), "Redis and the worker are gone")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_waits_for_redis_still_listens_to_its_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    """Or it would hold the gateway's port for as long as Redis is away, with nobody to end it."""
    redis = RedisServer()
    try:
        flags = ("--redis-url", redis.url)
        with GatewayProcess(tmp_path, module="gateway", workers=1, flags=flags) as gateway:
            gateway.ready_line()
            first = gateway.pids()[0]
            redis.kill()
            os.kill(first, signal.SIGKILL)
            eventually(lambda: gateway.logged("store does not answer yet"), "another worker that waits")
            (waiting,) = eventually(gateway.pids, "its pid", until=lambda pids: pids not in ([first], [None]))
            gateway.signal(number)
            eventually(lambda: not alive(waiting), "it is gone as well")
            if number == signal.SIGTERM:
                assert gateway.exit_code() == 0
    finally:
        redis.stop()


def test_check_says_what_fails_and_exits_with_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "check", "--upstream", "http://127.0.0.1:1", "--port", "0"]
    command += ["--admin-port", "0", "--redis-memory", "512MiB"]
    result = subprocess.run(
        command, capture_output=True, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, timeout=DEADLINE_S
    )
    text = result.stdout.decode()
    assert result.returncode == 1, result.stderr.decode()
    assert "cannot connect: Connection refused" in text
    assert text.count("\nfailure ") == 1
    assert text.endswith(" 1 failure\n")
    assert "noeviction" in text


def test_a_spare_that_was_promoted_is_a_worker_like_any_other(tmp_path: Path) -> None:
    """B11: it serves, logs, is named and is scheduled as one that was started for its slot."""
    with GatewayProcess(tmp_path, module="gateway", workers=1) as gateway:
        cold = gateway.pids()[0]
        command, warm = command_line(cold), gateway.warm_spare()
        os.kill(cold, signal.SIGKILL)
        eventually(lambda: gateway.pids() == [warm] and gateway.slots()[0]["state"] == "ready", "the spare serves")
        assert command_line(warm)[:-1] == command[:-1]  # but for the channel's number
        assert "-Xfaulthandler" in "".join(command)
        assert os.getpriority(os.PRIO_PROCESS, warm) == os.getpriority(os.PRIO_PROCESS, 0)
        with urllib.request.urlopen("http://{}:{}/api/v1/healthz".format(*gateway.public)) as reply:
            assert reply.status == 200
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_code() == 0
        assert gateway.logged("draining")[-1]["slot"] == 0


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
