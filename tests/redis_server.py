"""A real Redis for tests: a server process of our own on a UNIX socket, and optionally TCP."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import hiredis

from gateway.machine.embedded_redis import find_server
from tests.ports import free_port
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHM = "/dev/shm"
# Containers often have only 64 MiB of shared memory; a test's Redis may save a few hundred.
_ROOM_BYTES = 2 * 1024**3


class RedisServer:
    """A server that the constructor starts. `restart` keeps the address; with `keep_data` it saves before it stops.

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
        """Return the raw reply to one command, for what a test does without the store."""
        with self._connect() as client:
            client.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
            return _whole_reply(client)

    def comes_to_say(self, expected: bytes, *words: str) -> None:
        """Wait until the reply to a command contains the expected bytes."""
        eventually(lambda: self.command(*words), f"{expected!r} in {words}", until=lambda reply: expected in reply)

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
        eventually(self._answers, "the test's Redis to answer")

    def _mode(self) -> list[str]:
        if not self._sentinel:
            return ["--save", "", "--appendonly", "no"]
        # It writes what it learns into its configuration file.
        config = self._dir / "sentinel.conf"
        config.touch()
        return [str(config), "--sentinel"]

    def _answers(self) -> bool:
        assert self.running, f"the test's Redis ended with {self._process.returncode}"
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(DEADLINE_S)
        try:
            client.connect(str(self._socket))
        except OSError:
            client.close()
            raise
        return client


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        yield server
    finally:
        server.stop()


def _whole_reply(client: socket.socket) -> bytes:
    """Read a whole reply, which may come in pieces."""
    reader, data = hiredis.Reader(), b""
    while reader.gets() is False:
        piece = client.recv(65536)
        if not piece:
            raise ConnectionResetError("closed within a reply")
        data += piece
        reader.feed(piece)
    return data


def _in_memory() -> str | None:
    """Return a folder in memory: sentinels and cluster nodes write to disk at every change, and look dead meanwhile."""
    usable = os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free > _ROOM_BYTES
    return _SHM if usable else None
