"""Outcomes and errors to HTTP: the only place where a status is chosen.

What the SDK does with each status decides the choice (docs/wire.md). In short: 400 and 404 end the user's call, 410 on
a retrieve makes it submit the sample again, 408 is "still running", 429 is "slower, please". A retrieve is never
answered with a 5xx: the SDK repeats those without any pause.

Every reply has a Content-Length and is never compressed: a 400 without a length reads as a proxy's glitch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core import errors
from shared.core.errors import StoreError, StoreFull
from shared.core.lifecycle import Answer
from shared.core.model import Value
from shared.wire import openai
from shared.wire.sdk import calls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Send

JSON: Final = b"application/json"
PROTOBUF: Final = b"application/x-protobuf"


class Reply(Value, frozen=True):
    """A handler's whole reply. `on_delivered` is called when the client was still there after the last byte."""

    status: int
    body: bytes | memoryview
    content_type: bytes = JSON
    on_delivered: Callable[[], None] | None = None


class Streamed(Value, frozen=True):
    """A reply in parts, which `run` sends. It raises `ClientGone`, `ReplyBroken`, and others before the first byte."""

    run: Callable[[Send], Awaitable[None]]


STATUS_OF_ANSWER: Final[dict[Answer, int]] = {
    Answer.RESULT: 200,
    Answer.FAILURE: 200,
    Answer.TRY_AGAIN: 408,
    Answer.RESUBMIT: 410,
}

# The first class that matches counts: subclasses come before their bases.
STATUS_OF_ERROR: Final[tuple[tuple[type[Exception], int], ...]] = (
    (errors.BadRequest, 400),
    (errors.Unauthorized, 401),
    (errors.Forbidden, 403),
    (errors.NotFound, 404),
    (errors.SessionFinished, 410),
    (errors.BodyTooLarge, 413),
    (errors.UnsupportedEncoding, 415),
    (errors.ClientError, 400),
    (errors.Overloaded, 429),
    (StoreError, 429),
    (errors.NotImplementedHere, 501),
    (errors.UpstreamBroke, 502),
    (errors.ReplyBroken, 502),
    (errors.UpstreamUnavailable, 503),
)
# Not ours to blame on the client, and not to be hammered: what went wrong is in the log.
UNEXPECTED: Final = 429

_STORE_TROUBLE: Final = "the result store does not answer at the moment; send it again later"
_STORE_FULL: Final = "the result store is full; send it again later"
_UNEXPECTED: Final = "the gateway failed on this request; send it again later"


def ok(body: bytes = b"{}") -> Reply:
    return Reply(200, body)


def answer(kind: Answer, body: bytes) -> Reply:
    return Reply(STATUS_OF_ANSWER[kind], body)


def routing_error(status: int, *, in_openai: bool = False) -> Reply:
    """No such path, or not with this method: the router's own finding."""
    text = "this method is not allowed here" if status == 405 else "there is no such path"
    return Reply(status, openai.error_body(text, status) if in_openai else calls.error_body(text))


def refusal(error: Exception) -> Reply:
    """Return the reply for an error, never with Redis' or Python's own words."""
    status, text = _status_and_text(error)
    return Reply(status, calls.error_body(text))


def openai_refusal(error: Exception) -> Reply:
    """Return the reply for an error to a client of OpenAI's API."""
    status, text = _status_and_text(error)
    return Reply(status, openai.error_body(text, status))


def _status_and_text(error: Exception) -> tuple[int, str]:
    for kind, status in STATUS_OF_ERROR:
        if isinstance(error, kind):
            return status, _text(error)
    return UNEXPECTED, _UNEXPECTED


def _text(error: Exception) -> str:
    if isinstance(error, StoreFull):
        return _STORE_FULL
    return _STORE_TROUBLE if isinstance(error, StoreError) else str(error)
