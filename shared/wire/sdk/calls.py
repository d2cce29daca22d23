"""Decode the Tinker API's requests, but for `asample` (`sample.py`), and write its replies.

Requests are read leniently where a strict reading would end a client for good (docs/wire.md), and strictly where the
gateway would act on a wrong value. Replies are never null where the SDK expects a value: its parser is strict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import orjson

from shared.core.errors import BadRequest
from shared.core.model import CLONE_SPAN
from shared.wire.sdk.sample import SampleCall, _Sample, decode_sample, require_name, sample_steps
from shared.wire.strict_json import BLANKS, Boundary, array_pieces, at_once, decode, parse, require_short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shared.core.model import Failure
    from shared.wire.strict_json import Steps

__all__ = ["SampleCall", "decode_sample", "sample_steps"]

MAX_CURSOR: Final = 2**53
# From here on the session poll neither spins when idle nor repeats final entries forever (docs/wire.md).
_SESSION_POLL_SINCE: Final = (0, 27, 2)
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_CANCEL_BATCH: Final = 64

TELEMETRY_ACCEPTED: Final = b'{"status":"accepted"}'
DYNAMIC_CONFIG: Final = orjson.dumps(
    {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": _CANCEL_BATCH,
        "sample_join_sampling_session": True,
    }
)

T = TypeVar("T", bound=msgspec.Struct)


class CreateSession(msgspec.Struct, frozen=True):
    sdk_version: str | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    session_id: str


class CreateSamplingSession(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None


class WeightsInfo(msgspec.Struct, frozen=True):
    tinker_path: str


class Join(msgspec.Struct, frozen=True):
    sampling_session_id: str


class RetrieveFuture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`request_id` is "" when the client sent no string: an id like any other that is not ours."""

    request_id: str
    allow_metadata_only: bool = False


class RetrieveFutures(msgspec.Struct, frozen=True):
    sampling_session_id: str
    cloned_sampler_id: int
    prev_cursor: int
    timeout: float | None
    retrieved_request_ids: Sequence[str]


class CancelFuture(msgspec.Struct, frozen=True):
    request_id: str


class _RetrieveFuture(msgspec.Struct):
    request_id: Any = ""
    allow_metadata_only: bool | None = False


class _CancelFuture(msgspec.Struct):
    request_id: Any = ""


class _Target(msgspec.Struct):
    sampling_session_id: str
    cloned_sampler_id: int | None = 0
    type: str | None = None


class _RetrieveFutures(msgspec.Struct):
    target: _Target
    prev_cursor: int | None = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] | None = None


_readers: Final[dict[type, Any]] = {
    kind: (msgspec.json.Decoder(kind), kind.__name__.lstrip("_"))
    for kind in (
        CreateSession,
        Heartbeat,
        CreateSamplingSession,
        WeightsInfo,
        Join,
        _RetrieveFuture,
        _CancelFuture,
        _RetrieveFutures,
    )
}
# path -> what its body is read into. The OpenAPI document is made from these.
BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/asample": _Sample,
    "/retrieve_future": _RetrieveFuture,
    "/retrieve_futures": _RetrieveFutures,
    "/session_heartbeat": Heartbeat,
    "/create_session": CreateSession,
    "/create_sampling_session": CreateSamplingSession,
    "/join_sampling_session": Join,
    "/cancel_future": _CancelFuture,
}
_any_decoder: Final = msgspec.json.Decoder()
_plain_retrieve: Final = msgspec.json.Decoder(RetrieveFuture)
_ids_decoder: Final = msgspec.json.Decoder(list[str])
# The acknowledgements of a longer session poll are read in pieces: one for each of all samples in flight at most.
_LONG_POLL_BYTES: Final = 64 * 1024
MAX_ACKNOWLEDGED: Final = 200_000
_IDS_AHEAD: Final = re.compile(rb'"retrieved_request_ids"%b:%b\[%b(?=")' % (BLANKS, BLANKS, BLANKS))
_BETWEEN_IDS: Final = Boundary(b'"', b'"')
_IDS_MARK: Final = "@ids"
# The quotes of two keys and one text. A key that is given twice would add more.
_PLAIN_RETRIEVE_QUOTES: Final = 6


def decode_body(kind: type[T], body: bytes) -> T:
    """Decode a body into `kind`, one of the classes above. Raises `BadRequest`, as all these functions do."""
    decoder, name = _readers[kind]
    decoded: T = decode(decoder, body, name)
    return decoded


def decode_finish(body: bytes) -> None:
    """Check that the body is JSON, if there is one. The reason that it gives is ignored."""
    if body:
        decode(_any_decoder, body, "JSON text")


def decode_create_sampling_session(body: bytes) -> CreateSamplingSession:
    call = decode_body(CreateSamplingSession, body)
    if (call.base_model is None) == (call.model_path is None):
        raise BadRequest("exactly one of base_model and model_path is needed")
    require_name(call.base_model if call.base_model is not None else call.model_path)
    if call.sampling_session_seq_id is not None and not 0 <= call.sampling_session_seq_id < 2**63:
        raise BadRequest("sampling_session_seq_id must be an integer from 0 to 2**63 - 1")
    return call


def decode_retrieve_future(body: bytes) -> RetrieveFuture:
    # The SDK writes these two keys and nothing else, so msgspec has nothing to skip.
    if body.count(b'"') <= _PLAIN_RETRIEVE_QUOTES:
        try:
            return _plain_retrieve.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass
    return decode_any_retrieve_future(body)


def decode_any_retrieve_future(body: bytes) -> RetrieveFuture:
    """Decode any poll; `decode_retrieve_future` tries the SDK's own form first."""
    call = decode_body(_RetrieveFuture, body)
    return RetrieveFuture(_text(call.request_id), bool(call.allow_metadata_only))


def decode_cancel_future(body: bytes) -> CancelFuture:
    return CancelFuture(_text(decode_body(_CancelFuture, body).request_id))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def decode_retrieve_futures(body: bytes) -> RetrieveFutures:
    """Decode a session poll with all its acknowledgements."""
    return at_once(retrieve_futures_steps(body))


def retrieve_futures_steps(body: bytes) -> Steps[RetrieveFutures]:
    """Decode a session poll in steps: its acknowledgements may be as many as a client's samples in flight.

    A cursor that we never gave reads as 0, "from the start": a 400 would end the client for good.
    """
    acknowledged: list[str] | None = None
    if len(body) > _LONG_POLL_BYTES:
        body, acknowledged = yield from _acknowledgements_apart(body)
    call = decode_body(_RetrieveFutures, body)
    if acknowledged is not None:
        if call.retrieved_request_ids != [_IDS_MARK]:
            raise BadRequest("retrieved_request_ids stands in the wrong place")
        call.retrieved_request_ids = acknowledged
    if call.target.type not in (None, "sampling_session"):
        raise BadRequest("target.type must be sampling_session")
    cursor, clone_id = call.prev_cursor or 0, call.target.cloned_sampler_id or 0
    return RetrieveFutures(
        call.target.sampling_session_id,
        clone_id if 0 <= clone_id <= 2**63 // CLONE_SPAN else 0,
        cursor if 0 <= cursor < MAX_CURSOR else 0,
        call.timeout,
        call.retrieved_request_ids or (),
    )


def _acknowledgements_apart(body: bytes) -> Steps[tuple[bytes, list[str] | None]]:
    """Return the body with one text in place of its acknowledgements, and the acknowledgements; None without any."""
    key = _IDS_AHEAD.search(body, 0, _LONG_POLL_BYTES)
    if key is None:
        return body, None
    found: list[str] = []
    end = key.end()
    for piece, behind in array_pieces(body, key.end(), _BETWEEN_IDS):
        read = parse(_ids_decoder, b"[%b]" % piece, "list of ids")
        found += read
        if len(found) > MAX_ACKNOWLEDGED:
            raise BadRequest(f"retrieved_request_ids holds more than {MAX_ACKNOWLEDGED:,} ids")
        end = behind
        yield
    require_short(len(body) - (end - key.end()))
    rest = b'%b"%b"%b' % (body[: key.end()], _IDS_MARK.encode(), body[end:])
    if rest.count(_IDS_MARK.encode()) != 1:
        raise BadRequest(f"the request holds a text that is {_IDS_MARK!r}")
    return rest, found


def decode_client_config(body: bytes) -> str:
    """Return the SDK's version, or "" if there is none: a client without its configuration cannot even start."""
    document = decode(_any_decoder, body, "JSON text") if body else None
    version = document.get("sdk_version") if isinstance(document, dict) else None
    return _text(version)


def prefers_protobuf(accept: bytes | None) -> bool:
    """Return whether the client takes protobuf. SDKs from 0.18.2 ask for it; older ones take JSON only."""
    return accept is not None and b"application/x-protobuf" in accept


# -- replies ----------------------------------------------------------------------------------------------------


def client_config(sdk_version: str, *, session_poll: bool) -> bytes:
    """Write the flags of `POST /client/config` for one SDK version; SDKs ignore those that they do not know."""
    return orjson.dumps(
        {
            "sample_use_retrieve_futures": session_poll and _version(sdk_version) >= _SESSION_POLL_SINCE,
            "sample_join_sampling_session": True,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": _CANCEL_BATCH,
        }
    )


def _version(text: str) -> tuple[int, int, int]:
    """Parse a version; (0, 0, 0) if it is unreadable, since every SDK understands the oldest behaviour."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)


def session(session_id: str) -> bytes:
    return orjson.dumps({"session_id": session_id, "type": "create_session"})


def sampling_session(sampling_session_id: str) -> bytes:
    return orjson.dumps({"sampling_session_id": sampling_session_id, "type": "create_sampling_session"})


def joined(client_counter: int) -> bytes:
    return orjson.dumps({"client_counter": client_counter, "type": "join_sampling_session"})


def sampler(sampler_id: str, base_model: str, model_path: str | None) -> bytes:
    document = {"sampler_id": sampler_id, "base_model": base_model}
    if model_path is not None:
        document["model_path"] = model_path
    return orjson.dumps(document)


def weights_info(base_model: str) -> bytes:
    """Describe a LoRA adapter; only a trainer knows how it was trained."""
    return orjson.dumps({"base_model": base_model, "is_lora": True})


def capabilities(models: Mapping[str, int | None], *, trainable: bool = False) -> bytes:
    """Write the models on offer: name -> context length in tokens, None if the upstream does not report it."""
    listed: list[dict[str, Any]] = []
    for name, context_tokens in models.items():
        entry: dict[str, Any] = {"model_name": name, "trainable": trainable, "sampleable": True}
        if context_tokens is not None:
            entry["max_context_length"] = context_tokens
        listed.append(entry)
    return orjson.dumps({"supported_models": listed})


def promise(request_id: str, sequence_ids: Sequence[str]) -> bytes:
    return orjson.dumps({"request_id": request_id, "sample_sequence_ids": sequence_ids})


def try_again(request_id: str, queue_state: str, reason: str | None) -> bytes:
    document = {"type": "try_again", "request_id": request_id, "queue_state": queue_state}
    if reason:
        document["queue_state_reason"] = reason
    return orjson.dumps(document)


def failure_body(failure: Failure) -> bytes:
    return orjson.dumps({"error": failure.message, "category": failure.category.value})


def complete_metadata(size_bytes: int) -> bytes:
    return orjson.dumps({"status": "complete_metadata", "response_payload_size": size_bytes})


def completions(entries: Iterable[tuple[str, bool, int]], cursor: int) -> bytes:
    """Write the reply to a session poll. Each entry is (request id, finished, payload size in bytes)."""
    listed: list[dict[str, Any]] = []
    for request_id, finished, size_bytes in entries:
        size = {"response_payload_uncompressed_size": size_bytes} if finished else {}
        listed.append({"state": "finished" if finished else "failed", "request_id": request_id, **size})
    return orjson.dumps({"completions": listed, "cursor": cursor})


def error_body(detail: str) -> bytes:
    return orjson.dumps({"detail": detail})
