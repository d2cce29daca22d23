"""A master, its replica and three sentinels for tests: real processes that fail over within a second or two."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

SERVICE: Final = "results"
# A server that does not run for this long is taken for dead: it must outlast what a busy machine does to one.
_DOWN_AFTER_MS: Final = 2000
_FAILOVER_MS: Final = 5000
_DEADLINE_S: Final = 40.0


class RedisSentinels:
    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        self._sentinels: list[RedisServer] = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def master(self) -> RedisServer:
        """The server that the first sentinel names."""
        reply = self._sentinels[0].command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        port = int(reply.split(b"\r\n")[4])
        return next(server for server in self.servers if server.port == port)

    def replica(self) -> RedisServer:
        master = self.master
        return next(server for server in self.servers if server is not master)

    def wait_for_new_master(self, old: RedisServer) -> None:
        _until(lambda: self.master is not old and self.master.running)

    def stop_sentinel(self, number: int) -> None:
        self._sentinels[number].kill()

    def stop(self) -> None:
        for server in (*self._sentinels, *self.servers):
            server.stop()

    def _start(self) -> None:
        delays = ("--repl-diskless-sync-delay", "0")
        master = RedisServer(*delays, tcp=True)
        self.servers.append(master)
        self.servers.append(RedisServer(*delays, "--replicaof", f"127.0.0.1 {master.port}", tcp=True))
        _until(lambda: b"master_link_status:up" in self.servers[1].command("INFO", "replication"))
        for _ in range(3):
            self._sentinels.append(RedisServer(tcp=True, sentinel=True))
        for sentinel in self._sentinels:
            sentinel.command("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(master.port), "2")
            sentinel.command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(_DOWN_AFTER_MS))
            sentinel.command("SENTINEL", "SET", SERVICE, "failover-timeout", str(_FAILOVER_MS))
        for sentinel in self._sentinels:
            _until(lambda sentinel=sentinel: self._knows_all(sentinel))  # type: ignore[misc]

    def _knows_all(self, sentinel: RedisServer) -> bool:
        told = sentinel.command("INFO", "sentinel")
        return b"slaves=1,sentinels=3" in told


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the test's sentinels do not agree"
        time.sleep(0.02)
