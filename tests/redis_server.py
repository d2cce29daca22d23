"""A real Redis for tests: a server process of our own on a UNIX socket, and optionally TCP."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from gateway.embedded_redis import find_server

_DEADLINE_S = 10.0
_SHM = "/dev/shm"
# Containers often have 64 MiB of it; a test's Redis may save a few hundred.
_ROOM_BYTES = 2 * 1024**3
_FIRST_PORT, _LAST_PORT = 12_000, 32_000


class RedisServer:
    """Started by the constructor. `restart` keeps the address; with `keep_data` it saves before it stops.

    Without `save` what it keeps is what it saved last: an older state is back.
    """

    def __init__(self, *options: str, tcp: bool = False, sentinel: bool = False) -> None:
        self._dir = Path(tempfile.mkdtemp(prefix="test-redis-", dir=_in_memory()))
        self._socket = self._dir / "redis.sock"
        self._options = options
        self._sentinel = sentinel
        self.port = free_port() if tcp else 0
        self._start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def option(self, name: str) -> str:
        return self._options[self._options.index(name) + 1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def command(self, *words: str) -> bytes:
        """The raw reply to one command; for what a test does behind the store's back."""
        with self._connect() as client:
            client.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
            return client.recv(65536)

    def restart(self, *, keep_data: bool = False, save: bool = True) -> None:
        if keep_data and save:
            self.command("SAVE")
        self.kill()
        if not keep_data:
            (self._dir / "dump.rdb").unlink(missing_ok=True)
        self._start()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _start(self) -> None:
        self._socket.unlink(missing_ok=True)
        command = [find_server(), *self._mode(), "--port", str(self.port), "--unixsocket", str(self._socket)]
        command += ["--bind", "127.0.0.1", "--dir", str(self._dir), "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, f"{command[0]} ended with {self._process.returncode}"
            assert time.monotonic() < deadline_s, "the test's Redis does not answer"

    def _mode(self) -> list[str]:
        if not self._sentinel:
            return ["--save", "", "--appendonly", "no"]
        # It writes what it learns into its configuration file.
        config = self._dir / "sentinel.conf"
        config.touch()
        return [str(config), "--sentinel"]

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(_DEADLINE_S)
        try:
            client.connect(str(self._socket))
        except OSError:
            client.close()
            raise
        return client


def _in_memory() -> str | None:
    """Sentinels and cluster nodes wait for their disk whenever they learn something, and look dead meanwhile."""
    usable = os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free > _ROOM_BYTES
    return _SHM if usable else None


def free_port() -> int:
    """Below the range from which the kernel takes ports for connections: one of those could be taken at any moment."""
    for _ in range(100):
        port = random.randrange(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port from {_FIRST_PORT} to {_LAST_PORT}")
