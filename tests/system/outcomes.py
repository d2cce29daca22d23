"""What became of samples, asked over and over until it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.system.expected import check_payload
from tests.system.pinned import poll
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Set

    from tests.system.http_calls import Connection, Reply
    from tests.system.pinned import Client

# 408: pending. 429: the store is not back yet, or not refilled.
_UNKNOWN: Final = (408, 429)


def settled(connection: Connection, request_id: str) -> Reply:
    return eventually(
        lambda: poll(connection, request_id), "a settled sample", until=lambda reply: reply.status not in _UNKNOWN
    )


def accepted(connection: Connection, body: dict[str, Any]) -> dict[str, Any]:
    reply = eventually(
        lambda: connection.post("/api/v1/asample", body), "an accepted sample", until=lambda reply: reply.status != 429
    )
    assert reply.status == 200, reply
    promise: dict[str, Any] = reply.json()
    return promise


def result_of(connection: Connection, request_id: str, client: Client, body: dict[str, Any]) -> bytes:
    """The payload, checked to be this very sample's."""
    reply = settled(connection, request_id)
    assert reply.status == 200, reply
    assert reply.headers["content-type"] == "application/x-protobuf", reply
    check_payload(reply.body, client.model, body)
    return reply.body


def failure_of(connection: Connection, request_id: str) -> tuple[str, str]:
    """Category and text of a sample that has failed."""
    reply = settled(connection, request_id)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), reply
    told = reply.json()
    return told["category"], told["error"]


def completions(
    connection: Connection, client: Client, wanted: Set[str], cursor: int = 0
) -> tuple[dict[str, str], int]:
    """Wait until the session poll has told of all `wanted`: request id -> state, and the cursor. Fetches nothing."""
    told: dict[str, str] = {}
    target = {"type": "sampling_session", "sampling_session_id": client.sampling_session_id, "cloned_sampler_id": 0}

    def look() -> dict[str, str]:
        nonlocal cursor
        reply = connection.post("/api/v1/retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 1.0})
        assert reply.status == 200, reply
        told.update((entry["request_id"], entry["state"]) for entry in reply.json()["completions"])
        cursor = reply.json()["cursor"]
        return told

    eventually(look, f"{len(wanted)} completions", until=lambda told: told.keys() >= wanted)
    return told, cursor


def says_it_waits(connection: Connection, request_id: str) -> None:
    """Wait until a poll tells that no upstream takes the sample."""

    def look() -> Any:
        reply = poll(connection, request_id)
        assert reply.status == 408, reply
        return reply.json()

    eventually(look, "a poll that says paused_capacity", until=lambda told: told["queue_state"] == "paused_capacity")
