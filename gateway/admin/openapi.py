"""The public address as an OpenAPI 3.1 document, served at `/openapi.json` of the admin address. Pure.

It says what is accepted, so that a tool can make requests from it; docs/wire.md says what a field means. The names and
types of fields come from the structs that the bodies are read into; this module adds what a type cannot express. A test
compares the paths with the routes of `workers/api/app.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import msgspec

from shared.core.model import MAX_SEQ_ID
from shared.wire.sdk.calls import BODIES

if TYPE_CHECKING:
    from collections.abc import Mapping

Schema = dict[str, Any]

API: Final = "/api/v1"
_KEYS: Final = {
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "bearer": {"type": "http", "scheme": "bearer"},
}
_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_ANYTHING: Final[Schema] = {}
_DETAIL: Final[Schema] = {"type": "object", "properties": {"detail": _TEXT}, "required": ["detail"]}

# Status -> its meaning, for every request.
_REFUSALS: Final = {
    "400": "The request is malformed, out of range, or asks for something that is not supported",
    "401": "No API key, or an unknown one",
    "403": "More than this API key may ask for at once",
    "404": "An id that the gateway did not make or that is not the caller's, or an unknown model",
    "408": "Still running, or the request did not arrive in time",
    "410": "The sample is gone, submit it again; or the session was finished",
    "413": "The body is larger than this path accepts",
    "415": "A Content-Encoding, which this path does not accept",
    "429": "Too much at the moment, send it again later",
}
# The same for OpenAI's API, where an upstream's own refusals are passed on, too.
_OPENAI_REFUSALS: Final = {status: text for status, text in _REFUSALS.items() if status != "410"} | {
    "502": "The upstream did not answer, but may have executed the request",
    "503": "No upstream accepts the request at the moment",
}


def _list_of(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. `body` is None for a GET; `parameters` are those in the path, all text."""

    summary: str
    body: Schema | None = field(default_factory=dict)
    parameters: tuple[str, ...] = ()


_CHUNK: Final = _object("tokens", type={"const": "encoded_text"}, tokens=_list_of({**_COUNT, "maximum": 2**31 - 1}))
# With --image-token and --upstream-protocol generate or auto; else 400.
_IMAGE: Final = _object(
    "type data format",
    type={"const": "image"},
    data={**_TEXT, "contentEncoding": "base64"},
    format={"enum": ["png", "jpeg"]},
    expected_tokens={"type": "integer", "minimum": 1},
)
_TYPES: Final[dict[Any, Schema]] = {
    str: _TEXT,
    bool: _FLAG,
    int: {"type": "integer"},
    float: {"type": "number"},
}


def _schema_of(kind: Any) -> Schema:
    """Return the schema of a wire type, without null, which reads as the default; unread JSON may be anything."""
    if get_origin(kind) is list:
        return _list_of(_schema_of(get_args(kind)[0]))
    if isinstance(kind, UnionType):
        choices = [_schema_of(choice) for choice in get_args(kind) if choice is not NoneType]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        required = " ".join(field.name for field in fields if field.required)
        return _object(required, **{field.name: _schema_of(field.type) for field in fields})
    return dict(_TYPES.get(kind, _ANYTHING))


def _body(
    path: str,
    bounds: Mapping[str, Schema],
    *,
    required: str = "",
    refused: str = "",
    ignored: Mapping[str, Schema] = {},
) -> Schema:
    """Return the schema of a path's body: its struct, with `bounds` by field, or by field.field inside of one.

    `required` fields may be absent all the same, `refused` ones have no accepted value, `ignored` ones are not read.
    """
    body = _schema_of(BODIES[path])
    for name, more in bounds.items():
        *parents, last = name.split(".")
        schema = body
        for parent in parents:
            schema = schema["properties"][parent]
        schema["properties"][last] |= more
    for name in refused.split():
        del body["properties"][name]
    properties = {**body["properties"], **ignored}
    return _object(" ".join((*body["required"], *required.split())), **properties)


_POSITIVE: Final[Schema] = {"minimum": 1}
_NOT_NEGATIVE: Final[Schema] = {"minimum": 0}
_SAMPLE: Final = _body(
    "/asample",
    {
        "seq_id": {**_NOT_NEGATIVE, "maximum": MAX_SEQ_ID},
        "num_samples": _POSITIVE,
        "prompt.chunks": {"items": {"anyOf": [_CHUNK, _IMAGE]}, "minItems": 1},
        "sampling_params.max_tokens": _POSITIVE,
        # Not both in one list, which the type allows.
        "sampling_params.stop": {"anyOf": [_TEXT, _list_of(_TEXT), _list_of(_COUNT)]},
        "sampling_params.temperature": _NOT_NEGATIVE,
        "sampling_params.top_k": {"minimum": -1},
        "sampling_params.top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "topk_prompt_logprobs": _NOT_NEGATIVE,
        "topk_sample_logprobs": _NOT_NEGATIVE,
        "prompt_logprobs_last_n": _POSITIVE,
    },
    refused="target_prompt_logprobs prompt_alt_tokens_k",
    ignored={"type": {"const": "sample"}},
)
_SESSION_POLL: Final = _body(
    "/retrieve_futures",
    {
        "target.type": {"const": "sampling_session"},
        "target.cloned_sampler_id": _NOT_NEGATIVE,
        "prev_cursor": _NOT_NEGATIVE,
        "timeout": _NOT_NEGATIVE,
    },
)
_REQUEST: Final[dict[str, Schema]] = {"request_id": _TEXT}
_FINISH: Final = _object(reason=_object(type={"enum": ["success", "errored", "interrupted"]}), detail=_ANYTHING)

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/asample"): Operation(
        "Submit a sample; the reply is a promise, sent before the sample is generated", _SAMPLE
    ),
    ("POST", "/retrieve_future"): Operation(
        "Wait for one sample", _body("/retrieve_future", _REQUEST, required="request_id")
    ),
    ("POST", "/retrieve_futures"): Operation("Wait for the next results of a sampling session", _SESSION_POLL),
    ("POST", "/session_heartbeat"): Operation("Keep a session alive", _body("/session_heartbeat", {})),
    ("POST", "/client/config"): Operation("Settings for this version of the SDK", _object(sdk_version=_TEXT)),
    ("POST", "/client/dynamic_config"): Operation(
        "Settings that may change while the SDK runs", _object(sdk_version=_TEXT)
    ),
    ("POST", "/create_session"): Operation(
        "Open a session",
        _body("/create_session", {}, ignored={"tags": _list_of(_TEXT), "user_metadata": {"type": "object"}}),
    ),
    ("POST", "/sessions/{session_id}/finish"): Operation("End a session and what it runs", _FINISH, ("session_id",)),
    ("POST", "/create_sampling_session"): Operation(
        "Bind a model for sampling", _body("/create_sampling_session", {"sampling_session_seq_id": _NOT_NEGATIVE})
    ),
    ("POST", "/join_sampling_session"): Operation(
        "Get a client number for another process", _body("/join_sampling_session", {})
    ),
    ("GET", "/samplers/{sampling_session_id}"): Operation(
        "Show what a sampling session samples from", None, ("sampling_session_id",)
    ),
    ("POST", "/cancel_future"): Operation(
        "Cancel one sample", _body("/cancel_future", _REQUEST, required="request_id")
    ),
    ("POST", "/telemetry"): Operation("Accepted and dropped, unread", _object(events=_list_of({"type": "object"}))),
    ("GET", "/get_server_capabilities"): Operation("List the base models", None),
    ("GET", "/healthz"): Operation("Check that this worker answers; needs no API key", None),
}

_OPENAI_PARAMS: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "max_tokens": {"type": "integer", "minimum": 1},
    "n": {"type": "integer", "minimum": 1},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [_TEXT, _list_of(_TEXT)]},
    "stream": _FLAG,
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
_PROMPT: Final[Schema] = {"anyOf": [_TEXT, _list_of(_COUNT, minItems=1), _list_of(_TEXT, minItems=1)]}
_MESSAGE: Final = _object("role content", role=_TEXT, content=_TEXT)
_ERROR: Final = _object("error", error=_object("message type code", message=_TEXT, type=_TEXT, code=_COUNT))

# By whole path. These bodies are passed on, with fields that are not listed here.
OPENAI: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/v1/completions"): Operation(
        "Complete a prompt at an upstream, as one reply or as a stream of events",
        _object("model prompt", prompt=_PROMPT, logprobs=_COUNT, **_OPENAI_PARAMS),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Complete a conversation at an upstream",
        _object(
            "model messages",
            messages=_list_of(_MESSAGE, minItems=1),
            max_completion_tokens={"type": "integer", "minimum": 1},
            logprobs=_FLAG,
            top_logprobs=_COUNT,
            **_OPENAI_PARAMS,
        ),
    ),
    ("GET", "/v1/models"): Operation("List the base models", None),
}


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway of this version."""
    paths: dict[str, dict[str, Any]] = {}
    result: Schema = {"application/json": {}, "application/x-protobuf": {}}
    responses = {"200": {"description": "Done", "content": result}, **_refused(_REFUSALS, _DETAIL)}
    # A pending sample has the SDK's own form, not that of a refusal.
    responses["408"]["content"] = {"application/json": {}}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(API + path, {})[method.lower()] = _described(operation, responses)
    result = {"application/json": {}, "text/event-stream": {}}
    responses = {"200": {"description": "Done", "content": result}, **_refused(_OPENAI_REFUSALS, _ERROR)}
    for (method, path), operation in OPENAI.items():
        described = _described(operation, responses)
        paths.setdefault(path, {})[method.lower()] = {**described, "security": [{"bearer": []}, {"key": []}]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinker sampling gateway", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"securitySchemes": _KEYS},
    }


def _described(operation: Operation, responses: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
            for name in operation.parameters
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return described


def _refused(refusals: dict[str, str], schema: Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {status: {"description": text, "content": content} for status, text in refusals.items()}
