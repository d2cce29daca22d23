"""The clock that a delivery starts, over connections to different workers: when it starts, and when it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.system.outcomes import completions, result_of
from tests.system.pinned import Client, connect_to, poll, send_poll, submit
from tests.system.stack import Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.http_calls import Connection

pytestmark = pytest.mark.slow

PROMPT: Final = [14, 15, 16]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """What is delivered is gone after a second: no test reads anything again that it wants to find."""
    flags = ["--retrieved-ttl", "1", "--poll-timeout", "5"]
    with running_stack(tmp_path_factory.mktemp("retrieved-ttl"), *flags) as stack:
        yield stack


def expires(connection: Connection, request_id: str) -> None:
    """Polls all the time: no reading extends it."""
    eventually(
        lambda: poll(connection, request_id), "the end of a delivered result", until=lambda reply: reply.status == 410
    )


def test_a_retrieved_result_goes_after_its_ttl_and_not_before_a_poll(
    client: Client, first: Connection, second: Connection
) -> None:
    """Invariant 4: the clock starts with the delivery; reading again extends nothing."""
    body = client.body(40, PROMPT)
    request_id = submit(first, body)["request_id"]
    result_of(first, request_id, client, body)
    expires(second, request_id)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "at the same moment"])
def test_an_abandoned_poll_delivers_nothing(
    stack: Stack, client: Client, first: Connection, second: Connection, noticed: bool
) -> None:
    """A2: the retrieved clock does not start for a client that had gone before the result landed."""
    body = client.body(1, PROMPT)
    seen = stack.gateway.status()["counters"]
    leaver = connect_to(stack.gateway, 0)
    with stack.simulator.holding():
        request_id = submit(first, body)["request_id"]
        stack.simulator.runs(1)
        send_poll(leaver, request_id)
        stack.gateway.counter_reaches("polls", seen["polls"] + 1)
        leaver.close()
        if noticed:
            stack.gateway.counter_reaches("polls_abandoned", seen["polls_abandoned"] + 1)
    retrieved_ttl_passes(client, first, second)
    result_of(second, request_id, client, body)


def test_a_poll_that_is_given_up_as_it_arrives_delivers_nothing(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """A2: the result is there at once, the client is not any more."""
    body = client.body(1, PROMPT)
    request_id = submit(first, body)["request_id"]
    completions(second, client, {request_id})
    leaver = connect_to(stack.gateway, 0)
    leaver.hold_back()
    send_poll(leaver, request_id)
    leaver.close()
    retrieved_ttl_passes(client, first, second)
    result_of(second, request_id, client, body)


def retrieved_ttl_passes(client: Client, first: Connection, second: Connection) -> None:
    """Until a result that is delivered now is gone."""
    control_id = submit(first, client.body(2, PROMPT))["request_id"]
    expires(second, control_id)
