"""Serve endpoints with uvicorn and Starlette in their default configuration: their server, routes and access log."""

from __future__ import annotations

import asyncio
import io
import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request


class _Server(uvicorn.Server):
    """A server that sets an event when it has started."""

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


async def retrieve_future(request: Request) -> JSONResponse:
    document = await request.json()
    if not isinstance(document.get("request_id"), str):
        return JSONResponse({"error": "request_id is missing"}, status_code=400)
    return JSONResponse({"type": "sample", "sequences": [], "prompt_cache_hit_tokens": 0})


def application() -> Starlette:
    endpoints = {"/api/v1/session_heartbeat": heartbeat, "/api/v1/retrieve_future": retrieve_future}
    return Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()])


@contextmanager
def access_log() -> Iterator[None]:
    """Write an access log to memory until the end of the block.

    uvicorn logs the requests of every connection that is opened while its logger has a handler, for all servers of the
    process: nothing may use the other servers meanwhile.
    """
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(uvicorn.logging.AccessFormatter('%(client_addr)s - "%(request_line)s" %(status_code)s'))
    access = logging.getLogger("uvicorn.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        yield
    finally:
        access.removeHandler(handler)


@asynccontextmanager
async def serving(listener: socket.socket) -> AsyncIterator[None]:
    """Serve until the end of the block."""
    server = _Server(uvicorn.Config(application(), log_config=None))
    # `serve` would install signal handlers, which belong to the benchmark.
    running = asyncio.create_task(server._serve(sockets=[listener]))
    try:
        await server.accepting.wait()
        yield
    finally:
        server.should_exit = True
        await running
