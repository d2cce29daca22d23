"""Sending a whole reply, and finding out whether the client was there to take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.http.watch import connection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope, Send


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> None:
    """One reply with its length; uvicorn writes head and body apart, and neither copies the body."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


async def deliver(
    scope: Scope, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview
) -> bool:
    """`send_response`, then whether the client was still connected when the last byte had left our hands.

    See watch.py for what that can and cannot mean.
    """
    client = connection(scope)
    if not client.connected:
        return False
    await send_response(send, status, headers, body)
    return await client.drained()
