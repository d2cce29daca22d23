"""Sending a whole reply, and finding out whether the client was there to take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.config import KIB
from workers.http.cycle import WHOLE_REPLY
from workers.http.watch import connection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope, Send

# uvloop's TLS encrypts one write into one buffer of the TCP transport, however large, and never says how much of it is
# left. In pieces of its high-water mark no more than one of them is out of sight; the copy is the encryption's anyway.
_TLS_PIECE_BYTES: Final = 64 * KIB


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """One reply with its length. The headers may be another server's: uvicorn looks at each."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


async def send_whole(
    scope: Scope, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """As `send_response`, in one write where the server beneath can do that. The headers must be our own."""
    if WHOLE_REPLY in scope.get("extensions", ()):
        await send({"type": WHOLE_REPLY, "status": status, "headers": headers, "body": body})
    else:
        await send_response(send, status, headers, body)


async def deliver(
    scope: Scope, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> bool:
    """`send_whole`, then whether the client was still connected when the last byte had left our hands.

    See watch.py for what that can and cannot mean.
    """
    client = connection(scope)
    if not client.connected:
        return False
    if scope.get("scheme") == "https" and len(body) > _TLS_PIECE_BYTES:
        await _send_in_pieces(send, status, headers, memoryview(body))
    else:
        await send_whole(scope, send, status, headers, body)
    return await client.drained()


async def _send_in_pieces(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: memoryview) -> None:
    """As `send_response`; waits for the client before each piece."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", length)]})
    for start in range(0, len(body), _TLS_PIECE_BYTES):
        end = start + _TLS_PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})
