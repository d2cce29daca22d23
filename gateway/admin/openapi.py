"""The public address as an OpenAPI 3.1 document, served at `/openapi.json` of the admin address. Pure data.

What a field means is told in docs/wire.md; here stands what is taken, so that a tool can make requests of it. A test
compares the paths with the routes of `workers/api/app.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from shared.core.model import MAX_SEQ_ID

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

# What the gateway answers besides a 200, to any request.
_REFUSALS: Final = {
    "400": "The request is malformed, out of range, or asks for what cannot be honoured",
    "401": "No API key, or one that is not known",
    "403": "More than this API key may ask for at once",
    "404": "An id that is not of the gateway's form, or not the caller's; an unknown model",
    "408": "Still running, or the request did not arrive whole in time",
    "410": "Gone: submit it again; or the session was finished",
    "413": "The body is larger than --max-body-bytes",
    "415": "A Content-Encoding where none is taken",
    "429": "Too much at the moment: send it again later",
}
# To a request of OpenAI's API; an upstream's own refusals come on top.
_OPENAI_REFUSALS: Final = {status: text for status, text in _REFUSALS.items() if status != "410"} | {
    "502": "The upstream did not answer, and may have executed the request",
    "503": "No upstream takes the request at the moment",
}


def _list_of(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


@dataclass(frozen=True, slots=True)
class Operation:
    """`body` is None for a GET. `parameters` are those of the path, all text."""

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
_PARAMS: Final = _object(
    max_tokens={"type": "integer", "minimum": 1},
    seed={"type": "integer"},
    stop={"anyOf": [_TEXT, _list_of(_TEXT), _list_of(_COUNT)]},
    temperature={"type": "number", "minimum": 0},
    top_k={"type": "integer", "minimum": -1},
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
)
_SAMPLE: Final = _object(
    "prompt",
    sampling_session_id=_TEXT,
    seq_id={**_COUNT, "maximum": MAX_SEQ_ID},
    num_samples={"type": "integer", "minimum": 1},
    prompt=_object("chunks", chunks=_list_of({"anyOf": [_CHUNK, _IMAGE]}, minItems=1)),
    sampling_params=_PARAMS,
    prompt_logprobs=_FLAG,
    topk_prompt_logprobs=_COUNT,
    topk_sample_logprobs=_COUNT,
    prompt_logprobs_last_n={"type": "integer", "minimum": 1},
    base_model=_TEXT,
    model_path=_TEXT,
    type={"const": "sample"},
)
_SESSION_POLL: Final = _object(
    "target",
    target=_object(
        "type sampling_session_id cloned_sampler_id",
        type={"const": "sampling_session"},
        sampling_session_id=_TEXT,
        cloned_sampler_id=_COUNT,
    ),
    prev_cursor=_COUNT,
    timeout={"type": "number", "minimum": 0},
    retrieved_request_ids=_list_of(_TEXT),
)
_BINDING: Final = _object(
    "session_id", session_id=_TEXT, sampling_session_seq_id=_COUNT, base_model=_TEXT, model_path=_TEXT
)
_FINISH: Final = _object(reason=_object(type={"enum": ["success", "errored", "interrupted"]}), detail=_ANYTHING)

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/asample"): Operation("Submit a sample; answered with its promise before it is generated", _SAMPLE),
    ("POST", "/retrieve_future"): Operation(
        "Wait for one sample", _object("request_id", request_id=_TEXT, allow_metadata_only=_FLAG)
    ),
    ("POST", "/retrieve_futures"): Operation("Wait for what ends in a sampling session", _SESSION_POLL),
    ("POST", "/session_heartbeat"): Operation("A sign of life", _object("session_id", session_id=_TEXT)),
    ("POST", "/client/config"): Operation("How this SDK version samples", _object(sdk_version=_TEXT)),
    ("POST", "/client/dynamic_config"): Operation("What may change while it runs", _object(sdk_version=_TEXT)),
    ("POST", "/create_session"): Operation(
        "Open a session", _object(tags=_list_of(_TEXT), user_metadata={"type": "object"}, sdk_version=_TEXT)
    ),
    ("POST", "/sessions/{session_id}/finish"): Operation("End a session and what it runs", _FINISH, ("session_id",)),
    ("POST", "/create_sampling_session"): Operation("Bind a model for sampling", _BINDING),
    ("POST", "/join_sampling_session"): Operation(
        "A client number for another process", _object("sampling_session_id", sampling_session_id=_TEXT)
    ),
    ("GET", "/samplers/{sampling_session_id}"): Operation(
        "What a sampling session samples from", None, ("sampling_session_id",)
    ),
    ("POST", "/cancel_future"): Operation("Cancel one sample", _object("request_id", request_id=_TEXT)),
    ("POST", "/telemetry"): Operation("Taken and dropped, unread", _object(events=_list_of({"type": "object"}))),
    ("GET", "/get_server_capabilities"): Operation("The base models", None),
    ("GET", "/healthz"): Operation("Whether this worker answers; open without an API key", None),
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

# Whole paths. Fields that do not stand here are passed on as they are.
OPENAI: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/v1/completions"): Operation(
        "A completion by an upstream, whole or as a stream of events",
        _object("model prompt", prompt=_PROMPT, logprobs=_COUNT, **_OPENAI_PARAMS),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "The same behind messages",
        _object(
            "model messages",
            messages=_list_of(_MESSAGE, minItems=1),
            max_completion_tokens={"type": "integer", "minimum": 1},
            logprobs=_FLAG,
            top_logprobs=_COUNT,
            **_OPENAI_PARAMS,
        ),
    ),
    ("GET", "/v1/models"): Operation("The base models", None),
}


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway of this version."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(API + path, {})[method.lower()] = _described(operation, _responses())
    for (method, path), operation in OPENAI.items():
        told = _described(operation, _openai_responses())
        paths.setdefault(path, {})[method.lower()] = {**told, "security": [{"bearer": []}, {"key": []}]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinker sampling gateway", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"securitySchemes": _KEYS},
    }


def _described(operation: Operation, responses: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
            for name in operation.parameters
        ]
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return told


def _responses() -> dict[str, Any]:
    anything: Schema = {"application/json": {}, "application/x-protobuf": {}}
    told = _refused(_REFUSALS, _DETAIL)
    # A pending sample is told in the form of the SDK, not as a refusal.
    told["408"]["content"] = {"application/json": {}}
    return {"200": {"description": "Done", "content": anything}, **told}


def _openai_responses() -> dict[str, Any]:
    content: Schema = {"application/json": {}, "text/event-stream": {}}
    return {"200": {"description": "Done", "content": content}, **_refused(_OPENAI_REFUSALS, _ERROR)}


def _refused(refusals: dict[str, str], schema: Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {status: {"description": text, "content": content} for status, text in refusals.items()}
