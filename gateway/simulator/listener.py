"""The listening socket: open, paused while connections wait in the kernel's queue, or closed."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a socket bound to the address and not yet listening. Raises `OSError`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ListeningAddress:
    """Open and close servers on duplicates of one bound socket, which keeps the address and its queue."""

    def __init__(self, bound: socket.socket, connect: Callable[[], asyncio.Protocol], backlog: int) -> None:
        self.url = url_of(bound)
        self._bound = bound
        self._connect = connect
        self._backlog = backlog
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=self._bound.dup(), backlog=self._backlog)

    def pause(self) -> None:
        """Stop accepting without refusing: connections wait in the kernel until `open`."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Refuse new connections; accepted ones stay open."""
        self.pause()
        self._bound.close()
