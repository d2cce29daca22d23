"""`gateway check` on a machine that is wrong on purpose: each thing is found, and comes with what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.redis_server import RedisServer
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow
# Nobody listens there: every check is left with that one failure.
NOWHERE: Final = "http://127.0.0.1:9"
PORTS: Final = ("--port", "0", "--admin-port", "0")


def checked(*flags: str) -> tuple[int, dict[str, str]]:
    """The exit code, and by subject the verdict, the detail and the advice as one text."""
    command = [sys.executable, "-m", "gateway", "check", "--upstream", NOWHERE, *PORTS, *flags]
    environ = {"COLUMNS": "1000", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=DEADLINE_S, check=False)
    found: dict[str, str] = {}
    subject = ""
    for line in done.stdout.splitlines():
        if match := re.match(r"(ok|warning|failure) +([^:]+(?: /\S+)?): (.*)", line):
            subject = match[2]
            found[subject] = f"{match[1]}: {match[3]}"
        elif subject and "->" in line:
            found[subject] += " " + line.strip()
    return done.returncode, found


@pytest.fixture
def redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(*request.param)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "redis", [("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")], indirect=True, ids=["evicting"]
)
def test_a_redis_that_would_drop_results(redis: RedisServer) -> None:
    """C5"""
    code, found = checked("--redis-url", redis.url)
    assert code == 1
    assert found["Redis eviction"].startswith("failure")
    assert "-> CONFIG SET maxmemory-policy noeviction" in found["Redis eviction"]
    assert found["Redis memory"].startswith("warning")


@pytest.mark.parametrize("redis", [()], indirect=True, ids=["unlimited"])
def test_a_redis_without_a_limit_and_its_clock(redis: RedisServer) -> None:
    _, found = checked("--redis-url", redis.url)
    assert found["Redis eviction"].startswith("ok")
    assert found["Redis memory"].startswith("warning")
    assert "no limit" in found["Redis memory"]
    assert found["clocks"].startswith("ok")


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    code, found = checked("--redis-url", f"unix://{tmp_path}/none.sock")
    assert code == 1
    assert found["Redis"].startswith("failure")
    assert "correct --redis-url" in found["Redis"]


def test_files_of_keys_that_others_may_read(tmp_path: Path) -> None:
    open_file, closed_file, keys = (tmp_path / name for name in ("admin.key", "upstream.key", "keys.toml"))
    open_file.write_text("secret")
    closed_file.write_text("secret")
    keys.write_text("")
    open_file.chmod(0o644)
    closed_file.chmod(0o600)
    keys.chmod(0o640)
    files = ("--admin-key-file", str(open_file), "--upstream-api-key-file", str(closed_file))
    _, found = checked(*files, "--api-keys-file", str(keys))
    assert found[f"file {open_file}"].startswith("warning")
    assert f"-> chmod 600 {open_file}" in found[f"file {open_file}"]
    assert found[f"file {closed_file}"].startswith("ok")
    assert found[f"file {keys}"].startswith("warning")


def test_more_connections_than_there_are_ports_and_descriptors() -> None:
    code, found = checked("--max-connections", "2000000", "--workers", "1", "--source-ips", "127.0.0.2,192.0.2.1")
    assert code == 1
    assert found["upstream connections"].startswith("warning")
    assert found["file descriptors for upstreams"].startswith("failure")
    assert found["source IP 127.0.0.2"].startswith("ok")
    assert "-> ip address add 192.0.2.1" in found["source IP 192.0.2.1"]
