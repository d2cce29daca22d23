"""Replies: what a whole one has, and the bytes of one that comes in parts."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from shared.config import KIB

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from starlette.types import Send

_access_log: Final = logging.getLogger("uvicorn.access")

# uvloop's TLS encrypts one write into one buffer of the TCP transport, however large, and never reports how much of it
# is left. In pieces of its high-water mark at most one of them is out of sight; the encryption copies them anyway.
TLS_PIECE_BYTES: Final = 64 * KIB
# From here on a copy of the body costs more than the second buffer of a scattered write.
_SCATTER_FROM_BYTES: Final = 16 * KIB
# Replies that have no body whatever their headers say.
_BODILESS: Final = frozenset({204, 304})


class WholeReply(Protocol):
    """A whole reply. `on_delivered` is called when the client was still there after the last byte."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes | memoryview: ...

    @property
    def content_type(self) -> bytes: ...

    @property
    def on_delivered(self) -> Callable[[], None] | None: ...


class Framing:
    """Frame the parts of one reply. Its headers may be another server's.

    `head` lacks its last, empty line. `closes`: the headers ask for the connection's end. Raises `RuntimeError` for
    what would not be HTTP.
    """

    __slots__ = ("_is_bodiless", "_is_chunked", "_left_bytes", "closes", "head")

    def __init__(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], *, is_head_only: bool, knows_chunks: bool
    ) -> None:
        self._is_bodiless = is_head_only or status in _BODILESS
        self._left_bytes: int | None = None
        self.closes = False
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError("a reply has a header that is not HTTP's")
            if self._is_sent(name.lower(), value, status):
                lines.append(b"%b: %b\r\n" % (name.lower(), value))
        # An older client knows no chunks: the end of the connection is the end of the body.
        self._is_chunked = knows_chunks and self._left_bytes is None and not self._is_bodiless
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.head = b"".join(lines)

    def _is_sent(self, name: bytes, value: bytes, status: int) -> bool:
        """Note what a header decides; return False for those that the gateway writes itself."""
        if name == b"content-length":
            self._left_bytes = int(value)
            return status != 204
        if name == b"connection" and value.lower() == b"close":
            self.closes = True
            return False
        return name != b"transfer-encoding"

    def frame(self, part: bytes | memoryview, *, is_last: bool) -> bytes | memoryview:
        """Return the bytes of a part of the body."""
        if self._is_bodiless:
            return b""
        if self._is_chunked:
            chunk = b"".join((b"%x\r\n" % len(part), part, b"\r\n")) if part else b""
            return chunk + b"0\r\n\r\n" if is_last else chunk
        if self._left_bytes is not None:
            self._left_bytes -= len(part)
            if self._left_bytes < 0 or (is_last and self._left_bytes > 0):
                raise RuntimeError("a reply's body is longer or shorter than its Content-Length")
        return part


@lru_cache(maxsize=64)
def opening(status: int, content_type: bytes) -> bytes:
    """Return the head of a whole reply up to the Content-Length value. About a dozen pairs exist, so all are cached."""
    return b"%bcontent-type: %b\r\ncontent-length: " % (STATUS_LINE[status], content_type)


def write_whole(transport: asyncio.Transport, head: bytes, body: bytes | memoryview) -> None:
    """Write a whole reply, its body without a copy if that is cheaper."""
    if len(body) < _SCATTER_FROM_BYTES:
        transport.write(b"".join((head, body)))
    else:
        transport.writelines((head, body))


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """Send one reply with its length by ASGI's messages. The headers may be another server's."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_in_pieces(send: Send, reply: WholeReply) -> None:
    """Send a whole reply; `send` waits for the client before each piece."""
    body = memoryview(reply.body)
    headers = [(b"content-type", reply.content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    for start in range(0, len(body), TLS_PIECE_BYTES):
        end = start + TLS_PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})


def log_access(scope: Any, status: int) -> None:
    """Write the line of `--access-log`, with uvicorn's logger and in its form."""
    target = get_path_with_query_string(scope)
    client, method, version = get_client_addr(scope), scope["method"], scope["http_version"]
    _access_log.info('%s - "%s %s HTTP/%s" %d', client, method, target, version, status)
