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

from gateway.admin.openapi import OPERATIONS, document
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
CASES: Final = [
    (method, path, mode)
    for (method, path), operation in OPERATIONS.items()
    for mode in GenerationMode
    # Where nothing is asked for there is nothing to get wrong.
    if mode is GenerationMode.POSITIVE or operation.body is not None or operation.parameters
]
IDS: Final = ("session_id", "sampling_session_id", "request_id")


class Target:
    """A gateway that has one session and one sample."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        with closing(stack.gateway.connect()) as connection:
            client = Client(connection, stack.model)
            promise = connection.post("/api/v1/asample", client.body(0, [1, 2, 3])).json()
        self.ids = (client.session_id, client.sampling_session_id, promise["request_id"])
        self.workers = [worker["pid"] for worker in stack.gateway.workers()]

    def ask(self, method: str, path: str, body: Any) -> Reply:
        with closing(self.stack.gateway.connect()) as connection:
            return connection.call(method, path, body)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_stack(tmp_path_factory.mktemp("fuzz"), "--poll-timeout", "0.01") as stack:
        target = Target(stack)
        yield target
        assert "Traceback" not in stack.gateway.process.log
        assert [worker["pid"] for worker in stack.gateway.workers()] == target.workers
        assert call("GET", f"{stack.gateway.url}/api/v1/healthz").status == 200


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
def test_whatever_is_asked_is_answered(target: Target, method: str, path: str, mode: GenerationMode) -> None:
    """A13, D2"""
    operation = SCHEMA["/api/v1" + path][method]
    names = st.none() | st.sampled_from(target.ids)

    # Requests take milliseconds, and a slow machine is no failure.
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(operation.as_strategy(generation_mode=mode), names)
    def look(case: Any, name: str | None) -> None:
        body = _with_id(case.body, name) if method == "POST" else None
        filled = path
        for parameter, value in case.path_parameters.items():
            filled = filled.replace(f"{{{parameter}}}", quote(name or str(value), safe=""))
        reply = target.ask(method, "/api/v1" + filled, body)
        assert reply.status in STATUSES, reply
        assert len(reply.body) == int(reply.headers["content-length"])
        if reply.headers["content-type"] == "application/json":
            assert isinstance(reply.json(), dict)

    look()


def _with_id(body: Any, name: str | None) -> Any:
    """A body that asks for something that is there, as deep as the schema has ids."""
    if not isinstance(body, dict):
        return body
    replaced = {key: _with_id(value, name) for key, value in body.items()}
    return {key: name if name and key in IDS else value for key, value in replaced.items()}
