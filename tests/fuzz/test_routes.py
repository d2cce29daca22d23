"""Every public route of a running gateway, with requests made of its own OpenAPI document: right ones and wrong ones.

Never a 5xx, never a reply that does not come, and the workers that were there before are there afterwards.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from gateway.admin.openapi import API, OPENAI, OPERATIONS, document
from tests.system.http_calls import call
from tests.system.pinned import Client
from tests.system.stack import running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.http_calls import Reply
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

SCHEMA: Final = schemathesis.openapi.from_dict(document("0"))
# What a client may see; 408 is a poll that is still held.
STATUSES: Final = {200, 400, 401, 403, 404, 405, 408, 410, 413, 415, 429}
ALL: Final = {(method, API + path): operation for (method, path), operation in OPERATIONS.items()} | OPENAI
CASES: Final = [
    (method, path, mode)
    for (method, path), operation in ALL.items()
    for mode in GenerationMode
    # Where nothing is asked for there is nothing to get wrong.
    if mode is GenerationMode.POSITIVE or operation.body is not None or operation.parameters
]
IDS: Final = ("session_id", "sampling_session_id", "request_id")
# No generation is so long that it takes time to write.
SIMULATOR: Final = ("--max-model-len", "256")
MOST_SEQUENCES: Final = 16_384  # what vLLM takes; above it a request is refused


class Target:
    """A gateway that has one session and one sample."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.model = stack.model
        with closing(stack.gateway.connect()) as connection:
            client = Client(connection, self.model)
            promise = connection.post("/api/v1/asample", client.body(0, [1, 2, 3])).json()
        self.ids = (client.session_id, client.sampling_session_id, promise["request_id"])
        self.workers = [worker["pid"] for worker in stack.gateway.workers()]

    def ask(self, method: str, path: str, body: Any) -> Reply:
        with closing(self.stack.gateway.connect()) as connection:
            return connection.call(method, path, body)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("fuzz")
    with running_stack(directory, "--poll-timeout", "0.01", simulator_flags=SIMULATOR) as stack:
        target = Target(stack)
        yield target
        assert "Traceback" not in stack.gateway.process.log
        assert [worker["pid"] for worker in stack.gateway.workers()] == target.workers
        assert call("GET", f"{stack.gateway.url}/api/v1/healthz").status == 200


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
def test_whatever_is_asked_is_answered(target: Target, method: str, path: str, mode: GenerationMode) -> None:
    """A13, D2"""
    operation = SCHEMA[path][method]
    names = st.none() | st.sampled_from(target.ids)

    # Requests take milliseconds, and a slow machine is no failure.
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(operation.as_strategy(generation_mode=mode), names)
    def look(case: Any, name: str | None) -> None:
        body = _with_id(case.body, name) if method == "POST" else None
        if (method, path) in OPENAI:
            body = _small(body, target.model)
        filled = path
        for parameter, value in case.path_parameters.items():
            filled = filled.replace(f"{{{parameter}}}", quote(name or str(value), safe=""))
        check(target.ask(method, filled, body), openai=(method, path) in OPENAI)

    look()


@settings(deadline=None, max_examples=3)
@given(st.text(min_size=1), st.sampled_from([path for method, path in OPENAI if method == "POST"]))
def test_a_model_that_nobody_has_is_answered(target: Target, name: str, path: str) -> None:
    """Three only: each waits until the upstreams have been asked again."""
    reply = target.ask("POST", path, {"model": name, "prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    check(reply, openai=True)
    assert reply.status == 404


def check(reply: Reply, *, openai: bool) -> None:
    """A status of the interface, and a body that is whole and what it says that it is."""
    assert reply.status in STATUSES, reply
    # A stream has no length: its last chunk ends it, or it would not have been read.
    if "content-length" in reply.headers or reply.headers["content-type"].partition(";")[0] != "text/event-stream":
        assert len(reply.body) == int(reply.headers["content-length"])
    if reply.headers["content-type"] == "application/json":
        told = reply.json()
        assert isinstance(told, dict)
        assert not openai or reply.status == 200 or isinstance(told["error"], dict)


def _small(body: Any, model: str) -> Any:
    """A request of OpenAI's API for a model that is there, and for a few sequences at most."""
    if not isinstance(body, dict):
        return body
    named = {**body, "model": model} if isinstance(body.get("model"), str) else body
    sequences = named.get("n")
    many = isinstance(sequences, int) and 4 < sequences <= MOST_SEQUENCES
    return {**named, "n": 4} if many else named


def _with_id(body: Any, name: str | None) -> Any:
    """A body that asks for something that is there, as deep as the schema has ids."""
    if not isinstance(body, dict):
        return body
    replaced = {key: _with_id(value, name) for key, value in body.items()}
    return {key: name if name and key in IDS else value for key, value in replaced.items()}
