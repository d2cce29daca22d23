"""Several simulated vLLMs, and several gateways ("hosts") on one Redis; every one a real process."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from tests.system.pinned import connect_to
from tests.system.stack import Gateway, Simulator
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Self

    from tests.system.http_calls import Connection

WORKERS: Final = 2


class Fleet:
    """Context manager: whatever was started is gone afterwards. `hosts` and `upstreams` are in order of their start."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self._directory = directory
        self._redis_url = redis_url
        self._stack = ExitStack()
        self._numbers = itertools.count()
        self.upstreams: list[Simulator] = []
        self.hosts: list[Gateway] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_upstream(self, *flags: str) -> Simulator:
        made = Simulator(self._own_directory(), *flags)
        self._stack.callback(made.process.kill)
        self.upstreams.append(made)
        return made

    def start_host(self, *flags: str, upstreams: list[str] | None = None) -> Gateway:
        """In front of `upstreams` (URLs), or of all that run."""
        first, *others = upstreams or [upstream.url for upstream in self.upstreams]
        more = [word for url in others for word in ("--upstream", url)]
        named = ["--redis-url", self._redis_url, "--workers", str(WORKERS), "--log-format", "text"]
        made = Gateway(self._own_directory(), first, *more, *named, "--poll-timeout", "1", *flags)
        self._stack.callback(made.close)
        self.hosts.append(made)
        return made

    def connect(self, host: Gateway, slot: int) -> Connection:
        made = connect_to(host, slot)
        self._stack.callback(made.close)
        return made

    def _own_directory(self) -> Path:
        made = self._directory / str(next(self._numbers))
        made.mkdir()
        return made


def told_upstreams(host: Gateway) -> dict[str, str]:
    """URL -> state, over all workers of a host."""
    return {told["url"]: told["state"] for told in host.status()["upstreams"]}


def follows(host: Gateway, *upstreams: Simulator) -> None:
    """Wait until every worker of a host asks these and no other."""
    urls = {upstream.url for upstream in upstreams}
    eventually(lambda: told_upstreams(host), f"{urls} alone", until=lambda told: set(told) == urls)


def upstreams_command(host: Gateway, *arguments: str) -> str:
    command = [sys.executable, "-m", "gateway", "upstreams", *arguments, "--admin", host.admin_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def executions(*upstreams: Simulator) -> list[Any]:
    return [upstream.stats()["executions"] for upstream in upstreams]
