"""Read replies as the SDK does: what a reply means once its status has been accepted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.bench.load.reactions import ReplyEvent
from gateway.bench.load.requests import PROTOBUF

if TYPE_CHECKING:
    from gateway.bench.load.transport import GatewayReply

_DETAIL_BYTES: Final = 300


@dataclass(frozen=True, slots=True)
class Promise:
    request_id: str
    sequence_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """The SDK's user sees an error. `kind` is one of a few fixed texts."""

    kind: str
    detail: str
    wrong: bool = False
    acknowledged: bool = False  # the SDK treats an error body as delivered


@dataclass(frozen=True, slots=True)
class PromiseLost:
    """The promise is lost; the SDK submits again under a new seq_id."""


@dataclass(frozen=True, slots=True)
class Again:
    """Poll again at once."""

    allow_metadata_only: bool


@dataclass(frozen=True, slots=True)
class Payload:
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """One entry of a session poll. `size_bytes` is 0 if the gateway does not say."""

    request_id: str
    finished: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Completions:
    entries: tuple[Completion, ...]
    cursor: int


def event_of(reply: GatewayReply | None) -> ReplyEvent:
    if reply is None:
        return ReplyEvent(0)
    return ReplyEvent(
        reply.status,
        bare=reply.status == 400 and not reply.has_length,
        pending=reply.status == 408 and _json_object(reply.body) is not None,
    )


def detail_of(reply: GatewayReply | None) -> str:
    """Return the start of the reply's body, for a person."""
    return "no reply" if reply is None else reply.body[:_DETAIL_BYTES].decode("utf-8", "replace")


def read_promise(reply: GatewayReply, num_samples: int) -> Promise | SampleFailure:
    body = _json_object(reply.body) or {}
    request_id, sequence_ids = body.get("request_id"), body.get("sample_sequence_ids")
    if not isinstance(request_id, str) or not isinstance(sequence_ids, list):
        return SampleFailure("promise malformed", detail_of(reply), wrong=True)
    if len(sequence_ids) != num_samples or len(set(sequence_ids)) != num_samples:
        return SampleFailure(
            "promise malformed", f"{num_samples} distinct sequence ids expected, got {sequence_ids}", wrong=True
        )
    return Promise(request_id, tuple(sequence_ids))


def read_result(reply: GatewayReply, metadata_allowed: bool) -> Payload | Again | SampleFailure:
    """Read a 200 of `retrieve_future`, with the checks in the order of the SDK (0.25 and later)."""
    if PROTOBUF in reply.content_type:
        return Payload(reply.body)
    body = _json_object(reply.body)
    if body is None:
        return SampleFailure(
            "result malformed", f"{reply.content_type or 'no content type'}: {detail_of(reply)}", wrong=True
        )
    if body.get("type") == "try_again":
        return Again(metadata_allowed)
    if body.get("status") == "complete_metadata":
        if metadata_allowed:
            return Again(allow_metadata_only=False)
        return SampleFailure("result malformed", "a second complete_metadata, which was not asked for", wrong=True)
    if "error" in body:
        return SampleFailure(f"error, category {body.get('category')}", str(body["error"]), acknowledged=True)
    return SampleFailure("result malformed", "JSON where protobuf was asked for", wrong=True)


def read_completions(reply: GatewayReply) -> Completions | SampleFailure:
    body = _json_object(reply.body) or {}
    entries, cursor = body.get("completions"), body.get("cursor")
    if not isinstance(entries, list) or not isinstance(cursor, int):
        return SampleFailure("session poll malformed", detail_of(reply), wrong=True)
    parsed = [_completion(entry) for entry in entries]
    if any(entry is None for entry in parsed):
        return SampleFailure("session poll malformed", detail_of(reply), wrong=True)
    return Completions(tuple(entry for entry in parsed if entry is not None), cursor)


def read_text(reply: GatewayReply, name: str) -> str | None:
    """Return one string field of a JSON object, or None if it is missing."""
    value = (_json_object(reply.body) or {}).get(name)
    return value if isinstance(value, str) else None


def read_flag(reply: GatewayReply, name: str) -> bool:
    return (_json_object(reply.body) or {}).get(name) is True


def _completion(entry: Any) -> Completion | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("request_id"), str):
        return None
    if entry.get("state") not in ("finished", "failed"):
        return None
    size = entry.get("response_payload_uncompressed_size")
    return Completion(entry["request_id"], entry["state"] == "finished", size if isinstance(size, int) else 0)


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
