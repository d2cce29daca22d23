"""The other processes of one simulator: what one of them is told on its control paths, all of them do.

Each process serves its own control paths on a UNIX socket as well; whoever gets a client's request passes it on there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gateway.simulator.http import HttpRequest


class Siblings:
    """`paths`: the sockets of the others."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._paths = paths

    async def ask(self, request: HttpRequest) -> list[bytes]:
        """The bodies of all their replies. Raises `OSError` when one of them is gone."""
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
