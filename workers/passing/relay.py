"""Pass a request on and its reply back, holding neither whole: for training servers and for OpenAI's API.

Back-pressure is that of the transports. The next piece of a body is requested when the upstream's socket has room, and
meanwhile the server stops reading from the client; a reply is read on when the client's socket has room. So an exchange
holds a few buffers of 64 KiB, whatever its size.

When the client leaves, the task that serves it is cancelled, which closes the upstream connection. While reading from
the client is paused this cannot be seen, so an upstream that stops reading a body is dropped at its own deadline.

A reply that breaks off in the middle must not look whole: the client's connection is cut.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import aiohttp

from shared.core.errors import BodyIncomplete, ClientGone, ReplyBroken
from shared.core.upstream_text import shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.types import Receive, Send

    from shared.http.peer import Connection
    from shared.wire.passing import Header

# An error is a sentence. It is collected to get a length: the SDK takes a 400 without a length for a proxy's.
_COLLECTED_BYTES: Final = 64 * 1024
BROKEN: Final = (aiohttp.ClientError, OSError, ValueError)


@asynccontextmanager
async def while_connected(client: Connection) -> AsyncIterator[None]:
    """Cancel the block and raise `ClientGone` when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def lost() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    client.add_lost_callback(lost)
    try:
        try:
            yield
        finally:
            client.remove_lost_callback(lost)
            if gone:
                # It may have gone after the block's last await: take the cancel here, not at the caller's next await.
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        # Another cancel in the same turn of the loop counts more.
        if not gone or task.uncancel():
            raise
        raise ClientGone("the client went away") from None


async def body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the request's body as it comes. Raises `BodyIncomplete` when the client goes away."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BodyIncomplete("the client went away before its body was whole")
        if piece := message.get("body", b""):
            yield piece
        more = message.get("more_body", False)


async def relay(response: aiohttp.ClientResponse, headers: Iterable[Header], send: Send) -> None:
    """Send the reply on as it comes, with the client's `headers`. Raises `ReplyBroken` when it breaks off."""
    headers = list(headers)
    head = b""
    if response.status >= 400 and not any(name == b"content-length" for name, _ in headers):
        head, whole = await collect(response)
        if whole:
            headers.append((b"content-length", str(len(head)).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if head:
        await send({"type": "http.response.body", "body": head, "more_body": True})
    try:
        async for piece in response.content.iter_any():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except BROKEN as error:
        raise ReplyBroken(f"the reply broke off: {shown(str(error))}") from None
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def collect(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """Return the first bytes of a body, and whether they are all. If it breaks off here, the next read raises again."""
    parts: list[bytes] = []
    size_bytes = 0
    try:
        while size_bytes < _COLLECTED_BYTES:
            piece = await response.content.readany()
            if not piece:
                return b"".join(parts), True
            parts.append(piece)
            size_bytes += len(piece)
    except BROKEN:
        pass
    return b"".join(parts), False
