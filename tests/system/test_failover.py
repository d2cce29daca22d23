"""The whole gateway on a replicated Redis whose master is killed while samples run: what its clients see of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.redis_cluster import RedisCluster
from tests.redis_sentinels import RedisSentinels
from tests.system.expected import check_payload
from tests.system.pinned import Client, poll
from tests.system.stack import running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.system.http_calls import Reply
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [21, 22, 23]
SAMPLES: Final = 16
# Of sequence numbers: what an SDK submits again, it submits under a new one.
AGAIN: Final = 1000


class Replicated:
    """Either kind of server, and its loss."""

    def __init__(self, kind: str) -> None:
        self._servers = RedisSentinels() if kind == "sentinel" else RedisCluster(replicated=True)
        self.url = self._servers.url

    def kill_a_master(self) -> None:
        if isinstance(self._servers, RedisSentinels):
            self._servers.master.kill()
        else:
            self._servers.masters[0].kill()

    def stop(self) -> None:
        self._servers.stop()


@pytest.fixture(params=["sentinel", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def replicated(kind: str) -> Iterator[Replicated]:
    made = Replicated(kind)
    yield made
    made.stop()


class Submitter:
    """Does what an SDK does: 429 and 408 mean later, 410 means again under another number."""

    def __init__(self, stack: Stack) -> None:
        self._connection = stack.gateway.connect()
        self._client = Client(self._connection, stack.model)
        self._promised: dict[int, str] = {}

    def submit(self, seq_id: int) -> None:
        body = self._client.body(seq_id, [*PROMPT, seq_id])
        reply = self._later(lambda: self._connection.post("/api/v1/asample", body), 429)
        assert reply.status == 200, reply
        self._promised[seq_id] = reply.json()["request_id"]

    def fetch(self, seq_id: int) -> None:
        reply = self._later(lambda: poll(self._connection, self._promised[seq_id]), 408, 429)
        if reply.status == 410:
            self.submit(seq_id + AGAIN)
            self.fetch(seq_id + AGAIN)
            return
        assert reply.status == 200, reply
        check_payload(reply.body, self._client.model, self._client.body(seq_id, [*PROMPT, seq_id]))

    def _later(self, call: Callable[[], Reply], *pending: int) -> Reply:
        return eventually(call, f"another status than {pending}", until=lambda reply: reply.status not in pending)

    def close(self) -> None:
        self._connection.close()


def test_every_sample_is_answered_although_a_master_is_killed(
    kind: str, replicated: Replicated, tmp_path: Path
) -> None:
    """C3, A20: finished ones that nobody fetched, running ones, and new ones; no process of the gateway restarts."""
    with running_stack(tmp_path, "--redis-url", replicated.url, "--poll-timeout", "1") as stack:
        pids = [worker["pid"] for worker in stack.gateway.workers()]
        assert stack.gateway.status()["redis"]["mode"] == kind
        submitter = Submitter(stack)
        finished, running, new = (range(first, first + SAMPLES) for first in (0, SAMPLES, 2 * SAMPLES))
        for seq_id in finished:
            submitter.submit(seq_id)
        stack.gateway.counter_reaches("completed", SAMPLES)
        with stack.simulator.holding():
            for seq_id in running:
                submitter.submit(seq_id)
            stack.simulator.runs(SAMPLES)
            replicated.kill_a_master()
        for seq_id in (*running, *finished):
            submitter.fetch(seq_id)
        for seq_id in new:
            submitter.submit(seq_id)
            submitter.fetch(seq_id)
        submitter.close()
        assert [worker["pid"] for worker in stack.gateway.workers()] == pids
