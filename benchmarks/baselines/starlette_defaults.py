"""An endpoint as uvicorn and Starlette serve it when nothing is changed: its own server, a route, an access log."""

from __future__ import annotations

import asyncio
import io
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from starlette.requests import Request


class _Server(uvicorn.Server):
    """Tells when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()


async def heartbeat(request: Request) -> JSONResponse:
    document = await request.json()
    if not isinstance(document.get("session_id"), str):
        return JSONResponse({"error": "session_id is missing"}, status_code=400)
    return JSONResponse({"type": "session_heartbeat"})


@asynccontextmanager
async def serving(listener: socket.socket) -> AsyncIterator[None]:
    """Until the end of the block. The access log is written, to memory."""
    app = Starlette(routes=[Route("/api/v1/session_heartbeat", heartbeat, methods=["POST"])])
    config = uvicorn.Config(app, log_config=None)
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(uvicorn.logging.AccessFormatter('%(client_addr)s - "%(request_line)s" %(status_code)s'))
    access = logging.getLogger("uvicorn.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    server = _Server(config)
    # `serve` would take the signals, which stay with whoever runs the benchmarks.
    running = asyncio.create_task(server._serve(sockets=[listener]))
    try:
        await server.accepting.wait()
        yield
    finally:
        server.should_exit = True
        await running
        access.removeHandler(handler)
