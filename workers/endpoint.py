"""From ASGI to a handler and back: who calls, the whole body, one reply, and whether it was delivered.

A handler is `async (Request) -> Reply` and raises `GatewayError` for everything else; this is the ASGI boundary, the
one place that catches all exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from shared.core.errors import ClientGone, GatewayError, Overloaded, ReplyBroken
from shared.core.frozen import Frozen
from shared.core.trace import traceparent_of
from workers import responses
from workers.http.body import read_body
from workers.http.delivery import deliver, send_whole
from workers.http.watch import connection
from workers.keyring import ANONYMOUS
from workers.responses import Streamed

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from shared.counters import Counters
    from workers.http.watch import Connection
    from workers.keyring import Caller, Keyring
    from workers.responses import Reply
    from workers.turns import Turns

log = logging.getLogger(__name__)


class Request(Frozen, frozen=True):
    """`body` is whole and within its limit, or still to be had from `receive` where an endpoint leaves it there;
    `path` are the parameters of the route's path.
    """

    caller: Caller
    body: bytes
    accept: bytes | None
    connection: Connection
    path: dict[str, str]
    scope: Scope
    receive: Receive
    trace: str | None = None  # the caller's traceparent, if it is one


Handler = Callable[[Request], Awaitable["Reply | Streamed"]]


class Endpoint:
    """A handler as an ASGI application. Starlette routes to it as it would to any mounted app."""

    def __init__(
        self,
        handler: Handler,
        keyring: Callable[[], Keyring],
        counters: Counters,
        max_body_bytes: Callable[[], int],
        *,
        public: bool = False,
        streamed: bool = False,
        turns: Turns | None = None,
    ) -> None:
        """`streamed`: the handler takes the body as it comes. `turns`: requests come in crowds, and wait for theirs."""
        self._handler = handler
        self._keyring = keyring
        self._counters = counters
        self._max_body_bytes = max_body_bytes
        self._public = public
        self._streamed = streamed
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._counters.http_requests += 1
        try:
            reply = await self._reply(scope, receive)
            if isinstance(reply, Streamed):
                await self._run(reply, send)
                return
        except ClientGone:
            self._counters.http_client_errors += 1
            log.debug("request was cut off", extra={"path": scope["path"]})
            return
        except ReplyBroken as error:
            self._counters.http_server_errors += 1
            log.debug("reply was cut off", extra={"path": scope["path"], "error": str(error)})
            await connection(scope).cut()
            return
        except GatewayError as error:
            if isinstance(error, Overloaded) and error.reason == "upstream":
                self._counters.rejected_upstream += 1
            reply = self._refusal(error)
        except Exception as error:
            self._counters.rejected_unexpected += 1
            log.exception("request failed", extra={"path": scope["path"]})
            reply = self._refusal(error)
        await self._send(scope, send, reply)

    async def _reply(self, scope: Scope, receive: Receive) -> Reply | Streamed:
        headers = dict(scope["headers"])
        # Before the body is read: a stranger cannot make us hold bytes.
        caller = ANONYMOUS if self._public else self._keyring().identify(_text(self._api_key(headers)))
        if self._turns is not None:
            await self._turns.take(caller.digest)
        body = b"" if self._streamed else await read_body(headers, receive, self._max_body_bytes())
        path, trace = scope.get("path_params", {}), traceparent_of(headers.get(b"traceparent"))
        accept = headers.get(b"accept")
        return await self._handler(Request(caller, body, accept, connection(scope), path, scope, receive, trace))

    async def _run(self, reply: Streamed, send: Send) -> None:
        """Another server's status is told once its reply is over: one that breaks off is counted as such."""
        status = 200

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await reply.run(watched)
        self._counters.answered(status)

    async def _send(self, scope: Scope, send: Send, reply: Reply) -> None:
        self._counters.answered(reply.status)
        headers = [(b"content-type", reply.content_type)]
        if reply.on_delivered is None:
            await send_whole(scope, send, reply.status, headers, reply.body)
        elif await deliver(scope, send, reply.status, headers, reply.body):
            reply.on_delivered()

    def _api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Where this API's clients put it; names are in lower case."""
        return headers.get(b"x-api-key")

    def _refusal(self, error: Exception) -> Reply:
        return responses.refusal(error)


class OpenAiEndpoint(Endpoint):
    """The same for OpenAI's clients: a bearer token is the key, and errors have their form."""

    def _api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else super()._api_key(headers)

    def _refusal(self, error: Exception) -> Reply:
        return responses.openai_refusal(error)


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value is not None else None
