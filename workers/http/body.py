"""A request's whole body, within a limit that holds before and while it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.errors import BodyIncomplete, BodyTooLarge, UnsupportedEncoding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive


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
    return BodyTooLarge(f"the request's body is larger than {limit_bytes} bytes (--max-body-bytes)")
