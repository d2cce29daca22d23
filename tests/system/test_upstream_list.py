"""Several upstreams and a list that changes: what reaches whom, and that no sample suffers."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

import pytest

from tests.system.fleet import Fleet, executions, follows, told_upstreams, upstreams_command
from tests.system.http_calls import call
from tests.system.outcomes import accepted, result_of
from tests.system.pinned import Client, submit
from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.redis_server import RedisServer
    from tests.system.http_calls import Connection
    from tests.system.stack import Gateway, Simulator

pytestmark = pytest.mark.slow

MODEL: Final = "sim/tiny"
PROMPT: Final = [71, 72, 73]
SAMPLES: Final = 24


class Samples:
    """Submitted over both workers of a host, and checked token by token."""

    def __init__(self, fleet: Fleet, host: Gateway) -> None:
        self._connections = [fleet.connect(host, slot) for slot in (0, 1)]
        self._client = Client(self._connections[0], MODEL)
        self._pending: list[tuple[Connection, str, dict[str, object]]] = []

    def submit(self, count: int, first: int = 1) -> None:
        for number in range(first, first + count):
            connection = self._connections[number % 2]
            body = self._client.body(number, [*PROMPT, number])
            self._pending.append((connection, accepted(connection, body)["request_id"], body))

    def check(self) -> None:
        """Of all that were submitted."""
        for connection, request_id, body in self._pending:
            result_of(connection, request_id, self._client, body)
        self._pending.clear()


def test_a_published_list_reaches_every_worker_of_every_host(fleet: Fleet) -> None:
    old, new = fleet.start_upstream(), fleet.start_upstream()
    hosts = [fleet.start_host(upstreams=[old.url]) for _ in range(2)]
    assert new.url in upstreams_command(hosts[0], "set", new.url)
    for host in hosts:
        follows(host, new)
        samples = Samples(fleet, host)
        samples.submit(4)
        samples.check()
    assert executions(old, new) == [0, 8]


def test_a_list_outlives_workers_and_an_emptied_redis(fleet: Fleet, redis: RedisServer) -> None:
    old, new = fleet.start_upstream(), fleet.start_upstream()
    host = fleet.start_host(upstreams=[old.url])
    upstreams_command(host, "set", new.url)
    follows(host, new)
    victim = host.workers()[0]
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(lambda: host.workers()[0]["restarts"] == victim["restarts"] + 1, "another worker")
    eventually(lambda: host.workers()[0]["state"] == "ready", "it to be ready")
    follows(host, new)
    assert redis.command("FLUSHALL") == b"+OK\r\n"
    eventually(lambda: "published" in upstreams_command(host, "list"), "the list in Redis again")
    assert "set by the flags" in upstreams_command(host, "reset")
    follows(host, old)


def test_what_runs_at_an_upstream_that_was_taken_off_the_list_runs_to_its_end(fleet: Fleet) -> None:
    old, new = fleet.start_upstream(), fleet.start_upstream()
    host = fleet.start_host(upstreams=[old.url])
    samples = Samples(fleet, host)
    with old.holding():
        samples.submit(SAMPLES)
        old.runs(SAMPLES)
        assert call("PUT", f"{host.admin_url}/upstreams", [new.url]).status == 200
        eventually(lambda: told_upstreams(host) == {new.url: "up", old.url: "leaving"}, "the old one to leave")
        samples.submit(SAMPLES, first=100)
        eventually(lambda: executions(new) == [SAMPLES], "samples at the new one")
    samples.check()
    assert executions(old, new) == [SAMPLES, SAMPLES]
    follows(host, new)


def test_a_trainer_restarts_its_server_elsewhere(fleet: Fleet) -> None:
    """Without a failed sample, and with none executed twice at once: what was interrupted runs again at the new one."""
    old, new = fleet.start_upstream(), fleet.start_upstream()
    host = fleet.start_host(upstreams=[old.url])
    samples = Samples(fleet, host)
    old.script({"kind": "hold"})
    samples.submit(SAMPLES)
    old.runs(SAMPLES)
    os.killpg(old.process.pid, signal.SIGKILL)
    eventually(lambda: told_upstreams(host) == {old.url: "resting"}, "the old one to be found dead")
    samples.submit(SAMPLES, first=100)
    call("PUT", f"{host.admin_url}/upstreams", [new.url])
    samples.check()
    assert executions(new) == [2 * SAMPLES]
    assert host.counter("failed") == 0


def samples_at(fleet: Fleet, host: Gateway, home: Simulator) -> Samples:
    """Of a sampling session whose own upstream is `home`: where a sample runs that is alone."""

    def look() -> Samples | None:
        samples, before = Samples(fleet, host), executions(home)
        samples.submit(1, first=0)
        samples.check()
        return samples if executions(home) != before else None

    return eventually(look, "a session of this upstream")


def test_of_two_upstreams_one_fails_and_comes_back(fleet: Fleet) -> None:
    """Its samples run at the other; it gets some again when it answers."""
    steady, failing = fleet.start_upstream(), fleet.start_upstream()
    host = fleet.start_host()
    samples = samples_at(fleet, host, failing)
    before = executions(steady)[0]
    failing.script({"kind": "reset_before_status"})
    samples.submit(SAMPLES)
    samples.check()
    assert executions(steady)[0] == before + SAMPLES
    failing.script()
    before = executions(failing)[0]
    eventually(lambda: told_upstreams(host)[failing.url] == "up", "the failing one to be up again")

    def is_asked_again() -> bool:
        samples.submit(4, first=next(numbers))
        samples.check()
        return bool(executions(failing)[0] > before)

    numbers = iter(range(1000, 100_000, 4))
    eventually(is_asked_again, "samples at the one that came back")
    assert failing.stats()["concurrent_duplicates"] == steady.stats()["concurrent_duplicates"] == 0


def test_one_session_uses_both_upstreams(fleet: Fleet) -> None:
    """A rollout is one sampling session: affinity yields before one server idles."""
    upstreams = [fleet.start_upstream() for _ in range(2)]
    host = fleet.start_host()
    for upstream in upstreams:
        upstream.script({"kind": "hold"})
    connection = fleet.connect(host, 0)
    client = Client(connection, MODEL)
    for number in range(40):
        submit(connection, client.body(number, [*PROMPT, number]))
    eventually(lambda: sum(executions(*upstreams)) == 40, "all to be running")
    # 1.25 times the mean, of one worker.
    assert sorted(executions(*upstreams)) == [15, 25]
