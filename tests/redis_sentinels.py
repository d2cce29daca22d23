"""A master, its replica and three sentinels for tests: real processes that fail over within a second or two."""

from __future__ import annotations

from typing import Final

from tests.redis_server import RedisServer
from tests.waiting import eventually

SERVICE: Final = "results"
# A server that does not run for this long is taken for dead: it must outlast what a busy machine does to one.
_DOWN_AFTER_MS: Final = 2000
_FAILOVER_MS: Final = 5000


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
        eventually(lambda: self.master is not old and self.master.running, "the sentinels to agree")

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
        self.servers[1].comes_to_say(b"master_link_status:up", "INFO", "replication")
        for _ in range(3):
            self._sentinels.append(RedisServer(tcp=True, sentinel=True))
        for sentinel in self._sentinels:
            sentinel.command("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(master.port), "2")
            sentinel.command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(_DOWN_AFTER_MS))
            sentinel.command("SENTINEL", "SET", SERVICE, "failover-timeout", str(_FAILOVER_MS))
        for sentinel in self._sentinels:
            sentinel.comes_to_say(b"slaves=1,sentinels=3", "INFO", "sentinel")
