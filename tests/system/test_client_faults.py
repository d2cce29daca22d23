"""Clients that come in hordes, go away, fall silent or change their minds; and a gateway that stops or is rolled."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import ExitStack, closing
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.integration.gateway_process import alive
from tests.system.outcomes import result_of, settled
from tests.system.pinned import Client, connect_to, send_poll, submit
from tests.system.stack import running_stack
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.http_calls import Connection, Reply
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [51, 52, 53]
HALF_OPEN: Final = 2_000
POLLS: Final = 50
# What a gateway holds when it is stopped.
HELD_POLLS: Final = 1000
RUNNING: Final = 100
# One greedy generation, promised so many times over: 100 MB.
COPIES: Final = 800
COPY_TOKENS: Final = 16_000
# Sessions are looked after every 5 s: below that, one that fell silent is found at the next look or the one after.
SESSION_S: Final = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("client-faults"), "--poll-timeout", "5") as stack:
        yield stack
        assert stack.simulator.stats()["concurrent_duplicates"] == 0
        assert "Traceback" not in stack.gateway.process.log


def public_address(stack: Stack) -> tuple[str, int]:
    host, _, port = stack.gateway.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_thousands_of_half_sent_requests_disturb_nobody(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """B16"""
    half = b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with ExitStack() as left:
        for number in range(HALF_OPEN):
            connection = left.enter_context(socket.create_connection(public_address(stack)))
            # In the middle of a header, and in the middle of a body.
            connection.sendall(half[: 40 if number % 2 else None])
        for seq_id, (submitting, polling) in enumerate([(first, second), (second, first)] * 5):
            body = client.body(seq_id, PROMPT)
            result_of(polling, submit(submitting, body)["request_id"], client, body)


def test_slow_readers_of_large_results_disturb_nobody(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """B16: results of 100 MB, of which one reader takes nothing and one a little; then one reads it whole."""
    params = {"temperature": 0.0, "max_tokens": COPY_TOKENS}
    large = client.body(0, PROMPT, num_samples=COPIES, params=params)
    request_id = submit(first, large)["request_id"]
    assert settled(second, request_id).status == 200
    with ExitStack() as left:
        for number in range(2):
            reader = stack.gateway.connect()
            left.callback(reader.close)
            _ask_for_all(reader, request_id)
            if number:
                assert reader.trickle(1024)
        for seq_id, (submitting, polling) in enumerate([(first, second), (second, first)] * 5, 1):
            body = client.body(seq_id, PROMPT)
            result_of(polling, submit(submitting, body)["request_id"], client, body)
    _ask_for_all(second, request_id)
    assert len(second.receive().body) > COPIES * COPY_TOKENS * 8


def _ask_for_all(connection: Connection, request_id: str) -> None:
    """A poll of a client that does not want to hear of the size first."""
    body = {"request_id": request_id}
    connection.send("POST", "/api/v1/retrieve_future", body, Accept="application/x-protobuf")


def test_polls_that_were_given_up_take_nothing_away(stack: Stack, client: Client, second: Connection) -> None:
    """A2, C1: of one sample, many at once, at both workers."""
    body = client.body(1, PROMPT)
    seen = stack.gateway.status()["counters"]
    with stack.simulator.holding():
        request_id = submit(second, body)["request_id"]
        leavers = [stack.gateway.connect() for _ in range(POLLS)]
        for leaver in leavers:
            send_poll(leaver, request_id)
        stack.gateway.counter_reaches("polls", seen["polls"] + POLLS)
        for leaver in leavers:
            leaver.close()
        stack.gateway.counter_reaches("polls_abandoned", seen["polls_abandoned"] + POLLS)
    result_of(second, request_id, client, body)


def test_a_session_that_fell_silent_has_its_samples_cancelled(tmp_path: Path) -> None:
    """D7: the upstream stops working for nobody; whoever comes back submits again, in the same session."""
    with (
        running_stack(tmp_path, "--poll-timeout", "1", "--session-timeout", str(SESSION_S)) as stack,
        ExitStack() as left,
    ):
        first, second = (left.enter_context(closing(connect_to(stack.gateway, slot))) for slot in (0, 1))
        client = Client(first, stack.model)
        with stack.simulator.holding():
            request_ids = [
                submit(connection, client.body(seq_id, PROMPT))["request_id"]
                for seq_id, connection in enumerate((first, second))
            ]
            eventually(stack.simulator.stats, "both aborts upstream", until=lambda seen: seen["aborted"] == 2)
        for request_id in request_ids:
            for connection in (first, second):
                assert settled(connection, request_id).status == 410
        body = client.body(2, PROMPT)
        result_of(second, submit(first, body)["request_id"], client, body)


class TestACancelAndAResult:
    def test_the_result_was_first(self, client: Client, first: Connection, second: Connection) -> None:
        body = client.body(1, PROMPT)
        request_id = submit(first, body)["request_id"]
        result_of(second, request_id, client, body)
        for connection in (first, second):
            assert connection.post("/api/v1/cancel_future", {"request_id": request_id}).status == 200
            result_of(connection, request_id, client, body)

    def test_the_cancel_was_first(self, stack: Stack, client: Client, first: Connection, second: Connection) -> None:
        with stack.simulator.holding():
            request_id = submit(first, client.body(1, PROMPT))["request_id"]
            stack.simulator.runs(1)
            assert first.post("/api/v1/cancel_future", {"request_id": request_id}).status == 200
        for connection in (second, first):
            assert settled(connection, request_id).json()["category"] == "user"

    def test_at_the_same_moment_one_of_them_wins_for_good(
        self, stack: Stack, client: Client, first: Connection, second: Connection
    ) -> None:
        """Invariant 2: whatever a poll says once, every later one says at every worker."""
        bodies = [client.body(seq_id, PROMPT) for seq_id in range(40)]
        with stack.simulator.holding():
            request_ids = [submit(first, body)["request_id"] for body in bodies]
            stack.simulator.runs(len(bodies))
            for request_id in request_ids[:20]:
                first.post("/api/v1/cancel_future", {"request_id": request_id})
        for request_id in request_ids[20:]:
            second.post("/api/v1/cancel_future", {"request_id": request_id})
        for request_id, body in zip(request_ids, bodies, strict=True):
            once = settled(second, request_id)
            assert settled(first, request_id).body == once.body
            if once.headers["content-type"] != "application/json":
                result_of(second, request_id, client, body)
            else:
                assert once.json()["category"] == "user"


def test_a_finished_session_answers_its_polls_for_ever(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """What was done is still handed out, what ran is 410, also to a poll that was held; nothing new is taken."""
    done = client.body(1, PROMPT)
    done_id = submit(first, done)["request_id"]
    result_of(second, done_id, client, done)
    aborted = stack.simulator.stats()["aborted"]
    with stack.simulator.holding():
        running_id = submit(first, client.body(2, PROMPT))["request_id"]
        stack.simulator.runs(1)
        holder = connect_to(stack.gateway, 1)
        send_poll(holder, running_id)
        reply = second.post(f"/api/v1/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
        assert reply.status == 200
        eventually(stack.simulator.stats, "the abort upstream", until=lambda seen: seen["aborted"] > aborted)
        assert holder.receive().status == 410
        holder.close()
    for connection in (first, second):
        assert settled(connection, running_id).status == 410
        result_of(connection, done_id, client, done)
        assert connection.post("/api/v1/asample", client.body(3, PROMPT)).status == 410


@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "at the deadline"])
def test_a_gateway_that_is_stopped_ends_what_it_runs(tmp_path: Path, redis_url: str, in_time: bool) -> None:
    """B12: polls are sent back at once; samples finish, or are submitted again elsewhere; exit 0."""
    drain_s = "60" if in_time else "5"
    flags = ["--redis-url", redis_url, "--poll-timeout", "20", "--drain-timeout", drain_s]
    with running_stack(tmp_path, *flags) as stack:
        connection = stack.gateway.connect()
        client = Client(connection, stack.model)
        bodies = [client.body(seq_id, PROMPT) for seq_id in range(RUNNING)]
        with stack.simulator.holding():
            request_ids = [submit(connection, body)["request_id"] for body in bodies]
            stack.simulator.runs(len(bodies))
            pollers = _hold_polls(stack, request_ids)
            os.kill(stack.gateway.process.pid, signal.SIGTERM)
            for poller in pollers:
                assert poller.receive().status == 408
            if not in_time:
                assert stack.gateway.process.wait(DEADLINE_S) == 0
        if in_time:
            assert stack.gateway.process.wait(DEADLINE_S) == 0
        stack.gateway.kill_and_restart()
        again = stack.gateway.connect()
        for request_id, body in zip(request_ids, bodies, strict=True):
            if in_time:
                result_of(again, request_id, client, body)
            else:
                assert settled(again, request_id).status == 410
        assert stack.simulator.stats()["executions"] == len(bodies)
        for opened in (connection, again, *pollers):
            opened.close()


def _hold_polls(stack: Stack, request_ids: list[str]) -> list[Connection]:
    pollers = [stack.gateway.connect() for _ in range(HELD_POLLS)]
    for number, poller in enumerate(pollers):
        send_poll(poller, request_ids[number % len(request_ids)])
    stack.gateway.counter_reaches("polls", HELD_POLLS)
    return pollers


class Load(threading.Thread):
    """A client that samples one after the other, with a new connection whenever the server closes its own."""

    def __init__(self, stack: Stack, client: Client, clone: int) -> None:
        super().__init__(name=f"load-{clone}")
        self._stack = stack
        self._client = client
        self._seq_ids = range(clone * 10**9, (clone + 1) * 10**9)
        self._connection = stack.gateway.connect()
        self.stop = threading.Event()
        self.completed = 0
        self.trouble: list[Any] = []

    def run(self) -> None:
        for seq_id in self._seq_ids:
            if self.stop.is_set() or self.trouble:
                break
            try:
                self._sample(seq_id)
            except (OSError, HTTPException) as error:
                self.trouble.append(error)
        self._connection.close()

    def _sample(self, seq_id: int) -> None:
        body = self._client.body(seq_id, PROMPT)
        promised = self._ask("asample", body)
        if promised.status != 200:
            self.trouble.append(promised)
            return
        request_id = promised.json()["request_id"]
        while (reply := self._ask("retrieve_future", {"request_id": request_id})).status == 408:
            pass
        if reply.status != 200:
            self.trouble.append(reply)
        self.completed += 1

    def _ask(self, path: str, body: dict[str, Any]) -> Reply:
        reply = self._connection.post(f"/api/v1/{path}", body)
        if reply.headers.get("connection") == "close":
            self._connection.close()
            self._connection = self._stack.gateway.connect()
        return reply


def test_a_roll_under_load_fails_no_request(tmp_path: Path) -> None:
    """B15: every worker is replaced; no client sees a refused, reset or failed request, at most "send it again"."""
    with running_stack(tmp_path, "--poll-timeout", "2") as stack:
        connection = stack.gateway.connect()
        client = Client(connection, stack.model)
        connection.close()
        loads = [Load(stack, client, clone) for clone in range(4)]
        for load in loads:
            load.start()
        before = {worker["pid"] for worker in stack.gateway.workers()}
        os.kill(stack.gateway.process.pid, signal.SIGHUP)

        def rolled() -> bool:
            now = {worker["pid"] for worker in stack.gateway.workers()}
            return len(now) == len(before) and not now & before

        try:
            eventually(rolled, "two new workers")
            marks = [load.completed for load in loads]
            eventually(
                lambda: all(load.completed > mark + 5 or load.trouble for load, mark in zip(loads, marks, strict=True)),
                "samples of the new workers",
            )
        finally:
            for load in loads:
                load.stop.set()
                load.join()
        assert [load.trouble for load in loads] == [[]] * len(loads)


def test_a_worker_that_is_replaced_answers_the_connections_that_it_still_has(tmp_path: Path) -> None:
    """B15: its worker ran nothing between two requests of a client; the second is taken, the next goes elsewhere."""
    with running_stack(tmp_path, "--workers", "1", "--source-ips", "127.0.0.2") as stack:
        connection = stack.gateway.connect()
        client = Client(connection, stack.model)
        (old,) = stack.gateway.workers()
        os.kill(stack.gateway.process.pid, signal.SIGHUP)
        eventually(stack.gateway.workers, "a new worker", until=lambda workers: workers[0]["pid"] != old["pid"])
        for seq_id in range(1000):
            reply = connection.post("/api/v1/asample", client.body(seq_id, PROMPT))
            assert reply.status == 200, reply
            if reply.headers.get("connection") == "close":
                break
        connection.close()
        eventually(lambda: not alive(old["pid"]), "the end of the old worker")
