"""Read the model's name and the amount that a request of OpenAI's API asks for; the rest is passed on as it is.

A request is written again from its fields even if no name changes: a field that was given twice then appears once, so
that the server behind cannot read another one than we did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from shared.core.errors import BadRequest
from shared.wire.strict_json import at_once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.wire.strict_json import Steps

_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text: Final = msgspec.json.Decoder(str)
_count: Final = msgspec.json.Decoder(int | None)
_prompts: Final = msgspec.json.Decoder(list[msgspec.Raw])
# The most keys, prompts and messages together; reading this many takes 10 ms.
MAX_TEXTS: Final = 100_000
_LONG_BYTES: Final = 2**20
# The names of "how many tokens at most", the newer one first.
_LIMITS: Final = ("max_completion_tokens", "max_tokens")

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """A request for completions. `max_tokens` is None for what the context leaves; `sequences` counts all prompts."""

    model: str
    max_tokens: int | None
    sequences: int
    fields: Mapping[str, msgspec.Raw]

    def encode(self, upstream_name: str) -> bytes:
        """Write the body for an upstream that knows the model by this name."""
        return msgspec.json.encode({**self.fields, "model": upstream_name})


def decode_call(body: bytes) -> OpenAiCall:
    """Decode a request for completions. Raises `BadRequest`."""
    return at_once(call_steps(body))


def call_steps(body: bytes) -> Steps[OpenAiCall]:
    """Decode as `decode_call` does, with a pause before each step that takes long for a body of many MiB."""
    is_long = len(body) > _LONG_BYTES
    if is_long:
        yield
    if body.count(b'"') > 2 * MAX_TEXTS:
        yield
        # Count the quotes that are not escaped, or a few more: each key, prompt or message has two.
        quotes = body.count(b'"') - body.count(b'\\"')
        yield
        if quotes + body.count(b'\\\\"') > 2 * MAX_TEXTS:
            raise BadRequest(f"the request holds more than {MAX_TEXTS:,} texts")
    try:
        if is_long:
            yield
        if not body.isascii():
            body.decode()
        if is_long:
            yield
        fields = _fields.decode(body)
        if is_long:
            yield
        model = _text.decode(fields["model"]) if "model" in fields else ""
        limits = (_count.decode(fields[name]) for name in _LIMITS if name in fields)
        max_tokens = next((limit for limit in limits if limit is not None), None)
        sequences = _prompts_of(fields) * max(_number(fields, "n"), _number(fields, "best_of"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the request is not a valid completion request: {error}") from None
    if not model:
        raise BadRequest("model is missing: name one that GET /v1/models lists")
    return OpenAiCall(model, max_tokens, sequences, fields)


def _number(fields: Mapping[str, msgspec.Raw], name: str) -> int:
    return (_count.decode(fields[name]) if name in fields else None) or 1


def _prompts_of(fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the number of prompts: a list of texts or of token lists holds several, a list of tokens is one."""
    prompt = bytes(fields.get("prompt", b"")).lstrip()
    first = prompt[1:].lstrip()[:1] if prompt.startswith(b"[") else b""
    if first not in (b'"', b"["):
        return 1
    if first == b"[" and prompt.count(b"[") > MAX_TEXTS:
        raise BadRequest(f"the request holds more than {MAX_TEXTS:,} prompts")
    return max(len(_prompts.decode(prompt)), 1)


def error_body(message: str, status: int) -> bytes:
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


def models(context_tokens: Mapping[str, int | None]) -> bytes:
    """Write the reply to `GET /v1/models`. `context_tokens` is by offered name; None means that it is not known."""
    cards: list[dict[str, Any]] = []
    for name, tokens in context_tokens.items():
        length = {"max_model_len": tokens} if tokens is not None else {}
        cards.append({"id": name, "object": "model", "created": 0, "owned_by": "gateway", **length})
    return orjson.dumps({"object": "list", "data": cards})
