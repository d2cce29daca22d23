"""The whole gateway is killed and started again: what its clients see of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import pytest

from tests.system.expected import check_payload
from tests.system.outcomes import accepted, settled
from tests.system.pinned import Client, submit
from tests.system.stack import running_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT: Final = [21, 22, 23]


class Interrupted:
    """A gateway that was killed while one sample had finished and one was running, and that has started again."""

    def __init__(self, stack: Stack) -> None:
        connection = stack.gateway.connect()
        self.client = Client(connection, stack.model)
        self.finished = self.client.body(1, PROMPT)
        self.finished_id = submit(connection, self.finished)["request_id"]
        assert settled(connection, self.finished_id).status == 200
        with stack.simulator.holding():
            self.pending_id = submit(connection, self.client.body(2, PROMPT))["request_id"]
            stack.simulator.runs(1)
            connection.close()
            stack.gateway.kill_and_restart()
        self.connection = stack.gateway.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def goes_on(self) -> None:
        """The client's sampling session works as if nothing had been."""
        body = self.client.body(3, PROMPT)
        reply = settled(self.connection, accepted(self.connection, body)["request_id"])
        assert reply.status == 200, reply
        check_payload(reply.body, self.client.model, body)
        alive = self.connection.post("/api/v1/session_heartbeat", {"session_id": self.client.session_id})
        assert alive.status == 200


def test_with_a_redis_of_its_own_finished_results_outlive_the_gateway(tmp_path: Path, redis_url: str) -> None:
    """A20"""
    flags = ["--redis-url", redis_url, "--poll-timeout", "1", "--lease", "6"]
    with running_stack(tmp_path, *flags) as stack, Interrupted(stack) as interrupted:
        reply = settled(interrupted.connection, interrupted.finished_id)
        assert reply.status == 200
        check_payload(reply.body, interrupted.client.model, interrupted.finished)
        assert settled(interrupted.connection, interrupted.pending_id).status == 410
        interrupted.goes_on()


def test_with_the_embedded_redis_both_are_submitted_again(tmp_path: Path) -> None:
    """A20: gone is retryable."""
    with running_stack(tmp_path, "--poll-timeout", "1") as stack, Interrupted(stack) as interrupted:
        assert settled(interrupted.connection, interrupted.finished_id).status == 410
        assert settled(interrupted.connection, interrupted.pending_id).status == 410
        interrupted.goes_on()
