"""OpenAI's API of the whole gateway in front of the simulated engine: what it completes, counts and lets end."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from gateway.simulator import tokens as model_function
from tests.system.stack import SOURCE_IPS, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

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
