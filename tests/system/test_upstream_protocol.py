"""Both of vLLM's endpoints, chosen and found out, with whole processes."""

from __future__ import annotations

import base64
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from gateway.simulator.tokens import IMAGE, expanded, prompt_logprobs
from shared.wire.sdk.result import decode_sample_response
from tests.ports import free_port
from tests.system.expected import check_payload
from tests.system.http_calls import call
from tests.system.outcomes import result_of, settled
from tests.system.pinned import Client, connect_to, submit
from tests.system.stack import Simulator, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Gateway

pytestmark = pytest.mark.slow

PROMPT: Final = [31, 32, 33]
PNG: Final = b"\x89PNG\r\n\x1a\n" + bytes(64)
GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
FLAGS: Final = ("--poll-timeout", "1")
MANY_STOPS: Final = {"stop": ["never", "a", "b", "c", "d"]}


def only_by(path: str) -> dict[str, Any]:
    """Whatever comes by the other path fails for good."""
    other = COMPLETIONS if path == GENERATE else GENERATE
    return {"kind": "status", "status": 500, "body": "by the wrong endpoint", "path": other}


def asks_by(gateway: Gateway, protocol: str) -> None:
    eventually(lambda: gateway.status()["upstreams"][0], protocol, until=lambda told: told["protocols"] == [protocol])


def sampled(connection: Connection, client: Client, seq_id: int, **fields: Any) -> bytes:
    body = client.body(seq_id, PROMPT, **fields)
    return result_of(connection, submit(connection, body)["request_id"], client, body)


@pytest.mark.parametrize("choice", ["completions", "generate", "auto"])
def test_samples_come_by_what_was_chosen(tmp_path: Path, choice: str) -> None:
    """Of several sequences with the best tokens of each place and the prompt's logprobs, value by value alike."""
    with running_stack(tmp_path, *FLAGS, "--upstream-protocol", choice) as stack:
        path = COMPLETIONS if choice == "completions" else GENERATE
        asks_by(stack.gateway, "completions" if choice == "completions" else "generate")
        stack.simulator.script(only_by(path))
        with closing(connect_to(stack.gateway, 0)) as one:
            client = Client(one, stack.model)
            fields = {"num_samples": 3, "prompt_logprobs": True, "topk_sample_logprobs": 2, "topk_prompt_logprobs": 2}
            found = decode_sample_response(sampled(one, client, 1, **fields))
    (topk,) = {(sequence.topk.k, sequence.topk.length) for sequence in found.sequences if sequence.topk is not None}
    assert topk == (2, 8)
    assert found.prompt is not None and found.prompt.logprobs is not None and found.prompt.topk is not None
    assert np.isfinite(np.frombuffer(found.prompt.logprobs, "<f4")[1:]).all()
    assert (found.prompt.topk.k, found.prompt.topk.length) == (2, 3)


def test_auto_follows_an_upstream_that_is_replaced(tmp_path: Path) -> None:
    """Found out once; again when it has broken; and a long stop list is taken only where it can be asked for."""
    port = str(free_port())
    flags = ("--upstream-protocol", "auto")
    with running_stack(tmp_path, *FLAGS, *flags, simulator_flags=["--port", port]) as stack:
        asks_by(stack.gateway, "generate")
        with closing(connect_to(stack.gateway, 0)) as one:
            client = Client(one, stack.model)
            sampled(one, client, 1, params=MANY_STOPS)
            stack.simulator.process.kill()
            # The sample that finds it gone waits for what comes in its place.
            body = client.body(2, PROMPT)
            waiting = submit(one, body)["request_id"]
            stack.simulator = Simulator(tmp_path, "--port", port, "--no-scale-out")
            try:
                result_of(one, waiting, client, body)
                for slot in range(2):
                    with closing(connect_to(stack.gateway, slot)) as another:
                        sampled(another, client, 3 + slot)
                asks_by(stack.gateway, "completions")
                refused = one.post("/api/v1/asample", client.body(5, PROMPT, params=MANY_STOPS))
                assert (refused.status, "--enable-scale-out" in refused.json()["detail"]) == (400, True), refused
            finally:
                stack.simulator.process.kill()


def test_auto_asks_by_completions_what_generations_refuse(tmp_path: Path) -> None:
    """The largest top-k that vLLM takes by default, and more sequences than it runs at once."""
    limits = ("--max-num-seqs", "2", "--mode", "latency", "--gen-seconds", "0")
    with (
        running_stack(tmp_path, *FLAGS, "--upstream-protocol", "auto", simulator_flags=limits) as stack,
        closing(connect_to(stack.gateway, 0)) as one,
    ):
        asks_by(stack.gateway, "generate")
        client = Client(one, stack.model)
        found = decode_sample_response(sampled(one, client, 1, topk_sample_logprobs=20))
        sampled(one, client, 2, num_samples=5)
        asks_by(stack.gateway, "generate")
    (sequence,) = found.sequences
    assert sequence.topk is not None
    assert sequence.topk.k == 20


def test_an_endpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    flags = ("--upstream-protocol", "generate")
    with running_stack(tmp_path, *FLAGS, *flags, simulator_flags=["--no-scale-out"]) as stack:
        with closing(connect_to(stack.gateway, 0)) as one:
            client = Client(one, stack.model)
            told = settled(one, submit(one, client.body(1, PROMPT))["request_id"]).json()
    assert told["category"] == "server"
    assert "--enable-scale-out" in told["error"]


def test_images_reach_the_upstream_in_their_places(tmp_path: Path) -> None:
    """What the simulated model answers depends on their bytes and their order."""
    flags = ("--upstream-protocol", "generate", "--image-token", f"sim/tiny={IMAGE}")
    pictures = [PNG + bytes([number]) for number in range(2)]
    text = {"type": "encoded_text", "tokens": PROMPT}
    images = [{"type": "image", "format": "png", "data": base64.b64encode(one).decode()} for one in pictures]
    with running_stack(tmp_path, *FLAGS, *flags) as stack, closing(connect_to(stack.gateway, 0)) as one:
        client = Client(one, stack.model)
        for seq_id, order in ((1, (0, 1)), (2, (1, 0))):
            body = client.body(seq_id, PROMPT, prompt_logprobs=True)
            body["prompt"] = {"chunks": [images[order[0]], text, images[order[1]]]}
            reply = settled(one, submit(one, body)["request_id"])
            tokens, _ = expanded([IMAGE, *PROMPT, IMAGE], [pictures[place] for place in order])
            as_text = {**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}}
            check_payload(reply.body, stack.model, as_text)
            scores = decode_sample_response(reply.body).prompt
            assert scores is not None and scores.logprobs is not None
            np.testing.assert_array_equal(
                np.frombuffer(scores.logprobs, "<f4"), prompt_logprobs(stack.model, np.array(tokens))
            )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--upstream-protocol", "generate"), "--image-token sim/tiny="),
        (("--image-token", f"sim/tiny={IMAGE}"), "--upstream-protocol generate or auto"),
    ],
)
def test_images_that_cannot_be_passed_on_are_refused_by_name(
    tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    with running_stack(tmp_path, *FLAGS, *flags) as stack, closing(connect_to(stack.gateway, 0)) as one:
        client = Client(one, stack.model)
        picture = {"type": "image", "format": "png", "data": base64.b64encode(PNG).decode()}
        refused = one.post("/api/v1/asample", {**client.body(1, PROMPT), "prompt": {"chunks": [picture]}})
        assert refused.status == 400
        assert "'image'" in refused.json()["detail"]
        assert named in refused.json()["detail"]
        assert stack.simulator.stats()["received"] == 0


def test_weights_that_change_under_a_generation_are_counted_and_logged(tmp_path: Path) -> None:
    with running_stack(tmp_path, *FLAGS, "--upstream-protocol", "generate") as stack:
        stack.simulator.script({"kind": "weights_changed", "versions": ["step-7", "step-8"], "next": 1})
        with closing(connect_to(stack.gateway, 0)) as one:
            client = Client(one, stack.model)
            sampled(one, client, 1, num_samples=3)
            sampled(one, client, 2)
        stack.gateway.counter_reaches("mixed_weights", 3)
        assert stack.gateway.counter("mixed_weights") == 3
    lines = [line for path in tmp_path.rglob("*") if path.is_file() for line in path.read_text().splitlines()]
    (line,) = [line for line in lines if "weights changed in the middle of a generation" in line]
    assert "step-7" in line and "step-8" in line and f"{client.sampling_session_id}:1" in line


def test_adapters_are_loaded_and_sampled_by_generate(tmp_path: Path) -> None:
    """And one that the upstream has lost is loaded again: its 404 is the same by either endpoint."""
    flags = ("--upstream-protocol", "generate", "--lora-path", "/adapters/{run_id}/{checkpoint}")
    with running_stack(tmp_path, *FLAGS, *flags) as stack, closing(connect_to(stack.gateway, 0)) as one:
        client = Client(one, stack.model)
        made = one.post(
            "/api/v1/create_sampling_session",
            {
                "session_id": client.session_id,
                "sampling_session_seq_id": 7,
                "model_path": "tinker://r/sampler_weights/c",
            },
        )
        client.sampling_session_id = made.json()["sampling_session_id"]
        for seq_id, unload in ((1, True), (2, False)):
            body = client.body(seq_id, PROMPT)
            reply = settled(one, submit(one, body)["request_id"])
            assert reply.status == 200, reply
            check_payload(reply.body, "r--c", body)
            if unload:
                gone = call("POST", f"{stack.simulator.url}/v1/unload_lora_adapter", {"lora_name": "r--c"})
                assert gone.status == 200
