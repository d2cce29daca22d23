"""A real cluster for tests: a few server processes that know each other and own every slot."""

from __future__ import annotations

from typing import Final

from shared.redis.cluster import SLOTS, slot_of
from tests.ports import free_port
from tests.redis_server import RedisServer

# A node that is silent for this long counts as dead; it must be longer than the pauses of a busy machine.
_NODE_TIMEOUT_MS: Final = 2500


class RedisCluster:
    """A cluster whose `masters` own equal shares of the slots; `replicas[i]`, if any, follows `masters[i]`."""

    def __init__(self, masters: int = 3, *, replicated: bool = False) -> None:
        self.masters: list[RedisServer] = []
        self.replicas: list[RedisServer] = []
        try:
            for _ in range(masters):
                self.masters.append(_node())
            for _ in range(masters if replicated else 0):
                self.replicas.append(_node())
            self._assemble()
        except BaseException:
            self.stop()
            raise

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def master_of(self, key: str) -> RedisServer:
        """Return the first owner of a key, by the shares that the masters began with."""
        return self.masters[slot_of(key) * len(self.masters) // SLOTS]

    def command(self, *words: str) -> bytes:
        """Return the raw reply of the key's master; FLUSHALL goes to all."""
        if words[0] == "FLUSHALL":
            for node in self.masters:
                assert node.command(*words) == b"+OK\r\n"
            return b"+OK\r\n"
        return self.master_of(words[1]).command(*words)

    def wait_until_whole(self) -> None:
        """Wait until every running node reports that all slots are served."""
        for node in self.nodes:
            if node.running:
                node.comes_to_say(b"cluster_state:ok", "CLUSTER", "INFO")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _assemble(self) -> None:
        first, *others = self.nodes
        for number, node in enumerate(self.masters):
            begin, end = (-(-SLOTS * at // len(self.masters)) for at in (number, number + 1))
            assert node.command("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1)) == b"+OK\r\n"
        for epoch, node in enumerate(self.nodes, 1):
            assert node.command("CLUSTER", "SET-CONFIG-EPOCH", str(epoch)) == b"+OK\r\n"
        for node in others:
            node.command("CLUSTER", "MEET", "127.0.0.1", str(first.port), node_bus_port(first))
        known = f"cluster_known_nodes:{len(self.nodes)}\r\n".encode()
        for node in self.nodes:
            node.comes_to_say(known, "CLUSTER", "INFO")
        for master, replica in zip(self.masters, self.replicas, strict=False):
            master_id = master.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()
            assert replica.command("CLUSTER", "REPLICATE", master_id) == b"+OK\r\n"
            replica.comes_to_say(b"master_link_status:up", "INFO", "replication")
        self.wait_until_whole()


def node_bus_port(node: RedisServer) -> str:
    return node.option("--cluster-port")


def _node() -> RedisServer:
    options = {
        "--cluster-enabled": "yes",
        "--cluster-port": str(free_port()),
        "--cluster-node-timeout": str(_NODE_TIMEOUT_MS),
        # One shard that is down must not take the others with it.
        "--cluster-require-full-coverage": "no",
        "--cluster-replica-validity-factor": "0",
        "--repl-diskless-sync-delay": "0",
    }
    return RedisServer(*(word for option in options.items() for word in option), tcp=True)
