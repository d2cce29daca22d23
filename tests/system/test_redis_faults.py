"""A Redis that stalls, refuses, forgets or is full under a gateway that goes on."""

from __future__ import annotations

import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

import hiredis
import pytest

from tests.redis_server import RedisServer, running_redis
from tests.system.outcomes import accepted, completions, failure_of, result_of, settled
from tests.system.pinned import Client, connect_to, poll, send_poll, submit
from tests.system.stack import WORKERS, running_stack
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.http_calls import Connection, Reply
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [41, 42, 43]
# Long enough for whatever a poll must not outlast.
POLL_S: Final = 15
# Shorter than a stall lasts: a lease that lapsed while nobody could renew it orphans nobody.
LEASE_S: Final = 6
SAMPLES: Final = 20


class Operator:
    """A connection of its own to the server, which none of its limits concerns any more."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(server.url.removeprefix("unix://"))

    def ask(self, *words: str) -> Any:
        packed = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub knows tuples of one word only
        self._socket.sendall(packed)
        reader = hiredis.Reader(notEnoughData=self)
        while (reply := reader.gets()) is self:
            reader.feed(self._socket.recv(65536))
        assert not isinstance(reply, hiredis.ReplyError), reply
        return reply

    def subscriptions(self) -> list[bytes]:
        """A line for each connection that is one."""
        return list(self.ask("CLIENT", "LIST", "TYPE", "pubsub").splitlines())

    def cut_all(self) -> None:
        self.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        self.ask("CLIENT", "KILL", "TYPE", "pubsub")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Stack]:
    flags = ["--redis-url", redis.url, "--poll-timeout", str(POLL_S), "--lease", str(LEASE_S)]
    with running_stack(tmp_path_factory.mktemp("redis-faults"), *flags) as stack:
        yield stack
        assert stack.simulator.stats()["concurrent_duplicates"] == 0
        assert "Traceback" not in stack.gateway.process.log


@pytest.fixture
def operator(redis: RedisServer) -> Iterator[Operator]:
    operator = Operator(redis)
    yield operator
    operator.close()


@pytest.fixture
def client(stack: Stack, first: Connection, second: Connection) -> Client:
    """Of a session of its own, once both workers have got over the test before."""
    trial = eventually(lambda: _client(stack, first), "a session")
    for seq_id, connection in enumerate((first, second)):
        body = trial.body(seq_id, PROMPT)
        result_of(connection, accepted(connection, body)["request_id"], trial, body)
    return Client(first, stack.model)


def _client(stack: Stack, connection: Connection) -> Client | None:
    try:
        return Client(connection, stack.model)
    except AssertionError:
        return None


class Running:
    """Samples of both workers that have begun, as far as the upstream."""

    def __init__(self, stack: Stack, client: Client, *connections: Connection) -> None:
        self.client = client
        self.bodies = [client.body(seq_id, PROMPT) for seq_id in range(SAMPLES)]
        for seq_id, body in enumerate(self.bodies):
            submit(connections[seq_id % len(connections)], body)
        stack.simulator.runs(SAMPLES)

    def request_id(self, seq_id: int) -> str:
        return f"{self.client.sampling_session_id}:{seq_id}"

    def all_succeed(self, connection: Connection) -> None:
        for seq_id, body in enumerate(self.bodies):
            result_of(connection, self.request_id(seq_id), self.client, body)


def refused(connection: Connection, body: dict[str, Any]) -> str:
    """Wait until a submission is refused as too much, which is all that a client may ever see; the reason."""

    def look() -> Reply | None:
        reply = connection.post("/api/v1/asample", body)
        assert reply.status in (200, 429), reply
        return reply if reply.status == 429 else None

    told: str = eventually(look, "a refusal").json()["detail"]
    return told


def test_a_stalled_redis_orphans_nobody_and_holds_polls(
    stack: Stack, redis: RedisServer, client: Client, first: Connection, second: Connection
) -> None:
    """C6, A9: what runs goes on, new samples are refused, a client polls no faster than else; then all is delivered."""
    orphaned = stack.gateway.counter("orphaned")
    with stack.simulator.holding():
        running = Running(stack, client, first, second)
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            polls = _polls_until_refused(first, second, running)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
    # The stall lasts as long as a poll is held.
    assert polls <= 3
    running.all_succeed(second)
    assert stack.gateway.counter("orphaned") == orphaned


def _polls_until_refused(submitting: Connection, polling: Connection, running: Running) -> int:
    """How often a client polls that asks again at once, until a submission on the other connection is refused."""
    late = running.client.body(SAMPLES, PROMPT)
    submitting.send("POST", "/api/v1/asample", late)
    polls = 0
    while not select.select([submitting.fileno()], [], [], 0)[0]:
        assert poll(polling, running.request_id(0)).status in (408, 429)
        polls += 1
    assert submitting.receive().status == 429
    return polls


def test_cut_subscriptions_come_back_and_lose_no_wake_up(
    stack: Stack, operator: Operator, client: Client, first: Connection, second: Connection
) -> None:
    """C4: a poll that is held at the worker that does not run the sample is answered, not left to its deadline."""
    for seq_id in range(2):
        body = client.body(seq_id, PROMPT)
        polls = stack.gateway.counter("polls")
        with stack.simulator.holding():
            send_poll(second, submit(first, body)["request_id"])
            stack.gateway.counter_reaches("polls", polls + 1)
            if seq_id == 0:
                # What an earlier test has cut is back a moment later.
                eventually(lambda: operator.subscriptions(), "subscriptions", until=lambda lines: len(lines) >= WORKERS)
                assert operator.ask("CLIENT", "KILL", "TYPE", "pubsub") >= WORKERS
        assert second.receive().status == 200


def test_a_redis_without_room_for_connections_is_waited_for(
    stack: Stack, operator: Operator, client: Client, first: Connection, second: Connection
) -> None:
    """A16: 429 in our words, seen in /status, and over as soon as there is room."""
    with stack.simulator.holding():
        running = Running(stack, client, first, second)
        operator.ask("CONFIG", "SET", "maxclients", "1")
        try:
            operator.cut_all()
            for connection in (first, second):
                assert "max number" not in refused(connection, client.body(SAMPLES, PROMPT))
            eventually(lambda: _connected(stack), "workers without Redis", until=lambda found: not any(found))
        finally:
            operator.ask("CONFIG", "SET", "maxclients", "1000")
    running.all_succeed(second)
    eventually(lambda: _connected(stack), "workers with Redis", until=all)


def _connected(stack: Stack) -> list[bool]:
    return [worker["store_connected"] for worker in stack.gateway.workers()]


def test_a_full_redis_refuses_what_is_new_and_loses_nothing(
    stack: Stack, operator: Operator, client: Client, first: Connection, second: Connection
) -> None:
    """C5"""
    unread = client.body(SAMPLES, PROMPT)
    submit(first, unread)
    result_of(second, f"{client.sampling_session_id}:{SAMPLES}", client, unread)
    try:
        with stack.simulator.holding():
            running = Running(stack, client, first, second)
            operator.ask("CONFIG", "SET", "maxmemory", "1")
            for connection in (first, first, second):
                assert "full" in refused(connection, client.body(SAMPLES + 1, PROMPT))
        eventually(lambda: not stack.simulator.stats()["in_flight"], "the end of all generations")
        # What was there is still read; what has ended now waits in its worker.
        result_of(first, f"{client.sampling_session_id}:{SAMPLES}", client, unread)
    finally:
        operator.ask("CONFIG", "SET", "maxmemory", "0")
    running.all_succeed(second)
    body = client.body(SAMPLES + 1, PROMPT)
    result_of(second, accepted(first, body)["request_id"], client, body)


def test_a_result_larger_than_redis_fails_in_words_and_keeps_nobody_out(
    stack: Stack, operator: Operator, client: Client, first: Connection, second: Connection
) -> None:
    """C5: one greedy generation, promised a thousand times over, is 8 MB."""
    operator.ask("CONFIG", "SET", "maxmemory", "8388608")
    try:
        params = {"temperature": 0.0, "max_tokens": 1000}
        request_id = submit(first, client.body(SAMPLES, PROMPT, num_samples=1000, params=params))["request_id"]
        for connection in (first, second):
            category, text = failure_of(connection, request_id)
            assert (category, "MiB" in text) == ("server", True), text
        body = client.body(SAMPLES + 1, PROMPT)
        result_of(second, accepted(first, body)["request_id"], client, body)
    finally:
        operator.ask("CONFIG", "SET", "maxmemory", "0")


def test_a_redis_that_restarts_with_its_data_has_lost_nothing(
    stack: Stack, redis: RedisServer, client: Client, first: Connection, second: Connection
) -> None:
    """C3"""
    unread = client.body(SAMPLES, PROMPT)
    request_id = submit(first, unread)["request_id"]
    completions(second, client, {request_id})
    with stack.simulator.holding():
        running = Running(stack, client, first, second)
        redis.restart(keep_data=True)
    result_of(second, request_id, client, unread)
    running.all_succeed(second)


def test_a_redis_that_restarts_empty_is_told_what_runs_and_what_is_lost(
    stack: Stack, redis: RedisServer, client: Client, first: Connection, second: Connection
) -> None:
    """C3, C7: to who polls per sample, and to who polls per session with the cursor of before."""
    lost_id = submit(first, client.body(SAMPLES, PROMPT))["request_id"]
    _, cursor = completions(second, client, {lost_id})
    with stack.simulator.holding():
        running = Running(stack, client, first, second)
        redis.restart()
    assert settled(second, lost_id).status == 410
    running.all_succeed(second)
    # Others may be told of as failed besides: whatever could have been submitted and is not known any more.
    expected = {lost_id: "failed", **{running.request_id(seq_id): "finished" for seq_id in range(SAMPLES)}}
    told, _ = completions(second, client, expected.keys(), cursor)
    assert {request_id: told[request_id] for request_id in expected} == expected
    body = client.body(SAMPLES + 1, PROMPT)
    result_of(first, accepted(second, body)["request_id"], client, body)


def test_a_redis_that_is_emptied_under_way_is_told_what_runs_before_anybody_hears_that_it_is_gone(
    stack: Stack, operator: Operator, client: Client, first: Connection, second: Connection
) -> None:
    """C7: FLUSHALL on a server that goes on running; polls that come at once are held until all is known again."""
    with stack.simulator.holding():
        running = Running(stack, client, first, second)
        polls = [(connect_to(stack.gateway, slot), seq_id) for slot in range(WORKERS) for seq_id in range(2)]
        operator.ask("FLUSHALL")
        for connection, seq_id in polls:
            send_poll(connection, running.request_id(seq_id))
        assert [connection.receive().status for connection, _ in polls] == [408] * len(polls)
        for connection, _ in polls:
            connection.close()
    running.all_succeed(second)
