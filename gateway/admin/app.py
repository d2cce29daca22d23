"""The admin address: a Starlette app in the supervisor's event loop, apart from everything that serves clients."""

from __future__ import annotations

import contextlib
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.guard import Guard
from gateway.admin.metrics import exposition
from gateway.admin.page import json_response, page_routes
from gateway.admin.report import readiness, status
from gateway.admin.upstreams import UpstreamsEndpoint
from shared.core.errors import ConfigError
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from shared.http.server import uvicorn_protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from gateway.admin.view import Controls


_SLOT: Final = re.compile("[0-9]{1,9}")
_SHOWN_CHARS: Final = 40


class Endpoints:
    def __init__(self, controls: Controls) -> None:
        self._controls = controls

    async def livez(self, request: Request) -> Response:
        return json_response({"alive": True, "loop_lag_ms": round(self._controls.view().loop_lag_ms, 3)})

    async def readyz(self, request: Request) -> Response:
        ready, body = readiness(self._controls.view())
        return json_response(body, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def status(self, request: Request) -> Response:
        return json_response(status(self._controls.view()))

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._controls.view()), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def openapi(self, request: Request) -> Response:
        from gateway.admin.openapi import document  # late: the codecs of the wire cost a start memory and time

        return json_response(document(self._controls.view().version))

    async def restart(self, request: Request) -> Response:
        name = request.path_params["slot"]
        # Longer digits are not even read: Python refuses some thousand of them with an error.
        slot = int(name) if _SLOT.fullmatch(name) else None
        if slot is None or not self._controls.restart_slot(slot):
            return json_response({"detail": f"there is no slot {name[:_SHOWN_CHARS]}"}, HTTPStatus.NOT_FOUND)
        return json_response({"restarting": slot}, HTTPStatus.ACCEPTED)

    async def reload(self, request: Request) -> Response:
        try:
            self._controls.reload()
        except ConfigError as error:
            return json_response({"detail": str(error)}, HTTPStatus.BAD_REQUEST)
        return json_response({"reloading": True}, HTTPStatus.ACCEPTED)


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method in the form of every other error."""
    assert isinstance(error, HTTPException)
    not_allowed = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
    text = "this method is not allowed here" if not_allowed else "there is no such path"
    reply = json_response({"detail": text}, HTTPStatus(error.status_code))
    reply.headers.update(error.headers or {})
    return reply


def admin_app(controls: Controls, key: str | None) -> Guard:
    endpoints, upstreams = Endpoints(controls), UpstreamsEndpoint(controls)
    app = Starlette(
        routes=[
            Route("/livez", endpoints.livez),
            Route("/readyz", endpoints.readyz),
            Route("/status", endpoints.status),
            Route("/metrics", endpoints.metrics),
            *page_routes(),
            Route("/openapi.json", endpoints.openapi),
            Route("/upstreams", upstreams.show, methods=["GET"]),
            Route("/upstreams", upstreams.publish, methods=["PUT"]),
            Route("/upstreams", upstreams.reset, methods=["DELETE"]),
            Route("/workers/{slot}/restart", endpoints.restart, methods=["POST"]),
            Route("/reload", endpoints.reload, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refusal},
    )
    return Guard(app, key)


class AdminServer(uvicorn.Server):
    """A uvicorn server inside the supervisor's event loop; the supervisor keeps the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until `stop` is called."""
        await self.serve(sockets=[listener])

    def stop(self) -> None:
        self.should_exit = True


def admin_server(app: ASGIApp) -> AdminServer:
    config = uvicorn.Config(
        app,
        # The limits and deadlines of the public address, against long heads, slow bodies and slow readers.
        http=uvicorn_protocol(Edge(HttpLimits())),  # type: ignore[arg-type] # it is only called
        loop="none",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # A scrape or a status page that hangs must not delay the stop.
        timeout_graceful_shutdown=1,
    )
    return AdminServer(config)
