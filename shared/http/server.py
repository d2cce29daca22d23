"""Serve an application on a slot's inherited socket, and take its connections many in one turn of the loop.

uvloop's libuv accepts one connection per listening handle and turn. Under load, when a turn takes milliseconds, a wave
of new connections then waits in the kernel for seconds while everything else is prompt. So whenever the loop has
accepted one, all others that wait are taken in the same turn. They cost more than the first, which is why the first is
left to the loop: one at a time is how they come when there is no wave.

The worker has its own signals, start-up messages and end, so it uses uvicorn's configuration and not its `Server`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn

from shared.http.connection import EdgeConnection
from shared.http.exchange import Service
from shared.loop.turns import TurnLimit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.types import ASGIApp
    from uvicorn.server import ServerState

    from shared.http.edge import Edge
    from shared.http.exchange import HotEntry
    from shared.http.memory import Memory


# The most in a turn beside the loop's own: some 5 ms with what they have sent.
_IN_ONE_TURN: Final = 64


class _Ending(asyncio.Protocol):
    """A connection that nobody serves."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        transport.abort()


class Acceptor:
    """Take the connections of one listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[int | None], asyncio.Protocol],
        backlog: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`protocol` makes one for the connection of a descriptor, which is None where the loop does not give it."""
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
        """Leave the socket's queue to the process that serves it next. Accepted connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def close(self) -> None:
        """Give up connections whose TLS has not begun yet."""
        self.stop()
        for task in self._taking:
            task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _first(self) -> asyncio.Protocol:
        # Now, while the loop looks at its sockets: those taken are connected in this turn, as the first one is.
        # A failure is reported and goes no further: without a protocol for this connection, the loop would never look
        # at its listening socket again.
        try:
            self._take_waiting()
        except Exception as error:
            self._report(error)
        try:
            return self._protocol(None)
        except Exception as error:
            self._report(error)
            return _Ending()

    def _report(self, error: Exception) -> None:
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
    """Run `coming` to its end without a task. It only waits for a turn of the loop, so nobody needs to cancel it."""
    try:
        awaited = coming.send(None)
    except StopIteration:
        return
    awaited.add_done_callback(partial(_step, coming))


# Hot requests that start in one turn of the event loop: a millisecond or two.
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
        hot: Mapping[tuple[bytes, bytes], HotEntry] | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Serve `app`, and before it the table of hot paths, by method and target.

        `memory` counts bodies and replies.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._edge = edge
        self._backlog = backlog
        self._config = uvicorn.Config(
            app,
            http=uvicorn_protocol(edge),  # type: ignore[arg-type] # it is only called
            ws="none",
            lifespan="off",
            access_log=access_log,
            log_config=None,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        self._service = Service(
            app, self._loop, TurnLimit(_STARTED_PER_TURN), hot or {}, _scheme_of(self._config), access_log, memory
        )
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Accept connections from now on."""
        self._config.load()
        connect = partial(EdgeConnection, self._service, self._edge)
        self._acceptor = Acceptor(self._listener, connect, self._backlog, self._config.ssl)
        await self._acceptor.start()

    def stop_accepting(self) -> None:
        """Leave the queue of the socket to the next worker of the slot; the supervisor keeps it open."""
        if self._acceptor is not None:
            self._acceptor.stop()

    async def stop(self, deadline_s: float) -> None:
        """Answer what is being answered, close what is idle; cut the rest at the deadline."""
        self.stop_accepting()
        self._edge.start_draining()
        await asyncio.sleep(_LAST_REQUESTS_S)
        for connection in list(self._service.connections):
            connection.shutdown()
        await self._finish_within(deadline_s)
        for task in list(self._service.tasks):
            task.cancel()
        await asyncio.gather(*self._service.tasks, return_exceptions=True)
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._close_the_rest()

    async def _close_the_rest(self) -> None:
        """Give last bytes and TLS' goodbyes a moment; the loop could not be closed over one that never comes."""
        if self._edge.open:
            await asyncio.sleep(_GOODBYES_S)
        for connection in list(self._edge.open):
            connection.linger_overdue()

    async def _finish_within(self, deadline_s: float) -> None:
        ends_s = self._loop.time() + deadline_s
        while self._service.turns or self._service.tasks:
            # What still waits for its turn has no task yet; a turn later some more have.
            await asyncio.sleep(0)
            tasks = list(self._service.tasks)
            if tasks:
                await asyncio.wait(tasks, timeout=max(ends_s - self._loop.time(), 0.0))
            if self._loop.time() >= ends_s:
                return


def uvicorn_protocol(edge: Edge) -> Callable[..., EdgeConnection]:
    """Return what uvicorn's own server takes as its `http` setting. Its application serves all paths."""

    def make(
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> EdgeConnection:
        loop = _loop or asyncio.get_running_loop()
        service = Service(config.loaded_app, loop, TurnLimit(_STARTED_PER_TURN), scheme=_scheme_of(config))
        # uvicorn waits for these when it stops.
        service.connections, service.tasks = server_state.connections, server_state.tasks
        return EdgeConnection(service, edge)

    return make


def _scheme_of(config: uvicorn.Config) -> str:
    return "https" if config.is_ssl else "http"
