"""What the HTTP edge accepts, and for how long it waits.

Requests that never reach the application, and the reply that says why.

A request's target as ASGI tells it: path, raw path and query string.

A request's whole body, within a limit that holds before and while it arrives.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import httptools

from shared.config import KIB, MIB
from shared.core.errors import BodyIncomplete, BodyTooLarge, UnsupportedEncoding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive
    from uvicorn._types import HTTPScope


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one client connection. The defaults are those of common servers unless a reason stands beside them."""

    url_bytes: int = 8 * KIB
    header_bytes: int = 16 * KIB
    head_bytes: int = 32 * KIB
    header_count: int = 100
    # Counted from the first byte of the request to the end of its headers.
    head_s: float = 30.0
    # A body has this long, plus the time that its bytes so far would take at the least rate.
    body_grace_s: float = 60.0
    # Far below any link that moves tokens for a living, far above what a trickling attacker pays for.
    least_bytes_per_s: int = 64 * KIB
    # A client that keeps its reply unread is looked at this often, and must have taken the least rate since.
    unread_s: float = 60.0
    keep_alive_s: float = 75.0
    # Requests parsed ahead of their turn; each costs about 3 KiB, and one read may hold 14,000 of the smallest.
    pipelined: int = 128
    # What is read and thrown away after an early reply: about what the socket buffers of both ends hold, so that a
    # client that blocks in send() gets to read why it was refused, instead of a reset.
    discard_bytes: int = 4 * MIB
    linger_s: float = 5.0
    # The transport asks the application to pause above this.
    write_buffer_bytes: int = 64 * KIB
    # What a connection reads ahead of its handler: as much as uvloop reads at once, so that a prompt of 32,768 tokens
    # arrives without a pause.
    unread_body_bytes: int = 256 * KIB


class Refusal(Exception):
    """A request that breaks the protocol or a limit; `status` is an HTTP status, `detail` is for the caller."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def refusal_of(error: httptools.HttpParserError) -> Refusal:
    """What the parser's error means: the refusal raised in one of our callbacks, or else its own complaint."""
    cause = error.__context__
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's method is not one of HTTP's.")
    if isinstance(error, httptools.HttpParserInvalidURLError) or isinstance(cause, httptools.HttpParserInvalidURLError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's target is not a valid URL.")
    if isinstance(error, httptools.HttpParserCallbackError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request could not be understood.")
    return Refusal(HTTPStatus.BAD_REQUEST, f"The request is not valid HTTP/1.1: {error}.")


def encode(refusal: Refusal) -> bytes:
    """The whole reply, as it goes over the wire."""
    body = json.dumps({"detail": refusal.detail}).encode()
    head = (
        f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


# What needs no taking apart: nearly every request's. A second slash at the start would be read as a host.
_PLAIN: Final = re.compile(rb"/[A-Za-z0-9_.~-][A-Za-z0-9_.~/-]*")


def place(scope: HTTPScope, url: bytes) -> None:
    """Writes what `url` says into `scope`. Raises httptools' error when it is no URL."""
    if _PLAIN.fullmatch(url):
        scope["path"], scope["raw_path"], scope["query_string"] = url.decode("ascii"), url, b""
        return
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    scope["path"] = unquote(path) if "%" in path else path
    scope["raw_path"] = parsed.path
    scope["query_string"] = parsed.query or b""


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit_bytes: int) -> bytes:
    """The body of the request that has these headers.

    Raises `UnsupportedEncoding` for any Content-Encoding (no SDK compresses what comes here), `BodyTooLarge` before
    a byte is read where the length is declared, and `BodyIncomplete` when the client goes away.
    """
    require_readable(headers, limit_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise BodyIncomplete("the client went away before its body was whole")
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def require_readable(headers: Mapping[bytes, bytes], limit_bytes: int) -> None:
    """Raises what `read_body` does before it reads."""
    if _exceeds(headers.get(b"content-length", b""), limit_bytes):
        raise _too_large(limit_bytes)
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedEncoding("a request must not be compressed: leave Content-Encoding out")


def _exceeds(declared: bytes, limit_bytes: int) -> bool:
    # httptools has refused what is not a number.
    return declared.isdigit() and (len(declared) > 18 or int(declared) > limit_bytes)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request's body is larger than {limit_bytes} bytes, the most that this path takes (see --max-body-bytes)"
    )
