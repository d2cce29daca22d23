"""OpenAI's API of the whole gateway in front of the simulated engine: what it completes, counts and lets end."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from gateway.settings.keys_file import new_entry
from gateway.simulator import chat_api
from gateway.simulator import tokens as model_function
from shared.core.callers import NO_LIMITS, KeyLimits
from tests.system.http_calls import Connection
from tests.system.pinned import connect_to
from tests.system.stack import SOURCE_IPS, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.http_calls import Reply
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

PROMPT = [31, 32, 33]


def request(stack: Stack) -> dict[str, Any]:
    more = {"logprobs": 1, "return_token_ids": True, "temperature": 1.0}
    return {"model": stack.model, "prompt": PROMPT, "max_tokens": 6, "seed": 5, **more}


def check(stack: Stack, completion: dict[str, Any]) -> None:
    (choice,) = completion["choices"]
    tokens, _ = model_function.sampled(stack.model, PROMPT, 5, len(choice["token_ids"]))
    assert choice["token_ids"] == tokens.tolist()


def passed_in_flight(stack: Stack) -> int:
    return sum(worker["passed_in_flight"] for worker in stack.gateway.workers())


def test_a_completion_leaves_from_the_slots_address_and_is_counted(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack, closing(stack.gateway.connect()) as connection:
        listed = connection.get("/v1/models").json()
        assert [card["id"] for card in listed["data"]] == [stack.model]
        with stack.simulator.holding():
            connection.send("POST", "/v1/completions", request(stack))
            stack.simulator.runs(1)
            eventually(lambda: passed_in_flight(stack) == 1, "the request to be counted")
        reply = connection.receive()
        assert reply.status == 200, reply
        check(stack, reply.json())
        assert set(stack.simulator.stats()["by_source_ip"]) <= set(SOURCE_IPS.split(","))
        stack.gateway.counter_reaches("openai_requests", 1)
        eventually(lambda: passed_in_flight(stack) == 0, "the request to be over")


def test_a_drain_lets_a_completion_end(tmp_path: Path) -> None:
    """B12"""
    with running_stack(tmp_path) as stack, closing(stack.gateway.connect()) as connection:
        with stack.simulator.holding():
            connection.send("POST", "/v1/completions", request(stack))
            stack.simulator.runs(1)
            os.kill(stack.gateway.process.pid, signal.SIGTERM)
            eventually(
                lambda: all(worker["draining"] or worker["state"] == "draining" for worker in stack.gateway.workers()),
                "the drain",
            )
        reply = connection.receive()
        assert reply.status == 200, reply
        check(stack, reply.json())


# -- chat, with keys and limits -------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How many?"}]
ALICE, BOB = "tml-alice", "tml-bob"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Bob may have one request in flight on each of the two workers, and ask for no more than 64 tokens at once."""
    directory = tmp_path_factory.mktemp("openai")
    keys = directory / "keys.toml"
    limits = KeyLimits(max_in_flight=2, max_request_tokens=64)
    keys.write_text(new_entry("alice", ALICE, NO_LIMITS) + new_entry("bob", BOB, limits))
    keys.chmod(0o600)
    with running_stack(directory, "--api-keys-file", str(keys)) as stack:
        yield stack
        assert "Traceback" not in stack.gateway.process.log


def chat(stack: Stack, **more: Any) -> dict[str, Any]:
    return {"model": stack.model, "messages": MESSAGES, "max_completion_tokens": 6, "seed": 5, **more}


def bearer(stack: Stack, key: str) -> Connection:
    return Connection(stack.gateway.url, {"Authorization": f"Bearer {key}"})


def expected_text(stack: Stack) -> str:
    tokens, _ = model_function.sampled(stack.model, chat_api.prompt_of(MESSAGES), 5, 6)
    return "".join(map(model_function.text_of, tokens.tolist()))


def told(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, which must end with its end."""
    *events, end, nothing = reply.body.decode().split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_is_answered_whole_and_as_a_stream(keyed: Stack) -> None:
    with closing(bearer(keyed, ALICE)) as connection:
        whole = connection.post(CHAT, chat(keyed))
        assert whole.status == 200, whole
        (choice,) = whole.json()["choices"]
        assert choice["message"]["content"] == expected_text(keyed)
        streamed = connection.post(CHAT, chat(keyed, stream=True, stream_options={"include_usage": True}))
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, last = told(streamed)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected_text(keyed)
        assert last["usage"] == whole.json()["usage"]


def test_a_stranger_and_too_large_a_request_are_refused_in_openais_form(keyed: Stack) -> None:
    before = keyed.simulator.stats()["received"]
    for key, request, status, kind in (
        ("tml-nobody", chat(keyed), 401, "authentication_error"),
        (BOB, chat(keyed, n=16), 403, "permission_error"),
        (ALICE, chat(keyed, model="another"), 404, "not_found_error"),
    ):
        with closing(bearer(keyed, key)) as connection:
            refused = connection.post(CHAT, request)
            assert (refused.status, refused.json()["error"]["type"]) == (status, kind), refused
    assert keyed.simulator.stats()["received"] == before
    with closing(bearer(keyed, ALICE)) as connection:
        theirs = connection.post(CHAT, chat(keyed, messages=[]))
        assert (theirs.status, theirs.json()["error"]["param"]) == (400, "body.messages")


def test_a_keys_cap_is_429_for_its_chats_and_nobody_elses(keyed: Stack) -> None:
    """E4"""
    with ExitStack() as leaving:
        first, second = (leaving.enter_context(closing(connect_to(keyed.gateway, 0, BOB))) for _ in range(2))
        other = leaving.enter_context(closing(connect_to(keyed.gateway, 0, ALICE)))
        with keyed.simulator.holding():
            running = keyed.simulator.stats()["in_flight"]
            first.send("POST", CHAT, chat(keyed))
            keyed.simulator.runs(running + 1)
            refused = second.post(CHAT, chat(keyed))
            assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            other.send("POST", CHAT, chat(keyed))
            keyed.simulator.runs(running + 2)
        assert first.receive().status == other.receive().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_chat(keyed: Stack, stream: bool) -> None:
    """D7: nobody would read it, and it costs a GPU."""
    aborted = keyed.simulator.stats()["aborted"]
    with keyed.simulator.holding():
        with closing(bearer(keyed, ALICE)) as connection:
            connection.send("POST", CHAT, chat(keyed, stream=stream))
            keyed.simulator.runs(1)
            if stream:
                assert connection.trickle(1_000).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: keyed.simulator.stats()["aborted"] == aborted + 1, "the generation to be given up")
        assert keyed.simulator.stats()["in_flight"] == 0
    eventually(lambda: passed_in_flight(keyed) == 0, "its room to be free")
