"""W3C trace context: the one header that ties a client's span, ours and the upstream's together.

What of a request and of its reply is passed on: allow-lists of headers, paths, and where a redirect may point.

Allow-lists, not block-lists. What is about the client's connection to the gateway (Host, Connection, Transfer-Encoding,
Expect, Upgrade), about the client's account here (keys, cookies) or about its way to us (Forwarded, Cloudflare's) means
something else one step further, or gives something away. Bodies keep their encoding, so Content-Encoding,
Content-Length and Accept-Encoding travel with them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

# version - trace id - parent id - flags (https://www.w3.org/TR/trace-context/, 3.2). A later version may append more,
# which need not be passed on; version ff is forbidden, and so are ids of zeros.
_FORM: Final = re.compile(rb"(?!ff)([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-[ -~]*)?")
_LENGTH: Final = 55


def traceparent_of(header: bytes | None) -> str | None:
    """Return the part of a client's `traceparent` that is passed on; None if it is not valid."""
    if header is None:
        return None
    found = _FORM.fullmatch(header)
    if found is None or (header.startswith(b"00-") and len(header) != _LENGTH):
        return None
    return found[1].decode()


if TYPE_CHECKING:
    from collections.abc import Iterable

    Header = tuple[bytes, bytes]

_CONTENT: Final = frozenset(
    {b"accept", b"accept-encoding", b"content-type", b"content-encoding", b"content-length", b"user-agent"}
)
_TRACING: Final = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
_TO_TRAINER: Final = _CONTENT | _TRACING | {b"x-idempotency-key", b"if-none-match", b"range"}
# The SDK's own: timeouts and retry counts, the type and iteration of a poll, the access token of copied weights.
_TO_TRAINER_PREFIXES: Final = (b"x-stainless-", b"x-tinker-", b"x-sdk-")
_TO_OPENAI: Final = frozenset({b"accept", b"content-type", b"user-agent"}) | _TRACING

_FROM_UPSTREAM: Final = frozenset(
    {
        b"content-type",
        b"content-encoding",
        b"content-length",
        b"content-disposition",
        b"cache-control",
        b"etag",
        b"last-modified",
        b"accept-ranges",
        b"content-range",
        b"location",
        b"retry-after",
        b"retry-after-ms",
        b"www-authenticate",
        b"x-request-id",
        b"x-should-retry",
        b"x-deprecation-note",
        b"x-deprecation-level",
    }
)
# What a request line may hold as it is: visible ASCII, and no fragment, which never leaves a client.
_TARGET: Final = re.compile(rb"/[\x21\x22\x24-\x7e]*")
# Some servers resolve these before they look at the path, encoded ones as well.
_DOT_SEGMENT: Final = re.compile(rb"(?:^|[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?=$|[/\\]|%2f|%5c)", re.IGNORECASE)


def to_trainer(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of a Tinker request that its training server gets; names are in lower case."""
    return [
        (name, value)
        for name, value in headers
        if (name in _TO_TRAINER or name.startswith(_TO_TRAINER_PREFIXES)) and value.isascii()
    ]


def to_openai(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of an OpenAI request that a vLLM server gets. They do not ask for compression."""
    return [(name, value) for name, value in headers if name in _TO_OPENAI and value.isascii()]


def to_client(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of an upstream's reply that the client gets."""
    return [(name.lower(), value) for name, value in headers if name.lower() in _FROM_UPSTREAM]


def api_key(headers: Iterable[Header]) -> str | None:
    """Return the client's own key, to be passed on."""
    return next((value.decode() for name, value in headers if name == b"x-api-key" and value.isascii()), None)


def without(headers: Iterable[Header], *names: bytes) -> list[Header]:
    return [(name, value) for name, value in headers if name not in names]


def is_plain_target(path: bytes, query: bytes) -> bool:
    """Return whether a target, appended to another server's base URL, still means the same path there."""
    if _DOT_SEGMENT.search(path) is not None:
        return False
    return _TARGET.fullmatch(path) is not None and _TARGET.fullmatch(b"/" + query) is not None


def redirect_for_client(location: bytes, base_url: str) -> bytes:
    """Return a `Location` that the client can follow: one within the server behind us becomes one within us.

    `base_url`: of that server, without trailing slash. What points elsewhere (a signed URL of some storage) stays.
    """
    base = base_url.encode()
    if location == base or location.startswith((base + b"/", base + b"?")):
        return location[len(base) :] or b"/"
    return location
