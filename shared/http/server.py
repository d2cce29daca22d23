"""Taking connections from the slot's listening socket, many in one turn of the loop.

uvloop's libuv accepts one connection per listening handle and turn. Under load, when a turn takes milliseconds, a wave
of new connections then waits in the kernel for seconds while everything else is prompt. So whenever the loop has
accepted one, all others that wait are taken in the same turn. They cost more than the first, which is why the first is
left to the loop: one at a time is how they come when there is no wave.

Serving an application on the slot's inherited socket.

uvicorn's configuration and protocol, without its `Server`: signals, start-up messages and the process' end are the
worker's own business, and its ten ticks a second serve none of ours.
"""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.server import ServerState

from shared.http.connection import protocol_class
from shared.loop.turns import TurnLimit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.types import ASGIApp

    from shared.http.connection import GatewayProtocol
    from shared.http.edge import Edge
    from shared.http.exchange import Direct, Standing


# At most so many in a turn beside the loop's own: some 5 ms with what they have sent, and the others have theirs.
_IN_ONE_TURN: Final = 64


class _Ending(asyncio.Protocol):
    """Of a connection that nobody serves."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        transport.abort()


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[int | None], asyncio.Protocol],
        backlog: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`protocol` makes one for the connection of a descriptor; None where the loop keeps that to itself."""
        self._listener = listener
        self._protocol = protocol
        self._backlog = backlog
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._taking: set[asyncio.Task[None]] = set()
        # Sockets turn their family and type into enums each time they are asked, five times for each connection: as
        # attributes of a class they make accepting a fifth cheaper.
        self._kind = (listener.family, listener.type, listener.proto)
        known = {"__slots__": (), "family": listener.family, "type": listener.type}
        self._accepted: type[socket.socket] = type("Accepted", (socket.socket,), known)

    async def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        duplicate = socket.socket(fileno=os.dup(self._listener.fileno()))
        self._server = await self._loop.create_server(self._first, sock=duplicate, backlog=self._backlog, ssl=self._tls)

    def stop(self) -> None:
        """Leave the socket's queue to whoever serves it next. What was accepted stays."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def close(self) -> None:
        """Give up those whose TLS has not begun yet."""
        self.stop()
        for task in self._taking:
            task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _first(self) -> asyncio.Protocol:
        # Now, while the loop looks at its sockets: those taken are connected in this turn, as the first one is.
        # What fails is told and goes no further: with nothing for this connection, the loop would never look at its
        # listening socket again.
        try:
            self._take_waiting()
        except Exception as error:
            self._tell(error)
        try:
            return self._protocol(None)
        except Exception as error:
            self._tell(error)
            return _Ending()

    def _tell(self, error: Exception) -> None:
        self._loop.call_exception_handler({"message": "a connection could not be taken", "exception": error})

    def _take_waiting(self) -> None:
        if self._server is None:
            return
        for _ in range(_IN_ONE_TURN):
            try:
                # What `accept` calls, and wraps in a socket of the common class.
                descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]
            except OSError:
                # Nobody waits. Any other trouble meets the loop's own handle too, which reports it.
                return
            accepted = self._accepted(*self._kind, descriptor)
            coming = self._connect(accepted)
            if self._tls is None:
                _step(coming)
            else:
                task = self._loop.create_task(coming)
                self._taking.add(task)
                task.add_done_callback(self._taking.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self._protocol, accepted.fileno()), accepted, ssl=self._tls
            )
        except OSError:
            # TLS that failed, or a client that has gone again.
            accepted.close()
        except Exception:
            accepted.close()
            raise


def _step(coming: Coroutine[asyncio.Future[None], None, None], _: object = None) -> None:
    """Runs `coming` to its end without a task. All it waits for is a turn of the loop, so nobody needs to cancel it."""
    try:
        awaited = coming.send(None)
    except StopIteration:
        return
    awaited.add_done_callback(partial(_step, coming))


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
        self._lane = TurnLimit(_STARTED_PER_TURN)
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
