"""An upstream that misbehaves, seen from the other end: what the client of each sample gets."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.ports import free_port
from tests.system.outcomes import failure_of, result_of, says_it_waits, settled
from tests.system.pinned import Client, connect_to, submit
from tests.system.stack import Simulator, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [31, 32, 33]
FLAGS: Final = ("--poll-timeout", "1")
BUSY: Final = {"error": {"message": "the queue is full", "type": "ServiceUnavailable"}}
NAN: Final = {"error": {"message": "Out of range float values are not JSON compliant: nan", "code": 400}}
DEAD: Final = {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}
NO_MODEL: Final = {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}}


@pytest.fixture(scope="module", params=["completions", "generate"])
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """What a fault comes to is the same by either of vLLM's endpoints."""
    flags = (*FLAGS, "--upstream-protocol", request.param)
    with running_stack(tmp_path_factory.mktemp("upstream-faults"), *flags) as stack:
        yield stack


@pytest.fixture(autouse=True)
def never_twice_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stack" in request.fixturenames:
        stack: Stack = request.getfixturevalue("stack")
        stack.simulator.script()
        assert stack.simulator.stats()["concurrent_duplicates"] == 0


def fault(kind: str, times: int | None = 1, **options: Any) -> dict[str, Any]:
    return {"kind": kind, **options} | ({"next": times} if times is not None else {})


def status(code: int, body: Any = "", times: int | None = 1, **options: Any) -> dict[str, Any]:
    return fault("status", times, status=code, body=body, **options)


@pytest.mark.parametrize(
    ("fault", "executions"),
    [
        pytest.param(status(503, BUSY, 2), 1, id="503"),
        pytest.param(status(429, BUSY, headers={"Retry-After": "1"}), 1, id="429"),
        pytest.param(status(408), 1, id="408 of a queue"),
        pytest.param(status(500, DEAD), 1, id="EngineCore"),
        pytest.param(status(500, "error sending request for url"), 1, id="router lost it"),
        pytest.param(fault("reset_before_read"), 1, id="reset before it was read"),
        pytest.param(fault("reset_before_status"), 2, id="reset before a reply"),
        pytest.param(fault("bad_token", value=2**40), 2, id="D13 2**40"),
        pytest.param(fault("bad_token", value=-1), 2, id="D13 -1"),
        # D16
        pytest.param(fault("abort", 3), 4, id="abort without tokens"),
        # D9, D17
        pytest.param(fault("abort", 2, tokens=3), 3, id="abort with tokens"),
    ],
)
def test_what_may_be_sent_again_succeeds_in_the_end(
    stack: Stack, client: Client, first: Connection, second: Connection, fault: dict[str, Any], executions: int
) -> None:
    """D8, D9, D16, D17: the client sees nothing of it, and nothing runs more often than it must."""
    before = stack.simulator.stats()["executions"]
    stack.simulator.script(fault)
    body = client.body(1, PROMPT)
    result_of(second, submit(first, body)["request_id"], client, body)
    assert stack.simulator.stats()["executions"] == before + executions


@pytest.mark.parametrize(
    ("fault", "category", "words"),
    [
        pytest.param(status(500, "boom"), "server", "500: boom", id="500"),
        pytest.param(status(502, "bad gateway"), "server", "502: bad gateway", id="502"),
        pytest.param(status(400, NAN), "server", "NaN", id="D10 NaN in the weights"),
        pytest.param(status(404, NO_MODEL), "user", "The model `x` does not exist", id="404"),
        pytest.param(status(401, BUSY), "server", "--upstream-api-key-file", id="401"),
        pytest.param(fault("reset_in_body"), "server", "cut", id="reset in the body"),
        pytest.param(fault("reset_after_headers"), "server", "cut", id="reset after the headers"),
        pytest.param(fault("html"), "server", "HTML instead of JSON", id="D3 HTML"),
        pytest.param(fault("empty"), "server", "an empty body", id="D3 empty"),
        pytest.param(fault("nan"), "server", "NaN", id="D3 NaN"),
        pytest.param(fault("null_logprobs"), "server", "logprobs that are not all numbers", id="D3 null"),
        pytest.param(fault("wrong_lengths"), "server", "8 token ids and 7 logprobs", id="D4 lengths"),
        pytest.param(fault("missing_choices"), "server", "1 choices where 2", id="D4 choices"),
        pytest.param(fault("error_in_200"), "server", "something broke", id="D14 error in a 200"),
        pytest.param(fault("bad_token", value=1.5), "server", "not all integers", id="D13 1.5"),
    ],
)
def test_what_may_have_run_fails_once_with_the_reason(
    stack: Stack,
    client: Client,
    first: Connection,
    second: Connection,
    fault: dict[str, Any],
    category: str,
    words: str,
) -> None:
    """D3, D4, D10, D13, D14: told in words, sent once, and never a result."""
    received = stack.simulator.stats()["received"]
    stack.simulator.script(fault)
    body = client.body(1, PROMPT, num_samples=2, params={"max_tokens": 8})
    request_id = submit(first, body)["request_id"]
    for connection in (second, first):
        told_category, text = failure_of(connection, request_id)
        assert (told_category, words in text) == (category, True), text
    assert stack.simulator.stats()["received"] == received + 1


def test_an_upstream_that_hangs_fails_the_sample_at_the_deadline(tmp_path: Path) -> None:
    """A15"""
    with running_stack(tmp_path, *FLAGS, "--read-timeout", "2") as stack, closing(connect_to(stack.gateway, 0)) as one:
        client = Client(one, stack.model)
        stack.simulator.script(fault("hang"))
        category, text = failure_of(one, submit(one, client.body(1, PROMPT))["request_id"])
        assert (category, "no reply in time" in text) == ("server", True), text
        assert stack.simulator.stats()["received"] == 1


def test_an_upstream_that_is_interrupted_too_often_leaves_it_to_the_sdk(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """Executed again once, then 410: never a partial result, never a third time."""
    before = stack.simulator.stats()["executions"]
    stack.simulator.script(fault("reset_before_status", None))
    request_id = submit(first, client.body(1, PROMPT))["request_id"]
    assert settled(second, request_id).status == 410
    assert stack.simulator.stats()["executions"] == before + 2


def test_while_no_upstream_takes_it_polls_say_so_at_every_worker(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """D8"""
    stack.simulator.script(status(503, BUSY, None))
    body = client.body(1, PROMPT)
    request_id = submit(first, body)["request_id"]
    for connection in (first, second):
        says_it_waits(connection, request_id)
    stack.simulator.script()
    result_of(second, request_id, client, body)


def test_an_upstream_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """D8: nobody listens at first; samples wait, and are told so at both workers."""
    with running_stack(tmp_path, *FLAGS, simulator_flags=["--port", str(free_port())]) as stack:
        first, second = connect_to(stack.gateway, 0), connect_to(stack.gateway, 1)
        client = Client(first, stack.model)
        port = stack.simulator.port
        stack.simulator.process.kill()
        body = client.body(1, PROMPT)
        request_id = submit(first, body)["request_id"]
        for connection in (first, second):
            says_it_waits(connection, request_id)
        stack.simulator = Simulator(tmp_path, "--port", port)
        try:
            result_of(second, request_id, client, body)
        finally:
            stack.simulator.process.kill()
            first.close()
            second.close()


def test_an_upstream_that_answers_502_for_ever_ends_the_sample_though_it_may_be_sent_again(tmp_path: Path) -> None:
    """Not 410: the SDK would submit it anew, for ever."""
    with running_stack(tmp_path, *FLAGS, "--retry-ambiguous") as stack:
        connection = connect_to(stack.gateway, 0)
        client = Client(connection, stack.model)
        stack.simulator.script(status(502, "bad gateway", None))
        request_id = submit(connection, client.body(1, PROMPT))["request_id"]
        category, text = failure_of(connection, request_id)
        assert (category, "502: bad gateway" in text) == ("server", True), text
        assert stack.simulator.stats()["received"] == 2
        connection.close()


class TestTwoUpstreams:
    @pytest.fixture
    def other(self, tmp_path: Path) -> Iterator[Simulator]:
        directory = tmp_path / "other"
        directory.mkdir()
        simulator = Simulator(directory)
        yield simulator
        simulator.process.kill()

    @pytest.fixture
    def pair(self, tmp_path: Path, other: Simulator) -> Iterator[Stack]:
        with running_stack(tmp_path, *FLAGS, "--upstream", other.url) as stack:
            yield stack

    def test_one_that_is_broken_costs_no_sample(self, pair: Stack, other: Simulator) -> None:
        with ExitStack() as closing:
            connection = pair.gateway.connect()
            closing.callback(connection.close)
            client = Client(connection, pair.model)
            other.script(fault("reset_before_status", None))
            bodies = [client.body(seq_id, PROMPT) for seq_id in range(20)]
            for body in bodies[:10]:
                submit(connection, body)
            other.process.kill()
            for body in bodies[10:]:
                submit(connection, body)
            for body in bodies:
                result_of(connection, f"{client.sampling_session_id}:{body['seq_id']}", client, body)
            assert pair.simulator.stats()["concurrent_duplicates"] == 0

    def test_one_that_is_stopped_and_silent_is_left(self, pair: Stack, other: Simulator) -> None:
        """D18: its open connections stay without a byte, new ones are refused."""
        connection = pair.gateway.connect()
        client = Client(connection, pair.model)
        other.script({"kind": "hold"})
        bodies = [client.body(seq_id, PROMPT) for seq_id in range(8)]
        with pair.simulator.holding():
            request_ids = [submit(connection, body)["request_id"] for body in bodies]
            eventually(
                lambda: other.stats()["in_flight"] + pair.simulator.stats()["in_flight"],
                "8 generations",
                until=lambda seen: seen == 8,
            )
            assert other.stats()["in_flight"]
            other.script({"kind": "drain"})
        for request_id, body in zip(request_ids, bodies, strict=True):
            result_of(connection, request_id, client, body)
        connection.close()
        assert pair.simulator.stats()["executions"] == 8

    def test_one_that_was_stopped_in_the_kernel_is_no_reason_to_run_it_twice_at_once(
        self, pair: Stack, other: Simulator
    ) -> None:
        """A15: it may come back; until its deadline its samples are its own."""
        connection = pair.gateway.connect()
        client = Client(connection, pair.model)
        os.kill(other.process.pid, signal.SIGSTOP)
        bodies = [client.body(seq_id, PROMPT) for seq_id in range(8)]
        request_ids = [submit(connection, body)["request_id"] for body in bodies]
        eventually(lambda: pair.simulator.stats()["completed"], "what went to the other one")
        os.kill(other.process.pid, signal.SIGCONT)
        for request_id, body in zip(request_ids, bodies, strict=True):
            result_of(connection, request_id, client, body)
        connection.close()
        assert pair.simulator.stats()["executions"] + other.stats()["executions"] == 8
