"""Pass control requests on to the other processes of one simulator.

Each process also serves its control paths on a UNIX socket. The one that gets a client's request sends it to the others
there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gateway.simulator.http import HttpRequest


class Siblings:
    """The other processes, by the `paths` of their sockets."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._paths = paths

    async def ask(self, request: HttpRequest) -> list[bytes]:
        """Return the bodies of all their replies. Raises `OSError` if one of them is gone."""
        return await asyncio.gather(*[_ask(path, request) for path in self._paths])


async def _ask(path: Path, request: HttpRequest) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        head = f"{request.method} {request.path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(request.body)}"
        writer.write(head.encode() + b"\r\n\r\n" + request.body)
        reply = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    return reply.partition(b"\r\n\r\n")[2]
