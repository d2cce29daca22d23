"""Serving an application on the slot's inherited socket.

uvicorn's configuration and protocol, without its `Server`: signals, start-up messages and the process' end are the
worker's own business, and its ten ticks a second serve none of ours.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.server import ServerState

from workers.http.accepting import Acceptor
from workers.http.protocol import protocol_class
from workers.turns import Lane

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from starlette.types import ASGIApp

    from workers.http.direct import Direct, Standing
    from workers.http.edge import Edge
    from workers.http.protocol import GatewayProtocol

# Direct requests in one turn of the event loop: a millisecond or two.
_STARTED_PER_TURN: Final = 16
# Connections that the kernel had handed over when we stopped accepting are given this long to say what they want.
_LAST_REQUESTS_S: Final = 0.3
# A round trip or two, for clients that still have to take what is buffered or to end TLS.
_GOODBYES_S: Final = 0.5


class PublicServer:
    """The public address of one worker."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        edge: Edge,
        *,
        backlog: int,
        access_log: bool = False,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        direct: Mapping[tuple[bytes, bytes], Direct] | None = None,
        standing: Mapping[tuple[bytes, bytes], Standing] | None = None,
    ) -> None:
        """`direct`: what is answered without ASGI, by method and target; `standing`: what always has the same reply.

        `app` serves both, too.
        """
        self._lane = Lane(_STARTED_PER_TURN)
        self._config = uvicorn.Config(
            app,
            http=protocol_class(edge, direct, standing, self._lane),
            ws="none",
            lifespan="off",
            access_log=access_log,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._edge = edge
        self._backlog = backlog
        self._state = ServerState()
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Accept connections from now on."""
        self._config.load()
        self._acceptor = Acceptor(self._listener, self._protocol, self._backlog, self._config.ssl)
        await self._acceptor.start()

    def stop_accepting(self) -> None:
        """Leave the queue of the socket to whoever serves the slot next; the supervisor keeps it open."""
        if self._acceptor is not None:
            self._acceptor.stop()

    async def stop(self, deadline_s: float) -> None:
        """Answer what is being answered, close what is idle; cut the rest at the deadline."""
        self.stop_accepting()
        self._edge.start_draining()
        await asyncio.sleep(_LAST_REQUESTS_S)
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._finish_within(deadline_s)
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._close_the_rest()

    async def _close_the_rest(self) -> None:
        """Last bytes and TLS' goodbyes have a moment; the loop could not be closed over one that never comes."""
        if self._edge.open:
            await asyncio.sleep(_GOODBYES_S)
        for connection in list(self._edge.open):
            connection.linger_overdue()

    async def _finish_within(self, deadline_s: float) -> None:
        ends_s = self._loop.time() + deadline_s
        while self._lane or self._state.tasks:
            # Who is still in the lane has no task yet; a turn later some more have.
            await asyncio.sleep(0)
            tasks = list(self._state.tasks)
            if tasks:
                await asyncio.wait(tasks, timeout=max(ends_s - self._loop.time(), 0.0))
            if self._loop.time() >= ends_s:
                return

    def _protocol(self, descriptor: int | None) -> asyncio.Protocol:
        made: GatewayProtocol = self._config.http_protocol_class(  # type: ignore[assignment,call-arg]
            config=self._config, server_state=self._state, app_state={}, _loop=self._loop
        )
        made.descriptor = descriptor
        return made
