"""API keys over the life of a running gateway: made, limited, revoked, with real processes and real files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.system.http_calls import call
from tests.system.outcomes import result_of
from tests.system.pinned import Client, connect_to, poll, submit
from tests.system.stack import running_stack
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [61, 62, 63]


class KeysFile:
    """`gateway keys` as an operator runs it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.toml"

    def __call__(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "gateway", "keys", *arguments, "--api-keys-file", str(self.path)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout

    def add(self, *arguments: str) -> str:
        return self("add", *arguments).strip().removeprefix("TINKER_API_KEY=")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeysFile:
    return KeysFile(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def alice(keys: KeysFile) -> str:
    return keys.add("alice")


@pytest.fixture(scope="module")
def bob(keys: KeysFile) -> str:
    return keys.add("bob", "--max-request-tokens", "64")


@pytest.fixture(scope="module")
def stack(keys: KeysFile, alice: str, bob: str) -> Iterator[Stack]:
    with running_stack(keys.path.parent, "--api-keys-file", str(keys.path), "--poll-timeout", "2") as stack:
        yield stack
        log = stack.gateway.process.log
        assert "Traceback" not in log
        assert alice not in log and bob not in log


def let_in(stack: Stack, keys: KeysFile, name: str) -> str:
    """A key that the running gateway has been told of."""
    key = keys.add(name)
    before = pids(stack)
    assert is_refused(stack, key)
    assert call("POST", f"{stack.gateway.admin_url}/reload").status == 202
    eventually(lambda: not is_refused(stack, key), "to be let in")
    rolled(stack, before)
    return key


def is_refused(stack: Stack, key: str) -> bool:
    with closing(stack.gateway.connect(key)) as connection:
        return refused(connection)


def pids(stack: Stack) -> set[int]:
    return {worker["pid"] for worker in stack.gateway.workers()}


def rolled(stack: Stack, before: set[int]) -> None:
    """Wait for the roll that follows a reload: a worker that is replaced closes the connections that a test opens."""

    def all_new(workers: list[dict[str, Any]]) -> bool:
        return all(worker["state"] == "ready" and worker["pid"] not in before for worker in workers)

    eventually(stack.gateway.workers, "the end of the roll", until=all_new)


def refused(connection: Connection) -> bool:
    """Every worker is told at once, but not in no time."""
    return connection.post("/api/v1/session_heartbeat", {"session_id": "x"}).status == 401


def out(connection: Connection) -> bool:
    """Refused, or closed by a worker that was replaced meanwhile."""
    try:
        return refused(connection)
    except (ConnectionError, HTTPException):
        return True


def test_a_revoked_key_is_out_on_every_worker_and_what_it_ran_is_ended(stack: Stack, keys: KeysFile, bob: str) -> None:
    """Over connections that were open before; another key's samples go on over the reload and the roll."""
    dora = let_in(stack, keys, "dora")
    before = pids(stack)
    with ExitStack() as leaving:
        of_dora = [leaving.enter_context(closing(connect_to(stack.gateway, slot, dora))) for slot in (0, 1)]
        of_bob = leaving.enter_context(closing(connect_to(stack.gateway, 1, bob)))
        losing, lasting = Client(of_dora[0], stack.model), Client(of_bob, stack.model)
        body = lasting.body(0, PROMPT)
        with stack.simulator.holding():
            for seq_id, connection in enumerate(of_dora):
                lost = submit(connection, losing.body(seq_id, PROMPT))["request_id"]
            kept = submit(of_bob, body)["request_id"]
            stack.simulator.runs(3)
            keys("revoke", "dora")
            os.kill(stack.gateway.process.pid, signal.SIGHUP)
            for connection in of_dora:
                eventually(partial(out, connection), "a 401")
            newcomer = leaving.enter_context(closing(stack.gateway.connect(dora)))
            assert poll(newcomer, lost).status == 401
            eventually(lambda: stack.simulator.stats()["in_flight"] == 1, "the end of what dora ran")
        polling = leaving.enter_context(closing(stack.gateway.connect(bob)))
        result_of(polling, kept, lasting, body)
        stack.gateway.counter_reaches("stale", 2)
    rolled(stack, before)


def test_operators_see_who_asks_for_how_much(stack: Stack, keys: KeysFile) -> None:
    """By name, on the workers' own word, in the status, the metrics and at the terminal; and never the key itself."""
    eve = keys.add("eve", "--max-in-flight", "2")
    before = pids(stack)
    assert call("POST", f"{stack.gateway.admin_url}/reload").status == 202
    # What runs on a worker that is being replaced is not in the figures.
    rolled(stack, before)
    with closing(connect_to(stack.gateway, 0, eve)) as connection:
        eventually(lambda: not refused(connection), "to be let in")
        client = Client(connection, stack.model)
        with stack.simulator.holding():
            submit(connection, client.body(0, PROMPT))
            assert connection.post("/api/v1/asample", client.body(1, PROMPT)).status == 429
            eventually(lambda: seen(stack, "eve"), "eve's figures", until=lambda found: found["in_flight"] == 1)
        found = eventually(lambda: seen(stack, "eve"), "its end", until=lambda found: found["in_flight"] == 0)
    assert (found["samples"], found["rejected"]) == (1, 1)
    told = call("GET", f"{stack.gateway.admin_url}/metrics").body.decode()
    assert 'gateway_key_samples_begun_total{key="eve"} 1.0' in told
    command = [sys.executable, "-m", "gateway", "status", "--admin", stack.gateway.admin_url]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    assert "eve" in shown
    assert eve not in told + shown + call("GET", f"{stack.gateway.admin_url}/status").body.decode()


def seen(stack: Stack, name: str) -> dict[str, Any]:
    return next(key for key in stack.gateway.status()["keys"] if key["name"] == name)


def test_a_new_key_comes_in_after_a_reload(stack: Stack, keys: KeysFile, alice: str) -> None:
    let_in(stack, keys, "carol")
    with closing(stack.gateway.connect(alice)) as connection:
        assert not refused(connection)


def test_a_file_that_is_wrong_now_changes_nothing(stack: Stack, keys: KeysFile, alice: str) -> None:
    right = keys.path.read_text()
    keys.path.write_text("[[keys]]\nname = 'x'\n")
    reply = call("POST", f"{stack.gateway.admin_url}/reload")
    keys.path.write_text(right)
    assert reply.status == 400
    assert "entry 1" in reply.json()["detail"]
    with closing(stack.gateway.connect(alice)) as connection:
        assert not refused(connection)


def test_what_a_key_may_ask_for_at_once(stack: Stack, alice: str, bob: str) -> None:
    for key, status in ((alice, 200), (bob, 403)):
        with closing(stack.gateway.connect(key)) as connection:
            client = Client(connection, stack.model)
            reply = connection.post("/api/v1/asample", client.body(0, PROMPT, num_samples=9))
            assert reply.status == status, reply


@pytest.mark.parametrize("key", [None, "tml-wrong"])
def test_a_stranger_is_refused_before_its_body_is_read(stack: Stack, key: str | None) -> None:
    """The body never comes: the reply does."""
    host, _, port = stack.gateway.url.removeprefix("http://").rpartition(":")
    credential = f"X-API-Key: {key}\r\n" if key else ""
    head = f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\n{credential}Content-Length: 1000000\r\n\r\n" + '{"half":'
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
