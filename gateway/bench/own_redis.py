"""A Redis of the run's own, which can be restarted with its data, emptied and stopped while the gateway uses it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from gateway.bench.child import Child
from gateway.embedded_redis import find_server
from shared.core.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path

_START_S: Final = 10.0
_STOP_S: Final = 5.0
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
        await self._child.start(_START_S)
        deadline_s = time.monotonic() + _START_S
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
            await self._child.stop(_STOP_S)

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
